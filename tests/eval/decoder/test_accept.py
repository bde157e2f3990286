"""Accept rules, enumerated exactly: the serving code itself is driven through a scripted `draws`.

The draft's own randomness is enumerated too, so what is compared is the law of the text that comes
out, over K + 1 tokens, with the target's own law; the target finishes what a round leaves short.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.policy import StaticTree
from draftsmith.drafters.sampling import Noise, Purpose, pick
from draftsmith.eval.certify.certify import corrected_from_p, match, match_tree
from draftsmith.eval.certify.enumeration import (
    Laws,
    continued,
    emitted,
    emitted_tree,
    error,
    over_rounds,
    points,
    random_laws,
)
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder.accept import Accepted, KeyedDraws
from exact import chi_square
from laws_of_drafts import EXACT, normed, pair

RULES = {"chain": accept.chain, "block": accept.block}
KINDS = ["plain", "q has zeros", "p has zeros", "both have zeros", "equal", "equal, then disjoint",
         "disjoint", "point masses"]  # fmt: skip
SIZES = [(3, 3), (4, 2), (5, 1)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("V", "K"), SIZES)
def test_chain_keeps_the_target_law(kind: str, V: int, K: int, rule: str) -> None:
    """The first token, and all tokens together, follow the target exactly."""
    p, q = pair(kind, V, K)
    joint = emitted(RULES[rule], p, q)
    first = joint.sum(0).flatten(1).sum(1)
    torch.testing.assert_close(first, p[0], atol=EXACT, rtol=0)
    assert error(joint, p) < EXACT


@pytest.mark.parametrize("kind", ["plain", "both have zeros", "disjoint"])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_chain_stops_at_the_valid_length(kind: str, nodes: int, rule: str) -> None:
    """Filler past the valid nodes is neither accepted nor subtracted."""
    p, q = pair(kind, 3, 3)
    joint = emitted(RULES[rule], p, q, length=lambda path: nodes)
    assert error(joint, p) < EXACT
    assert joint[nodes:].sum() == 0


@pytest.mark.parametrize("rule", RULES)
def test_chain_with_a_length_that_looks_back(rule: str) -> None:
    """Adaptive length may look at drafts before the one it drops."""
    p, q = pair("plain", 3, 3)
    joint = emitted(RULES[rule], p, q, length=lambda path: 2 if path[0] == 1 else 4)
    assert error(joint, p) < EXACT
    peeks = emitted(RULES[rule], p, q, length=lambda path: 1 if path[0] == 1 else 4)
    assert error(peeks, p) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_chain_acceptance_given_the_text(kind: str, rule: str) -> None:
    """What replay rests on: given the text x, depth j survives with min(1, q_j(x) / p_j(x)); under
    block verification with the least product of ratios q / p so far, or 1.
    """
    p, q = pair(kind, 3, 3)
    joint = emitted(RULES[rule], p, q)
    text = joint.sum(0)
    survival = together = torch.ones_like(text)
    for j in range(3):
        ratio = (q[j] / p[j]).nan_to_num(0.0, posinf=0.0)  # texts that p lacks do not occur
        ratio = ratio.reshape(*ratio.shape, *(1,) * (3 - j))
        together = together * ratio
        token = survival * ratio.clamp(max=1)
        survival = token if rule == "chain" else torch.minimum(survival, together)
        reached = joint[j + 1 :].sum(0)
        torch.testing.assert_close(reached, survival * text, atol=EXACT, rtol=0)


def expected(joint: Tensor) -> float:
    """Accepted drafts per round."""
    by_count = joint.flatten(1).sum(1)
    return float((by_count * torch.arange(len(by_count))).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("V", "K"), SIZES)
def test_block_keeps_at_least_what_chain_keeps(kind: str, V: int, K: int) -> None:
    p, q = pair(kind, V, K)
    token, block = (expected(emitted(rule, p, q)) for rule in (accept.chain, accept.block))
    assert block > token - EXACT
    if kind == "plain" and K > 1:
        assert block > token + 0.01
    if K == 1:  # one draft leaves nothing to combine
        assert block == pytest.approx(token, abs=EXACT)


def test_block_on_the_papers_example() -> None:
    """Sun et al. 2403.10444, section 2: 10/9 drafts are kept token by token, 11/9 as a block."""

    def same(law: list[float], K: int) -> Laws:
        first = torch.tensor(law, dtype=torch.float64)
        return [first.expand(*(2,) * j, 2).contiguous() for j in range(K)]

    p, q = same([1 / 3, 2 / 3], 3), same([2 / 3, 1 / 3], 2)
    assert expected(emitted(accept.chain, p, q)) == pytest.approx(10 / 9, abs=EXACT)
    assert expected(emitted(accept.block, p, q)) == pytest.approx(11 / 9, abs=EXACT)


def test_rounds_of_blocks_keep_the_law() -> None:
    """Seven tokens take three rounds of two drafts at the least; each law depends on all before."""
    p, q = random_laws(2, 9, 5, 0.4), random_laws(2, 8, 6, 0.4)
    joint = over_rounds(accept.block, p, q, K=2, tokens=7)
    torch.testing.assert_close(joint, continued(p[:7], ()), atol=EXACT, rtol=0)


def played(rule: str) -> float:
    """p-value of four tokens, which keyed rounds of two drafts wrote one after another."""
    rows, V, k = 60_000, 3, 2
    p, q = random_laws(V, 2, 1)[1], random_laws(V, 2, 2)[1]  # (V, V): laws after each token
    ids = torch.arange(rows)
    position, text = torch.zeros_like(ids), torch.zeros(rows, 13, dtype=torch.long)
    for turn in range(4):
        noise = Noise(0, ids, torch.full_like(ids, turn))
        tokens = [text[ids, position]]
        for j in range(k):
            uniform = noise.uniform(Purpose.DRAFT, position + 1 + j, j)
            tokens.append(pick(q[tokens[-1]], uniform))
        path = torch.stack(tokens, dim=1)
        draws = KeyedDraws(noise, position)
        result = RULES[rule](path[:, 1:], 1 + k + 0 * ids, p[path], q[path[:, :-1]], draws)
        for j in range(k):
            text[ids, position + 1 + j] = path[:, 1 + j]
        position = position + 1 + result.count
        text[ids, position] = result.token
    code = sum(text[:, 1 + i] * V ** (3 - i) for i in range(4))
    law = continued([p[0], p, *(p.expand(*(V,) * j, V, V) for j in (1, 2))], ())
    return chi_square(torch.bincount(code, minlength=V**4).tolist(), law.flatten().tolist())


UNIFORM = Noise.uniform


def by_position(self: Noise, purpose: Purpose, position: Tensor, node: int) -> Tensor:
    """A position draws the same number in every round that comes by."""
    return UNIFORM(Noise(self.seed, self.rows, 0 * self.round), purpose, position, node)


@pytest.mark.parametrize("rule", RULES)
def test_keyed_rounds_keep_the_law(rule: str) -> None:
    """Rounds meet the same positions again, under other numbers."""
    assert played(rule) > 1e-3


def test_noise_by_position_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was refused at a place says something of the coin there."""
    monkeypatch.setattr(Noise, "uniform", by_position)
    assert played("block") < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_nothing_proposed(rule: str) -> None:
    """A batch without a draft still takes the target's token, from the bonus token's own noise."""
    p = random_laws(4, 1, 3)[0].expand(2, 1, -1)
    draws = keyed(2)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    ones = torch.ones(2, dtype=torch.long)
    result = RULES[rule](nothing, ones, p, torch.zeros(2, 0, 4), draws)
    wide = torch.zeros(2, 3, dtype=torch.long)
    beside = RULES[rule](wide, ones, p.expand(-1, 4, -1), p.expand(-1, 3, -1), keyed(2))
    assert result.count.tolist() == [0, 0] and result.token.equal(beside.token)


