"""A drafter that has rehearsed the text: a probe of the decoder, not a way to be fast.

An untrained head is hardly ever right, so nothing that happens after an acceptance would be tried:
accepted paths, their commit, texts that end inside a block. This one knows the answers and ranks
the right token first, second, third, or not at all, as a hash of its place says, among decoys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterState, Guesses, Policy, Proposal
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.grow import from_states, grow
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.shell import Shell


@dataclass
class RehearsedState(DrafterState):
    """length (B,): committed tokens."""

    length: Tensor


_RANKS = (0, 0, 1, 0, 2, 0, 3, 1)  # of the right token, by the hash of its place


class Rehearsed(Drafter[RehearsedState]):
    """texts: each row id's whole text, prompt and answer. Ranked drafts at every temperature."""

    family = "rehearsed"
    deterministic = True
    trees = True
    capturable = False

    def __init__(self, target: Shell, texts: Mapping[int, Sequence[int]]) -> None:
        super().__init__(target, None)
        self.texts = texts

    def unroll(self, batch: Batch, alignment: Alignment) -> Guesses:
        raise NotImplementedError("a rehearsed drafter probes the decoder; it is not replayed")

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        return hidden  # (n, V): the state of a depth is its ranking

    def start(self, rows: int, capacity: int) -> RehearsedState:
        return RehearsedState(torch.zeros(rows, dtype=torch.long, device=self.target.device))

    def extend(
        self, state: RehearsedState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        state.length += counts

    def propose(
        self,
        state: RehearsedState,
        root: Tensor,
        policy: Policy,
        sampler: Sampler,
        noise: Noise,
    ) -> Proposal:
        places = zip(noise.rows.tolist(), state.length.tolist(), strict=True)
        ranked = [[self._ranking(row, at + 1 + j) for j in range(policy.k)] for row, at in places]
        states = torch.stack([torch.stack(row) for row in ranked]).to(root.device)  # (B, k, V)
        greedy = Sampler(0.0)  # so that a chain is ranked too
        forward = from_states(self, states)
        return grow(root, state.length, policy, self.vocab, greedy, noise, forward)

    def _ranking(self, row: int, place: int) -> Tensor:
        """Logits (V,) of the token at a place of a row's text."""
        V = self.vocab.size
        code = row * 31 + place * 17
        out = (torch.arange(V) * 7919 + code * 104729) % 65537 / 65537  # decoys, all below 1
        text = self.texts[row]
        if place < len(text):
            rank = _RANKS[code % len(_RANKS)]
            out[[(text[place] + 1 + i) % V for i in range(rank)]] = 3.0
            out[text[place]] = 2.0
        return out
