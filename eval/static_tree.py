"""The static tree of a drafter, from how often its choices of each rank are right (Medusa, Cai et
al. 2401.10774, section 2.3.3).

Rank i of depth j is right at an anchor where the text's token is the drafter's i-th best there,
given the text up to it. Taken as independent, these rates give a node the product along its path as
its chance, and a tree one more token a pass for every node's chance. The likeliest nodes are the
best tree: no node is likelier than its parent. Ranks of one anchor do depend on each other, and
rounds start more often where text is hard, so the walk along the same texts stands beside it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Guesses
from draftsmith.drafters.batch import Batch, align
from draftsmith.drafters.policy import StaticTree
from draftsmith.eval.replay import ROWS
from draftsmith.eval.stats import chunks
from draftsmith.eval.walk import walk

RANKS = 16  # choices of a depth that are counted


@dataclass(frozen=True)
class Calibrated:
    """A tree chosen on some texts: rates (k, RANKS) of its depths' ranks there, tokens per verify
    pass as they predict it, and as the tree walks the texts."""

    tree: StaticTree
    rates: Tensor
    expected_tau: float
    tau: float


def calibrate(drafter: Drafter, batches: Sequence[Batch], k: int, budget: int) -> Calibrated:
    """The tree of at most `budget` drafts and depth k that hits most on texts the target has read.

    Depths that no text reaches have no nodes.
    """
    rates = hit_rates(drafter, batches, k)
    tree, expected = best_tree(rates, budget)
    walks = [found for batch in batches for found in walk(drafter, batch, tree)]
    passes = sum(len(found.rounds) for found in walks)
    tau = sum(found.tokens for found in walks) / passes if passes else float("nan")
    return Calibrated(tree, rates, expected, tau)


@torch.no_grad()
def hit_rates(drafter: Drafter, batches: Sequence[Batch], k: int) -> Tensor:
    """Shares (k, RANKS) of the anchors at which a depth's choice of each rank is the text's token.

    Every anchor counts alike; a depth's rates are over the anchors at which it exists.
    """
    counts = torch.zeros(k, RANKS + 1, dtype=torch.float64)  # the last column: none of them
    for batch in batches:
        unroll = drafter.unroll(batch, k)
        if isinstance(unroll, Guesses):
            raise TypeError(f"a drafter of family {drafter.family} ranks nothing")
        for chunk in chunks(batch, align(batch, k), unroll, ROWS):
            rows = chunk.rows
            logits = drafter.logits(unroll.hidden[rows], unroll.prev[rows], unroll.depth[rows])
            token = drafter.vocab.to_draft(chunk.token)  # (n,)
            own = logits.gather(1, token.clamp(min=0).unsqueeze(1))
            rank = (logits > own).sum(1)  # (n,) drafts that are ranked before it
            rank = torch.where(token >= 0, rank, RANKS).clamp(max=RANKS)[chunk.cell]
            depth = chunk.exists.nonzero()[:, 1]
            found = torch.bincount(depth * (RANKS + 1) + rank, minlength=counts.numel())
            counts += found.view_as(counts).cpu()
    return counts[:, :RANKS] / counts.sum(1, keepdim=True).clamp(min=1)


def best_tree(rates: Tensor, budget: int) -> tuple[StaticTree, float]:
    """The `budget` likeliest nodes under rates (K, R), and one plus the sum of their chances.

    Nodes without a chance are left out, as long as one node is there.
    """
    table = rates.tolist()
    K, R = rates.shape
    front: list[tuple[float, tuple[int, ...]]] = [(-table[0][i], (i,)) for i in range(R)]
    heapq.heapify(front)
    paths: list[tuple[int, ...]] = []
    expected = 1.0
    while front and len(paths) < budget:
        chance, path = heapq.heappop(front)
        if paths and not chance:
            break
        paths.append(path)
        expected -= chance
        if len(path) < K:
            for i, rate in enumerate(table[len(path)]):
                heapq.heappush(front, (chance * rate, (*path, i)))
    return StaticTree(tuple(paths)), expected
