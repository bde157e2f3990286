"""Planted faults: each turns red the very check that is green without it.

These are the mistakes that users of other toolkits report: off-by-one labels and positions, a
neighbouring layer's state, a norm left out, a mask that sees the future, a stale cache, a verify
pass that misses a draft, a wrong correction. A check that none of them can fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

import contracts as contract
import targets as target
import tiny
import tree_checks
from draftsmith.drafters import batch, dflash, peagle
from draftsmith.drafters.base import Drafter, Policy, family
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance.replay import moments, text_ratios
from draftsmith.eval.decoder.loop import Decoder
from planted import (
    CLASSES,
    Patch,
    deep_row_sees_next_pair,
    features_from_the_future,
    label_one_late,
    neighbouring_layer,
    no_eagle_norm,
    no_final_norm,
    normed_last_layer,
    position_one_late,
    residual,
    rope_one_late,
    sees_next_pair,
    taps_swapped_when_served,
)
from planted_blocks import (
    blocks_overlap,
    markov_one_late,
    markov_reads_the_root,
    mask_state_left_random,
    next_features_are_seen,
    pairs_see_the_next_pair,
    random_masks,
    slot_one_early,
    slots_of_dflash,
)
from planted_drafts import (
    chain_one_module_late,
    draft_keys_kept,
    fed_back_as,
    first_draft_unseen,
    halves_swapped,
    ids_unmapped,
    input_normed,
    last_draft_unread,
    last_token_forgotten,
    line_of_another_node,
    next_head,
    no_norm_flag,
    nothing_subtracted,
    prenorm,
    renormed,
    second_embedding_zeroed,
    state_before_the_norm,
    when_served,
)

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
    expected = [moments(table, k).mean.tolist() for table in text_ratios(made, read, k)]
    counted = [
        [len(t.rounds), *(sum(r.accepted > j for r in t.rounds) for j in range(k))] for t in texts
    ]
    assert counted == expected
    assert sum(row[1] for row in counted) > 10, "nothing is accepted, so nothing was compared"


def of_target(check: Callable[[Any, Any], None], of: str) -> None:
    check(*target.pair(of))


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
    (normed_last_layer, partial(known, "eagle")),
    (partial(taps_swapped_when_served, "eagle"), partial(views, "eagle")),
    *(
        (partial(fault, "dflash"), partial(views, "dflash"))
        for fault in (taps_swapped_when_served, rope_one_late, draft_keys_kept)
    ),
    (partial(rope_one_late, "dspark"), partial(views, "dspark")),
    *(
        (partial(fault, "peagle"), partial(views, "peagle"))
        for fault in (taps_swapped_when_served, rope_one_late, draft_keys_kept)
    ),
    (mask_state_left_random, partial(views, "peagle")),
    (mask_state_left_random, partial(known, "peagle")),
    (partial(next_features_are_seen, peagle), partial(views, "peagle")),
    (partial(next_features_are_seen, peagle), partial(future, "peagle", "features")),
    (pairs_see_the_next_pair, partial(views, "peagle")),
    (pairs_see_the_next_pair, partial(future, "peagle", "features")),
    *((position_one_late, partial(views, name)) for name in ("dflash", "dspark")),
    *((partial(rope_one_late, name), partial(known, name)) for name in ("dflash", "dspark")),
    *((neighbouring_layer, partial(known, name)) for name in ("eagle", "dflash")),
    (partial(next_features_are_seen, dflash), partial(views, "dflash")),
    (partial(next_features_are_seen, dflash), partial(future, "dflash", "features")),
    (blocks_overlap, partial(future, "dflash", "tokens")),
    *((slot_one_early, partial(views, name)) for name in ("dflash", "dspark")),
    *((slot_one_early, partial(known, name)) for name in ("dflash", "dspark")),
    (slots_of_dflash, partial(views, "dspark")),
    *((markov_reads_the_root, partial(check, "dspark")) for check in (views, known)),
    (markov_one_late, partial(views, "dspark")),
    (markov_one_late, partial(future, "dspark", "tokens")),
    (random_masks, partial(known, "dflash")),
    (partial(when_served, random_masks, cls=dflash.DFlash), partial(views, "dflash")),
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
        for name in ("eagle", "medusa", "hydra", "dflash", "peagle", "toy-block", "mtp chain")
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
