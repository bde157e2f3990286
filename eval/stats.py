"""Row statistics of p and q: what losses and replay are made of.

One row is one (anchor, depth): the target's law p for a token beside the drafter's law q. The
scalars have their own backward, in fp32, and are meant to be called on one chunk of anchors with
all their depths, so that no B*T*V tensor ever exists.

Gradients with respect to the draft logits z, q = softmax(z / T) (each checked in float64):
    log q(x)      (1[i = x] - q_i) / T
    KL(p || q)    (q_i P(kept) - p_i) / T           over the kept tokens, true p
    alpha         q_i (1[q_i <= p_i] - sum_{q <= p} q) / T
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.causal_lm import CausalLM
from draftsmith.drafters.sampling import Sampler, argmax
from draftsmith.drafters.vocab import VocabMap


@dataclass
class RowStats:
    """Scalars (n,) per row, fp32.

    alpha: sum_x min(p, q), after the sampler on both sides. logp, logq: log p(x) and log q(x) of
    the text's token after the sampler, -inf where it is cut or cannot be proposed; logq at
    temperature 0 is 0 where x is q's argmax, else -inf. kl: KL(p || q) over the kept tokens,
    before truncation, finite everywhere; p is the true p, so missing mass counts as rejected.
    gap (no gradient): at temperature 0 the distance of q's two largest logits, by which an fp32 tie
    is recognised; inf elsewhere.

    At temperature 0 alpha and kl take p as one-hot and q at temperature 1, so that they can be
    trained on; logp and logq are the serving law's.
    """

    alpha: Tensor
    logp: Tensor
    logq: Tensor
    kl: Tensor
    gap: Tensor


def row_stats(
    target: CausalLM,
    final: Tensor,
    draft_logits: Tensor,
    token: Tensor,
    vocab: VocabMap,
    sampler: Sampler,
    which: Tensor | None = None,
) -> RowStats:
    """Statistics of n rows.

    final (m, H): the target's pre-norm states; draft_logits (n, Vd); token (n,): the text's token
    of each row; which (n,): each row's index into final (None: m = n, in order), so that depths
    that share a position share its logits.
    """
    if which is None:
        which = torch.arange(token.shape[0], device=token.device)
    with torch.no_grad():
        law = _TargetLaw.of(target.head(final), vocab, sampler)
        logp = law.full[which, token]
    alpha, logq, kl, gap = _Stats.apply(
        draft_logits, law.served, law.raw, which, vocab.to_draft(token), sampler
    )
    return RowStats(alpha, logp, logq, kl, gap)


@dataclass
class Chunk:
    """Some anchors of an unroll with all their depths, and each row's place in the batch.

    exists (c, K); rows (n,): distinct rows of the unroll; cell (number of existing cells,): index
    into rows, in the order of exists; final (m,): distinct flat positions b*T + t whose target
    law is needed; which (n,): each row's index into final; token (n,): the text's token.
    """

    exists: Tensor
    rows: Tensor
    cell: Tensor
    final: Tensor
    which: Tensor
    token: Tensor

    def spread(self, values: Tensor, missing: float) -> Tensor:
        """Values (n,) per row laid out as (c, K)."""
        table = values.new_full(self.exists.shape, missing)
        return table.masked_scatter(self.exists, values[self.cell])


def chunks(batch: Batch, alignment: Alignment, unroll: Unroll, limit: int) -> Iterator[Chunk]:
    """Cuts an unroll into chunks of at most `limit` rows (one anchor at least), in order."""
    B, A, K = unroll.index.shape
    T = batch.tokens.shape[1]
    flat = torch.arange(B, device=batch.device).view(-1, 1, 1) * T + alignment.compare
    index, compare, label = (t.view(B * A, K) for t in (unroll.index, flat, alignment.label))
    used = (index >= 0).any(1).nonzero().squeeze(1)
    for some in used.split(max(1, limit // K)):
        here = index[some]  # (c, K)
        exists = here >= 0
        rows, cell = here[exists].unique(return_inverse=True)
        position = torch.empty_like(rows).scatter_(0, cell, compare[some][exists])
        token = torch.empty_like(rows).scatter_(0, cell, label[some][exists])
        final, which = position.unique(return_inverse=True)
        yield Chunk(exists, rows, cell, final, which, token)


def chunk_stats(
    drafter: Drafter, batch: Batch, unroll: Unroll, hidden: Tensor, chunk: Chunk
) -> RowStats:
    """Row statistics of a chunk. hidden (M, H): the unroll's, or a leaf that stands for it."""
    if batch.final is None:
        raise ValueError("the batch was not read by its target")
    logits = drafter.logits(hidden[chunk.rows], unroll.prev[chunk.rows], unroll.depth[chunk.rows])
    final = batch.final.flatten(0, 1)[chunk.final]
    return row_stats(
        drafter.target, final, logits, chunk.token, drafter.vocab, batch.sampler, chunk.which
    )


