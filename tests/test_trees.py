"""Trees: how they grow, that serving's tree is training's laws, and that decoding with one writes
what the target alone would write.

    .venv/bin/pytest tests/test_trees.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import test_contract as contract
import test_decoder as decoding
import test_parity as parity
import tiny
from draftsmith.drafters import batch as batches
from draftsmith.drafters.attention import tree_shape
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import Proposal, grow
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Noise, Purpose, Sampler
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.parity import Parity, compare, compare_trees
from draftsmith.eval.replay import summarise
from draftsmith.eval.subject import top_gap
from draftsmith.eval.walk import walk
from exact import chi_square

GREEDY, PLAIN, WARM = Sampler(0.0), Sampler(1.0), Sampler(0.8, top_k=8, top_p=0.95)
ABLE = ("eagle", "medusa", "hydra", "toy-block")  # families that draft trees
UNEVEN = StaticTree(((0,), (1,), (2,), (0, 0), (0, 2), (2, 1), (0, 0, 0), (2, 1, 0), (2, 1, 3)))
DRAWN = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)), drawn=True)
SHAPES = [Tree(3, budget=7, branch=3), Tree(3, budget=12, branch=12), UNEVEN]


# Bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tree(4, budget=3), "budget: 3 nodes cannot hold a path of k=4; raise it or lower"),
        (lambda: Tree(0, budget=3), "k: 0 is not a draft length; use 1 or more"),
        (lambda: Tree(2, budget=3, branch=0), "branch: 0 expands nothing; use 1 or more"),
        (lambda: StaticTree(()), r"tree: no paths are given; give at least \(0,\)"),
        (lambda: StaticTree(((0,), ())), r"tree: \(\) is no path; give ranks from 0"),
        (lambda: StaticTree(((-1,),)), r"tree: \(-1,\) is no path"),
        (lambda: StaticTree(((1, 0),)), r"tree: \(1, 0\) hangs in the air; add \(1,\)"),
        (lambda: StaticTree(((0,), (0,))), "tree: a path is given twice"),
        (lambda: StaticTree(((1,),), drawn=True), r"tree: \(1,\) is drawn before its elder"),
    ],
)
def test_no_tree(make: Callable[[], Policy], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "policy", "words"),
    [
        ("ngram", SHAPES[0], "tree of 7, k=3, branch 3: a ngram drafter drafts chains only"),
        ("small", UNEVEN, "static tree of 9, k=3: a small drafter drafts chains only; give k"),
        (
            "medusa",
            Tree(4, budget=9),
            "tree of 9, k=4, branch 10: deeper than this drafter's 3",
        ),
        ("mtp chain", Tree(4, budget=9), "deeper than this drafter's 3; lower k"),
        ("hydra", Policy(4), "chain k=4: deeper than this drafter's 3; lower k"),
        ("medusa", StaticTree(((0,), (47,))), "rank 47 of 30 draft tokens; use less"),
    ],
)
def test_a_tree_that_the_drafter_cannot_draft(name: str, policy: Policy, words: str) -> None:
    """Told when the decoder is built, before any compute."""
    made = contract.drafter(name)
    with pytest.raises(UserError, match=words) as error:
        Decoder(made.target, made, policy)
    assert "\n" not in str(error.value)


def test_a_drawn_tree_at_temperature_0() -> None:
    made = contract.drafter("eagle")
    decoder = Decoder(made.target, made, DRAWN)
    with pytest.raises(UserError, match="nothing is drawn at temperature 0; use a ranked tree"):
        decoder.generate([[5]], GREEDY, 4)
    assert decoder.clock.prefill == 0


# Growing


@dataclass
class Laws:
    """A forward whose law depends on the whole path, and that checks what it is told of it.

    table (code of the path) -> logits (V,); paths are coded in base V + 1.
    """

    V: int
    depth: int
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        codes = (self.V + 1) ** (self.depth + 1)
        self.table = 1.5 * torch.randn(codes, self.V, generator=generator, dtype=torch.float64)
        self.fed = torch.zeros(0, 0, dtype=torch.long)

    def code(self, path: tuple[int, ...]) -> int:
        return sum((x + 1) * (self.V + 1) ** i for i, x in enumerate(path))

    def law(self, path: tuple[int, ...], temperature: float = 1.0) -> Tensor:
        """path: the root and what follows it."""
        return (self.table[self.code(path)] / temperature).softmax(-1)

    def __call__(self, tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
        W, F = seen.shape[1:]
        self.fed = torch.cat([self.fed, tokens], dim=1) if F > W else tokens
        assert self.fed.shape[1] == F
        out = []
        for b in range(len(tokens)):
            for w in range(W):
                line = seen[b, w].nonzero().flatten().tolist()
                assert line[-1] == F - W + w, "a node sees itself, and nothing fed beside it"
                assert len(line) == 1 or int(parent[b, w]) == line[-2]
                out.append(self.table[self.code(tuple(self.fed[b, line].tolist()))])
        return torch.stack(out).view(len(tokens), W, self.V)


def rooted(laws: Laws, policy: Policy, roots: list[int], sampler: Sampler = PLAIN) -> Proposal:
    root = torch.tensor(roots)
    noise = Noise(0, torch.arange(len(roots)), torch.zeros(len(roots), dtype=torch.long))
    position = torch.full_like(root, 5)
    return grow(root, position, policy, VocabMap(laws.V), sampler, noise, laws)


def paths(proposal: Proposal, b: int) -> list[tuple[int, ...]]:
    """Each node's tokens from the root on; a parent stands before its children."""
    out: list[tuple[int, ...]] = []
    for i, token in enumerate(proposal.tokens[b].tolist()):
        parent = int(proposal.parents[b, i])
        assert (parent == -1 and i == 0) or 0 <= parent < i
        out.append((*(out[parent] if i else ()), token))
    assert len(set(out)) == len(out)
    return out


