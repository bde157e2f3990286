"""Planted faults: what a drafter may read or learn wrongly."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laws_of_drafts
import toys
from draftsmith.drafters import (
    batch,
    dflash,
    dspark,
    eagle,
    eagle1,
    hydra,
    medusa,
    mtp,
    ngram,
    peagle,
    small,
)
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.parts import one_layer
from draftsmith.drafters.target.attention import Step
from draftsmith.drafters.target.causal_lm import CausalLM, TargetOutput
from draftsmith.eval.certify.enumeration import emitted, error
from draftsmith.eval.decoder import accept

Patch = pytest.MonkeyPatch
CLASSES: dict[str, type] = {
    "eagle": eagle.Eagle,
    "eagle1": eagle1.Eagle1,
    "mtp": mtp.SharedMtp,
    "mtp chain": mtp.ChainMtp,
    "small": small.Small,
    "ngram": ngram.Ngram,
    "medusa": medusa.Medusa,
    "hydra": hydra.Hydra,
    "dflash": dflash.DFlash,
    "dspark": dspark.DSpark,
    "peagle": peagle.PEagle,
    "toy-block": toys.ToyBlock,
}


def residual() -> None:
    """The chain rule, as the decoder finds it, gives the target's law."""
    p, q = laws_of_drafts.pair("plain", 3, 2)
    assert error(emitted(accept.chain, p, q), p) < laws_of_drafts.EXACT


# The faults


def everywhere(patch: Patch, old: Any, new: Any) -> None:
    """Puts `new` wherever draftsmith or the toys have imported `old`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("draftsmith") or module is toys:
            for key in [k for k, value in vars(module).items() if value is old]:
                patch.setattr(module, key, new)


def label_one_late(patch: Patch) -> None:
    """Depth j is judged by x_{a+3+j}."""

    def wrong(of: batch.Batch, *args: Any) -> batch.Alignment:
        out = align(of, *args)
        row = torch.arange(len(of.tokens)).view(-1, 1, 1)
        late = of.tokens[row, (out.compare + 2).clamp(max=of.tokens.shape[1] - 1)]
        out.label = torch.where(out.exists, late, 0)
        return out

    align = batch.align
    everywhere(patch, align, wrong)


def position_one_late(patch: Patch) -> None:
    """Depth j reads, and is compared at, x_{a+2+j}: the very token it predicts."""

    def wrong(of: batch.Batch, *args: Any) -> batch.Alignment:
        out = align(of, *args)
        out.compare = torch.where(out.exists, out.compare + 1, 0)
        return out

    align = batch.align
    everywhere(patch, align, wrong)


def neighbouring_layer(patch: Patch) -> None:
    """Tap k gives the state after layer k + 1."""

    def wrong(self: CausalLM, tokens: Tensor, step: Step, taps: Any = ()) -> TargetOutput:
        last = self.num_layers
        moved = {t: min(t + 1, last) if isinstance(t, int) else t for t in taps}
        out = forward(self, tokens, step, list(moved.values()))
        out.features = {str(t): out.features[str(m)] for t, m in moved.items()}
        return out

    forward = CausalLM.forward
    patch.setattr(CausalLM, "forward", wrong)


def normed_last_layer(patch: Patch) -> None:
    """Tap L comes after the final norm, as HF's last hidden state does."""

    def wrong(self: CausalLM, *args: Any) -> TargetOutput:
        out = forward(self, *args)
        if str(self.num_layers) in out.features:
            out.features[str(self.num_layers)] = self.norm(out.final)
        return out

    forward = CausalLM.forward
    patch.setattr(CausalLM, "forward", wrong)


def taps_swapped_when_served(name: str, patch: Patch) -> None:
    """extend takes the features in another order than unroll does."""

    def wrong(self: Any, state: Any, tokens: Tensor, features: dict, n: Tensor) -> None:
        swapped = dict(zip(features, reversed(list(features.values())), strict=True))
        extend(self, state, tokens, swapped, n)

    extend = CLASSES[name].extend
    patch.setattr(CLASSES[name], "extend", wrong)


def rope_one_late(name: str, patch: Patch) -> None:
    """propose counts positions from the root where unroll counts from the anchor."""

    def wrong(self: Any, *args: Any) -> Any:
        rope = next(m for m in self.modules() if type(m).__name__ == "Rope")
        hook = rope.register_forward_pre_hook(lambda module, given: (given[0], given[1] + 1))
        try:
            return propose(self, *args)
        finally:
            hook.remove()

    propose = CLASSES[name].propose
    patch.setattr(CLASSES[name], "propose", wrong)


def no_final_norm(patch: Patch) -> None:
    patch.setattr(CausalLM, "head", lambda self, final: self.lm_head(final))


def no_eagle_norm(patch: Patch) -> None:
    def wrong(self: eagle.Eagle, *args: Any) -> Tensor:
        kept, self.norm = self.norm, nn.Identity()
        try:
            return logits(self, *args)
        finally:
            self.norm = kept

    logits = eagle.Eagle.logits
    patch.setattr(eagle.Eagle, "logits", wrong)


def widened(mask: Tensor) -> Tensor:
    """A mask that sees one position more."""
    return mask | mask.roll(1, dims=-1)


def sees_next_pair(name: str, patch: Patch) -> None:
    """In unroll, depth 0 (of a chain every depth) attends to g_{a+1} beside x_{a+2}."""
    cls, module = CLASSES[name], mtp if name == "mtp chain" else one_layer

    def wrong(query: Tensor, *args: Any, attn_mask: Tensor) -> Tensor:
        mask = widened(attn_mask) if unrolling else attn_mask
        return F.scaled_dot_product_attention(query, *args, attn_mask=mask)

    def noted(self: Drafter, *args: Any) -> Any:
        unrolling.append(self)
        try:
            return unroll(self, *args)
        finally:
            unrolling.clear()

    unroll, unrolling = cls.unroll, []
    patch.setattr(cls, "unroll", noted)
    fake = SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": wrong})
    patch.setattr(module, "F", fake)


def deep_row_sees_next_pair(patch: Patch) -> None:
    """In unroll, depths from 1 on attend to it."""

    def wrong(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, *own: Any) -> Tensor:
        return mixed(query, key, value, widened(seen), *own)

    mixed = one_layer.causal_and_diagonal
    patch.setattr(one_layer, "causal_and_diagonal", wrong)


def features_from_the_future(name: str, patch: Patch) -> None:
    """unroll sees a little of g_{a+1} in g_a."""

    def wrong(self: Any, of: batch.Batch, *args: Any) -> Any:
        clean = of.features
        of.features = {n: f + 0.1 * f.roll(-1, dims=1) for n, f in clean.items()}
        try:
            return unroll(self, of, *args)
        finally:
            of.features = clean

    unroll = CLASSES[name].unroll
    patch.setattr(CLASSES[name], "unroll", wrong)
