"""Drafters that are often right and often wrong, their texts, and replay of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import tiny
import toys  # noqa: F401  (registers the toy families)
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import TextRatios, text_ratios
from draftsmith.eval.decoder.text import Text

VOCAB = 12
GREEDY, PLAIN = Sampler(0.0), Sampler(1.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"max_n": 2},
    "small": {"layers": [0, 1, 3]},
    "eagle": {"taps": [1, 2, 3], "draft_vocab": 10},
    "eagle1": {},
    "mtp": {},
    "mtp chain": {"modules": 3},
    "toy-block": {},
    "medusa": {"heads": 3, "draft_vocab": 10},
    "hydra": {"heads": 3},
    "dflash": {"taps": [1, 3], "layers": 2, "block_size": 6, "draft_vocab": 10},
    "peagle": {"taps": [1, 4], "layers": 2, "draft_vocab": 10},
    "dspark": {"taps": [1, 3], "layers": 2, "block_size": 5, "markov_rank": 6},
}


def read(target: Target, texts: Sequence[Text], sampler: Sampler, drafter: Drafter) -> Batch:
    """Decoded texts, teacher forced."""
    flags = [[False] * len(t.prompt) + [True] * len(t.tokens) for t in texts]
    pairs = [(t.prompt + t.tokens, made) for t, made in zip(texts, flags, strict=True)]
    return target.read(batch_of(pairs, sampler), drafter.taps)


def fit(drafter: Drafter, steps: int = 40) -> None:
    """A little training on the target's own text: an untrained head gives no fault a grip."""
    target = drafter.target
    texts = tiny.texts(target, PLAIN, count=16, seed=11)
    batch = read(target, texts, PLAIN, drafter)
    found = align(batch, 3)
    row = torch.arange(len(texts)).view(-1, 1, 1)
    assert batch.final is not None
    with torch.no_grad():
        p = drafter.vocab.kept(target.head(batch.final)[row, found.compare][found.exists])
    weights = [w for w in drafter.parameters() if w.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    for _ in range(steps):
        unroll = drafter.unroll(batch, found)
        logits = drafter.logits(unroll.hidden, unroll.prev, unroll.depth)
        rows = unroll.index[unroll.index >= 0]
        loss = torch.nn.functional.kl_div(
            logits[rows].log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@cache
def drafter_for(name: str, family_name: str) -> Drafter:
    """Drafters that are often right, and often wrong."""
    cls, target = family(name.split()[0]), tiny.target(family_name, vocab=VOCAB)
    counts = (torch.arange(VOCAB) % 6 != 4).long()
    torch.manual_seed(1)
    made = cls.create(target, cls.Config(**SETTINGS[name]), counts)
    if name == "small":
        with torch.no_grad():
            for weight in made.parameters():
                if weight.requires_grad:
                    weight += 0.02 * torch.randn_like(weight)
    elif name != "ngram":
        fit(made, 80 if name == "hydra" else 40)
    return made.eval()


def replayed(drafter: Drafter, texts: Sequence[Text], sampler: Sampler, k: int) -> list[TextRatios]:
    return text_ratios(drafter, read(drafter.target, texts, sampler, drafter), k)
