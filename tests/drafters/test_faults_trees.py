"""Planted faults in trees and blocks: each turns red the very check that is green without it.

.venv/bin/pytest tests/drafters/test_faults_trees.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts as contract
import decodings as decoding
import parities as parity
import tiny
import tree_checks as trees
from draftsmith.drafters import grow
from draftsmith.drafters.base import Policy
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.parts import one_layer
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.attention import Step
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance import walk
from draftsmith.eval.acceptance.parity import compare
from draftsmith.eval.acceptance.replay import summarise
from draftsmith.eval.certify.fixture import Fixture
from draftsmith.eval.certify.texts import text_steps
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder import round as round_module
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.round import Rounds

Patch = pytest.MonkeyPatch
BUSHY = Tree(3, budget=7, branch=3)
WARM = Sampler(0.8)


# The checks


def texts(sampler: Sampler) -> None:
    """What a tree decodes is the target's own text."""
    made = parity.drafter_for("eagle", "Llama")
    if sampler.greedy:
        assert trees.check_greedy(made, "Llama", BUSHY) > 20
        return
    prompts = decoding.ragged(5)
    plain = Decoder(made.target).generate(prompts, sampler, 20)
    tree = Decoder(made.target, made, BUSHY).generate(prompts, sampler, 20)
    assert [t.tokens for t in tree] == [t.tokens for t in plain]


def certified() -> None:
    """What `draftsmith certify` says of the target alone."""
    prompts = decoding.ragged(5)
    theirs = decoding.independent("Llama", decoding.VOCAB)
    fixture = Fixture(tiny.target("Llama", vocab=decoding.VOCAB), theirs, {}, prompts, 16)
    for name, step in text_steps(fixture):
        passed, figure = step()
        assert passed, f"{name}: {figure}"


def served(name: str) -> None:
    """A proposed tree is what unroll's laws say."""
    for policy in (trees.UNEVEN, trees.DRAWN):
        trees.check_tree(contract.drafter(name), policy)


def agree(sampler: Sampler) -> None:
    """Decoded rounds are the walk's, as integers."""
    _, found = trees.trees_agree(parity.drafter_for("eagle", "Llama"), sampler, BUSHY)
    assert found.holds, found.report()


def blocks() -> None:
    """Counts under block verification follow its survivals."""
    made, policy = parity.drafter_for("eagle", "Llama"), Policy(3, block=True)
    prompts = [[5], *tiny.prompts(149, 2, decoding.VOCAB)]
    written = Decoder(made.target, made, policy).generate(prompts, Sampler(1.0), 20, seed=7)
    tables = parity.replayed(made, written, Sampler(1.0), 3)
    found = compare(written, summarise(tables, 3, block=True), deterministic=False)
    assert found.holds, found.report()


# The faults


def no_gather(patch: Patch) -> None:
    """The accepted path's keys stay where the tree had them."""
    patch.setattr(Slab, "gather", lambda self, start, path: None)


def path_by_count(patch: Patch) -> None:
    """The path is taken for the first nodes, as if the tree were a chain."""

    def wrong(*args: Any) -> accept.Accepted:
        out = along(*args)
        assert out.path is not None
        out.path = torch.arange(out.path.shape[1]).expand_as(out.path)
        return out

    along = accept.match_tree
    patch.setattr(accept, "match_tree", wrong)


def reshaped(patch: Patch, module: Any, change: Callable[[Tensor, Tensor], Any]) -> None:
    tree_shape = module.tree_shape
    patch.setattr(module, "tree_shape", lambda parents: change(*tree_shape(parents)))


def ancestors_dropped(patch: Patch) -> None:
    """A node sees itself and the committed text only."""
    wide = round_module.tree_step

    def wrong(slab: Slab, depth: Tensor, above: Tensor) -> Step:
        own = torch.eye(above.shape[1], dtype=torch.bool).expand_as(above)
        return wide(slab, depth, own)

    patch.setattr(round_module, "tree_step", wrong)


def siblings_seen(patch: Patch) -> None:
    """A node sees every node before it, as in a chain."""
    wide = round_module.tree_step

    def wrong(slab: Slab, depth: Tensor, above: Tensor) -> Step:
        return wide(slab, depth, torch.ones_like(above).tril())

    patch.setattr(round_module, "tree_step", wrong)


