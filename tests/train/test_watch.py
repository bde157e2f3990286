"""Curriculum, warm start and watch-dogs of a run, on a tiny target."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

pytest.importorskip("datasets")

import training
from draftsmith.drafters import foreign
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint, watch
from draftsmith.train.data.sources import read_prompts
from draftsmith.train.journal import Journal
from draftsmith.train.learner import Learner
from draftsmith.train.loop import Run
from draftsmith.train.recipe import load
from draftsmith.train.run import main
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.samples import Samples
from training import World, differences, metrics


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("watched"))


def error(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """The one line that a run of a recipe ends with."""
    assert main([str(path)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss": "lkk"}, "loss: no 'lkk'; did you mean lk?"),
    ({"loss": []}, "loss: is an empty list"),
    ({"loss": ["kl", "lk"]}, "switch_alpha: 0 thresholds for 2 losses"),
    ({"loss": ["kl", "lk"], "switch_alpha": [1.2]}, "switch_alpha: 1.2 can never be met"),
    (
        {"loss": ["kl", "lk", "expected"], "switch_alpha": [0.5, 0.4]},
        "switch_alpha: [0.5, 0.4] must ascend",
    ),
    ({"eta": -1}, "eta: Input should be greater than or equal to 0"),
    ({"depth_weights": [0, 0, 0]}, "depth_weights: [0.0, 0.0, 0.0] sum to 0"),
    ({"depth_weights": [1, -1, 2]}, "depth_weights: [1.0, -1.0, 2.0] sum to 2"),
    ({"depth_weights": [1, 1]}, "depth_weights: 2 numbers for depths: 3"),
    (
        {"drafter": "small", "depth_weights": [0, 1, 1]},
        "depth_weights: one row of a small drafter serves every depth, and kl counts it at the",
    ),
    ({"loss": "rkl", "temperature": 0}, "loss: rkl is infinite at temperature 0"),
    ({"top_p": 0}, "top_p: 0.0 is outside (0, 1]"),
]


@pytest.mark.parametrize(("keys", "line"), WRONG)
def test_wrong_recipes(world: World, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(world.recipe("wrong", **keys))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_for_this_target(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """What only the target and its answers can tell: one line each, and no step was made."""
    keys = {"loss": ["kl", "lk"], "switch_alpha": [0.99], "draft_vocab": 4}
    line = error(capsys, world.recipe("never", **keys))
    assert "switch_alpha: 0.99 can never be met: the draft vocabulary covers" in line
    line = error(capsys, world.recipe("large", draft_vocab=4096))
    assert "draft_vocab: 4096 is more than the target's" in line
    assert not checkpoint.steps(world.folder("never")) + checkpoint.steps(world.folder("large"))


CURRICULUM = {"loss": ["kl", "lk", "replay_alpha"], "switch_alpha": [0.05, 0.06], "steps": 8}


def test_curriculum_is_logged_and_resumes(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both switches stand in the log; a run stopped between goes on bit for bit."""
    assert main([str(world.recipe("whole", **CURRICULUM))]) == 0
    said = capsys.readouterr().err
    assert ": lk from here on" in said and ": replay_alpha from here on" in said
    switches = [m for m in metrics(world.folder("whole")) if m["kind"] == "switch"]
    assert [m["loss"] for m in switches] == ["lk", "replay_alpha"]
    path = world.recipe("parts", **CURRICULUM)
    with monkeypatch.context() as patch:
        training.stop_after(patch, 5)
        assert main([str(path)]) == 143
    assert main([str(path)]) == 0
    assert not differences(world.folder("whole"), world.folder("parts"), 8)


