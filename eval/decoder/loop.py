"""The speculative decoder: prefill, then rounds of propose, verify, accept, commit.

The baseline is the same loop with drafting off (drafter None): same cache, same sampler, same stop
handling, the only fair denominator. Output follows the target's distribution exactly at every
temperature; at temperature 0 it is the target's greedy text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.attention import chain_step, tree_shape, tree_step
from draftsmith.drafters.base import Drafter, Policy, Proposal
from draftsmith.drafters.cache import Slab
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Noise, Purpose, Sampler, argmax, pick
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder.text import Cutter, Round, Text


@dataclass
class Clock:
    """Seconds by part of a round, and how many rounds and tokens they cover (prefill apart)."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0
    rounds: int = 0
    tokens: int = 0

    @property
    def total(self) -> float:
        """Decode seconds, prefill excluded."""
        return self.draft + self.verify + self.host


class Decoder:
    """Decodes batches of prompts with a target and, unless None, a drafter."""

    def __init__(
        self, target: Target, drafter: Drafter | None = None, policy: Policy | None = None
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy or Policy(k=1)
        self.clock = Clock()
        self._width = self.policy.k + 1 if drafter else 1

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        max_new_tokens: int,
        *,
        rows: Sequence[int] | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        progress: Callable[[int], None] | None = None,
    ) -> list[Text]:
        """Answers each prompt (token ids, not empty).

        rows: the requests' own ids, which key their noise (default 0, 1, ..). stop: strings that
        end a text; the token that completes one is its last. progress is called with the number
        of new tokens after every round. Raises UserError for a prompt that does not fit the
        target's positions.
        """
        self._check(prompts, max_new_tokens, rows)
        device = self.target.device
        texts = [Text(list(prompt)) for prompt in prompts]
        cutter = Cutter(self.target, max_new_tokens, stop)
        ids = torch.tensor(list(rows) if rows is not None else range(len(texts)), device=device)
        widest = max(len(text.prompt) for text in texts)
        capacity = widest + max_new_tokens + 2 * self._width
        slab = Slab(len(texts), capacity, device)
        state = self.drafter.start(len(texts), capacity) if self.drafter else None
        taps = self.drafter.taps if self.drafter else ()

        started = time.perf_counter()
        tokens, counts = _padded([text.prompt for text in texts], device)
        out = self.target(tokens, chain_step(slab, widest), taps)
        slab.commit(counts)
        if self.drafter:
            self.drafter.extend(state, tokens, out.features, counts)
        last = out.final[torch.arange(len(texts)), counts - 1]
        noise = Noise(seed, ids, torch.zeros_like(ids))
        logits = self.target.head(last).unsqueeze(1)  # (B, 1, V)
        root = self._own_choice(logits, sampler, noise, slab.length)[:, 0]
        self._sync()
        self.clock.prefill += time.perf_counter() - started
        for text, token in zip(texts, root.tolist(), strict=True):
            cutter.append(text, [token])
        active = torch.tensor([not text.finish for text in texts], device=device)

        count = 0
        while bool(active.any()):
            count += 1
            noise = Noise(seed, ids, torch.full_like(ids, count))
            root, new = self._round(texts, slab, state, root, active, sampler, noise, cutter)
            active = torch.tensor([not text.finish for text in texts], device=device)
            if progress:
                progress(new)
        return texts

    def _round(
        self,
        texts: list[Text],
        slab: Slab,
        state: Any,
        root: Tensor,
        active: Tensor,
        sampler: Sampler,
        noise: Noise,
        cutter: Cutter,
    ) -> tuple[Tensor, int]:
        """One round of every row; returns the next roots (B,) and the number of new tokens."""
        began = time.perf_counter()
        proposal = self._propose(state, root, sampler, noise)
        self._sync()
        drafted = time.perf_counter()
        if self.drafter:
            step = tree_step(slab, *tree_shape(proposal.parents))
        else:
            step = chain_step(slab, 1)
        taps = self.drafter.taps if self.drafter else ()
        out = self.target(proposal.tokens, step, taps)
        logits = self.target.head(out.final)  # (B, N, V)
        self._sync()
        verified = time.perf_counter()
        result = self._accept(proposal, logits, sampler, noise, slab)
        counts = torch.where(active, result.count + 1, 0)
        slab.commit(counts)
        host = torch.stack([result.count, result.token, proposal.length], dim=1).tolist()
        drafts = proposal.tokens[:, 1:].tolist()
        new = 0
        for b, (accepted, token, length) in enumerate(host):
            if not texts[b].finish:
                new += _record(texts[b], drafts[b], accepted, token, length - 1, cutter)
        accepted_at = time.perf_counter()
        if self.drafter:
            self.drafter.extend(state, proposal.tokens, out.features, counts)
            self._sync()
        done = time.perf_counter()
        self.clock.draft += drafted - began + done - accepted_at
        self.clock.verify += verified - drafted
        self.clock.host += accepted_at - verified
        self.clock.rounds += 1
        self.clock.tokens += new
        return result.token, new

    def _propose(self, state: Any, root: Tensor, sampler: Sampler, noise: Noise) -> Proposal:
        if self.drafter is None:
            one = torch.ones_like(root)
            return Proposal(root.unsqueeze(1), -one.unsqueeze(1), None, one)
        proposal = self.drafter.propose(state, root, self.policy, sampler, noise)
        if root.device.type == "cpu":  # a host read is free here, and width is not
            N = int(proposal.length.max())
            proposal.tokens, proposal.parents = proposal.tokens[:, :N], proposal.parents[:, :N]
        return proposal

    def _accept(
        self, proposal: Proposal, logits: Tensor, sampler: Sampler, noise: Noise, slab: Slab
    ) -> accept.Accepted:
        drafts = proposal.tokens[:, 1:]
        if proposal.q is None:
            choice = self._own_choice(logits, sampler, noise, slab.length + 1)
            return accept.match(drafts, proposal.length, choice)
        assert self.drafter is not None
        K = drafts.shape[1]
        q = self.drafter.vocab.spread(proposal.q[:, :K])  # (B, K, V)
        draws = accept.KeyedDraws(noise, slab.length)
        return accept.chain(drafts, proposal.length, sampler.probs(logits), q, draws)

    def _own_choice(self, logits: Tensor, sampler: Sampler, noise: Noise, first: Tensor) -> Tensor:
        """The target's own tokens (B, N) of logits (B, N, V); first (B,): token 0's position."""
        if sampler.greedy:
            return argmax(logits)
        position = first.unsqueeze(1) + torch.arange(logits.shape[1], device=logits.device)
        return pick(sampler.probs(logits), noise.uniform(Purpose.TARGET, position, 0))

    def _sync(self) -> None:
        """Waits for the device, so that a clock reading means what it says."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rows: Sequence[int] | None,
    ) -> None:
        if not prompts:
            raise UserError("prompts: there are none; give at least one")
        if rows is not None and (len(rows) != len(prompts) or len(set(rows)) != len(rows)):
            raise UserError(
                f"rows: {len(rows)} ids for {len(prompts)} prompts; give each a different one, "
                "or they share their noise"
            )
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {max_new_tokens} leaves nothing to write; use >= 1")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"prompt {i}: has no tokens; give at least one")
            if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
                raise UserError(
                    f"prompt {i}: a token id is outside 0..{self.target.vocab_size - 1}; encode it "
                    "with the target's tokenizer"
                )
            if len(prompt) + max_new_tokens > self.target.max_positions:
                raise UserError(
                    f"prompt {i}: {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed "
                    f"the target's {self.target.max_positions} positions; shorten either"
                )


def _record(
    text: Text, drafts: list[int], accepted: int, token: int, proposed: int, cutter: Cutter
) -> int:
    """Appends one round's tokens up to an end or a cut; returns how many were kept.

    Once the text has ended, every round is cut to the depths that lie within it: neither drafts
    past the end nor the acceptances among them count.
    """
    anchor = len(text.prompt) + len(text.tokens) - 2
    text.rounds.append(Round(anchor, proposed, accepted))
    kept = cutter.append(text, [*drafts[:accepted], token])
    if text.finish:
        end = len(text.prompt) + len(text.tokens) - 1
        text.rounds = [
            Round(a, min(p, end - a - 1), min(m, end - a - 1)) for a, p, m in text.rounds
        ]
    return kept


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded tokens (B, W) and counts (B,)."""
    width = max(map(len, prompts))
    tokens = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    return tokens, torch.tensor([len(p) for p in prompts], device=device)
