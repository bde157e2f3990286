"""EAGLE-3 in the independent reference: one decoder layer, row after row, in float64.

weights are the drafter's tensors by name (draft_ids among them when its vocabulary is reduced),
config its settings as a mapping: taps, head, norm_before_residual and block, the layer's shape.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tapped(hf: Any, tokens: Sequence[int], taps: Sequence[int | str]) -> Tensor:
    """Rows g_t (T, taps * H): layer ids count from 0 = embeddings; the last is before the norm."""
    layers, raw = hf.get_decoder().layers, []

    def keep(module: Any, args: Any, out: Any) -> None:
        raw.append(out[0] if isinstance(out, tuple) else out)

    hook = layers[-1].register_forward_hook(keep)
    states = hf(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    named: dict[int | str, Tensor] = dict(enumerate(states))
    named |= {len(layers): raw[0], "normed": states[-1]}
    return torch.cat([named[tap][0] for tap in taps], dim=-1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def rotate(heads: Tensor, position: int, theta: float) -> Tensor:
    """RoPE, rotate-half: entry i pairs with entry i + half."""
    half = heads.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@torch.no_grad()
def eagle_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth} over the draft vocabulary, and its target ids.

    Row t stands at RoPE position t and sees the rows up to t. Up to the anchor it reads the pair
    (g_t, x_{t+1}); past it, x_{t+1} and the row before's own output, which is not normed.
    """
    w, c = {name: t.double() for name, t in weights.items()}, config["block"]
    eps, theta, size = c["rms_norm_eps"], c["rope_theta"], c["head_dim"]
    features, keys, values = tapped(hf, tokens[: anchor + 1], config["taps"]), [], []
    out = torch.empty(0)  # of the row before
    for t in range(anchor + depth + 1):
        state = w["fc.weight"] @ features[t] if t <= anchor else out
        embedded = hf.get_input_embeddings()(torch.tensor(tokens[t + 1])).double()
        normed = rms(state, w["hidden_norm.weight"], eps)
        x = torch.cat([rms(embedded, w["input_layernorm.weight"], eps), normed])
        keys.append(rotate((w["self_attn.k_proj.weight"] @ x).view(-1, size), t, theta))
        values.append((w["self_attn.v_proj.weight"] @ x).view(-1, size))
        query, mixed = rotate((w["self_attn.q_proj.weight"] @ x).view(-1, size), t, theta), []
        for h in range(c["num_heads"]):
            group = h * c["num_kv_heads"] // c["num_heads"]
            scores = torch.stack([query[h] @ key[group] for key in keys]) / math.sqrt(size)
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        residual = normed if config["norm_before_residual"] else state
        middle = residual + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = rms(middle, w["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ y)
        out = middle + w["mlp.down_proj.weight"] @ (gate * (w["mlp.up_proj.weight"] @ y))
    head = hf.get_output_embeddings().weight.double()
    ids = weights.get("draft_ids", torch.arange(len(head)))
    rows = w["lm_head.weight"] if config["head"] == "own" else head[ids]
    return rows @ rms(out, w["norm.weight"], eps), ids
