"""Accept rules: pure tensor functions, no host read, every draw through `draws`.

Exact enumeration drives this very code with a scripted `draws` (tests/test_accept.py), so what is
certified is what serves. p and q are distributions after the serving sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.drafters.sampling import Noise, Purpose, pick


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
        at = self.position.unsqueeze(1) + 1 + offset  # (B, K) where each draft stands
        # Strict <: a draft of target probability 0 is never taken.
        return self.noise.uniform(Purpose.ACCEPT, at, self._calls) < prob

    def pick(self, weights: Tensor) -> Tensor:
        self._calls += 1
        return pick(weights, self.noise.uniform(Purpose.RESAMPLE, self.position, self._calls))


@dataclass
class Accepted:
    """count (B,): accepted drafts; token (B,): the token the target adds after them."""

    count: Tensor
    token: Tensor


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
    K = drafts.shape[1]
    at = drafts.unsqueeze(2)
    p_draft = p[:, :-1].gather(2, at).squeeze(2)  # (B, K)
    q_draft = q.gather(2, at).squeeze(2)
    valid = torch.arange(K, device=drafts.device) < (length - 1).unsqueeze(1)
    prob = torch.where(q_draft > 0, (p_draft / q_draft.clamp(min=1e-38)).clamp(max=1.0), 0.0)
    count = leading(draws.accept(prob) & valid)  # (B,)
    row = torch.arange(drafts.shape[0], device=drafts.device)
    here = p[row, count]  # (B, V) the target's law after the last accepted token
    against = q[row, count.clamp(max=K - 1)]
    residual = (here - against).clamp(min=0)
    # All drafts accepted, or a residual that rounding emptied: the target's own law.
    own = (count >= length - 1) | (residual.sum(1) <= 0)
    weights = torch.where(own.unsqueeze(1), here, residual)
    return Accepted(count, draws.pick(weights))
