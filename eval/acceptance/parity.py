"""Parity: what the decoder counted against what replay expects on the text it wrote.

Deterministic drafts: rounds are equal as integers, prompt by prompt, but for splits where q's two
largest logits lie within an fp32 tie. Sampled drafts: z = (counted - expected) / sqrt(variance)
for passes and for each depth. Anything else is a bug, never noise.

Those z pool over texts, and a drafter that reads the wrong features accepts about as often, only
elsewhere: they hardly see it. Given the text each tried depth is an independent coin, so `z_local`
says whether coins of higher chance came up more often, and those of lower chance less.

A small sum is no normal variable. Where 0.07 acceptances are expected, one has a chance of 7%,
though (1 - mean) / sqrt(variance) is 3.5. Where drafts are all but certain, as at low temperatures,
a hundred passes may vary by one, and ten fewer are a bug. Its law comes from its characteristic
function: taken at the WINDOW roots of unity, it gives the law of the sum modulo WINDOW, which is
more than twelve standard deviations wide wherever it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.acceptance.replay import Array, ReplayResult, TextRatios, per_round, survivals
from draftsmith.eval.acceptance.walk import TreeWalk
from draftsmith.eval.decoder.text import Text, first_difference

TIE = 1e-3  # two logits closer than this are a tie in fp32
Z_BOUND = 3.5
Wave = NDArray[np.complex128]  # (WINDOW // 2 + 1,): a characteristic function at the roots

NORMAL = 25.0  # in squares of a sum's largest step: the variance from which it is taken as normal
STEP = 16  # the largest step of a sum here
WINDOW = 1024
FIXED = 1e-9  # a variance that is but rounding
_LEAST = 1e-12  # chances below are lost in rounding
_ROOTS = -2j * np.pi / WINDOW * np.arange(WINDOW // 2 + 1)


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
    sampled: z per count, by the tail of its own law where the variance is small, None where that is
    0 (then the counts must be equal).
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
        """Whether decoder and replay agree: as integers, or within Z_BOUND."""
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


def counts(texts: Sequence[Text | TreeWalk], k: int) -> list[int]:
    """[passes, accepted at depth 0, 1, .. k-1] that the decoder, or a walk, counted."""
    rounds = [r for text in texts for r in text.rounds]
    return [len(rounds), *(sum(r.accepted > j for r in rounds) for j in range(k))]


def compare(texts: Sequence[Text], replay: ReplayResult, deterministic: bool) -> Parity:
    """Compares decoded chains with replay of the same texts, in the same order."""
    ratios, k = replay.texts, replay.k
    counted = counts(texts, k)
    expected, variance = replay.expected()
    if deterministic:
        pairs = enumerate(zip(texts, ratios, strict=True))
        return _equal(texts, counted, expected, [_first_split(i, *pair, k) for i, pair in pairs])
    each = list(zip(counted, expected, variance, strict=True))
    waves = [partial(count_wave, ratios, k, i, replay.block) for i in range(k + 1)]
    z = [z_score(*one, wave) for one, wave in zip(each, waves, strict=True)]
    # Where nothing random is left the counts must be the same.
    equal = all(abs(count - mean) < 1e-6 for count, mean, rest in each if rest <= FIXED)
    local = local_z(texts, ratios, k, replay.block)
    return Parity(False, counted, expected, z, local, equal, len(texts))


def _equal(
    texts: Sequence[Text], counted: list[int], expected: list[float], found: Sequence[Split | None]
) -> Parity:
    """The parity of counts that must be equal as integers; found: where each text split, if any."""
    ties = [s for s in found if s is not None and s.gap < TIE]
    splits = [s for s in found if s is not None and s.gap >= TIE]
    none: list[float | None] = [None] * len(counted)
    return Parity(True, counted, expected, none, None, not splits, len(texts), ties, splits)


def compare_trees(texts: Sequence[Text], walks: Sequence[TreeWalk], k: int) -> Parity:
    """Compares decoded match trees with replay's walks through the same texts: integers are equal.

    A split is a tie where the walk's choice of nodes was within TIE of another one.
    """
    counted = counts(texts, k)
    expected = [float(count) for count in counts(walks, k)]
    found: list[Split | None] = []
    for i, (text, walk) in enumerate(zip(texts, walks, strict=True)):
        parted = first_difference(text.rounds, walk.rounds)
        if parted is not None:
            margin = walk.margins[parted] if parted < len(walk.margins) else math.inf
            both = [*walk.rounds[parted : parted + 1], *text.rounds[parted : parted + 1]]
            found.append(Split(i, both[0].anchor, min(r.accepted for r in both), margin))
    return _equal(texts, counted, expected, found)


def local_z(
    texts: Sequence[Text], ratios: Sequence[TextRatios], k: int, block: bool = False
) -> float | None:
    """z of the sum of (r - c) (accepted - r) over every depth tried, r its chance by replay.

    c is the mean of r weighted by r (1 - r), so that the sum is orthogonal to the number accepted:
    more acceptances everywhere leave it alone, more at low r and fewer at high r do not. r - c
    is rounded to sixteenths, so that a small sum has a law (taken as though the walk had not chosen
    its own tries). None where every chance is certain, or all are alike.
    """
    tries = np.array(list(_tries(texts, ratios, k, block))).reshape(-1, 2)
    r, accepted = tries.T
    each = r * (1 - r)  # the variance of a try
    if each.sum() <= FIXED:
        return None
    weight = np.rint(STEP * (r - (r * each).sum() / each.sum()))
    total, mean, variance = int(weight @ accepted), float(weight @ r), float(weight**2 @ each)
    return z_score(total, mean, variance, partial(coin_wave, r, weight), STEP)


def _tries(
    texts: Sequence[Text], ratios: Sequence[TextRatios], k: int, block: bool
) -> Iterator[tuple[float, bool]]:
    """Of every depth that the decoder tried: its chance by replay, and whether it was accepted."""
    for text, found in zip(texts, ratios, strict=True):
        S = survivals(found, k, block)
        for anchor, _, accepted in text.rounds:
            i = anchor - len(text.prompt) + 1
            for j in range(min(k, int(found.limit[i]), accepted + 1)):
                yield float(S[i, j + 1] / S[i, j]) if S[i, j] > 0 else 0.0, accepted > j


def _first_split(prompt: int, text: Text, ratios: TextRatios, k: int) -> Split | None:
    """The first round in which a deterministic decoder left replay's walk, or None."""
    first = len(text.prompt) - 1  # the anchor whose root is the text's token 0
    walked = [(r.anchor - first, r.accepted) for r in text.rounds]
    i = 0
    for anchor, accepted in walked:
        limit = min(k, int(ratios.limit[i])) if i < len(ratios.limit) else 0
        m = 0
        while m < limit and ratios.chance[i, m] == 1.0:
            m += 1
        if anchor != i or accepted != m:
            depth = min(m, accepted)
            gap = float(ratios.gap[i, depth]) if depth < ratios.gap.shape[1] else math.inf
            return Split(prompt, anchor, depth, gap)
        i += 1 + m
    if i < ratios.tokens:
        return Split(prompt, i, 0, math.inf)
    return None


