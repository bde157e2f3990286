"""Trees: how they grow, that serving's tree is training's laws, and that decoding with one writes
what the target alone would write.

    .venv/bin/pytest tests/drafters/test_trees.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

import contracts as contract
from draftsmith.drafters.base import Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import Proposal, grow
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Noise, Purpose, Sampler
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.decoder.loop import Decoder
from exact import chi_square
from tree_checks import ABLE, DRAWN, GREEDY, PLAIN, SHAPES, UNEVEN, check_tree, play

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
        ("medusa", Tree(4, budget=9), "tree of 9, k=4, branch 10: deeper than this drafter's 3"),
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
