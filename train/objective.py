"""Losses on the table of row statistics, and the backward pass that never holds B*T*V.

A loss is plain autograd on an (anchors, depths) table of scalars and its mask. It returns a
numerator; denominators are counted over the whole global batch before its first micro-batch, so
that gradients do not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.drafters.base import Drafter, Guesses
from draftsmith.drafters.batch import Batch, align
from draftsmith.eval.stats import Chunk, RowStats, chunk_stats, chunks

# Each loss is per row. -log alpha is clamped where nothing overlaps (Nebius, arXiv 2602.23881).
LOSSES: dict[str, Callable[[RowStats], Tensor]] = {
    "kl": lambda s: s.kl,
    "tv": lambda s: 1.0 - s.alpha,
    "log_alpha": lambda s: -s.alpha.clamp(min=1e-6).log(),
}


@dataclass(frozen=True)
class Objective:
    """loss: a key of LOSSES; decay: depth j weighs decay**j (EAGLE-3 and SpecForge use 0.8)."""

    loss: str = "kl"
    decay: float = 0.8

    def weights(self, exists: Tensor) -> Tensor:
        """Weight of each cell of a (.., K) mask."""
        depth = torch.arange(exists.shape[-1], device=exists.device)
        return exists * self.decay**depth

    def numerator(self, stats: RowStats, chunk: Chunk) -> Tensor:
        """Weighted sum of the loss over the cells of a chunk."""
        table = chunk.spread(LOSSES[self.loss](stats), 0.0)  # (c, K)
        return (table * self.weights(chunk.exists)).sum()


def denominator(batch: Batch, depths: int, objective: Objective) -> float:
    """Sum of the weights of a batch's cells: known from masks alone, before any forward."""
    return float(objective.weights(align(batch, depths).exists).sum())


@dataclass
class Sums:
    """What a pass adds up for the log: loss numerator, and alpha and cells per depth (K,)."""

    loss: float
    alpha: Tensor
    cells: Tensor

    @classmethod
    def zero(cls, depths: int) -> Sums:
        return cls(0.0, torch.zeros(depths), torch.zeros(depths))

    def add(self, other: Sums) -> None:
        self.loss += other.loss
        self.alpha += other.alpha
        self.cells += other.cells

    def reduced(self, accelerator: Accelerator) -> Sums:
        """The sum over all processes."""
        flat = torch.cat([torch.tensor([self.loss]), self.alpha, self.cells])
        flat = accelerator.reduce(flat.to(accelerator.device), reduction="sum").cpu()
        alpha, cells = flat[1:].chunk(2)
        return Sums(flat[0].item(), alpha, cells)


def backward(
    drafter: Drafter, batch: Batch, depths: int, objective: Objective, total: float, rows: int
) -> Sums:
    """Adds d(numerator / total) to the drafter's gradients for a batch its target has read.

    total: the global batch's denominator. rows: (anchor, depth) rows whose logits are alive at a
    time; gradients do not depend on it beyond rounding. Head, divergence and their gradients run
    chunk by chunk into a leaf that stands for the unroll, which is then differentiated once.
    """
    unroll = drafter.unroll(batch, depths)
    if isinstance(unroll, Guesses):
        raise TypeError(f"a drafter of family {drafter.family} has nothing to train")
    leaf = unroll.hidden.detach().requires_grad_()
    sums = Sums.zero(depths)
    for chunk in chunks(batch, align(batch, depths), unroll, rows):
        stats = chunk_stats(drafter, batch, unroll, leaf, chunk)
        value = objective.numerator(stats, chunk)
        (value / total).backward()
        alpha = chunk.spread(stats.alpha.detach(), 0.0)
        sums.add(Sums(value.item(), alpha.sum(0).cpu(), chunk.exists.sum(0).cpu()))
    if leaf.grad is not None:
        unroll.hidden.backward(leaf.grad.to(unroll.hidden.dtype))
    return sums
