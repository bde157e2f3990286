"""Medusa and Hydra in the independent reference: one head at one anchor, in float64.

weights are the drafter's tensors by name (draft_ids among them when its vocabulary is reduced),
config its settings as a mapping: layers and head. Medusa: h + SiLU(W h + b), block after block, on
the state h after the final norm. Hydra: its first block reads h and the embeddings of the tokens
from the root on, side by side, and adds R (h, e, ..) + r instead of h.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def head_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """Logits for x_{anchor+2+depth} over the draft vocabulary, and its target ids."""
    w = {name: t.double() for name, t in weights.items()}
    states = hf.get_decoder()(torch.tensor([tokens[: anchor + 1]]), use_cache=False)
    x = states.last_hidden_state[0, anchor].double()
    for layer in range(config["layers"]):
        name = f"blocks.{depth}.{layer}"
        through = x
        if f"{name}.residual.weight" in w:
            between = torch.tensor(tokens[anchor + 1 : anchor + 2 + depth])
            x = torch.cat([x, *hf.get_input_embeddings()(between).double()])
            through = w[f"{name}.residual.weight"] @ x + w[f"{name}.residual.bias"]
        inner = w[f"{name}.linear.weight"] @ x + w[f"{name}.linear.bias"]
        x = through + inner / (1 + torch.exp(-inner))
    head = hf.get_output_embeddings().weight.double()
    ids = weights.get("draft_ids", torch.arange(len(head)))
    rows = w[f"lm_heads.{depth}.weight"] if config["head"] == "own" else head[ids]
    return rows @ x, ids
