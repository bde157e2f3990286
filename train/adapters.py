"""LoRA adapters on a target: switched on and off, stored, merged. What trains them: adapt.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.target import Target
from draftsmith.train.lora import check_rank, inject


def check(target: Target, rank: int) -> None:
    """Raises UserError for a target that cannot take such adapters, or not be stored with them."""
    spec = target.source.spec
    if getattr(target.hf.config, "quantization_config", None):
        raise UserError(
            f"adapt: the weights of target {spec} are quantised, and adapters cannot be merged "
            "into them; name a checkpoint that is not"
        )
    adapted = linears(target)
    if not adapted:
        raise UserError(f"adapt: target {spec} has no linear layers to adapt; leave adapt out")
    check_rank("adapt", adapted, rank)
    with tempfile.TemporaryDirectory() as folder:
        try:  # told now, not when all is trained
            target.hf.generation_config.save_pretrained(folder)
        except ValueError as error:
            line = " ".join(str(error).split())[:200]
            raise UserError(
                f"adapt: transformers refuses to store {spec}'s generation_config.json ({line}); "
                "correct it in a local copy"
            ) from None


def linears(target: CausalLM) -> dict[str, nn.Linear]:
    """What adapters go on, by name: every linear of the decoder layers, so never the lm_head."""
    inside = {id(module) for module in target.layers.modules()}
    named = target.hf.named_modules()
    return {n: m for n, m in named if isinstance(m, nn.Linear) and id(m) in inside}


class Adapters:
    """LoRA on a target's linears, in fp32, all else in it frozen."""

    def __init__(self, target: Target, rank: int) -> None:
        self.hf = target.hf
        names = linears(target)
        inject(self.hf, names, rank)
        self.layers: dict[str, Any] = {name: self.hf.get_submodule(name) for name in names}
        self.weights = {n: p for n, p in self.hf.named_parameters() if p.requires_grad}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it, the target is the old one."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.weights.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes adapters that `state` gave."""
        for name, tensor in state.items():
            self.weights[name].copy_(tensor)

    def merge(self) -> None:
        """Adds them to the weights for good: the target is a plain model again."""
        for name, layer in self.layers.items():
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(self.hf.get_submodule(parent), child, layer.get_base_layer())
