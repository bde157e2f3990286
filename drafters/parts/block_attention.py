"""Attention of blocks: over the context up to a block's anchor, and over the block's own keys.

Every anchor of a text starts a block of N slots; all slots of a block see the same context keys and
one another (parts/diagonal.py is the case of one slot). A mask over anchors * N queries and
T + anchors * N keys is never made: blocks do not see each other, so the context goes through fused
attention, some anchors at a time, and each block's own terms are merged into it by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.parts.diagonal import _bias, _fused, _fused_backward

QUERIES = 512  # whose mask over the context is alive at a time


def context_and_block(
    query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, key: Tensor, value: Tensor,
    own: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(B, h, A, N, D) of query (B, h, A, N, D) over context key0, value0 (B, h, T, D), as far as
    seen (B, A, T), and over the block's own key, value (B, h, A, M, D), as far as own (N, M); None:
    over all of them."""
    if query.device.type != "cpu":
        return dense(query, key0, value0, seen, key, value, own)
    return _Merged.apply(query, key0, value0, seen, key, value, own)


def dense(
    query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, key: Tensor, value: Tensor,
    own: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same with all scores (B, h, A, N, T) in memory: see `diagonal.dense`."""
    T = key0.shape[2]
    past = query.flatten(2, 3) @ key0.transpose(-1, -2)
    past = past.unflatten(2, query.shape[2:4]).masked_fill(~seen[:, None, :, None], float("-inf"))
    scores = torch.cat([past, _own_scores(query, key, own)], dim=-1) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores, dim=-1)
    mixed = (weights[..., :T].flatten(2, 3) @ value0).unflatten(2, query.shape[2:4])
    return mixed + weights[..., T:] @ value


def _own_scores(query: Tensor, key: Tensor, own: Tensor | None) -> Tensor:
    scores = query @ key.transpose(-1, -2)  # (B, h, A, N, M)
    return scores if own is None else scores.masked_fill(~own, float("-inf"))


def _parts(seen: Tensor, slots: int) -> Iterator[tuple[slice, Tensor]]:
    """Some anchors at a time, and the mask (B, 1, anchors * slots, T) of their slots."""
    step = max(1, QUERIES // slots)
    for first in range(0, seen.shape[1], step):
        part = slice(first, first + step)
        yield part, seen[:, None, part].repeat_interleave(slots, dim=2)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, key: Tensor,
        value: Tensor, own: Tensor | None,
    ) -> Tensor:  # fmt: skip
        A, N = query.shape[2:4]
        found = []
        for part, mask in _parts(seen, N):
            some = query[:, :, part].flatten(2, 3)
            found.append(_fused(some, key0, value0, attn_mask=_bias(mask, query.dtype)))
        past, lse = (torch.cat(each, 2).unflatten(2, (A, N)) for each in zip(*found, strict=True))
        scores = _own_scores(query, key, own) * query.shape[-1] ** -0.5
        whole = torch.logsumexp(torch.cat([lse.unsqueeze(-1), scores], -1), -1)  # (B, h, A, N)
        weights = torch.exp(scores - whole.unsqueeze(-1)).to(past.dtype)  # (B, h, A, N, M)
        mixed = torch.exp(lse - whole).unsqueeze(-1).to(past.dtype) * past + weights @ value
        ctx.save_for_backward(query, key0, value0, seen, key, value, mixed, whole, weights)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key0, value0, seen, key, value, mixed, whole, weights = ctx.saved_tensors
        A, N = query.shape[2:4]
        d_key0, d_value0, found = torch.zeros_like(key0), torch.zeros_like(value0), []
        for part, mask in _parts(seen, N):
            g, q, out, lse = (t[:, :, part].flatten(2, 3) for t in (grad, query, mixed, whole))
            d_q, d_k, d_v = _fused_backward(
                g, q, key0, value0, out, lse, 0.0, False, attn_mask=_bias(mask, query.dtype)
            )
            found.append(d_q)
            d_key0 += d_k
            d_value0 += d_v
        mean = (grad * mixed).sum(-1, keepdim=True)  # (B, h, A, N, 1)
        slope = weights * (grad @ value.transpose(-1, -2) - mean) * query.shape[-1] ** -0.5
        d_query = torch.cat(found, 2).unflatten(2, (A, N)) + slope @ key
        d_key = slope.transpose(-1, -2) @ query
        d_value = weights.transpose(-1, -2) @ grad
        return d_query, d_key0, d_value0, None, d_key, d_value, None
