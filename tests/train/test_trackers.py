"""Trackers: every one gets the documented keys, and a missing package is one line.

.venv/bin/pytest tests/train/test_trackers.py
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

pytest.importorskip("datasets")

import training
from draftsmith.drafters.target.target import Target
from draftsmith.train import loop, trackers
from draftsmith.train.journal import read_metrics
from draftsmith.train.recipe import load
from draftsmith.train.run import main
from places import RECIPES
from training import World

DEPTHS, K = 2, 3
MODULES = ("fc", "input_layernorm", "hidden_norm", "self_attn", "post_attention_layernorm", "mlp")
MODULES += ("norm", "lm_head")
KEYS = {
    "train": {"loss", "lr", "grad_norm", "tokens_per_s", "step", "tokens", "alpha_0", "alpha_1"}
    | {f"grad_norms_{module}" for module in MODULES},
    "replay": {"tau", "tau_ci_0", "tau_ci_1", "k"}
    | {f"{name}_{k}" for name in ("tau_by_k", "tau_greedy_by_k") for k in (1, 2, 3)}
    | {"alpha_0", "alpha_1", "alpha_2", "seconds", "biased", "step", "tokens"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def recipe(world: World, name: str, trackers: Any) -> Path:
    return world.recipe(name, tracker=trackers, steps=4, depths=DEPTHS, k=K, log_every=2)


def documented() -> set[str]:
    """The keys that the recipes' README names, indices and draft lengths filled in."""
    found: set[str] = set()
    text = (RECIPES / "README.md").read_text().partition("## Trackers")[2].partition("\n## ")[0]
    for kind, name in re.findall(r"\b(train|replay|KIND)/(\w+)", text):
        kinds = ("train", "replay") if kind == "KIND" else (kind,)
        for one in kinds:
            depths = range(DEPTHS if one == "train" else K)
            spots = {"alpha_J": depths, "grad_norms_MODULE": MODULES}
            spots |= {"tau_by_k_K": range(1, 4), "tau_greedy_by_k_K": range(1, 4)}
            stem = name.rpartition("_")[0]
            found |= {f"{one}/{stem}_{j}" for j in spots.get(name, ())} or {f"{one}/{name}"}
    return found | {"replay/tau_ci_1"}


def test_keys_are_those_documented() -> None:
    wanted = {f"{kind}/{name}" for kind, names in KEYS.items() for name in names}
    assert documented() == wanted


def test_flat() -> None:
    values = {"kind": "x", "a": 1, "b": [0.5, None], "c": {"2": 1.5}, "d": None, "e": "text"}
    assert trackers.flat(values) == {"x/a": 1, "x/b_0": 0.5, "x/c_2": 1.5}


def test_tensorboard_holds_the_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of metrics.jsonl, at its step, under the documented keys."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main([str(recipe(world, "board", "tensorboard"))]) == 0
    run = world.folder("board")
    events = EventAccumulator(str(run / trackers.PROJECT))
    events.Reload()
    found = {
        (tag, scalar.step): scalar.value
        for tag in events.Tags()["scalars"]
        for scalar in events.Scalars(tag)
    }
    lines = [m for m in read_metrics(run) if m["kind"] in KEYS]
    wanted = {(key, m["step"]): v for m in lines for key, v in trackers.flat(m).items()}
    assert found.keys() == wanted.keys()
    assert {key for key, _ in found} <= documented()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], float(value), rtol=1e-5, atol=1e-6)
    assert main([str(recipe(world, "board", "none"))]) == 0, "the folder is still the run's"


@pytest.mark.slow
def test_both_at_once(world: World) -> None:
    """wandb without an account or a network, TensorBoard beside it."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    path = recipe(world, "both", ["wandb", "tensorboard"])
    process = training.fork(path, training.offline)
    process.join()
    assert process.exitcode == 0
    (log,) = world.folder("both").rglob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    missing = [key for key in documented() if key.encode() not in content]
    # A value that is None (a depth never reached) is left out.
    assert all(key.startswith("replay/alpha_") for key in missing), missing
    assert list((world.folder("both") / trackers.PROJECT).rglob("events.*"))


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_absent(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear line, before the target is loaded."""
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == name else find(n, *a)
    )
    monkeypatch.setattr(Target, "load", _never)
    assert main([str(recipe(world, f"no-{name}", name))]) == 2
    said = capsys.readouterr().err.strip()
    assert (
        "\n" not in said and said.startswith("error: tracker: ") and f"pip install {name}" in said
    )


def test_wandb_without_a_login(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before hours of answers, not after them."""

    class Error(Exception):
        pass

    def login() -> None:
        raise Error("api_key not configured\n(no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login, Error=Error))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(Target, "load", _never)
    assert main([str(recipe(world, "no-login", "wandb"))]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "(no-tty)" in said and "WANDB_MODE=offline" in said


def test_a_run_that_goes_on_is_one_run_in_wandb(world: World) -> None:
    opened: list[dict[str, Any]] = []
    accelerator: Any = SimpleNamespace(
        is_main_process=True, init_trackers=lambda project, values, own: opened.append(own["wandb"])
    )
    for name in ("resumed", "resumed", "resumed", "another"):
        chosen = load(recipe(world, name, "wandb"))
        chosen.folder.mkdir(parents=True, exist_ok=True)
        trackers.start(accelerator, chosen)
        if len(opened) == 2:  # until then it began anew each time
            (chosen.folder / "checkpoint-4").mkdir()
    anew, first, second, other = (how["id"] for how in opened)
    assert anew != first == second != other and {how["resume"] for how in opened} == {"allow"}


def test_a_stopped_run_closes_its_trackers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else wandb shows it as crashed."""
    pytest.importorskip("tensorboard")
    ends: list[int] = []
    monkeypatch.setattr(Accelerator, "end_training", lambda self: ends.append(len(self.trackers)))
    training.stop_after(monkeypatch, 2)
    assert main([str(recipe(world, "stopped", "tensorboard"))]) == loop.STOPPED
    assert ends == [1]


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a target was loaded")
