"""The drafter contract, for every family on every kind of target: unroll and propose are one.

The `check_*` functions are what tests/drafters/test_faults.py turns against planted faults.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

import tiny
import toys  # noqa: F401  (registers the toy families)
from contracts import (
    DRAFTERS,
    HEADS,
    LAWFUL,
    PLAIN,
    Cells,
    K,
    cells,
    check_draws,
    check_future,
    check_reference,
    check_views,
    distance,
    drafter,
    every,
    feed,
    play,
    prompts,
    read,
)
from draftsmith.drafters import base
from draftsmith.drafters import batch as batches
from draftsmith.drafters.base import Policy
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.parts.layers import BlockConfig
from draftsmith.drafters.sampling import Noise, Sampler

CASES = [(PLAIN, f) for f in tiny.FAMILIES] + [(Sampler(0.0), f) for f in tiny.FAMILIES]


@pytest.mark.parametrize(("sampler", "family"), [*CASES, (Sampler(0.8, 12, 0.9), "Llama")], ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_unroll_equals_propose(name: str, sampler: Sampler, family: str) -> None:
    """Faults: positions, features, tokens or cache slots that differ between the two views."""
    check_views(drafter(name, family), sampler)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("name", DRAFTERS)
def test_unroll_equals_propose_at_other_lengths(name: str, k: int) -> None:
    """Faults: a depth 0 that leans on deeper ones; a draft longer than the three heads."""
    check_views(drafter(name), k=k)


@pytest.mark.parametrize(
    "config",
    [
        {"taps": [0, 3]},
        {"norm_before_residual": True},
        {"head": "target"},
        {"head": "target", "draft_vocab": None},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True},
        {"norm_before_fc": True, "fc_norm": True, "norm_output": True},
    ],
    ids=str,
)
def test_eagle_variants(config: dict[str, Any]) -> None:
    """Faults: an option that one of the two views ignores, or reads differently from the paper."""
    made = drafter("eagle", "Qwen3", **config)
    check_views(made)
    check_reference(made, "Qwen3")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dflash", {"layers": 1, "head": "own", "draft_vocab": None, "mask_token": 7}),
        ("dspark", {"layers": 1, "head": "own", "markov_rank": 3}),
        ("peagle", {"layers": 1, "head": "target", "norm_before_residual": True}),
        ("peagle", {"layers": 3, "norm_before_fc": True, "fc_norm": True, "mask_token": 7}),
    ],
    ids=str,
)
def test_block_variants(name: str, config: dict[str, Any]) -> None:
    made = drafter(name, "Qwen3", **config)
    check_views(made)
    check_reference(made, "Qwen3")


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_blocks_of_another_layer(name: str) -> None:
    """Faults: biases or norms that one view leaves out, and heads turned in part."""
    block = BlockConfig.like(tiny.target("Qwen3").config)
    odd = {"rotary_share": 0.5, "qkv_bias": True, "intermediate_size": 24, "num_kv_heads": 1}
    check_views(drafter(name, "Qwen3", block=block.model_copy(update=odd)))


def test_one_head_for_all_depths() -> None:
    """Faults: the target's rows of other tokens; blocks left out where no lm_head is trained."""
    made = drafter("hydra", "Qwen3", head="target", draft_vocab=30)
    check_views(made)
    check_reference(made, "Qwen3")


@pytest.mark.parametrize("modules", [1, 3])
def test_mtp_variants(modules: int) -> None:
    """Faults: biases, norms or a gate that one view leaves out, a head turned as a whole, or
    an embedding that only one of them zeroes."""
    block = BlockConfig.like(tiny.target("Qwen3").config)
    odd = {"qkv_bias": True, "qk_norm": True, "rotary_share": 0.5, "gated": True}
    block = block.model_copy(update={**odd, "intermediate_size": 24})
    made = drafter("mtp", "Qwen3", modules=modules, block=block, zero_first=False)
    check_views(made)
    check_reference(made, "Qwen3")


@pytest.mark.parametrize("name", ["eagle", "eagle1"])
def test_a_gate_that_the_layer_has_not(name: str) -> None:
    """Fault: a block made for MTP, which an EAGLE layer fails on at its first forward."""
    cls, of = base.family(name), tiny.target()
    block = BlockConfig.like(of.config).model_copy(update={"gated": True})
    taps = {"taps": [1, 2]} if name == "eagle" else {}
    with pytest.raises(UserError, match="block.gated: .* has no gate; leave it out"):
        cls(of, cls.Config(block=block, **taps))


