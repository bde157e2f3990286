"""Where the target's states come from: `States` fills a batch, wherever they are computed.

The head that turns states into laws is always in this process; the body need not be. The caller
that makes a `States` chooses its taps, and closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.target.causal_lm import Tap
from draftsmith.drafters.target.target import Target


class States(Protocol):
    def fill(self, batch: Batch, rows: list[list[int]]) -> Batch:
        """The batch on the target's device, with `features` {tap: (B, T, H)} and `final` (B, T, H).

        batch: as `packing.collate` made it. rows: which samples are packed in each of its
        rows. States on padding may be anything finite. The caller's autocast holds.
        """
        ...


class Computed:
    """What the target in this process computes, when asked for."""

    def __init__(self, target: Target, taps: Sequence[Tap] = ()) -> None:
        self.target, self.taps = target, taps

    def fill(self, batch: Batch, rows: list[list[int]]) -> Batch:
        return self.target.read(batch.to(self.target.device), self.taps)
