"""DFlash: a block of masks denoised in one pass over the target's states (arXiv 2602.06036).

Features of several layers are fused by `fc` and normed into one context state c_t, which gives keys
and values to every layer; what moves through the layers are the block's own slots alone: the root's
embedding at position a+1, and mask tokens after it. The target's embedding and lm_head are shared.

Slot s stands at RoPE position a+1+s and predicts the token of its own position, so that depth j is
slot j+1 and slot 0 predicts nothing (`first` = 1). What a depth-j query of anchor a sees: c_t of
t <= a, and all slots of its own block, masks behind it too; of tokens only the root. A draft of k
tokens is a block of k+1 slots: hidden states depend on k.

vLLM 0.32, SGLang 0.5 and llama.cpp serve it at k = block_size - 1. Layers are of Qwen3's type, all
with full attention: queries and keys are normed head by head. (DeepSpec calls DFlash what follows
the slot rule of drafters/dspark.py.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import DrafterConfig, DrafterState, Unroll, entry, register
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import Proposal, from_states, grow
from draftsmith.drafters.parts.block_attention import context_and_block
from draftsmith.drafters.parts.layers import Block, BlockConfig, Layer, RMSNorm, init_weights
from draftsmith.drafters.parts.mask_token import MaskToken, mask_token
from draftsmith.drafters.parts.reduced_vocab import DraftVocab, OneHead, draft_size
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.causal_lm import Tap
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.slab import Slab


class DFlashConfig(DrafterConfig):
    taps: list[int | Literal["normed"]] | None = entry(
        None, "Layers read, of L; default: one per draft layer, evenly from 2 to L-2.", min_length=1
    )
    layers: int = entry(5, "Layers of the drafter.", ge=1)
    block_size: int = entry(16, "Slots of the longest block, the root's included.", ge=2)
    mask_token: MaskToken = None
    draft_vocab: DraftVocab = None
    head: Literal["own", "target"] = entry(
        "target", "target: its lm_head, frozen; or own, trained, that starts as it."
    )
    block: Block = None


@dataclass
class BlockState(DrafterState):
    """slab: keys and values of the context in every layer, and of a block after it."""

    slab: Slab


@register
class DFlash(OneHead[BlockState]):
    """See the module's docstring. first: the slot that drafts depth 0."""

    family = "dflash"
    Config = DFlashConfig
    depth_causal = False
    trees = True
    first: ClassVar[int] = 1
    config: DFlashConfig

    def __init__(self, target: Shell, config: DFlashConfig) -> None:
        """Raises UserError for taps outside the target's layers, a mask token or a draft vocabulary
        that the target lacks, and a block of another width than the target's or with a gate."""
        taps: list[Tap] = list(config.taps or even_taps(target.num_layers, config.layers))
        widths = target.widths(taps)
        shape = config.block or BlockConfig.like(target.config).model_copy(update={"qk_norm": True})
        block = BlockConfig.fitting(shape, target)
        size, mask = draft_size(config.draft_vocab, target), mask_token(config.mask_token, target)
        known = {"taps": taps, "block": block, "draft_vocab": size, "mask_token": mask}
        super().__init__(target, config.model_copy(update=known))
        self.taps, self.longest, self.mask = taps, config.block_size - self.first, mask
        H, eps = block.hidden_size, block.rms_norm_eps
        self.fc = nn.Linear(sum(widths), H, bias=False)
        self.hidden_norm = RMSNorm(H, eps)
        self.layers = nn.ModuleList(Layer(block) for _ in range(config.layers))
        self.norm = RMSNorm(H, eps)
        init_weights(self)
        self.add_head(config.head, H, size)

    @property
    def stack(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def context(self, features: dict[str, Tensor]) -> Tensor:
        """c (B, T, H) of target features {tap: (B, T, H)}."""
        parts = [features[str(tap)].to(self.fc.weight.dtype) for tap in self.taps]
        return self.hidden_norm(self.fc(torch.cat(parts, dim=-1)))

    def slots(self, root: Tensor, count: int) -> Tensor:
        """Inputs (B, .., count, H) of blocks that start with root (B, ..)."""
        mask = root.new_full((*root.shape, count - 1), self.mask)
        tokens = torch.cat([root.unsqueeze(-1), mask], dim=-1)
        return self.target.embedding(tokens).to(self.fc.weight.dtype)

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        """All blocks side by side; nothing exists beyond the longest one."""
        K = min(alignment.exists.shape[2], self.longest or 0)
        N = K + self.first
        row = torch.arange(batch.tokens.shape[0], device=batch.device).unsqueeze(1)
        at, root = alignment.anchors.clamp(min=0), alignment.compare[..., 0]  # (B, A)
        seen = batch.segment[row, at].unsqueeze(2) == batch.segment.unsqueeze(1)
        seen &= batch.position.unsqueeze(1) <= batch.position[row, at].unsqueeze(2)  # (B, A, T)
        context = self.context(batch.features)
        x = self.slots(batch.tokens[row, root], N).flatten(1, 2)  # (B, A * N, H)
        slot = torch.arange(N, device=batch.device)
        position = (batch.position[row, root].unsqueeze(2) + slot).flatten(1)
        split = (at.shape[1], N)
        for layer in self.stack:
            attend, read = layer.self_attn, layer.input_layernorm(x)
            key0, value0 = map(attend.over_groups, attend.keys(context, batch.position))
            key, value = map(attend.over_groups, attend.keys(read, position))
            query = attend.queries(read, position)
            query, key, value = (t.unflatten(2, split) for t in (query, key, value))
            mixed = context_and_block(query, key0, value0, seen, key, value)  # (B, h, A, N, D)
            x = layer.finish(x, mixed.flatten(2, 3))
        return Unroll.of_states(x.unflatten(1, split)[:, :, self.first :], alignment, batch)

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        return self.unembed(self.norm(hidden))

    def start(self, rows: int, capacity: int) -> BlockState:
        return BlockState(Slab(rows, capacity, self.fc.weight.device))

    def extend(
        self, state: BlockState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        """Context is only ever read as keys and values: no attention runs here."""
        context, slab = self.context(features), state.slab
        slots = slab.slots(tokens.shape[1])
        for i, layer in enumerate(self.stack):
            slab.write(i, *layer.self_attn.keys(context, slots), 0, slots)
        slab.commit(counts)

    def states(self, state: BlockState, root: Tensor, k: int) -> Tensor:
        """Hidden states (B, k, H) of all depths after root (B,).

        The block's keys lie in the slots after the context and are never committed.
        """
        slab, N = state.slab, k + self.first
        view, slots = slab.view(N), slab.slots(N)  # (B, N)
        seen = torch.arange(view, device=root.device) < slab.length.unsqueeze(1) + N
        seen = seen.unsqueeze(1).expand(-1, N, -1)  # (B, N, S)
        x = self.slots(root, N)
        for i, layer in enumerate(self.stack):
            attend, read = layer.self_attn, layer.input_layernorm(x)
            keys = slab.write(i, *attend.keys(read, slots), view, slots)
            x = layer.finish(x, attend.attend(attend.queries(read, slots), *keys, seen))
        return x[:, self.first :]

    def propose(
        self, state: BlockState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        forward = from_states(self, self.states(state, root, policy.k))
        return grow(root, state.slab.length, policy, self.vocab, sampler, noise, forward)


def even_taps(layers: int, count: int) -> list[int]:
    """`count` layers from 2 to L-2, as z-lab's drafters read them. Raises UserError for too few."""
    if count == 1:
        return [layers // 2 + 1]
    if layers < count + 3:
        raise UserError(
            f"taps: the default, {count} layers from 2 to L-2, needs {count + 3} layers, the "
            f"target has {layers}; give the layers to tap"
        )
    return [1 + round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
