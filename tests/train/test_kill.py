"""Training killed by the system, at seeded moments: nothing is lost but time.

    .venv/bin/pytest tests/train/test_kill.py

SIGKILL runs no handler and flushes no buffer. Wherever it falls, the same command ends with the
weights, optimizer and log of a run that was left alone, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

import training
from draftsmith.drafters import storage
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint
from draftsmith.train.journal import read_metrics
from draftsmith.train.samples import store
from training import World, differences

pytestmark = pytest.mark.slow

STEPS = 9
SAVE_EVERY = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def whole(world: World) -> Path:
    """The run that was left alone."""
    path = world.recipe("whole", steps=STEPS, save_every=SAVE_EVERY)
    process = training.fork(path)
    process.join()
    assert process.exitcode == 0
    return world.folder("whole")


def loadable(run: Path, target: Target) -> None:
    """Every checkpoint that is listed is whole."""
    for step in checkpoint.steps(run):
        folder = run / f"checkpoint-{step}"
        storage.load(folder, target)
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=False)
        assert state["step"] == step


def again(path: Path, run: Path, whole: Path, target: Target) -> None:
    """The same command, to the end."""
    loadable(run, target)
    process = training.fork(path)
    process.join()
    assert process.exitcode == 0
    assert checkpoint.steps(run)[-1] == STEPS
    loadable(run, target)
    assert differences(whole, run, STEPS) == []
    assert os.readlink(whole / "best") == os.readlink(run / "best")


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_between_two_checkpoints(world: World, whole: Path, seed: int) -> None:
    """At a random moment after a random checkpoint: in a step, a replay, or the next write."""
    draw = random.Random(seed)
    after, delay = draw.choice([2, 4, 6]), draw.uniform(0.0, 0.2)
    name = f"between-{seed}"
    path = world.recipe(name, steps=STEPS, save_every=SAVE_EVERY)
    run = world.folder(name)

    def ready() -> bool:
        if not (run / f"checkpoint-{after}").exists():
            return False
        time.sleep(delay)
        return True

    training.kill_when(path, ready, training.slowed)
    assert after <= checkpoint.steps(run)[-1] < STEPS
    again(path, run, whole, Target.load(str(world.target)))


@pytest.mark.parametrize("seed", [2, 3])
def test_killed_while_a_checkpoint_is_written(world: World, whole: Path, seed: int) -> None:
    """Some of its files are there, one of them half: it is not listed, and does not get in the way
    of the run that writes it again."""
    draw = random.Random(seed)
    step = draw.choice([2, 6])
    wanted = ["model.safetensors", "state.pt"][seed % 2]
    name = f"writing-{seed}"
    path = world.recipe(name, steps=STEPS, save_every=SAVE_EVERY)
    run = world.folder(name)
    scratch = run / f".writing-{step}"
    training.kill_when(path, lambda: (scratch / wanted).exists(), training.slowed)
    assert scratch.is_dir(), "killed in the middle of the write"
    assert checkpoint.steps(run) == list(range(SAVE_EVERY, step, SAVE_EVERY))
    again(path, run, whole, Target.load(str(world.target)))
    assert not list(run.glob(".writing-*"))


def test_killed_by_a_real_command(world: World, whole: Path) -> None:
    """As a user has it: `python -m draftsmith.train`, nothing patched, killed twice."""
    path = world.recipe("plain", steps=STEPS, save_every=SAVE_EVERY)
    run = world.folder("plain")
    draw = random.Random(4)
    for after in sorted(draw.sample([2, 4, 6], 2)):
        process = subprocess.Popen(
            training.command(path), cwd=world.root, stderr=subprocess.DEVNULL
        )
        while not (run / f"checkpoint-{after}").exists():
            assert process.poll() is None
            time.sleep(1e-3)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    again(path, run, whole, Target.load(str(world.target)))


def test_killed_before_the_first_checkpoint(world: World, whole: Path) -> None:
    """What the log already held is written anew, once."""
    path = world.recipe("early", steps=STEPS, save_every=SAVE_EVERY)
    run = world.folder("early")
    training.kill_when(
        path, lambda: any(m["kind"] == "replay" for m in read_metrics(run)), training.slowed
    )
    assert not checkpoint.steps(run)
    again(path, run, whole, Target.load(str(world.target)))
    assert [m["step"] for m in read_metrics(run) if m["kind"] == "start"] == [0]


def test_killed_while_sampling(world: World, whole: Path) -> None:
    """A recipe that asks its prompts first: the answers are the same, none twice, none missing."""
    changes: dict[str, Any] = {"samples": None, "prompts": str(world.prompts), "max_new_tokens": 24}
    path = world.recipe("sampling", steps=STEPS, save_every=SAVE_EVERY, **changes)
    run = world.folder("sampling")
    parts = run / "samples" / store.PARTS
    training.kill_when(path, lambda: parts.is_dir() and any(parts.iterdir()), training.slowed)
    process = training.fork(path)
    process.join()
    assert process.exitcode == 0
    assert differences(whole, run, STEPS) == []


# ---------------------------------------------------------------- planted faults


def test_a_checkpoint_written_in_place_is_caught(world: World, whole: Path) -> None:
    """Planted fault: without scratch folder and rename, the check above finds a torn checkpoint."""
    path = world.recipe("in-place", steps=STEPS, save_every=SAVE_EVERY)
    run = world.folder("in-place")
    training.kill_when(
        path, lambda: (run / "checkpoint-2" / "state.pt").exists(), training.written_in_place
    )
    target = Target.load(str(world.target))
    storage.load(run / "checkpoint-2", target)  # which was whole
    with pytest.raises((EOFError, RuntimeError, UnpicklingError)):  # torch.load of half a file
        loadable(run, target)