@pytest.mark.parametrize("family", ["Qwen3", "Cohere"])
@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_fresh_heads_say_what_the_target_says(name: str, family: str) -> None:
    """Faults: heads that start from noise, or without Cohere's logit scale. Before training each
    gives the target's law at g_a."""
    of, cls = tiny.target(family), base.family(name)
    for head, kept in (("own", None), ("target", 30)):
        config = cls.Config(heads=2, layers=2, head=head, draft_vocab=kept)
        made = cls.create(of, config, torch.arange(of.vocab_size))
        batch = read(of, prompts(2), made.taps)
        with torch.no_grad():
            p = made.vocab.kept(of.head(batch.final)).softmax(-1)  # type: ignore[arg-type]
        for (b, a, _), q in cells(made, batch, 2).items():
            torch.testing.assert_close(q, p[b, a], atol=1e-5, rtol=0)


@every
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_do_not_touch_each_other(name: str, family: str) -> None:
    """Faults: a length, slot or key shared between rows; padding that leaks; noise by slot."""
    made, texts = drafter(name, family), prompts(2)
    together = play(made, texts, [4, 9], PLAIN, 3)
    for b, row in enumerate((4, 9)):
        for one, batched in zip(play(made, [texts[b]], [row], PLAIN, 3), together, strict=True):
            alone, among = one[0], batched[b]
            assert (alone.known, alone.drafts) == (among.known, among.drafts)
            if alone.law is not None:
                torch.testing.assert_close(alone.law, among.law, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", LAWFUL)
def test_drafts_come_from_their_law(name: str) -> None:
    """Faults: q of another depth or before the draw's own cut; draft ids taken for target ids."""
    check_draws(drafter(name))


@every
@pytest.mark.parametrize("name", [*HEADS, "small", "ngram"])
def test_propose_equals_reference(name: str, family: str) -> None:
    """Faults that both views share: a norm left out, a wrong RoPE, residual, feature or token."""
    check_reference(drafter(name, family), family)


@pytest.mark.parametrize("what", ["tokens", "features"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_unroll_is_blind_to_the_future(name: str, what: str) -> None:
    """Faults: a mask one too wide; the label, or the feature beside the root, in sight."""
    check_future(drafter(name), what)


def packed(texts: list[list[int]], width: int) -> Batch:
    """All texts in one row, then padding; every token is target-made but each text's first two."""
    tokens = torch.full((1, width), 5)
    position, segment = torch.arange(width).unsqueeze(0).clone(), torch.full((1, width), -1)
    made = torch.zeros(1, width, dtype=torch.bool)
    edges = [0, *torch.tensor([len(t) for t in texts]).cumsum(0).tolist()]
    for number, (first, last) in enumerate(pairwise(edges)):
        tokens[0, first:last] = torch.tensor(texts[number])
        position[0, first:last] = torch.arange(last - first)
        segment[0, first:last] = number
        made[0, first + 2 : last] = True
    return Batch(tokens, position, segment, made)


@every
@pytest.mark.parametrize("name", DRAFTERS)
def test_packed_rows_equal_unpacked_rows(name: str, family: str) -> None:
    """Faults: positions that run on, attention or n-grams across samples, windows over slots."""
    made, texts = drafter(name, family), prompts(4)
    batch = made.target.read(packed(texts, sum(map(len, texts)) + 5), made.taps)
    together: Cells = {}
    for (_, a, j), law in cells(made, batch).items():
        together[int(batch.segment[0, a]), int(batch.position[0, a]), j] = law
    apart: Cells = {}
    for number, text in enumerate(texts):
        single = made.target.read(packed([text], len(text)), made.taps)
        apart.update({(number, a, j): law for (_, a, j), law in cells(made, single).items()})
    assert distance(together, apart) < 1e-4


def turns() -> Batch:
    """Row 0: two samples, one of two turns, the other ends on a prompt; row 1: short, padded."""
    flags = "..xxxx..xxx" + ".xxxxx.." + "  ", "...x" + 17 * " "
    made = torch.tensor([[c == "x" for c in row] for row in flags])
    segment = torch.tensor([[0] * 11 + [1] * 8 + [-1] * 2, [0] * 4 + [-1] * 17])
    position = torch.tensor([[*range(11), *range(8), 0, 1], [*range(21)]])
    tokens = torch.randint(2, 48, made.shape, generator=torch.Generator().manual_seed(2))
    return Batch(tokens, position, segment, made)


def expected_cells(batch: Batch, k: int) -> set[tuple[int, int, int]]:
    """In plain words: the root is target-made and so is every token up to the predicted one."""
    out = set()
    for b, (made, segment) in enumerate(
        zip(batch.made.tolist(), batch.segment.tolist(), strict=True)
    ):
        for a in range(len(made) - 2):
            for j in range(k):
                span = range(a + 1, a + 3 + j)
                if span[-1] < len(made) and all(made[t] and segment[t] == segment[a] for t in span):
                    out.add((b, a, j))
    return out


@pytest.mark.parametrize("name", LAWFUL)
def test_index_marks_what_exists(name: str) -> None:
    """Faults: depths across the end of a turn, sample or row; prev or depth of another row."""
    made, batch = drafter(name), turns()
    made.target.read(batch, made.taps)
    deepest = made.longest or K
    wanted = {cell for cell in expected_cells(batch, K) if cell[2] < deepest}
    assert len(wanted) > 15
    assert cells(made, batch).keys() == wanted
    alignment = batches.align(batch, K)
    unroll = made.unroll(batch, alignment)
    for b, a, j in wanted:
        row = unroll.index[b, alignment.anchors[b].tolist().index(a), j]
        assert unroll.prev[row] == batch.tokens[b, a + 1 + j]
        assert unroll.depth[row] == (0 if made.rows_shared else j)
    used = unroll.index[unroll.index >= 0].unique()
    assert used.equal(torch.arange(len(unroll.hidden)))
    some = torch.tensor([[9, -1, 3], [-1, 2, -1]])  # any order, padding anywhere
    few = cells(made, batch, K, some)
    assert few.keys() == {cell for cell in wanted if cell[1] in ((9, 3), (2,))[cell[0]]}
    everything = cells(made, batch)
    assert distance(few, {cell: everything[cell] for cell in few}) < 1e-5


@pytest.mark.parametrize("name", DRAFTERS)
def test_all_anchors_are_the_target_made_roots(name: str) -> None:
    """Faults: an anchor of another sample; a root that the target did not make."""
    made, batch = drafter(name), turns()
    made.target.read(batch, made.taps)
    roots = {a for b, a, _ in cells(made, batch, 1) if b == 0}
    anchors = [[a for a in row if a >= 0] for row in batches.all_anchors(batch).tolist()]
    assert anchors == [[1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 14, 15], [2]]
    assert roots <= set(anchors[0])


@pytest.mark.parametrize("name", DRAFTERS)
def test_depth_causal_is_true(name: str) -> None:
    """Faults: replay of every k from one unroll where a depth depends on k, and the reverse."""
    made = drafter(name)
    batch = read(made.target, prompts(3), made.taps)
    whole = cells(made, batch, 5)
    for k in (1, 3):
        part = cells(made, batch, k)
        gap = distance(part, {cell: law for cell, law in whole.items() if cell[2] < k})
        assert gap < 1e-5 if made.depth_causal else gap > 0.05


@pytest.mark.parametrize("name", DRAFTERS)
def test_state_is_all_there_is(name: str) -> None:
    """Fault: state that hides in the drafter, so that two requests at once spoil each other."""
    made, text = drafter(name), prompts(1)[0]
    noise = Noise(0, torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    root = torch.tensor([text[-1]])
    with torch.no_grad():
        state = made.start(1, 64)
        feed(made, state, [text[:-1]], [0])
        made.begin(state)
        kept = copy.deepcopy(state)
        first = made.propose(state, root, Policy(3), PLAIN, noise)
        other = made.start(2, 64)
        feed(made, other, [prompts(3)[2]] * 2, [0, 0])
        made.begin(other)
        made.propose(other, root.repeat(2), Policy(3), PLAIN, noise)
        again = made.propose(kept, root, Policy(3), PLAIN, noise)
    assert first.tokens.equal(again.tokens) and first.length.equal(again.length)
