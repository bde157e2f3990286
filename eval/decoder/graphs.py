"""CUDA graphs of a round: one for the draft, one for verify, accept and commit.

A graph is captured from the eager code itself, for one batch size and one view of the caches; when
a text outgrows its view the next pair is captured. Whatever the host would have to read inside
would freeze: tests/test_graphs.py replays recorded rounds on the CPU and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.eval.decoder.round import Rounds

Replay = Callable[[], None]


def capture(run: Callable[[], object]) -> Replay:
    """Records what `run` does on the current CUDA device; nothing is executed meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class _Pair(NamedTuple):
    draft: Replay
    judge: Replay
    report: Tensor  # where the captured verify leaves it


class Graphs:
    """Runs the rounds of one batch, eagerly where a view of the caches is new, else from graphs."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self._seen: set[int] = set()
        self._pairs: dict[int, _Pair] = {}

    def draft(self) -> None:
        self._view = self.rounds.slab.view(self.rounds.slots)
        if self._view in self._seen and self._view not in self._pairs:
            self._pairs[self._view] = self._captured()
        pair = self._pairs.get(self._view)
        pair.draft() if pair else self.rounds.draft()

    def judge(self) -> Tensor:
        """Verify, accept and commit; the round's report, still on the device."""
        pair = self._pairs.get(self._view)
        if pair:
            pair.judge()
            return pair.report
        # Eagerly once: libraries and lazy allocations set themselves up outside of any capture.
        self._seen.add(self._view)
        return self.rounds.judge()

    def _captured(self) -> _Pair:
        """Both halves, in order: the second reads the tensors that the first one makes."""
        draft = capture(self.rounds.draft)
        judge = capture(self.rounds.judge)
        return _Pair(draft, judge, self.rounds.report)
