"""Training runs on a tiny target: what they write, how they stop, and that they go on bit for bit.

    .venv/bin/pytest tests/train/test_train.py

A run that resumes almost right (a cursor off by one, a schedule restarted, half an accumulation
window) trains on without a sign of it, so runs are compared as bits, not as curves.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("datasets")

import training
from draftsmith.drafters import storage
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import ReplayResult, text_ratios
from draftsmith.eval.servers.agreement import expected_rounds
from draftsmith.train import checkpoint, journal, learner, loop, recipe
from draftsmith.train.learner import Learner
from draftsmith.train.loop import Run
from draftsmith.train.objective.weights import Sums
from draftsmith.train.run import main
from draftsmith.train.samples.packing import Cursor, Stream
from draftsmith.train.samples.samples import Samples
from training import World, differences, metrics

STEPS = 9


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def trained(world: World, name: str, drafter: str = "eagle", **changes: Any) -> Path:
    """Runs a recipe to its end in this process, once: the run's folder."""
    folder = world.folder(name)
    if not folder.exists():
        assert main([str(world.recipe(name, drafter, **changes))]) == 0
    return folder


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes, as on a disk that is full by then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------- a run


@pytest.mark.parametrize(
    "drafter", ["eagle", "hydra", "mtp", "dflash", "dspark", "peagle", "small"]
)
def test_a_run_trains(world: World, drafter: str) -> None:
    """The loss falls, replay tau rises above step 0, and the folder holds what is promised."""
    run = trained(world, f"long-{drafter}", drafter, steps=24, save_every=8)
    log = metrics(run)
    losses = [m["loss"] for m in log if m["kind"] == "train"]
    taus = {m["step"]: m["tau"] for m in log if m["kind"] == "replay"}
    assert losses[-1] < 0.7 * losses[0]
    assert list(taus) == [0, 8, 16, 24] and max(taus.values()) > taus[0] + 0.05
    assert [m["step"] for m in log if m["kind"] == "train"] == list(range(3, 25, 3))
    assert checkpoint.steps(run) == [8, 16, 24]
    for step in (8, 16, 24):
        files = {p.name for p in (run / f"checkpoint-{step}").iterdir()}
        assert files == {"config.json", "model.safetensors", "state.pt"}
    best = max((s for s in taus if s), key=lambda s: taus[s])
    assert (run / "best").is_symlink()
    assert os.readlink(run / "best") == f"checkpoint-{best}", "relative: a run can be moved"
    start = journal.read_metrics(run)[0]
    assert start["kind"] == "start" and start["seed"] == 0 and start["versions"]["torch"]
    for m in log:
        assert m["tokens"] >= 0
        if m["kind"] == "replay":
            assert m["tau_ci"][0] <= m["tau"] <= m["tau_ci"][1]
            assert len(m["alpha"]) == m["k"] == 3 and list(m["tau_by_k"]) == ["1", "2", "3"]


def test_eagle1_trains(world: World) -> None:
    """Its loss, features included, falls; a tiny target's states are too random to gain tau by."""
    losses = [
        m["loss"] for m in metrics(trained(world, "short-eagle1", "eagle1")) if m["kind"] == "train"
    ]
    assert losses[-1] < 0.95 * losses[0]


