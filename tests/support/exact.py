"""A test of counts against chances."""

from collections.abc import Sequence

from scipy.stats import chi2


def chi_square(counts: Sequence[float], probs: Sequence[float]) -> float:
    """p-value of counts under probs; cells expecting fewer than 5 are pooled into one.

    0 if an outcome of chance 0 occurred. Raises ValueError where nothing could be told.
    """
    total = sum(counts)
    if len(counts) != len(probs) or abs(sum(probs) - 1) > 1e-6:
        raise ValueError(f"{len(counts)} counts, {len(probs)} probs, which sum to {sum(probs)}")
    if any(n > 0 and p <= 0 for n, p in zip(counts, probs, strict=True)):
        return 0.0
    cells = sorted((p * total, n) for n, p in zip(counts, probs, strict=True) if p > 0)
    if len(cells) == 1:
        return 1.0
    while len(cells) > 1 and cells[0][0] < 5:  # the smallest joins the next, until none is small
        (a, n), (b, m), *others = cells
        cells = sorted([(a + b, n + m), *others])
    if len(cells) == 1:
        raise ValueError(f"{total} counts are too few for these probs")
    return float(chi2.sf(sum((n - e) ** 2 / e for e, n in cells), len(cells) - 1))
