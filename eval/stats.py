"""Row statistics of p and q: what losses and replay are made of.

One row is one (anchor, depth): the target's law p for a token beside the drafter's law q. The
scalars have their own backward, in fp32, and are meant to be called on one chunk of anchors with
all their depths, so that no B*T*V tensor ever exists.

Gradients with respect to the draft logits z, q = softmax(z / T) (each checked in float64):
    log q(x)      (1[i = x] - q_i) / T
    alpha         q_i (1[q_i <= p_i] - sum_{q <= p} q) / T
    ce            (q_i - 1[i = x]) / T                 -log q(x)
    kl            (q_i P(kept) - p_i) / T              KL(p || q) over the kept tokens, true p
    rkl           q_i (r_i - E_q r) / T                KL(q || p), r = log(q / p)
    jsd           the same, r = log(2q / (p + q)) / 2  Jensen-Shannon, over all of V
    top_k         (q_i P(top) - p_i 1[i in top]) / T   -sum_top p log q (HASS, arXiv 2408.15766)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.causal_lm import CausalLM
from draftsmith.drafters.sampling import Sampler, argmax
from draftsmith.drafters.vocab import VocabMap

DIVERGENCES = ("ce", "kl", "rkl", "jsd", "top_k")
TOP = 10  # tokens of HASS's top-k term
_TINY = torch.finfo(torch.float32).tiny


@dataclass
class RowStats:
    """Scalars (n,) per row, fp32.

    alpha: sum_x min(p, q), after the sampler on both sides. logp, logq: log p(x) and log q(x) of
    the text's token after the sampler, -inf where it is cut or cannot be proposed; logq at
    temperature 0 is 0 where x is q's argmax, else -inf.
    gap (no gradient): at temperature 0 the distance of q's two largest logits, by which an fp32 tie
    is recognised; inf elsewhere.
    divergence: those of DIVERGENCES that were asked for, before truncation, finite everywhere; p is
    the true p over the kept tokens, so missing mass counts as rejected. ce is 0, without a
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
    target: CausalLM,
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
    that share a position share its logits. divergences: names out of DIVERGENCES; each one costs a
    pass over (n, Vd).
    """
    if which is None:
        which = torch.arange(token.shape[0], device=token.device)
    with torch.no_grad():
        law = _TargetLaw.of(target.head(final), vocab, sampler)
        logp = law.full[which, token]
    names = tuple(divergences)
    alpha, logq, gap, *values = _Stats.apply(
        draft_logits, law.served, law.raw, which, vocab.to_draft(token), sampler, names
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
        yield Chunk(some, exists, rows, cell, final, which, token)


def chunk_stats(
    drafter: Drafter,
    batch: Batch,
    unroll: Unroll,
    hidden: Tensor,
    chunk: Chunk,
    divergences: Sequence[str] = (),
) -> RowStats:
    """Row statistics of a chunk. hidden (M, H): the unroll's, or a leaf that stands for it."""
    if batch.final is None:
        raise ValueError("the batch was not read by its target")
    logits = drafter.logits(hidden[chunk.rows], unroll.prev[chunk.rows], unroll.depth[chunk.rows])
    final = batch.final.flatten(0, 1)[chunk.final]
    law = (drafter.vocab, batch.sampler)
    return row_stats(drafter.target, final, logits, chunk.token, *law, chunk.which, divergences)


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
    """alpha, logq, gap and divergences of draft logits (n, Vd); p of row i is served[which[i]]."""

    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: Tensor,
        served: Tensor,
        raw: Tensor,
        which: Tensor,
        draft_token: Tensor,
        sampler: Sampler,
        names: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        T = 1.0 if sampler.greedy else sampler.temperature
        z = draft_logits.float()
        z = z / T if T != 1.0 else z
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
        values = []
        for name in names:
            if name == "ce":
                values.append(torch.where(known, -log_raw.gather(1, at).squeeze(1), 0.0))
            elif name == "kl":  # p log p (once a position, 0 log 0 = 0) - p log q
                values.append(torch.xlogy(raw, raw).sum(1)[which] - (p_raw * log_raw).sum(1))
            elif name == "top_k":
                values.append(-(_top(p_raw) * log_raw).sum(1))
            elif name == "rkl":
                values.append((log_raw.exp() * _against(name, p_raw, log_raw)).sum(1))
            elif (
                name == "jsd"
            ):  # KL(p || m) / 2 + KL(q || m) / 2, where m = p / 2 off the vocabulary
                r = _against(name, p_raw, log_raw)
                missing = (1 - raw.sum(1)).clamp(min=0)[which] * math.log(2) / 2
                ours = (log_raw.exp() * r).sum(1)
                # log(p / m) = log(p / q) + log(q / m), and 0 where p is 0
                theirs = (torch.xlogy(p_raw, p_raw) + p_raw * (2 * r - log_raw)).sum(1) / 2
                values.append(missing + ours + theirs)
            else:
                raise ValueError(f"no divergence {name!r}")
        # A token that q cuts has no gradient: its log-probability is -inf on a whole neighbourhood.
        ctx.save_for_backward(q, log_raw, p, p_raw, at, known, logq)
        ctx.temperature, ctx.greedy, ctx.names = T, sampler.greedy, names
        ctx.mark_non_differentiable(gap)
        ctx.set_materialize_grads(False)  # a loss uses few of the scalars: the rest stay None
        return alpha, logq, gap, *values

    @staticmethod
    def backward(
        ctx: Any,
        g_alpha: Tensor | None,
        g_logq: Tensor | None,
        g_gap: None,
        *g_values: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        q, log_raw, p, p_raw, at, known, logq = ctx.saved_tensors
        grad = torch.zeros_like(q)

        def at_token(weight: Tensor, law: Tensor) -> None:
            """Adds the gradient of weight * log law(x)."""
            grad.sub_(weight.unsqueeze(1) * law)
            grad.scatter_add_(1, at, weight.unsqueeze(1))

        if g_alpha is not None:
            below = torch.where(q <= p, q, 0.0)
            grad += g_alpha.unsqueeze(1) * (below - q * below.sum(1, keepdim=True))
        if g_logq is not None and not ctx.greedy:  # at temperature 0 logq is a step function
            at_token(torch.where(known & logq.isfinite(), g_logq, 0.0), q)
        raw_q = log_raw.exp() if any(g is not None for g in g_values) else q
        for name, g in zip(ctx.names, g_values, strict=True):
            if g is None:
                continue
            if name == "ce":
                at_token(torch.where(known, -g, 0.0), raw_q)
            elif name in ("kl", "top_k"):
                weight = p_raw if name == "kl" else _top(p_raw)
                grad += g.unsqueeze(1) * (raw_q * weight.sum(1, keepdim=True) - weight)
            else:
                r = _against(name, p_raw, log_raw)
                mean = (raw_q * r).sum(1, keepdim=True)
                grad += g.unsqueeze(1) * (raw_q * (r - mean))
        return grad / ctx.temperature, None, None, None, None, None, None


def _against(name: str, p: Tensor, log_q: Tensor) -> Tensor:
    """r (n, Vd) of the reverse divergences: log(q / p), or log(2q / (p + q)) / 2."""
    if name == "rkl":
        return log_q - p.clamp(min=_TINY).log()
    middle = (p + log_q.exp()) / 2
    return (log_q - middle.clamp(min=_TINY).log()) / 2


def _top(p: Tensor) -> Tensor:
    """p (n, Vd) with all but its TOP largest tokens at 0."""
    best = p.topk(min(TOP, p.shape[1]), dim=1)
    return torch.zeros_like(p).scatter_(1, best.indices, best.values)