def test_the_best_checkpoint_serves_what_was_measured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`best` loads as a drafter, and replays to the tau that chose it."""
    run = trained(world, "long-eagle", steps=24, save_every=8)
    target = Target.load(str(world.target))
    drafter = storage.load(run / "best", target)
    chosen = recipe.load(run / "recipe.yaml")
    made = Learner(chosen, target, Samples.open(world.samples, target), _accelerator())
    made.drafter = drafter
    again = Run(made)
    again._evaluate()
    taus = [m["tau"] for m in metrics(run) if m["kind"] == "replay" and m["step"]]
    assert again.journal.tau == max(taus)
    # What it yields where q's argmax is drafted: the walk of such a server through the same text.
    [line] = [m for m in metrics(run) if m["kind"] == "replay" and m["tau"] == max(taus)]
    at_zero = [
        replace(batch, sampler=Sampler(0.0)) for batch in made.read_heldout(made.replay_states)
    ]
    walked = [
        table for batch in at_zero for table in text_ratios(drafter, batch, 3) if table.tokens
    ]
    passes = sum(expected_rounds(table, 3, shortens=False).passes for table in walked)
    tau = sum(table.tokens for table in walked) / passes
    assert line["tau_greedy_by_k"]["3"] == pytest.approx(tau) != pytest.approx(line["tau"])
    # However they are batched: as given, one at a time.
    monkeypatch.setattr(learner, "alone", lambda samples, indices, size: [[[i]] for i in indices])
    again._evaluate()
    assert again.journal.tau == pytest.approx(max(taus), rel=1e-6)


@pytest.mark.parametrize("cut", ["model.safetensors", "state.pt"])
def test_a_full_disk(world: World, capsys: pytest.CaptureFixture[str], cut: str) -> None:
    """One line, nothing half written; with room the same command goes on."""
    changes = {"steps": 4, "save_every": 2}
    whole = trained(world, "roomy", **changes)
    path, folder = world.recipe(f"full-{cut}", **changes), world.folder(f"full-{cut}")
    capsys.readouterr()
    with largest_file((whole / "checkpoint-2" / cut).stat().st_size - 1):
        assert main([str(path)]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"error: {folder / 'checkpoint-2'}: cannot be written")
    assert "run the same command again" in said
    assert not checkpoint.steps(folder) and not list(folder.glob(".writing-*"))
    assert main([str(path)]) == 0
    assert differences(whole, folder, 4) == []


def test_rows_of_a_step_are_alike_in_a_micro_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less padding, the same losses and tau to rounding as in the order of the stream."""
    collate, widths = learner.collate, []

    def counted(samples: Any, rows: list[list[int]], length: int) -> Any:
        batch = collate(samples, rows, length)
        widths.append((int((batch.segment >= 0).sum()), batch.segment.numel()))
        return batch

    def run(name: str) -> tuple[float, list[float]]:
        widths.clear()
        log = metrics(trained(world, name, accumulation=4, steps=4, log_every=1, save_every=4))
        padded = 1 - sum(real for real, _ in widths) / sum(size for _, size in widths)
        return padded, [m.get("loss", m.get("tau")) for m in log]

    monkeypatch.setattr(learner, "collate", counted)
    alike, losses = run("alike")
    monkeypatch.setattr(Stream, "tokens", lambda self, row: 0)
    given, same = run("as-given")
    assert alike < 0.6 * given
    assert losses == pytest.approx(same, rel=1e-4)


def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator()


