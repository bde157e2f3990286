"""Exact chances of everything an accept rule can do, and a test of counts against chances.

A rule is driven through its own `draws`, so that the serving code itself is what is certified.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TypeVar

import torch
from scipy.stats import chi2
from torch import Tensor

Result = TypeVar("Result")


class Script:
    """A `draws` that takes the scripted outcomes, then the first possible ones, noting the rest."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.calls, self.chance = script, 0, 1.0
        self.unexplored: list[list[int]] = []

    def _take(self, chances: list[float]) -> int:
        """The outcome scripted for this call; an outcome of chance 0 never happens."""
        if self.calls == len(self.script):
            first, *others = [i for i, chance in enumerate(chances) if chance > 0]
            self.unexplored += [[*self.script, i] for i in others]
            self.script = [*self.script, first]
        taken = self.script[self.calls]
        self.calls += 1
        self.chance *= chances[taken]
        return taken

    def accept(self, prob: Tensor) -> Tensor:
        """Independent coins of any shape: an outcome is one pattern of all of them."""
        flat = prob.double().flatten().tolist()
        if not all(0 <= p <= 1 for p in flat):
            raise ValueError(f"accept: {flat} are not chances")
        patterns = list(product((True, False), repeat=len(flat)))
        taken = self._take(
            [
                math.prod(p if coin else 1 - p for p, coin in zip(flat, pattern, strict=True))
                for pattern in patterns
            ]
        )
        return torch.tensor(patterns[taken], dtype=torch.bool).reshape(prob.shape)

    def pick(self, weights: Tensor) -> Tensor:
        """weights (.., V): an outcome is one index for each row."""
        rows = weights.double().reshape(-1, weights.shape[-1]).tolist()
        if not all(min(row) >= 0 and 0 < sum(row) < math.inf for row in rows):
            raise ValueError(f"pick: {rows} are not weights")
        choices = list(product(range(weights.shape[-1]), repeat=len(rows)))
        taken = self._take(
            [
                math.prod(row[x] / sum(row) for row, x in zip(rows, choice, strict=True))
                for choice in choices
            ]
        )
        return torch.tensor(choices[taken]).reshape(weights.shape[:-1])


def enumerate_rule(rule: Callable[[Script], Result]) -> Iterator[tuple[float, Result]]:
    """Every outcome of rule(draws) with its exact chance. Inputs must be float64 to be exact."""
    scripts: list[list[int]] = [[]]
    while scripts:
        draws = Script(scripts.pop())
        result = rule(draws)
        scripts += draws.unexplored
        yield draws.chance, result


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
