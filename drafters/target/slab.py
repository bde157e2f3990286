"""The slab cache: keys and values of every row in one right-padded block.

Slot == position, one length per row. Rolling back is not advancing a length: a write past
`length` that is never committed is simply overwritten later, so rejected drafts, prompt padding
and sliding windows (which live in the mask) need no code at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.drafters.errors import UserError

# Views grow in steps: the allocator and SDPA see few shapes, and on a GPU graphs are few.
_VIEW = {"cpu": 64}
_VIEW_ELSEWHERE = 256


class Slab:
    """Keys and values (B, Hkv, S, D) per layer, allocated from the first write (dtype follows).

    length (B,): committed slots of each row, on the device. bound: an upper bound of them all that
    the caller keeps up to date on the host; None where it keeps none.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.bound: int | None = None
        self._rows = torch.arange(rows, device=device)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def view(self, width: int) -> int:
        """Slots that a forward of `width` tokens must look at: an upper bound for every row.

        Without a `bound` the lengths are read on the CPU; elsewhere that would stall, so it is the
        capacity. Raises UserError where the capacity is too small.
        """
        longest = self.bound
        if longest is None:
            if self.length.device.type != "cpu":
                return self.capacity
            longest = int(self.length.max())
        need = longest + width
        if need > self.capacity:
            raise UserError(f"cache: {need} positions needed, {self.capacity} allocated")
        step = _VIEW.get(self.length.device.type, _VIEW_ELSEWHERE)
        return min(-(-need // step) * step, self.capacity)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one row, over the layers that have been written."""
        stores = [*self._keys.values(), *self._values.values()]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in stores)

    def slots(self, width: int) -> Tensor:
        """Slots (B, W) of the next `width` tokens; padding may run past the end: clamped."""
        slots = self.length.unsqueeze(1) + torch.arange(width, device=self.length.device)
        return slots.clamp(max=self.capacity - 1)

    def write(
        self, layer: int, key: Tensor, value: Tensor, view: int, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Puts key, value (B, Hkv, W, D) at slots length.. and returns the first `view` slots.

        slots (B, W): `slots(W)`, from a caller who writes many layers.
        """
        keys, values = self.stores(layer, key, value)
        if slots is None:
            slots = self.slots(key.shape[2])
        for kept, new in ((keys, key), (values, value)):
            if len(slots) == 1:  # a third of the time that _put takes, twice a layer
                kept.index_copy_(2, slots[0].to(kept.device), new)
            else:
                self._put(kept, slots, new.transpose(1, 2))
        return keys[:, :, :view], values[:, :, :view]

    def stores(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All slots of a layer's keys and values, made like key, value (B, Hkv, W, D) at first."""
        if layer not in self._keys:
            # Zeros, not empty: one NaN in a masked slot of V poisons the output (0 * NaN).
            for store, like in ((self._keys, key), (self._values, value)):
                B, heads, _, dim = like.shape
                store[layer] = like.new_zeros(B, heads, self.capacity, dim)
        return self._keys[layer], self._values[layer]

    def held(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """All slots of a layer's keys and values; None before its first write."""
        return (self._keys[layer], self._values[layer]) if layer in self._keys else None

    def commit(self, counts: Tensor) -> None:
        """Advances each row's length by counts (B,)."""
        self.length += counts

    def reset(self) -> None:
        """Forgets every row; what lies in the slots is overwritten in time."""
        self.length.zero_()

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (n,)."""
        self.length = self.length[rows]
        self._rows = self._rows[: len(rows)]
        for store in (self._keys, self._values):
            for layer, tensor in store.items():
                store[layer] = tensor[rows]

    def gather(self, start: Tensor, path: Tensor) -> None:
        """Copies slots start + path (B, D) to start.. (B,): a tree's accepted path, made a chain.

        All slots are read before any is written. What lies past the accepted part is left over.
        """
        D = path.shape[1]
        source = start.unsqueeze(1) + path
        target = start.unsqueeze(1) + torch.arange(D, device=path.device)
        for store in (self._keys, self._values):
            for tensor in store.values():
                rows, slots = self._rows.unsqueeze(1).to(tensor.device), source.to(tensor.device)
                self._put(tensor, target, tensor[rows, :, slots])

    def _put(self, store: Tensor, slots: Tensor, new: Tensor) -> None:
        """Writes new (B, D, Hkv, dim) to slots (B, D) of a layer, maybe on another device."""
        store[self._rows.unsqueeze(1).to(store.device), :, slots.to(store.device)] = new
