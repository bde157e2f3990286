"""DSpark's confidence, against the reference, and where its gradient goes; a fresh Markov head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import objectives as dense
import reference_blocks
import tiny
from contracts import drafter, prompts, read
from draftsmith.drafters.batch import align
from draftsmith.drafters.dspark import DSpark, DSparkConfig
from draftsmith.train.objective.losses import Objective, backward, denominator

K = 3
TAPS: dict[str, Any] = {"taps": [1, 3], "layers": 2}


@torch.no_grad()
def test_confidence_equals_reference() -> None:
    """Faults: a state before the norm, the row of another token, of a block of other length."""
    made = drafter("dspark", "Qwen3")
    batch = read(made.target, prompts(3), made.taps)
    alignment = align(batch, K)
    unroll = made.unroll(batch, alignment)
    said = unroll.extras["confidence"].sigmoid()
    hf = tiny.hf_model("Qwen3").double()
    config = made.config.model_dump() | {"drafted": K}
    compared = []
    for b, text in enumerate(prompts(3)):
        for i in range(0, len(text) - K, 3):
            a = int(alignment.anchors[b, i])
            for j in range(K):
                row = int(unroll.index[b, i, j])
                if a >= 0 and row >= 0:
                    where = made.weights(), config, hf, text, a, j
                    compared.append((float(said[row]), reference_blocks.confidence(*where)))
    ours, theirs = torch.tensor(compared).T
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert len(compared) > 15 and ours.std() > 0.1


def learned(made: Any) -> dict[str, Tensor]:
    batch = tiny.target().read(dense.packed(), made.taps)
    alignment, objective = align(batch, K), Objective("l1_ce")
    made.zero_grad(set_to_none=True)
    backward(made, batch, alignment, objective, denominator(batch, alignment, objective), 7)
    return dense.grads(made)


def cross_entropy(made: Any) -> dict[str, Tensor]:
    """Its gradients by definition: of all cells at once, from overlaps in float64."""
    batch = tiny.target().read(dense.packed(), made.taps)
    alignment = align(batch, K)
    unroll, row = made.unroll(batch, alignment), torch.arange(len(batch.tokens)).view(-1, 1, 1)
    there = unroll.index >= 0
    assert batch.final is not None
    p = tiny.target().head(batch.final)[row, alignment.compare][there].double().softmax(-1)
    rows = unroll.index[there]
    q = made.logits(unroll.hidden, unroll.prev, unroll.depth)[rows].double().softmax(-1)
    alpha = torch.minimum(p, made.vocab.scatter(q)).sum(-1).detach()
    state, first = made.norm(unroll.hidden[rows]), made.markov_head.markov_w1(unroll.prev[rows])
    c = torch.sigmoid(made.confidence_head.proj(torch.cat([state, first], -1))).squeeze(-1).double()
    weight = 0.8 ** torch.arange(K).expand_as(unroll.index)[there].double()
    made.zero_grad(set_to_none=True)
    loss = -(weight * (alpha * c.log() + (1 - alpha) * (1 - c).log())).sum() / weight.sum()
    loss.backward()
    return dense.grads(made)


def test_confidence_leaves_the_backbone_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other weights have the gradients that they have without it, to the last bit; its own are
    those of the cross-entropy. Planted: a gradient that is not cut."""
    made = drafter("dspark")
    whole, own = learned(made), cross_entropy(made)
    heads = [name for name in whole if name.startswith("confidence_head")]
    assert len(heads) == 2 and all(whole[name].any() for name in heads)
    assert dense.distance(*({n: g[n] for n in heads} for g in (whole, own))) < 1e-3
    monkeypatch.setattr(DSpark, "own_weight", 0.0)
    alone = learned(made)
    for name in whole.keys() - set(heads):
        assert torch.equal(whole[name], alone[name]), name
    monkeypatch.undo()
    monkeypatch.setattr(DSpark, "confidence", uncut)
    leaky = learned(made)
    assert any(not torch.equal(leaky[n], alone[n]) for n in alone.keys() - set(heads))


def uncut(self: DSpark, hidden: Tensor, prev: Tensor) -> Tensor:
    read = torch.cat([self.norm(hidden), self.markov_head.markov_w1(prev)], dim=-1)
    return self.confidence_head.proj(read).squeeze(-1)


def states(made: Any) -> tuple[Tensor, Tensor]:
    batch = read(made.target, prompts(1), made.taps)
    unroll = made.unroll(batch, align(batch, K))
    return unroll.hidden, unroll.prev


def test_a_fresh_head_is_the_backbone_alone() -> None:
    made = DSpark.create(tiny.target(), DSparkConfig(**TAPS))
    hidden, prev = states(made)
    other = (prev + 1) % tiny.VOCAB
    depth = torch.zeros_like(prev)
    with torch.no_grad():
        assert torch.equal(made.logits(hidden, prev, depth), made.logits(hidden, other, depth))
        assert made.confidence(hidden, prev).sigmoid().eq(0.5).all()
    rows = made.markov_head.markov_w1.weight.detach().norm(dim=1)
    assert 0.8 < float(rows.mean()) < 1.2
