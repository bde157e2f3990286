"""Parity: what the decoder counted against what replay expects on the text it wrote.

Deterministic drafts: rounds are equal as integers, prompt by prompt, but for splits where q's two
largest logits lie within an fp32 tie. Sampled drafts: z = (counted - expected) / sqrt(variance)
for passes and for each depth. Anything else is a bug, never noise.

Those z pool over texts, and a drafter that reads the wrong features accepts about as often, only
elsewhere: they hardly see it. So each tried depth is also taken as the independent coin that it is
given the text, and `z_local` weighs whether coins of higher chance came up more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import NormalDist

from draftsmith.eval.decoder.text import Text
from draftsmith.eval.replay import Table, moments, survivals
from draftsmith.eval.walk import Walk

TIE = 1e-3  # two logits closer than this are a tie in fp32
Z_BOUND = 3.5
FIXED = 1e-9  # a variance that is but rounding


@dataclass
class Split:
    """Where a prompt's decoding left replay's walk: the anchor, the depth, and q's top-2 gap."""

    prompt: int
    anchor: int
    depth: int
    gap: float  # of a tree: how far its choice of nodes was from another one


@dataclass
class Parity:
    """counted and expected: [passes, accepted at depth 0, 1, ..], over all texts.

    deterministic: z is not defined, `equal` says whether every text that is no tie agrees.
    sampled: z per count, by its Poisson tail where the variance is below 1, None where that is 0
    (then the counts must be equal).
    """

    deterministic: bool
    counted: list[int]
    expected: list[float]
    z: list[float | None]
    z_local: float | None
    equal: bool
    texts: int
    ties: list[Split] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether decoder and replay agree as DESIGN.md defines it."""
        if self.deterministic:
            return self.equal and len(self.ties) <= math.ceil(self.texts / 50)
        return self.equal and all(z is None or abs(z) < Z_BOUND for z in [*self.z, self.z_local])

    def report(self) -> dict:
        """The `parity` entry of report.json."""
        return {
            "deterministic": self.deterministic,
            "passes": self.counted[0],
            "expected": self.expected[0],
            "z": self.z[0],
            "accepted_per_depth": self.counted[1:],
            "expected_per_depth": self.expected[1:],
            "z_per_depth": self.z[1:],
            "z_local": self.z_local,
            "equal": self.equal,
            "ties": [vars(s) for s in self.ties],
            "splits": [vars(s) for s in self.splits],
            "holds": self.holds,
        }


def counts(texts: Sequence[Text], k: int) -> list[int]:
    """[passes, accepted at depth 0, 1, .. k-1] that the decoder counted."""
    rounds = [r for text in texts for r in text.rounds]
    return [len(rounds), *(sum(r.accepted > j for r in rounds) for j in range(k))]


def compare(
    texts: Sequence[Text],
    tables: Sequence[Table],
    k: int,
    deterministic: bool,
    block: bool = False,
) -> Parity:
    """Compares decoded chains with replay's tables of the same texts, in the same order.

    block: the chains were judged by block verification.
    """
    counted = counts(texts, k)
    parts = [moments(table, k, block) for table in tables]
    expected = [float(sum(m.mean[i] for m in parts)) for i in range(k + 1)]
    if deterministic:
        found = [
            _first_split(i, *pair, k) for i, pair in enumerate(zip(texts, tables, strict=True))
        ]
        ties = [s for s in found if s is not None and s.gap < TIE]
        splits = [s for s in found if s is not None and s.gap >= TIE]
        none: list[float | None] = [None] * (k + 1)
        return Parity(True, counted, expected, none, None, not splits, len(texts), ties, splits)
    variance = [float(sum(m.variance[i] for m in parts)) for i in range(k + 1)]
    of = list(zip(counted, expected, variance, strict=True))
    z = [z_score(*one) for one in of]
    # Where nothing random is left the counts must be the same.
    equal = all(abs(count - mean) < 1e-6 for count, mean, spread in of if spread <= FIXED)
    local = local_z(texts, tables, k, block)
    return Parity(False, counted, expected, z, local, equal, len(texts))


def z_score(count: int, mean: float, variance: float) -> float | None:
    """(count - mean) / sqrt(variance), by the tail of Poisson's law where the variance is below 1;
    None where it is 0."""
    if variance >= 1:
        return (count - mean) / math.sqrt(variance)
    return _rare_z(count, mean) if variance > FIXED else None


def _rare_z(count: int, mean: float) -> float:
    """The z that is as unlikely as a count of rare events, whose variance is below 1.

    Such a count is no normal variable: where 0.07 acceptances are expected, one has a chance of 7%
    and (1 - mean) / sqrt(variance) = 3.5. Its law is near Poisson's, whose tail is taken instead.
    """
    below = [math.exp(-mean) * mean**n / math.factorial(n) for n in range(count + 1)]
    if count > mean:  # the chance of so many and more
        tail = max(1.0 - sum(below[:-1]), 1e-12)
        return max(-NormalDist().inv_cdf(tail), 0.0)
    return min(NormalDist().inv_cdf(min(sum(below), 0.5)), 0.0)


def compare_trees(texts: Sequence[Text], walks: Sequence[Walk], k: int) -> Parity:
    """Compares decoded match trees with replay's walks through the same texts: integers are equal.

    A split is a tie where the walk's choice of nodes was within TIE of another one.
    """
    counted = counts(texts, k)
    rounds = [r for walk in walks for r in walk.rounds]
    expected = [float(len(rounds)), *(float(sum(r.accepted > j for r in rounds)) for j in range(k))]
    found = []
    for i, (text, walk) in enumerate(zip(texts, walks, strict=True)):
        pairs = list(zip_longest(text.rounds, walk.rounds))
        at = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if at is not None:
            margin = walk.margins[at] if at < len(walk.margins) else math.inf
            anchor = (pairs[at][1] or pairs[at][0]).anchor
            accepted = [r.accepted for r in pairs[at] if r is not None]
            found.append(Split(i, anchor, min(accepted), margin))
    ties = [s for s in found if s.gap < TIE]
    splits = [s for s in found if s.gap >= TIE]
    none: list[float | None] = [None] * (k + 1)
    return Parity(True, counted, expected, none, None, not splits, len(texts), ties, splits)


def local_z(
    texts: Sequence[Text], tables: Sequence[Table], k: int, block: bool = False
) -> float | None:
    """z of the sum of (r - 1/2) (accepted - r) over every depth tried, r its chance in the table.

    None where no try had a chance between 0 and 1 (other than 1/2, which weighs nothing).
    """
    total = variance = 0.0
    for text, table in zip(texts, tables, strict=True):
        S = survivals(table, k, block)
        for anchor, _, accepted in text.rounds:
            i = anchor - len(text.prompt) + 1
            for j in range(min(k, int(table.limit[i]), accepted + 1)):
                r = float(S[i, j + 1] / S[i, j]) if S[i, j] > 0 else 0.0
                total += (r - 0.5) * ((accepted > j) - r)
                variance += (r - 0.5) ** 2 * r * (1 - r)
    return total / math.sqrt(variance) if variance > 1e-9 else None


def _first_split(prompt: int, text: Text, table: Table, k: int) -> Split | None:
    """The first round in which a deterministic decoder left replay's walk, or None."""
    first = len(text.prompt) - 1  # the anchor whose root is the text's token 0
    walked = [(r.anchor - first, r.accepted) for r in text.rounds]
    i = 0
    for anchor, accepted in walked:
        limit = min(k, int(table.limit[i])) if i < len(table.limit) else 0
        m = 0
        while m < limit and table.ratio[i, m] == 1.0:
            m += 1
        if anchor != i or accepted != m:
            depth = min(m, accepted)
            gap = float(table.gap[i, depth]) if depth < table.gap.shape[1] else math.inf
            return Split(prompt, anchor, depth, gap)
        i += 1 + m
    if i < table.tokens:
        return Split(prompt, i, 0, math.inf)
    return None
