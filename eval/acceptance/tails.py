"""The z of a sum given the text: by its variance where that is large, else by its own law's tail.

A small sum is no normal variable. Where 0.07 acceptances are expected, one has a chance of 7%,
though (1 - mean) / sqrt(variance) is 3.5. Where drafts are all but certain, as at low temperatures,
a hundred passes may vary by one, and ten fewer are a bug. Its law comes from its characteristic
function: taken at the WINDOW roots of unity, it gives the law of the sum modulo WINDOW, which is
more than twelve standard deviations wide wherever it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from draftsmith.eval.acceptance.replay import Array, TextRatios, per_round, survivals

Wave = NDArray[np.complex128]  # (WINDOW // 2 + 1,): a characteristic function at the roots

NORMAL = 25.0  # in squares of a sum's largest step: the variance from which it is taken as normal
STEP = 16  # the largest step of a sum here
WINDOW = 1024
FIXED = 1e-9  # a variance that is but rounding
_LEAST = 1e-12  # chances below are lost in rounding
_ROOTS = -2j * np.pi / WINDOW * np.arange(WINDOW // 2 + 1)


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

    The chance to count n from an anchor on is a sum over the drafts m that its round accepts, and
    texts are independent.
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
