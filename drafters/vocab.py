"""The draft vocabulary: which target tokens a drafter can propose.

Servers store it as an offset (d2t: target id = draft id + d2t[draft id]) or as absolute ids.
Inside draftsmith there is only `VocabMap`, which holds absolute ids and gives either view by name,
so that an offset can never be taken for an id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.drafters.errors import UserError


class VocabMap:
    """Maps draft ids 0..Vd-1 to target ids and back.

    ids (Vd,): distinct target ids, or None for the identity (Vd = V).
    Raises UserError for ids that repeat or lie outside 0..size-1.
    """

    def __init__(self, size: int, ids: Tensor | None = None) -> None:
        self.size = size  # V
        self.ids = None if ids is None else ids.long().cpu()
        if self.ids is not None:
            if self.ids.numel() == 0 or self.ids.min() < 0 or self.ids.max() >= size:
                raise UserError(f"draft vocabulary: ids must lie in 0..{size - 1}")
            if self.ids.unique().numel() != self.ids.numel():
                raise UserError("draft vocabulary: a target id stands there twice")
            self._inverse = torch.full((size,), -1, dtype=torch.long)
            self._inverse[self.ids] = torch.arange(self.ids.numel())

    @property
    def draft_size(self) -> int:  # Vd
        return self.size if self.ids is None else self.ids.numel()

    def to(self, device: torch.device) -> VocabMap:
        """Moves the tables; returns self."""
        if self.ids is not None and self.ids.device != device:
            self.ids, self._inverse = self.ids.to(device), self._inverse.to(device)
        return self

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, same shape."""
        return draft_ids if self.ids is None else self.ids[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids of target ids, same shape; -1 where the drafter cannot propose the token."""
        return target_ids if self.ids is None else self._inverse[target_ids]

    def kept(self, values: Tensor) -> Tensor:
        """The columns (.., Vd) of values (.., V) that the drafter can propose."""
        return values if self.ids is None else values.index_select(-1, self.ids)

    def scatter(self, values: Tensor) -> Tensor:
        """Values (.., Vd) laid out over the target vocabulary (.., V), 0 elsewhere."""
        if self.ids is None:
            return values
        out = values.new_zeros(*values.shape[:-1], self.size)
        return out.index_copy_(-1, self.ids, values)

    def offsets(self) -> Tensor:
        """d2t (Vd,): target id minus draft id, the form that servers store."""
        ids = torch.arange(self.size) if self.ids is None else self.ids.cpu()
        return ids - torch.arange(ids.numel())

    def coverage(self, counts: Tensor) -> float:
        """Share of the tokens counted in counts (V,) that the drafter can propose."""
        total = counts.sum().item()
        return self.kept(counts).sum().item() / total if total else 0.0


def most_frequent(counts: Tensor, draft_size: int) -> VocabMap:
    """The draft_size target tokens counted most often in counts (V,), in ascending id order.

    Ties, the never-seen tokens among them, go to the lowest id: for byte-level BPE low ids are
    the tokens that were merged first, so the most frequent of the tokenizer's own corpus.
    Raises UserError when draft_size is not in 1..V.
    """
    size = counts.numel()
    if not 1 <= draft_size <= size:
        raise UserError(f"draft_vocab: {draft_size} is not in 1..{size}, the target's vocabulary")
    if draft_size == size:
        return VocabMap(size)
    order = torch.sort(counts, descending=True, stable=True).indices[:draft_size]
    return VocabMap(size, order.sort().values)
