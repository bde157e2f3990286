"""P-EAGLE: EAGLE-3's inputs, and all depths in one pass (arXiv 2602.01469).

Pair t is (state_t, x_{t+1}) at RoPE position t, as in parts/one_layer.py, up to the anchor's own.
Depth j > 0 knows neither: it reads the mask token's embedding and one learned state for all, which
stands where features do (`mask_hidden`, fused like them), at position a+j. The first layer is
EAGLE-3's, those after it are ordinary ones. Nothing is fed back.

What a depth-j query of anchor a sees, in every layer: pairs t <= a, and its own masks of depths
1..j; of tokens the root and those before it. vLLM 0.32 serves the same (method eagle3 with
parallel_drafting); after a round it runs the accepted pairs again on the target's features. In the
slab the pair (state_t, x_{t+1}) lies in slot t+1; slot 0 is never seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.base import Unroll, entry, register
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import Proposal, from_states, grow
from draftsmith.drafters.parts.block_attention import context_and_block
from draftsmith.drafters.parts.layers import Layer, SelfAttention, init_weights
from draftsmith.drafters.parts.mask_token import MaskToken, mask_token
from draftsmith.drafters.parts.one_layer import OneLayerState, last_state
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.shell import Shell

Read = tuple[Tensor, Tensor]  # what a layer's attention reads, and its residual


class PEagleConfig(EagleConfig):
    layers: int = entry(4, "Layers of the drafter, the first one EAGLE's.", ge=1)
    mask_token: MaskToken = None


@register
class PEagle(Eagle):
    """See the module's docstring."""

    family = "peagle"
    Config = PEagleConfig
    config: PEagleConfig

    def __init__(self, target: Shell, config: PEagleConfig) -> None:
        """Raises UserError as Eagle does, for a mask token that the target lacks, and for
        norm_output."""
        if config.norm_output:
            raise UserError("norm_output: peagle feeds no state back; leave it out")
        mask = mask_token(config.mask_token, target)
        super().__init__(target, config.model_copy(update={"mask_token": mask}))
        assert self.config.block is not None  # filled in by Eagle
        block = self.config.block
        self.mask = mask
        self.more = nn.ModuleList(Layer(block) for _ in range(config.layers - 1))
        init_weights(self.more)
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))

    def masks(self, position: Tensor) -> Read:
        """Of the first layer, for masks at position (B, n)."""
        parts = self.mask_hidden.view(1, 1, -1).split(self.target.widths(self.taps), dim=-1)
        state = self.fuse({str(tap): part for tap, part in zip(self.taps, parts, strict=True)})
        tokens = torch.full_like(position, self.mask)
        return self.inputs(tokens, state.expand(*position.shape, -1), position)

    @property
    def stack(self) -> list[tuple[SelfAttention, Callable[[Tensor, Tensor], Tensor]]]:
        """Attention and `finish` of every layer."""
        more = cast("list[Layer]", list(self.more))
        return [(self.attention, self.finish), *((m.self_attn, m.finish) for m in more)]

    def next_read(self, layer: int, hidden: Tensor) -> Read:
        """Of the layer after `layer`, whose output is hidden; of the last one what it is."""
        if layer == len(self.more):
            return hidden, hidden
        return cast(Layer, self.more[layer]).input_layernorm(hidden), hidden

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        """One causal pass over pairs, and beside it masks that see its keys and their own."""
        row = torch.arange(batch.tokens.shape[0], device=batch.device).unsqueeze(1)
        at, N = alignment.anchors.clamp(min=0), alignment.exists.shape[2] - 1  # (B, A), masks each
        depth = torch.arange(1, N + 1, device=batch.device)
        place = (batch.position[row, at].unsqueeze(2) + depth).flatten(1)  # (B, A * N)
        causal = batch.segment.unsqueeze(2) == batch.segment.unsqueeze(1)
        causal &= batch.position.unsqueeze(1) <= batch.position.unsqueeze(2)  # (B, T, T)
        seen, own = causal[row, at], (depth <= depth.unsqueeze(1))  # (B, A, T), (N, N)
        following = F.pad(batch.tokens[:, 1:], (0, 1))  # x_{t+1} beside state_t
        pairs = self.inputs(following, self.fuse(batch.features), batch.position)
        masks = self.masks(place)
        for i, (attend, finish) in enumerate(self.stack):
            key0, value0 = map(attend.over_groups, attend.keys(pairs[0], batch.position))
            if N:
                key, value = map(attend.over_groups, attend.keys(masks[0], place))
                query = attend.queries(masks[0], place)
                query, key, value = (t.unflatten(2, (-1, N)) for t in (query, key, value))
                mixed = context_and_block(query, key0, value0, seen, key, value, own)
                masks = self.next_read(i, finish(masks[1], mixed.flatten(2, 3)))
            query = attend.queries(pairs[0], batch.position)
            mixed = F.scaled_dot_product_attention(query, key0, value0, attn_mask=causal[:, None])
            pairs = self.next_read(i, finish(pairs[1], mixed))
        first = pairs[1][row, at].unsqueeze(2)  # (B, A, 1, H)
        states = torch.cat([first, masks[1].unflatten(1, (-1, N))], dim=2) if N else first
        return Unroll.of_states(states, alignment, batch)

    def read(self, state: OneLayerState, read: Read, position: Tensor) -> Tensor:
        """The last layer's output (B, W, H) of what stands after the committed pairs, each seeing
        those and what stands before itself."""
        slab, W = state.slab, position.shape[1]
        view, slots = slab.view(W), slab.slots(W)
        key_slot = torch.arange(view, device=slots.device)
        seen = key_slot <= slots.unsqueeze(2)  # (B, W, S)
        seen &= (key_slot > 0) | (slots == 0).unsqueeze(2)  # slot 0 holds no pair
        for i, (attend, finish) in enumerate(self.stack):
            key, value = slab.write(i, *attend.keys(read[0], position), view, slots)
            mixed = attend.attend(attend.queries(read[0], position), key, value, seen)
            read = self.next_read(i, finish(read[1], mixed))
        return read[1]

    def extend(
        self, state: OneLayerState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        fused = self.fuse(features)  # (B, W, H)
        before = torch.cat([state.fused.unsqueeze(1), fused[:, :-1]], dim=1)
        position = state.slab.slots(tokens.shape[1]) - 1
        self.read(state, self.inputs(tokens, before, position), position)
        state.slab.commit(counts)
        state.fused.copy_(last_state(fused, counts, state.fused))

    def propose(
        self, state: OneLayerState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """The root's pair and the masks lie in the slots from the root's on, never committed."""
        slab = state.slab
        position = slab.slots(policy.k) - 1  # (B, k): a pair stands one before its token
        pair = self.inputs(root.unsqueeze(1), state.fused.unsqueeze(1), position[:, :1])
        both = zip(pair, self.masks(position[:, 1:]), strict=True)
        read, residual = (torch.cat(parts, dim=1) for parts in both)
        forward = from_states(self, self.read(state, (read, residual), position))
        return grow(root, slab.length, policy, self.vocab, sampler, noise, forward)
