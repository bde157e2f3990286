"""Ordinary causal LMs as `small` drafters: an HF folder, or a GGUF of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafters.errors import UserError, loading
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target.shell import Shell


def read(folder: Path, about: dict[str, Any], target: Shell) -> Small:
    """See `foreign.load`; it must have the target's tokenizer."""
    return Small(target, SmallConfig(checkpoint=str(folder)))


def read_gguf(file: Path, head_dim: int, target: Shell) -> Small:
    """A draft model as llama.cpp stores it. transformers dequantises it and settles the names; of
    some families it leaves the heads' size to be told."""
    with loading(str(file)):
        hf, info = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True,
            head_dim=head_dim,
        )  # fmt: skip
    for kind in ("missing_keys", "unexpected_keys"):
        for name in sorted(info[kind]):
            raise UserError(f"{file}: tensor {name} is {kind.removesuffix('_keys')}")
    drafter = Small(target, SmallConfig(checkpoint=str(file), architecture=hf.config.to_dict()))
    drafter.lm.hf.load_state_dict(hf.state_dict())
    return drafter
