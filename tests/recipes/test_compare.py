"""`draftsmith compare`: the diagnosis against brute force, and one comparison of tiny drafters."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")

import replays
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance import recall
from draftsmith.eval.acceptance.recall import diagnose, ranks
from draftsmith.eval.acceptance.replay import moments, replay, text_ratios
from draftsmith.recipes import compare_page
from draftsmith.recipes.compare import Compare, Entry, _learned, compare
from draftsmith.train.run import main
from training import World, save_target
from walker import Visible, strangers

K = 3
NAMES = ("small", "eagle")


def own(name: str, sampler: Sampler) -> tuple[Drafter, Batch]:
    tokens, root = replays.own_text("Llama", sampler)
    return replays.read(name, "Llama", batch_of([(tokens, replays.flags(tokens, root))], sampler))


def test_a_checkpoint_under_another_name(tmp_path: Path) -> None:
    """A copy within its run: what it had learned is not known, and is not asked of its name."""
    assert _learned(Entry("mine", tmp_path / "run" / "mine", tmp_path / "run")) is None


# ---------------------------------------------------------------- the diagnosis


@pytest.mark.parametrize("name", NAMES)
def test_ranks_by_sorting(name: str) -> None:
    """The place of the text's own token in q's order, one anchor and depth at a time."""
    drafter, batch = own(name, Sampler(1.0))
    (table,) = ranks(drafter, batch, K)
    text, made = batch.tokens[0].tolist(), batch.made[0].tolist()
    root = made.index(True)
    for i, limit in enumerate(table.limit):
        unroll = drafter.unroll(batch, align(batch, K, torch.tensor([[root - 1 + i]])))
        for j in range(limit):
            row = unroll.index[0, 0, j]
            law = drafter.logits(*(t[row : row + 1] for t in (
                unroll.hidden, unroll.prev, unroll.depth)))[0].double().tolist()  # fmt: skip
            order = sorted(range(len(law)), key=lambda token: (-law[token], token))
            ids = [int(drafter.vocab.to_target(torch.tensor(token))) for token in order]
            own_token = text[root + i + 1 + j]
            known = ids.index(own_token) if own_token in ids else recall.NEVER
            assert table.rank[i, j] == known


def check_oracle(name: str) -> None:
    """At T=0 the best candidate is the draft, so that its oracle is what is served."""
    drafter, batch = own(name, Sampler(0.0))
    found = diagnose(drafter, [batch], K)
    served = replay(drafter, [batch], K)[K]
    assert found["oracle_tau"]["1"] == pytest.approx(served.tau)
    alpha = [None if a is None else pytest.approx(a) for a in served.alpha]
    assert found["recall"]["1"] == alpha


@pytest.mark.parametrize("name", ("ngram", *NAMES))
def test_the_first_candidate_is_the_draft(name: str) -> None:
    check_oracle(name)


def test_a_batch_is_unrolled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, batch = own("eagle", Sampler(1.0))
    calls, unroll = [], type(drafter).unroll
    monkeypatch.setattr(type(drafter), "unroll", lambda *args: calls.append(args) or unroll(*args))
    diagnose(drafter, [batch], K)
    assert len(calls) == 1


def test_ranks_counted_from_one_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recall._rank
    monkeypatch.setattr(recall, "_rank", lambda *args: right(*args) + 1)
    with pytest.raises(AssertionError):
        check_oracle("small")


def test_wider_is_no_worse_and_all_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every token a candidate each depth is accepted: passes of k + 1 tokens."""
    drafter, batch = own("small", Sampler(1.0))
    monkeypatch.setattr(recall, "WIDTHS", (1, 4, replays.VOCAB))
    found = diagnose(drafter, [batch], K)
    taus = list(found["oracle_tau"].values())
    assert taus == sorted(taus)
    (table,) = text_ratios(drafter, batch, K)
    assert taus[-1] == pytest.approx(table.tokens / math.ceil(table.tokens / (K + 1)))
    assert set(found["recall"][str(replays.VOCAB)]) == {1.0}


