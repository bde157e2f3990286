"""The objective: loss and gradients against float64 code that holds all of B*T*K*V.

A loss on the wrong cells, or weighed wrongly between micro-batches, still falls: only a comparison
with code that shares nothing shows it. Laws come from tests/reference*.py and from transformers'
own forward, one text at a time, without packing, chunks or padding.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import reference_replay
from draftsmith.drafters import batch as batch_module
from draftsmith.drafters.batch import align
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance import replay
from draftsmith.train.objective import losses as losses_module
from draftsmith.train.objective.losses import LOSSES, Objective, denominator
from draftsmith.train.objective.weights import DepthWeights, Running, reached
from objectives import (
    CUT,
    GREEDY,
    PLAIN,
    SETTINGS,
    TURNS,
    Cut,
    K,
    Table,
    cell_weights,
    chains,
    distance,
    drafter,
    packed,
    per_cell,
    run,
    statistics,
    table,
    texts,
)


def expected_passes(t: Table, survival: Tensor) -> Tensor:
    """n(first anchor) summed over texts, by replay's recursion; differentiable."""
    at = {cell: survival[i] for i, cell in enumerate(t.cells)}
    one = torch.ones((), dtype=torch.float64)

    @cache
    def n(text: int, a: int) -> Tensor:
        if (text, a, 0) not in at:  # the root ends the text
            return 0 * one
        S = [one]
        while (cell := (text, a, len(S) - 1)) in at:
            S.append(at[cell])
        ends = [*S[1:], 0 * one]
        return 1 + sum((S[m] - ends[m]) * n(text, a + 1 + m) for m in range(len(S)))

    total = 0 * one
    for text, (_, made) in enumerate(texts()):
        for a in range(len(made) - 1):
            if made[a + 1] and not made[a]:
                total = total + n(text, a)
        if made[0]:
            total = total + n(text, 0)
    return total


def expected(
    name: str, objective: Objective, cut: Cut, depths: int = K, mix: Tensor | None = None
) -> tuple[float, dict]:
    """Weighted sum of the loss, and the gradients of its weighted mean."""
    t = table(name, depths)
    s = statistics(t, cut)
    if objective.loss.startswith("replay"):
        survival = chains(t, s["ratio"])
        loss = expected_passes(t, survival)
        numerator, total = loss.item(), float(t.depth.count(0))
        if objective.loss == "replay_alpha":  # slopes by autograd, then the last factor replaced
            leaf = survival.detach().requires_grad_()
            (slope,) = torch.autograd.grad(expected_passes(t, leaf), leaf)
            before = torch.stack(
                [chains(t, s["ratio"])[i - 1] if j else torch.ones_like(s["ratio"][0])
                 for i, (_, _, j) in enumerate(t.cells)]
            )  # fmt: skip
            loss = (slope * before * s["alpha"]).sum()
        loss = loss / total
    else:
        value = per_cell(objective.loss, s, t, mix)
        fixed, moving = cell_weights(objective.weights, t, s)
        numerator = (fixed * moving * value).sum().item()
        loss = (fixed * moving * value).sum() / fixed.sum()
    found = torch.autograd.grad(loss, list(t.leaves.values()), retain_graph=True, allow_unused=True)
    pairs = zip(t.leaves.items(), found, strict=True)
    return numerator, {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}


WIDE = (2.0, 44, 0.999)  # keeps most of these random texts possible


