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
    """Decodes batches of prompts with a target and, unless None, a drafter.

    Raises UserError for a policy that the drafter cannot follow.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, policy: Policy | None = None
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy or Policy(k=1)
        self.clock = Clock()
        if drafter is not None:
            drafter.check(self.policy)

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
        if sampler.greedy and self.policy.sampled and not self.policy.is_chain:
            raise UserError(f"{self.policy}: nothing is drawn at temperature 0; use a ranked tree")
        device = self.target.device
        texts = [Text(list(prompt)) for prompt in prompts]
        cutter = Cutter(self.target, max_new_tokens, stop)
        ids = torch.tensor(list(rows) if rows is not None else range(len(texts)), device=device)
        widest = max(len(text.prompt) for text in texts)
        slots = self.policy.slots if self.drafter else 1
        capacity = widest + max_new_tokens + 2 * slots
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
        root = _own_choice(logits, sampler, noise, slab.length.unsqueeze(1))[:, 0]
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
        shape = tree_shape(proposal.parents)
        step = tree_step(slab, *shape)
        taps = self.drafter.taps if self.drafter else ()
        out = self.target(proposal.tokens, step, taps)
        logits = self.target.head(out.final)  # (B, N, V)
        self._sync()
        verified = time.perf_counter()
        result = self._accept(proposal, shape, logits, sampler, noise, slab)
        counts = torch.where(active, result.count + 1, 0)
        tokens, features = proposal.tokens, out.features
        if result.path is not None:
            path = result.path[:, : self.policy.k + 1]  # (B, k + 1)
            slab.gather(slab.length, path)
            tokens = tokens.gather(1, path)
            features = {
                name: of.gather(1, path.unsqueeze(2).expand(-1, -1, of.shape[2]))
                for name, of in features.items()
            }
        slab.commit(counts)
        deepest = _deepest(shape[0], proposal.length)
        host = torch.stack([result.count, result.token, deepest], dim=1).tolist()
        drafts = tokens[:, 1:].tolist()
        new = 0
        for b, (accepted, token, proposed) in enumerate(host):
            if not texts[b].finish:
                new += _record(texts[b], drafts[b], accepted, token, proposed, cutter)
        accepted_at = time.perf_counter()
        if self.drafter:
            self.drafter.extend(state, tokens, features, counts)
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
        self,
        proposal: Proposal,
        shape: tuple[Tensor, Tensor],
        logits: Tensor,
        sampler: Sampler,
        noise: Noise,
        slab: Slab,
    ) -> accept.Accepted:
        tokens, parents, length = proposal.tokens, proposal.parents, proposal.length
        if proposal.q is None:
            position = slab.length.unsqueeze(1) + 1 + shape[0]  # (B, N) of the token after a node
            choice = _own_choice(logits, sampler, noise, position)
            if self.policy.is_chain:
                return accept.match(tokens[:, 1:], length, choice)
            return accept.match_tree(tokens, parents, shape, length, choice)
        assert self.drafter is not None
        p, draws = sampler.probs(logits), accept.KeyedDraws(noise, slab.length)
        q = self.drafter.vocab.spread(proposal.q)  # (B, N, V)
        if not self.policy.is_chain:
            return accept.without_replacement(tokens, parents, shape, p, q, draws)
        rule = accept.block if self.policy.block else accept.chain
        return rule(tokens[:, 1:], length, p, q[:, : tokens.shape[1] - 1], draws)

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


def _own_choice(logits: Tensor, sampler: Sampler, noise: Noise, position: Tensor) -> Tensor:
    """The target's own tokens (B, N) of logits (B, N, V), which stand at position (B, N)."""
    if sampler.greedy:
        return argmax(logits)
    return pick(sampler.probs(logits), noise.uniform(Purpose.TARGET, position, 0))


def _deepest(depth: Tensor, length: Tensor) -> Tensor:
    """(B,): depth of the deepest valid node, of depth (B, N) and length (B,)."""
    valid = torch.arange(depth.shape[1], device=depth.device) < length.unsqueeze(1)
    return torch.where(valid, depth, 0).amax(1)


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
