"""What a family adds to the loss: its extras, its term, its weight, and where that is stored.

The toy is EAGLE-3 with a confidence: a logit for each row, which learns the row's overlap. What it
should learn is taken from all cells at once, by autograd through the whole unroll.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import objectives as dense
import tiny
import training
from draftsmith.drafters import storage
from draftsmith.drafters.base import Unroll
from draftsmith.drafters.batch import Alignment, Batch, align
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.eagle1 import Eagle1, Eagle1Config
from draftsmith.drafters.errors import UserError
from draftsmith.train.objective.losses import Objective, backward, denominator
from draftsmith.train.recipe import parse
from draftsmith.train.run import main
from draftsmith.train.start import new_drafter
from objectives import K, packed
from training import World


class Confident(Eagle):
    """cut: whether the confidence's gradient stops before the backbone."""

    cut = True
    own_weight = 0.5  # type: ignore[assignment]

    def __init__(self, target: Any, config: EagleConfig) -> None:
        super().__init__(target, config)
        self.confidence = nn.Linear(target.hidden_size, 1)

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        out = super().unroll(batch, alignment)
        hidden = out.hidden.detach() if self.cut else out.hidden
        out.extras["confidence"] = self.confidence(hidden).squeeze(1)
        return out

    def own_loss(
        self, batch: Batch, unroll: Unroll, rows: Tensor, place: Tensor, alpha: Tensor
    ) -> Tensor:
        said = unroll.extras["confidence"][rows]
        return F.binary_cross_entropy_with_logits(said, alpha, reduction="none")


def confident(cut: bool) -> Confident:
    torch.manual_seed(4)
    made = Confident(tiny.target(), EagleConfig(taps=[1, 2, 4]))
    made.load_state_dict(dense.drafter("eagle").state_dict(), strict=False)
    made.cut = cut
    return made


def learned(of: Eagle, rows: int) -> tuple[float, dict[str, Tensor]]:
    batch = tiny.target().read(packed(), of.taps)
    alignment, objective = align(batch, K), Objective()
    of.zero_grad(set_to_none=True)
    total = denominator(batch, alignment, objective)
    sums = backward(of, batch, alignment, objective, total, rows)
    return sums.loss, dense.grads(of)


def whole(of: Confident) -> dict[str, Tensor]:
    """Gradients of KL and half the cross entropy of confidence, over all cells at once."""
    batch = tiny.target().read(packed(), of.taps)
    alignment = align(batch, K)
    unroll = of.unroll(batch, alignment)
    index, row = unroll.index, torch.arange(len(batch.tokens)).view(-1, 1, 1)
    there = index >= 0
    assert batch.final is not None
    p = tiny.target().head(batch.final)[row, alignment.compare][there].double().log_softmax(-1)
    logits = of.logits(unroll.hidden, unroll.prev, unroll.depth)
    q = logits.double().log_softmax(-1)[index[there]]
    overlap = torch.minimum(p.exp(), q.exp()).sum(-1).detach()
    said = unroll.extras["confidence"].double()[index[there]].sigmoid()
    entropy = -(overlap * said.log() + (1 - overlap) * (1 - said).log())
    weight = 0.8 ** torch.arange(K).expand_as(index)[there].double()
    value = weight * ((p.exp() * (p - q)).sum(-1) + 0.5 * entropy)
    of.zero_grad(set_to_none=True)
    (value.sum() / weight.sum()).backward()
    return dense.grads(of)


@pytest.mark.parametrize("rows", [1, 7, 10_000])
@pytest.mark.parametrize("cut", [True, False])
def test_a_confidence_learns_through_extras(cut: bool, rows: int) -> None:
    """Its own weights, and the backbone's where the gradient is not cut."""
    of = confident(cut)
    _, ours = learned(of, rows)
    assert dense.distance(ours, whole(of)) < 1e-3
    assert float(ours["confidence.weight"].abs().max()) > 1e-3
    _, plain = learned(dense.drafter("eagle"), rows)  # type: ignore[arg-type]
    apart = dense.distance({n: ours[n] for n in plain}, plain)
    assert apart == 0 if cut else apart > 1e-2


def test_extras_left_behind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the term reads what no gradient comes back from."""
    right = Confident.own_loss

    def wrong(self: Confident, batch: Batch, unroll: Unroll, *rest: Any) -> Tensor:
        still = {name: value.detach() for name, value in unroll.extras.items()}
        unroll.extras, kept = still, unroll.extras
        out = right(self, batch, unroll, *rest)
        unroll.extras = kept
        return out

    monkeypatch.setattr(Confident, "own_loss", wrong)
    of = confident(cut=True)
    assert dense.distance(learned(of, 7)[1], whole(of)) > 0.1


# ---------------------------------------------------------------- where a term's weight is kept


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def keys(**more: Any) -> dict[str, Any]:
    return {"name": "x", "drafter": "eagle", "steps": 4} | more


def test_a_key_of_one_family() -> None:
    """eagle1's alone; at 0, as runs stored it for every family, it is no mistake elsewhere."""
    settings = parse(keys(drafter="eagle1", regression=2.5), "x.yaml").settings
    assert settings == {"regression": 2.5}
    with pytest.raises(UserError, match="unknown key 'regression' for drafter eagle"):
        parse(keys(regression=2.5), "x.yaml")
    assert parse(keys(regression=0.0), "x.yaml") == parse(keys(), "x.yaml")
    with pytest.raises(UserError, match="regression: Input should be greater"):
        parse(keys(drafter="eagle1", regression=-1), "x.yaml")


def test_a_run_of_before_goes_on(world: World) -> None:
    """Its recipe.yaml holds `regression: 0.0`, whatever its family."""
    for drafter, changes in (("eagle", {}), ("eagle1", {"regression": 0})):
        name = f"old-{drafter}"
        path = world.recipe(name, drafter, steps=2, save_every=1, **changes)
        assert main([str(path)]) == 0
        stored = world.folder(name) / "recipe.yaml"
        flat = yaml.safe_load(stored.read_text())
        assert flat.get("regression", 0) == 0
        stored.write_text(yaml.safe_dump(flat | {"regression": 0.0}))
        assert main([str(path)]) == 0


def test_a_checkpoint_does_not_hold_it(world: World, tmp_path: Path) -> None:
    """What is stored is what the drafter is; another run begins from it with its own weight."""
    target = tiny.target()
    made = Eagle1(target, Eagle1Config(regression=10))
    storage.save(made, tmp_path)
    assert set(json.loads((tmp_path / "config.json").read_text())["config"]) == {"block"}
    for weight in (0, 3):
        more = {"regression": weight} if weight else {}
        recipe = parse(keys(drafter="eagle1", start=str(tmp_path), **more), "x.yaml")
        again = new_drafter(recipe, target, torch.ones(tiny.VOCAB))
        assert again.own_weight == weight
    assert training.DRAFTERS["eagle1"]["regression"] == 10
