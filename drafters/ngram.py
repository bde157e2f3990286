"""Prompt lookup: proposes what followed the latest earlier occurrence of the current suffix.

Saxena 2023 (prompt lookup decoding); vLLM's `ngram` method and transformers'
`prompt_lookup_num_tokens` draft in the same spirit. A depth-j draft sees tokens up to the root,
nothing else: it is a deterministic function of the state, so there is no q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import model_validator
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterConfig, DrafterState, Guesses, entry, register
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.grow import Proposal
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Noise, Sampler


class NgramConfig(DrafterConfig):
    """Longer matches win."""

    max_n: int = entry(3, "Longest run of tokens that is looked up.", ge=1)
    min_n: int = entry(1, "Shortest run of tokens that is looked up.", ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n {self.min_n} is above max_n {self.max_n}")
        return self


@dataclass
class NgramState(DrafterState):
    """buffer (B, S): the committed tokens; length (B,)."""

    buffer: Tensor
    length: Tensor


@register
class Ngram(Drafter[NgramState]):
    """See the module's docstring."""

    family = "ngram"
    Config = NgramConfig
    deterministic = True
    config: NgramConfig

    def unroll(self, batch: Batch, alignment: Alignment) -> Guesses:
        """A walk with one table per n: n-gram -> the position after its latest occurrence."""
        out = torch.full(alignment.exists.shape, -1, dtype=torch.long)
        texts = (t.tolist() for t in (batch.tokens, batch.segment, alignment.anchors))
        for b, (tokens, segments, anchors) in enumerate(zip(*texts, strict=True)):
            wanted = {a + 1: i for i, a in enumerate(anchors) if a >= 0}
            tables: list[dict[tuple[int, ...], int]] = []
            first = 0
            for t, (_, segment) in enumerate(zip(tokens, segments, strict=True)):
                if t == 0 or segment != segments[t - 1]:
                    first, tables = t, [{} for _ in range(self.config.max_n + 1)]
                match = -1  # the position after the latest occurrence of the longest suffix
                for n in range(self.config.min_n, self.config.max_n + 1):
                    if t - n + 1 < first:
                        break
                    gram = tuple(tokens[t - n + 1 : t + 1])
                    match = tables[n].get(gram, match)
                    tables[n][gram] = t + 1
                if t in wanted and match >= 0:
                    found = tokens[match : min(match + out.shape[2], t + 1)]
                    out[b, wanted[t], : len(found)] = torch.tensor(found)
        return Guesses(out.to(batch.device))

    def start(self, rows: int, capacity: int) -> NgramState:
        device = self.target.device
        buffer = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        return NgramState(buffer, torch.zeros(rows, dtype=torch.long, device=device))

    def extend(
        self, state: NgramState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        B, W = tokens.shape
        capacity = state.buffer.shape[1]
        offset = torch.arange(W, device=tokens.device)
        slots = (state.length.unsqueeze(1) + offset).clamp(max=capacity - 1)  # (B, W)
        new = torch.where(offset < counts.unsqueeze(1), tokens, state.buffer.gather(1, slots))
        state.buffer.scatter_(1, slots, new)
        state.length += counts

    def propose(
        self, state: NgramState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """All windows of the buffer against the suffix, on the device; longer n overrides."""
        B, S = state.buffer.shape
        state.buffer.scatter_(1, state.length.unsqueeze(1), root.unsqueeze(1))
        last = state.length.unsqueeze(1)  # (B, 1) slot of the root
        slots = torch.arange(S, device=root.device)
        match = torch.full_like(root, -1)
        for n in range(self.config.min_n, self.config.max_n + 1):
            if n > S:
                break
            tail = last + torch.arange(1 - n, 1, device=root.device)  # (B, n)
            suffix = state.buffer.gather(1, tail.clamp(min=0))
            same = (state.buffer.unfold(1, n, 1) == suffix.unsqueeze(1)).all(-1)  # (B, S-n+1)
            after = slots[n:]  # the slot after each window that leaves one token to copy
            earlier = same[:, : S - n] & (after <= last) & (last + 1 >= n)
            found = torch.where(earlier, after, -1).amax(1) if S > n else match
            match = torch.where(found >= 0, found, match)
        offset = torch.arange(policy.k, device=root.device)
        source = match.unsqueeze(1) + offset  # (B, k)
        drafts = state.buffer.gather(1, source.clamp(0, S - 1))
        available = (last.squeeze(1) + 1 - match).clamp(max=policy.k)
        length = torch.where(match >= 0, available, 0) + 1
        valid = offset < (length - 1).unsqueeze(1)
        tokens = torch.cat([root.unsqueeze(1), torch.where(valid, drafts, 0)], dim=1)
        parents = torch.arange(-1, policy.k, device=root.device).expand(B, -1)
        return Proposal(tokens, parents, None, length)
