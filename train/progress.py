"""The live line of long work: what is done of a total, figures, and the time left.

A terminal's line is rewritten; elsewhere a line is printed a minute, or as often as is asked.
"""

from __future__ import annotations

import sys
import time
from typing import Self

REDRAWN = 0.1  # seconds between two drawings on a terminal


class CountLine:
    """Things done of a total. The time left follows from those done since the line began.

    done: those that were there already. every: seconds between lines elsewhere than on a terminal.
    """

    def __init__(self, what: str, total: int, done: int = 0, every: float = 60.0) -> None:
        self.what, self.total, self.done = what, total, done
        self.first = done  # what took no time
        self.live = sys.stderr.isatty()
        self.every = REDRAWN if self.live else every
        self.began = self.drawn = time.perf_counter()
        self.tokens = 0

    def count(self, made: bool = True, figures: str = "") -> None:
        """One more is done; made False: it was there already, and took no time."""
        self.first += not made
        self.show(self.done + 1, figures)

    def after_prompt(self, what: str, done: int, new: int) -> None:
        """evaluate's progress: where no token is new, a prompt has ended."""
        self.tokens += new
        self.show(self.done + (not new), f"{self.tokens} tokens")

    def show(self, done: int, figures: str = "", share: float | None = None) -> None:
        """So many are done. share: of the time that all take, where it is known better."""
        self.done = done
        now, last = time.perf_counter(), done >= self.total
        if now - self.drawn < self.every and not last:
            return
        self.drawn, passed = now, now - self.began
        if last or share is None:
            share = 1.0 if last else (done - self.first) / (self.total - self.first)
        left = clock(passed * (1 - share) / share) if share else "?"
        text = "  ".join(filter(None, (f"{self.what} {done}/{self.total}", figures, f"ETA {left}")))
        end = "\r" if self.live and not last else "\n"
        print(f"{text:<90}" if self.live else text, end=end, file=sys.stderr, flush=True)


class Answering:
    """Counts prompts and tokens; the time left follows from decoding steps.

    Steps are what takes time: a turn of a batch runs until its longest answer ends. steps: of all
    turns together, at most. shown False: it counts, and prints nothing.
    """

    def __init__(self, prompts: int, done: int, steps: int, shown: bool = True) -> None:
        self.line = CountLine("answers", prompts, done)
        self.tokens = 0
        self._shown, self._total = shown, steps
        self._step = self._finished = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown and self.line.live and self.line.done < self.line.total:
            print(file=sys.stderr)  # what is said of an end before the last stands below the line

    @property
    def rate(self) -> float:
        """Tokens per second since the start, prefill included."""
        return self.tokens / max(time.perf_counter() - self.line.began, 1e-9)

    def step(self, new: int) -> None:
        """One decoding step, which gave `new` tokens."""
        self.tokens += new
        self._step += 1
        self._show(self.line.done)

    def answered(self, first: int, steps: int) -> None:
        """A turn of a batch has ended, which might have taken `steps`; `first` tokens came from its
        prefill."""
        self.tokens += first
        self._finished += steps
        self._step = 0
        self._show(self.line.done)

    def stored(self, prompts: int) -> None:
        """So many more prompts are answered."""
        self._show(self.line.done + prompts)

    def _show(self, done: int) -> None:
        line = self.line
        brief = not line.live and time.perf_counter() - line.began < line.every
        if self._shown and not brief:  # a log needs no line of what took seconds
            share = min(1.0, (self._finished + self._step) / self._total)
            line.show(done, f"{self.rate:.0f} tokens/s", share)
        line.done = done


def clock(seconds: float) -> str:
    """h:mm:ss of a duration."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
