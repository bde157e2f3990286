"""LoRA through peft: adapters are trained, the merged weights are stored.

On a drafter (`Lora`), a checkpoint holds it as it is served, adapters merged, so that eval and
every exporter take it for any other one; the adapters themselves lie beside, for resuming. Those
of a target (`TargetAdapters`) are trained by medusa2.py. (Hu et al. 2021, arXiv 2106.09685; scaling
is 2, alpha = 2 r, as in peft's examples.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError, said
from draftsmith.drafters.storage import read_weights
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.target import Target


class Adapters:
    """LoRA on some linears of a module, by name, in fp32; all else in it is frozen.

    Raises UserError where none of them has such a rank; key: the recipe's.
    """

    def __init__(
        self, module: nn.Module, adapted: Mapping[str, nn.Linear], rank: int, key: str
    ) -> None:
        from peft import LoraConfig, inject_adapter_in_model  # slow to import, and rarely needed

        check_rank(key, adapted, rank)
        module.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(adapted))
        inject_adapter_in_model(config, module)
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for parameter in self.weights.values():  # of its linear's dtype until here
            parameter.data = parameter.data.float()
        self.size = sum(p.numel() for p in self.weights.values())

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.weights.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes adapters that `state` gave."""
        for name, tensor in state.items():
            self.weights[name].copy_(tensor)


class Lora(Adapters):
    """The adapters of a drafter's linears. Raises UserError for one that has none to adapt."""

    def __init__(self, drafter: Drafter, rank: int) -> None:
        self.drafter = drafter
        self.stored = list(drafter.weights())  # names, before peft renames what it wraps
        super().__init__(drafter, linears(drafter), rank, "lora")

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """What the drafter's checkpoint stores, under the names it had without adapters."""
        named = dict(self.drafter.named_parameters()) | dict(self.drafter.named_buffers())
        out = {name.replace(".base_layer", ""): tensor for name, tensor in named.items()}
        for path, module in self.drafter.named_modules():
            if hasattr(module, "get_delta_weight"):
                out[f"{path}.weight"] = out[f"{path}.weight"] + module.get_delta_weight("default")
        return {name: out[name].detach().contiguous() for name in self.stored}

    def check(self, path: Path) -> None:
        """Raises UserError unless a checkpoint's file holds these adapters, merged."""
        stored = read_weights(path)
        for name, tensor in self.merged().items():
            if not torch.allclose(tensor.cpu(), stored[name], rtol=1e-4, atol=1e-6):
                raise UserError(
                    f"{path}: its {name} is not what these adapters make of the weights that the "
                    "run starts from; put the start that it began with back"
                )


def check_rank(key: str, adapted: Mapping[str, nn.Linear], rank: int) -> None:
    """Raises UserError where none of the layers has that rank; key: the recipe's."""
    widest = max(min(m.in_features, m.out_features) for m in adapted.values())
    if rank > widest:
        raise UserError(f"{key}: {rank} is above {widest}, the widest layer's rank; lower it")


def linears(drafter: Drafter) -> dict[str, nn.Linear]:
    """What adapters go on, by name: every trained linear but output heads, whose rows are the
    vocabulary: a low rank moves all of them at once.

    Raises UserError where there is none.
    """
    found = {
        name: module
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
        if "lm_head" not in name
    }
    if not found:
        raise UserError(
            f"lora: a {drafter.family} drafter has no linear layer that is trained; leave it out"
        )
    return found


def check_target(target: Target, rank: int) -> None:
    """Raises UserError for a target that cannot take such adapters, or not be stored with them."""
    spec = target.source.spec
    if getattr(target.hf.config, "quantization_config", None):
        raise UserError(
            f"adapt: the weights of target {spec} are quantised, and adapters cannot be merged "
            "into them; name a checkpoint that is not"
        )
    adapted = layer_linears(target)
    if not adapted:
        raise UserError(f"adapt: target {spec} has no linear layers to adapt; leave adapt out")
    check_rank("adapt", adapted, rank)
    with tempfile.TemporaryDirectory() as folder:
        try:  # refused now, not when all is trained
            target.hf.generation_config.save_pretrained(folder)
        except ValueError as error:
            raise UserError(
                f"adapt: transformers refuses to store {spec}'s generation_config.json "
                f"({said(error)}); correct it in a local copy"
            ) from None


def layer_linears(target: CausalLM) -> dict[str, nn.Linear]:
    """What adapters go on, by name: every linear of the decoder layers, so never the lm_head."""
    inside = {id(module) for module in target.layers.modules()}
    named = target.hf.named_modules()
    return {n: m for n, m in named if isinstance(m, nn.Linear) and id(m) in inside}


class TargetAdapters(Adapters):
    """The adapters of the linears in a target's decoder layers."""

    def __init__(self, target: Target, rank: int) -> None:
        self.hf = target.hf
        names = layer_linears(target)
        super().__init__(self.hf, names, rank, "adapt")
        self.layers: dict[str, Any] = {name: self.hf.get_submodule(name) for name in names}

    def merge(self) -> None:
        """Adds them to weights of its own, for good: the target is a plain model again."""
        for name, layer in self.layers.items():
            base = layer.get_base_layer()
            base.weight = nn.Parameter(base.weight.clone(), requires_grad=False)
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(self.hf.get_submodule(parent), child, base)
