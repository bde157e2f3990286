"""Block drafters in the independent reference: one block at one anchor, slot by slot, in float64.

weights are the drafter's tensors by name (draft_ids among them when its vocabulary is reduced),
config its settings as a mapping: taps, head, layers, mask_token and block, the layers' shape;
"drafted": how many tokens this draft has, as a block's states depend on it.

DFlash (arXiv 2602.06036): the block is the root at position a+1 and one mask for each drafted
token; a layer's keys and values are those of the fused features of positions up to a, and of the
block; slot s is read for the token at position a+1+s.

DSpark (arXiv 2607.05147): the same layers over a block of as many slots as drafted tokens, slot s
read for the token at position a+2+s; W2 W1[x] is added to its logits, x the token before that one.

P-EAGLE (arXiv 2602.01469): rows as EAGLE-3's up to the anchor; those after it read one learned
state in place of features, and the mask token. All layers are causal; those after the first are
ordinary ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference_eagle import after_attention, attended, eagle_head, rms, rotate, tapped


def of_layer(
    weights: Mapping[str, Tensor], number: int, stack: str = "layers"
) -> dict[str, Tensor]:
    start = f"{stack}.{number}."
    return {n.removeprefix(start): t for n, t in weights.items() if n.startswith(start)}


def heads_of(
    w: Mapping[str, Tensor], c: Mapping[str, Any], name: str, x: Tensor, position: int
) -> Tensor:
    """Heads (n, D) of one row: queries and keys normed where the layer norms, and turned."""
    out = (w[f"self_attn.{name}_proj.weight"] @ x).view(-1, c["head_dim"])
    if name == "v":
        return out
    if c["qk_norm"]:
        scale = w[f"self_attn.{name}_norm.weight"]
        out = torch.stack([rms(head, scale, c["rms_norm_eps"]) for head in out])
    return rotate(out, position, c["rope_theta"])


def mixture(
    c: Mapping[str, Any], query: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """One query's attention over rows of keys and values, head by head."""
    out = []
    for h in range(c["num_heads"]):
        g = h * c["num_kv_heads"] // c["num_heads"]
        scores = torch.stack([query[h] @ key[g] for key in keys]) / math.sqrt(c["head_dim"])
        out.append(scores.softmax(0) @ torch.stack([value[g] for value in values]))
    return torch.cat(out)


def block_states(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    slots: int,
) -> list[Tensor]:
    """The last layer's output at each slot of a block whose root is x_{anchor+1}."""
    w, c = {name: t.double() for name, t in weights.items()}, config["block"]
    eps = c["rms_norm_eps"]
    features = tapped(hf, tokens[: anchor + 1], config["taps"])
    context = [rms(w["fc.weight"] @ g, w["hidden_norm.weight"], eps) for g in features]
    ids = torch.tensor([tokens[anchor + 1]] + [config["mask_token"]] * (slots - 1))
    states = list(hf.get_input_embeddings()(ids).double())
    for number in range(config["layers"]):
        layer = of_layer(w, number)
        read = [rms(x, layer["input_layernorm.weight"], eps) for x in states]
        rows = [*enumerate(context), *enumerate(read, start=anchor + 1)]
        keys = [heads_of(layer, c, "k", x, t) for t, x in rows]
        values = [heads_of(layer, c, "v", x, t) for t, x in rows]
        after = []
        for s in range(slots):
            query = heads_of(layer, c, "q", read[s], anchor + 1 + s)
            mixed = layer["self_attn.o_proj.weight"] @ mixture(c, query, keys, values)
            after.append(after_attention(layer, c, states[s] + mixed))
        states = after
    return states


@torch.no_grad()
def dflash_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth}, which stands at slot depth + 1."""
    states = block_states(weights, config, hf, tokens, anchor, config["drafted"] + 1)
    return eagle_head(weights, config, hf, states[depth + 1])


@torch.no_grad()
def dspark_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth}, read from slot depth and the token before it."""
    state = block_states(weights, config, hf, tokens, anchor, config["drafted"])[depth]
    logits, ids = eagle_head(weights, config, hf, state)
    first = weights["markov_head.markov_w1.weight"].double()[tokens[anchor + 1 + depth]]
    return logits + weights["markov_head.markov_w2.weight"].double() @ first, ids


@torch.no_grad()
def confidence(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> float:
    """DSpark's own guess of the chance that x_{anchor+2+depth} is accepted."""
    w = {name: t.double() for name, t in weights.items()}
    state = block_states(weights, config, hf, tokens, anchor, config["drafted"])[depth]
    normed = rms(state, w["norm.weight"], config["block"]["rms_norm_eps"])
    first = w["markov_head.markov_w1.weight"][tokens[anchor + 1 + depth]]
    said = w["confidence_head.proj.weight"][0] @ torch.cat([normed, first])
    return float(torch.sigmoid(said + w["confidence_head.proj.bias"][0]))


@torch.no_grad()
def peagle_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth}, from the row that stands at position anchor + depth."""
    w, c = {name: t.double() for name, t in weights.items()}, config["block"]
    eps = c["rms_norm_eps"]
    features = [*tapped(hf, tokens[: anchor + 1], config["taps"])]
    ids = [*tokens[1 : anchor + 2], *[config["mask_token"]] * depth]
    embedded = hf.get_input_embeddings()(torch.tensor(ids)).double()
    reads, rows = [], []
    masks = [w["mask_hidden"]] * depth if depth else []
    for e, g in zip(embedded, features + masks, strict=True):
        if config["norm_before_fc"]:
            g = rms(g, w["input_norm.weight"], eps)
        if config["fc_norm"]:
            parts = g.view(len(config["taps"]), -1)
            g = torch.cat([rms(p, w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)])
        state = w["fc.weight"] @ g
        normed = rms(state, w["hidden_norm.weight"], eps)
        reads.append(torch.cat([rms(e, w["input_layernorm.weight"], eps), normed]))
        rows.append(normed if config["norm_before_residual"] else state)
    for number in range(config["layers"]):
        layer = of_layer(w, number - 1, "more") if number else w
        if number:
            reads = [rms(x, layer["input_layernorm.weight"], eps) for x in rows]
        keys, values, after = [], [], []
        for t, (x, row) in enumerate(zip(reads, rows, strict=True)):
            after.append(after_attention(layer, c, row + attended(layer, c, x, t, keys, values)))
        rows = after
    return eagle_head(weights, config, hf, rows[-1])
