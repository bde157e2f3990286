"""Acceptance as a report quotes it: alpha per depth and tau, with intervals, of any set of texts.

Intervals are 95% percentile bootstraps over prompts: the tokens of one text are no independent
observations, and an interval from single tokens would be several times too narrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.replay import Replay, Table, moments, summarise

INTERVAL = 0.95
RESAMPLES = 1000
NGRAM = 8  # tokens that must repeat
REPETITIVE = 0.2  # share of a text's tokens in a repeated n-gram, above which it is set apart

Array = NDArray[np.float64]


def acceptance(tables: Sequence[Table], k: int, seed: int = 0) -> dict[str, Any]:
    """tau, alpha and their intervals of texts at draft length k; None where nothing was drafted."""
    pooled = summarise(tables, k, RESAMPLES, seed)
    worked = [t for t in tables if t.tokens > 0]
    parts = [moments(t, k) for t in worked]
    prompts = [t.prompt for t in worked]
    intervals = [
        ratio_interval([m.survived[j] for m in parts], [m.reached[j] for m in parts], prompts, seed)
        for j in range(k)
    ]
    return {
        "texts": len(tables),
        "tokens": pooled.tokens,
        "tau": pooled.tau if worked else None,
        "tau_ci": list(pooled.tau_ci) if worked else None,
        "alpha": pooled.alpha,
        "alpha_ci": intervals,
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
    tables: Sequence[Table], domains: Sequence[str], k: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """`acceptance` of each domain's texts; domains[i] is that of prompt i."""
    groups: dict[str, list[Table]] = {}
    for table in tables:
        groups.setdefault(domains[table.prompt], []).append(table)
    return {name: acceptance(groups[name], k, seed) for name in sorted(groups)}


def repetitive(
    tables: Sequence[Table], answers: Sequence[Sequence[int]], k: int, seed: int = 0
) -> dict[str, Any]:
    """Texts that repeat themselves and all others, apart: loops flatter every drafter.

    answers[i]: the target-made tokens of prompt i.
    """
    loops = {i for i, answer in enumerate(answers) if repeated_share(answer) > REPETITIVE}
    return {
        "apart": acceptance([t for t in tables if t.prompt in loops], k, seed),
        "others": acceptance([t for t in tables if t.prompt not in loops], k, seed),
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
    tables = by_k[k].tables
    return acceptance(tables, k, seed) | {
        "k": k,
        "tau_by_k": {str(n): _known(r.tau) for n, r in by_k.items()},
        "tau_ci_by_k": {str(n): [_known(end) for end in r.tau_ci] for n, r in by_k.items()},
        "alpha_0_by_k": {str(n): r.alpha[0] for n, r in by_k.items()},
        "by_domain": by_domain(tables, domains, k, seed),
        "repetitive": repetitive(tables, answers, k, seed),
    }


def _known(value: float) -> float | None:
    """None for the tau of texts that took no verify pass: NaN is no JSON."""
    return None if value != value else value
