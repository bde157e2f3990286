"""LoRA fine-tuning: what is trained, what is stored, and that a run goes on where it stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

import tiny
import training
from draftsmith.drafters import base, storage
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint, loop, lora, recipe
from draftsmith.train.lora import Lora
from draftsmith.train.run import main
from training import World

RANK, STEPS = 2, 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("lora"))
    assert main([str(world.recipe("start", steps=3))]) == 0
    return world


def tuned(world: World, name: str, drafter: str = "eagle", **changes: Any) -> Path:
    start = {"start": str(world.folder("start") / "best")} if drafter == "eagle" else {}
    keys = start | {"lora": RANK, "steps": STEPS, "save_every": 3} | changes
    return world.recipe(name, drafter, **keys)


def run(world: World, name: str, drafter: str = "eagle", **changes: Any) -> Path:
    assert main([str(tuned(world, name, drafter, **changes))]) == 0
    return world.folder(name)


def check_low_rank(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Same names; linears differ by a matrix of rank RANK, all else (heads too) not at all."""
    assert before.keys() == after.keys()
    moved = 0
    for name, old in before.items():
        change = (after[name] - old).double()
        if old.dim() == 2 and not any(part in name for part in ("lm_head", "embed")):
            values = torch.linalg.svdvals(change)
            assert values[RANK] < 1e-5 * max(values[0], 1e-3), name
            moved += bool(values[0] > 1e-6)
        else:
            assert not change.any(), name
    assert moved > 3


def test_eagle(world: World) -> None:
    place = run(world, "eagle")
    before = training.weights(world.folder("start"), 3)
    check_low_rank(before, training.weights(place, STEPS))
    with pytest.raises(AssertionError):  # the fault: all of it trained
        check_low_rank(before, training.weights(run(world, "whole", lora=None), STEPS))


def test_small_layers_of_the_target(world: World) -> None:
    place = run(world, "small", "small")
    target = Target.load(str(world.target))
    config = storage.read_config(place / "best")["config"]
    fresh = base.family("small").create(target, base.family("small").Config(**config))
    check_low_rank(fresh.weights(), training.weights(place, STEPS))


def test_small_checkpoint(world: World) -> None:
    place = run(world, "foreign", "small", layers=None, checkpoint=str(world.target))
    before = dict(Target.load(str(world.target)).hf.named_parameters())
    after = training.weights(place, STEPS)
    check_low_rank({name: before[name.removeprefix("lm.hf.")] for name in after}, after)


def test_what_is_stored_is_what_was_trained(world: World) -> None:
    """The merged drafter proposes by the same law as the one with adapters."""
    target = tiny.target("Llama")
    made = base.family("eagle").create(
        target, base.family("eagle").Config(taps=[1, 2, 4]), torch.ones(target.vocab_size)
    )
    adapters = Lora(made, RANK)
    for name, p in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    plain = base.family("eagle")(target, made.config)
    before = made.state_dict()
    plain.load_state_dict(adapters.merged(), strict=False)
    x = torch.randn(1, 5, plain.fc.in_features)
    torch.testing.assert_close(plain.fc(x), made.fc(x))
    unmerged = {n.replace(".base_layer", ""): t for n, t in before.items()}
    plain.load_state_dict(unmerged, strict=False)
    assert (plain.fc(x) - made.fc(x)).abs().max() > 0.1


def test_it_goes_on_bit_for_bit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(world, "straight")
    with monkeypatch.context() as patch:
        training.stop_after(patch, 4)
        assert main([str(tuned(world, "halves"))]) == loop.STOPPED
    halves = run(world, "halves")
    assert training.differences(whole, halves, STEPS) == []


def test_adapters_forgotten_would_show(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        training.stop_after(patch, 4)
        assert main([str(tuned(world, "forgets"))]) == loop.STOPPED
    monkeypatch.setattr(lora.Lora, "load", lambda self, state: None)
    assert main([str(tuned(world, "forgets"))]) == 2
    assert "is not what these adapters make" in capsys.readouterr().err


def test_another_start_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = world.root / "moving"
    shutil.copytree(world.folder("start") / "checkpoint-3", start)
    with monkeypatch.context() as patch:
        training.stop_after(patch, 4)
        assert main([str(tuned(world, "moved", start=str(start)))]) == loop.STOPPED
    shutil.rmtree(start)
    shutil.copytree(world.folder("eagle") / f"checkpoint-{STEPS}", start)
    assert main([str(tuned(world, "moved", start=str(start)))]) == 2
    assert "put the start that it began with back" in capsys.readouterr().err
    assert checkpoint.steps(world.folder("moved")) == [3, 4]


def test_mistakes_are_told(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lora: adapts a drafter that is trained already"):
        recipe.load(tuned(world, "none", start=None))
    target = tiny.target("Llama")
    cls = base.family("eagle")
    eagle, other = (cls.create(target, cls.Config(taps=[1])) for _ in range(2))
    with pytest.raises(UserError, match="lora: 999 is above"):
        Lora(eagle, 999)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        Lora(other, RANK).check(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no linear layer that is trained"):
        Lora(eagle.requires_grad_(False), RANK)
