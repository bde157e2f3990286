"""Losses on the table of row statistics, and the backward pass that never holds B*T*V.

A loss is plain autograd on an (anchors, depths) table of scalars and its mask. It returns a
numerator; denominators are counted over the whole global batch before its first micro-batch, so
that gradients do not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from draftsmith.drafters.base import Drafter, Guesses, Unroll
from draftsmith.drafters.batch import Alignment, Batch, align
from draftsmith.drafters.sampling import Noise, Purpose
from draftsmith.eval.overlap.row_stats import Chunk, chunk_stats, chunks
from draftsmith.train.objective.expected_passes import passes
from draftsmith.train.objective.weights import DepthWeights, Running, Sums, reached

DRAWN = 1 << 20  # numbers of a row's noise drawn at a time: they are made from int64 ones
FLOOR = 1e-6  # of alpha under a logarithm, where nothing overlaps (LK, arXiv 2602.23881)


@dataclass
class Cells:
    """A chunk's statistics as tables (c, K), 0 where a depth does not exist.

    ratio: chance min(1, q/p) that the text's token is accepted once its depth is reached;
    likelihood: q of the text's token. At temperature 0, where both are steps, alpha stands for
    them. mean_alpha (K,): the run's lately. own: what the family adds itself.
    """

    alpha: Tensor
    ratio: Tensor
    likelihood: Tensor
    divergence: dict[str, Tensor]
    mean_alpha: Tensor
    own: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """meaning: in a line. table: the loss (c, K) of each cell. needs: the divergences it reads.

    chained: a cell's loss depends on the depths before it, so that they are needed even where one
    row of hidden states serves them all. passes: the table is survival, and its weights are the
    slopes of the expected verify passes, which tie the anchors of a text together and therefore
    need a pass of their own. numbers: what else table takes, by name, as keys of a recipe.
    """

    meaning: str
    table: Callable[..., Tensor]
    needs: tuple[str, ...] = ()
    chained: bool = False
    passes: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)


def _survival(c: Cells) -> Tensor:
    return torch.cumprod(c.ratio, 1)


def _survival_by_alpha(c: Cells) -> Tensor:
    """The last factor of each survival is its expectation over the token: less variance."""
    return reached(c.ratio) * c.alpha


def _kl_to_tv(c: Cells, eta: float) -> Tensor:
    mix = torch.exp(-eta * c.mean_alpha)  # lambda (K,)
    return mix * c.divergence["kl"] + (1 - mix) * (1 - c.alpha)


LOSSES: dict[str, Loss] = {
    "ce": Loss("cross-entropy of the text's own tokens", lambda c: c.divergence["ce"], ("ce",)),
    "kl": Loss("KL(p, q)", lambda c: c.divergence["kl"], ("kl",)),
    "rkl": Loss("KL(q, p), at temperatures above 0", lambda c: c.divergence["rkl"], ("rkl",)),
    "jsd": Loss("Jensen-Shannon divergence", lambda c: c.divergence["jsd"], ("jsd",)),
    "tv": Loss("total variation, 1 - alpha", lambda c: 1.0 - c.alpha),
    "log_alpha": Loss("-log(alpha)", lambda c: -c.alpha.clamp(min=FLOOR).log()),
    "lk": Loss(
        "KL that gives way to TV as acceptance grows (arXiv 2602.23881)",
        _kl_to_tv,
        ("kl",),
        numbers={"eta": Field(3.0, ge=0, description="lk: KL's share is exp(-eta * alpha).")},
    ),
    "l1_ce": Loss(  # |p - q|_1 = 2 TV
        "0.1 cross-entropy + 0.9 |p - q|_1 (DSpark, arXiv 2607.05147)",
        lambda c: 0.1 * c.divergence["ce"] + 1.8 * (1 - c.alpha),
        ("ce",),
    ),
    "hass": Loss(
        "KL, and cross-entropy on p's top tokens (HASS, arXiv 2408.15766)",
        lambda c: c.divergence["kl"] + c.divergence["top_k"],
        ("kl", "top_k"),
    ),
    "expected": Loss(
        "1 - expected share of the draft that is accepted (arXiv 2606.12370)",
        lambda c: 1.0 - torch.cumprod(c.alpha, 1),
        chained=True,
    ),
    "replay": Loss("verify passes per token, 1 / tau", _survival, chained=True, passes=True),
    "replay_alpha": Loss(
        "replay, its last factor averaged", _survival_by_alpha, chained=True, passes=True
    ),
}


@dataclass(frozen=True)
class Objective:
    """loss: a key of LOSSES; weights: of the depths, which the replay losses do not read (theirs
    follow from the text); numbers: the loss's, where they are not the defaults; feature_noise: half
    the width of uniform noise on the features a drafter reads, never on those it is compared with.
    """

    loss: str = "kl"
    weights: DepthWeights = field(default_factory=DepthWeights)
    numbers: Mapping[str, float] = field(default_factory=dict)
    feature_noise: float = 0.0

    def cell_weights(self, batch: Batch, alignment: Alignment) -> Tensor:
        """Weights (B, A, K) known from masks; their sum is the denominator."""
        if LOSSES[self.loss].passes:  # a token is emitted for each anchor that has a depth 0
            one = torch.zeros_like(alignment.exists, dtype=torch.float32)
            one[..., 0] = alignment.exists[..., 0]
            return one
        return self.weights.cells(batch, alignment)

    def table(self, cells: Cells) -> Tensor:
        """The loss (c, K) of each cell."""
        loss = LOSSES[self.loss]
        named = {key: self.numbers.get(key, n.default) for key, n in loss.numbers.items()}
        return loss.table(cells, **named)

    def noisy(self, batch: Batch, noise: Noise | None) -> Batch:
        """The batch that the drafter reads: noise belongs to training, so replay never asks.

        noise: keyed by the rows' places in the step, so that a number depends neither on padding
        nor on the rows that were read beside its own.
        """
        if not self.feature_noise:
            return batch
        assert noise is not None
        noisy = {}
        for number, tap in enumerate(sorted(batch.features)):
            values = batch.features[tap]  # (B, T, H)
            places = torch.arange(values[0].numel(), device=batch.device)  # t * H + channel
            drawn = []
            for some in places.split(DRAWN):
                uniform = noise.uniform(Purpose.FEATURE, some.unsqueeze(0), number)
                drawn.append((self.feature_noise * (2 * uniform - 1)).to(values.dtype))
            noisy[tap] = values + torch.cat(drawn, 1).view_as(values)
        return replace(batch, features=noisy)


def lesson(batch: Batch, depths: int, most: int | None, noise: Noise) -> Alignment:
    """What a batch teaches: all its anchors, or at most so many of each row's that have a depth 0.

    noise: keyed by the rows' places in the step, as for features, so that a choice depends neither
    on padding nor on how a step is cut.
    """
    whole = align(batch, depths)
    if most is None:
        return whole
    drawn = noise.uniform(Purpose.ANCHOR, whole.anchors, 0)  # (B, A)
    drawn = torch.where(whole.exists[..., 0], drawn, 1.0)
    chosen = drawn.argsort(1)[:, :most].sort(1).values  # in the order of the text
    anchors = torch.where(drawn < 1.0, whole.anchors, -1).gather(1, chosen)
    return align(batch, depths, anchors)


def denominator(batch: Batch, alignment: Alignment, objective: Objective) -> float:
    """Sum of the weights of an alignment's cells: known from masks alone, before any forward."""
    return float(objective.cell_weights(batch, alignment).sum())


