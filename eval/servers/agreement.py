"""A server's counters against the rounds that replay expects on the text the server itself wrote.

Both servers draft greedily by default, at any temperature (drawn drafts: sampled.py), and take the
draft as a point mass: vLLM accepts it with chance p, and what it draws instead is never the draft;
llama.cpp accepts it where the token drawn from the target is the same. So given the text a draft at
depth j was accepted exactly where it is the text's own token, and every round is known: counts are
equal as integers, request by request. In a round that the answer's limit cut, the text does not
say which drafts past its end were accepted: they are reported apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import batch_of
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.intervals import tau
from draftsmith.eval.acceptance.parity import TIE
from draftsmith.eval.acceptance.replay import TextRatios, text_ratios
from draftsmith.eval.decoder.text import Text, first_difference
from draftsmith.eval.evaluate import read_decoded
from draftsmith.eval.servers.client import Answer, Counters


@dataclass
class ExpectedRounds:
    """The rounds that drafts take through one answer, as a server counts them.

    passes: verify passes, plain steps included. tried (k,): drafts at each position. hidden: how
    many of the last round's drafts lie past the text's end, 0 where no round was cut. ties: fp32
    ties met, at which a round could have ended elsewhere.
    """

    counted: Counters
    passes: int
    tried: list[int]
    hidden: int = 0
    ties: int = 0

    def equals(self, found: Counters) -> bool:
        """Whether a server's counters are these, but for hidden drafts, which may be accepted."""
        ours = self.counted
        k = len(ours.accepted)
        if (found.drafts, found.drafted) != (ours.drafts, ours.drafted) or k < len(found.accepted):
            return False
        extra = [a - b for a, b in zip(_padded(found.accepted, k), ours.accepted, strict=True)]
        known, hidden = extra[: k - self.hidden], extra[k - self.hidden :]
        # Drafts in a row add 0, 0 or 1, 0 or 1, 1 to the accepted counts.
        in_a_row = set(hidden) <= {0, 1} and hidden == sorted(hidden, reverse=True)
        return not any(known) and in_a_row


def _padded(accepted: Sequence[int], k: int) -> list[int]:
    """Counts of k positions: a server may leave out those that it never accepted at."""
    return list(accepted) + [0] * (k - len(accepted))


def expected_rounds(
    text: TextRatios, k: int, shortens: bool, flip: int | None = None
) -> ExpectedRounds:
    """The rounds that greedy drafts of length k take through a text.

    shortens: the server drafts at most as many tokens as are left but one, and none for the last.
    flip: the number of the fp32 tie, in the order met, that is decided the other way.
    """
    last = len(text.limit) - 1  # the text's last token; token 0 is prefill's
    drafts = drafted = passes = hidden = ties = 0
    accepted, tried = [0] * k, [0] * k
    root = 0
    while root < last:
        length = min(k, last - root - 1) if shortens else k
        known = min(length, int(text.limit[root]))  # drafts within the text
        m = 0
        while m < known:
            right = bool(text.ratio[root, m] == 1.0)
            if text.gap[root, m] < TIE:
                right ^= ties == flip
                ties += 1
            if not right:
                break
            accepted[m] += 1
            m += 1
        passes += 1
        drafts += length > 0
        drafted += length
        tried = [n + (j < length) for j, n in enumerate(tried)]
        if m == known:
            hidden = length - known
        root += 1 + m
    counted = Counters(drafts, drafted, tuple(accepted), last + 1)
    return ExpectedRounds(counted, passes, tried, hidden, ties)


@dataclass
class Agreement:
    """One temperature: what the server counted, what replay expects, and where they part.

    expected leaves out what hidden drafts added; passes and tried (k,) are replay's: verify passes,
    and drafts at each position (a server counts only their sum). cut: rounds that the limit cut;
    cut_accepted (k,): what the server counted in them past the text's end. ties: answers that
    agree once an fp32 tie is decided the other way. splits: those that do not agree.
    """

    k: int
    temperature: float
    answers: int
    counted: Counters
    expected: Counters
    passes: int
    tried: list[int]
    cut: int
    cut_accepted: list[int]
    ties: list[int] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float | None:
        """Tokens per verify pass; those that prefill yields are not counted."""
        return tau(self.counted.tokens - self.answers, self.passes)

    @property
    def holds(self) -> bool:
        """No split, and at most one tie in 50 answers (one of fewer)."""
        return not self.splits and len(self.ties) <= math.ceil(self.answers / 50)

    def report(self) -> dict[str, Any]:
        return vars(self) | {
            "drafts": "greedy",
            "counted": vars(self.counted),
            "expected": vars(self.expected),
            "tau": self.tau,
            "holds": self.holds,
        }


def compare(
    answers: Sequence[Answer],
    texts: Sequence[TextRatios],
    k: int,
    temperature: float,
    shortens: bool,
) -> Agreement:
    """Compares answers' counters with replay's ratios of the same texts, in the same order."""
    zero = Counters(accepted=(0,) * k)
    out = Agreement(k, temperature, len(answers), zero, zero, 0, [0] * k, 0, [0] * k)
    for i, (answer, ratios) in enumerate(zip(answers, texts, strict=True)):
        found = expected_rounds(ratios, k, shortens)
        if not found.equals(answer.counted):
            others = (expected_rounds(ratios, k, shortens, flip) for flip in range(found.ties))
            tied = next((other for other in others if other.equals(answer.counted)), None)
            (out.ties if tied else out.splits).append(i)
            found = tied or found
        out.counted += answer.counted
        out.expected += found.counted
        out.passes += found.passes
        out.tried = [a + b for a, b in zip(out.tried, found.tried, strict=True)]
        out.cut += found.hidden > 0
        for j in range(k - found.hidden, k):
            counted = _padded(answer.counted.accepted, k)
            out.cut_accepted[j] += counted[j] - found.counted.accepted[j]
    return out


def replayed(
    target: Target, drafter: Drafter, answers: Sequence[Answer], k: int, temperature: float = 0.0
) -> list[TextRatios]:
    """Replay's ratios of every answer: drafts drawn at the temperature, which is the answers' too,
    or at 0 taken as point masses, in answers of any temperature."""
    texts = [Text(answer.prompt, answer.tokens) for answer in answers]
    batches = read_decoded(target, drafter, texts, Sampler(temperature))
    return [text for batch in batches for text in text_ratios(drafter, batch, k)]


@dataclass
class Difference:
    """Where two answers to one prompt part: the position, and the target's top-2 gap there."""

    answer: int
    position: int
    gap: float


@torch.no_grad()
def differences(
    target: Target, answers: Sequence[Answer], plain: Sequence[Answer]
) -> list[Difference]:
    """Answers that are not the server's own without speculation; below TIE an fp32 tie."""
    out = []
    for i, (one, other) in enumerate(zip(answers, plain, strict=True)):
        place = first_difference(one.tokens, other.tokens)
        if place is not None:
            ids = one.prompt + one.tokens[:place]
            batch = batch_of([(ids, [False] * len(ids))], Sampler(0.0)).to(target.device)
            final = target.read(batch, ()).final
            assert final is not None
            top = target.head(final[0, -1]).float().topk(2).values
            out.append(Difference(i, place, float(top[0] - top[1])))
    return out
