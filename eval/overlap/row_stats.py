"""Row statistics of p and q: what losses and replay are made of.

One row is one (anchor, depth): the target's law p for a token and the drafter's law q. The scalars
have their own backward, in fp32, and are meant to be called on one chunk of anchors with all their
depths, so that no B*T*V tensor ever exists. divergences.py holds the passes over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Guesses, Unroll
from draftsmith.drafters.batch import Alignment, Batch, align
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.overlap.divergences import TargetLaw, measure, slope

CELLS = 1 << 14  # (anchor, depth) pairs whose hidden states are alive at a time


@dataclass
class RowStats:
    """Scalars (n,) per row, fp32.

    alpha: sum_x min(p, q), after the sampler on both sides. logp, logq: log p(x) and log q(x) of
    the text's token after the sampler, -inf where it is cut or cannot be proposed; logq at
    temperature 0 is 0 where x is q's argmax, else -inf.
    gap (no gradient): at temperature 0 the distance of q's two largest logits, by which an fp32 tie
    is recognised; inf elsewhere.
    divergence: those of DIVERGENCES that were asked for, before truncation, finite everywhere;
    p is the true p over the kept tokens, so missing mass counts as rejected. ce is 0, without a
    gradient, where x cannot be proposed.

    At temperature 0 alpha and the divergences take p as one-hot and q at temperature 1, so that
    they can be trained on; logp and logq are the serving law's.
    """

    alpha: Tensor
    logp: Tensor
    logq: Tensor
    gap: Tensor
    divergence: dict[str, Tensor]


def row_stats(
    target: Shell,
    final: Tensor,
    draft_logits: Tensor,
    token: Tensor,
    vocab: VocabMap,
    sampler: Sampler,
    which: Tensor | None = None,
    divergences: Sequence[str] = (),
) -> RowStats:
    """Statistics of n rows.

    final (m, H): the target's pre-norm states; draft_logits (n, Vd); token (n,): the text's token
    of each row; which (n,): each row's index into final (None: m = n, in order), so that depths
    that share a position share its logits. divergences: of DIVERGENCES; each passes over (n, Vd).
    """
    if which is None:
        which = torch.arange(token.shape[0], device=token.device)
    with torch.no_grad():
        law, logp = TargetLaw.from_logits(target.head(final), which, token, vocab, sampler)
    names = tuple(divergences)
    alpha, logq, gap, *values = _Stats.apply(
        draft_logits, law, which, vocab.to_draft(token), sampler, names
    )
    return RowStats(alpha, logp, logq, gap, dict(zip(names, values, strict=True)))


@dataclass
class Chunk:
    """Some anchors of an unroll with all their depths, and each row's place in the batch.

    anchor (c,): index b*A + i of each anchor; exists (c, K); rows (n,): distinct rows of the
    unroll; cell (number of existing cells,): index into rows, in the order of exists; final (m,):
    distinct flat positions b*T + t whose target law is needed; which (n,): each row's index into
    final; token (n,): the text's token.
    """

    anchor: Tensor
    exists: Tensor
    rows: Tensor
    cell: Tensor
    final: Tensor
    which: Tensor
    token: Tensor

    def by_depth(self, values: Tensor, missing: float) -> Tensor:
        """Values (n,) of rows as (c, K), each where its anchor and depth stand."""
        table = values.new_full(self.exists.shape, missing)
        return table.masked_scatter(self.exists, values[self.cell])


def unrolls(
    drafter: Drafter, batch: Batch, depths: int
) -> Iterator[tuple[Alignment, Unroll | Guesses]]:
    """A drafter along all anchors of a batch, CELLS of them with their depths at a time.

    Where depths share rows there are no more of these than tokens, and one pass makes them all.
    """
    alignment = align(batch, depths)
    limit = alignment.exists.numel() if drafter.rows_shared else CELLS
    for part in alignment.split(limit):
        yield part, drafter.unroll(batch, part)


def chunks(batch: Batch, alignment: Alignment, unroll: Unroll, limit: int) -> Iterator[Chunk]:
    """Cuts an unroll into chunks of at most `limit` rows (one anchor at least), in order."""
    B, A, K = unroll.index.shape
    T = batch.tokens.shape[1]
    flat = torch.arange(B, device=batch.device).view(-1, 1, 1) * T + alignment.compare
    index, compare, label = (t.reshape(B * A, K) for t in (unroll.index, flat, alignment.label))
    used = (index >= 0).any(1).nonzero().squeeze(1)
    for anchor in used.split(max(1, limit // K)):
        exists = index[anchor] >= 0  # (c, K)
        rows, cell = index[anchor][exists].unique(return_inverse=True)
        position = torch.empty_like(rows).scatter_(0, cell, compare[anchor][exists])
        token = torch.empty_like(rows).scatter_(0, cell, label[anchor][exists])
        final, which = position.unique(return_inverse=True)
        yield Chunk(anchor, exists, rows, cell, final, which, token)


def chunk_stats(
    drafter: Drafter, batch: Batch, unroll: Unroll, chunk: Chunk, divergences: Sequence[str] = ()
) -> RowStats:
    """Row statistics of a chunk of an unroll, or of leaves that stand for it."""
    if batch.final is None:
        raise ValueError("the batch was not read by its target")
    logits = drafter.logits(*(t[chunk.rows] for t in (unroll.hidden, unroll.prev, unroll.depth)))
    final = batch.final.flatten(0, 1)[chunk.final]
    law = (drafter.vocab, batch.sampler)
    return row_stats(drafter.target, final, logits, chunk.token, *law, chunk.which, divergences)


class _Stats(torch.autograd.Function):
    """alpha, logq, gap and divergences of draft logits (n, Vd) against p at position which (n,)."""

    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: Tensor,
        law: TargetLaw,
        which: Tensor,
        draft_token: Tensor,
        sampler: Sampler,
        names: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        shared = (law.served, law.raw, law.mass, law.plogp)
        rows = (draft_logits, which, draft_token)
        alpha, logq, gap, normaliser, *rest = measure(rows, shared, sampler, names)
        values, cut = rest[: len(names)], rest[len(names) :]
        ctx.save_for_backward(*shared, *rows, logq, normaliser, *cut)
        ctx.sampler, ctx.names = sampler, names
        ctx.mark_non_differentiable(gap)
        ctx.set_materialize_grads(False)  # a loss uses few of the scalars: the rest stay None
        return alpha, logq, gap, *values

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        alpha, own, _, *values = outputs
        *shared, logits, which, token, logq, normaliser = ctx.saved_tensors[:9]
        cut = ctx.saved_tensors[9:]
        grads = {"alpha": alpha, "logq": own} | dict(zip(ctx.names, values, strict=True))
        if ctx.sampler.greedy:
            del grads["logq"]  # a step function
        # A token that q cuts has no gradient: its log-probability is -inf on a whole neighbourhood.
        smooth = {"logq": (token >= 0) & logq.isfinite(), "ce": token >= 0}
        weights = {
            name: torch.where(smooth[name], g, 0.0) if name in smooth else g
            for name, g in grads.items()
            if g is not None
        }
        if not weights:
            return torch.zeros_like(logits), None, None, None, None, None
        rows = (logits, which, token, normaliser, torch.stack([*weights.values()], 1), *cut)
        (grad,) = slope(rows, shared, ctx.sampler, tuple(weights))
        return grad, None, None, None, None, None
