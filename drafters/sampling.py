"""The serving sampler (temperature, top-k, top-p) and the noise that drives every draw.

Noise is a pure function of (seed, row id, purpose, round, position, node): no generator state,
so a result does not depend on batch composition, and a run can be repeated draw by draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.errors import UserError

# What other samplers may do to p and this one does not, and the value that leaves p as it is. By
# the names that requests, recipes and generation_config.json use.
NOT_APPLIED: dict[str, Any] = {
    "repetition_penalty": 1.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0,
    "logit_bias": None, "bad_words_ids": None, "suppress_tokens": None, "sequence_bias": None,
    "min_tokens": 0, "xtc_probability": 0.0, "dry_multiplier": 0.0, "mirostat": 0,
}  # fmt: skip
_BLOCK = 256  # tokens of the vocabulary that a draw sums up first


def not_applied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change p in a way that `Sampler` cannot: acceptance would be another's."""
    named = {name: settings.get(name) for name in NOT_APPLIED}
    return {n: v for n, v in named.items() if v and v != NOT_APPLIED[n]}


@dataclass(frozen=True)
class Sampler:
    """Temperature, then top-k (ties at the k-th kept), then top-p (the crossing token kept).

    temperature 0 is argmax, the lowest id on ties; top_k 0 and top_p 1 switch those cuts off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: {self.temperature} is not >= 0 (0 means greedy)")
        if self.top_k < 0:
            raise UserError(f"top_k: {self.top_k} is negative (0 switches top-k off)")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p: {self.top_p} is outside (0, 1] (1 switches top-p off)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities (.., V) in fp32 after the sampler; -inf where a token is cut.

        At temperature 0: 0 at the argmax, -inf elsewhere.
        """
        logits = logits.float()
        if self.greedy:
            out = torch.full_like(logits, float("-inf"))
            return out.scatter_(-1, argmax(logits).unsqueeze(-1), 0.0)
        scaled = logits / self.temperature if self.temperature != 1.0 else logits
        return torch.log_softmax(self.cut(scaled), dim=-1)

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities (.., V) in fp32 after the sampler."""
        return self.log_probs(logits).exp()

    def cut(self, scaled: Tensor) -> Tensor:
        """Logits (.., V), already divided by the temperature, with cut tokens at -inf."""
        if self.top_k and self.top_k < scaled.shape[-1]:
            kth = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < kth, float("-inf"))
        if self.top_p < 1.0:
            order = scaled.sort(dim=-1, descending=True, stable=True)
            probs = order.values.softmax(-1)
            # A token stays while the mass before it is below top_p: the crossing token is kept.
            drop = (probs.cumsum(-1) - probs) >= self.top_p
            drop = torch.zeros_like(drop).scatter_(-1, order.indices, drop)
            scaled = scaled.masked_fill(drop, float("-inf"))
        return scaled


def argmax(logits: Tensor) -> Tensor:
    """Argmax over the last axis, the lowest id on ties (torch.argmax does not promise which)."""
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(-1).long()


class Purpose(IntEnum):
    """What a draw is for: streams of different purposes never share a number."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3
    TARGET = 4
    FEATURE = 5  # training's: see train/objective/losses.py
    ANCHOR = 6


@dataclass(frozen=True)
class Noise:
    """Keyed noise of one round. rows (B,) are the requests' own ids, never batch slots."""

    seed: int
    rows: Tensor  # (B,) long
    round: Tensor  # (B,) long

    def uniform(self, purpose: Purpose, position: Tensor, node: int) -> Tensor:
        """Uniforms in [0, 1), float64, shaped like `position` (B,) or (B, N).

        TARGET draws leave round and node out, so that they equal plain sampling token for token.
        """
        shape = (-1,) + (1,) * (position.dim() - 1)
        rows = self.rows.view(shape)
        counter = torch.zeros_like(rows) if purpose is Purpose.TARGET else self.round.view(shape)
        node = 0 if purpose is Purpose.TARGET else node
        key = _mix(rows ^ _signed(_splitmix(self.seed)))
        key = _mix(key ^ _signed(_splitmix(purpose * 1_000_003 + node)))
        key = _mix(key ^ _mix(counter + _STEP))
        key = _mix(key ^ _mix(position + _STEP2))
        # 52 bits: u * total stays below total in float64, so a pick never runs off the end.
        return _shift(key, 12).double() * 2.0**-52


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: index into the last axis of weights (.., V) for uniform (..).

    Weights need not be normalised; a token of weight 0 is never drawn. At least one weight of
    each row must be positive. Two levels, so that only one block of each row is read in float64.
    """
    V = weights.shape[-1]
    whole = V - V % _BLOCK
    sums = (
        weights[..., :whole].unflatten(-1, (whole // _BLOCK, _BLOCK)).sum(-1, dtype=torch.float64)
    )
    if whole < V:
        rest = weights[..., whole:].sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], dim=-1)  # (.., blocks)
    mass = sums.cumsum(-1)
    point = uniform.unsqueeze(-1) * mass[..., -1:]
    block = torch.searchsorted(mass, point, right=True).clamp(max=sums.shape[-1] - 1)  # (.., 1)
    index = block * _BLOCK + torch.arange(min(_BLOCK, V), device=weights.device)  # (.., _BLOCK)
    inside = weights.gather(-1, index.clamp(max=V - 1)).double().masked_fill(index >= V, 0.0)
    mass_inside = inside.cumsum(-1)
    point = point - (mass - sums).gather(-1, block)
    # Rounding may carry the point out of the block that holds it, on either side.
    point = torch.minimum(point.clamp(min=0), mass_inside[..., -1:] * (1 - 2.0**-52))
    chosen = torch.searchsorted(mass_inside, point, right=True)
    return (block * _BLOCK + chosen).squeeze(-1)


# splitmix64's finaliser (Steele, Lea, Flood 2014) in wrapping int64 arithmetic.
def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


_C1, _C2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_STEP, _STEP2 = _signed(0x9E3779B97F4A7C15), _signed(2 * 0x9E3779B97F4A7C15)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's >> keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _C1
    x = (x ^ _shift(x, 27)) * _C2
    return x ^ _shift(x, 31)


def _splitmix(value: int) -> int:
    """The same finaliser on a Python int, for keys known on the host."""
    x = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
