"""Texts that are decoded by trees: equal to `generate`, right in law, and counted as replay counts.

.venv/bin/pytest tests/eval/decoder/test_trees_decoded.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import decodings as decoding
import parities as parity
import tiny
from draftsmith.drafters.base import Policy
from draftsmith.drafters.policy import StaticTree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.attention import tree_shape
from draftsmith.eval.acceptance.parity import compare
from draftsmith.eval.acceptance.replay import summarise
from draftsmith.eval.acceptance.walk import walk_tree
from draftsmith.eval.certify.fixture import top_gap
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder.loop import Decoder
from exact import chi_square
from tree_checks import ABLE, DRAWN, GREEDY, PLAIN, SHAPES, UNEVEN, WARM, check_greedy, trees_agree


@pytest.mark.parametrize("policy", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("eagle", "Llama"),
        ("eagle", "Gemma3"),
        ("toy-block", "Llama"),
        ("medusa", "Llama"),
        ("hydra", "Llama"),
        ("dflash", "Llama"),
        ("dspark", "Llama"),
        ("peagle", "Llama"),
    ],
)
def test_greedy_trees_equal_generate(name: str, family: str, policy: Policy) -> None:
    made = parity.drafter_for(name, family)
    assert check_greedy(made, family, policy) > 20
    assert check_greedy(made, family, policy, 1) > 0


@pytest.mark.parametrize("name", ABLE)
def test_sampled_trees_equal_plain_sampling(name: str) -> None:
    """Match trees change no token of a sampled text, and a text does not depend on its batch."""
    made = parity.drafter_for(name, "Llama")
    prompts, rows = decoding.ragged(5), [4, 0, 1 << 40, 3, 9]
    for sampler in (PLAIN, WARM):
        plain = Decoder(made.target).generate(prompts, sampler, 20, rows=rows, seed=3)
        for policy in SHAPES[1:]:
            decoder = Decoder(made.target, made, policy)
            texts = decoder.generate(prompts, sampler, 20, rows=rows, seed=3)
            assert [t.tokens for t in texts] == [t.tokens for t in plain]
            assert sum(decoding.accepted(texts)) > 10
        alone = decoder.generate([prompts[3]], sampler, 20, rows=[3], seed=3)
        assert alone == [texts[3]]


@pytest.mark.parametrize("policy", [SHAPES[0], UNEVEN], ids=str)
@pytest.mark.parametrize("name", ABLE)
def test_end_token_inside_a_path(
    name: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end token is kept, nothing after it is, and rounds are counted only up to it."""
    made = parity.drafter_for(name, "Llama")
    decoding.end_tokens(monkeypatch, made.target, [])
    decoder, prompts = Decoder(made.target, made, policy), tiny.prompts(10, 3, decoding.VOCAB)
    free = decoder.generate(prompts, GREEDY, 14)
    where = [
        (b, i) for b, text in enumerate(free) for i in decoding.inside_blocks(text)
        if text.tokens[i] not in text.tokens[:i]
    ]  # fmt: skip
    assert where, "no text has a token that first comes inside a path"
    b, i = where[0]
    decoding.end_tokens(monkeypatch, made.target, [free[b].tokens[i]])
    text = decoder.generate(prompts[max(0, b - 1) : b + 1], GREEDY, 14)[-1]
    known = decoding.generated("Llama", tuple(prompts[b]), 14, free[b].tokens[i])
    assert text.tokens == known == free[b].tokens[: i + 1] and text.finish == "stop"
    assert text.rounds == decoding.cut(free[b].rounds, len(prompts[b]) + i)


@pytest.mark.parametrize("policy", [Policy(3, block=True), DRAWN], ids=str)
def test_drawn_texts_do_not_depend_on_the_batch(policy: Policy) -> None:
    made = parity.drafter_for("eagle", "Llama")
    decoder, prompts, rows = Decoder(made.target, made, policy), decoding.ragged(5), [7, 9, 3, 1, 5]
    whole = decoder.generate(prompts, PLAIN, 16, rows=rows)
    assert sum(decoding.accepted(whole)) > 10
    for order in ([2], [4, 1]):
        picked = [prompts[i] for i in order]
        some = decoder.generate(picked, PLAIN, 16, rows=[rows[i] for i in order])
        assert some == [whole[i] for i in order]


# The law of what is drawn


def p_value(policy: Policy, sampler: Sampler, patch: pytest.MonkeyPatch) -> float:
    """Chi-square of four tokens after the likeliest root, over many rows of one batch."""
    made = decoding.law_drafter("eagle")
    decoding.end_tokens(patch, made.target, [])
    decoder = Decoder(made.target, made, policy)
    texts = decoder.generate([decoding.PROMPT] * decoding.ROWS, sampler, 5, seed=1)
    root, law = decoding.law_after_root(sampler)
    texts = [text for text in texts if text.tokens[0] == root]
    assert {r.accepted for text in texts for r in text.rounds} == set(range(policy.k + 1))
    assert sum(len(text.rounds) > 2 for text in texts) > 100, "too few texts of three rounds"
    counts = torch.zeros_like(law)
    for text in texts:
        counts[tuple(text.tokens[1:])] += 1
    return chi_square(counts.flatten().tolist(), law.flatten().tolist())


