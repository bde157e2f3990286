"""Acceptance of any set of texts: tau, alpha per depth, and their intervals.

Intervals are 95% percentile bootstraps over prompts: the tokens of one text are no independent
observations, and an interval from single tokens would be several times too narrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.decoder.text import Text

INTERVAL = 0.95
RESAMPLES = 1000
NGRAM = 8  # tokens that must repeat
FEW = 10  # rounds that tried a depth, below which its alpha is no figure to draw
REPETITIVE = 0.2  # share of a text's tokens in a repeated n-gram, above which it is set apart

Array = NDArray[np.float64]


@dataclass
class Moments:
    """Of the counts over one text: mean and variance of [passes, accepted at depth 0, 1, ..].

    reached and survived (k,): expected rounds in which depth j was reached, and accepted.
    """

    mean: Array  # (1 + k,)
    variance: Array
    reached: Array
    survived: Array


class Part(NamedTuple):
    """One text: its prompt, tokens that verify passes emit, and what the decoder counts on it."""

    prompt: int
    tokens: int
    counts: Moments


@dataclass(frozen=True)
class Acceptance:
    """Of some texts at one draft length; None where no verify pass ran, or none tried a depth.

    tokens: that verify passes emitted. reached (k,): expected rounds that tried each depth, which
    is what an alpha rests on. Intervals are [low, high].
    """

    texts: int
    tokens: int
    passes: float
    tau: float | None
    tau_ci: list[float] | None
    alpha: list[float | None]
    alpha_ci: list[list[float] | None]
    reached: list[float]

    @property
    def ends(self) -> list[float] | list[None]:
        """tau's interval where a report must hold two ends."""
        return self.tau_ci or [None, None]


def tau(tokens: float, passes: float) -> float | None:
    """Tokens per verify pass, pooled: all tokens that passes emitted over all passes.

    Prefill's token and drafts past an end or a cut are not counted. None where no pass ran.
    """
    return float(tokens / passes) if passes else None


def counted_tau(texts: Sequence[Text]) -> float | None:
    """tau of decoded texts, as integers."""
    return tau(sum(len(t.tokens) - 1 for t in texts), sum(len(t.rounds) for t in texts))


def expected_tau(parts: Sequence[Part]) -> float | None:
    """tau of texts by their moments."""
    passes = np.array([part.counts.mean[0] for part in parts if part.tokens > 0])
    return tau(sum(part.tokens for part in parts), passes.sum())


def acceptance(
    parts: Sequence[Part], k: int, seed: int = 0, resamples: int = RESAMPLES
) -> Acceptance:
    """Acceptance of texts at draft length k."""
    worked = [part for part in parts if part.tokens > 0]
    prompts = [part.prompt for part in worked]
    tokens = [float(part.tokens) for part in worked]
    passes = [float(part.counts.mean[0]) for part in worked]
    tried = [[float(part.counts.reached[j]) for part in worked] for j in range(k)]
    taken = [[float(part.counts.survived[j]) for part in worked] for j in range(k)]
    depths = list(zip(taken, tried, strict=True))
    return Acceptance(
        texts=len(parts),
        tokens=int(sum(tokens)),
        passes=sum(passes),
        tau=expected_tau(worked),
        tau_ci=ratio_interval(tokens, passes, prompts, seed, resamples),
        alpha=[sum(s) / sum(r) if sum(r) > 0 else None for s, r in depths],
        alpha_ci=[ratio_interval(s, r, prompts, seed, resamples) for s, r in depths],
        reached=[sum(r) for r in tried],
    )


def ratio_interval(
    above: Sequence[float],
    below: Sequence[float],
    prompts: Sequence[int],
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[float] | None:
    """Interval of sum(above) / sum(below), resampling whole prompts; None where below sums to 0."""
    if not sum(below) > 0:
        return None
    _, group = np.unique(np.array(prompts), return_inverse=True)
    sums = np.stack([np.bincount(group, above), np.bincount(group, below)])  # (2, prompts)
    drawn = np.random.default_rng(seed).integers(0, sums.shape[1], (resamples, sums.shape[1]))
    top, bottom = sums[:, drawn].sum(2)
    tail = 50 * (1 - INTERVAL)
    low, high = np.percentile(top[bottom > 0] / bottom[bottom > 0], [tail, 100 - tail])
    return [float(low), float(high)]


def by_domain(
    parts: Sequence[Part], domains: Sequence[str], k: int, seed: int = 0
) -> dict[str, Acceptance]:
    """`acceptance` of each domain's texts; domains[i] is that of prompt i."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(domains[part.prompt], []).append(part)
    return {name: acceptance(groups[name], k, seed) for name in sorted(groups)}


def repetitive(
    parts: Sequence[Part], answers: Sequence[Sequence[int]], k: int, seed: int = 0
) -> dict[str, Acceptance]:
    """Texts that repeat themselves ("apart") and all "others": loops flatter every drafter.

    answers[i]: the target-made tokens of prompt i.
    """
    loops = {i for i, answer in enumerate(answers) if repeated_share(answer) > REPETITIVE}
    return {
        "apart": acceptance([p for p in parts if p.prompt in loops], k, seed),
        "others": acceptance([p for p in parts if p.prompt not in loops], k, seed),
    }


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of tokens in an n-gram that occurs more than once in the text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    count = Counter(grams)
    covered = {i + j for i, gram in enumerate(grams) if count[gram] > 1 for j in range(n)}
    return len(covered) / max(len(tokens), 1)
