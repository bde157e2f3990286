"""Static trees chosen by hit rates: the rates by counting in float64, the tree by trying all.

.venv/bin/pytest tests/eval/acceptance/test_static_tree.py
"""

from __future__ import annotations

import json
import math
import sys
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets")

import contracts as contract
import parities as parity
import planted as faults
import tiny
from draftsmith.drafters.batch import batch_of
from draftsmith.drafters.policy import StaticTree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance import static_tree
from draftsmith.eval.acceptance.static_tree import best_tree, calibrate, hit_rates
from draftsmith.recipes import cli
from draftsmith.train.run import main
from reference_heads import head_logits
from training import World


@pytest.mark.parametrize("budget", range(1, 7))
def test_best_of_all_trees(budget: int) -> None:
    """Every tree of this many nodes there is, two deep and three wide, by brute force."""
    rates = np.random.default_rng(budget).random((2, 3))

    def worth(paths: tuple[tuple[int, ...], ...]) -> float:
        return sum(math.prod(rates[j, i] for j, i in enumerate(path)) for path in paths)

    nodes = [path for n in (1, 2) for path in product(range(3), repeat=n)]
    trees = [t for t in combinations(nodes, budget) if all(len(p) == 1 or p[:1] in t for p in t)]
    tree, expected = best_tree(rates, budget)
    assert expected == pytest.approx(1 + max(map(worth, trees)))
    assert expected == pytest.approx(1 + worth(tree.paths)) and len(tree.paths) == budget


def test_nodes_without_a_chance_are_left_out() -> None:
    rates = np.array([[0.5, 0.0], [0.0, 0.25], [0.0, 0.0]])
    assert best_tree(rates, 9) == (StaticTree(((0,), (0, 1))), 1 + 0.5 + 0.125)
    assert best_tree(0 * rates, 9) == (StaticTree(((0,),)), 1.0)


def check_rates(name: str) -> None:
    """Each text token's rank in the reference's law, anchor by anchor."""
    made, hf = contract.drafter(name), tiny.hf_model("Llama").double()
    texts = contract.prompts(5)
    batches = [contract.read(made.target, [text], made.taps) for text in texts]
    weights, config = made.weights(), made.config.model_dump()
    ranks: list[list[int]] = [[], [], []]
    for text in texts:
        for anchor in range(len(text) - 2):
            for j in range(min(3, len(text) - 2 - anchor)):
                logits, ids = head_logits(weights, config, hf, text, anchor, j)
                own = logits[ids == text[anchor + 2 + j]]
                ranks[j].append(int((logits > own).sum()) if len(own) else static_tree.RANKS)
                if ranks[j][-1] >= static_tree.RANKS:
                    break
    found = hit_rates(made, batches, 4)
    assert not found[3].any(), "a depth beyond the heads"
    for j, here in enumerate(ranks):
        wanted = [here.count(i) / len(here) for i in range(static_tree.RANKS)]
        assert found[j] == pytest.approx(wanted)
    assert found[0].sum() > 0.1


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_rates_by_counting(name: str) -> None:
    """Faults: a rank too many; draft ids taken for target ids; a depth's labels of another."""
    check_rates(name)


def test_labels_of_another_depth_show(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.label_one_late(monkeypatch)
    with pytest.raises(AssertionError):
        check_rates("medusa")


def test_the_chosen_tree_walks_further_than_others() -> None:
    """Than the chain, and than a full tree, of no fewer nodes."""
    made = parity.drafter_for("medusa", "Llama")
    texts = tiny.texts(made.target, Sampler(1.0), 24, seed=3)
    pairs = [(t.prompt + t.tokens, [False] * len(t.prompt) + [True] * len(t.tokens)) for t in texts]
    batches = [made.target.read(batch_of(pairs, Sampler(1.0)), made.taps)]
    found = calibrate(made, batches, 3, 6)
    assert len(found.tree.paths) == 6 and found.tree.k <= 3
    assert found.tau == pytest.approx(found.expected_tau, rel=0.1)

    def tau(tree: StaticTree) -> float:
        walks = static_tree.walk_tree(made, batches[0], tree)
        return sum(w.tokens for w in walks) / sum(len(w.rounds) for w in walks)

    assert found.tau == tau(found.tree)
    for widths in ((1, 1, 1), (2, 2), (1, 1, 4)):
        assert tau(StaticTree.of_widths(widths)) < found.tau


def evaluated(patch: pytest.MonkeyPatch, *words: object) -> int:
    patch.setattr(sys, "argv", ["draftsmith", "eval", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_eval_with_a_static_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line: chosen on the run's held-out conversations, decoded, in parity."""
    world = World(tmp_path)
    assert main([str(world.recipe("run", "medusa"))]) == 0
    best = world.folder("run") / "best"
    words = [best, "--prompts", world.prompts, "--limit", 4, "--max-new-tokens", 16, "--k", 3]
    capsys.readouterr()
    out = tmp_path / "out"
    assert evaluated(monkeypatch, *words, "--tree", 5, "--static", "--output", out) == 0
    shown, report = capsys.readouterr().out, json.loads((out / "report.json").read_text())
    assert "static tree of 5" in shown and "walked" in shown and "parity holds" in shown
    paths = tuple(map(tuple, report["tree"]["paths"]))
    assert report["policy"] == str(StaticTree(paths)) and len(paths) == 5
    assert report["replay"]["tau"] == pytest.approx(report["decode"]["tau"])
    assert report["tree"]["expected_tau"] > 1 < report["tree"]["walked_tau"]

    monkeypatch.setattr(Target, "load", None)  # what follows is told before any loading
    for given, line in (
        ([*words, "--static"], "--static: gives a tree its shape; say how many tokens"),
        (["ngram", "--tree", 5, "--static"], "--static: ngram drafts chains only; give a che"),
    ):
        assert evaluated(monkeypatch, *given) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {line}") and said.count("\n") == 1