def test_weights_are_the_rounds_that_get_there() -> None:
    drafter, batch = own("eagle", Sampler(1.0))
    (table,) = text_ratios(drafter, batch, K)
    reached = recall._reached(table, K).sum(0)
    np.testing.assert_allclose(reached, moments(table, K).reached)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    before = signal.getsignal(signal.SIGTERM)
    world = World(tmp_path_factory.mktemp("compare"))
    assert main([str(world.recipe("one", steps=12, save_every=3))]) == 0
    assert main([str(world.recipe("two", "small", steps=3, save_every=3))]) == 0
    signal.signal(signal.SIGTERM, before)
    return world


def settings(world: World, drafters: list[str], output: Path, **changes: Any) -> Compare:
    small = {"prompts": str(world.prompts), "limit": 6, "decode_limit": 2, "max_new_tokens": 16}
    return Compare(drafters, output=output, **(small | {"k": K} | changes))


@pytest.fixture(scope="module")
def found(world: World) -> dict[str, Any]:
    runs = [str(world.folder("one")), str(world.folder("two")), "ngram"]
    return compare(settings(world, runs, world.root / "out", target=str(world.target)))


def test_figures(world: World, found: dict[str, Any]) -> None:
    stored = json.loads((world.root / "out" / "compare.json").read_text())
    assert stored == json.loads(json.dumps(found))
    assert list(found["drafters"]) == ["one", "two", "ngram"]
    one, two, ngram = found["drafters"].values()
    assert one["tokens_learned"] > two["tokens_learned"] > 0 and ngram["tokens_learned"] is None
    assert one["curve"]["points"][-1][0] == one["tokens_learned"] and two["curve"] is None
    for drafter in (one, two, ngram):
        for here in drafter["at"].values():
            assert here["parity"]["holds"] and 1 <= here["best_k"] <= K
            assert 0 < here["draft_share"] < 1


def test_predicted_is_of_what_is_measured(world: World, found: dict[str, Any]) -> None:
    """At T=0 the decoder writes the very texts that were replayed: their tau, and no other's."""
    for drafter in found["drafters"].values():
        here = drafter["at"]["T=0"]
        costs, k = here["costs_ms"], str(here["best_k"])
        of_decoded = here["decode"]["tau"] * costs["step"] / costs["round"][k]
        assert here["predicted_speedup"] == pytest.approx(of_decoded)
    few = [d["at"]["T=0"]["decode"]["tau"] for d in found["drafters"].values()]
    assert few != pytest.approx(
        [d["at"]["T=0"]["replay"]["tau_by_k"][str(d["at"]["T=0"]["best_k"])]
         for d in found["drafters"].values()]
    ), "prompts that tell nothing"  # fmt: skip


def test_pages_hold_no_figure_of_their_own(world: World, found: dict[str, Any]) -> None:
    folder = world.root / "out"
    page = Visible((folder / "compare.html").read_text())
    assert page.loads == [] and strangers("\n".join(page.words), told(found)) == []
    assert strangers((folder / "compare.md").read_text(), told(found)) == []


def told(found: dict[str, Any]) -> dict[str, Any]:
    """The report and what the page says of it in its own words: widths and percents."""
    words = ["0", "1", "4", "10", "10%", "16", *compare_page.COLUMNS, *compare_page.DIAGNOSIS]
    return found | {"words": words}


def test_again_measures_nothing(
    world: World, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.recipes import compare as module

    monkeypatch.setattr(module, "_measured", None)
    runs = [str(world.folder("one")), "ngram"]
    again = compare(settings(world, runs, world.root / "out", target=str(world.target)))
    assert again["drafters"]["one"] == found["drafters"]["one"]


def test_mistakes_are_told(world: World, tmp_path: Path) -> None:
    run = str(world.folder("one"))
    with pytest.raises(UserError, match="one: given twice"):
        compare(settings(world, [run, run], tmp_path))
    with pytest.raises(UserError, match="no drafter there"):
        compare(settings(world, [str(tmp_path)], tmp_path))
    other = save_target(tmp_path / "other", vocab=40)
    with pytest.raises(UserError, match="made for another"):
        compare(settings(world, [run], tmp_path / "out", target=str(other)))
