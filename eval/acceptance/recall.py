"""Is it the candidates or the choice? Where the target's token stands among a drafter's own.

A low tau has two cures. If the target's token is rarely among a drafter's best few, the drafter
lacks knowledge: more data, more parameters. If it is there but not first (or not with the right
weight), a tree over the same candidates, or a longer training of the choice, already pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Guesses, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.eval.acceptance.replay import (
    ROWS,
    Array,
    Stretch,
    Table,
    ratios,
    split,
    starts,
    summarise,
    survivals,
)
from draftsmith.eval.overlap.row_stats import chunks, unrolls

WIDTHS = (1, 4, 16)
NEVER = 1 << 30  # the rank of a token that the drafter cannot propose


@torch.no_grad()
def ranks(drafter: Drafter, batch: Batch, depths: int) -> list[Table]:
    """Tables of every text whose `weight` (L, K) is the rank of the text's token in q, from 0.

    Ties go to the lowest id, as in argmax. A guess (no q) is rank 0, all else is NEVER.
    """
    return split(batch, [_ranks(drafter, batch, *at) for at in unrolls(drafter, batch, depths)], 0)


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
    weight = rank.double()
    return alignment.anchors, weight, exists.long().cumprod(2).sum(2), weight


def _rank(logits: Tensor, token: Tensor) -> Tensor:
    """(n,): how many of logits (n, Vd) come before token (n,), a draft id or -1."""
    own = logits.gather(1, token.clamp(min=0).unsqueeze(1))  # (n, 1)
    earlier = torch.arange(logits.shape[1], device=logits.device) < token.unsqueeze(1)
    before = (logits > own) | ((logits == own) & earlier)
    return torch.where(token >= 0, before.sum(1), NEVER)


@torch.no_grad()
def diagnose(drafter: Drafter, batches: Iterable[Batch], k: int, seed: int = 0) -> dict[str, Any]:
    """Recall of the target's token among the best 1, 4, 16 candidates, and oracle tau, at k.

    recall {width: [per depth]}: of the depths that a chain of k reaches, weighted by how often it
    does (None where it never does). oracle_tau {width}: tau if every depth whose candidates hold
    the target's token were accepted, and the draft went on from there.
    """
    served: list[Table] = []
    ranked: list[Table] = []
    for batch in batches:
        first = served[-1].prompt + 1 if served else 0
        along = unrolls(drafter, batch, k)
        both = [(ratios(drafter, batch, *at), _ranks(drafter, batch, *at)) for at in along]
        served += split(batch, [one for one, _ in both], first)
        ranked += split(batch, [other for _, other in both], first)
    reached, hits = np.zeros(k), {width: np.zeros(k) for width in WIDTHS}
    for table, rank in zip(served, ranked, strict=True):
        weight = _reached(table, k)  # (L, k)
        reached += weight.sum(0)
        for width in WIDTHS:
            hits[width] += (weight * (rank.weight < width)).sum(0)
    oracle = {
        width: summarise([_hits(rank, width) for rank in ranked], k, seed=seed).tau
        for width in WIDTHS
    }
    return {
        "recall": {
            str(width): [float(h / r) if r else None for h, r in zip(of, reached, strict=True)]
            for width, of in hits.items()
        },
        "oracle_tau": {str(width): tau for width, tau in oracle.items()},
    }


def _hits(rank: Table, width: int) -> Table:
    """The table of a drafter that always picks right among its `width` best."""
    return Table((rank.weight < width).astype(float), rank.limit, rank.gap, rank.prompt)


def _reached(table: Table, k: int) -> Array:
    """(L, k): expected rounds that start at each anchor and get to each depth."""
    S = survivals(table, k)
    rounds = starts(S[:, :-1] - S[:, 1:])
    return rounds[:, None] * S[:, :k] * (np.arange(k) < table.limit[:, None])
