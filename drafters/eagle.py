"""EAGLE-3: one decoder layer over fused target features (Li et al. 2025, arXiv 2503.01840).

Features of three layers are fused by `fc` into the state g_t; the layer reads the normed embedding
and the normed state side by side, and its pre-norm output is the next depth's state. Pairs, keys
and positions: parts/one_layer.py. vLLM, SGLang, TensorRT-LLM and llama.cpp take it.

EAGLE-3.1 (attention drift, arXiv 2605.09992) is `fc_norm` and `norm_output`: the state before `fc`
and the one fed back are normed, so that their size does not grow from depth to depth. The three
flags `norm_before_fc`, `fc_norm` and `norm_output` mean what vLLM 0.32 and SGLang 0.5 (both in
models/llama_eagle3.py) read under the same names; TensorRT-LLM reads them too. SpecForge trains
another thing under `norm_output`: its state stays un-normed.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import DrafterConfig, entry, register
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.parts.layers import Block, BlockConfig, RMSNorm, init_weights
from draftsmith.drafters.parts.one_layer import OneLayer, OneLayerState
from draftsmith.drafters.parts.reduced_vocab import DraftVocab, OneHead, draft_size
from draftsmith.drafters.target.causal_lm import Tap
from draftsmith.drafters.target.shell import Shell


class EagleConfig(DrafterConfig):
    """Off, norm_before_residual is what all four servers take."""

    taps: list[int | Literal["normed"]] | None = entry(
        None, "Layers read, of L; default: [2, L//2, L-3].", min_length=1
    )
    draft_vocab: DraftVocab = None
    head: Literal["own", "target"] = entry(
        "own", "own: a trained lm_head that starts as the target's; or that, frozen."
    )
    norm_before_residual: bool = entry(False, "The residual is the normed state.")
    norm_before_fc: bool = entry(False, "One norm over the features side by side.")
    fc_norm: bool = entry(False, "A norm for each tap.")
    norm_output: bool = entry(False, "The state fed back is the one lm_head reads.")
    block: Block = None


@register
class Eagle(OneHead[OneLayerState], OneLayer):
    """See the module's docstring."""

    family = "eagle"
    Config = EagleConfig
    config: EagleConfig

    def __init__(self, target: Shell, config: EagleConfig) -> None:
        """Raises UserError for taps outside the target's layers, a draft vocabulary too large, and
        a block of another width than the target's or with a gate."""
        layers = target.num_layers
        if config.taps is None and layers < 7:
            raise UserError(
                f"taps: the default [2, L//2, L-3] needs 7 layers, the target has {layers}; give "
                "the layers to tap"
            )
        taps: list[Tap] = list(config.taps or [2, layers // 2, layers - 3])
        widths = target.widths(taps)
        block = BlockConfig.fitting(config.block, target)
        size = draft_size(config.draft_vocab, target)
        config = config.model_copy(update={"taps": taps, "block": block, "draft_vocab": size})
        super().__init__(target, config)
        self.taps = taps
        H, eps = block.hidden_size, block.rms_norm_eps
        self.input_norm = RMSNorm(sum(widths), eps) if config.norm_before_fc else None
        norms = [RMSNorm(width, eps) for width in widths] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(sum(widths), H, bias=False)
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.add_layer(block, 2 * H)
        self.norm = RMSNorm(H, eps)
        init_weights(self)
        self.add_head(config.head, H, size)

    def fuse(self, features: dict[str, Tensor]) -> Tensor:
        parts = [features[str(tap)].to(self.fc.weight.dtype) for tap in self.taps]
        if self.input_norm is not None:
            whole = self.input_norm(torch.cat(parts, dim=-1))
            parts = list(whole.split([part.shape[-1] for part in parts], dim=-1))
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(torch.cat(parts, dim=-1))  # (B, T, H)

    def inputs(self, tokens: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """The layer reads (B, T, 2H)."""
        embedded = self.target.embedding(tokens).to(state.dtype)
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self.config.norm_before_residual else state

    def fed_back(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.norm_output else output

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        return self.unembed(self.norm(hidden))
