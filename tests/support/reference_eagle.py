"""EAGLE-3 in the independent reference: one decoder layer, row after row, in float64.

weights are the drafter's tensors by name (draft_ids among them when its vocabulary is reduced),
config its settings as a mapping: taps, head, the norm flags and block, the layer's shape.
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


def rotate(heads: Tensor, position: int, theta: float, share: float = 1.0) -> Tensor:
    """RoPE, rotate-half: entry i pairs with entry i + half, within the share that is turned."""
    half = int(heads.shape[-1] * share) // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
    turned = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
    return torch.cat([*turned, rest], -1)


def attended(
    w: Mapping[str, Tensor],
    c: Mapping[str, Any],
    x: Tensor,
    position: int,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """Attention of one row over the rows before it and itself, whose key and value it appends."""

    def heads(name: str) -> Tensor:
        out = w[f"self_attn.{name}_proj.weight"] @ x
        out = out + w.get(f"self_attn.{name}_proj.bias", torch.zeros(1).double())
        out = out.view(-1, c["head_dim"])
        norm = w.get(f"self_attn.{name}_norm.weight")
        return out if norm is None else torch.stack([rms(h, norm, c["rms_norm_eps"]) for h in out])

    turn = position, c["rope_theta"], c.get("rotary_share", 1.0)
    keys.append(rotate(heads("k"), *turn))
    values.append(heads("v"))
    query, mixed = rotate(heads("q"), *turn), []
    for h in range(c["num_heads"]):
        group = h * c["num_kv_heads"] // c["num_heads"]
        scores = torch.stack([query[h] @ key[group] for key in keys]) / math.sqrt(c["head_dim"])
        mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
    out = torch.cat(mixed)
    if "self_attn.g_proj.weight" in w:
        out = out * torch.sigmoid(w["self_attn.g_proj.weight"] @ x)
    return w["self_attn.o_proj.weight"] @ out + w.get("self_attn.o_proj.bias", 0.0)


def after_attention(w: Mapping[str, Tensor], c: Mapping[str, Any], middle: Tensor) -> Tensor:
    """The layer's output: its MLP added to what attention left."""
    y = rms(middle, w["post_attention_layernorm.weight"], c["rms_norm_eps"])

    def linear(name: str, x: Tensor) -> Tensor:
        return w[f"mlp.{name}_proj.weight"] @ x + w.get(f"mlp.{name}_proj.bias", 0)

    gate = torch.nn.functional.silu(linear("gate", y))
    return middle + linear("down", gate * linear("up", y))


def eagle_outputs(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> list[Tensor]:
    """The layer's outputs at depths 0, .., depth of an anchor.

    Row t stands at RoPE position t and sees the rows up to t. Up to the anchor it reads the pair
    (g_t, x_{t+1}); past it, x_{t+1} and the row before's own output: before the final norm, or
    after it where norm_output says so (EAGLE-3.1).
    """
    w, c = {name: t.double() for name, t in weights.items()}, config["block"]
    eps, taps = c["rms_norm_eps"], config["taps"]
    features, keys, values = tapped(hf, tokens[: anchor + 1], taps), [], []
    out, outputs = torch.empty(0), []  # out: of the row before
    for t in range(anchor + depth + 1):
        if t <= anchor:
            g = features[t]
            if config.get("norm_before_fc"):
                g = rms(g, w["input_norm.weight"], eps)
            if config.get("fc_norm"):
                parts = g.view(len(taps), -1)
                g = torch.cat([rms(p, w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)])
            state = w["fc.weight"] @ g
        else:
            state = rms(out, w["norm.weight"], eps) if config.get("norm_output") else out
        embedded = hf.get_input_embeddings()(torch.tensor(tokens[t + 1])).double()
        normed = rms(state, w["hidden_norm.weight"], eps)
        x = torch.cat([rms(embedded, w["input_layernorm.weight"], eps), normed])
        residual = normed if config["norm_before_residual"] else state
        out = after_attention(w, c, residual + attended(w, c, x, t, keys, values))
        outputs.append(out)
    return outputs[anchor:]


def eagle_head(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], hf: Any, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits over the draft vocabulary, and its target ids."""
    w = {name: t.double() for name, t in weights.items()}
    head = hf.get_output_embeddings().weight.double()
    ids = weights.get("draft_ids", torch.arange(len(head)))
    rows = w["lm_head.weight"] if config["head"] == "own" else head[ids]
    return rows @ rms(out, w["norm.weight"], config["block"]["rms_norm_eps"]), ids


@torch.no_grad()
def eagle_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth} over the draft vocabulary, and its target ids."""
    out = eagle_outputs(weights, config, hf, tokens, anchor, depth)[-1]
    return eagle_head(weights, config, hf, out)