# ---------------------------------------------------------------- z by a sum's own law


def z_score(
    total: int, mean: float, variance: float, wave: Callable[[], Wave], step: int = 1
) -> float | None:
    """How far a sum of whole steps, none longer than `step`, lies from its mean; None where nothing
    about it is random. wave() gives its characteristic function."""
    if variance <= FIXED:
        return None
    if variance >= NORMAL * step**2:
        return (total - mean) / math.sqrt(variance)
    return tail_z(total, mean, wave())


def tail_z(total: int, mean: float, wave: Wave) -> float:
    """The normal quantile of the smaller of P(X <= total) and P(X >= total), 0 from a half on.

    So |z| >= b is no likelier than for a normal variable. It ends at 7.
    """
    middle = WINDOW // 2 - round(mean)
    law = np.roll(np.fft.irfft(wave, WINDOW), middle)  # law[n]: chance of n - middle
    place = min(max(total + middle, 0), WINDOW - 1)
    low, high = float(law[: place + 1].sum()), float(law[place:].sum())
    z = NormalDist().inv_cdf(min(max(low, _LEAST), max(high, _LEAST), 0.5))
    return z if low < high else abs(z)


def count_wave(texts: Sequence[TextRatios], k: int, count: int, block: bool = False) -> Wave:
    """Of one of [passes, accepted at depth 0, 1, ..] over all texts, by the recursion of moments.

    The chance to count n from an anchor on is a sum over the m drafts that its round accepts.
    """
    turn = np.exp(per_round(k)[:, count, None] * _ROOTS)  # (k + 1, F)
    out = np.ones_like(_ROOTS)
    for text in texts:
        S = survivals(text, k, block)
        P = S[:, :-1] - S[:, 1:]  # (L, k + 1)
        L = len(P)
        after = np.ones((L + k + 1, len(_ROOTS)), dtype=complex)
        for i in range(L - 2, -1, -1):
            after[i] = (P[i, :, None] * turn * after[i + 1 : i + k + 2]).sum(0)
        out *= after[0]
    return out


def coin_wave(chance: Array, weight: Array) -> Wave:
    """Of the sum of whole weights (n,) over those of n independent coins that come up."""
    out = np.ones_like(_ROOTS)
    for r, w in zip(chance, weight, strict=True):
        out *= 1 - r + r * np.exp(w * _ROOTS)
    return out
