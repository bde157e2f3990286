"""Planted faults of block drafters: what users of other trainers met (blocks that see too much, a
slot or a position off by one, masks left random)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters import dflash, dspark, peagle
from draftsmith.drafters.base import Unroll
from draftsmith.drafters.batch import Batch
from planted import Patch, everywhere, widened


def next_features_are_seen(module: Any, patch: Patch) -> None:
    """In unroll, a block's context, or that of masks, reaches one position too far."""

    def wrong(query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, *own: Any) -> Tensor:
        return attend(query, key0, value0, widened(seen), *own)

    attend = module.context_and_block
    patch.setattr(module, "context_and_block", wrong)


def blocks_overlap(patch: Patch) -> None:
    """In unroll, a block also sees the next anchor's block, whose root it should predict."""

    def wrong(query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, *own: Tensor) -> Tensor:
        both = (torch.cat([kv, kv.roll(-1, dims=2)], dim=3) for kv in own)
        return attend(query, key0, value0, seen, *both)

    attend = dflash.context_and_block
    patch.setattr(dflash, "context_and_block", wrong)


def slot_one_early(patch: Patch) -> None:
    """In propose, depth j is read from the slot before its own."""

    def wrong(drafter: Any, states: Tensor) -> Any:
        return from_states(drafter, states.roll(1, dims=1))

    from_states = dflash.from_states
    everywhere(patch, from_states, wrong)


def random_masks(patch: Patch) -> None:
    """The mask's embedding is drawn, not the target's."""

    def wrong(self: Any, root: Tensor, count: int) -> Tensor:
        out = slots(self, root, count)
        noise = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(count))
        return torch.cat([out[..., :1, :], noise.expand_as(out[..., 1:, :])], dim=-2)

    slots = dflash.DFlash.slots
    patch.setattr(dflash.DFlash, "slots", wrong)


def slots_of_dflash(patch: Patch) -> None:
    """unroll takes DSpark's slots for DFlash's: depth j stands one slot late."""

    def wrong(self: Any, *args: Any) -> Any:
        with Patch.context() as within:
            within.setattr(dspark.DSpark, "first", 1)
            return unroll(self, *args)

    unroll = dspark.DSpark.unroll
    patch.setattr(dspark.DSpark, "unroll", wrong)


def markov_reads_the_root(patch: Patch) -> None:
    """In propose the Markov head goes on reading the root, not the draft before."""

    def wrong(drafter: Any, states: Tensor) -> Any:
        forward, root = from_states(drafter, states), []

        def stuck(tokens: Tensor, *rest: Tensor) -> Tensor:
            root.append(tokens)
            return forward(root[0][:, :1].expand_as(tokens), *rest)

        return stuck

    from_states = dflash.from_states
    everywhere(patch, from_states, wrong)


def markov_one_late(patch: Patch) -> None:
    """In unroll the Markov head reads the token that it should predict."""

    def wrong(self: Any, batch: Batch, alignment: Any) -> Unroll:
        out = unroll(self, batch, alignment)
        there, label = out.index >= 0, alignment.label[..., : out.index.shape[2]]
        out.prev = torch.empty_like(out.prev)
        out.prev[out.index[there]] = label[there]
        return out

    unroll = dspark.DSpark.unroll
    patch.setattr(dspark.DSpark, "unroll", wrong)


def mask_state_left_random(patch: Patch) -> None:
    """In propose the learned state is another one, as a folder without it leaves it."""

    def wrong(self: Any, *args: Any) -> Any:
        kept = self.mask_hidden.data
        self.mask_hidden.data = kept.flip(0)
        try:
            return propose(self, *args)
        finally:
            self.mask_hidden.data = kept

    propose = peagle.PEagle.propose
    patch.setattr(peagle.PEagle, "propose", wrong)


def pairs_see_the_next_pair(patch: Patch) -> None:
    """In unroll, the pass over pairs is not causal by one."""

    def wrong(*args: Tensor, attn_mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*args, attn_mask=widened(attn_mask))

    fake = SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": wrong})
    patch.setattr(peagle, "F", fake)