def backward(
    drafter: Drafter,
    batch: Batch,
    alignment: Alignment,
    objective: Objective,
    total: float,
    rows: int,
    running: Running | None = None,
    noise: Noise | None = None,
) -> Sums:
    """Adds d(numerator / total) to the drafter's gradients for a batch its target has read.

    alignment: the cells that are learned from. total: the global batch's denominator. rows:
    (anchor, depth) rows whose logits are alive at a time; gradients do not depend on it beyond
    rounding. Head, divergence and their gradients run chunk by chunk into a leaf that stands for
    the unroll, which is then differentiated once. running: the run's measurements; None = those of
    a first step. noise: what an objective with feature_noise draws from.
    """
    depths = alignment.exists.shape[2]
    unroll = drafter.unroll(objective.noisy(batch, noise), alignment)
    if isinstance(unroll, Guesses):
        raise TypeError(f"a drafter of family {drafter.family} has nothing to train")
    running = running or Running.start(depths)
    loss, mean_alpha = LOSSES[objective.loss], running.mean_alpha.to(batch.device)
    weights = objective.cell_weights(batch, alignment)  # (B, A, K)
    whole = [unroll.hidden, *unroll.extras.values()]
    hidden, *extras = leaves = [t.detach().requires_grad_() for t in whole]
    leaf = replace(unroll, hidden=hidden, extras=dict(zip(unroll.extras, extras, strict=True)))

    def tables() -> Iterator[tuple[Chunk, Cells]]:
        for chunk in chunks(batch, alignment, unroll, rows):
            yield chunk, _cells(drafter, batch, leaf, chunk, loss, mean_alpha)

    sums = Sums.zero(depths)
    sums.total = float(weights.sum())
    fixed = weights.flatten(0, 1)
    if loss.passes:
        sums.loss, weights = _slopes(tables(), batch, alignment)
    weights = weights.flatten(0, 1)
    for chunk, cells in tables():
        weight = weights[chunk.anchor]
        moving = None
        if not loss.passes:
            moving = objective.weights.moving(cells.ratio, cells.likelihood, chunk.exists)
        if moving is not None:
            sums.factor += float((weight * moving).sum())
            weight = weight * moving / running.mean_factor
        value = (objective.table(cells) * weight).sum()
        if cells.own is not None:
            value = value + drafter.own_weight * (cells.own * fixed[chunk.anchor]).sum()
        (value / total).backward()
        if not loss.passes:
            sums.loss += value.item()
        sums.alpha += cells.alpha.detach().sum(0).cpu()
        sums.cells += chunk.exists.sum(0).cpu()
    moved = [(t, leaf.grad) for t, leaf in zip(whole, leaves, strict=True) if leaf.grad is not None]
    if moved:
        torch.autograd.backward([t for t, _ in moved], [grad for _, grad in moved])
    return sums


