"""Acceptance as a report quotes it: alpha per depth and tau, with intervals, of any set of texts.

Intervals are 95% percentile bootstraps over prompts: the tokens of one text are no independent
observations, and an interval from single tokens would be several times too narrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.replay import Moments, Replay, Table, moments

INTERVAL = 0.95
RESAMPLES = 1000
NGRAM = 8  # tokens that must repeat
FEW = 10  # rounds that tried a depth, below which its alpha is no figure to draw
REPETITIVE = 0.2  # share of a text's tokens in a repeated n-gram, above which it is set apart

Array = NDArray[np.float64]


class Part(NamedTuple):
    """One text: its prompt, tokens that verify passes emit, and what the decoder counts on it."""

    prompt: int
    tokens: int
    counts: Moments


def parts_of(tables: Sequence[Table], k: int, block: bool = False) -> list[Part]:
    """The moments of every text, taken once for all the groups that it stands in."""
    return [Part(table.prompt, table.tokens, moments(table, k, block)) for table in tables]


def acceptance(parts: Sequence[Part], k: int, seed: int = 0) -> dict[str, Any]:
    """tau, alpha and their intervals of texts at draft length k; None where nothing was drafted.

    reached: expected rounds that tried each depth, which is what an alpha rests on.
    """
    worked = [part for part in parts if part.tokens > 0]
    prompts = [part.prompt for part in worked]
    tokens = [float(part.tokens) for part in worked]
    passes = [float(part.counts.mean[0]) for part in worked]
    tried = [[float(part.counts.reached[j]) for part in worked] for j in range(k)]
    taken = [[float(part.counts.survived[j]) for part in worked] for j in range(k)]
    return {
        "texts": len(parts),
        "tokens": int(sum(tokens)),
        "tau": sum(tokens) / sum(passes) if worked else None,
        "tau_ci": ratio_interval(tokens, passes, prompts, seed),
        "alpha": [
            sum(s) / sum(r) if sum(r) > 0 else None for s, r in zip(taken, tried, strict=True)
        ],
        "alpha_ci": [
            ratio_interval(s, r, prompts, seed) for s, r in zip(taken, tried, strict=True)
        ],
        "reached": [sum(r) for r in tried],
    }


def ratio_interval(
    above: Sequence[float], below: Sequence[float], prompts: Sequence[int], seed: int = 0
) -> list[float] | None:
    """Interval of sum(above) / sum(below), resampling whole prompts; None where below sums to 0."""
    if not sum(below) > 0:
        return None
    _, group = np.unique(np.array(prompts), return_inverse=True)
    sums = np.stack([np.bincount(group, above), np.bincount(group, below)])  # (2, prompts)
    drawn = np.random.default_rng(seed).integers(0, sums.shape[1], (RESAMPLES, sums.shape[1]))
    top, bottom = sums[:, drawn].sum(2)
    tail = 50 * (1 - INTERVAL)
    low, high = np.percentile(top[bottom > 0] / bottom[bottom > 0], [tail, 100 - tail])
    return [float(low), float(high)]


def by_domain(
    parts: Sequence[Part], domains: Sequence[str], k: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """`acceptance` of each domain's texts; domains[i] is that of prompt i."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(domains[part.prompt], []).append(part)
    return {name: acceptance(groups[name], k, seed) for name in sorted(groups)}


def repetitive(
    parts: Sequence[Part], answers: Sequence[Sequence[int]], k: int, seed: int = 0
) -> dict[str, Any]:
    """Texts that repeat themselves and all others, apart: loops flatter every drafter.

    answers[i]: the target-made tokens of prompt i.
    """
    loops = {i for i, answer in enumerate(answers) if repeated_share(answer) > REPETITIVE}
    return {
        "apart": acceptance([p for p in parts if p.prompt in loops], k, seed),
        "others": acceptance([p for p in parts if p.prompt not in loops], k, seed),
    }


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of tokens that stand in an n-gram which occurs more than once in the text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    count = Counter(grams)
    covered = {i + j for i, gram in enumerate(grams) if count[gram] > 1 for j in range(n)}
    return len(covered) / max(len(tokens), 1)


def replayed(
    by_k: Mapping[int, Replay],
    domains: Sequence[str],
    answers: Sequence[Sequence[int]],
    seed: int = 0,
) -> dict[str, Any]:
    """What a report keeps of one replay: pooled, per draft length, per domain, repetitive apart."""
    k = max(by_k)
    parts = parts_of(by_k[k].tables, k)
    return acceptance(parts, k, seed) | {
        "k": k,
        "tau_by_k": {str(n): known(r.tau) for n, r in by_k.items()},
        "tau_ci_by_k": {str(n): [known(end) for end in r.tau_ci] for n, r in by_k.items()},
        "alpha_0_by_k": {str(n): r.alpha[0] for n, r in by_k.items()},
        "by_domain": by_domain(parts, domains, k, seed),
        "repetitive": repetitive(parts, answers, k, seed),
    }


def known(value: float) -> float | None:
    """None for the tau of texts that took no verify pass: NaN is no JSON."""
    return None if value != value else value
