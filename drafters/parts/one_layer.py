"""Drafters of one decoder layer that go on from their own output: EAGLE and a shared MTP head.

Pair t is a state and the token after it: (state_t, x_{t+1}), at RoPE position t; it predicts
x_{t+2}. Up to the anchor the state comes from target features, past it from the layer's own output
("training-time test", EAGLE-3, arXiv 2503.01840; aligned steps, HASS, arXiv 2408.15766).

What a depth-j query of anchor a sees: keys of pairs t <= a, made from target features, and its own
keys of depths 1..j, made from its own output, at positions a+1..a+j. vLLM, SGLang, TensorRT-LLM and
llama.cpp serve the same: after each round they recompute the accepted pairs' keys from the target's
features.

In the slab the pair (state_t, x_{t+1}) lies in slot t+1, the slot of its token; slot 0 is never
seen.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterState, Policy, Proposal, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.grow import grow
from draftsmith.drafters.parts.diagonal import causal_and_diagonal
from draftsmith.drafters.parts.layers import (
    MLP,
    BlockConfig,
    RMSNorm,
    SelfAttention,
    after_attention,
)
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.attention import tree_seen
from draftsmith.drafters.target.slab import Slab


@dataclass
class OneLayerState(DrafterState):
    """slab: keys and values of committed pairs; fused (B, H): the state at the anchor."""

    slab: Slab
    fused: Tensor


class OneLayer(Drafter[OneLayerState]):
    """A family says what its states are (`fuse`, `fed_back`) and what its layer reads (`inputs`).

    The layer is what `add_layer` makes, unless `attention` and `finish` name another. Hidden states
    of an unroll are what `finish` returns.
    """

    trees = True
    self_attn: SelfAttention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def add_layer(self, block: BlockConfig, width: int) -> None:
        """A Llama layer, under the names that servers read, whose attention reads `width` numbers;
        the norm before it is the family's own."""
        self.self_attn = SelfAttention(block, width)
        self.post_attention_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.mlp = MLP(block)

    @property
    def attention(self) -> SelfAttention:
        return self.self_attn

    @abstractmethod
    def fuse(self, features: dict[str, Tensor]) -> Tensor:
        """States (B, T, H) of target features {tap: (B, T, H)}."""

    @abstractmethod
    def inputs(self, tokens: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads (B, T, input_size), and the residual (B, T, H), of pairs at
        position (B, T)."""

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output (B, T, H) of attention results (B, heads, T, D)."""
        return after_attention(self, residual, mixed, None)

    def fed_back(self, output: Tensor) -> Tensor:
        """The state that the next depth reads, of the layer's output."""
        return output

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        """Depth 0 is one causal pass; deeper ones see depth 0's keys and their own diagonal.

        Every position gives depth 0 its keys; only anchors have queries.
        """
        row = torch.arange(batch.tokens.shape[0], device=batch.device).unsqueeze(1)
        anchor = alignment.anchors.clamp(min=0)  # (B, A)
        attend = self.attention
        following = F.pad(batch.tokens[:, 1:], (0, 1))  # x_{t+1} beside state_t
        x, residual = self.inputs(following, self.fuse(batch.features), batch.position)
        key0, value0 = (attend.over_groups(kv) for kv in attend.keys(x, batch.position))
        position, segment = batch.position[row, anchor], batch.segment[row, anchor]
        seen = segment.unsqueeze(2) == batch.segment.unsqueeze(1)
        seen &= batch.position.unsqueeze(1) <= position.unsqueeze(2)
        seen = seen.unsqueeze(1)  # (B, 1, A, T)
        query = attend.queries(x[row, anchor], position)  # (B, h, A, D)
        mixed = F.scaled_dot_product_attention(query, key0, value0, attn_mask=seen)
        hidden = self.finish(residual[row, anchor], mixed)  # (B, A, H)
        states = [hidden]
        keys, values = [], []
        for j in range(1, alignment.exists.shape[2]):
            token = batch.tokens[row, alignment.compare[:, :, j]]  # (B, A) x_{a+1+j}
            x, residual = self.inputs(token, self.fed_back(hidden), position + j)
            query = attend.queries(x, position + j)  # (B, h, A, D)
            key, value = (attend.over_groups(kv) for kv in attend.keys(x, position + j))
            keys.append(key)
            values.append(value)
            mixed = causal_and_diagonal(query, key0, value0, seen, keys, values)
            hidden = self.finish(residual, mixed)
            states.append(hidden)
        return Unroll.of_states(torch.stack(states, dim=2), alignment, batch)

    def start(self, rows: int, capacity: int) -> OneLayerState:
        weight = self.attention.q_proj.weight
        fused = weight.new_zeros(rows, self.target.hidden_size)
        return OneLayerState(Slab(rows, capacity, weight.device), fused)

    def extend(
        self, state: OneLayerState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        """With one layer a committed pair is only ever read as a key: no attention runs here."""
        fused = self.fuse(features)  # (B, W, H)
        before = torch.cat([state.fused.unsqueeze(1), fused[:, :-1]], dim=1)
        offset = torch.arange(tokens.shape[1], device=tokens.device)
        position = state.slab.length.unsqueeze(1) + offset - 1
        x, _ = self.inputs(tokens, before, position)
        key, value = self.attention.keys(x, position)
        state.slab.write(0, key, value, 0)
        state.slab.commit(counts)
        state.fused.copy_(last_state(fused, counts, state.fused))

    def propose(
        self, state: OneLayerState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """Keys of fed nodes lie in the slots from the root's on, in the order they came."""
        slab, attend = state.slab, self.attention
        start = slab.length.clone()
        states = state.fused.unsqueeze(1)  # (B, F, H) of the nodes fed so far
        view = slab.view(policy.slots)

        def forward(tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
            nonlocal states
            W = tokens.shape[1]
            above = states.gather(1, parent.unsqueeze(2).expand(-1, -1, states.shape[2]))
            # A pair stands where its state does, one before its token.
            position = start.unsqueeze(1) + seen.sum(2) - 2  # (B, W)
            x, residual = self.inputs(tokens, above, position)
            key, value = slab.write(0, *attend.keys(x, position), view)
            slab.commit(torch.full_like(slab.length, W))
            query = attend.queries(x, position)
            node, visible = tree_seen(start, seen, view)
            visible = visible & (node != -start.unsqueeze(1)).unsqueeze(1)  # slot 0 holds no pair
            hidden = self.finish(residual, attend.attend(query, key, value, visible))  # (B, W, H)
            fed = self.fed_back(hidden)
            states = fed if seen.shape[2] == W else torch.cat([states, fed], dim=1)
            depth = seen.sum(2) - 1
            logits = self.logits(hidden.flatten(0, 1), tokens.flatten(), depth.flatten())
            return logits.unflatten(0, depth.shape)

        proposal = grow(root, start, policy, self.vocab, sampler, noise, forward)
        slab.length.copy_(start)
        return proposal


def last_state(states: Tensor, counts: Tensor, old: Tensor) -> Tensor:
    """The counts-th of states (B, W, H) in each row; that of old (B, H) where counts (B,) is 0."""
    last = (counts - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, states.shape[2])
    return torch.where((counts > 0).unsqueeze(1), states.gather(1, last).squeeze(1), old)
