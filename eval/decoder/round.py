"""One round on the device: draft, verify, accept, commit, with nothing read by the host.

Everything that survives a round lives in tensors that are updated in place, so that the two halves
(`draft`, `verify`) can be captured as CUDA graphs and replayed: what the host decides (which rows
still write, how far a cache may have grown) reaches them as tensors or picks another graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterState, Policy
from draftsmith.drafters.grow import Proposal
from draftsmith.drafters.sampling import Noise, Purpose, Sampler, argmax, pick
from draftsmith.drafters.target.attention import chain_step, tree_shape, tree_step
from draftsmith.drafters.target.chain_cache import ChainCache
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder import accept


@dataclass
class Known:
    """Tokens whose features a verify pass has just computed: the drafter's next `extend`."""

    tokens: Tensor  # (B, W)
    features: dict[str, Tensor]  # (B, W, H)
    counts: Tensor  # (B,)


class Rounds:
    """A batch while it is being decoded.

    ids (B,): the requests' own ids. root (B,): the last token of each text. active (B,): rows
    that still write. fixed: shapes must be the same in every round (graphs).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        sampler: Sampler,
        ids: Tensor,
        seed: int,
        capacity: int,
        fixed: bool = False,
    ) -> None:
        self.target, self.drafter, self.policy = target, drafter, policy
        self.sampler, self.seed, self.fixed = sampler, seed, fixed
        self.slots = policy.slots if drafter else 1
        self.ids = ids
        self.round = torch.zeros_like(ids)
        self.root = torch.zeros_like(ids)
        self.active = torch.ones_like(ids, dtype=torch.bool)
        self.slab = target.cache(len(ids), capacity, self.slots)
        self.state: DrafterState | None = drafter.start(len(ids), capacity) if drafter else None
        self.taps = drafter.taps if drafter else ()
        self.known: Known | None = None

    def reset(self, ids: Tensor) -> None:
        """Ready for other prompts, in the same tensors."""
        self.ids.copy_(ids)
        self.round.zero_()
        self.active.fill_(True)
        self.slab.length.zero_()
        if self.known is not None:
            self.known.counts.zero_()  # the end of the last texts is not part of these
        if self.state is not None:
            self.state.reset()

    @property
    def noise(self) -> Noise:
        return Noise(self.seed, self.ids, self.round)

    def prefill(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Reads prompts (B, W), right padded, counts (B,); returns each text's first token."""
        for slab in self._slabs():
            slab.bound = 0  # nothing is written yet
        out = self.target(tokens, chain_step(self.slab, tokens.shape[1]), self.taps)
        self.slab.commit(counts)
        if self.drafter:
            self.drafter.extend(self.state, tokens, out.features, counts)
            self.drafter.begin(self.state)
        last = out.final[torch.arange(len(counts), device=counts.device), counts - 1]
        logits = self.target.head(last).unsqueeze(1)  # (B, 1, V)
        first = own_choice(logits, self.sampler, self.noise, self.slab.length.unsqueeze(1))[:, 0]
        self.root.copy_(first)
        return first

    def draft(self) -> None:
        """The drafter reads the features of the last verify pass, then proposes."""
        self.round += 1
        if self.drafter is None:
            one = torch.ones_like(self.root)
            self.proposal = Proposal(self.root.unsqueeze(1), -one.unsqueeze(1), None, one)
            return
        if self.known is not None:
            self.drafter.extend(
                self.state, self.known.tokens, self.known.features, self.known.counts
            )
        proposal = self.drafter.propose(
            self.state, self.root, self.policy, self.sampler, self.noise
        )
        if self.root.device.type == "cpu" and not self.fixed:
            N = int(proposal.length.max())  # a host read is free here, and width is not
            proposal.tokens, proposal.parents = proposal.tokens[:, :N], proposal.parents[:, :N]
        self.proposal = proposal

    def verify(self) -> None:
        """The target's one pass over the proposal."""
        tokens = self.proposal.tokens
        if self.drafter is None or self.policy.is_chain:
            self.depth = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            step = chain_step(self.slab, tokens.shape[1])
        else:
            assert isinstance(self.slab, Slab)  # the decoder gives no other cache a tree
            self.depth, self.ancestors = tree_shape(self.proposal.parents)
            step = tree_step(self.slab, self.depth, self.ancestors)
        out = self.target(tokens, step, self.taps)
        self.features = out.features
        self.logits = self.target.head(out.final)  # (B, N, V)

    def judge(self) -> Tensor:
        """Verify, accept and commit: all of a round that follows the draft."""
        self.verify()
        return self.commit()

    def commit(self) -> Tensor:
        """Accepts a path of the proposal and commits it. Returns the report that the host reads.

        (B, 3 + W): accepted drafts, the target's token, depth proposed, tokens from the root on.
        """
        result = self._judge()
        counts = torch.where(self.active, result.count + 1, 0)
        tokens, features = self.proposal.tokens, self.features
        if result.path is not None:
            assert isinstance(self.slab, Slab)  # the decoder gives no other cache a tree
            path = result.path[:, : self.policy.k + 1]  # (B, k + 1)
            if not self._in_place(path):
                self.slab.gather(self.slab.length, path)
            tokens = tokens.gather(1, path)
            features = {
                name: feature.gather(1, path.unsqueeze(2).expand(-1, -1, feature.shape[2]))
                for name, feature in features.items()
            }
        self.slab.commit(counts)
        self.root.copy_(result.token)
        depth, length = self.depth, self.proposal.length
        valid = torch.arange(depth.shape[1], device=depth.device) < length.unsqueeze(1)
        deepest = torch.where(valid, depth, 0).amax(1)
        heads = torch.stack([result.count, result.token, deepest], dim=1)
        self.report = torch.cat([heads, tokens], dim=1)
        self._hand_on(Known(tokens, features, counts))
        return self.report

    def _in_place(self, path: Tensor) -> bool:
        """Whether a tree's path (B, D) lies where it belongs already; asked where that is free."""
        if self.fixed or path.device.type != "cpu":
            return False
        place = torch.arange(path.shape[1])
        return bool(((path == place) | (path == 0)).all())

    def _judge(self) -> accept.Accepted:
        tokens, parents = self.proposal.tokens, self.proposal.parents
        length, q = self.proposal.length, self.proposal.q
        position = self.slab.length.unsqueeze(1) + 1 + self.depth  # (B, N) after each node
        if q is None and self.policy.is_chain:
            choice = own_choice(self.logits, self.sampler, self.noise, position)
            return accept.match(tokens[:, 1:], length, choice)
        if q is None:
            row = torch.arange(len(length), device=length.device)

            def choose(node: Tensor) -> Tensor:
                logits, place = (t[row, node].unsqueeze(1) for t in (self.logits, position))
                return own_choice(logits, self.sampler, self.noise, place)[:, 0]

            return accept.match_tree(tokens, parents, length, self.policy.k, choose)
        assert self.drafter is not None
        p = self.sampler.probs(self.logits)
        draws = accept.KeyedDraws(self.noise, self.slab.length)
        q = self.drafter.vocab.scatter(q)  # (B, N, V)
        if not self.policy.is_chain:
            return accept.without_replacement(tokens, parents, p, q, draws)
        rule = accept.block if self.policy.block else accept.chain
        return rule(tokens[:, 1:], length, p, q[:, : tokens.shape[1] - 1], draws)

    def _hand_on(self, known: Known) -> None:
        """Leaves `known` for the next draft: in the same tensors every time, where that counts."""
        if not self.fixed or self.known is None:
            self.known = known
            return
        self.known.tokens.copy_(known.tokens)
        self.known.counts.copy_(known.counts)
        for name, feature in known.features.items():
            self.known.features[name].copy_(feature)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (n,). Only of a baseline: a drafter's state has no such way."""
        self.slab.keep(rows)
        self.ids, self.round, self.root = self.ids[rows], self.round[rows], self.root[rows]
        self.active = self.active[rows]

    def bound(self, longest: int) -> None:
        """Tells the caches how long any row is at most, so that none has to read its lengths."""
        slabs = self._slabs()
        for slab in slabs:
            slab.bound = longest
        if self.fixed:  # to the end of the view, so that narrower steps of a round see all of it
            end = self.slab.view(self.slots) - self.slots
            for slab in slabs:
                slab.bound = end

    def _slabs(self) -> list[Slab | ChainCache]:
        """The target's cache and the drafter's."""
        return [self.slab, *(self.state.slabs() if self.state is not None else ())]


def own_choice(logits: Tensor, sampler: Sampler, noise: Noise, position: Tensor) -> Tensor:
    """The target's own tokens (B, N) at position (B, N), of logits (B, N, V)."""
    if sampler.greedy:
        return argmax(logits)
    return pick(sampler.probs(logits), noise.uniform(Purpose.TARGET, position, 0))
