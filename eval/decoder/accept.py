"""Accept rules: pure tensor functions, no host read, every draw through `draws`.

Exact enumeration drives this very code with a scripted `draws` (tests/eval/decoder/test_accept.py),
so what is certified is what serves. p and q are distributions after the serving sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.sampling import Noise, Purpose, pick

_TINY = torch.finfo(torch.float32).tiny  # divides nothing that matters


class Draws(Protocol):
    """Where a rule gets its randomness."""

    def accept(self, prob: Tensor) -> Tensor:
        """Independent coins, True with chance prob (..)."""

    def pick(self, weights: Tensor) -> Tensor:
        """An index into the last axis of weights (.., V), with chance proportional to weight."""


@dataclass
class KeyedDraws:
    """Draws from keyed noise. position (B,): where the root stands."""

    noise: Noise
    position: Tensor
    _calls: int = field(default=0)

    def accept(self, prob: Tensor) -> Tensor:
        self._calls += 1
        offset = torch.arange(prob.shape[1], device=prob.device)
        position = self.position.unsqueeze(1) + 1 + offset  # (B, K) of each draft
        # Strict <: a draft of target probability 0 is never accepted.
        return self.noise.uniform(Purpose.ACCEPT, position, self._calls) < prob

    def pick(self, weights: Tensor) -> Tensor:
        self._calls += 1
        return pick(weights, self.noise.uniform(Purpose.RESAMPLE, self.position, self._calls))


@dataclass
class Accepted:
    """count (B,): accepted drafts; token (B,): the token the target adds after them.

    path (B, D): nodes of a tree from the root to the last accepted one, then zeros; None where
    they are 0, 1, 2, .. as in a chain.
    """

    count: Tensor
    token: Tensor
    path: Tensor | None = None


def leading(accepted: Tensor) -> Tensor:
    """(B,): how many leading entries of accepted (B, K) are True."""
    return accepted.long().cumprod(dim=1).sum(dim=1)


def match(drafts: Tensor, length: Tensor, choice: Tensor) -> Accepted:
    """Sample the target, follow the matching child: exact for every deterministic proposal.

    drafts (B, K), length (B,) valid nodes with the root, choice (B, K + 1): the target's own token
    after the root and after each draft (its argmax at temperature 0).
    """
    valid = torch.arange(drafts.shape[1], device=drafts.device) < (length - 1).unsqueeze(1)
    count = leading((drafts == choice[:, :-1]) & valid)
    return Accepted(count, choice.gather(1, count.unsqueeze(1)).squeeze(1))


def chain(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Draws) -> Accepted:
    """Speculative sampling of a chain (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    drafts (B, K) target ids, length (B,) valid nodes with the root, p (B, K + 1, V), q (B, K, V):
    row j of q is the law that draft j was drawn from.
    """
    valid = torch.arange(drafts.shape[1], device=drafts.device) < (length - 1).unsqueeze(1)
    prob = _ratio(drafts, p, q).clamp(max=1.0)
    count = leading(draws.accept(prob) & valid)  # (B,)
    return Accepted(count, draws.pick(_after(count, length, p, q, torch.ones_like(p[:, :, 0]))))


def _ratio(drafts: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """p / q (B, K) of each draft, 0 where q cannot have drawn it."""
    p_draft, q_draft = (law.gather(2, drafts.unsqueeze(2)).squeeze(2) for law in (p[:, :-1], q))
    return torch.where(q_draft > 0, p_draft / q_draft.clamp(min=_TINY), 0.0)


def _after(count: Tensor, length: Tensor, p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """Weights (B, V) of the token after count (B,) accepted drafts: (scale p - q)+ there.

    scale (B, K + 1) is of each p. All drafts accepted, or a residual that rounding emptied: p.
    """
    row = torch.arange(len(count), device=count.device)
    law = p[row, count]  # (B, V) the target's, after the last accepted token
    if not q.shape[1]:  # no row proposed anything
        return law
    draft_law = q[row, count.clamp(max=q.shape[1] - 1)]
    residual = (scale[row, count].unsqueeze(1) * law - draft_law).clamp(min=0)
    own = (count >= length - 1) | (residual.sum(1) <= 0)
    return torch.where(own.unsqueeze(1), law, residual)


def block(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Draws) -> Accepted:
    """Block verification of a chain (Sun et al. 2403.10444, Algorithm 2). Shapes as in `chain`.

    Every prefix gets a coin of its own and the longest one that wins is kept, so a poor draft in
    front of good ones does not end the round. No rule keeps more of one path.
    """
    K = drafts.shape[1]
    ratio = _ratio(drafts, p, q)
    weight = [torch.ones_like(p[:, 0, 0])]  # P_0, P_1, ..: how much of p the prefix stands for
    for j in range(K):
        weight.append((weight[-1] * ratio[:, j]).clamp(max=1.0))
    P = torch.stack(weight, dim=1)  # (B, K + 1)
    # left_i: what of p the drafts after i could not cover, for 0 < i < K.
    left = (P[:, 1:K, None] * p[:, 1:K] - q[:, 1:]).clamp(min=0).sum(2)  # (B, K - 1)
    inner = left / (left + 1 - P[:, 1:K]).clamp(min=_TINY)
    prob = torch.cat([inner, P[:, K:]], dim=1)
    number = torch.arange(1, K + 1, device=drafts.device)
    last = (length - 1).unsqueeze(1)
    prob = torch.where(number == last, P[:, 1:], prob).clamp(max=1.0)
    kept = draws.accept(prob) & (number <= last)
    count = F.pad(kept * number, (1, 0)).amax(1)  # (B,)
    return Accepted(count, draws.pick(_after(count, length, p, q, P)))


def match_tree(
    tokens: Tensor, parents: Tensor, length: Tensor, k: int, choose: Callable[[Tensor], Tensor]
) -> Accepted:
    """`match` on a tree whose siblings differ: at most one child of a node is the target's choice.

    tokens, parents (B, N); length (B,) valid nodes; k: depth of the deepest. choose(node (B,)): the
    target's own token (B,) after a node, the same one whenever it is asked. Only nodes on the path
    are asked for, as a choice costs a pass over the vocabulary.
    """
    node = torch.arange(tokens.shape[1], device=tokens.device)
    valid = node < length.unsqueeze(1)
    reached = torch.zeros_like(length)
    count = torch.zeros_like(length)
    path = [reached]
    for _ in range(k):
        token, parent = choose(reached).unsqueeze(1), reached.unsqueeze(1)
        child = valid & (parents == parent) & (tokens == token) & (node > 0)  # (B, N)
        found = child.any(1)
        reached = torch.where(found, (child * node).amax(1), reached)
        path.append(torch.where(found, reached, 0))
        count = count + found
    return Accepted(count, choose(reached), torch.stack(path, dim=1))


def without_replacement(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draws: Draws
) -> Accepted:
    """Trees whose siblings were drawn from q without replacement (Jeon et al. 2402.14160;
    Chen et al. 2402.12374): a refused child's residual is judged by q without that child.

    tokens, parents (B, N); p (B, N, V): the target's law after each node; q (B, N, V): the law that
    each node's first child was drawn from.
    """
    reached = torch.zeros_like(tokens[:, 0])  # a node, and how many drafts lead there
    count = torch.zeros_like(reached)
    path = torch.zeros_like(tokens)
    left = p[:, 0]  # (B, V) what is left of the target's law there
    law = q[:, 0]
    # Nodes in order: a sibling is judged after its elders, a child after its parent.
    for i in range(1, tokens.shape[1]):
        asked = parents[:, i] == reached  # rows that stand at its parent
        x = tokens[:, i].unsqueeze(1)
        mass, total = law.sum(1), left.sum(1)
        p_x = left.gather(1, x).squeeze(1) / total
        q_x = law.gather(1, x).squeeze(1) / mass.clamp(min=_TINY)
        could = asked & (q_x > 0)  # else the draft's law had run out
        prob = torch.where(could, (p_x / q_x.clamp(min=_TINY)).clamp(max=1.0), 0.0)
        won = draws.accept(prob.unsqueeze(1)).squeeze(1) & could
        scaled = left / total.unsqueeze(1) - law / mass.clamp(min=_TINY).unsqueeze(1)
        residual = scaled.clamp(min=0)
        lost = could & ~won & (residual.sum(1) > 0)
        left = torch.where(lost.unsqueeze(1), residual, left)
        law = torch.where(asked.unsqueeze(1), law.scatter(1, x, 0.0), law)
        left = torch.where(won.unsqueeze(1), p[:, i], left)
        law = torch.where(won.unsqueeze(1), q[:, i], law)
        reached, count = torch.where(won, i, reached), count + won
        path.scatter_(1, count.unsqueeze(1), reached.unsqueeze(1))
    return Accepted(count, draws.pick(left), path)