def test_best_is_chosen_by_tau(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the loss, which falls on, nor the last; the first one on ties; never step 0."""
    planted = iter([9.0, 1.5, 1.9, 1.9, 1.2])
    whole = loop.replay_samplers

    def replay_samplers(*args: Any, **kwargs: Any) -> Any:
        found = whole(*args, **kwargs)
        found[0][3].__class__ = type("Planted", (ReplayResult,), {"tau": next(planted)})
        return found

    monkeypatch.setattr(loop, "replay_samplers", replay_samplers)
    run = trained(world, "planted", steps=8, save_every=2, log_every=1)
    losses = [m["loss"] for m in metrics(run) if m["kind"] == "train"]
    assert losses[-1] < losses[3]
    assert os.readlink(run / "best") == "checkpoint-4"


def test_the_recipe_is_kept_with_the_run(world: World) -> None:
    run = trained(world, "short-eagle")
    read = recipe.load(run / "recipe.yaml")
    assert read == recipe.load(world.root / "short-eagle.yaml")
    assert yaml.safe_load((run / "recipe.yaml").read_text())["decay"] == 0.8, "defaults are there"


def test_samples_are_made_first_where_none_are_given(world: World) -> None:
    """A recipe without samples= asks its prompts, in its run's folder, and then trains."""
    run = trained(
        world, "asks", steps=2, samples=None, prompts=str(world.prompts), max_new_tokens=12,
    )  # fmt: skip
    assert checkpoint.steps(run) == [2] and (run / "samples" / "manifest.json").is_file()


def test_the_target_is_never_trained(world: World) -> None:
    """Shared embeddings are the target's own tensors: an optimizer must not reach them."""
    target = Target.load(str(world.target))
    before = {n: p.clone() for n, p in target.named_parameters()}
    chosen = recipe.load(world.recipe("frozen", "small", steps=2))
    samples = Samples.open(world.samples, target)
    made = Learner(chosen, target, samples, _accelerator())
    with checkpoint.claimed(chosen):
        assert Run(made).run() == 0
    assert all(torch.equal(p, before[n]) for n, p in target.named_parameters())
    assert not {id(p) for p in made.trained} & {id(p) for p in target.parameters()}


def apart(one: Path, two: Path) -> float:
    """The largest distance of two runs' final weights."""
    a, b = training.weights(one, STEPS), training.weights(two, STEPS)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_accumulation_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows a step, in one micro-batch or in four of very different numbers of answer tokens.

    Planted fault: a mean of the micro-batches' means, the usual way, ends elsewhere.
    """
    whole = trained(world, "at-once", rows=4, accumulation=1)
    assert apart(whole, trained(world, "one-by-one", rows=1, accumulation=4)) < 1e-3

    def mean_of_means(self: Learner, batch: Any, alignment: Any, *rest: Any) -> Any:
        own = learner.denominator(batch, alignment, self.objective)
        return micro(self, batch, alignment, *rest[:-1], max(own, 1.0) * self.recipe.accumulation)

    micro = Learner._micro
    monkeypatch.setattr(Learner, "_micro", mean_of_means)
    assert apart(whole, trained(world, "means", rows=1, accumulation=4)) > 1e-2


def test_noise_goes_by_the_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by how a step was cut. Planted fault: numbers that go by the place in a micro-batch."""

    def cut(name: str, rows: int) -> Path:
        return trained(world, name, "eagle1", rows=rows, accumulation=4 // rows, warmup=0)

    whole = cut("noise-at-once", 4)
    assert apart(whole, cut("noise-one-by-one", 1)) < 1e-3
    noise = Learner._noise
    monkeypatch.setattr(Learner, "_noise", lambda self, places: noise(self, range(len(places))))
    assert apart(whole, cut("noise-by-batch", 1)) > 5e-3


def test_tokens_learned_are_counted(world: World) -> None:
    """Positions with a token to predict behind them, whatever they weigh; by hand."""
    target = Target.load(str(world.target))
    samples = Samples.open(world.samples, target, audit=0)
    learn, _ = samples.split(5, 0)
    rows, _ = Stream(samples, learn, 64, 0).take(Cursor(), 8)
    wanted = 0
    for sample in (samples[index] for row in rows for index in row):
        made = sample.made[:64]
        wanted += sum(a and b for a, b in zip(made, made[1:], strict=False))
    weights: dict[str, Any] = {
        "plain": {}, "by-text": {"per": "sequence"}, "late": {"depth_weights": [0, 0.5, 1]},
    }  # fmt: skip
    for name, changes in weights.items():
        run = trained(world, f"counted-{name}", steps=2, save_every=2, log_every=1, **changes)
        assert metrics(run)[-1]["tokens"] == wanted > 0, name


def test_heldout_texts_are_read_batch_by_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch's states are alive when the next one is read."""
    target = Target.load(str(world.target))
    chosen = recipe.load(world.recipe("batches", heldout=9))
    samples = Samples.open(world.samples, target, audit=0)
    run = Run(Learner(chosen, target, samples, _accelerator()))
    read, seen = Target.read, []

    def watched(self: Target, batch: Any, *rest: Any) -> Any:
        assert all(before() is None for before in seen)
        seen.append(weakref.ref(batch))
        return read(self, batch, *rest)

    monkeypatch.setattr(Target, "read", watched)
    run._evaluate()
    assert len(seen) == 3


# ---------------------------------------------------------------- stopping and going on


@pytest.mark.parametrize(
    ("drafter", "step"), [*product(("eagle", "small"), (1, 4, 5, 9)), ("eagle1", 5)]
)
def test_resume_is_bit_exact(
    world: World, monkeypatch: pytest.MonkeyPatch, drafter: str, step: int
) -> None:
    """Stopped in the first step, at a checkpoint's own step, between two (and inside a window of
    the log), and in the last one: weights, optimizer, schedule, generators, cursor and the log
    are those of the run that was left alone. Accumulation is 2; step 5 crosses an epoch's end.
    eagle1 draws noise on features.
    """
    whole = trained(world, f"short-{drafter}", drafter)
    name = f"stopped-{drafter}-{step}"
    path = world.recipe(name, drafter)
    with monkeypatch.context() as patch:
        training.stop_after(patch, step)
        assert main([str(path)]) == (0 if step == STEPS else loop.STOPPED)
    run = world.folder(name)
    assert checkpoint.steps(run)[-1] == step
    assert main([str(path)]) == 0
    assert differences(whole, run, STEPS) == []
    assert os.readlink(whole / "best") == os.readlink(run / "best")


def test_the_run_crosses_an_epoch_between_its_checkpoints(world: World) -> None:
    """What the test above relies on."""
    run = trained(world, "short-eagle")
    first, last = (Cursor(**training.state(run, step)["cursor"]) for step in (4, STEPS))
    assert first.epoch < last.epoch and (first.row or last.row)


@pytest.mark.parametrize("fault", ["cursor", "optimizer", "schedule", "window"])
def test_a_state_that_is_not_restored_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Planted faults: each part of the state, left as a fresh run has it."""
    whole = trained(world, "short-eagle")
    name = f"faulty-{fault}"
    path = world.recipe(name)
    with monkeypatch.context() as patch:
        training.stop_after(patch, 5)
        assert main([str(path)]) == loop.STOPPED
    restore = checkpoint.restore

    def forgetful(folder: Path, step: int) -> dict[str, Any]:
        state = restore(folder, step)
        if fault == "cursor":
            state["cursor"] = vars(Cursor())
        elif fault == "window":
            state["window"] = vars(Sums.zero(3))
        elif fault == "schedule":
            state["schedule"] |= {"last_epoch": 0, "_last_lr": [0.0]}
        else:
            for moments in state["optimizer"]["state"].values():
                moments["exp_avg"].zero_()
        return state

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "restore", forgetful)
        assert main([str(path)]) == 0
    assert differences(whole, world.folder(name), STEPS)


def test_fewer_devices_than_a_checkpoint_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda of, index: given.append((of, index)))
    checkpoint.set_rng_state(checkpoint.rng_state() | {"cuda": ["first", "second"]})
    assert given == [("first", 0)]


def test_a_finished_run_says_so(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """And trains no further: nothing in its folder changes."""
    run = trained(world, "short-eagle")
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != ".lock"}
    capsys.readouterr()
    assert main([str(world.root / "short-eagle.yaml")]) == 0
    said = capsys.readouterr().err
    assert "finished" in said and "best" in said
    after = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != ".lock"}
    assert before == after


def test_a_rerun_gives_the_same_bits(world: World) -> None:
    """Without this, equality after a resume would be luck. Another seed gives others."""
    whole, again = trained(world, "short-eagle"), trained(world, "again")
    assert differences(whole, again, STEPS) == []
    assert differences(whole, trained(world, "seeded", seed=1), STEPS)


@pytest.mark.slow
def test_sigterm_saves_and_exits_143(world: World) -> None:
    """The real command in a process of its own, told to stop by the system."""
    whole = trained(world, "short-eagle")
    path = world.recipe("terminated", steps=STEPS)
    process = subprocess.Popen(
        [*training.command(path)], cwd=world.root, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("step 3/9"):
            process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, "".join(said)
    run = world.folder("terminated")
    done = checkpoint.steps(run)
    assert said[-1].startswith(f"stopped at step {done[-1]}") and 3 <= done[-1] < STEPS
    assert main([str(path)]) == 0
    assert differences(whole, run, STEPS) == []


def test_resume_continues_another_place(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """log_every and where the samples lie may change; what decides the weights may not."""
    path = world.recipe("moved")
    with monkeypatch.context() as patch:
        training.stop_after(patch, 2)
        assert main([str(path)]) == loop.STOPPED
    for change in ("lr=0.1", "depths=2", "seed=3", "taps=[1]", "steps=20"):
        capsys.readouterr()
        assert main([str(path), change]) == 2
        assert change.split("=")[0] in capsys.readouterr().err
    assert main([str(path), "log_every=2"]) == 0


def test_one_process_a_run(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Two terminals, one command: the second would tear the first one's checkpoints."""
    path = world.recipe("twice")
    with checkpoint.claimed(recipe.load(path)):
        assert main([str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "another process" in said and str(world.folder("twice")) in said


# ---------------------------------------------------------------- launchers


@pytest.mark.slow
def test_accelerate_launch(world: World) -> None:
    """The README's command: one process on the CPU, the same weights as in this process."""
    whole = trained(world, "short-eagle")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    path = world.recipe("launched")
    done = training.shell([*launcher, "-m", "draftsmith.train", str(path)], world.root)
    assert done.returncode == 0, done.stderr
    assert differences(whole, world.folder("launched"), STEPS) == []


@pytest.mark.slow
def test_two_processes_share_a_cache(world: World) -> None:
    """Launched by torchrun, they fill and read one feature cache, and train like one process that
    has none (without a cache: test_processes.py)."""
    whole = trained(world, "short-eagle")
    path = world.recipe("pair", rows=1, feature_cache="1GB")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = training.shell(
        [*launcher, "--standalone", "-m", "draftsmith.train", str(path)], world.root
    )
    assert done.returncode == 0, done.stderr
    one, two = (training.weights(run, STEPS) for run in (whole, world.folder("pair")))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3, msg=name)
    for a, b in zip(metrics(whole), metrics(world.folder("pair")), strict=True):
        assert (a["kind"], a["step"], a["tokens"]) == (b["kind"], b["step"], b["tokens"])
        assert b.get("loss", b.get("tau")) == pytest.approx(a.get("loss", a.get("tau")), rel=1e-3)
    first = training.weights(whole, 4)
    assert max(float((first[n] - one[n]).abs().max()) for n in one) > 1e-2, "weights do move"
