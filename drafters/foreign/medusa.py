"""Medusa heads as their authors publish them (medusa_lm_head.pt) and as vLLM reads them.

Authors': {head}.{layer}.linear.{weight,bias} and {head}.{layers}.weight for the lm_head, perhaps
under medusa_heads. vLLM's: blocks.{head}.layers.{layer}.{weight,bias}, lm_heads.{head}.weight, one
lm_head for all where original_lm_head is set, token_map of absolute target ids, and biases where
medusa_fc_bias is set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters import storage
from draftsmith.drafters.errors import UserError, naming
from draftsmith.drafters.foreign.files import Tensors
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.parts.heads import HeadsConfig
from draftsmith.drafters.target.shell import Shell


def read(folder: Path, settings: dict[str, Any], target: Shell) -> Medusa:
    """See `foreign.load`."""
    authors = "medusa_num_heads" in settings
    heads = settings["medusa_num_heads" if authors else "num_heads"]
    layers = settings.get("medusa_num_layers", settings.get("num_hidden_layers", 1))
    H = target.hidden_size
    if settings.get("hidden_size", H) != H:
        raise UserError(
            f"{folder / 'config.json'}: hidden_size is {settings['hidden_size']}, the target "
            f"{target.source.spec} has {H}; give the target that these heads were made for"
        )
    biased = settings.get("medusa_fc_bias", authors)  # theirs always are
    size = settings.get("truncated_vocab_size") or target.vocab_size
    tensors = Tensors(folder)
    tensors.rename("medusa_heads.", "")
    for h in range(heads):  # authors' names to vLLM's
        for i in range(layers):
            tensors.rename(f"{h}.{i}.linear.", f"blocks.{h}.layers.{i}.")
        tensors.rename(f"{h}.{layers}.", f"lm_heads.{h}.")
    stored: dict[str, Tensor] = {}
    for h in range(heads):
        for i in range(layers):
            ours, theirs = f"blocks.{h}.{i}.linear", f"blocks.{h}.layers.{i}"
            stored[f"{ours}.weight"] = tensors.take(f"{theirs}.weight", H, H)
            bias = tensors.take(f"{theirs}.bias", H) if biased else torch.zeros(H)
            stored[f"{ours}.bias"] = bias
        shared = h > 0 and settings.get("original_lm_head")
        name = f"lm_heads.{h}.weight"
        stored[name] = stored["lm_heads.0.weight"] if shared else tensors.take(name, size, H)
    if size < target.vocab_size:
        stored["draft_ids"] = tensors.take("token_map", size).long()
    tensors.done()
    with naming(folder / "config.json"):
        drafter = Medusa(target, HeadsConfig(heads=heads, layers=layers, draft_vocab=size))
    storage.fill(drafter, stored, tensors.path)
    return drafter
