"""The live lines of long work: a training run's, and a count of things done."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Rewrites one line on a terminal; prints a line a time elsewhere."""

    def __init__(self, steps: int, step: int) -> None:
        self.steps, self.first = steps, step
        self.began = time.perf_counter()
        self.live = sys.stderr.isatty()

    def show(self, step: int, loss: float, alpha: float, tau: float, speed: float) -> None:
        """speed in learned tokens per second; tau is the last replay's."""
        passed = time.perf_counter() - self.began
        left = passed / max(step - self.first, 1) * (self.steps - step)
        text = (
            f"step {step}/{self.steps}  loss {loss:.4f}  alpha_0 {alpha:.3f}  tau {tau:.3f}  "
            f"{speed:,.0f} tokens/s  ETA {clock(left)}"
        )
        end = "\r" if self.live and step < self.steps else "\n"
        print(f"{text:<90}" if self.live else text, end=end, file=sys.stderr, flush=True)


class CountLine:
    """Things done of a total, with the time left; elsewhere than on a terminal, a line a minute."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.done = self.skipped = 0
        self.began = self.said = time.perf_counter()
        self.live = sys.stderr.isatty()

    def count(self, made: bool = True) -> None:
        """One more is done; made False: it was there already, and took no time."""
        self.done += 1
        self.skipped += not made
        now, last = time.perf_counter(), self.done == self.total
        if not (self.live or last or now - self.said > 60):
            return
        self.said = now
        each = (now - self.began) / max(self.done - self.skipped, 1)
        text = f"{self.what} {self.done}/{self.total}  ETA {clock(each * (self.total - self.done))}"
        end = "\r" if self.live and not last else "\n"
        print(f"{text:<60}" if self.live else text, end=end, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """h:mm:ss of a duration."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
