"""EAGLE-3: one decoder layer over fused target features (Li et al. 2025, arXiv 2503.01840).

Row t reads the pair (g_t, x_{t+1}) at RoPE position t and predicts x_{t+2}; features of three
layers are fused by `fc`. Deeper drafts feed the layer its own pre-norm output instead of features
("training-time test": K such steps are unrolled in training).

What a depth-j query of anchor a sees: keys of rows t <= a, made from target features, and its own
keys of depths 1..j, made from its own hidden states, at positions a+1..a+j. vLLM, SGLang,
TensorRT-LLM and llama.cpp serve the same: after each round they recompute the accepted rows'
keys from the target's features.

In the slab the pair (g_t, x_{t+1}) lies in slot t+1, the slot of its token; slot 0 is never seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from draftsmith.drafters.attention import tree_seen
from draftsmith.drafters.base import (
    Drafter,
    DrafterConfig,
    Policy,
    Proposal,
    Unroll,
    register,
    rows_of,
)
from draftsmith.drafters.batch import Batch, align
from draftsmith.drafters.cache import Slab
from draftsmith.drafters.causal_lm import Tap
from draftsmith.drafters.diagonal import causal_and_diagonal
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import grow
from draftsmith.drafters.layers import MLP, BlockConfig, RMSNorm, SelfAttention, init_weights
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target import Target
from draftsmith.drafters.vocab import VocabMap, most_frequent


class EagleConfig(DrafterConfig):
    """taps: None takes [2, L//2, L-3]. draft_vocab: kept target tokens, None = all.

    head "own": a trained lm_head that starts as the target's rows; "target": the target's, frozen.
    norm_before_residual: whether the residual is the normed state (off is what all four servers
    take). block: None takes the shape of the target's layers.
    """

    taps: list[int | Literal["normed"]] | None = Field(default=None, min_length=1)
    draft_vocab: int | None = Field(default=None, ge=1)
    head: Literal["own", "target"] = "own"
    norm_before_residual: bool = False
    block: BlockConfig | None = None


@dataclass
class EagleState:
    """slab: keys and values of committed pairs; fused (B, H): fc of the anchor's features."""

    slab: Slab
    fused: Tensor


@register
class Eagle(Drafter):
    """See the module's docstring."""

    family = "eagle"
    Config = EagleConfig
    trees = True
    config: EagleConfig

    def __init__(self, target: Target, config: EagleConfig) -> None:
        """Raises UserError for taps outside the target's layers or a draft vocabulary too large."""
        layers = target.num_layers
        if config.taps is None and layers < 7:
            raise UserError(
                f"taps: the default [2, L//2, L-3] needs 7 layers, the target has {layers}; give "
                "the layers to tap"
            )
        taps: list[Tap] = list(config.taps or [2, layers // 2, layers - 3])
        target.check_taps(taps)
        if len(set(taps)) != len(taps):
            raise UserError(f"taps: {taps} names a layer twice")
        block = config.block or BlockConfig.like(target.config)
        size = config.draft_vocab or target.vocab_size
        if size > target.vocab_size:
            raise UserError(
                f"draft_vocab: {size} is more than the target's {target.vocab_size} tokens"
            )
        config = config.model_copy(update={"taps": taps, "block": block, "draft_vocab": size})
        super().__init__(target, config)
        self.taps = taps
        H = block.hidden_size
        if target.hidden_size != H:
            raise UserError(
                f"block.hidden_size: {H} is not the target's {target.hidden_size}, whose "
                "embeddings this head shares"
            )
        self.fc = nn.Linear(len(taps) * target.hidden_size, H, bias=False)
        self.input_layernorm = RMSNorm(H, block.rms_norm_eps)
        self.hidden_norm = RMSNorm(H, block.rms_norm_eps)
        self.self_attn = SelfAttention(block, 2 * H)
        self.post_attention_layernorm = RMSNorm(H, block.rms_norm_eps)
        self.mlp = MLP(block)
        self.norm = RMSNorm(H, block.rms_norm_eps)
        init_weights(self)
        self.lm_head: nn.Linear | None = None
        if config.head == "own":
            self.lm_head = nn.Linear(H, size, bias=False)
        if size < target.vocab_size:
            self.register_buffer("draft_ids", torch.arange(size))

    @classmethod
    def create(cls, target: Target, config: EagleConfig, counts: Tensor | None = None) -> Eagle:
        """A fresh head; counts (V,) choose the draft vocabulary."""
        drafter = cls(target, config)
        size = drafter.config.draft_vocab
        if size is not None and size < target.vocab_size:
            if counts is None:
                raise UserError("draft_vocab: needs training answers to count tokens in")
            drafter.set_vocab(most_frequent(counts, size))
        if drafter.lm_head is not None:
            with torch.no_grad():
                rows, ids = target.lm_head.weight, drafter.vocab.ids
                drafter.lm_head.weight.copy_(rows if ids is None else rows[ids.to(rows.device)])
        return drafter

    def set_vocab(self, vocab: VocabMap) -> None:
        self.vocab = vocab.to(self.fc.weight.device)
        if vocab.ids is not None:
            self.draft_ids = vocab.ids.clone()

    def load_state_dict(self, state: dict, *args, **kwargs):  # type: ignore[no-untyped-def, override]
        result = super().load_state_dict(state, *args, **kwargs)
        if "draft_ids" in state:
            self.set_vocab(VocabMap(self.target.vocab_size, state["draft_ids"]))
        return result

    def _fuse(self, features: dict[str, Tensor]) -> Tensor:
        stacked = torch.cat([features[str(tap)] for tap in self.taps], dim=-1)
        return self.fc(stacked.to(self.fc.weight.dtype))  # (B, T, H)

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input (B, T, 2H) and residual (B, T, H) of pairs (hidden, token)."""
        embedded = self.target.embedding(tokens).to(hidden.dtype)
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self.config.norm_before_residual else hidden

    def _finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output (B, T, H), before the final norm, of attention results."""
        hidden = residual + self.self_attn.output(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        normed = self.norm(hidden)
        if self.lm_head is not None:
            return self.lm_head(normed)
        rows = self.target.lm_head.weight
        kept = rows if self.vocab.ids is None else rows[self.vocab.ids]
        return F.linear(normed, kept.to(normed.dtype))

    def unroll(self, batch: Batch, depths: int, anchors: Tensor | None = None) -> Unroll:
        """Depth 0 is one causal pass; deeper ones see depth 0's keys and their own diagonal.

        Every position gives depth 0 its keys; only anchors ask.
        """
        alignment = align(batch, depths, anchors)
        row = torch.arange(batch.tokens.shape[0], device=batch.device).unsqueeze(1)
        at = alignment.anchors.clamp(min=0)  # (B, A)
        attend = self.self_attn
        following = F.pad(batch.tokens[:, 1:], (0, 1))  # x_{t+1} beside g_t
        x, residual = self._inputs(following, self._fuse(batch.features))
        key0, value0 = (attend.over_groups(kv) for kv in attend.keys(x, batch.position))
        position, segment = batch.position[row, at], batch.segment[row, at]
        seen = segment.unsqueeze(2) == batch.segment.unsqueeze(1)
        seen &= batch.position.unsqueeze(1) <= position.unsqueeze(2)
        seen = seen.unsqueeze(1)  # (B, 1, A, T)
        query = attend.queries(x[row, at], position)  # (B, h, A, D)
        mixed = F.scaled_dot_product_attention(query, key0, value0, attn_mask=seen)
        hidden = self._finish(residual[row, at], mixed)  # (B, A, H)
        states = [hidden]
        keys, values = [], []
        for j in range(1, depths):
            token = batch.tokens[row, alignment.compare[:, :, j]]  # (B, A) x_{a+1+j}
            x, residual = self._inputs(token, hidden)
            query = attend.queries(x, position + j)  # (B, h, A, D)
            key, value = (attend.over_groups(kv) for kv in attend.keys(x, position + j))
            keys.append(key)
            values.append(value)
            mixed = causal_and_diagonal(query, key0, value0, seen, keys, values)
            hidden = self._finish(residual, mixed)
            states.append(hidden)
        return rows_of(torch.stack(states, dim=2), alignment, batch)

    def start(self, rows: int, capacity: int) -> EagleState:
        device = self.fc.weight.device
        fused = self.fc.weight.new_zeros(rows, self.fc.weight.shape[0])
        return EagleState(Slab(rows, capacity, device), fused)

    def extend(
        self, state: EagleState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        """With one layer a committed pair is only ever read as a key: no attention runs here."""
        fused = self._fuse(features)  # (B, W, H)
        before = torch.cat([state.fused.unsqueeze(1), fused[:, :-1]], dim=1)
        x, _ = self._inputs(tokens, before)
        offset = torch.arange(tokens.shape[1], device=tokens.device)
        slots = state.slab.length.unsqueeze(1) + offset
        key, value = self.self_attn.keys(x, slots - 1)
        state.slab.write(0, key, value, 0)
        state.slab.commit(counts)
        last = (counts - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, fused.shape[2])
        moved = (counts > 0).unsqueeze(1)
        state.fused.copy_(torch.where(moved, fused.gather(1, last).squeeze(1), state.fused))

    def propose(
        self, state: EagleState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """Keys of fed nodes lie in the slots from the root's on, in the order they came."""
        slab, attend = state.slab, self.self_attn
        start = slab.length.clone()
        states = state.fused.unsqueeze(1)  # (B, F, H) of the nodes fed so far
        view = slab.view(policy.slots)

        def forward(tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
            nonlocal states
            W = tokens.shape[1]
            above = states.gather(1, parent.unsqueeze(2).expand(-1, -1, states.shape[2]))
            x, residual = self._inputs(tokens, above)
            # A pair stands where its feature does, one before its token.
            position = start.unsqueeze(1) + seen.sum(2) - 2  # (B, W)
            key, value = slab.write(0, *attend.keys(x, position), view)
            slab.commit(torch.full_like(slab.length, W))
            query = attend.queries(x, position)
            node, visible = tree_seen(start, seen, view)
            visible = visible & (node != -start.unsqueeze(1)).unsqueeze(1)  # slot 0 holds no pair
            hidden = self._finish(residual, attend.attend(query, key, value, visible))  # (B, W, H)
            states = hidden if seen.shape[2] == W else torch.cat([states, hidden], dim=1)
            depth = seen.sum(2) - 1
            logits = self.logits(hidden.flatten(0, 1), tokens.flatten(), depth.flatten())
            return logits.unflatten(0, depth.shape)

        proposal = grow(root, start, policy, self.vocab, sampler, noise, forward)
        slab.length.copy_(start)
        return proposal
