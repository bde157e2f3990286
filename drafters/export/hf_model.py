"""A `small` drafter as an ordinary model folder: config, weights and the target's tokenizer.

Every server but llama.cpp takes it as it is; transformers too, as `assistant_model`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export.server import Row, Serving
from draftsmith.drafters.small import Small


def row(method: str, server: str, drawn: bool = False) -> Row[Small]:
    """How a server takes draft models as ordinary folders."""
    return Row(
        method, lambda drafter, serving: check(drafter, server), write, lambda drafter: drawn
    )


def check(drafter: Small, server: str) -> None:
    """Raises UserError where the two vocabularies differ: servers share token ids unseen."""
    own, theirs = drafter.lm.vocab_size, drafter.target.vocab_size
    if own != theirs:
        raise UserError(
            f"small: {server} takes a draft model of the target's {theirs} tokens only, this one "
            f"has {own}; prune the target itself (layers: ..), or decode with draftsmith"
        )


def write(drafter: Small, folder: Path, serving: Serving) -> None:
    """Writes the folder that `from_pretrained` reads.

    Positions are the model's own, not `serving.length`, which servers are told beside it: some
    types of rope compute frequencies from them, and a table of positions has that many rows.
    """
    alone(drafter, serving.dtype).save_pretrained(folder)
    drafter.target.tokenizer.save_pretrained(folder)


def alone(drafter: Small, dtype: torch.dtype) -> Any:
    """The draft model on the CPU: a copy, without our attention."""
    config = copy.deepcopy(drafter.lm.hf.config)
    config._attn_implementation = "sdpa"
    hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    hf.load_state_dict(drafter.lm.hf.state_dict())
    hf.generation_config = copy.deepcopy(drafter.target.hf.generation_config)
    return hf.eval()
