"""Replay: the exact expected acceptance of a drafter on text that the target wrote.

Given the served text x, draft x_{a+2+j} is accepted with probability min(1, q(x)/p(x)) once the
drafts before it were (Bayes on speculative sampling). Survival S of
each depth follows, and n(first anchor), the expected number of verify passes, is exact by a
backward recursion over anchors. All of it is float64 on the host; the model runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.drafters.base import Drafter, Guesses, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance.intervals import (
    RESAMPLES,
    Acceptance,
    Array,
    Moments,
    Part,
    acceptance,
    by_domain,
    expected_tau,
    repetitive,
)
from draftsmith.eval.overlap.row_stats import chunk_stats, chunks, unrolls

T = TypeVar("T")
Stretch = tuple[Tensor, ...]  # anchors (B, A), padded with -1, and figures (B, A, ..) of each
ROWS = 512  # rows of (anchor, depth) whose logits are alive at a time


@dataclass
class TextRatios:
    """One text (a target-made span of L tokens): how likely the drafter proposes its tokens.

    ratio (L, K): q(x) / p(x) of the text's own token at depth j of anchor i, whose root is the
    text's token i; 1 or 0 where drafts are deterministic. limit (L,): depths that exist and were
    proposed. gap (L, K): distance of q's two largest logits (inf where there is no q). prompt:
    the number of the sample that the text is in.
    """

    ratio: Array
    limit: NDArray[np.int64]
    gap: Array
    prompt: int

    @property
    def chance(self) -> Array:
        """(L, K): chance that depth j is accepted given the depths before it, token by token."""
        return np.minimum(self.ratio, 1.0)

    @property
    def tokens(self) -> int:
        """Tokens that verify passes emit: all but the one that prefill yields."""
        return len(self.limit) - 1


@torch.no_grad()
def text_ratios(
    drafter: Drafter,
    batch: Batch,
    depths: int,
    first_prompt: int = 0,
    confidence: float | None = None,
) -> list[TextRatios]:
    """Ratios of every text in a batch that the target has read, at the batch's own sampler.

    first_prompt numbers the batch's first (row, segment); further ones count up. confidence: where
    drafts end, as in `Policy`.
    """
    parts = []
    for alignment, unroll in unrolls(drafter, batch, depths):
        if confidence is None:
            parts.append(anchor_ratios(drafter, batch, alignment, unroll))
        else:
            assert isinstance(unroll, Unroll)  # `Drafter.check` lets no other be cut
            parts.append(_cut_ratios(drafter, batch, alignment, unroll, confidence))
    return by_text(TextRatios, batch, parts, first_prompt)


def anchor_ratios(
    drafter: Drafter, batch: Batch, alignment: Alignment, unroll: Unroll | Guesses
) -> Stretch:
    """Anchors of an unroll, and their ratio, limit and gap."""
    if isinstance(unroll, Guesses):
        exists = alignment.exists & (unroll.tokens >= 0)
        ratio = ((unroll.tokens == alignment.label) & exists).double()
        gap = torch.full_like(ratio, float("inf"))
    else:
        exists = unroll.index >= 0
        ratio = torch.zeros(exists.shape, dtype=torch.float64, device=batch.device)
        gap = torch.full_like(ratio, float("inf"))
        ratios, gaps = [], []
        for chunk in chunks(batch, alignment, unroll, ROWS):
            stats = chunk_stats(drafter, batch, unroll, chunk)
            # Bounded, so that a token that p lacks (foreign text) leaves finite products.
            found = (stats.logq.double() - stats.logp.double()).clamp(max=50.0).exp()
            if batch.sampler.greedy:
                found = stats.logq.double().exp()
            found = found.nan_to_num(0.0)  # neither p nor q holds the token: foreign text
            ratios.append(found[chunk.cell])
            gaps.append(stats.gap.double()[chunk.cell])
        if ratios:
            ratio[exists] = torch.cat(ratios)
            gap[exists] = torch.cat(gaps)
    return alignment.anchors, ratio, exists.long().cumprod(2).sum(2), gap


def _cut_ratios(
    drafter: Drafter, batch: Batch, alignment: Alignment, unroll: Unroll, confidence: float
) -> Stretch:
    """`anchor_ratios` of what is drafted before predicted survival falls below confidence.

    A survival as close to it as two logits in an fp32 tie counts as one.
    """
    survival = unroll.survival
    kept = replace(unroll, index=torch.where(survival >= confidence, unroll.index, -1))
    anchors, ratio, limit, gap = anchor_ratios(drafter, batch, alignment, kept)
    return anchors, ratio, limit, torch.minimum(gap, (survival.double() - confidence).abs())


def by_text(
    make: Callable[..., T], batch: Batch, parts: Sequence[Stretch], first_prompt: int
) -> list[T]:
    """make(figures (L, ..), prompt number) of each text; parts hold a batch's anchors in order."""
    anchors, *figures = (torch.cat(same, 1) for same in zip(*parts, strict=True))
    out = []
    prompt = first_prompt - 1
    seen: tuple[int, int] | None = None
    for b in range(anchors.shape[0]):
        row = anchors[b].tolist()
        segments = batch.segment[b].tolist()
        start = 0
        for i, a in enumerate(row):
            if a < 0:
                break
            if (b, segments[a]) != seen:
                seen, prompt = (b, segments[a]), prompt + 1
            # Roots are target-made and lie in their anchor's segment: a run of anchors is one text.
            if i + 1 == len(row) or row[i + 1] != a + 1:
                out.append(make(*(t[b, start : i + 1].cpu().numpy() for t in figures), prompt))
                start = i + 1
    return out


