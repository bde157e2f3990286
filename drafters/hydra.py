"""Hydra: heads that also read the tokens drafted so far (Ankner et al. 2024, arXiv 2402.05109).

Head j reads [g_a; e(x_{a+1}); ..; e(x_{a+1+j})], the anchor's normed state and the target's own
embeddings of the root and of the drafts before its own, side by side: (j + 2) H numbers, which its
first block brings to H as R x + SiLU(W x + b). Further blocks and an lm_head follow as in Medusa.

This is the paper's Hydra as its code has it ("mlp" with grounded heads), but for two things: R
starts as [1 0 .. 0], so that a fresh head gives the target's own law as a Medusa head does, and
further blocks are modules of their own (the code repeats one). Of Hydra++ there is the training on
the target's laws (loss: kl) and depth (layers: 4); its extra decoder layer over g makes keys, which
these heads have none of: take an EAGLE head instead.

What a depth-j query of anchor a sees: g_a and the tokens x_{a+1} .. x_{a+1+j} on its own path. No
keys or values. No server of vLLM 0.32, SGLang, TensorRT-LLM, llama.cpp or transformers takes it:
it is served by draftsmith's decoder and by its authors' code (batch 1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.base import register
from draftsmith.drafters.parts.heads import Heads, zeroed


class JoinBlock(nn.Module):
    """residual(x) + SiLU(linear(x)) of x (.., parts * H): its first part until trained."""

    def __init__(self, parts: int, size: int) -> None:
        super().__init__()
        self.linear = zeroed(nn.Linear(parts * size, size))
        self.residual = zeroed(nn.Linear(parts * size, size))
        with torch.no_grad():
            self.residual.weight[:, :size].fill_diagonal_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))


@register
class Hydra(Heads):
    """See the module's docstring."""

    family = "hydra"

    def _first_block(self, depth: int, hidden: int) -> nn.Module:
        return JoinBlock(depth + 2, hidden)

    def _state(self, depth: int, g: Tensor, line: Tensor) -> Tensor:
        read = self.target.embedding(line).to(g.dtype).flatten(-2)  # (.., (depth + 1) H)
        return self.blocks[depth](torch.cat([g.expand(*read.shape[:-1], -1), read], dim=-1))
