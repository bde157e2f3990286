"""Medusa-1: heads that read the anchor's state alone (Cai et al. 2024, arXiv 2401.10774).

Head j is `layers` residual blocks x + SiLU(W x + b) on g_a and an lm_head of its own; it predicts
x_{a+2+j} without knowing which tokens stand between. The target is frozen; what the paper adds to
its loss (0.8**j per head) is the recipe's depth_weights. (Medusa-2 adapts the target to the heads:
train/medusa2.py; they are served alike.)

What a depth-j query of anchor a sees: g_a, after the target's final norm. No keys, no values, no
token: a depth has the same law at every node of a tree, so that heads run once a depth.
vLLM serves it (method `medusa`: the best chain only, all heads on the runner's normed output;
`lm_heads` own or one shared, over the whole vocabulary: 0.32 cannot load its own `token_map`).
TensorRT-LLM takes it on its legacy path; SGLang, llama.cpp and transformers do not.
"""

from __future__ import annotations

from torch import Tensor, nn

from draftsmith.drafters.base import register
from draftsmith.drafters.parts.heads import Heads, ResidualBlock


@register
class Medusa(Heads):
    """See the module's docstring."""

    family = "medusa"

    def _first_block(self, depth: int, hidden: int) -> nn.Module:
        return ResidualBlock(hidden)

    def _state(self, depth: int, g: Tensor, line: Tensor) -> Tensor:
        return self.blocks[depth](g)