def likelihood(laws: Laws, path: tuple[int, ...], temperature: float) -> float:
    chance = 1.0
    for i in range(1, len(path)):
        chance *= float(laws.law(path[:i], temperature)[path[i]])
    return chance


@pytest.mark.parametrize("budget", [3, 5, 11, 24])
@pytest.mark.parametrize("sampler", [GREEDY, PLAIN, Sampler(0.5)])
def test_wide_trees_are_the_likeliest_prefixes(budget: int, sampler: Sampler) -> None:
    """With branch >= budget: the best of all prefixes there are, by brute force."""
    laws, roots, k = Laws(4, 3, seed=budget), [0, 2, 3], 3
    proposal = rooted(laws, Tree(k, budget=budget, branch=budget), roots, sampler)
    assert proposal.q is None and proposal.length.tolist() == [budget + 1] * 3
    assert proposal.margin is not None
    for b, root in enumerate(roots):
        every = [(root, *p) for n in range(1, k + 1) for p in product(range(4), repeat=n)]
        temperature = sampler.temperature or 1.0
        every.sort(key=lambda path: -likelihood(laws, path, temperature))
        assert set(paths(proposal, b)) == {(root,), *every[:budget]}


@pytest.mark.parametrize("branch", [1, 2, 3])
@pytest.mark.parametrize("budget", [4, 8, 40])
def test_narrow_trees_expand_the_likeliest(branch: int, budget: int) -> None:
    """EAGLE-2 in plain loops; a budget above all nodes seen keeps them all."""
    laws, roots, k = Laws(5, 4, seed=branch), [1, 4], 4
    proposal = rooted(laws, Tree(k, budget=budget, branch=branch), roots)
    for b, root in enumerate(roots):
        front, found = [(root,)], []
        for _ in range(k):
            new = []
            for path in front:
                best = laws.law(path).topk(branch).indices.tolist()
                new += [(*path, x) for x in best]
            found += new
            front = sorted(new, key=lambda path: -likelihood(laws, path, 1.0))[:branch]
        found.sort(key=lambda path: -likelihood(laws, path, 1.0))
        assert set(paths(proposal, b)) == {(root,), *found[:budget]}


def test_a_sure_child_never_displaces_its_parent() -> None:
    """Chances of 1 tie with the parent's own: the tree stays connected."""
    laws = Laws(3, 4)
    laws.table[:] = torch.tensor([60.0, 0.0, 0.0])
    proposal = rooted(laws, Tree(4, budget=4, branch=3), [1])
    assert paths(proposal, 0) == [(1,), (1, 0), (1, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0, 0)]


def test_margin() -> None:
    """How far the nearest choice was from another one: in the cut, an expansion, a node's own."""
    laws = Laws(4, 2)
    z = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    laws.table[:] = z

    def margin(tree: Tree) -> float:
        proposal = rooted(laws, tree, [1])
        assert proposal.margin is not None
        return float(proposal.margin)

    assert margin(Tree(1, budget=2, branch=4)) == pytest.approx(1.0)
    assert margin(Tree(1, budget=4, branch=4)) == float("inf")
    laws.table[:, 1] = 3.0 - 1e-5
    assert margin(Tree(1, budget=1, branch=4)) == pytest.approx(1e-5, abs=1e-6)
    # The second best child is not even looked at, but nearly was the one.
    assert margin(Tree(1, budget=1, branch=1)) == pytest.approx(1e-5, abs=1e-6)
    assert margin(Tree(2, budget=2, branch=1)) == pytest.approx(1e-5, abs=1e-6)


