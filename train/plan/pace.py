"""How fast this machine computes, measured in a few seconds: what a plan's times rest on.

Two rates. matmul: floating-point operations a second of (rows, a) @ (a, b), through weights that
together do not fit a cache, as a model's do not; it falls with few rows, where reading the weights
is what takes the time. rowwise: numbers a second through log_softmax over a vocabulary, which
stands for all that is done to logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

_SECONDS = 0.4  # of measuring, for each rate
_FLOATS = 32 << 20  # in the weights read: 128 MiB of fp32


@dataclass
class Pace:
    """Rates of a device for a model of hidden size H, MLP size I, V tokens, in a dtype."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    vocab: int
    _matmul: dict[int, float] = field(default_factory=dict)

    def matmul(self, rows: int) -> float:
        """Operations a second at `rows` rows at a time (measured at the power of two below)."""
        rows = 1 << (min(max(rows, 1), 1024).bit_length() - 1)
        if rows not in self._matmul:
            count = max(1, _FLOATS // (self.hidden * self.inner))
            shape = (count, self.hidden, self.inner)
            weights = torch.randn(shape, device=self.device, dtype=self.dtype)
            x = torch.randn(rows, self.hidden, device=self.device, dtype=self.dtype)

            def run() -> None:
                for weight in weights:
                    x @ weight

            self._matmul[rows] = 2 * rows * weights.numel() / self._time(run)
        return self._matmul[rows]

    @cached_property
    def rowwise(self) -> float:
        """Numbers a second through log_softmax over (n, V), in fp32."""
        logits = torch.randn(max(1, (4 << 20) // self.vocab), self.vocab, device=self.device)
        return logits.numel() / self._time(lambda: torch.log_softmax(logits, dim=-1))

    def _time(self, run: Callable[[], object]) -> float:
        """Seconds of one run, the median of as many as fit the time set for it."""
        run()  # warm-up
        taken: list[float] = []
        while sum(taken) < _SECONDS or len(taken) < 3:
            self._wait()
            began = time.perf_counter()
            run()
            self._wait()
            taken.append(time.perf_counter() - began)
        return sorted(taken)[len(taken) // 2]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
