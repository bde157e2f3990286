"""Attention of blocks: over the context up to a block's anchor, and over the block's own keys.

Every anchor of a text starts a block of N slots; all slots of a block see the same context keys and
one another (parts/diagonal.py is the case of one slot). A mask over anchors * N queries and
T + anchors * N keys is never made: blocks do not see each other, so attention over the context goes
some anchors at a time, and each block's own terms are merged into it by log-sum-exp. The backward
pass takes the context's weights anew from the whole row's log-sum-exp, as in parts/diagonal.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

QUERIES = 512  # whose mask, and off the CPU whose scores, over the context are alive at a time

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def context_and_block(
    query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, key: Tensor, value: Tensor,
    own: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(B, h, A, N, D) of query (B, h, A, N, D) over context key0, value0 (B, h, T, D), as far as
    seen (B, A, T), and over the block's own key, value (B, h, A, M, D), as far as own (N, M); None:
    over all of them. Each anchor sees a context key at least."""
    # Under autocast a norm of queries and keys has made them fp32 beside values in bf16.
    query, key0, key = (t.to(value0.dtype) for t in (query, key0, key))
    return _Merged.apply(query, key0, value0, seen, key, value, own)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, key: Tensor,
        value: Tensor, own: Tensor | None,
    ) -> Tensor:  # fmt: skip
        A, N = query.shape[2:4]
        found = [
            over_context(query[:, :, part].flatten(2, 3), key0, value0, bias)
            for part, bias in _parts(seen, N, query.dtype)
        ]
        past, lse = (torch.cat(each, 2).unflatten(2, (A, N)) for each in zip(*found, strict=True))
        scores = (query @ key.transpose(-1, -2)).to(lse.dtype) * _scale(query)
        if own is not None:
            scores = scores.masked_fill(~own, float("-inf"))  # (B, h, A, N, M)
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
        for part, bias in _parts(seen, N, query.dtype):
            g, q, out, lse = (t[:, :, part].flatten(2, 3) for t in (grad, query, mixed, whole))
            d_q, d_k, d_v = over_context_backward(g, q, out, lse, key0, value0, bias)
            found.append(d_q)
            d_key0 += d_k
            d_value0 += d_v
        mean = (grad * mixed).sum(-1, keepdim=True)  # (B, h, A, N, 1)
        slope = weights * (grad @ value.transpose(-1, -2) - mean) * _scale(query)
        d_query = torch.cat(found, 2).unflatten(2, (A, N)) + slope @ key
        d_key = slope.transpose(-1, -2) @ query
        d_value = weights.transpose(-1, -2) @ grad
        return d_query, d_key0, d_value0, None, d_key, d_value, None


def _fuses(query: Tensor) -> bool:
    """Whether fused attention returns its log-sum-exp on this device in a form used here."""
    return query.device.type == "cpu"


def _scale(query: Tensor) -> float:
    return query.shape[-1] ** -0.5


def _parts(seen: Tensor, slots: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Some anchors at a time, and what is added to the scores (B, 1, anchors * slots, T) of their
    slots: 0 where a key is seen, -inf elsewhere."""
    step = max(1, QUERIES // slots)
    for first in range(0, seen.shape[1], step):
        part = slice(first, first + step)
        mask = seen[:, None, part].repeat_interleave(slots, dim=2)
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        yield part, zeros.masked_fill_(~mask, float("-inf"))


def over_context(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (B, h, n, D), and its log-sum-exp (B, h, n)."""
    if _fuses(query):
        return _fused(query, key, value, attn_mask=bias)
    scores = _scores(query, key, bias)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)).to(value.dtype) @ value, lse


def over_context_backward(
    grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, key: Tensor, value: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value where out and lse are those of the whole rows, of which
    the context is a part."""
    if _fuses(query):
        return _fused_backward(grad, query, key, value, out, lse, 0.0, False, attn_mask=bias)
    weights = torch.exp(_scores(query, key, bias) - lse.unsqueeze(-1)).to(value.dtype)
    mean = (grad * out).sum(-1, keepdim=True)
    slope = weights * (grad @ value.transpose(-1, -2) - mean) * _scale(query)
    d_key, d_value = slope.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
    return slope @ key, d_key, d_value


def _scores(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    """(B, h, n, T), in fp32 at least."""
    scores = query @ key.transpose(-1, -2)
    return scores.to(torch.promote_types(scores.dtype, torch.float32)) * _scale(query) + bias
