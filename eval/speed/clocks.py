"""Clocks that cannot lie: drafter and baseline take turns, and each is compared with itself.

A speedup is a ratio of two clocks, and a machine that does other work during one of them gives any
ratio. So both decode the same batch, one after the other, then the next one: what slows the machine
for long slows both. How much a side's turns differ, its spread, says whether it was a measurement:

    pace_i = seconds of turn i / seconds that its rounds usually take
    spread = 2 sum_i w_i |pace_i - mean| / (mean sum_i w_i)

w_i: what turn i usually takes, each of its rounds counted as the median of this side's rounds of
that width, so that short turns and rounds that proposed less compare with others; mean: of paces,
by w. If half of the work is done slowly and half fast, the spread is how far the halves lie apart;
a share f of turns, slower by d, gives 4 f (1 - f) d, about four times what it adds to the figure.
The range of turns would grow with their number, and call one stall in a long run a busy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.decoder.loop import Clock, Decoder
from draftsmith.eval.decoder.text import Text

BUSY = 0.10  # the spread beyond which a speed is no measurement
WARM_UP = 8  # tokens that a decoder writes before its clock starts


@dataclass(frozen=True)
class Steadiness:
    """How many turns each side took, and the spread of either.

    None: of a single turn, which says nothing. A drafter whose rounds do not compare has 0.
    """

    turns: int
    baseline_spread: float | None
    drafter_spread: float | None = 0.0

    @property
    def busy(self) -> bool:
        """Whether a speed that was measured so is no result."""
        return any(s is None or s > BUSY for s in (self.baseline_spread, self.drafter_spread))

    @property
    def note(self) -> str:
        """Printed instead of a verdict; "" for a measurement."""
        if not self.busy:
            return ""
        if self.baseline_spread is None or self.drafter_spread is None:
            return "Too few turns to tell whether the machine was busy: not a measurement."
        sides = {"the baseline": self.baseline_spread, "the drafter": self.drafter_spread}
        apart = [f"{side} differs from itself by {s:.0%}" for side, s in sides.items() if s > BUSY]
        return (
            f"Machine busy: not a measurement. Over {self.turns} turns of the same work "
            f"{' and '.join(apart)}, where {BUSY:.0%} is let pass."
        )

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"busy": self.busy, "note": self.note}


def result(figure: str, clock: Mapping[str, Any]) -> str:
    """A figure in a table, by its clock's JSON: what is no measurement is not shown as one."""
    return "busy" if clock["busy"] else figure


def worst(*found: Steadiness) -> Steadiness:
    """The larger spread of either side, unknown ones above all, and the fewest turns."""
    sides = zip(*((one.baseline_spread, one.drafter_spread) for one in found), strict=True)
    larger = [None if None in side else max(s for s in side if s is not None) for side in sides]
    return Steadiness(min(one.turns for one in found), *larger)


def spread(turns: Sequence[tuple[float, float]]) -> float | None:
    """The spread of turns (seconds, seconds their work usually takes); None of fewer than two."""
    turns = [turn for turn in turns if turn[1] > 0]
    if len(turns) < 2:
        return None
    whole = sum(work for _, work in turns)
    mean = sum(seconds for seconds, _ in turns) / whole
    apart = sum(work * abs(seconds / work - mean) for seconds, work in turns)
    return 2 * apart / (mean * whole)


def spread_of_rounds(turns: Sequence[Sequence[Clock]]) -> float | None:
    """The spread of a side's turns, each a clock for every round."""
    by_width: dict[int, list[float]] = {}
    for clock in (clock for turn in turns for clock in turn):
        by_width.setdefault(clock.width, []).append(clock.total)
    usual = {width: statistics.median(seconds) for width, seconds in by_width.items()}
    return spread([(sum(c.total for c in t), sum(usual[c.width] for c in t)) for t in turns])


# ---------------------------------------------------------------- taking turns


@dataclass
class Turn:
    """A batch decoded: its texts, a clock for every round, seconds of prefill and of it all."""

    texts: list[Text]
    rounds: list[Clock]
    prefill: float
    wall: float


def take_turn(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    *,
    progress: Callable[[int], None] = lambda new: None,
    **more: Any,
) -> Turn:
    """`decoder.generate`, timed round by round. progress is called with each round's new tokens."""
    rounds: list[Clock] = []

    def mark(new: int) -> None:
        rounds.append(decoder.clock)
        decoder.clock = Clock()
        progress(new)

    decoder.clock = Clock()
    began = time.perf_counter()
    texts = decoder.generate(prompts, sampler, max_new_tokens, progress=mark, **more)
    wall = time.perf_counter() - began
    return Turn(texts, rounds, sum(c.prefill for c in [*rounds, decoder.clock]), wall)


def in_turns(
    decoders: Sequence[Decoder],
    batches: Sequence[Sequence[Sequence[int]]],
    sampler: Sampler,
    max_new_tokens: int,
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    progress: Callable[[int, int, int], None] = lambda side, done, new: None,
) -> list[list[Turn]]:
    """Every batch decoded by each decoder, one after the other; the turns of each decoder.

    Batches are of one size; rows are numbered through. A decoder warms up first: where graphs are
    captured on all of the text, each batch having its own views of the caches.
    progress(which decoder, its batches done, new tokens): 0 new tokens where a batch has ended.
    """
    rows = [range(i * len(batch), (i + 1) * len(batch)) for i, batch in enumerate(batches)]
    for decoder in decoders:
        tokens = max_new_tokens if decoder.graphs else min(WARM_UP, max_new_tokens)
        for i, batch in enumerate(batches if decoder.graphs else batches[:1]):
            decoder.generate(batch, sampler, tokens, rows=rows[i], seed=seed)
    turns: list[list[Turn]] = [[] for _ in decoders]
    for i, batch in enumerate(batches):
        for side, decoder in enumerate(decoders):
            turn = take_turn(
                decoder, batch, sampler, max_new_tokens, rows=rows[i], seed=seed, stop=stop,
                progress=lambda new, side=side, i=i: progress(side, i, new),  # type: ignore[misc]
            )  # fmt: skip
            turns[side].append(turn)
            progress(side, i + 1, 0)
    return turns
