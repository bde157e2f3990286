"""Whether texts are what they claim to be: the target's own, drawn at the sampler they name.

Three tests on every target-made token x of the texts given. Support: x lies above the sampler's
cut, within a tolerance. At T > 0 z = sum(log p(x) + entropy) / sqrt(sum of log p's variance), the
laws being the target's after the sampler: a martingale for its own text, whatever ends it, so |z|
stays small; text of another model, temperature or alignment moves it. At T = 0 x is the argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.batch import batch_of
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler, argmax
from draftsmith.drafters.target.shell import Shell
from draftsmith.train.states.computed import States

Z_LIMIT = 4.0
NOT_ARGMAX = 1e-3  # share of tokens; one exception is always allowed
# How far the same logit may lie apart in two passes that batch differently.
TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}
_ROWS = 512  # positions whose logits exist at a time
_FLOATS = 1 << 24  # and at most that many numbers in one (n, V) tensor
_TOKENS = 4096  # of one padded forward

Text = tuple[int, list[int], list[bool]]  # a text's number, token ids, made flags


@dataclass
class Audit:
    """What an audit found. tokens: target-made ones read; outside: (text, position) of those that
    the sampler cannot draw; wrong: at T = 0, tokens that are not the argmax; z: at T > 0."""

    texts: int
    tokens: int
    outside: list[tuple[int, int]]
    wrong: int
    z: float | None

    def fault(self) -> str:
        """What failed, with figures; "" when nothing did."""
        found = f"of {self.tokens} tokens in {self.texts} texts"
        if self.outside:
            text, position = self.outside[0]
            return (
                f"{len(self.outside)} {found} cannot be drawn by their sampler (first: sample "
                f"{text}, position {position})"
            )
        if self.wrong > max(1, NOT_ARGMAX * self.tokens):
            return f"{self.wrong} {found} are not the target's argmax (temperature 0)"
        if self.z is not None and not abs(self.z) < Z_LIMIT:
            return (
                f"z = {self.z:.1f} for sum(log p + entropy) over {self.tokens} tokens in "
                f"{self.texts} texts (|z| < {Z_LIMIT:g} for the target's own)"
            )
        return ""


def audit(
    target: Shell, texts: Sequence[Text], states: States, sampler: Sampler, tolerance: float
) -> Audit:
    """Compares texts with the target's states of them.

    tolerance: in nats, at the sampler's cuts (see TOLERANCE). Raises UserError for a token that
    is outside the target's vocabulary.
    """
    total = Audit(len(texts), 0, [], 0, None)
    drift = variance = 0.0
    for group in _groups(texts):
        for number, ids, _ in group:
            if max(ids) >= target.vocab_size:
                raise UserError(
                    f"sample {number}: token {max(ids)} is outside the vocabulary of "
                    f"{target.source.spec} ({target.vocab_size}); it is another tokenizer's"
                )
        batch = batch_of([(ids, made) for _, ids, made in group], sampler)
        batch = states.fill(batch, [[number] for number, _, _ in group])
        assert batch.final is not None
        made = batch.made.clone()
        made[:, 0] = False  # a text's first token has no law before it
        rows, places = made.nonzero(as_tuple=True)  # (n,)
        size = min(_ROWS, max(1, _FLOATS // target.vocab_size))
        for r, t in zip(rows.split(size), places.split(size), strict=True):
            with torch.no_grad():
                logits = target.head(batch.final[r, t - 1]).float()  # (size, V)
            token = batch.tokens[r, t]
            total.tokens += len(r)
            if sampler.greedy:  # within the tolerance of the best is a tie, broken by rounding
                own = logits.gather(1, token[:, None])[:, 0]
                wrong = (argmax(logits) != token) & (own < logits.amax(1) - tolerance)
                total.wrong += int(wrong.sum())
                continue
            scaled = logits / sampler.temperature
            out = scaled.gather(1, token[:, None])[:, 0] < _floor(scaled, sampler, tolerance)
            numbers = [group[b][0] for b in r[out].tolist()]
            total.outside += zip(numbers, t[out].tolist(), strict=True)
            d, v = _moments(scaled, token, sampler)
            drift, variance = drift + d, variance + v
    total.outside.sort()
    if not sampler.greedy and total.tokens:
        # No variance (a sampler that leaves one token everywhere): only rounding may remain.
        floor = (tolerance**2) * total.tokens
        total.z = drift / math.sqrt(max(variance, floor))
    return total


def _groups(texts: Sequence[Text]) -> list[list[Text]]:
    """Texts of similar length together, at most _TOKENS padded tokens (or one text) a group."""
    out: list[list[Text]] = []
    for text in sorted(texts, key=lambda text: len(text[1])):
        if not out or (len(out[-1]) + 1) * len(text[1]) > _TOKENS:
            out.append([])
        out[-1].append(text)
    return out


def _floor(scaled: Tensor, sampler: Sampler, tolerance: float) -> Tensor:
    """(n,): the lowest of the scaled logits (n, V) that the sampler keeps, less the tolerance."""
    floor = scaled.new_full(scaled.shape[:1], float("-inf"))
    if 0 < sampler.top_k < scaled.shape[1]:
        floor = scaled.topk(sampler.top_k, dim=1).values[:, -1]
    if sampler.top_p < 1.0:
        # Rounding moves the mass before a token, too, and with it which token crosses top_p.
        wide = Sampler(1.0, sampler.top_k, min(1.0, sampler.top_p + tolerance))
        kept = wide.cut(scaled)
        floor = kept.masked_fill(kept.isinf(), float("inf")).amin(1)
    return floor - tolerance


def _moments(scaled: Tensor, token: Tensor, sampler: Sampler) -> tuple[float, float]:
    """Sums over n of log p(x) + entropy and of the variance of log p, p after the sampler.

    log p(x) + entropy = log p(x) - E log p, so the normaliser cancels: scaled logits will do, and
    stay finite for a token within the tolerance below the cut.
    """
    # Below -1e4 p is 0, and 0 * -inf would be nan.
    shifted = (scaled - scaled.amax(1, keepdim=True)).clamp_(min=-1e4)
    p = sampler.cut(scaled).softmax(1)
    mean = (p * shifted).sum(1, keepdim=True)
    variance = (p * (shifted - mean).square_()).sum(1)
    own = shifted.gather(1, token[:, None]) - mean
    return own.double().sum().item(), variance.double().sum().item()