def test_static_trees_take_ranks() -> None:
    laws, roots = Laws(4, 3), [0, 3]
    proposal = rooted(laws, UNEVEN, roots)
    for b, root in enumerate(roots):
        want = {(): (root,)}
        for path in UNEVEN.paths:
            above = want[path[:-1]]
            order = laws.law(above).argsort(descending=True).tolist()
            want[path] = (*above, order[path[-1]])
        assert paths(proposal, b) == list(want.values())


def test_of_widths() -> None:
    tree = StaticTree.of_widths([2, 1])
    assert tree.paths == ((0,), (1,), (0, 0), (1, 0)) and tree.k == 2
    assert tree.parents == (-1, 0, 0, 1, 2) and tree.nodes == 5


def ordered_pairs(law: Tensor) -> Tensor:
    """(V, V): chance of a first and a second child drawn without replacement."""
    rest = 1 - law.unsqueeze(1)
    out = law.unsqueeze(1) * law.unsqueeze(0) / rest
    return out.fill_diagonal_(0.0)


def sibling_counts() -> tuple[list[float], list[float]]:
    """Counts and chances of the root's two children and the elder's child."""
    laws = Laws(4, 2, seed=3)
    tree = StaticTree(((0,), (1,), (0, 0)), drawn=True)
    proposal = rooted(laws, tree, [2] * 3000)
    assert proposal.q is not None
    torch.testing.assert_close(proposal.q[0, 0].double(), laws.law((2,)), atol=1e-6, rtol=0)
    first, second, below = proposal.tokens[:, 1:].T
    chance = ordered_pairs(laws.law((2,))).unsqueeze(2)
    chance = chance * torch.stack([laws.law((2, x)) for x in range(4)]).unsqueeze(1)
    counts = torch.bincount((first * 4 + second) * 4 + below, minlength=64)
    return counts.tolist(), chance.flatten().tolist()


def test_drawn_children_come_without_replacement() -> None:
    assert chi_square(*sibling_counts()) > 1e-3


UNIFORM = Noise.uniform


def one_draw_for_siblings(self: Noise, purpose: Purpose, position: Tensor, node: int) -> Tensor:
    return UNIFORM(self, purpose, position, 0 if purpose is Purpose.DRAFT else node)


def test_siblings_that_share_a_draw_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "uniform", one_draw_for_siblings)
    assert chi_square(*sibling_counts()) < 1e-6


# The contract: what is served is what is trained


@dataclass
class Moment:
    """A proposal of one row, and the tokens known to it, root included."""

    known: list[int]
    tokens: list[int]
    parents: list[int]
    q: Tensor | None


@torch.no_grad()
def play(made: Drafter, texts: list[list[int]], ids: list[int], policy: Policy) -> list:
    """Four rounds x rows, each of which goes down another path of the tree."""
    known = [list(text) for text in texts]
    state = made.start(len(known), max(map(len, known)) + 5 * (policy.slots + policy.k))
    contract.feed(made, state, [text[:-1] for text in known], [0] * len(known))
    made.begin(state)
    out = []
    for turn in range(4):
        root = torch.tensor([text[-1] for text in known])
        noise = Noise(11, torch.tensor(ids), torch.full((len(ids),), turn))
        proposal = made.propose(state, root, policy, PLAIN, noise)
        moments, committed = [], []
        for b, text in enumerate(known):
            tokens, parents = proposal.tokens[b].tolist(), proposal.parents[b].tolist()
            q = None if proposal.q is None else proposal.q[b]
            moments.append(Moment(list(text), tokens, parents, q))
            committed.append(len(text) - 1)
            text += [*line(tokens, parents, (5 * turn + 3 * ids[b]) % len(tokens)), 2 + turn]
        contract.feed(made, state, [text[:-1] for text in known], committed)
        out.append(moments)
    return out


