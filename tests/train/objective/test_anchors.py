"""Learning from some of the anchors: the masked table's gradients, however a step is cut.

The expected gradients are those of test_objective.py's float64 table with all other anchors' cells
struck out of it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import objectives as dense
import tiny
import training
from draftsmith.drafters import batch as batch_module
from draftsmith.drafters.batch import Alignment, Batch, align
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.train.learner import Learner
from draftsmith.train.objective.losses import Objective, backward, denominator, lesson
from draftsmith.train.objective.weights import DepthWeights
from draftsmith.train.plan import plan
from draftsmith.train.recipe import load, parse
from draftsmith.train.run import main
from objectives import ROWS, K, drafter, noise, packed, texts
from training import World

SOME = 3


def chosen(alignment: Alignment) -> list[set[int]]:
    return [{a for a in row if a >= 0} for row in alignment.anchors.tolist()]


def learnable(batch: Batch) -> list[set[int]]:
    """Anchors of each row that have a depth 0."""
    whole = align(batch, 1)
    pairs = zip(whole.anchors.tolist(), whole.exists[..., 0].tolist(), strict=True)
    return [{a for a, there in zip(*pair, strict=True) if there} for pair in pairs]


# ---------------------------------------------------------------- the choice


def test_the_choice() -> None:
    """So many of a row that has more, all of one that has fewer, and never one without a depth."""
    batch = packed()
    found, able = chosen(lesson(batch, K, SOME, noise(2))), learnable(batch)
    assert min(map(len, able)) > SOME and all(map(set.issubset, found, able))
    assert [len(row) for row in found] == [SOME, SOME]
    assert chosen(lesson(batch, K, 100, noise(2))) == able
    alone = lesson(packed([[4], [0]]), K, SOME, noise(2))  # an answer of two tokens, or of one
    assert [len(row) for row in chosen(alone)] == [0, SOME]
    for key, value in vars(lesson(batch, K, None, noise(2))).items():
        assert value.equal(getattr(align(batch, K), key))


def test_every_anchor_is_chosen_alike() -> None:
    """Over 600 steps, each about as often as any other, and independently of its neighbour."""
    batch = packed()
    (first, _), steps = learnable(batch), 600
    found = [chosen(lesson(batch, 1, 6, noise(2, step)))[0] for step in range(steps)]
    share = 6 / len(first)
    spread = (share * (1 - share) / steps) ** 0.5
    for a in first:
        assert abs(sum(a in row for row in found) / steps - share) < 4 * spread
    n = len(first)
    both = 6 * 5 / (n * (n - 1))  # that two given ones are
    spread = (both * (1 - both) / steps) ** 0.5
    for a, b in pairwise(sorted(first)):
        assert abs(sum({a, b} <= row for row in found) / steps - both) < 4 * spread


def test_the_choice_is_a_rows_own() -> None:
    """Neither padding nor the rows beside it decide: its place in the step does, and the step."""
    both = chosen(lesson(packed(), K, SOME, noise(2)))
    for place, row in enumerate(ROWS):
        assert chosen(lesson(packed([row]), K, SOME, noise(1, first=place)))[0] == both[place]
    again = chosen(lesson(packed([ROWS[0], ROWS[0]]), K, SOME, noise(2)))
    assert again[0] == both[0] != again[1]
    assert chosen(lesson(packed(), K, SOME, noise(2, step=1)))[0] != both[0]


# ---------------------------------------------------------------- the gradients


def struck(alignment: Alignment) -> list[tuple[int, int, int]]:
    """(text, anchor, depth) of the cells that stay, by hand from the packed rows."""
    out, anchors = [], chosen(alignment)
    for b, row in enumerate(ROWS):
        start = 0
        for text in row:
            ids, made = texts()[text]
            out += [(text, a, j) for a, j in dense.cells(made, K) if start + a in anchors[b]]
            start += len(ids)
    return out


def expected(
    name: str, objective: Objective, cut: dense.Cut, kept: list[tuple[int, int, int]]
) -> tuple[float, dict[str, Tensor]]:
    """Weighted sum over the kept cells, and the gradients of their weighted mean, in float64."""
    t = dense.table(name)
    s = dense.statistics(t, cut)
    stays = torch.tensor([cell in kept for cell in t.cells])
    weights, moving = dense.cell_weights(objective.weights, t, s)
    if objective.weights.per == "sequence":  # a text counts 1 by the cells of it that are left
        depth = objective.weights.decay ** torch.tensor(t.depth).double()
        text = torch.tensor([cell[0] for cell in t.cells])
        weights = depth / torch.zeros(len(texts())).double().index_add(0, text, depth * stays)[text]
    weights = torch.where(stays, weights, 0.0)
    loss = (weights * moving * dense.per_cell(objective.loss, s, t))[stays].sum()
    leaves = list(t.leaves.values())
    found = torch.autograd.grad(
        loss / weights[stays].sum(), leaves, retain_graph=True, allow_unused=True
    )
    pairs = zip(t.leaves.items(), found, strict=True)
    return loss.item(), {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}


OBJECTIVES = {
    "kl": Objective("kl"),
    "lk": Objective("lk"),
    "expected": Objective("expected"),
    "dpace": Objective("tv", DepthWeights("dpace")),
    "reach": Objective("tv", DepthWeights("reach")),
    "by text": Objective("kl", DepthWeights(per="sequence")),
}


def check_gradients(name: str, objective: Objective, cut: dense.Cut = dense.PLAIN) -> None:
    of, batch = drafter(name), packed(sampler=Sampler(*cut))
    tiny.target().read(batch, of.taps)
    alignment = lesson(batch, K, SOME, noise(2))
    kept = struck(alignment)
    assert SOME * 2 < len(kept) < len(dense.table(name).cells) / 2
    of.zero_grad(set_to_none=True)
    total = denominator(batch, alignment, objective)
    sums = backward(of, batch, alignment, objective, total, 5)
    value, theirs = expected(name, objective, cut, kept)
    assert sums.loss == pytest.approx(value, rel=1e-4)
    assert sums.total == pytest.approx(total)
    assert sums.cells.tolist() == [sum(j == depth for *_, j in kept) for depth in range(K)]
    assert dense.distance(dense.grads(of), theirs) < 2e-3


@pytest.mark.parametrize("key", OBJECTIVES)
def test_gradients_of_the_masked_table(key: str) -> None:
    """Faults: a denominator over all anchors; a weight or a chain that counts the others."""
    check_gradients("eagle-reduced", OBJECTIVES[key])


@pytest.mark.parametrize("name", ["small", "eagle"])
@pytest.mark.parametrize("cut", [dense.CUT, dense.GREEDY], ids=["cut", "greedy"])
def test_gradients_of_families(name: str, cut: dense.Cut) -> None:
    check_gradients(name, OBJECTIVES["kl"], cut)


def test_a_wrong_denominator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: that of all anchors."""

    right = denominator

    def whole(batch: Batch, alignment: Alignment, objective: Objective) -> float:
        return right(batch, batch_module.align(batch, K), objective)

    monkeypatch.setitem(check_gradients.__globals__, "denominator", whole)
    with pytest.raises(AssertionError):
        check_gradients("eagle-reduced", OBJECTIVES["kl"])


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def trained(world: World, name: str, drafter: str = "eagle", **changes: Any) -> Path:
    keys = {"anchors": 4, "rows": 1, "accumulation": 4, "warmup": 0} | changes
    path = world.recipe(name, drafter, **keys)
    assert main([str(path)]) == 0
    return world.folder(name)


