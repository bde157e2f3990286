"""Losses on drafters whose depths come in one pass: anchors of a row, chunks, every loss."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts
import objectives as dense
import tiny
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import align
from draftsmith.train.objective.losses import LOSSES, Objective, backward, denominator
from draftsmith.train.objective.weights import DepthWeights

K = 4
NAMES = ("dflash", "dspark", "peagle")
WEIGHTS = {"l1_ce": DepthWeights("exponential"), "ce": DepthWeights("dpace")}


@cache
def drafter(name: str) -> Drafter:
    return contracts.drafter(name)


def learned(name: str, loss: str, rows: int, anchors: Tensor | None = None) -> dict[str, Tensor]:
    made = drafter(name)
    batch = tiny.target().read(dense.packed(), made.taps)
    objective = Objective(loss, WEIGHTS.get(loss, DepthWeights()))
    alignment = align(batch, K, anchors)
    made.zero_grad(set_to_none=True)
    backward(made, batch, alignment, objective, denominator(batch, alignment, objective), rows)
    return dense.grads(made)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NAMES)
def test_every_loss_learns_whatever_the_chunk(name: str, loss: str) -> None:
    """Faults: a loss that some weights get no gradient from, or one that depends on the chunk."""
    whole, cut = learned(name, loss, 10_000), learned(name, loss, 9)
    assert dense.distance(cut, whole) < 1e-3
    assert all(bool(grad.any()) for grad in whole.values())


def by_definition(made: Any, loss: str) -> dict[str, Tensor]:
    """Gradients over all cells at once: cross-entropy by D-PACE's weights, or DSpark's loss."""
    batch = tiny.target().read(dense.packed(), made.taps)
    found = align(batch, K)
    unroll, row = made.unroll(batch, found), torch.arange(len(batch.tokens)).view(-1, 1, 1)
    index, there = unroll.index, unroll.index >= 0
    assert batch.final is not None and torch.equal(there, found.exists)
    p = tiny.target().head(batch.final)[row, found.compare].double().softmax(-1)  # (B, A, K, V)
    logits = made.logits(unroll.hidden, unroll.prev, unroll.depth).double()
    q = made.vocab.scatter(logits.softmax(-1))[index.clamp(min=0)]
    true = q.gather(-1, found.label.unsqueeze(-1)).squeeze(-1)  # 0 where it cannot be drafted
    known = there & (true > 0)
    entropy = torch.where(known, -true.clamp(min=1e-300).log(), 0.0)
    depth = torch.arange(K).double()
    if loss == "ce":
        chain = torch.cumprod((true.detach() + 1) / 2, -1) * there
        weight, total = chain.flip(-1).cumsum(-1).flip(-1), there.sum()
        value = (weight * entropy).sum() / total
    else:
        weight = torch.exp(-depth / 4) * there
        distance = (p - q).abs().sum(-1)
        value = (weight * (0.1 * entropy + 0.9 * distance)).sum() / weight.sum()
    made.zero_grad(set_to_none=True)
    value.backward()
    return dense.grads(made)


@pytest.mark.parametrize("loss", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_block_drafters_by_definition(name: str, loss: str) -> None:
    ours, theirs = learned(name, loss, 50), by_definition(drafter(name), loss)
    own = [n for n in ours if n.startswith("confidence_head")]  # it has a loss of its own
    for gone in own:
        del ours[gone], theirs[gone]
    assert dense.distance(ours, theirs) < 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_anchors_of_a_row_add_up(name: str) -> None:
    """Blocks do not see each other: gradients of all anchors are the sum of those of each half."""
    made = drafter(name)
    batch = tiny.target().read(dense.packed(), made.taps)
    whole = align(batch, K)
    objective = Objective("kl")
    total = denominator(batch, whole, objective)
    half = whole.anchors.shape[1] // 2
    out = []
    for parts in ([whole.anchors], whole.anchors.split(half, 1)):
        made.zero_grad(set_to_none=True)
        for anchors in parts:
            backward(made, batch, align(batch, K, anchors), objective, total, 50)
        out.append(dense.grads(made))
    assert dense.distance(*out) < 1e-3
