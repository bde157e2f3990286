"""Passes over the vocabulary: from logits to a row's scalars, and from their gradients back.

Two functions of draft logits and one of the target's, each row by itself. Between forward and
backward nothing of a row's vocabulary is kept but the logits themselves: q is computed again from
them and the row's log-normaliser, which costs less than to store it.

Gradients with respect to the draft logits z, q = softmax(z / T) (each checked in float64):
    log q(x)      (1[i = x] - q_i) / T
    alpha         q_i (1[q_i <= p_i] - sum_{q <= p} q) / T
    ce            (q_i - 1[i = x]) / T                 -log q(x)
    kl            (q_i P(kept) - p_i) / T              KL(p || q) over the kept tokens, true p
    rkl           q_i (r_i - E_q r) / T                KL(q || p), r = log(q / p)
    jsd           the same, r = log(2q / (p + q)) / 2  Jensen-Shannon, over all of V
    top_k         (q_i P(top) - p_i 1[i in top]) / T   -sum_top p log q (HASS, arXiv 2408.15766)

Each function is written once, in plain torch, and run by `RowWise`. On a GPU a pass over (rows, V)
is a trip to memory, and `torch.compile` makes one kernel of many; on a CPU a pass over values that
still lie in the cache costs a fraction of one over memory, so rows are taken in blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.sampling import Sampler, argmax
from draftsmith.drafters.vocab import VocabMap

DIVERGENCES = ("ce", "kl", "rkl", "jsd", "top_k")
TOP = 10  # tokens of HASS's top-k term
COMPILED = ("cuda",)  # device types on which functions are compiled
BLOCK = 1 << 19  # values of one block's tensor for each core, so that it stays in the cache
_FLOAT = torch.finfo(torch.float32)

logger = logging.getLogger(__name__)
Tensors = tuple[Tensor, ...]


def cuts(sampler: Sampler) -> bool:
    """Whether a sampler gives some tokens no chance that the law itself gives one."""
    return not sampler.greedy and (sampler.top_k > 0 or sampler.top_p < 1.0)


@dataclass
class TargetLaw:
    """p at m positions, over the kept tokens: (m, Vd) after the sampler (served) and before it cuts
    (raw; the same tensor where it cuts nothing); mass (m,): sum of raw; plogp: of raw log raw."""

    served: Tensor
    raw: Tensor
    mass: Tensor
    plogp: Tensor

    @classmethod
    def from_logits(
        cls, logits: Tensor, which: Tensor, token: Tensor, vocab: VocabMap, sampler: Sampler
    ) -> tuple[TargetLaw, Tensor]:
        """The law of logits (m, V), and log p (n,) of token (n,) at position which (n,)."""
        full = sampler.log_probs(logits)  # (m, V)
        logp = full[which, token]
        served, mass, plogp = _kept(full, vocab)
        if not cuts(sampler):
            return cls(served, served, mass, plogp), logp
        raw, mass, plogp = _kept(Sampler(sampler.temperature).log_probs(logits), vocab)
        return cls(served, raw, mass, plogp), logp


def _kept(full: Tensor, vocab: VocabMap) -> tuple[Tensor, ...]:
    return law_of_kept((full,), () if vocab.ids is None else (vocab.ids,))


def _law_of_kept(rows: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Probabilities (m, Vd) of log-probabilities (m, V), their sum and their sum of p log p."""
    (log_p,) = rows
    for ids in shared:
        log_p = log_p.index_select(1, ids)
    p = log_p.exp()
    return p, p.sum(1), (p * log_p.clamp(min=_FLOAT.min)).sum(1)  # 0 log 0 = 0


