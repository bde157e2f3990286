"""The live line of a training run: loss, alpha_0, tau, tokens/s, time left."""

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


def clock(seconds: float) -> str:
    """h:mm:ss of a duration."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