def survivals(text: TextRatios, k: int, block: bool = False) -> Array:
    """S (L, k + 2): chance that at least j drafts are accepted; 0 past the last depth.

    Token rule: S_{j+1} = S_j min(1, r_j). Block rule: S_{j+1} = min(S_j, r_0 .. r_j).
    """
    L = len(text.limit)
    S = np.zeros((L, k + 2))
    S[:, 0] = 1.0
    if block:
        products = np.minimum(np.cumprod(text.ratio[:, :k], axis=1), 1.0)
        S[:, 1 : k + 1] = np.minimum.accumulate(products, axis=1)
    else:
        S[:, 1 : k + 1] = np.cumprod(text.chance[:, :k], axis=1)
    S[:, 1 : k + 1] *= np.arange(k) < text.limit[:, None]
    return S


def moments(text: TextRatios, k: int, block: bool = False) -> Moments:
    """Backward recursion for the moments of n, forward recursion for alpha."""
    L = len(text.limit)
    S = survivals(text, k, block)
    P = S[:, :-1] - S[:, 1:]  # (L, k + 1): chance that m drafts are accepted
    f = per_round(k)
    v = np.zeros((L + k + 1, k + 1))
    v2 = np.zeros_like(v)
    for i in range(L - 2, -1, -1):  # at i = L - 1 the root ends the text: no pass
        after, after2 = v[i + 1 : i + k + 2], v2[i + 1 : i + k + 2]
        v[i] = P[i] @ (f + after)
        v2[i] = P[i] @ (f * f + 2 * f * after + after2)
    rounds = rounds_started(P)[:, None] * (np.arange(k) < text.limit[:, None])  # (L, k)
    reached, survived = (rounds * S[:, :k]).sum(0), (rounds * S[:, 1 : k + 1]).sum(0)
    return Moments(v[0], np.maximum(v2[0] - v[0] ** 2, 0.0), reached, survived)


def per_round(k: int) -> Array:
    """(k + 1, 1 + k): [passes, accepted at depth 0, 1, ..] of a round that accepts m drafts."""
    f = np.ones((k + 1, k + 1))
    f[:, 1:] = np.arange(k + 1)[:, None] > np.arange(k)
    return f


def rounds_started(P: Array) -> Array:
    """Expected rounds (L,) that start at each anchor. P (L, k + 1): chance that m are accepted."""
    L, width = P.shape
    weight = np.zeros(L + width)
    weight[0] = 1.0
    for i in range(L - 1):
        weight[i + 1 : i + 1 + width] += weight[i] * P[i]
    weight[L - 1 :] = 0.0  # at L - 1 the root ends the text: no round
    return weight[:L]


