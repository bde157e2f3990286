"""Replay in the independent reference: not a recursion over n(a), but every walk there is.

A text's walks number up to 2 ** tokens: keep spans below about 16 tokens.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

Ratios = list[list[float]]  # [anchor][depth], only depths that exist
Walk = list[tuple[int, int]]  # (row of the table, accepted drafts) of each round


def ratios(
    laws: Sequence[Tensor],
    tokens: Sequence[int],
    root: int,
    depths: int,
    draft: Callable[[int, int], Tensor | int | None],
) -> Ratios:
    """q/p at the text's own tokens, for the span tokens[root:]: one row per anchor from root - 1.

    draft(anchor, depth) gives q, or the one token proposed, or None where nothing is.
    """
    table: Ratios = []
    for anchor in range(root - 1, len(tokens) - 2):
        table.append([])
        for at in range(anchor + 2, min(anchor + 2 + depths, len(tokens))):
            q, x = draft(anchor, at - anchor - 2), tokens[at]
            if q is None:
                break
            ratio = float(q == x) if isinstance(q, int) else float(q[x]) / float(laws[at - 1][x])
            table[-1].append(ratio)
    return table


def rounds(table: Ratios, rule: str = "token", at: int = 0) -> Iterator[tuple[float, Walk]]:
    """Every way the rounds can go: its chance, and (row of the table, accepted) of each round.

    Rules: "token", "block". Match trees and guesses are "token" with ratios 1 and 0.
    """
    if at >= len(table):  # the root is the text's last token, or a draft was
        yield 1.0, []
        return
    survival, together = [1.0], 1.0
    for ratio in table[at]:
        together *= ratio
        token = survival[-1] * min(1.0, ratio)
        survival.append(token if rule == "token" else min(survival[-1], together))
    for m, (here, deeper) in enumerate(zip(survival, [*survival[1:], 0.0], strict=True)):
        if here > deeper:
            for chance, rest in rounds(table, rule, at + 1 + m):
                yield (here - deeper) * chance, [(at, m), *rest]


def moments(
    table: Ratios, count: Callable[[int], float], rule: str = "token"
) -> tuple[float, float]:
    """Mean and variance over all walks of sum(count(m)) over rounds, m being the accepted."""
    walks = [(chance, sum(count(m) for _, m in walk)) for chance, walk in rounds(table, rule)]
    mean = sum(chance * total for chance, total in walks)
    return mean, sum(chance * (total - mean) ** 2 for chance, total in walks)


def expected_passes(table: Ratios, rule: str = "token") -> float:
    return moments(table, lambda m: 1, rule)[0]


def alpha(table: Ratios, depth: int, rule: str = "token") -> float:
    """Chance that depth is accepted in a round that reaches it and has it."""
    walks = list(rounds(table, rule))
    reached = sum(c * sum(len(table[a]) > depth <= m for a, m in walk) for c, walk in walks)
    return sum(c * sum(m > depth for _, m in walk) for c, walk in walks) / reached
