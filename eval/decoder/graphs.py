"""CUDA graphs of a round: one for the draft, one for verify, accept and commit.

A graph is captured from the eager code itself, for one batch size and one view of the caches; when
a text outgrows its view the next pair is captured. Whatever the host would have to read inside
would freeze: tests/eval/decoder/test_graphs.py replays recorded rounds on the CPU and compares.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.eval.decoder.round import Rounds

logger = logging.getLogger(__name__)

Launch = Callable[[], None]
# Eager rounds of a view before it is captured: libraries, lazily loaded kernels and allocations set
# themselves up outside of any capture. The first round of a text extends nothing, hence two.
WARM_UP = 2


def capture(run: Callable[[], object], pool: Any) -> Launch:
    """Records what `run` does on the current CUDA device; nothing is executed meanwhile.

    pool: memory that the graphs of one batch share. What they hand to one another is referenced by
    `Rounds` or was there before; the rest is dead once a replay is over.
    """
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    finally:
        torch.cuda.set_stream(before)  # a capture that failed leaves its own stream current
    return graph.replay


class _Pair(NamedTuple):
    draft: Launch
    judge: Launch
    report: Tensor  # where the captured verify leaves it


class Graphs:
    """Runs the rounds of one batch, eagerly while a view of the caches is new, else from graphs.

    Where a capture fails, one line says so and all goes on eagerly.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self._seen: Counter[int] = Counter()  # eager rounds by view
        self.pairs: dict[int, _Pair] = {}
        self._off = False
        cuda = rounds.root.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if cuda else None

    def draft(self) -> None:
        self._view = self.rounds.slab.view(self.rounds.slots)
        if self._seen[self._view] >= WARM_UP and self._view not in self.pairs and not self._off:
            try:
                draft = capture(self.rounds.draft, self._pool)
                judge = capture(self.rounds.judge, self._pool)  # reads tensors that draft makes
                self.pairs[self._view] = _Pair(draft, judge, self.rounds.report)
            except RuntimeError as error:
                self._off = True
                line = str(error).strip().splitlines()[0]
                logger.warning("no CUDA graphs: a round cannot be captured (%s)", line)
        pair = self.pairs.get(self._view)
        pair.draft() if pair else self.rounds.draft()

    def judge(self) -> Tensor:
        """Verify, accept and commit; the round's report, still on the device."""
        pair = self.pairs.get(self._view)
        if pair:
            pair.judge()
            return pair.report
        self._seen[self._view] += 1
        return self.rounds.judge()
