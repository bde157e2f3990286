"""How much each (anchor, depth) counts, and what a run measures of itself on the way.

Weights are normalised so that their choice does not change the learning rate: those known from
masks are divided by their sum over the whole global batch, those that follow from the drafter's own
acceptance (D-PACE, reach) also by their running mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.train.processes import summed

MEMORY = 0.95  # of running means: about the last 20 steps


@dataclass(frozen=True)
class DepthWeights:
    """kind: constant; geometric, decay**j (EAGLE-3 and SpecForge use 0.8); exponential,
    exp(-j / span) (DFlash, arXiv 2602.06036); dpace (arXiv 2605.18810); reach, the chance that a
    round at this anchor comes to depth j; or one number for each depth.

    per: "token", every cell alike, or "sequence", every conversation alike (DeepSpec).
    """

    kind: str | tuple[float, ...] = "geometric"
    decay: float = 0.8
    span: float = 4.0
    per: str = "token"

    def fixed(self, depths: int, device: torch.device | None = None) -> Tensor:
        """The part (K,) that does not depend on the drafter."""
        j = torch.arange(depths, device=device, dtype=torch.float32)
        if self.kind == "geometric":
            return self.decay**j
        if self.kind == "exponential":
            return torch.exp(-j / self.span)
        if isinstance(self.kind, str):
            return torch.ones_like(j)
        return torch.tensor(self.kind, device=device)[:depths]

    def cells(self, batch: Batch, alignment: Alignment) -> Tensor:
        """Weights (B, A, K) known from masks alone; 0 where a depth does not exist."""
        exists = alignment.exists
        weights = exists * self.fixed(exists.shape[2], exists.device)
        if self.per == "token":
            return weights
        segment = batch.segment.gather(1, alignment.anchors.clamp(min=0)).clamp(min=0)  # (B, A)
        size = int(segment.max()) + 1
        each = weights.sum(2)
        total = each.new_zeros(len(each), size).scatter_add_(1, segment, each)
        return weights / total.gather(1, segment).clamp(min=1e-20).unsqueeze(2)

    def moving(self, ratio: Tensor, likelihood: Tensor, exists: Tensor) -> Tensor | None:
        """The part (c, K) that follows from the drafter, detached; None where there is none.

        ratio (c, K): chance that a depth is accepted once reached; likelihood (c, K): q(x).
        """
        if self.kind == "reach":
            return reached(ratio.detach()) * exists
        if self.kind == "dpace":  # w_k = sum_{j >= k} prod_{i <= j} (q_i + 1) / 2
            chain = torch.cumprod((likelihood.detach() + 1) / 2, 1) * exists
            return chain.flip(1).cumsum(1).flip(1)
        return None


def reached(ratio: Tensor) -> Tensor:
    """Chance (c, K) that a round comes to each depth, from the chances that depths are accepted."""
    return torch.cat([torch.ones_like(ratio[:, :1]), torch.cumprod(ratio, 1)[:, :-1]], 1)


@dataclass
class Sums:
    """What a pass adds up: loss numerator and denominator, the moving weights' sum, and alpha and
    cells per depth (K,)."""

    loss: float
    total: float
    factor: float
    alpha: Tensor
    cells: Tensor

    @classmethod
    def zero(cls, depths: int) -> Sums:
        return cls(0.0, 0.0, 0.0, torch.zeros(depths), torch.zeros(depths))

    def add(self, other: Sums) -> None:
        self.loss += other.loss
        self.total += other.total
        self.factor += other.factor
        self.alpha += other.alpha
        self.cells += other.cells

    def reduced(self, accelerator: Accelerator) -> Sums:
        """The sum over all processes."""
        few = torch.tensor([self.loss, self.total, self.factor])
        flat = torch.cat([few, self.alpha, self.cells])
        flat = summed(accelerator, flat.to(accelerator.device)).cpu()
        alpha, cells = flat[3:].chunk(2)
        loss, total, factor = flat[:3].tolist()
        return Sums(loss, total, factor, alpha, cells)


@dataclass
class Running:
    """What a run has measured lately; it lives in the checkpoint.

    alpha, cells (K,): decayed sums of acceptance and of cells per depth. factor, total: the same of
    the moving weights and of the fixed ones, over the steps whose loss reads weights that move.
    stage: which loss of the curriculum is at work.
    """

    alpha: Tensor
    cells: Tensor
    factor: float = 0.0
    total: float = 0.0
    stage: int = 0

    @classmethod
    def start(cls, depths: int) -> Running:
        return cls(torch.zeros(depths), torch.zeros(depths))

    def update(self, sums: Sums) -> None:
        """Takes in a step's sums over the global batch."""
        self.alpha = MEMORY * self.alpha + sums.alpha
        self.cells = MEMORY * self.cells + sums.cells
        if sums.factor:  # a replay loss takes its weights from the text
            self.factor = MEMORY * self.factor + sums.factor
            self.total = MEMORY * self.total + sums.total

    @property
    def mean_alpha(self) -> Tensor:
        """(K,), 0 before the first step."""
        return self.alpha / self.cells.clamp(min=1)

    @property
    def mean_factor(self) -> float:
        """Of the moving weights; 1 before the first step."""
        return self.factor / self.total if self.total and self.factor else 1.0

    def switch(self, thresholds: Sequence[float]) -> bool:
        """Moves to the curriculum's next loss once alpha_0 has passed its threshold."""
        if self.stage < len(thresholds) and float(self.mean_alpha[0]) >= thresholds[self.stage]:
            self.stage += 1
            return True
        return False