TREES = {
    "two, two": (StaticTree(((0,), (1,), (0, 0), (0, 1))), [0, 2, 0, 1, 2]),
    "only the second goes on": (StaticTree(((0,), (1,), (1, 0), (1, 2))), [0, 1, 2, 0, 1]),
    "a chain": (StaticTree(((0,), (0, 0))), [0, 1, 1]),
    "the whole vocabulary": (StaticTree(((0,), (1,), (2,), (2, 0))), [0, 0, 1, 2, 2]),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["plain", "p has zeros"])
def test_match_tree_keeps_the_target_law(kind: str, tree: str) -> None:
    """And accepts exactly as far as the text is a path in the tree."""
    shape, tokens = TREES[tree]
    p = pair(kind, 3, 2)[0]
    joint = emitted_tree(match_tree, p, p[:2], shape, tokens)
    assert error(joint, p) < EXACT
    first = [tokens[i] for i, path in enumerate(shape.paths, 1) if len(path) == 1]
    torch.testing.assert_close(joint[1:].sum((0, 2, 3))[first], p[0][first], atol=EXACT, rtol=0)
    assert joint[1:].sum((0, 2, 3)).sum() == pytest.approx(float(p[0][first].sum()), abs=EXACT)
    assert joint[0, first].sum() == 0, "a text that goes along the tree accepts"
    paths = [
        (tokens[1 + shape.paths.index(path[:1])], tokens[i])
        for i, path in enumerate(shape.paths, 1) if len(path) == 2
    ]  # fmt: skip
    law = continued(p, ())
    along = sum(float(law[path].sum()) for path in paths)
    assert float(joint[2].sum()) == pytest.approx(along, abs=EXACT)


DRAWN = {
    "siblings": StaticTree.of_widths([3], drawn=True),
    "two, two": StaticTree(((0,), (1,), (0, 0), (0, 1)), drawn=True),
    "the second goes on": StaticTree(((0,), (1,), (1, 0)), drawn=True),
    "a chain": StaticTree.of_widths([1, 1], drawn=True),
}


