"""How passes over the vocabulary are run: fused on a GPU, a few rows at a time on a CPU.

A step spends as much on passes over (rows, V) tensors as its device lets it: on a GPU each pass is
a trip to memory, and `torch.compile` makes one kernel of many; on a CPU a pass over values that
still lie in the cache costs a fraction of one over memory, so that rows are taken in blocks.
Functions are written once, in plain torch; what is compiled is tested against what is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

COMPILED = ("cuda",)  # device types on which functions are compiled
BLOCK = 1 << 19  # values of one block's tensor for each core, so that it stays in the cache

Tensors = tuple[Tensor, ...]


class RowWise:
    """Runs function(rows, shared, ..) -> tensors, whose outputs' row i needs row i of `rows` only.

    rows: tensors with the same first axis, the first of them the widest; shared: tensors that every
    row may read. Further arguments are plain values, each of which is compiled for by itself. Where
    compiling fails, that is told in one line and the function runs as it is written.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self.function = function
        self.fused: Callable[..., Tensors] | None = None
        self.failed = False

    def __call__(self, rows: Sequence[Tensor], shared: Sequence[Tensor], *plain: object) -> Tensors:
        rows = tuple(t.detach() for t in rows)
        device = rows[0].device.type
        if device in COMPILED and not self.failed:
            try:
                return self._compiled()(rows, tuple(shared), *plain)
            except _failures() as error:
                self.failed = True
                line = str(error).strip().splitlines()[0]
                name = self.function.__name__
                logger.warning("%s: not compiled, goes on eagerly (%s)", name, line)
        if device != "cpu":
            return self.function(rows, shared, *plain)
        return self._in_blocks(rows, shared, *plain)

    def _compiled(self) -> Callable[..., Tensors]:
        if self.fused is None:  # chunks differ in size: one kernel for all of them
            self.fused = torch.compile(self.function, fullgraph=True, dynamic=True)
        return self.fused

    def _in_blocks(self, rows: Tensors, shared: Sequence[Tensor], *plain: object) -> Tensors:
        count = rows[0].shape[0]
        size = max(1, BLOCK * torch.get_num_threads() // max(rows[0].shape[1], 1))
        if count <= size:
            return self.function(rows, shared, *plain)
        whole: list[Tensor] = []
        for start in range(0, count, size):
            block = slice(start, start + size)
            parts = self.function(tuple(t[block] for t in rows), shared, *plain)
            if not whole:
                whole = [part.new_empty(count, *part.shape[1:]) for part in parts]
            for out, part in zip(whole, parts, strict=True):
                out[block] = part
        return tuple(whole)


def _failures() -> tuple[type[Exception], ...]:
    """What compiling raises: a graph that breaks, no compiler, too many variants."""
    from torch._dynamo import exc  # slow to import, and of no use where nothing is compiled

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit
