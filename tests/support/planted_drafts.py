"""Planted faults: what a drafter may draft wrongly, or hand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters import eagle, eagle1, hydra, mtp
from draftsmith.drafters.parts import heads
from draftsmith.drafters.target.attention import Step
from draftsmith.drafters.target.causal_lm import CausalLM, TargetOutput
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.certify import certify
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder import round as round_module
from planted import CLASSES, Patch


def state_before_the_norm(patch: Patch) -> None:
    """Tap "normed" comes before the final norm."""

    def wrong(self: CausalLM, *args: Any) -> TargetOutput:
        out = forward(self, *args)
        if "normed" in out.features:
            out.features["normed"] = out.final
        return out

    forward = CausalLM.forward
    patch.setattr(CausalLM, "forward", wrong)


def next_head(patch: Patch) -> None:
    """Depth j asks the lm_head of depth j + 1, in both views."""
    logits = heads.Heads.logits
    patch.setattr(heads.Heads, "logits", lambda *args: logits(*args[:-1], (args[-1] + 1) % 3))


def last_draft_unread(patch: Patch) -> None:
    """Hydra's head j reads tokens one place back: the root twice, and not the draft before it."""

    def wrong(self: Any, j: int, g: Tensor, line: Tensor) -> Tensor:
        return state(self, j, g, torch.cat([line[..., :1], line[..., :-1]], dim=-1))

    state = hydra.Hydra._state
    patch.setattr(hydra.Hydra, "_state", wrong)


def when_served(fault: Callable[[Patch], None], patch: Patch, cls: Any = heads.Heads) -> None:
    """The fault is there in the family's propose only; training has it right."""

    def wrong(*args: Any) -> Any:
        with Patch.context() as within:
            fault(within)
            return propose(*args)

    propose = cls.propose
    patch.setattr(cls, "propose", wrong)