def test_start_from_a_drafter(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with `start` begins with those weights, and refuses other settings."""
    assert main([str(world.recipe("base", steps=4))]) == 0
    best = world.folder("base") / "best"
    assert main([str(world.recipe("branch", steps=1, start=str(best)))]) == 0
    taus = {
        name: [m["tau"] for m in metrics(world.folder(name)) if m["kind"] == "replay"]
        for name in ("base", "branch")
    }
    assert taus["branch"][0] == taus["base"][-1]
    line = error(capsys, world.recipe("other", start=str(best), draft_vocab=16))
    assert "was made with draft_vocab: 32, the recipe has 16" in line
    line = error(capsys, world.recipe("small", "small", start=str(best)))
    assert "holds a drafter of family eagle" in line


def check_masters(world: World, drafter: str, lora: int | None) -> None:
    """Beside a bf16 target, as on a GPU, a run goes on from what `start` stores, bit for bit, and
    a step that bf16 would round away moves it; the target stays as it is."""
    name = f"masters-{drafter}"
    if not world.folder(name).exists():
        assert main([str(world.recipe(name, drafter, steps=1))]) == 0
    best = world.folder(name) / "best"
    path = world.recipe("tuned", drafter, start=str(best), lora=lora, lr=1e-6, warmup=0)
    target = Target.load(str(world.target), dtype=torch.bfloat16)
    samples = Samples.open(world.samples, target, audit=0)
    made = Learner(load(path), target, samples, Accelerator(cpu=True))
    stored = training.weights(best.parent, 1)
    for key, tensor in (made.lora.merged() if made.lora else made.drafter.weights()).items():
        assert tensor.dtype == stored[key].dtype and torch.equal(tensor, stored[key]), key
    assert {p.dtype for p in made.trained} == {torch.float32}
    before = [p.clone() for p in made.trained]
    made.advance(made.states)
    moved = [(p != q).float().mean() for p, q in zip(made.trained, before, strict=True)]
    assert sum(share > 0.5 for share in moved) >= len(moved) / (2 if lora else 1)
    assert target.dtype == torch.bfloat16


MASTERS = [("eagle", None), ("eagle", 2), ("small", None)]


@pytest.mark.parametrize(("drafter", "lora"), MASTERS)
def test_a_start_is_trained_in_fp32(
    world: World, monkeypatch: pytest.MonkeyPatch, drafter: str, lora: int | None
) -> None:
    """Planted fault: it is taken as it is served, in the target's dtype."""
    bf16 = partial(torch.autocast, "cpu", torch.bfloat16)
    monkeypatch.setattr(Accelerator, "autocast", lambda self: bf16())
    check_masters(world, drafter, lora)
    read = foreign.read
    monkeypatch.setattr(foreign, "read", lambda path, of: read(path, of).to(of.dtype))
    with pytest.raises(AssertionError):
        check_masters(world, drafter, lora)


# ---------------------------------------------------------------- watch-dogs


def spoilt(what: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a step on a NaN stands in the features, the weights, or arrives as a gradient."""
    micro = Learner._micro

    def wrong(self: Learner, batch: Any, *args: Any) -> Any:
        now = self.step + 1 == step
        if now and what == "weight":
            with torch.no_grad():
                self.drafter.get_parameter("mlp.up_proj.weight")[0, 0] = float("nan")
        if now and what == "feature":
            batch.features["2"][0, 0, 0] = float("inf")
        sums = micro(self, batch, *args)
        if now and what == "gradient":
            grad = self.drafter.get_parameter("fc.weight").grad
            assert grad is not None
            grad[0, 0] = float("nan")
        return sums

    monkeypatch.setattr(Learner, "_micro", wrong)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("weight", "mlp.up_proj.weight"),
        ("feature", "feature 2 of the target"),
        ("gradient", "the gradient of fc.weight"),
    ],
)
def test_the_first_bad_tensor_is_named(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    named: str,
) -> None:
    """With its step; the checkpoint before it stays as it was, and no other is written."""
    spoilt(what, 3, monkeypatch)
    name = f"nan-{what}"
    line = error(capsys, world.recipe(name, save_every=2, steps=4))
    assert line.startswith(f"error: step 3: {named} is not finite")
    folder = world.folder(name)
    assert checkpoint.steps(folder) == [2]
    assert all(bool(t.isfinite().all()) for t in training.weights(folder, 2).values())


def test_unmoved_parameters_and_norms(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parameter cut off from the loss is named; each part's gradient norm is logged."""
    forward: Callable[..., Any] = torch.nn.Linear.forward

    def cut(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        return out.detach() if getattr(self, "dead", False) else out

    make = Learner.__init__

    def made(self: Learner, *args: Any) -> None:
        make(self, *args)
        self.drafter.get_submodule("mlp.gate_proj").dead = True  # type: ignore[assignment]

    monkeypatch.setattr(torch.nn.Linear, "forward", cut)
    monkeypatch.setattr(Learner, "__init__", made)
    assert main([str(world.recipe("still", steps=3, log_every=1))]) == 0
    assert "warning: never moved so far: mlp.gate_proj.weight" in capsys.readouterr().err
    for line in metrics(world.folder("still")):
        if line["kind"] == "train":
            parts = line["grad_norms"]
            assert {"fc", "self_attn", "mlp", "norm", "lm_head"} <= parts.keys()
            whole = sum(n * n for n in parts.values()) ** 0.5
            assert line["grad_norm"] == pytest.approx(whole, rel=1e-4)


def test_early_stop(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tau falls while the loss does: the run ends, the best is kept, and stays ended."""
    write, taus = Journal.write, iter([1.0, 1.3, 1.2, 1.1, 1.0])

    def falling(self: Journal, **values: Any) -> None:
        if values["kind"] == "replay":
            values["tau"] = next(taus)
        write(self, **values)

    monkeypatch.setattr(Journal, "write", falling)
    path = world.recipe("early", steps=8, save_every=1, log_every=1, patience=2)
    assert main([str(path)]) == 0
    assert "replay tau fell from 1.300 to 1.100 over 2 replays while the loss went from" in (
        capsys.readouterr().err
    )
    folder = world.folder("early")
    assert checkpoint.steps(folder)[-1] == 3
    assert (folder / "best").resolve().name == "checkpoint-1"
    assert main([str(path)]) == 0
    assert checkpoint.steps(folder)[-1] == 3


def test_a_deleted_checkpoint_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log still holds its replay, until training goes on: it is neither the best one, nor a
    reason to end."""
    write, taus = Journal.write, iter([1.0, 1.3, 1.2, 1.1, 1.4, 1.1])

    def planted(self: Journal, **values: Any) -> None:
        if values["kind"] == "replay":
            values["tau"] = next(taus)
        write(self, **values)

    monkeypatch.setattr(Journal, "write", planted)
    path = world.recipe("deleted", steps=4, save_every=1, patience=2)
    assert main([str(path)]) == 0
    folder = world.folder("deleted")
    assert checkpoint.steps(folder) == [1, 2, 3]
    shutil.rmtree(folder / "checkpoint-3")  # it ended the run
    assert main([str(path)]) == 0
    assert checkpoint.steps(folder) == [1, 2, 3, 4]
    assert (folder / "best").resolve().name == "checkpoint-3"
    for step in (3, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    target = Target.load(str(world.target))
    samples = Samples.open(world.samples, target, audit=0)
    again = Run(Learner(load(path), target, samples, Accelerator()))
    assert again._resume() and again.learner.step == 2
    again._mark_best()
    assert (folder / "best").resolve().name == "checkpoint-1" and not again.journal.ended()


def test_held_out_texts_must_take_a_verify_pass(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers of one token have no tau, and the first checkpoint would pass for the best."""
    target, folder = Target.load(str(world.target)), world.root / "short"
    generate(target, read_prompts(world.prompts), Sampler(), 1, folder)
    line = error(capsys, world.recipe("short", samples=str(folder)))
    assert "heldout: no answer of the 5 held-out conversations has two tokens" in line


def test_patience_counts_from_the_best() -> None:
    taus = [1.0, 1.2, 1.1, 1.3, 1.25]
    lines = [{"kind": "replay", "step": i, "tau": t} for i, t in enumerate(taus)]
    assert watch.falling(lines, 0) is None and watch.falling(lines, 2) is None
    assert watch.falling([*lines, {"kind": "replay", "step": 5, "tau": 1.3}], 2)
