"""Replay goes through a batch's anchors a slice at a time: no result may depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import replays
import tiny
from draftsmith.drafters.base import Drafter, Unroll
from draftsmith.drafters.batch import Alignment, Batch, all_anchors
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance.recall import diagnose, ranks
from draftsmith.eval.acceptance.replay import text_ratios
from draftsmith.eval.overlap import row_stats
from replays import CHAT, SAMPLERS, drafter, flags

FAMILIES = (
    "ngram",
    "small",
    "eagle",
    "eagle1",
    "mtp chain",
    "medusa",
    "hydra",
    "dflash",
    "dspark",
    "peagle",
    "toy-block",
)
K = 3


def packed(name: str, sampler: Sampler) -> tuple[Drafter, Batch]:
    """Two rows of several texts, several turns and padding."""
    ids = [tokens * 8 for tokens in tiny.prompts(3, 7, replays.VOCAB)]
    chat = (ids[1][: len(CHAT)], CHAT)
    first, last = ((t[:n], flags(t[:n], k)) for t, n, k in ((ids[0], 17, 3), (ids[2], 5, 1)))
    batch = replays.pack([[first, chat, last], [last, first]])
    batch.sampler = sampler
    made = drafter(name)
    return made, made.target.read(batch, made.taps)


def sliced(patch: pytest.MonkeyPatch, call: Callable[[], list[Any]]) -> tuple[list[Any], list[Any]]:
    """The eight texts of a call, and those found with two anchors of each row at a time."""
    whole = call()
    with patch.context() as small:
        small.setattr(row_stats, "CELLS", 2 * 2 * K + 1)
        found = call()
    assert len(found) == len(whole) == 8
    assert [t.prompt for t in found] == [t.prompt for t in whole]
    return whole, found


def check_slices(name: str, sampler: Sampler, patch: pytest.MonkeyPatch) -> None:
    made, batch = packed(name, sampler)
    whole, found = sliced(patch, lambda: text_ratios(made, batch, K, 4))
    for text, known in zip(found, whole, strict=True):
        # Nothing norms what EAGLE-1's lm_head reads: logits of 30 are rounded to 1e-5.
        replays.same(text, known, 2e-4 if name == "eagle1" else 2e-5)
        if sampler.greedy or name == "ngram":
            np.testing.assert_array_equal(text.ratio, known.ratio)
    for rank, one in zip(*sliced(patch, lambda: ranks(made, batch, K)), strict=True):
        np.testing.assert_array_equal(rank.limit, one.limit)
        exists = np.arange(K) < one.limit[:, None]
        np.testing.assert_array_equal(rank.rank[exists], one.rank[exists])


@pytest.mark.parametrize("sampler_name", ["plain", "greedy"])
@pytest.mark.parametrize("name", FAMILIES)
def test_slices_change_nothing(
    name: str, sampler_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows whose texts are cut anywhere: equal tables, and equal ranks."""
    check_slices(name, SAMPLERS[sampler_name], monkeypatch)


@pytest.mark.parametrize("sampler_name", ["plain", "greedy"])
@pytest.mark.parametrize("name", ["ngram", "small", "eagle"])
def test_slices_against_float64_laws(
    name: str, sampler_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_stats, "CELLS", 2 * K)
    replays.check_ratios(name, "Llama", sampler_name)


@pytest.mark.parametrize("name", ["small", "eagle", "toy-block"])
def test_the_diagnosis_of_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, batch = packed(name, SAMPLERS["plain"])
    whole = diagnose(made, [batch, batch], K)
    monkeypatch.setattr(row_stats, "CELLS", 2 * 2 * K)
    found = diagnose(made, [batch, batch], K)
    assert found["recall"] == {w: pytest.approx(each) for w, each in whole["recall"].items()}
    assert found["oracle_tau"] == pytest.approx(whole["oracle_tau"])


@pytest.mark.parametrize("name", ["eagle", "medusa", "toy-block", "small"])
def test_hidden_states_of_a_slice_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: states of all anchors and depths at once; or a pass for each slice where one row
    serves every depth."""
    made, batch = packed(name, SAMPLERS["plain"])
    sizes, unroll = [], type(made).unroll

    def noted(self: Drafter, *args: object) -> Unroll:
        out = unroll(self, *args)  # type: ignore[arg-type]
        assert isinstance(out, Unroll)
        sizes.append(len(out.hidden))
        return out

    monkeypatch.setattr(type(made), "unroll", noted)
    monkeypatch.setattr(row_stats, "CELLS", limit := 4 * 2 * K)
    text_ratios(made, batch, K)
    if made.rows_shared:
        assert len(sizes) == 1 and sizes[0] <= batch.tokens.numel()
    else:
        assert len(sizes) == -(-all_anchors(batch).shape[1] // 4) > 5 and max(sizes) <= limit


def _backwards(self: Alignment, cells: int) -> Iterator[Alignment]:
    yield from reversed(list(SPLIT(self, cells)))


def _labels_of_the_first(self: Alignment, cells: int) -> Iterator[Alignment]:
    for part in SPLIT(self, cells):
        yield Alignment(*[*vars(part).values()][:3], self.label[:, : part.label.shape[1]])


SPLIT = Alignment.split


@pytest.mark.parametrize("fault", [_backwards, _labels_of_the_first])
def test_wrong_slices_are_noticed(
    fault: Callable[..., Iterator[Alignment]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults."""
    monkeypatch.setattr(Alignment, "split", fault)
    with pytest.raises(AssertionError):
        check_slices("eagle", SAMPLERS["plain"], monkeypatch)


def test_any_number_of_cells() -> None:
    """One anchor of each row at least, and each once."""
    _, batch = packed("ngram", SAMPLERS["plain"])
    whole = row_stats.align(batch, K)
    for cells in (1, 13, 10_000):
        parts = list(whole.split(cells))
        assert torch.cat([part.label for part in parts], 1).equal(whole.label)
        assert all(part.exists.numel() <= max(cells, 2 * K) for part in parts)