@dataclass
class ReplayResult:
    """Expected acceptance at draft length k, over texts in their order.

    parts: the moments of every text, taken once for all that reads them. block: under block
    verification. biased: some text was not the target's own, so that expectations are not the
    decoder's. tau and its interval are NaN where no text took a verify pass.
    """

    k: int
    texts: list[TextRatios]
    parts: list[Part]
    block: bool = False
    biased: bool = False
    seed: int = 0
    resamples: int = RESAMPLES

    @cached_property
    def pooled(self) -> Acceptance:
        """All texts together; intervals are a bootstrap over prompts."""
        return acceptance(self.parts, self.k, self.seed, self.resamples)

    @property
    def tau(self) -> float:
        found = expected_tau(self.parts)
        return float("nan") if found is None else found

    @property
    def tau_ci(self) -> tuple[float, float]:
        low, high = self.pooled.tau_ci or (float("nan"), float("nan"))
        return low, high

    @property
    def alpha(self) -> list[float | None]:
        return self.pooled.alpha

    def expected(self) -> tuple[list[float], list[float]]:
        """Mean and variance of the counts [passes, accepted at depth 0, 1, ..] over all texts."""
        return (
            [float(sum(part.counts.mean[i] for part in self.parts)) for i in range(self.k + 1)],
            [float(sum(part.counts.variance[i] for part in self.parts)) for i in range(self.k + 1)],
        )


def summarise(
    texts: Sequence[TextRatios],
    k: int,
    resamples: int = RESAMPLES,
    seed: int = 0,
    block: bool = False,
) -> ReplayResult:
    """The replay of some texts, by their ratios."""
    parts = [Part(text.prompt, text.tokens, moments(text, k, block)) for text in texts]
    return ReplayResult(k, list(texts), parts, block, seed=seed, resamples=resamples)


def replay_report(
    by_k: Mapping[int, ReplayResult],
    domains: Sequence[str],
    answers: Sequence[Sequence[int]],
    seed: int = 0,
) -> dict[str, Any]:
    """JSON of one replay: pooled, per draft length, per domain, repetitive texts apart.

    domains[i] and answers[i] (target-made tokens) are those of prompt i.
    """
    longest = by_k[max(by_k)]
    k, parts = longest.k, longest.parts
    of_domains, apart = by_domain(parts, domains, k, seed), repetitive(parts, answers, k, seed)
    return asdict(longest.pooled) | {
        "k": k,
        "tau_by_k": {str(n): r.pooled.tau for n, r in by_k.items()},
        "tau_ci_by_k": {str(n): r.pooled.ends for n, r in by_k.items()},
        "alpha_0_by_k": {str(n): r.alpha[0] for n, r in by_k.items()},
        "by_domain": {name: asdict(found) for name, found in of_domains.items()},
        "repetitive": {name: asdict(found) for name, found in apart.items()},
    }


def replay(
    drafter: Drafter,
    batches: Iterable[Batch],
    k: int,
    seed: int = 0,
    block: bool = False,
    confidence: float | None = None,
) -> dict[int, ReplayResult]:
    """Replay of chains at every draft length 1..k over batches the target has read.

    block: under block verification, instead of token by token. confidence: where drafts end, as in
    `Policy`. A batch that is read when it is drafted for is dropped before the next one is.
    """
    return replay_samplers(drafter, batches, k, [None], seed, block, confidence)[0]


def replay_samplers(
    drafter: Drafter,
    batches: Iterable[Batch],
    k: int,
    samplers: Sequence[Sampler | None],
    seed: int = 0,
    block: bool = False,
    confidence: float | None = None,
) -> list[dict[int, ReplayResult]]:
    """`replay` with drafts made at each sampler; None: the batch's own.

    A greedy one on text drawn at T > 0 takes q's argmax for a point mass, as servers do by default.
    """
    lengths = [k] if drafter.depth_causal else range(1, k + 1)
    found: list[dict[int, list[TextRatios]]] = [{j: [] for j in lengths} for _ in samplers]
    biased = False
    for batch in batches:
        biased |= batch.foreign
        for sampler, by_length in zip(samplers, found, strict=True):
            drafted = batch if sampler is None else replace(batch, sampler=sampler)
            for depths, known in by_length.items():
                first = known[-1].prompt + 1 if known else 0
                known += text_ratios(drafter, drafted, depths, first, confidence)
        del batch, drafted
    results = [
        {j: summarise(known.get(j, known[k]), j, seed=seed, block=block) for j in range(1, k + 1)}
        for known in found
    ]
    for result in (result for by_k in results for result in by_k.values()):
        result.biased = biased
    return results
