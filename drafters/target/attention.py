"""One registered attention and mask, through which unmodified HF models read our cache.

A `Step` says what the queries of this forward are and what they may see. Every HF mask function
(causal, sliding window, chunked) is evaluated on *positions*, not slots, and joined with what the
step allows, so full, windowed and chunked layers all come out right. Nothing reaches HF's own
cache: keys and values go to the slab from inside the attention function, which makes the code
independent of transformers' cache API (it changed between 5.17 and 5.24).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from draftsmith.drafters.passes import narrow
from draftsmith.drafters.target.chain_cache import ChainCache, RowCache
from draftsmith.drafters.target.slab import Slab

NAME = "draftsmith"
_PACK = 16  # up to this width GQA groups are packed into the query axis


@dataclass
class Step:
    """What one forward sees.

    positions (B, T) of the queries; key_positions (B, S); visible (B, T, S) bool, before the
    model's own mask functions are joined in. slab None: teacher forcing, S = T. slots (B, T):
    where the slab takes the queries' own keys.
    """

    positions: Tensor
    key_positions: Tensor
    visible: Tensor
    slab: Slab | ChainCache | RowCache | None = None
    slots: Tensor | None = None

    @property
    def view(self) -> int:
        return self.key_positions.shape[1]


def packed_step(position: Tensor, segment: Tensor) -> Step:
    """Teacher forcing over rows of packed segments (B, T): nobody sees another segment."""
    visible = segment.unsqueeze(2) == segment.unsqueeze(1)  # (B, T, T)
    return Step(position, position, visible)


def chain_step(slab: Slab | ChainCache, width: int) -> Step:
    """`width` tokens after each row's committed ones, each seeing those before it."""
    device = slab.length.device
    keys = torch.arange(slab.view(width), device=device)
    positions = slab.length.unsqueeze(1) + torch.arange(width, device=device)  # (B, W)
    visible = keys <= positions.unsqueeze(2)  # (B, W, S)
    slots = slab.slots(width) if isinstance(slab, Slab) else None
    return Step(positions, keys.expand(positions.shape[0], -1), visible, slab, slots)


def tree_step(slab: Slab, depth: Tensor, ancestors: Tensor) -> Step:
    """Nodes of a tree after each row's committed tokens.

    depth (B, N): distance from the root node; ancestors (B, N, N) bool: [i, j] = j is i or above.
    """
    N = depth.shape[1]
    view = slab.view(N)
    base = slab.length.unsqueeze(1)
    node, visible = tree_seen(slab.length, ancestors, view)
    keys = torch.arange(view, device=depth.device)  # (S,)
    key_depth = depth.gather(1, node.clamp(0, N - 1))
    key_positions = torch.where((node >= 0) & (node < N), base + key_depth, keys)
    return Step(base + depth, key_positions, visible, slab, slab.slots(N))


def tree_seen(start: Tensor, seen: Tensor, view: int) -> tuple[Tensor, Tensor]:
    """What new nodes see of the first `view` slots, when node f lies in slot start + f.

    start (B,); seen (B, W, F) bool: [.., f] = node f is the new node itself or above it. Returns
    the node number (B, S) of each slot (below 0: committed) and visible (B, W, S).
    """
    count = seen.shape[2]
    node = torch.arange(view, device=seen.device) - start.unsqueeze(1)
    index = node.clamp(0, count - 1).unsqueeze(1).expand(-1, seen.shape[1], -1)
    inside = (node >= 0) & (node < count)
    return node, (node < 0).unsqueeze(1) | (inside.unsqueeze(1) & seen.gather(2, index))


def tree_shape(parents: Tensor) -> tuple[Tensor, Tensor]:
    """depth (B, N) and ancestors (B, N, N) of parents (B, N) with parents[:, 0] = -1.

    Built on the device by squaring A = I | parent ceil(log2 N) times: no host loop over nodes.
    """
    N = parents.shape[1]
    nodes = torch.arange(N, device=parents.device)
    reach = (nodes == parents.unsqueeze(2)) | torch.eye(N, dtype=torch.bool, device=parents.device)
    for _ in range(max(N - 1, 1).bit_length()):
        reach = (reach.float() @ reach.float()) > 0
    return reach.sum(2) - 1, reach


