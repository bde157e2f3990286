"""Recall: how often the target's token is among the tokens that a drafter finds likeliest.

A low tau has two cures. If the target's token is rarely among a drafter's best few, the drafter
lacks knowledge: more data, more parameters. If it is there but not first (or not with the right
weight), a tree over the same few tokens, or longer training, already pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.drafters.base import Drafter, Guesses, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.eval.acceptance.replay import (
    ROWS,
    Array,
    Stretch,
    TextRatios,
    anchor_ratios,
    by_text,
    rounds_started,
    summarise,
    survivals,
)
from draftsmith.eval.overlap.row_stats import chunks, unrolls

WIDTHS = (1, 4, 16)
NEVER = 1 << 30  # the rank of a token that the drafter cannot propose


class TextRanks(NamedTuple):
    """One text: rank (L, K) of its own token in q, from 0, at depth j of each anchor; limit (L,):
    depths that exist and were proposed.

    Ties go to the lowest id, as in argmax. A guess (no q) is rank 0, all else is NEVER.
    """

    rank: NDArray[np.int64]
    limit: NDArray[np.int64]
    prompt: int


@torch.no_grad()
def ranks(drafter: Drafter, batch: Batch, depths: int) -> list[TextRanks]:
    """Ranks of every text in a batch that the target has read."""
    parts = [_ranks(drafter, batch, *part) for part in unrolls(drafter, batch, depths)]
    return by_text(TextRanks, batch, parts, 0)


def _ranks(
    drafter: Drafter, batch: Batch, alignment: Alignment, unroll: Unroll | Guesses
) -> Stretch:
    if isinstance(unroll, Guesses):
        exists = alignment.exists & (unroll.tokens >= 0)
        rank = torch.where((unroll.tokens == alignment.label) & exists, 0, NEVER)
    else:
        exists = unroll.index >= 0
        rank = torch.full(exists.shape, NEVER, device=batch.device)
        found = []
        for chunk in chunks(batch, alignment, unroll, ROWS):
            rows = chunk.rows
            logits = drafter.logits(unroll.hidden[rows], unroll.prev[rows], unroll.depth[rows])
            found.append(_rank(logits, drafter.vocab.to_draft(chunk.token))[chunk.cell])
        if found:
            rank[exists] = torch.cat(found)
    return alignment.anchors, rank, exists.long().cumprod(2).sum(2)


def _rank(logits: Tensor, token: Tensor) -> Tensor:
    """(n,): how many of logits (n, Vd) come before token (n,), a draft id or -1."""
    own = logits.gather(1, token.clamp(min=0).unsqueeze(1))  # (n, 1)
    earlier = torch.arange(logits.shape[1], device=logits.device) < token.unsqueeze(1)
    before = (logits > own) | ((logits == own) & earlier)
    return torch.where(token >= 0, before.sum(1), NEVER)


@torch.no_grad()
def diagnose(drafter: Drafter, batches: Iterable[Batch], k: int, seed: int = 0) -> dict[str, Any]:
    """Recall of the target's token among a drafter's best 1, 4, 16, and oracle tau, at k.

    recall {width: [per depth]}: of the depths that a chain of k reaches, weighted by how often it
    does (None where it never does). oracle_tau {width}: tau if every depth whose best `width` hold
    the target's token were accepted, and the draft went on from there.
    """
    served: list[TextRatios] = []
    ranked: list[TextRanks] = []
    for batch in batches:
        first = served[-1].prompt + 1 if served else 0
        parts = unrolls(drafter, batch, k)
        both = [(anchor_ratios(drafter, batch, *p), _ranks(drafter, batch, *p)) for p in parts]
        served += by_text(TextRatios, batch, [one for one, _ in both], first)
        ranked += by_text(TextRanks, batch, [other for _, other in both], first)
    reached, hits = np.zeros(k), {width: np.zeros(k) for width in WIDTHS}
    for text, ranks in zip(served, ranked, strict=True):
        weight = _reached(text, k)  # (L, k)
        reached += weight.sum(0)
        for width in WIDTHS:
            hits[width] += (weight * (ranks.rank < width)).sum(0)

    def oracle(width: int) -> float:
        """tau of a drafter that always picks right among its `width` best."""
        pairs = zip(served, ranked, strict=True)
        texts = [replace(text, ratio=(found.rank < width).astype(float)) for text, found in pairs]
        return summarise(texts, k, seed=seed).tau

    return {
        "recall": {
            str(width): [float(h / r) if r else None for h, r in zip(hit, reached, strict=True)]
            for width, hit in hits.items()
        },
        "oracle_tau": {str(width): oracle(width) for width in WIDTHS},
    }


def _reached(text: TextRatios, k: int) -> Array:
    """(L, k): expected rounds that start at each anchor and get to each depth."""
    S = survivals(text, k)
    rounds = rounds_started(S[:, :-1] - S[:, 1:])
    return rounds[:, None] * S[:, :k] * (np.arange(k) < text.limit[:, None])