@pytest.mark.parametrize(
    ("loss", "cut"),
    [("kl", PLAIN), ("kl", CUT), ("tv", GREEDY), ("log_alpha", CUT), ("replay", PLAIN)],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_every_gradient(name: str, loss: str, cut: Cut) -> None:
    """A wrong offset, mask, weight, vocabulary or chain rule in the chunked pass."""
    objective = Objective(loss, DepthWeights(decay=0.8 if loss == "kl" else 0.5))
    sums, ours = run(name, packed(sampler=Sampler(*cut)), objective)
    value, theirs = expected(name, objective, cut)
    assert sums.loss == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert distance(ours, theirs) < 2e-3
    alive = sum(float(g.abs().max()) > 1e-5 for g in theirs.values())
    assert alive == len(theirs), "every parameter is reached"


@pytest.mark.parametrize("cut", [PLAIN, WIDE, GREEDY], ids=["plain", "cut", "greedy"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss(loss: str, cut: Cut) -> None:
    """Value and gradients of each loss by its definition, with a reduced vocabulary."""
    if (loss, cut) == ("rkl", GREEDY):
        pytest.skip("infinite there; a recipe is refused")
    objective = Objective(loss, DepthWeights("exponential", span=2.0))
    running = Running(torch.tensor([3.0, 1.0, 0.5]), torch.tensor([5.0, 4.0, 2.0]))
    sums, ours = run("eagle-reduced", packed(sampler=Sampler(*cut)), objective, running=running)
    mix = torch.exp(-3.0 * torch.tensor([0.6, 0.25, 0.25]))
    value, theirs = expected("eagle-reduced", objective, cut, mix=mix)
    assert sums.loss == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert distance(ours, theirs) < 2e-3
    assert max(float(g.abs().max()) for g in theirs.values()) > 1e-4


@pytest.mark.parametrize("loss", ["replay", "replay_alpha"])
@pytest.mark.parametrize("cut", [PLAIN, WIDE], ids=["plain", "cut"])
def test_the_replay_objective_is_what_replay_measures(loss: str, cut: Cut) -> None:
    """Verify passes as replay counts them, and as tests/ enumerates every walk."""
    batch = packed(sampler=Sampler(*cut))
    sums, _ = run("eagle", batch, Objective(loss))
    with torch.no_grad():
        tables = replay.text_ratios(drafter("eagle"), batch, K)
    measured = sum(float(replay.moments(t, K).mean[0]) for t in tables)
    t = table("eagle")
    ratio = statistics(t, cut)["ratio"].tolist()
    rows: dict[tuple[int, int], list[list[float]]] = {}
    span = 0
    for i, (text, a, j) in enumerate(t.cells):
        if j == 0:
            span += not (i and t.cells[i - 1][:2] == (text, a - 1))
            rows.setdefault((text, span), []).append([])
        rows[text, span][-1].append(ratio[i])
    walked = sum(reference_replay.expected_passes(r) for r in rows.values())
    assert sums.loss == pytest.approx(measured, rel=1e-6)
    assert sums.loss == pytest.approx(walked, rel=1e-5)
    assert sums.total == sum(t.tokens for t in tables)


def test_a_wrong_slope_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: slopes that forget how likely a round starts there, or what a rejection saves."""
    objective = Objective("replay")
    _, theirs = expected("eagle", objective, PLAIN)
    right = losses_module.passes

    def flat(survival: Tensor, *rest: Any) -> tuple[float, Tensor]:
        count, slope = right(survival, *rest)
        return count, -slope.bool().to(slope.dtype)

    monkeypatch.setattr(losses_module, "passes", flat)
    assert distance(run("eagle", packed(), objective)[1], theirs) > 0.05


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["constant", "geometric", "exponential", (1.0, 0.0, 2.0)])
def test_fixed_weights(kind: Any, per: str) -> None:
    """Each cell's weight by hand; their sum is the denominator, or the number of texts."""
    weights = DepthWeights(kind, 0.5, 3.0, per)
    batch = packed()
    found = weights.cells(batch, batch_module.align(batch, K))
    t = table("eagle")
    by_hand = {"constant": [1, 1, 1], "geometric": [1, 0.5, 0.25],
               "exponential": [math.exp(-j / 3) for j in range(3)]}  # fmt: skip
    each = by_hand[kind] if isinstance(kind, str) else list(kind)
    wanted = torch.tensor([float(each[j]) for _, _, j in t.cells])
    texts_of = torch.tensor([text for text, _, _ in t.cells])
    if per == "sequence":
        totals = torch.zeros(len(TURNS)).index_add(0, texts_of, wanted)
        wanted = wanted / totals[texts_of]
        assert found.sum() == pytest.approx(len({*texts_of.tolist()}))
    assert sorted(found[found > 0].tolist()) == pytest.approx(sorted(wanted[wanted > 0].tolist()))
    assert denominator(batch, align(batch, K), Objective("kl", weights)) == pytest.approx(
        wanted.sum().item()
    )


def test_moving_weights_by_hand() -> None:
    """D-PACE and reach on two anchors, the second of which has one depth only."""
    ratio = torch.tensor([[0.5, 0.2, 1.0], [0.4, 0.0, 0.0]])
    exists = torch.tensor([[True, True, True], [True, False, False]])
    reach = DepthWeights("reach").moving(ratio, ratio, exists)
    assert reach is not None
    torch.testing.assert_close(reach, torch.tensor([[1.0, 0.5, 0.1], [1.0, 0.0, 0.0]]))
    dpace = DepthWeights("dpace").moving(ratio, ratio, exists)
    assert dpace is not None
    a, b, c = 0.75, 0.75 * 0.6, 0.75 * 0.6 * 1.0
    torch.testing.assert_close(dpace, torch.tensor([[a + b + c, b + c, c], [0.7, 0.0, 0.0]]))


MOVING = [
    DepthWeights("dpace"), DepthWeights("reach"), DepthWeights("reach", per="sequence"),
    DepthWeights(per="sequence"),
]  # fmt: skip


def check_weights(weights: DepthWeights, cut: Cut) -> None:
    """Loss and gradients of a first step, and of one that knows the weights' mean."""
    objective, running = Objective("tv", weights), Running.start(K)
    batch = packed(sampler=Sampler(*cut))
    value, theirs = expected("eagle-reduced", objective, cut)
    t = table("eagle-reduced")
    fixed, moving = cell_weights(weights, t, statistics(t, cut))
    mean = float((fixed * moving).sum() / fixed.sum())
    for divided in (1.0, mean):
        sums, ours = run("eagle-reduced", batch, objective, running=running)
        assert sums.loss == pytest.approx(value / divided, rel=1e-4)
        assert distance(ours, {n: g / divided for n, g in theirs.items()}) < 2e-3
        running.update(sums)


@pytest.mark.parametrize("cut", [PLAIN, WIDE, GREEDY], ids=["plain", "cut", "greedy"])
@pytest.mark.parametrize("weights", MOVING, ids=["dpace", "reach", "reach by text", "by text"])
def test_weights_and_every_gradient(weights: DepthWeights, cut: Cut) -> None:
    """Once the mean of weights that move is known, it is 1: the learning rate stays what it is."""
    check_weights(weights, cut)


def _learned(self: DepthWeights, ratio: Tensor, likelihood: Tensor, exists: Tensor) -> Tensor:
    """Weights that are part of the loss."""
    if self.kind == "reach":
        return reached(ratio) * exists
    chain = torch.cumprod((likelihood + 1) / 2, 1) * exists
    return chain.flip(1).cumsum(1).flip(1)


def _accepted(self: DepthWeights, ratio: Tensor, likelihood: Tensor, exists: Tensor) -> Tensor:
    """The chance that a depth is accepted too, not only reached."""
    return torch.cumprod(ratio.detach() if self.kind == "reach" else likelihood.detach(), 1)


@pytest.mark.parametrize("fault", [_learned, _accepted])
@pytest.mark.parametrize("weights", MOVING[:2], ids=["dpace", "reach"])
def test_weights_planted(
    weights: DepthWeights, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DepthWeights, "moving", fault)
    with pytest.raises(AssertionError):
        check_weights(weights, PLAIN)


def test_a_replay_loss_leaves_the_mean_of_weights_alone() -> None:
    """It reads no weights that move: after thirty steps of it, the next loss begins as a first."""
    weights, running = DepthWeights("reach"), Running.start(K)
    before, _ = run("eagle", packed(), Objective("replay", weights))
    for _ in range(30):
        running.update(before)
    assert running.mean_factor == 1.0
    sums, _ = run("eagle", packed(), Objective("kl", weights), running=running)
    running.update(sums)
    assert running.mean_factor == pytest.approx(sums.factor / sums.total)


def test_curriculum_advances_by_alpha() -> None:
    running = Running(torch.tensor([4.0]), torch.tensor([10.0]))
    assert not running.switch([0.5, 0.6]) and running.stage == 0
    running.alpha += 1.5
    assert running.switch([0.5, 0.6]) and running.stage == 1
    assert not running.switch([0.5, 0.6])
    running.alpha += 1
    assert running.switch([0.5, 0.6]) and not running.switch([0.5, 0.6])


def test_the_comparison_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: equal depth weights, another loss, a missing last depth."""
    objective = Objective("kl")
    value, theirs = expected("eagle", objective, PLAIN)
    for fault in (Objective("kl", DepthWeights("constant")), Objective("tv")):
        sums, ours = run("eagle", packed(), fault)
        assert distance(ours, theirs) > 0.05 and abs(sums.loss / value - 1) > 0.05
    sums, ours = run("eagle", packed(), objective, depths=K - 1)
    assert distance(ours, theirs) > 0.05
