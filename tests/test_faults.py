"""Planted faults: each turns red the very check that is green without it.

These are the mistakes that users of other toolkits report: off-by-one labels and positions, a
neighbouring layer's state, a norm left out, a mask that sees the future, a stale cache, a verify
pass that misses a draft, a wrong correction. A check that none of them can fail proves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contracts as contract
import test_accept
import test_target as target
import tiny
import toys
import tree_checks
from draftsmith.drafters import (
    batch,
    eagle,
    eagle1,
    heads,
    hydra,
    medusa,
    mtp,
    ngram,
    one_layer,
    small,
)
from draftsmith.drafters.attention import Step
from draftsmith.drafters.base import Drafter, Policy, family
from draftsmith.drafters.causal_lm import CausalLM, TargetOutput
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval import rulebook
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder import round as round_module
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.replay import moments, tables

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
    "toy-block": toys.ToyBlock,
}


# The checks, as functions of nothing


def views(name: str) -> None:
    contract.check_views(contract.drafter(name))


def known(name: str, **config: Any) -> None:
    contract.check_reference(contract.drafter(name, **config), "Llama")


def future(name: str, what: str) -> None:
    contract.check_future(contract.drafter(name), what)


def tree() -> None:
    tree_checks.check_tree(contract.drafter("hydra"), tree_checks.UNEVEN)


def draws(name: str) -> None:
    contract.check_draws(contract.drafter(name))


@cache
def often_right(name: str) -> Drafter:
    """A drafter of twelve words, of which about every third draft is accepted."""
    cls, config = family(name), {"small": {"layers": [0, 1, 3]}, "ngram": {}}[name]
    return cls.create(tiny.target("Llama", vocab=12), cls.Config(**config)).eval()


def counts(name: str) -> None:
    """Decoded rounds are replay's, as integers, and the text is plain transformers' own."""
    made, k, greedy = often_right(name), 3, Sampler(0.0)
    prompts = tiny.prompts(10, 2, 12)
    texts = Decoder(made.target, made, Policy(k)).generate(prompts, greedy, 20)
    theirs = tiny.hf_model("Llama", vocab=12)
    for text in texts:
        laws = target.plain(theirs, text.prompt + text.tokens)
        assert laws[len(text.prompt) - 1 : -1].argmax(1).tolist() == text.tokens
    pairs = [(t.prompt + t.tokens, [False] * len(t.prompt) + [True] * len(t.tokens)) for t in texts]
    read = made.target.read(batch.batch_of(pairs, greedy), made.taps)
    expected = [moments(table, k).mean.tolist() for table in tables(made, read, k)]
    counted = [
        [len(t.rounds), *(sum(r.accepted > j for r in t.rounds) for j in range(k))] for t in texts
    ]
    assert counted == expected
    assert sum(row[1] for row in counted) > 10, "nothing is accepted, so nothing was compared"


def of_target(check: Callable[[Any, Any], None], of: str) -> None:
    check(*target.pair(of))


def residual() -> None:
    """The chain rule, as the decoder finds it, gives the target's law."""
    p, q = test_accept.pair("plain", 3, 2)
    assert test_accept.error(test_accept.emitted(accept.chain, p, q), p) < test_accept.EXACT


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


def when_served(fault: Callable[[Patch], None], patch: Patch) -> None:
    """The fault is there in propose only; training has it right."""

    def wrong(*args: Any) -> Any:
        with Patch.context() as within:
            fault(within)
            return propose(*args)

    propose = heads.Heads.propose
    patch.setattr(heads.Heads, "propose", wrong)


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
    patch.setattr(accept, "chain", rulebook.corrected_from_p)


def ids_unmapped(patch: Patch) -> None:
    """Draft ids are taken for target ids."""
    patch.setattr(VocabMap, "to_target", lambda self, ids: ids)