def _measure(
    rows: Sequence[Tensor], shared: Sequence[Tensor], sampler: Sampler, names: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """alpha, log q(x), gap, the log-normaliser and each divergence (n,), and at last q (n, Vd)
    after the sampler where it cuts."""
    logits, which, token = rows
    served, raw, mass, plogp = shared
    z = _scaled(logits, sampler)
    largest = z.amax(1, keepdim=True)
    log_q = z - largest
    q = log_q.exp()
    total = q.sum(1, keepdim=True)
    q /= total
    log_q -= total.log()
    p = served.index_select(0, which)
    p_raw = p if raw is served else raw.index_select(0, which)
    values = [_divergence(n, p_raw, q, log_q, token, mass[which], plogp[which]) for n in names]
    cut: list[Tensor] = []
    if cuts(sampler):
        log_q = torch.log_softmax(sampler.cut(z), dim=-1)
        q = log_q.exp()
        cut = [q]
    alpha = torch.minimum(p, q).sum(1)
    if sampler.greedy:
        logq = torch.where(argmax(logits) == token, 0.0, float("-inf"))
        top = z.topk(min(2, z.shape[1]), dim=1).values
        gap = top[:, 0] - top[:, -1]
    else:
        logq = torch.where(token >= 0, _gather(log_q, token), float("-inf"))
        gap = torch.full_like(alpha, float("inf"))
    return alpha, logq, gap, (largest + total.log()).squeeze(1), *values, *cut


def _slope(
    rows: Sequence[Tensor], shared: Sequence[Tensor], sampler: Sampler, names: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """The gradient (n, Vd), in the logits' own type, of sum over names of weights times scalars.

    rows: logits, which, token, normaliser (n,), weights (n, names), and q where the sampler cuts.
    """
    logits, which, token, normaliser, weights, *cut = rows
    served, raw, mass, _ = shared
    log_q = _scaled(logits, sampler) - normaliser.unsqueeze(1)
    raw_q = log_q.exp()
    q = cut[0] if cut else raw_q
    p = served.index_select(0, which)
    p_raw = p if raw is served else raw.index_select(0, which)
    weights = weights / (sampler.temperature or 1.0)
    zero = torch.zeros_like(normaliser)
    of_q, of_raw, at_token = zero, zero, zero  # (n,) factors of q, the raw q and 1[i = x]
    parts: list[tuple[Tensor, Tensor]] = []  # values (n, Vd), and their factors
    best = None
    for name, weight in zip(names, weights.unbind(1), strict=True):
        if name == "alpha":
            covered = q * (q <= p)
            of_q = of_q - weight * covered.sum(1)
            parts.append((covered, weight))
        elif name == "logq":
            of_q, at_token = of_q - weight, at_token + weight
        elif name == "ce":
            of_raw, at_token = of_raw + weight, at_token - weight
        elif name == "kl":
            of_raw = of_raw + weight * mass[which]
            parts.append((p_raw, -weight))
        elif name == "top_k":
            best = p_raw.topk(min(TOP, p_raw.shape[1]), dim=1)
            of_raw = of_raw + weight * best.values.sum(1)
            weighed = -weight.unsqueeze(1) * best.values
        else:
            pull = raw_q * _against(name, p_raw, raw_q, log_q)
            of_raw = of_raw - weight * pull.sum(1)
            parts.append((pull, weight))
    if cut:
        parts.append((q, of_q))
    else:
        of_raw = of_raw + of_q
    grad = raw_q * of_raw.unsqueeze(1)
    for part, weight in parts:
        grad.addcmul_(part, weight.unsqueeze(1))
    grad.scatter_add_(1, token.clamp(min=0).unsqueeze(1), at_token.unsqueeze(1))
    if best is not None:
        grad.scatter_add_(1, best.indices, weighed)
    return (grad.to(logits.dtype),)


def _divergence(
    name: str, p: Tensor, q: Tensor, log_q: Tensor, token: Tensor, mass: Tensor, plogp: Tensor
) -> Tensor:
    """One divergence (n,) of p and q (n, Vd); mass and plogp (n,) of p's rows."""
    if name == "ce":
        return torch.where(token >= 0, -_gather(log_q, token), 0.0)
    if name == "kl":
        return plogp - (p * log_q).sum(1)
    if name == "top_k":
        best = p.topk(min(TOP, p.shape[1]), dim=1)
        return -(best.values * log_q.gather(1, best.indices)).sum(1)
    if name == "rkl":
        return (q * _against(name, p, q, log_q)).sum(1)
    if name == "jsd":  # KL(p || m) / 2 + KL(q || m) / 2, where m = p / 2 off the vocabulary
        r = _against(name, p, q, log_q)
        missing = (1 - mass).clamp(min=0) * math.log(2)
        # log(p / m) = log(p / q) + log(q / m), and 0 where p is 0
        theirs = missing + plogp + (p * (2 * r - log_q)).sum(1)
        return (q * r).sum(1) + theirs / 2
    raise ValueError(f"no divergence {name!r}")


def _against(name: str, p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    """r (n, Vd) of the reverse divergences: log(q / p), or log(2q / (p + q)) / 2."""
    if name == "rkl":
        return log_q - p.clamp(min=_FLOAT.tiny).log()
    return (log_q - ((p + q) / 2).clamp(min=_FLOAT.tiny).log()) / 2


def _scaled(logits: Tensor, sampler: Sampler) -> Tensor:
    """Logits (n, Vd) in fp32 at the sampler's temperature, at 1 where that is 0."""
    T = sampler.temperature or 1.0
    return logits.float() / T if T != 1.0 else logits.float()


def _gather(values: Tensor, token: Tensor) -> Tensor:
    """values (n, Vd) at token (n,); at 0 where that is -1."""
    return values.gather(1, token.clamp(min=0).unsqueeze(1)).squeeze(1)


# ---------------------------------------------------------------- running them


class RowWise:
    """Runs function(rows, shared, ..) -> tensors, whose outputs' row i needs row i of `rows` only.

    rows: tensors with the same first axis, the first of them the widest; shared: tensors that every
    row may read. Further arguments are plain values, each of which is compiled for by itself. Where
    compiling fails, one line says so and the function runs as it is written.
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


law_of_kept = RowWise(_law_of_kept)
measure = RowWise(_measure)
slope = RowWise(_slope)