def positions_by_slot(patch: Patch) -> None:
    """Nodes stand one after another instead of siblings side by side."""
    right = round_module.tree_step

    def wrong(slab: Slab, depth: Tensor, above: Tensor) -> Step:
        return right(slab, torch.arange(depth.shape[1]).expand_as(depth), above)

    patch.setattr(round_module, "tree_step", wrong)


def noise_by_slot(patch: Patch) -> None:
    """The target's own draw after a node is keyed by the node's number, not by its place."""

    def wrong(self: Rounds) -> accept.Accepted:
        depth = self.depth
        self.depth = torch.arange(depth.shape[1]).expand_as(depth)
        out = judge(self)
        self.depth = depth
        return out

    judge = Rounds._judge
    patch.setattr(Rounds, "_judge", wrong)


def drafts_see_siblings(patch: Patch) -> None:
    """In propose a node sees all that was fed before it."""
    tree_seen = one_layer.tree_seen

    def wrong(start: Tensor, seen: Tensor, view: int) -> tuple[Tensor, Tensor]:
        return tree_seen(start, torch.ones_like(seen), view)

    patch.setattr(one_layer, "tree_seen", wrong)


def drafts_follow_the_root(patch: Patch) -> None:
    """In propose every node goes on from the root's state instead of its parent's."""

    def wrong(*args: Any) -> grow.Proposal:
        *rest, forward = args
        return right(*rest, lambda tokens, parent, seen: forward(tokens, 0 * parent, seen))

    right = one_layer.grow
    patch.setattr(one_layer, "grow", wrong)


def label_one_late(patch: Patch) -> None:
    """The walk judges a node of depth j by the token after the one it proposes."""
    reshaped(patch, walk, lambda depth, above: (depth + (depth > 0).long(), above))


def walk_reads_the_future(patch: Patch) -> None:
    """The features beside x_t are those of x_{t+1}."""

    def wrong(self: Target, batch: Batch, taps: Any) -> Batch:
        out = read(self, batch, taps)
        out.features = {tap: of.roll(-1, dims=1) for tap, of in out.features.items()}
        return out

    read = Target.read
    patch.setattr(Target, "read", wrong)


def excused(fault: Callable[[Patch], None], patch: Patch) -> None:
    """A fault beside a margin that calls every split a tie."""
    fault(patch)

    def wrong(*args: Any) -> grow.Proposal:
        out = right(*args)
        out.margin = torch.zeros_like(out.length, dtype=torch.float)
        return out

    right = one_layer.grow
    patch.setattr(one_layer, "grow", wrong)


def block_judged_as_chain(patch: Patch) -> None:
    """Token by token, where replay expects block verification."""
    patch.setattr(accept, "block", accept.chain)


Check = Callable[[], None]
GREEDY = Sampler(0.0)
FAULTS: list[tuple[Callable[[Patch], None], Check]] = [
    *(
        (fault, check)
        for fault in (no_gather, path_by_count, ancestors_dropped, siblings_seen, positions_by_slot)
        for check in (partial(texts, GREEDY), certified)
    ),
    (noise_by_slot, partial(texts, WARM)),
    (noise_by_slot, certified),
    (drafts_see_siblings, partial(served, "eagle")),
    (drafts_follow_the_root, partial(served, "eagle")),
    (label_one_late, partial(agree, GREEDY)),
    (label_one_late, partial(agree, WARM)),
    (walk_reads_the_future, partial(agree, GREEDY)),
    (partial(excused, label_one_late), partial(agree, GREEDY)),
    (partial(excused, walk_reads_the_future), partial(agree, WARM)),
    (block_judged_as_chain, blocks),
]


def named(part: Any) -> str:
    """A test id."""
    if isinstance(part, partial):
        return "-".join([part.func.__name__, *map(named, part.args)])
    if isinstance(part, Sampler):
        return f"T={part.temperature:g}"
    return part if isinstance(part, str) else part.__name__


CHECKS = {named(check): check for _, check in FAULTS}


@pytest.mark.parametrize("name", CHECKS)
def test_green_without_a_fault(name: str) -> None:
    """Fault: a check that is red anyway."""
    CHECKS[name]()


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=named)
def test_red_with_a_fault(
    fault: Callable[[Patch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault shows in the check."""
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()