TWO = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), drawn=True)
CUT = Sampler(1.2, top_k=4, top_p=0.9)


@pytest.mark.parametrize(
    ("policy", "sampler"), [(Policy(2, block=True), CUT), (TWO, PLAIN), (TWO, CUT)], ids=str
)
def test_sampled_law(policy: Policy, sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint law of four tokens over two, three and more rounds."""
    assert p_value(policy, sampler, monkeypatch) > 1e-3


def judged_by_the_first_law(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draws: Any
) -> Any:
    """Siblings drawn without replacement, but the law is not thinned after a refusal."""

    thinned = torch.Tensor.scatter
    try:
        torch.Tensor.scatter = lambda self, dim, index, value: self  # type: ignore[method-assign]
        return RIGHT(tokens, parents, p, q, draws)
    finally:
        torch.Tensor.scatter = thinned  # type: ignore[method-assign]


RIGHT = accept.without_replacement


def test_a_wrong_rule_bends_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above has teeth at the same number of rows."""
    monkeypatch.setattr(accept, "without_replacement", judged_by_the_first_law)
    assert p_value(TWO, PLAIN, monkeypatch) < 1e-6


@pytest.mark.parametrize(
    ("name", "sampler", "policy"),
    [
        *(("eagle", sampler, policy) for sampler in (GREEDY, WARM) for policy in SHAPES),
        ("eagle1", GREEDY, SHAPES[0]),
        ("mtp", WARM, SHAPES[1]),
        ("mtp chain", WARM, UNEVEN),
        ("toy-block", GREEDY, SHAPES[0]),
        ("toy-block", WARM, UNEVEN),
        ("dflash", GREEDY, SHAPES[1]),
        ("dflash", WARM, UNEVEN),
        ("dspark", GREEDY, UNEVEN),
        ("dspark", WARM, SHAPES[1]),
        ("peagle", GREEDY, SHAPES[1]),
        ("peagle", WARM, UNEVEN),
        ("medusa", GREEDY, UNEVEN),
        ("medusa", WARM, SHAPES[1]),
        ("hydra", GREEDY, SHAPES[0]),
        ("hydra", WARM, UNEVEN),
    ],
    ids=str,
)
def test_trees_agree_as_integers(name: str, sampler: Sampler, policy: Policy) -> None:
    texts, found = trees_agree(parity.drafter_for(name, "Llama"), sampler, policy)
    assert found.holds and not found.splits and not found.ties, found.report()
    assert found.counted == found.expected and sum(found.counted[1:]) > 100
    assert found.counted[0] == sum(len(t.rounds) for t in texts)


def test_the_walk_says_where_prompts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's order: the prompt, begin, then propose and extend in turns."""
    made = parity.drafter_for("small", "Llama")
    batch = parity.read(made.target, tiny.texts(made.target, GREEDY, 3), GREEDY, made)
    called: list[str] = []
    for name in ("extend", "begin", "propose"):
        plain = getattr(type(made), name)

        def noted(*args: Any, name: str = name, plain: Any = plain) -> Any:
            called.append(name)
            return plain(*args)

        monkeypatch.setattr(type(made), name, noted)
    walk_tree(made, batch, Policy(3))
    assert called == ["extend", "begin", *["propose", "extend"] * (len(called) // 2 - 1)]
    assert len(called) > 4


@pytest.mark.parametrize("name", ["eagle", "small", "toy-block"])
def test_blocks_agree_by_z(name: str) -> None:
    """Block verification against its own survivals; against the token rule's it would not hold."""
    made = parity.drafter_for(name, "Llama")
    prompts = [[5], *tiny.prompts(199, 2, decoding.VOCAB)]
    texts = Decoder(made.target, made, Policy(3, block=True)).generate(prompts, PLAIN, 20, seed=7)
    tables = parity.replayed(made, texts, PLAIN, 3)
    found = compare(texts, summarise(tables, 3, block=True), deterministic=False)
    assert found.holds and all(z is not None for z in found.z), found.report()
    if name != "small":  # which is so good that the rules hardly differ
        assert not compare(texts, summarise(tables, 3), deterministic=False).holds


def test_top_gap() -> None:
    hf = tiny.hf_model("Llama")
    logits = hf(torch.tensor([[5, 6]])).logits[0, -1].detach().sort(descending=True).values
    assert top_gap(hf, [5, 6]) == pytest.approx(float(logits[0] - logits[1]), abs=1e-6)


def test_shape_of_a_tree() -> None:
    """depth and ancestors against walking up."""
    parents = torch.tensor([UNEVEN.parents])
    depth, above = tree_shape(parents)
    for i in range(parents.shape[1]):
        line_of = {i}
        while parents[0, min(line_of)] >= 0:
            line_of.add(int(parents[0, min(line_of)]))
        assert set(above[0, i].nonzero().flatten().tolist()) == line_of
        assert int(depth[0, i]) == len(line_of) - 1
