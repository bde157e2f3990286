"""Attention over causal keys that all depths share and a query's own deeper keys.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3) lets the query of anchor a at depth j see
the depth-0 keys up to a and its own keys of depths 1..j: a diagonal in each deeper block of a
T x (T*K) mask. Nothing of that size is made here: the causal block goes through fused attention,
which also returns its log-sum-exp, and the diagonal terms are merged into it exactly.

The backward pass needs no formula of its own for the causal block: fused attention's backward takes
weights from exp(score - log-sum-exp), so that given the whole row's output and log-sum-exp it
yields the causal block's share of the whole row's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_and_diagonal(
    query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, keys: list[Tensor], values: list
) -> Tensor:
    """(B, h, A, D) of query (B, h, A, D) over key0, value0 (B, h, T, D), as far as seen
    (B, 1, A, T), and over each query's own keys and values: depths 1..j, each (B, h, A, D)."""
    if query.device.type != "cpu":
        return dense(query, key0, value0, seen, keys, values)
    return _Merged.apply(query, key0, value0, seen, *keys, *values)


def dense(
    query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, keys: list[Tensor], values: list
) -> Tensor:
    """The same with all scores (B, h, A, T) in memory: for devices whose fused attention does not
    return its log-sum-exp in this form, and what the merged one is tested against."""
    scale = query.shape[-1] ** -0.5
    past = (query @ key0.transpose(-1, -2)) * scale
    past = past.masked_fill(~seen, float("-inf"))
    own = torch.stack([(query * key).sum(-1) for key in keys], dim=-1) * scale  # (B, h, A, j)
    weights = torch.softmax(torch.cat([past, own], dim=-1), dim=-1)
    T = past.shape[-1]
    mixed = weights[..., :T] @ value0
    for i, value in enumerate(values):
        mixed = mixed + weights[..., T + i, None] * value
    return mixed


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, *own: Tensor
    ) -> Tensor:
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        scale = query.shape[-1] ** -0.5
        past, lse = _fused(query, key0, value0, attn_mask=_bias(seen, query.dtype))
        scores = torch.stack([(query * key).sum(-1) for key in keys], dim=-1) * scale
        whole = torch.logsumexp(torch.cat([lse.unsqueeze(-1), scores], dim=-1), dim=-1)  # (B, h, A)
        mixed = torch.exp(lse - whole).unsqueeze(-1).to(past.dtype) * past
        weights = torch.exp(scores - whole.unsqueeze(-1)).to(past.dtype)  # (B, h, A, j)
        for i, value in enumerate(values):
            mixed = mixed + weights[..., i, None] * value
        ctx.save_for_backward(query, key0, value0, seen, mixed, whole, weights, *own)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key0, value0, seen, mixed, whole, weights, *own = ctx.saved_tensors
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        scale = query.shape[-1] ** -0.5
        bias = _bias(seen, query.dtype)
        d_query, d_key0, d_value0 = _fused_backward(
            grad, query, key0, value0, mixed, whole, 0.0, False, attn_mask=bias
        )
        mean = (grad * mixed).sum(-1)  # (B, h, A)
        d_keys, d_values = [], []
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            weight = weights[..., i]
            slope = (weight * ((grad * value).sum(-1) - mean) * scale).unsqueeze(-1)
            d_query = d_query + slope * key
            d_keys.append(slope * query)
            d_values.append(weight.unsqueeze(-1) * grad)
        return d_query, d_key0, d_value0, None, *d_keys, *d_values


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where a key is seen, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
