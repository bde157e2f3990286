"""A `small` drafter as an ordinary model folder: config, weights and the target's tokenizer.

Every server but llama.cpp takes it as it is; transformers too, as `assistant_model`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving
from draftsmith.drafters.small import Small


def check(drafter: Small, server: str) -> None:
    """Raises UserError where the two vocabularies differ: servers share token ids unseen."""
    own, theirs = drafter.lm.vocab_size, drafter.target.vocab_size
    if own != theirs:
        raise UserError(
            f"small: {server} takes a draft model of the target's {theirs} tokens only, this one "
            f"has {own}; prune the target itself (layers: ..), or decode with draftsmith"
        )


def write(drafter: Small, folder: Path, serving: Serving) -> None:
    """Writes the folder that `from_pretrained` reads, adapters merged into their layers."""
    hf = merged(drafter, serving.dtype)
    hf.config.get_text_config().max_position_embeddings = serving.length
    hf.save_pretrained(folder)
    drafter.target.tokenizer.save_pretrained(folder)


def merged(drafter: Small, dtype: torch.dtype) -> Any:
    """The draft model alone on the CPU: a copy, without our attention and without adapters."""
    config = copy.deepcopy(drafter.lm.hf.config)
    config._attn_implementation = "sdpa"
    hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    hf.load_state_dict(weights(drafter))
    hf.generation_config = copy.deepcopy(drafter.target.hf.generation_config)
    return hf.eval()


def weights(drafter: Small) -> dict[str, Tensor]:
    """The draft model's weights by their names in transformers, W + B A s where it has adapters."""
    modules = dict(drafter.lm.hf.named_modules())
    out = {}
    for name, tensor in drafter.lm.hf.state_dict().items():
        if ".lora_" in name:
            continue
        place, dot, leaf = name.rpartition(".base_layer.")
        if dot and leaf == "weight":
            tensor = tensor + modules[place].get_delta_weight("default")
        out[f"{place}.{leaf}" if dot else name] = tensor.detach()
    return out