def line(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    return [] if node == 0 else [*line(tokens, parents, parents[node]), tokens[node]]


def check_tree(made: Drafter, policy: Policy) -> None:
    """Every inner node's children are the right ranks of (or its q is) unroll's law there."""
    moments = [m for row in play(made, contract.prompts(4), [0, 1, 2, 3], policy) for m in row]
    texts, where = [], []
    for m in moments:
        for node in sorted(set(m.parents) - {-1}):
            path = line(m.tokens, m.parents, node)
            texts.append((m.known + path + [2 + len(texts) % 40] * policy.k)[: len(m.known) + 5])
            where.append((m, node, len(path)))
    batch = contract.read(made.target, texts, made.taps)
    anchors = torch.tensor([[len(m.known) - 2] for m, _, _ in where])
    later = (torch.arange(batch.tokens.shape[1]) > anchors).unsqueeze(2)
    for tap, values in batch.features.items():
        batch.features[tap] = torch.where(later, 30 * torch.randn(values.shape), values)
    with torch.no_grad():
        unroll = made.unroll(batch, batches.align(batch, policy.k, anchors))
        logits = made.logits(unroll.hidden, unroll.prev, unroll.depth)
    deep = 0
    for index, (m, node, depth) in zip(unroll.index[:, 0], where, strict=True):
        z = logits[index[depth]]
        children = [i for i, parent in enumerate(m.parents) if parent == node]
        taken = [m.tokens[i] for i in children]
        order = made.vocab.to_target(z.argsort(descending=True)).tolist()
        if m.q is not None:
            torch.testing.assert_close(m.q[node], z.softmax(-1), atol=1e-4, rtol=0)
            assert len(set(taken)) == len(taken)
        elif isinstance(policy, StaticTree):
            assert taken == [order[policy.paths[i - 1][-1]] for i in children]
        else:
            assert set(taken) == set(order[: len(taken)])
        deep += depth > 0
    assert deep > 15, "few nodes below the first depth were compared"


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *product(ABLE, [*SHAPES, DRAWN]),
        *product(("eagle1", "mtp", "mtp chain"), (SHAPES[0], DRAWN)),
    ],
    ids=str,
)
def test_tree_is_unroll(name: str, policy: Policy) -> None:
    """Faults: a node that sees a sibling, or misses an elder; positions by slot; a wrong parent."""
    check_tree(contract.drafter(name), policy)


def test_tree_is_unroll_on_a_windowed_target() -> None:
    check_tree(contract.drafter("eagle", "Gemma3"), SHAPES[0])


@pytest.mark.parametrize("policy", [SHAPES[0], DRAWN], ids=str)
@pytest.mark.parametrize("name", ABLE)
def test_rows_grow_alone(name: str, policy: Policy) -> None:
    """A row's trees in a ragged batch are those that it grows alone."""
    made, texts = contract.drafter(name), contract.prompts(3)
    together = play(made, texts, [4, 9, 2], policy)
    for b, row in enumerate((4, 9, 2)):
        for (alone,), among in zip(play(made, [texts[b]], [row], policy), together, strict=True):
            beside = among[b]
            assert (alone.tokens, alone.parents) == (beside.tokens, beside.parents)
            assert alone.known == beside.known


# Decoding


def check_greedy(made: Drafter, family: str, policy: Policy, count: int = 5) -> int:
    """Decoded texts are transformers' own, end tokens included; returns the accepted drafts."""
    prompts = decoding.ragged(count)
    texts = Decoder(made.target, made, policy).generate(prompts, GREEDY, 20)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.tokens == decoding.generated(family, tuple(prompt), 20, tiny.EOS)
        decoding.check_rounds(text, policy.k)
    return sum(decoding.accepted(texts))


@pytest.mark.parametrize("policy", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("eagle", "Llama"),
        ("eagle", "Gemma3"),
        ("toy-block", "Llama"),
        ("medusa", "Llama"),
        ("hydra", "Llama"),
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


RIGHT = decoding.accept.without_replacement


def test_a_wrong_rule_bends_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above has teeth at the same number of rows."""
    monkeypatch.setattr(decoding.accept, "without_replacement", judged_by_the_first_law)
    assert p_value(TWO, PLAIN, monkeypatch) < 1e-6


# Parity


def trees_agree(made: Drafter, sampler: Sampler, policy: Policy) -> tuple[list[Text], Parity]:
    """Forty texts decoded with a match tree, against the walk along them."""
    prompts = [[5], *tiny.prompts(39, 2, decoding.VOCAB)]
    texts = Decoder(made.target, made, policy).generate(prompts, sampler, 20, seed=7)
    walks = walk(made, parity.read(made.target, texts, sampler, made), policy)
    return texts, compare_trees(texts, walks, policy.k)


@pytest.mark.parametrize(
    ("name", "sampler", "policy"),
    [
        *(("eagle", sampler, policy) for sampler in (GREEDY, WARM) for policy in SHAPES),
        ("eagle1", GREEDY, SHAPES[0]),
        ("mtp", WARM, SHAPES[1]),
        ("mtp chain", WARM, UNEVEN),
        ("toy-block", GREEDY, SHAPES[0]),
        ("toy-block", WARM, UNEVEN),
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
    walk(made, batch, Policy(3))
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