@dataclass
class _TargetLaw:
    """p at m positions: full (m, V) log-probabilities after the sampler; served and raw
    (m, Vd): probabilities of the kept tokens after the sampler, and before truncation."""

    full: Tensor
    served: Tensor
    raw: Tensor

    @classmethod
    def of(cls, logits: Tensor, vocab: VocabMap, sampler: Sampler) -> _TargetLaw:
        full = sampler.log_probs(logits)
        served = vocab.kept(full).exp()
        if sampler.greedy or (not sampler.top_k and sampler.top_p == 1.0):
            return cls(full, served, served)
        raw = torch.log_softmax(logits.float() / sampler.temperature, dim=-1)
        return cls(full, served, vocab.kept(raw).exp())


class _Stats(torch.autograd.Function):
    """alpha, logq, kl, gap of draft logits (n, Vd); p of row i is served[which[i]]."""

    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: Tensor,
        served: Tensor,
        raw: Tensor,
        which: Tensor,
        draft_token: Tensor,
        sampler: Sampler,
    ) -> tuple[Tensor, ...]:
        T = 1.0 if sampler.greedy else sampler.temperature
        z = draft_logits.float() / T
        log_raw = torch.log_softmax(z, dim=-1)  # (n, Vd)
        cut = not sampler.greedy and (sampler.top_k > 0 or sampler.top_p < 1.0)
        log_q = torch.log_softmax(sampler.cut(z), dim=-1) if cut else log_raw
        p = served[which]
        p_raw = p if raw is served else raw[which]
        q = log_q.exp()
        alpha = torch.minimum(p, q).sum(1)
        known = draft_token >= 0
        at = draft_token.clamp(min=0).unsqueeze(1)
        if sampler.greedy:
            hit = argmax(draft_logits) == draft_token
            logq = torch.where(hit, 0.0, float("-inf"))
            top = draft_logits.float().topk(min(2, draft_logits.shape[1]), dim=1).values
            gap = top[:, 0] - top[:, -1]
        else:
            logq = torch.where(known, log_q.gather(1, at).squeeze(1), float("-inf"))
            gap = torch.full_like(alpha, float("inf"))
        # p log p (once a position, 0 log 0 = 0) - p log q
        kl = torch.special.xlogy(raw, raw).sum(1)[which] - (p_raw * log_raw).sum(1)
        # A token that q cuts has no gradient: its log-probability is -inf on a whole neighbourhood.
        ctx.save_for_backward(q, log_raw, p, p_raw, at, known & logq.isfinite())
        ctx.temperature, ctx.greedy = T, sampler.greedy
        ctx.mark_non_differentiable(gap)
        ctx.set_materialize_grads(False)  # a loss uses few of the scalars: the rest stay None
        return alpha, logq, kl, gap

    @staticmethod
    def backward(
        ctx: Any,
        g_alpha: Tensor | None,
        g_logq: Tensor | None,
        g_kl: Tensor | None,
        g_gap: None,
    ) -> tuple[Tensor | None, ...]:
        q, log_raw, p, p_raw, at, known = ctx.saved_tensors
        grad = torch.zeros_like(q)
        if g_alpha is not None:
            below = torch.where(q <= p, q, 0.0)
            grad += g_alpha.unsqueeze(1) * (below - q * below.sum(1, keepdim=True))
        if g_kl is not None:
            raw_q = log_raw.exp()
            grad += g_kl.unsqueeze(1) * (raw_q.mul_(p_raw.sum(1, keepdim=True)).sub_(p_raw))
        if g_logq is not None and not ctx.greedy:  # at temperature 0 logq is a step function
            g = torch.where(known, g_logq, 0.0).unsqueeze(1)
            grad -= g * q
            grad.scatter_add_(1, at, g)
        return grad / ctx.temperature, None, None, None, None, None
