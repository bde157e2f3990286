"""Transformers' own cache, one per row: for targets that our attention cannot read.

ALiBi counts distance in slots and a recurrent layer keeps one state, so neither can hold a tree.
Chains need only a cache that can be rolled back, and transformers' can: keys and convolution
inputs by `crop`, a recurrent state by putting the old one back and reading the kept tokens again.
Rows run one after the other, so they may differ in length and never depend on each other. Slow,
but exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

_STORES = ("keys", "values")


class RowCache:
    """One row. run(tokens (1, W), cache) is the model's forward that fills a transformers cache."""

    def __init__(
        self, config: Any, run: Callable[[Tensor, transformers.DynamicCache], None]
    ) -> None:
        self._config = config
        self._run = run
        self._cache = transformers.DynamicCache(config=config)
        self._recording = False
        self._written: Tensor | None = None  # tokens (1, W) that are not committed yet
        self._states: list[tuple[Any, int, Tensor]] = []  # (layer, index, recurrent state) before

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values; a recurrent state counts nothing per token."""
        stores = [getattr(layer, name, None) for layer in self._cache.layers for name in _STORES]
        return sum(s.nbytes // s.shape[-2] for s in stores if s is not None and s.numel())

    def write(self, tokens: Tensor) -> None:
        """Reads tokens (1, W) after the committed ones; what an earlier write left goes first."""
        self.commit(0)
        self._states = [
            (layer, i, state.clone())
            for layer in self._cache.layers
            for i, state in getattr(layer, "recurrent_states", {}).items()
            if state is not None
        ]
        self._run(tokens, self._cache)
        self._written = tokens

    def commit(self, count: int) -> None:
        """Keeps the first `count` of the tokens written last."""
        if self._written is None:
            return
        tokens, self._written = self._written, None
        dropped, first = tokens.shape[1] - count, not self._recording
        reread = dropped > 0 and (first or bool(self._states))  # must the kept ones be read again?
        if first and reread:
            self._cache = transformers.DynamicCache(config=self._config)
        elif not first:  # crop(0) also lets go of what was recorded for a roll-back
            self._cache.crop(-tokens.shape[1] if reread else -dropped)
        if reread and not first:
            for layer, i, state in self._states:
                layer.recurrent_states[i].copy_(state)
        if reread and count:
            self._run(tokens[:, :count], self._cache)
            if not first:
                self._cache.crop(0)
        if first and count:  # from here on: recordings of a whole prompt would be large
            self._cache.activate_past_recording()
            self._recording = True


class ChainCache:
    """What a decoder needs of a `Slab`, for chains: `length` (B,), `commit`, and `chain_step`."""

    bound: int | None = None  # as a slab's; nothing here needs it

    def __init__(self, rows: list[RowCache], device: torch.device) -> None:
        self.rows = rows
        self.length = torch.zeros(len(rows), dtype=torch.long, device=device)

    def view(self, width: int) -> int:
        """No slots of ours: what a token may see is up to transformers."""
        return 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token of one row."""
        return self.rows[0].slot_bytes

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (n,)."""
        self.rows = [self.rows[i] for i in rows.tolist()]
        self.length = self.length[rows]

    def commit(self, counts: Tensor) -> None:
        """Keeps the first counts (B,) of the tokens that the last forward read; drops the rest."""
        self.length += counts
        for row, count in zip(self.rows, counts.tolist(), strict=True):
            row.commit(count)
