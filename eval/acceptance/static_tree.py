"""A drafter's static tree, from how often its choices of each rank are right (Medusa, 2401.10774).

Rank i of depth j is right at an anchor where the text's token is the drafter's i-th best there,
given the text up to it. These rates give a node the product along its path as its chance, and a
tree one more token a pass for every node's chance, so that the likeliest nodes are the best tree:
none is likelier than its parent. The paper (section 2.3.3) takes a depth's rates over all anchors;
here only over those at which the depths before were right too, with some rank: others never ask.

Two things are left out: which of its ranks a depth was right with says something of the next, and
rounds start more often where text is hard. So the walk along the same texts is reported too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.policy import StaticTree
from draftsmith.eval.acceptance.intervals import Array, tau
from draftsmith.eval.acceptance.recall import ranks
from draftsmith.eval.acceptance.walk import walk_tree

RANKS = 16  # choices of a depth that are counted


@dataclass(frozen=True)
class Calibrated:
    """A tree chosen on some texts: rates (k, RANKS) of its depths' ranks there, tokens per verify
    pass as they predict it, and as the tree walks the texts."""

    tree: StaticTree
    rates: Array
    expected_tau: float
    tau: float


def calibrate(drafter: Drafter, batches: Sequence[Batch], k: int, budget: int) -> Calibrated:
    """The tree of at most `budget` drafts and depth k that hits most on texts the target has read.

    Depths that no text reaches have no nodes.
    """
    rates = hit_rates(drafter, batches, k)
    tree, expected = best_tree(rates, budget)
    walks = [found for batch in batches for found in walk_tree(drafter, batch, tree)]
    passes = sum(len(found.rounds) for found in walks)
    walked = tau(sum(found.tokens for found in walks), passes)
    return Calibrated(tree, rates, expected, float("nan") if walked is None else walked)


def hit_rates(drafter: Drafter, batches: Sequence[Batch], k: int) -> Array:
    """Shares (k, RANKS) of the anchors at which a depth's choice of each rank is the text's token,
    out of those at which the depth exists and those before it were right."""
    texts = [text for batch in batches for text in ranks(drafter, batch, k)]
    rank = np.concatenate([text.rank for text in texts])  # (anchors, k)
    limit = np.concatenate([text.limit for text in texts])  # (anchors,)
    rates = np.zeros((k, RANKS))
    reached = np.ones(len(rank), dtype=bool)
    for j in range(k):
        reached &= limit > j
        right = rank[:, j] < RANKS
        hits = rank[reached & right, j]
        rates[j] = np.bincount(hits, minlength=RANKS) / max(reached.sum(), 1)
        reached &= right
    return rates


def best_tree(rates: Array, budget: int) -> tuple[StaticTree, float]:
    """The `budget` likeliest nodes under rates (K, R), and one plus the sum of their chances.

    Nodes without a chance are left out, as long as one node is there.
    """
    table = rates.tolist()
    front: list[tuple[float, tuple[int, ...]]] = []  # a heap: the likeliest first
    for i, rate in enumerate(table[0]):
        heapq.heappush(front, (-rate, (i,)))
    paths: list[tuple[int, ...]] = []
    expected = 1.0
    while front and len(paths) < budget:
        chance, path = heapq.heappop(front)
        if paths and not chance:
            break
        paths.append(path)
        expected -= chance
        if len(path) < len(table):
            for i, rate in enumerate(table[len(path)]):
                heapq.heappush(front, (chance * rate, (*path, i)))
    return StaticTree(tuple(paths)), expected
