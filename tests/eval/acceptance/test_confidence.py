"""Drafts that end where the drafter itself expects a refusal: replay, decode, and what decides."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import contracts
import decodings as decoding
import parities as parity
import tiny
from draftsmith.drafters import batch as batches
from draftsmith.drafters.base import Policy
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.eval.acceptance import replay as replays
from draftsmith.eval.acceptance.parity import Parity, compare
from draftsmith.eval.acceptance.replay import replay
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from parities import GREEDY, PLAIN

K = 4
CUT = Policy(K, confidence=0.3)


@cache
def unsure() -> DSpark:
    """A drafter that is often right, whose confidence depends on what it reads."""
    made: Any = copy.deepcopy(parity.drafter_for("dspark", "Llama"))
    with torch.no_grad():
        weight, bias = made.confidence_head.parameters()
        generator = torch.Generator().manual_seed(4)
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        weight[:, -6:] *= 5  # W1's row, which is short
        bias.fill_(2.5)
    return made


def compared(sampler: Sampler, policy: Policy, count: int) -> tuple[list[Text], Parity]:
    made = unsure()
    prompts = [[5], *tiny.prompts(count - 1, 2, parity.VOCAB)]
    texts = Decoder(made.target, made, policy).generate(prompts, sampler, 20, seed=7)
    read = parity.read(made.target, texts, sampler, made)
    found = replay(made, [read], K, block=policy.block, confidence=policy.confidence)[K]
    return texts, compare(texts, found, deterministic=sampler.greedy)


def proposed(texts: list[Text]) -> set[int]:
    """Depths that rounds proposed, those that the text's end shortened left out."""
    return {r.proposed for t in texts for r in t.rounds if r.anchor < len(t.prompt) + 10}


def test_greedy_counts_are_equal() -> None:
    """As integers; and the texts are transformers' own."""
    texts, found = compared(GREEDY, CUT, 60)
    assert found.holds and not found.splits and not found.ties, found.report()
    assert proposed(texts) == set(range(K + 1)) and sum(found.counted[1:]) > 20
    for text in texts:
        assert text.tokens == decoding.generated("Llama", tuple(text.prompt), 20, tiny.EOS)


@pytest.mark.parametrize("block", [False, True])
def test_sampled_counts_agree(block: bool) -> None:
    texts, found = compared(PLAIN, Policy(K, block, 0.3), 200)
    scores = [*found.z, found.z_local]
    assert all(z is not None and abs(z) < 3.5 for z in scores) and found.holds, found.report()
    assert proposed(texts) == set(range(K + 1)) and found.counted[3] > 10


def test_a_cut_that_replay_leaves_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(*args: Any) -> Any:
        return replays.anchor_ratios(*args[:-1])

    monkeypatch.setattr(replays, "_cut_ratios", whole)
    assert not compared(GREEDY, CUT, 60)[1].holds
    assert not compared(PLAIN, CUT, 100)[1].holds


def test_the_cut_is_that_of_unroll() -> None:
    """Ragged rows: drafts are as long as unroll says along the drafted text."""
    made, texts = unsure(), [[x % 12 for x in text] for text in contracts.prompts(5)]
    state = made.start(5, 64)
    noise = Noise(0, torch.arange(5), torch.zeros(5, dtype=torch.long))
    with torch.no_grad():
        contracts.feed(made, state, [t[:-1] for t in texts], [0] * 5)
        root = torch.tensor([t[-1] for t in texts])
        proposal = made.propose(state, root, Policy(K, confidence=0.2), PLAIN, noise)
        whole = [t + d + [3] for t, d in zip(texts, proposal.tokens[:, 1:].tolist(), strict=True)]
        batch = contracts.read(made.target, whole, made.taps)
        anchors = torch.tensor([[len(t) - 2] for t in texts])
        survival = made.unroll(batch, batches.align(batch, K, anchors)).survival[:, 0]
    assert (1 + (survival >= 0.2).sum(1)).equal(proposal.length)
    assert len(set(proposal.length.tolist())) > 2
    assert (survival.diff(dim=1) < 0).all()


def lengths_by_prefix(text: list[int]) -> list[dict[tuple[int, ...], set[bool]]]:
    """For each depth: whether it was drafted, by the drafts before it, in 400 draws."""
    made, rows = unsure(), 400
    state = made.start(rows, 32)
    with torch.no_grad():
        contracts.feed(made, state, [text[:-1]] * rows, [0] * rows)
        noise = Noise(0, torch.arange(rows), torch.zeros(rows, dtype=torch.long))
        root = torch.full((rows,), text[-1])
        proposal = made.propose(state, root, CUT, PLAIN, noise)
    out: list[dict[tuple[int, ...], set[bool]]] = [{} for _ in range(K)]
    for length, (_, *drafts) in zip(
        proposal.length.tolist(), proposal.tokens.tolist(), strict=True
    ):
        for j in range(min(length, K)):
            out[j].setdefault(tuple(drafts[:j]), set()).add(length > j + 1)
    return out


def test_no_depth_decides_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the drafts before it, a depth is always drafted or never: what stands there itself has
    no say, or accepted tokens would follow another law. Planted: a confidence that has read it."""
    texts = [[x % 12 for x in text] for text in contracts.prompts(4)]
    found = [table for text in texts for table in lengths_by_prefix(text)]
    assert all(len(said) == 1 for table in found for said in table.values())
    asked = [{next(iter(said)) for said in table.values()} for table in found]
    assert sum(said == {True, False} for said in asked) > 2, "drafts change nothing"
    confidence = DSpark.confidence
    monkeypatch.setattr(
        DSpark, "confidence", lambda self, h, prev: confidence(self, h, prev.roll(-1, dims=-1))
    )
    wrong = [table for text in texts for table in lengths_by_prefix(text)]
    assert any(len(said) == 2 for table in wrong for said in table.values())


@pytest.mark.parametrize("chance", [0.0, -0.5, 1.5])
def test_no_chance(chance: float) -> None:
    with pytest.raises(UserError, match=f"confidence: {chance} is no chance to cut at; use"):
        Policy(3, confidence=chance)


def test_drafters_without_a_confidence() -> None:
    made = contracts.drafter("dflash")
    with pytest.raises(UserError, match="chain k=4, cut below 0.3: a dflash drafter predicts no"):
        Decoder(made.target, made, CUT)
    assert Tree(2, budget=3).confidence is None and StaticTree(((0,),)).confidence is None