def _cells(
    drafter: Drafter, batch: Batch, leaf: Unroll, chunk: Chunk, loss: Loss, mean_alpha: Tensor
) -> Cells:
    stats = chunk_stats(drafter, batch, leaf, chunk, loss.needs)
    alpha = chunk.by_depth(stats.alpha, 0.0)
    divergence = {name: chunk.by_depth(v, 0.0) for name, v in stats.divergence.items()}
    own = None
    if drafter.own_weight:
        place = chunk.final[chunk.which]
        of_rows = drafter.own_loss(batch, leaf, chunk.rows, place, stats.alpha.detach())
        own = chunk.by_depth(of_rows, 0.0)
    if batch.sampler.greedy:
        return Cells(alpha, alpha, alpha, divergence, mean_alpha, own)
    # Foreign text may hold tokens that p cuts; where q cuts them too the ratio is 0.
    known = stats.logp.isfinite() | stats.logq.isfinite()
    ratio = torch.where(known, stats.logq - stats.logp, float("-inf")).clamp(max=0.0).exp()
    ratio, likelihood = chunk.by_depth(ratio, 0.0), chunk.by_depth(stats.logq.exp(), 0.0)
    return Cells(alpha, ratio, likelihood, divergence, mean_alpha, own)


@torch.no_grad()
def _slopes(
    tables: Iterator[tuple[Chunk, Cells]], batch: Batch, alignment: Alignment
) -> tuple[float, Tensor]:
    """Expected verify passes of the batch, and their slope (B, A, K) in each survival."""
    survival = torch.zeros(alignment.exists.shape, dtype=torch.float64, device=batch.device)
    flat = survival.flatten(0, 1)
    for chunk, cells in tables:
        flat[chunk.anchor] = _survival(cells).double()
    count, slope = passes(survival, batch, alignment)
    return count, slope.float()