HEADS = ("eagle", "eagle1", "mtp", "mtp chain")
Check = Callable[[], None]
FAULTS: list[tuple[Callable[[Patch], None], Check]] = [
    (label_one_late, partial(counts, "small")),
    (label_one_late, partial(counts, "ngram")),
    (position_one_late, partial(counts, "small")),
    (position_one_late, partial(views, "small")),
    *((position_one_late, partial(views, name)) for name in HEADS[:3]),
    (position_one_late, partial(views, "toy-block")),
    (position_one_late, partial(future, "small", "tokens")),
    (neighbouring_layer, partial(of_target, target.check_features, "Llama")),
    (neighbouring_layer, partial(of_target, target.check_features, "Gemma3")),
    (normed_last_layer, partial(of_target, target.check_features, "Llama")),
    (neighbouring_layer, partial(known, "eagle")),
    (normed_last_layer, partial(known, "eagle")),
    (partial(taps_swapped_when_served, "eagle"), partial(views, "eagle")),
    (partial(taps_swapped_when_served, "toy-block"), partial(views, "toy-block")),
    *((partial(rope_one_late, name), partial(views, name)) for name in HEADS),
    (partial(rope_one_late, "toy-block"), partial(views, "toy-block")),
    (no_final_norm, partial(of_target, target.check_head, "Llama")),
    (no_final_norm, partial(of_target, target.check_slab, "Qwen3")),
    (no_final_norm, partial(known, "small")),
    (no_eagle_norm, partial(known, "eagle")),
    (no_norm_flag, partial(known, "eagle", norm_output=True)),
    (input_normed, partial(known, "eagle1")),
    (partial(fed_back_as, "eagle1", renormed), partial(known, "eagle1")),
    (partial(fed_back_as, "mtp", prenorm), partial(known, "mtp")),
    (halves_swapped, partial(known, "mtp")),
    (second_embedding_zeroed, partial(known, "mtp")),
    (second_embedding_zeroed, partial(known, "mtp chain")),
    (chain_one_module_late, partial(views, "mtp chain")),
    *(
        (partial(sees_next_pair, name), check)
        for name in ("eagle", "mtp chain")
        for check in (partial(views, name), partial(future, name, "features"))
    ),
    (deep_row_sees_next_pair, partial(views, "eagle")),
    (deep_row_sees_next_pair, partial(future, "eagle", "features")),
    *(
        (partial(features_from_the_future, name), check)
        for name in ("eagle", "medusa", "hydra", "toy-block", "mtp chain")
        for check in (partial(views, name), partial(future, name, "features"))
    ),
    *((partial(last_token_forgotten, name), partial(views, name)) for name in CLASSES),
    (partial(draft_keys_kept, "eagle"), partial(views, "eagle")),
    (partial(draft_keys_kept, "mtp chain"), partial(views, "mtp chain")),
    (first_draft_unseen, partial(counts, "small")),
    (nothing_subtracted, residual),
    (ids_unmapped, partial(draws, "eagle")),
    (ids_unmapped, partial(draws, "medusa")),
    *((state_before_the_norm, partial(known, name)) for name in ("medusa", "hydra")),
    *((next_head, partial(known, name)) for name in ("medusa", "hydra")),
    *((partial(when_served, next_head), partial(views, name)) for name in ("medusa", "hydra")),
    (last_draft_unread, partial(known, "hydra")),
    (partial(when_served, last_draft_unread), partial(views, "hydra")),
    (line_of_another_node, tree),
    (position_one_late, partial(views, "hydra")),
    (position_one_late, partial(future, "hydra", "tokens")),
]


def told(part: Any) -> str:
    """A test id: the function's name and the drafter it is about."""
    if isinstance(part, partial):
        return "-".join([part.func.__name__, *map(told, part.args), *part.keywords])
    return part if isinstance(part, str) else part.__name__


@pytest.fixture(autouse=True, scope="module")
def sound() -> None:
    """Builds what is cached before anything is broken."""
    for of in ("Llama", "Gemma3", "Qwen3"):
        target.pair(of)
    for name in ("small", "ngram"):
        contract.drafter(name)
        often_right(name)


CHECKS = {told(check): check for _, check in FAULTS}


@pytest.mark.parametrize("name", CHECKS)
def test_green_without_a_fault(name: str) -> None:
    """Fault: a check that is red anyway."""
    CHECKS[name]()


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=told)
def test_red_with_a_fault(
    fault: Callable[[Patch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault shows in the check."""
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()