def apart(one: Path, two: Path) -> float:
    a, b = training.weights(one, 9), training.weights(two, 9)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("drafter", ["eagle", "small"])
def test_a_step_may_be_cut_anywhere(
    world: World, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a choice that goes by the place in a micro-batch."""
    one = trained(world, f"ones-{drafter}", drafter)
    four = trained(world, f"four-{drafter}", drafter, rows=4, accumulation=1)
    assert apart(one, four) < 1e-3
    noise = Learner._noise
    monkeypatch.setattr(Learner, "_noise", lambda self, places: noise(self, range(len(places))))
    assert apart(trained(world, f"fault-{drafter}", drafter), four) > 5e-3


def test_learned_tokens_are_the_chosen(world: World) -> None:
    """Four anchors a row at most, four rows a step; and all of them where the key is absent."""
    counts = {}
    for most in (2, 4, 1000, None):
        run = trained(world, f"counted-{most}", anchors=most, steps=2, save_every=2, log_every=1)
        counts[most] = training.metrics(run)[-1]["tokens"]
    assert counts[2] == 2 * 4 * 2 and counts[2] < counts[4] <= 2 * 4 * 4
    assert 100 < counts[1000] == counts[None]


@pytest.mark.slow
def test_two_processes_choose_as_one(world: World, tmp_path: Path) -> None:
    """Planted fault: a choice by the row's place in its process."""
    one = trained(world, "single")
    path = str(world.recipe("pair", anchors=4, rows=1, accumulation=2, warmup=0))
    wrong = str(world.recipe("numbers", anchors=4, rows=1, accumulation=2, warmup=0))
    for recipe, before in ((path, None), (wrong, training.numbers_its_own_rows)):
        pair = training.launch(training.train_together, 2, tmp_path / "log", [recipe], before)
        for process in pair:
            process.join(300)
        assert [process.exitcode for process in pair] == [0, 0]
    assert apart(one, world.folder("pair")) < 1e-3
    assert apart(one, world.folder("numbers")) > 5e-3


# ---------------------------------------------------------------- the recipe and the plan

BASE = {"name": "x", "drafter": "eagle", "steps": 4, "anchors": 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "replay"}, "anchors: replay ties a text's together"),
        ({"loss": ["kl", "replay_alpha"], "switch_alpha": [0.5]}, "anchors: replay_alpha ties"),
        ({"drafter": "medusa", "adapt": 4}, "leave anchors out"),
        ({"anchors": 0}, "anchors: Input should be greater than or equal to 1"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        parse(BASE | changes, "x.yaml")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_plan_counts_them(world: World) -> None:
    """Tokens learned by the number of anchors; and less memory than for all of them."""
    found = {
        n: plan.plan(load(world.recipe("plan", anchors=n)), timed=False) for n in (None, 2, 1000)
    }
    whole, few = found[None], found[2]
    rows = few.tokens["learned"] / 2
    assert rows == pytest.approx(9 * 4, abs=0.5)
    assert found[1000].tokens == whole.tokens
    key = "features and activations"
    assert few.memory[key] < whole.memory[key] == found[1000].memory[key]