_step: ContextVar[Step | None] = ContextVar("step", default=None)  # each thread has its own


@contextmanager
def active(step: Step) -> Iterator[None]:
    """Makes `step` the one that the registered functions read during a model's forward."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def active_step() -> Step | None:
    return _step.get()


def current() -> Step:
    """The active one. Raises RuntimeError where there is none."""
    step = _step.get()
    if step is None:
        raise RuntimeError("draftsmith attention ran outside of active(step)")
    return step


def _mask(*args: Any, mask_function: Callable, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    """(B, 1, T, S), 0 or -inf: HF's mask function on positions, joined with what the step allows.

    Added to the scores rather than bool, which SDPA would turn into this once a layer.
    """
    step = current()
    B = step.positions.shape[0]
    device = step.positions.device
    b = torch.arange(B, device=device).view(-1, 1, 1, 1)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    q = step.positions[:, None, :, None]
    kv = step.key_positions[:, None, None, :]
    seen = mask_function(b, head, q, kv) & step.visible.unsqueeze(1)
    # An ended row may stand past the view, its window empty: a softmax over nothing is NaN.
    hidden = ~seen & seen.any(-1, keepdim=True)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _attention(
    module: Any,
    query: Tensor,  # (B, Hq, T, D)
    key: Tensor,  # (B, Hkv, T, D)
    value: Tensor,
    attention_mask: Tensor,  # (B, 1, T, S)
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    step = current()
    B, heads, T, D = query.shape
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = _tempered(query, module, step.positions)
    if isinstance(step.slab, Slab):
        if narrow.attends(query) and step.slots is not None:
            keys, values = step.slab.stores(module.layer_idx, key, value)
            return narrow.attend(
                query, key, value, keys, values, step.slots, attention_mask,
                scaling or D**-0.5, softcap or 0.0, s_aux,
            ), None  # fmt: skip
        key, value = step.slab.write(module.layer_idx, key, value, step.view, step.slots)
    groups = heads // key.shape[1]
    mask = attention_mask.to(query.dtype)  # which autocast may have lowered
    pack = groups > 1 and T <= _PACK and s_aux is None
    if pack:  # few queries: put the group into the query axis rather than repeat K and V
        query = query.reshape(B, key.shape[1], groups * T, D)
        mask = mask.repeat(1, 1, groups, 1) if T > 1 else mask
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _explicit(query, key, value, mask, scaling or D**-0.5, softcap, s_aux)
    out = out.reshape(B, heads, T, out.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _tempered(query: Tensor, module: Any, positions: Tensor) -> Tensor:
    """Llama-4's query scale by position, which transformers counts in its own cache: here from 0.

    query (B, Hq, T, D), already scaled for positions 0..T-1; positions (B, T).
    """

    def scale(position: Tensor) -> Tensor:
        steps = torch.floor((position.float() + 1) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1

    counted = torch.arange(query.shape[2], device=query.device)
    ratio = scale(positions.to(query.device)) / scale(counted)  # (B, T)
    return (query * ratio[:, None, :, None]).to(query.dtype)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in explicit maths: soft-capped scores (Gemma-2), per-head sinks (gpt-oss)."""
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value


def attend_by(hf: Any, name: str) -> None:
    """Sets the attention of an HF model: NAME, or one of transformers' own.

    Quietly: transformers warns of families that keep their own, which the self-test finds out.
    """
    own = {transformers.AttentionInterface: _attention, transformers.AttentionMaskInterface: _mask}
    for registry, function in own.items():  # not at import: it takes transformers 2 s to make them
        if NAME not in registry():
            registry.register(NAME, function)
    with quiet():
        hf.set_attn_implementation(name)


@contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers prints errors alone; nor does it show bars from here on."""
    transformers.logging.disable_progress_bar()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
