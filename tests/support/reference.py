"""The independent reference: the laws p and q that draftsmith must agree with, in plain loops.

float64, no cache, no batching, one text at a time, sharing no code with draftsmith. What follows
from the laws (passes, accepted counts) is enumerated in reference_replay.py. A `sampler` is
(temperature, top_k, top_p); a law is a (V,) tensor over target ids, after the sampler. `hf` is an
HF causal LM in float64 (its own norms still compute in fp32, so expect about 1e-6).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference_eagle import eagle_logits
from reference_replay import alpha, expected_passes, moments, ratios, rounds

__all__ = ["sampled", "target_laws", "small_law", "ngram_guess"]
__all__ += ["head_law", "eagle_law"]
__all__ += ["alpha", "expected_passes", "moments", "ratios", "rounds"]  # of reference_replay

Sampler = tuple[float, int, float]
PLAIN: Sampler = (1.0, 0, 1.0)


def sampled(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Temperature, then top-k (0 = off; ties at the k-th kept), then top-p (crossing one kept)."""
    values = logits.detach().double().tolist()
    if temperature == 0:
        one_hot = torch.zeros(len(values), dtype=torch.float64)
        one_hot[values.index(max(values))] = 1.0  # the lowest id on ties
        return one_hot
    worst = sorted(values)[-top_k] if 0 < top_k < len(values) else -math.inf
    odds = [math.exp((v - max(values)) / temperature) if v >= worst else 0.0 for v in values]
    ahead, total = 0.0, sum(odds)
    for x in sorted(range(len(odds)), key=lambda x: -odds[x]):
        odds[x], ahead = (odds[x] if ahead < top_p * total else 0.0), ahead + odds[x]
    return torch.tensor([o / sum(odds) for o in odds], dtype=torch.float64)


@torch.no_grad()
def target_laws(hf: Any, tokens: Sequence[int], sampler: Sampler = PLAIN) -> list[Tensor]:
    """p after each position: entry t is the law of x_{t+1}."""
    return [sampled(z, *sampler) for z in hf(torch.tensor([tokens]), use_cache=False).logits[0]]


def small_law(
    hf_small: Any, tokens: Sequence[int], anchor: int, depth: int, sampler: Sampler = PLAIN
) -> Tensor:
    """A draft model's q for x_{anchor+2+depth}: it has read the tokens up to the one before."""
    return target_laws(hf_small, tokens[: anchor + 2 + depth], sampler)[-1]


def ngram_guess(tokens: Sequence[int], anchor: int, max_n: int, min_n: int, k: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix ending at the root."""
    known = list(tokens[: anchor + 2])
    for n in range(min(max_n, len(known) - 1), min_n - 1, -1):
        for start in range(len(known) - n - 1, -1, -1):  # one token at least follows
            if known[start : start + n] == known[-n:]:
                return known[start + n :][:k]
    return []


def head_law(logits_of: Callable, *where: Any, sampler: Sampler = PLAIN) -> Tensor:
    """q of a head whose logits are a reference's, over its own vocabulary: where as it takes."""
    logits, ids = logits_of(*where)
    hf = where[2]
    law = torch.zeros(hf.config.vocab_size, dtype=torch.float64)
    return law.index_add(0, ids, sampled(logits, *sampler))


def eagle_law(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hf: Any,
    tokens: Sequence[int],
    anchor: int,
    depth: int,
    sampler: Sampler = PLAIN,
) -> Tensor:
    """EAGLE-3's q for x_{anchor+2+depth}: the sampler acts on its own vocabulary."""
    where = weights, config, hf, tokens, anchor, depth
    return head_law(eagle_logits, *where, sampler=sampler)
