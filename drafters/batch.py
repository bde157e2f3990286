"""A batch of token rows, what its samples are, and the one alignment rule.

The rule: anchor a is the last position whose features are known, the root is x_{a+1}. Depth j
predicts x_{a+2+j} and is compared with the target's distribution at position a+1+j. Everything
that needs an offset (labels, masks, target rows) reads `Alignment`; nothing else writes `+ 1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.sampling import Sampler


@dataclass
class Batch:
    """Rows of tokens, possibly several samples (segments) packed in each.

    tokens, position, segment: (B, T) long; position restarts at 0 in each segment, segment is -1
    on padding. made (B, T) bool: the target itself drew this token. features {tap: (B, T, H)} and
    final (B, T, H), the target's pre-norm state, are filled by `Target.read`.
    """

    tokens: Tensor
    position: Tensor
    segment: Tensor
    made: Tensor
    sampler: Sampler = Sampler()
    foreign: bool = False  # some text is not the target's own: replay on it is biased
    features: dict[str, Tensor] = field(default_factory=dict)
    final: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def to(self, device: torch.device) -> Batch:
        """A copy of tokens and masks on a device; features are read there anew."""
        tokens, position, segment, made = (
            t.to(device) for t in (self.tokens, self.position, self.segment, self.made)
        )
        return Batch(tokens, position, segment, made, self.sampler, self.foreign)


def batch_of(
    texts: list[tuple[list[int], list[bool]]], sampler: Sampler, foreign: bool = False
) -> Batch:
    """One text a row, right padded. texts: (token ids, made flags) pairs."""
    width = max(len(ids) for ids, _ in texts)
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    segment = torch.full((len(texts), width), -1, dtype=torch.long)
    made = torch.zeros(len(texts), width, dtype=torch.bool)
    for b, (ids, flags) in enumerate(texts):
        tokens[b, : len(ids)] = torch.tensor(ids)
        made[b, : len(ids)] = torch.tensor(flags, dtype=torch.bool)
        segment[b, : len(ids)] = 0
    position = torch.arange(width).repeat(len(texts), 1)
    return Batch(tokens, position, segment, made, sampler, foreign)


def span_ends(batch: Batch) -> Tensor:
    """(B, T): for a target-made position, the last position of its span; -1 elsewhere.

    A span is a run of target-made tokens within one segment (each turn its own).
    """
    made, segment = batch.made, batch.segment
    T = made.shape[1]
    index = torch.arange(T, device=made.device).expand_as(segment)
    stop = torch.where(next_made(batch), T, index)  # where the span goes on, no stop
    ends = stop.flip(1).cummin(1).values.flip(1)
    return torch.where(made, ends, -1)


@dataclass
class Alignment:
    """Which depths exist for which anchors, and what each is compared with.

    anchors (B, A), padded with -1; exists (B, A, K): x_{a+2+j} lies within the root's span;
    compare (B, A, K): position a+1+j, where the target's distribution for x_{a+2+j} stands;
    label (B, A, K): the token x_{a+2+j}. compare and label are 0 where exists is False.
    """

    anchors: Tensor
    exists: Tensor
    compare: Tensor
    label: Tensor

    def split(self, cells: int) -> Iterator[Alignment]:
        """Its anchors in order, in parts of at most `cells` (anchor, depth) cells (one anchor of
        each row at least)."""
        B, _, K = self.exists.shape
        whole = (self.anchors, self.exists, self.compare, self.label)
        for part in zip(*(t.split(max(1, cells // (B * K)), 1) for t in whole), strict=True):
            yield Alignment(*part)


def next_made(batch: Batch) -> Tensor:
    """(B, T) bool: positions whose next token, of the same segment, the target made."""
    same = batch.segment[:, 1:] == batch.segment[:, :-1]
    return F.pad(batch.made[:, 1:] & same, (0, 1))


def all_anchors(batch: Batch) -> Tensor:
    """(B, A): every anchor whose root is target-made, ascending, padded with -1."""
    is_anchor = next_made(batch)
    A = max(int(is_anchor.sum(1).max()), 1)
    T = is_anchor.shape[1]
    index = torch.arange(T, device=batch.device).expand_as(is_anchor)
    order = torch.where(is_anchor, index, T).sort(1).values[:, :A]
    return torch.where(order < T, order, -1)


def align(batch: Batch, depths: int, anchors: Tensor | None = None) -> Alignment:
    """The alignment rule. anchors (B, A) padded with -1; None = all_anchors(batch)."""
    anchors = all_anchors(batch) if anchors is None else anchors
    T = batch.tokens.shape[1]
    j = torch.arange(depths, device=batch.device)
    root = (anchors + 1).clamp(max=T - 1)
    end = span_ends(batch).gather(1, root)  # (B, A) last position of the root's span
    compare = anchors.unsqueeze(-1) + 1 + j  # (B, A, K)
    exists = (anchors >= 0).unsqueeze(-1) & (compare + 1 <= end.unsqueeze(-1))
    compare = torch.where(exists, compare, 0)
    row = torch.arange(batch.tokens.shape[0], device=batch.device).view(-1, 1, 1)
    label = torch.where(exists, batch.tokens[row, torch.where(exists, compare + 1, 0)], 0)
    return Alignment(anchors, exists, compare, label)