@pytest.mark.parametrize("tree", DRAWN)
@pytest.mark.parametrize("kind", KINDS)
def test_without_replacement_keeps_the_target_law(kind: str, tree: str) -> None:
    """Where q has fewer tokens than a node has children, the surplus children are never taken."""
    shape = DRAWN[tree]
    p, q = pair(kind, 3, shape.k)
    joint = emitted_tree(accept.without_replacement, p, q, shape)
    assert error(joint, p) < EXACT
    if tree == "a chain":  # one child a node: the chain rule
        torch.testing.assert_close(joint, emitted(accept.chain, p, q), atol=EXACT, rtol=0)
    if tree == "siblings" and kind == "plain":
        assert float(joint[1:].sum()) == pytest.approx(1, abs=EXACT), "all tokens are offered"


def sharpened(laws: Laws) -> Laws:
    return normed([law**1.3 for law in laws])


@pytest.mark.parametrize(("V", "K"), SIZES)
def test_wrong_rules_are_caught(V: int, K: int) -> None:
    """Three tempting mistakes bend the text's law, and the check above sees each of them."""
    p, q = pair("plain", V, K)
    assert error(emitted(corrected_from_p, p, q), p) > 1e-3
    # Judged by a q that is not the law the draft was drawn from (say, before the sampler).
    assert error(emitted(accept.chain, p, q, drawn=sharpened(q)), p) > 1e-3
    # An argmax draft judged by q(x), as if it had been sampled.
    assert error(emitted(accept.chain, p, q, drawn=points(q)), p) > 1e-3
    assert error(emitted(accept.chain, p, points(q)), p) < EXACT


@pytest.mark.parametrize("kind", ["plain", "p has zeros"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("guess", [[0, 0, 0], [2, 1, 2], [1, 1, 0]])
def test_match_keeps_the_target_law(kind: str, nodes: int, guess: list[int]) -> None:
    """A deterministic draft changes how many passes there are, never the text."""
    p = pair(kind, 3, 3)[0]
    proposed = [torch.zeros_like(law) for law in p[:3]]
    for law, token in zip(proposed, guess, strict=True):
        law[..., token] = 1.0
    joint = emitted(match, p, proposed, length=lambda path: nodes)
    assert error(joint, p) < EXACT
    assert joint[nodes:].sum() == 0
    for j in range(nodes - 1):  # accepted is exactly where the text goes along the guess
        along = joint.sum(0)[tuple(guess[: j + 1])].sum()
        torch.testing.assert_close(joint[j + 1 :].sum(), along, atol=EXACT, rtol=0)


def test_match_that_takes_the_token_one_row_late_is_caught() -> None:
    """The token after m accepted drafts stands in row m, not m + 1."""
    p, q = pair("point masses", 3, 2)

    def late(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
        choice = draws.pick(p)
        right = accept.match(drafts, length, choice)
        at = (right.count + 1).clamp(max=choice.shape[1] - 1)
        return Accepted(right.count, choice.gather(1, at.unsqueeze(1)).squeeze(1))

    assert error(emitted(late, p, q), p) > 1e-3


def test_rows_are_judged_alone() -> None:
    """Ragged rows in one batch give what each gives alone."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(6, 4, 5, generator=generator).softmax(-1)
    q = torch.rand(6, 3, 5, generator=generator).mul(3).softmax(-1)
    drafts = torch.randint(0, 5, (6, 3), generator=generator)
    length = torch.tensor([1, 2, 3, 4, 4, 2])
    rows, rounds = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([1, 2, 3, 4, 5, 6])
    position = torch.tensor([7, 8, 9, 3, 2, 1])

    def run(some: slice) -> Accepted:
        draws = KeyedDraws(Noise(0, rows[some], rounds[some]), position[some])
        return accept.chain(drafts[some], length[some], p[some], q[some], draws)

    whole = run(slice(None))
    assert whole.count.unique().numel() > 1
    for b in range(6):
        alone = run(slice(b, b + 1))
        assert (alone.count, alone.token) == (whole.count[b : b + 1], whole.token[b : b + 1])


def keyed(rows: int, position: int = 5) -> KeyedDraws:
    ids = torch.arange(rows)
    return KeyedDraws(Noise(0, ids, torch.ones_like(ids)), torch.full_like(ids, position))


def test_keyed_coins() -> None:
    """Chance 0 never happens, chance 1 always does, and coins of one round are independent."""
    n = 40_000
    coins = keyed(n).accept(torch.tensor([0.0, 1.0, 0.3, 0.3]).expand(n, -1))
    assert not coins[:, 0].any() and coins[:, 1].all()
    both = torch.stack([coins[:, 2], coins[:, 3], coins[:, 2] & coins[:, 3]]).double().mean(1)
    assert (both - torch.tensor([0.3, 0.3, 0.09])).abs().max() < 4 * 0.5 / n**0.5


def test_keyed_coin_and_correction_are_independent() -> None:
    """A correction that reuses the coin's number leans towards what the coin rejected."""
    n = 40_000
    draws = keyed(n)
    coin = draws.accept(torch.full((n, 1), 0.5))[:, 0]
    token = draws.pick(torch.full((n, 2), 0.5))
    assert abs((coin & (token == 1)).double().mean().item() - 0.25) < 4 * 0.5 / n**0.5