def line_of_another_node(patch: Patch) -> None:
    """In a tree, the path above a node is taken from the first node of the depth before."""

    def wrong(*args: Any) -> Any:
        *rest, forward = args

        def first(tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
            return forward(tokens, parent.amin(1, keepdim=True).expand_as(parent), seen)

        return grow(*rest, first)

    grow = heads.grow
    patch.setattr(heads, "grow", wrong)


Extend = Callable[..., None]


def after_a_proposal(patch: Patch, cls: Any, wrong: Callable[[Extend], Extend]) -> None:
    """extend becomes wrong(extend) once the state has proposed: prompts go in as they should."""
    extend, propose, begun = cls.extend, cls.propose, []
    broken = wrong(extend)

    def noted(self: Any, state: Any, *args: Any) -> Any:
        begun.append(state)
        return propose(self, state, *args)

    def either(self: Any, state: Any, *args: Any) -> None:
        (broken if any(state is one for one in begun) else extend)(self, state, *args)

    patch.setattr(cls, "propose", noted)
    patch.setattr(cls, "extend", either)


def last_token_forgotten(name: str, patch: Patch) -> None:
    """extend after a round takes what stood there before for the last accepted token."""

    def wrong(extend: Extend) -> Extend:
        def broken(self: Any, state: Any, tokens: Tensor, features: dict, n: Tensor) -> None:
            last = torch.arange(tokens.shape[1]) == (n - 1).unsqueeze(1)
            tokens = torch.where(last, 2, tokens)
            stale = {k: torch.where(last.unsqueeze(2), 0.0, f) for k, f in features.items()}
            extend(self, state, tokens, stale, n)

        return broken

    after_a_proposal(patch, CLASSES[name], wrong)


def draft_keys_kept(name: str, patch: Patch) -> None:
    """The keys that were drafted with are kept, never recomputed from target features."""

    def wrong(extend: Extend) -> Extend:
        def broken(self: Any, state: Any, *args: Any) -> None:
            stores = (state.slab._keys, state.slab._values)
            before = [{i: t.clone() for i, t in store.items()} for store in stores]
            extend(self, state, *args)
            for store, old in zip(stores, before, strict=True):
                for i, kept in old.items():
                    store[i].copy_(kept)

        return broken

    after_a_proposal(patch, CLASSES[name], wrong)


def fed_back_as(name: str, change: Callable[[Any, Tensor], Tensor], patch: Patch) -> None:
    """The next depth reads another state of the layer's output."""
    fed_back = CLASSES[name].fed_back
    wrong = lambda self, output: change(self, fed_back(self, output))  # noqa: E731
    patch.setattr(CLASSES[name], "fed_back", wrong)


def prenorm(self: mtp.Mtp, state: Tensor) -> Tensor:
    """What the module's norm read, but for its size, which hnorm takes away."""
    return state / self.layers[0].norm.weight


def renormed(self: eagle1.Eagle1, state: Tensor) -> Tensor:
    return F.rms_norm(state, state.shape[-1:])


def no_norm_flag(patch: Patch) -> None:
    """EAGLE-3.1's norm of what is fed back is read and forgotten."""
    patch.setattr(eagle.Eagle, "fed_back", lambda self, output: output)


def input_normed(patch: Patch) -> None:
    """EAGLE-1's layer norms what it reads, as any other decoder layer does."""

    def wrong(self: eagle1.Eagle1, *args: Any) -> tuple[Tensor, Tensor]:
        x, residual = inputs(self, *args)
        return F.rms_norm(x, x.shape[-1:]), residual

    inputs = eagle1.Eagle1.inputs
    patch.setattr(eagle1.Eagle1, "inputs", wrong)


def halves_swapped(patch: Patch) -> None:
    """eh_proj takes the state first, as MiMo's checkpoints have it."""

    def wrong(self: mtp.MtpModule, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.eh_proj(torch.cat([self.hnorm(state), self.enorm(embedded)], dim=-1))
        return self.input_layernorm(joined), joined

    patch.setattr(mtp.MtpModule, "inputs", wrong)


def second_embedding_zeroed(patch: Patch) -> None:
    """Positions counted from 1: the wrong row's embedding is zero."""

    def wrong(self: mtp.Mtp, tokens: Tensor, state: Tensor, position: Tensor, *module: int) -> Any:
        return inputs(self, tokens, state, position - 1, *module)

    inputs = mtp.Mtp.inputs
    patch.setattr(mtp.Mtp, "inputs", wrong)


def chain_one_module_late(patch: Patch) -> None:
    """In propose, depth j is drafted by module j + 1 while there is one."""

    def wrong(self: mtp.ChainMtp, slab: Any, j: int, *rest: Any) -> Tensor:
        return read(self, slab, min(j + drafting, self.config.modules - 1), *rest)

    def noted(self: mtp.ChainMtp, *args: Any) -> Any:
        nonlocal drafting
        drafting = 1
        try:
            return propose(self, *args)
        finally:
            drafting = 0

    read, propose, drafting = mtp.ChainMtp._read, mtp.ChainMtp.propose, 0
    patch.setattr(mtp.ChainMtp, "_read", wrong)
    patch.setattr(mtp.ChainMtp, "propose", noted)


def first_draft_unseen(patch: Patch) -> None:
    """In the verify pass no later node sees the first draft."""

    def wrong(slab: Any, width: int) -> Step:
        step = chain_step(slab, width)
        if not slab.length.any():  # the prompt
            return step
        slot = (slab.length + 1).view(-1, 1, 1).expand(-1, step.visible.shape[1], 1)
        seen = step.visible.gather(2, slot)
        seen[:, 2:] = False
        step.visible = step.visible.scatter(2, slot, seen)
        return step

    chain_step = round_module.chain_step
    patch.setattr(round_module, "chain_step", wrong)


def nothing_subtracted(patch: Patch) -> None:
    """After a rejection the rule draws from p, not from what p has over q."""
    patch.setattr(accept, "chain", certify.corrected_from_p)


def ids_unmapped(patch: Patch) -> None:
    """Draft ids are taken for target ids."""
    patch.setattr(VocabMap, "to_target", lambda self, ids: ids)
