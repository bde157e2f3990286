"""Samples packed into rows: the order is a pure function of (seed, epoch), the place a cursor."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.train.samples.samples import Samples

log = logging.getLogger(__name__)

# Rows that a sample may still join. More would leave the small samples out of an epoch's end, all
# sunk into its first rows, for little less padding.
_OPEN = 16


@dataclass(frozen=True)
class Cursor:
    """How far a stream was read: all a resumed run needs."""

    epoch: int = 0
    row: int = 0


def teaching(samples: Samples, length: int) -> list[int]:
    """Samples that hold a target-made token within their first `length`."""
    held = samples.first_made < samples.lengths.clamp(max=length)
    return held.nonzero().flatten().tolist()


def buckets(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Places 0, 1, .. in groups of at most `size` of similar length, the longest first.

    For what is padded to the longest of its group. The order is the lengths' own, equal ones as
    given.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[i : i + size] for i in range(0, len(order), size)]


def alone(samples: Samples, indices: Sequence[int], size: int) -> list[list[list[int]]]:
    """Batches of at most `size` rows for `collate`, one whole sample a row, by length."""
    lengths = samples.lengths[list(indices)].tolist()
    return [[[indices[i]] for i in group] for group in buckets(lengths, size)]


class Stream:
    """Endless rows of sample indices, each row's samples together at most `length` tokens.

    Epoch e is a permutation of the samples by (seed, e), packed first-fit in that order; a sample
    longer than `length` fills a row and is cut at the end by `collate`. Samples whose first
    target-made token lies beyond `length` teach nothing and are left out, with a warning. Raises
    UserError where none is left.
    """

    def __init__(self, samples: Samples, indices: Sequence[int], length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        sizes, first = samples.lengths.tolist(), samples.first_made.tolist()
        self._kept = [int(i) for i in indices if first[i] < min(length, sizes[i])]
        self._sizes = {i: min(sizes[i], length) for i in self._kept}
        lost = len(indices) - len(self._kept)
        if not self._kept:
            raise UserError(
                f"length: {length} tokens hold no target-made token of any of the {len(indices)} "
                f"samples in {samples.folder}; raise it, or sample more"
            )
        if lost:
            log.warning(
                "%d of %d samples have no target-made token within %d tokens: left out",
                lost,
                len(indices),
                length,
            )
        self._rows = lru_cache(maxsize=2)(self._pack)

    def rows_per_epoch(self, epoch: int) -> int:
        """How many rows an epoch has (it differs a little from epoch to epoch)."""
        return len(self._rows(epoch))

    def tokens(self, row: Sequence[int]) -> int:
        """Tokens of a row."""
        return sum(self._sizes[index] for index in row)

    def take(self, cursor: Cursor, count: int) -> tuple[list[list[int]], Cursor]:
        """The next `count` rows and the cursor after them; crosses epoch ends.

        Raises UserError for a cursor beyond its epoch: it was taken on other samples.
        """
        epoch, row = cursor.epoch, cursor.row
        if not 0 <= row <= self.rows_per_epoch(epoch):
            raise UserError(
                f"cursor: row {row} is beyond the {self.rows_per_epoch(epoch)} rows of epoch "
                f"{epoch}; resume with the samples, length and seed it was taken on"
            )
        out: list[list[int]] = []
        while True:
            rows = self._rows(epoch)
            new = rows[row : row + count - len(out)]
            out += [list(r) for r in new]
            row += len(new)
            if row == len(rows):
                epoch, row = epoch + 1, 0
            if len(out) == count:
                return out, Cursor(epoch, row)

    def _pack(self, epoch: int) -> list[list[int]]:
        order = list(self._kept)
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        rows: list[list[int]] = []
        room: list[int] = []  # of each row
        for index in order:
            size = self._sizes[index]
            first = max(0, len(rows) - _OPEN)
            place = next((r for r in range(first, len(rows)) if room[r] >= size), None)
            if place is None:
                place = len(rows)
                rows.append([])
                room.append(self.length)
            rows[place].append(index)
            room[place] -= size
        return rows


def collate(samples: Samples, rows: list[list[int]], length: int) -> Batch:
    """A batch of packed rows (lists of sample indices), each sample cut at `length` tokens.

    Rows are padded to the longest of them. position restarts in every segment; segments count
    from 0 in each row, -1 on padding.
    """
    packed = []
    for row in rows:
        texts = [samples[i] for i in row]
        packed.append([(t.ids[:length], t.made[:length]) for t in texts])
    width = max(sum(len(ids) for ids, _ in row) for row in packed)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    position = torch.zeros_like(tokens)
    segment = torch.full_like(tokens, -1)
    made = torch.zeros_like(tokens, dtype=torch.bool)
    for b, segments in enumerate(packed):
        start = 0
        for s, (ids, flags) in enumerate(segments):
            span = slice(start, start + len(ids))
            tokens[b, span] = torch.tensor(ids)
            position[b, span] = torch.arange(len(ids))
            segment[b, span] = s
            made[b, span] = torch.tensor(flags)
            start += len(ids)
    return Batch(tokens, position, segment, made, samples.sampler, samples.foreign)
