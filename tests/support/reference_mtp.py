"""EAGLE-1 and MTP in the independent reference: both foretell normed states, row after row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference_eagle import after_attention, attended, rms, tapped


def unembedded(hf: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    """The target's own logits of a normed state, and their ids."""
    logits = hf.get_output_embeddings().weight.double() @ state
    if cap := getattr(hf.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits, torch.arange(len(logits))


def embedded(hf: Any, token: int) -> Tensor:
    return hf.get_input_embeddings()(torch.tensor(token)).double()


def eagle1_state(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
    noise: float = 0.0,
) -> Tensor:
    """The normed state (H,) that is foretold for position anchor + 1 + depth.

    Row t reads (normed state at t, x_{t+1}); past the anchor the state is the row before's output.
    fc(embedding, state) is the layer's input without a norm. noise: added to the target's states.
    """
    w, c = {name: t.double() for name, t in weights.items()}, config["block"]
    states, keys, values = [*(tapped(hf, tokens[: anchor + 1], ["normed"]) + noise)], [], []
    for t in range(anchor + depth + 1):
        x = w["fc.weight"] @ torch.cat([embedded(hf, tokens[t + 1]), states[t]])
        out = after_attention(w, c, x + attended(w, c, x, t, keys, values))
        if t >= anchor:
            states.append(out)
    return states[-1]


@torch.no_grad()
def eagle1_logits(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], hf: Any, *where: Any
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth}, where = tokens, anchor, depth; and their ids."""
    return unembedded(hf, eagle1_state(weights, config, hf, *where))


@torch.no_grad()
def mtp_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth}.

    One module: as EAGLE-1's rows, states always normed. More: module j turns the states of rows
    0..anchor into others, reading x_{t+1+j} beside row t; depth is how many modules follow the
    first."""
    c = config["block"]
    eps = c["rms_norm_eps"]

    def module(j: int) -> dict[str, Tensor]:
        lead = f"layers.{j}."
        return {n.removeprefix(lead): t.double() for n, t in weights.items() if n.startswith(lead)}

    def row(w: Any, t: int, state: Tensor, token: int, keys: list, values: list) -> Tensor:
        e = embedded(hf, token)
        if t == 0 and config["zero_first"]:
            e = 0 * e
        pair = torch.cat([rms(e, w["enorm.weight"], eps), rms(state, w["hnorm.weight"], eps)])
        joined = w["eh_proj.weight"] @ pair
        x = rms(joined, w["input_layernorm.weight"], eps)
        out = after_attention(w, c, joined + attended(w, c, x, t, keys, values))
        return rms(out, w["norm.weight"], eps)

    states = [*tapped(hf, tokens[: anchor + 1], ["normed"])]
    if config["modules"] == 1:
        w, keys, values = module(0), [], []
        for t in range(anchor + depth + 1):
            out = row(w, t, states[t], tokens[t + 1], keys, values)
            if t >= anchor:
                states.append(out)
        return unembedded(hf, states[-1])
    for j in range(depth + 1):
        w, keys, values = module(j), [], []
        states = [row(w, t, s, tokens[t + 1 + j], keys, values) for t, s in enumerate(states)]
    return unembedded(hf, states[-1])
