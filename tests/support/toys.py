"""Toy drafters of shapes which the shipped families do not have.

toy-block: a bidirectional block, so that hidden states depend on k, with a head that reads `prev`.
toy-either: two drafters in one, so that a state holds states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter, DrafterState, Policy, Proposal, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.grow import from_states, grow
from draftsmith.drafters.parts.layers import BlockConfig, RMSNorm, SelfAttention, init_weights
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target


class ToyBlockConfig(base.DrafterConfig):
    """taps: layer ids whose states are fused; rank: inner width of the Markov head; block: masks
    that it takes at most."""

    taps: list[int] = [1, 3]
    rank: int = 8
    block: int | None = None


@dataclass
class ToyBlockState(DrafterState):
    """slab: keys and values of the context, and of the block after it."""

    slab: Slab


@base.register
class ToyBlock(Drafter[ToyBlockState]):
    """A masked block: the root at position a+1 and k masks at a+2.., in one bidirectional layer.

    A depth-j query (mask j, which predicts its own slot) sees the projected features of positions
    <= a and the whole block, masks behind it too; of tokens only the root. `prev` enters in the
    head alone.
    """

    family = "toy-block"
    Config = ToyBlockConfig
    depth_causal = False
    trees = True
    config: ToyBlockConfig

    def __init__(self, target: Target, config: ToyBlockConfig) -> None:
        target.check_taps(config.taps)
        super().__init__(target, config)
        self.taps, self.longest = config.taps, config.block
        block = BlockConfig.like(target.config)
        H = block.hidden_size
        self.fc = nn.Linear(len(config.taps) * H, H, bias=False)
        self.context_norm = RMSNorm(H, block.rms_norm_eps)
        self.input_norm = RMSNorm(H, block.rms_norm_eps)
        self.norm = RMSNorm(H, block.rms_norm_eps)
        self.attend = SelfAttention(block, H)
        self.mask = nn.Parameter(torch.randn(H))
        self.lm_head = nn.Linear(H, target.vocab_size, bias=False)
        self.markov_in = nn.Linear(H, config.rank, bias=False)
        self.markov_out = nn.Linear(config.rank, target.vocab_size, bias=False)
        init_weights(self)

    def _context(self, features: dict[str, Tensor], position: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, kv_heads, T, D) of target features at position (B, T)."""
        fused = self.fc(torch.cat([features[str(tap)] for tap in self.taps], dim=-1))
        return self.attend.keys(self.context_norm(fused), position)

    def _block(self, root: Tensor, k: int) -> Tensor:
        """Inputs (.., k + 1, H) of root (..): its embedding, then the masks."""
        masks = self.mask.expand(*root.shape, k, -1)
        return torch.cat([self.target.embedding(root).unsqueeze(-2), masks], dim=-2)

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        bias = self.markov_out(torch.tanh(self.markov_in(self.target.embedding(prev))))
        return self.lm_head(self.norm(hidden)) + bias

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        """All blocks of a row side by side: each sees its own slots and the context up to a."""
        B, A, depths = alignment.exists.shape
        N = depths + 1
        at = alignment.anchors.clamp(min=0)  # (B, A)
        root = batch.tokens.gather(1, (at + 1).clamp(max=batch.tokens.shape[1] - 1))
        x = self._block(root, depths).flatten(1, 2)  # (B, A * N, H)
        here = batch.position.gather(1, at)  # (B, A)
        position = (here.unsqueeze(2) + 1 + torch.arange(N)).flatten(1)
        normed = self.input_norm(x)
        context = self._context(batch.features, batch.position)
        both = zip(context, self.attend.keys(normed, position), strict=True)
        key, value = (self.attend.over_groups(torch.cat(pair, dim=2)) for pair in both)
        past = batch.segment.unsqueeze(1) == batch.segment.gather(1, at).unsqueeze(2)
        past &= batch.position.unsqueeze(1) <= here.unsqueeze(2)  # (B, A, T)
        number = torch.arange(A).repeat_interleave(N)
        own = (number == number.unsqueeze(1)).expand(B, -1, -1)
        seen = torch.cat([past.repeat_interleave(N, dim=1), own], dim=2).unsqueeze(1)
        query = self.attend.queries(normed, position)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        hidden = (x + self.attend.output(mixed)).unflatten(1, (A, N))
        return Unroll.of_states(hidden[:, :, 1:], alignment, batch)

    def start(self, rows: int, capacity: int) -> ToyBlockState:
        return ToyBlockState(Slab(rows, capacity, self.mask.device))

    def extend(self, state: ToyBlockState, tokens: Tensor, features: dict, counts: Tensor) -> None:
        slots = state.slab.length.unsqueeze(1) + torch.arange(tokens.shape[1])
        state.slab.write(0, *self._context(features, slots), 0)
        state.slab.commit(counts)

    def propose(
        self, state: ToyBlockState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """The block's keys lie in the slots after the context and are never committed."""
        N, slab = policy.k + 1, state.slab
        x = self._block(root, policy.k)  # (B, N, H)
        normed = self.input_norm(x)
        position = slab.length.unsqueeze(1) + torch.arange(N)
        pair = slab.write(0, *self.attend.keys(normed, position), slab.view(N))
        key, value = (self.attend.over_groups(each) for each in pair)
        seen = torch.arange(key.shape[2]) < slab.length.unsqueeze(1) + N  # (B, S)
        query = self.attend.queries(normed, position)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None, None])
        forward = from_states(self, (x + self.attend.output(mixed))[:, 1:])
        return grow(root, slab.length, policy, self.vocab, sampler, noise, forward)


@dataclass
class ToyEitherState(DrafterState):
    """A state inside a state, twice."""

    lookup: DrafterState
    other: DrafterState


class ToyEither(Drafter[ToyEitherState]):
    """Two drafters as one: lookup's drafts where it found k of them, else the other's.

    other proposes from all of the target's vocabulary, and `extend` rewrites what it had drafted.
    """

    family = "toy-either"
    Config = base.DrafterConfig

    def __init__(self, lookup: Drafter, other: Drafter) -> None:
        super().__init__(other.target, base.DrafterConfig())
        self.lookup, self.other, self.taps = lookup, other, other.taps

    def unroll(self, *given: object) -> Unroll:
        raise NotImplementedError("it drafts only")

    def start(self, rows: int, capacity: int) -> ToyEitherState:
        return ToyEitherState(self.lookup.start(rows, capacity), self.other.start(rows, capacity))

    def extend(self, state: ToyEitherState, *known: object) -> None:
        self.lookup.extend(state.lookup, *known)
        self.other.extend(state.other, *known)

    def begin(self, state: ToyEitherState) -> None:
        self.lookup.begin(state.lookup)
        self.other.begin(state.other)

    def propose(
        self, state: ToyEitherState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        found = self.lookup.propose(state.lookup, root, policy, sampler, noise)
        drawn = self.other.propose(state.other, root, policy, sampler, noise)
        full = (found.length == policy.k + 1).unsqueeze(1)
        q = drawn.q
        if q is not None:
            following = found.tokens.roll(-1, dims=1).unsqueeze(2)
            q = torch.where(full.unsqueeze(2), torch.zeros_like(q).scatter(2, following, 1.0), q)
        tokens = torch.where(full, found.tokens, drawn.tokens)
        return Proposal(tokens, drawn.parents, q, drawn.length)
