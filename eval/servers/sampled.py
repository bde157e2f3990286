"""A server's counters where its drafts are drawn from q, against replay's moments of its texts.

Given the text, a drawn draft was accepted with chance min(1, q/p) at the text's own token once the
drafts before it were: rounds are random, and counts are compared with their expectation by z
(eval/acceptance/parity.py). The server drafts in every round, so that it counts verify passes
exactly. In a last round that the answer's limit cut it accepts drafts past the text's end too. Its
counts say how many (a round emits one token more than it accepts), but not how deep; the first
draft of a round is never among them. So a deeper count is known to within one for each such answer,
and z is that of the count nearest to what is expected.

Counts of greedy drafts, every server's default, can lie within those bounds. They are recognised
answer by answer: by the rounds that agreement.py expects, which drawn drafts seldom take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from draftsmith.eval.acceptance.intervals import tau
from draftsmith.eval.acceptance.parity import Z_BOUND, count_wave, z_score
from draftsmith.eval.acceptance.replay import TextRatios, summarise, survivals
from draftsmith.eval.servers import agreement
from draftsmith.eval.servers.client import Answer, Counters

SELDOM = 1e-3  # drawn drafts that all go as greedy ones do, by a smaller chance, are greedy ones


@dataclass
class Sampled:
    """One temperature: what the server counted, and what replay expects of drawn drafts.

    expected, z (1 + k,): of passes and of drafts accepted at each depth; z None where nothing is
    random. cut: answers whose last round the limit cut; past_end: drafts accepted past their ends.
    greedy: the counts are those of greedy drafts. splits: answers that rounds of k cannot give.
    """

    k: int
    temperature: float
    answers: int
    counted: Counters
    expected: list[float]
    z: list[float | None]
    equal: bool  # counts in which nothing is random are the expected ones
    cut: int
    past_end: int
    greedy: bool
    splits: list[int]

    @property
    def tau(self) -> float | None:
        return tau(self.counted.tokens - self.answers, self.counted.drafts)

    @property
    def holds(self) -> bool:
        near = all(z is None or abs(z) < Z_BOUND for z in self.z)
        return self.equal and near and not self.greedy and not self.splits

    def report(self) -> dict[str, Any]:
        passes, *accepted = self.expected
        expected = {"drafts": passes, "drafted": self.k * passes, "accepted": accepted}
        return vars(self) | {
            "drafts": "sampled",
            "counted": vars(self.counted),
            "expected": expected,
            "tau": self.tau,
            "holds": self.holds,
        }


def compare(
    answers: Sequence[Answer],
    drawn: Sequence[TextRatios],
    argmax: Sequence[TextRatios],
    k: int,
    temperature: float,
) -> Sampled:
    """Compares answers' counters with replay of the same texts, in the same order.

    drawn, argmax: replay's ratios with drafts drawn from q, and taken as point masses. The server
    drafts k tokens in every round (`shortens` is False).
    """
    mean, variance = summarise(drawn, k).expected()
    total = sum((answer.counted for answer in answers), Counters(accepted=(0,) * k))
    over = [_past_limit(answer) for answer in answers]
    hiding = sum(n > 1 for n in over)  # answers with drafts accepted past the end
    z: list[float | None] = []
    equal = True
    for depth, count in enumerate((total.drafts, *total.accepted), start=-1):
        low = count - hiding if depth > 0 else count
        expected = mean[depth + 1]
        nearest = count if expected > count else low
        inside = low <= expected <= count
        wave = partial(count_wave, drawn, k, depth + 1)
        score = z_score(nearest, expected, variance[depth + 1], wave)
        z.append(0.0 if inside and score is not None else score)
        equal &= inside or score is not None or abs(nearest - expected) < 1e-6
    greedy = agreement.compare(answers, argmax, k, temperature, shortens=False)
    pairs = zip(drawn, answers, strict=True)
    chance = math.prod(_chance(text, k, answer.counted.drafts) for text, answer in pairs)
    return Sampled(
        k, temperature, len(answers), total, mean, z, equal,
        cut=sum(n > 0 for n in over),
        past_end=sum(max(n - 1, 0) for n in over),
        greedy=not greedy.splits and chance < SELDOM,
        splits=[
            i for i, (answer, past) in enumerate(zip(answers, over, strict=True))
            if not 0 <= past <= k or answer.counted.drafted != k * answer.counted.drafts
        ],
    )  # fmt: skip


def _past_limit(answer: Answer) -> int:
    """Tokens that the last round emitted past the answer's limit."""
    counted = answer.counted
    return counted.drafts + sum(counted.accepted) - (len(answer.tokens) - 1)


def _chance(text: TextRatios, k: int, passes: int) -> float:
    """The chance that drawn drafts take so many verify passes through a text."""
    S = survivals(text, k)
    P = S[:, :-1] - S[:, 1:]  # (L, k + 1): m drafts are accepted
    L = len(P)
    ways = np.zeros((L + k + 1, passes + 1))  # from root i on, in n passes
    ways[L - 1 :, 0] = 1.0
    for i in range(L - 2, -1, -1):
        ways[i, 1:] = P[i] @ ways[i + 1 : i + k + 2, :-1]
    return float(ways[0, passes])
