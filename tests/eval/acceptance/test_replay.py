"""Replay: from ratios to expected passes, and from a drafter and a text to ratios.

The recursion is checked against the enumeration of every walk, the ratios against float64 laws of
models that draftsmith never touched.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import reference
import tiny
import toys  # noqa: F401  (registers the toy families)
from draftsmith.drafters.batch import batch_of
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance.replay import TextRatios, moments, replay, summarise, text_ratios
from replays import CHAT, SAMPLERS, VOCAB, check_ratios, drafter, flags, pack, read, same


def table_of(
    rows: list[list[float]], depths: int, prompt: int = 0, junk: float = 0.7
) -> TextRatios:
    """A table of ragged rows, one per anchor; what does not exist holds junk. Text: rows + 1."""
    ratio = np.full((len(rows) + 1, depths), junk)
    for i, row in enumerate(rows):
        ratio[i, : len(row)] = row
    limit = np.array([len(row) for row in rows] + [0])
    return TextRatios(ratio, limit, np.full_like(ratio, np.inf), prompt)


def random_rows(seed: int) -> tuple[list[list[float]], int]:
    """Ratios of a text of 2 to 10 tokens; often 0 or 1, often fewer depths than there is room."""
    rng = np.random.default_rng(seed)
    tokens, depths = int(rng.integers(2, 11)), int(rng.integers(1, 5))
    rows = []
    for i in range(tokens - 1):
        room = min(depths, tokens - 1 - i)
        length = room if rng.random() < 0.7 else int(rng.integers(0, room + 1))
        row = rng.random(length)
        row[rng.random(length) < 0.2] = 1.0
        row[rng.random(length) < 0.1] = 0.0
        rows.append(row.tolist())
    return rows, depths


@pytest.mark.parametrize("seed", range(30))
def test_moments_against_every_walk(seed: int) -> None:
    """Mean and variance of passes and of each depth's acceptances, and alpha, by enumeration."""
    rows, depths = random_rows(seed)
    for k in range(1, depths + 1):
        found = moments(table_of(rows, depths), k)
        shorter = [row[:k] for row in rows]
        for i in range(k + 1):
            mean, variance = reference.moments(
                shorter, lambda m, i=i: 1.0 if i == 0 else float(m >= i)
            )
            assert found.mean[i] == pytest.approx(mean, abs=1e-12)
            assert found.variance[i] == pytest.approx(variance, abs=1e-10)
        for j in range(k):
            if found.reached[j] > 0:
                ours = found.survived[j] / found.reached[j]
                assert ours == pytest.approx(reference.alpha(shorter, j), abs=1e-12)
            else:  # no round that reached the depth had it
                walks = list(reference.rounds(shorter))
                assert not any(len(rows[a]) > j <= m for c, walk in walks for a, m in walk if c)


def test_moments_by_hand() -> None:
    """Three tokens, two to gain: half of all rounds do it in one pass, the others take two."""
    found = moments(table_of([[0.5], [0.25]], 1), 1)
    np.testing.assert_allclose(found.mean, [1.5, 0.625])
    np.testing.assert_allclose(found.variance, [0.25, 0.625 * 0.375])
    np.testing.assert_allclose([*found.reached, *found.survived], [1.5, 0.625])
    assert table_of([[0.5], [0.25]], 1).tokens == 2


@pytest.mark.parametrize(
    ("rows", "depths", "mean"),
    [
        ([], 2, [0, 0, 0]),  # prefill's token is all there is: no pass
        ([[]], 2, [1, 0, 0]),  # one token, nothing proposed
        ([[1.0]], 2, [1, 1, 0]),  # the draft that ends the text needs no token after it
        ([[1.0, 1.0], [0.0], [0.0], []], 2, [2, 1, 1]),  # two accepted and a bonus, then one more
        ([[0.0, 1.0], [0.0, 1.0], [0.0]], 2, [3, 0, 0]),  # depth 1 is never reached
        ([[1.0, 0.0], [1.0], [1.0]], 2, [2, 2, 0]),
        ([[1.0, 1.0, 1.0], [1.0], [1.0], [1.0]], 3, [1, 1, 1, 1]),
    ],
)
def test_certain_walks_by_hand(rows: list[list[float]], depths: int, mean: list[int]) -> None:
    """With ratios of 0 and 1 there is one walk: counts are integers without variance."""
    found = moments(table_of(rows, depths), depths)
    assert found.mean.tolist() == mean
    assert found.variance.tolist() == [0.0] * (depths + 1)


def test_alpha_weighs_anchors_by_rounds() -> None:
    """Rounds start more often where the text is hard; the plain mean over anchors is biased."""
    rows = [[1.0], [0.1], [0.0], [0.3]]
    found = summarise([table_of(rows, 1)], 1)
    # A round at 0 always skips row 1; row 2 always fails, and row 3 follows.
    assert found.alpha == [pytest.approx((1.0 + 0.0 + 0.3) / 3)]
    assert found.tau == pytest.approx(4 / 3)


def test_tau_is_pooled() -> None:
    """All tokens over all passes, not the mean of texts; texts without a pass do not count."""
    long, short = [[1.0]] * 9, [[0.0], [0.0]]
    empty = table_of([], 1, prompt=2)
    found = summarise([table_of(long, 1), empty, table_of(short, 1, prompt=1)], 1)
    assert found.pooled.tokens == 9 + 2 and found.pooled.passes == 5 + 2
    assert found.tau == pytest.approx(11 / 7)
    assert found.alpha == [pytest.approx(5 / (5 + 2))]  # by hand: rounds at 0, 2, .., 8 and 0, 1
    assert np.isnan(summarise([empty], 1).tau)


def random_texts(rng: np.random.Generator, prompts: int) -> list[TextRatios]:
    """Two texts a prompt; a prompt is easy or hard as a whole."""
    out = []
    for prompt in range(prompts):
        easy = rng.random() < 0.5
        for _ in range(2):
            rows = [[1.0 if easy and rng.random() < 0.9 else 0.0] for _ in range(4)]
            out.append(table_of(rows, 1, prompt))
    return out


def test_bootstrap_covers() -> None:
    """About 95 in 100 intervals hold the true tau, with prompts as the unit of resampling."""
    rng = np.random.default_rng(0)
    # By hand: hard texts take 4 passes, easy ones n(4) where n(L) = 1 + 0.9 n(L-2) + 0.1 n(L-1).
    truth = 4 / ((4 + 2.191) / 2)
    hits = blind = 0
    for _ in range(60):
        found = random_texts(rng, 20)
        low, high = summarise(found, 1, resamples=200).tau_ci
        hits += low <= truth <= high
        alone = [replace(t, prompt=i) for i, t in enumerate(found)]
        low, high = summarise(alone, 1, resamples=200).tau_ci
        blind += low <= truth <= high
    assert 52 < hits < 60
    assert blind < hits - 3, "texts of one prompt are not independent"


def test_bootstrap_keeps_a_prompts_texts_together() -> None:
    """The same texts twice over, under the same prompts, tell nothing new."""
    once = random_texts(np.random.default_rng(1), 12)
    assert summarise(once + once, 1).tau_ci == pytest.approx(summarise(once, 1).tau_ci)


DRAFTERS = ("ngram", "small", "eagle")


@pytest.mark.parametrize("sampler_name", SAMPLERS)
@pytest.mark.parametrize(
    ("name", "family_name"),
    [("ngram", "Llama"), ("small", "Llama"), ("small", "Gemma3"), ("eagle", "Llama"),
     ("eagle", "Qwen3"), ("eagle", "Gemma3")],
)  # fmt: skip
def test_ratios_against_float64_laws(name: str, family_name: str, sampler_name: str) -> None:
    check_ratios(name, family_name, sampler_name)


def spans(made: list[bool]) -> list[tuple[int, int]]:
    """(first, one past the last) of each run of True."""
    edges = [i for i in range(len(made) + 1) if (i and made[i - 1]) != (i < len(made) and made[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


SHORT = [False, True, True, True]


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_turn_is_its_own_text(name: str) -> None:
    """A span's table is that of a text which ends with it and has all before it as its prompt."""
    tokens = tiny.prompts(1, 5, VOCAB)[0] * 8
    tokens = tokens[: len(CHAT)]
    made, batch = read(name, "Llama", batch_of([(tokens, CHAT), (tokens[:4], SHORT)], Sampler()))
    found = text_ratios(made, batch, 3, first_prompt=5)
    assert [len(t.limit) for t in found] == [6, 5, 1, 2, 3]
    assert [t.prompt for t in found] == [5, 5, 5, 5, 6], "turns of one sample are one prompt"
    for table, (first, end) in zip(found, spans(CHAT), strict=False):
        alone = batch_of([(tokens[:end], flags(tokens[:end], first))], Sampler())
        (known,) = text_ratios(made, read(name, "Llama", alone)[1], 3)
        same(table, known)


@pytest.mark.parametrize(
    "name", [*DRAFTERS, "medusa", "hydra", "dflash", "dspark", "peagle", "toy-block"]
)
def test_packed_segments_are_split(name: str) -> None:
    """A packed sample gives the table that it gives alone; nothing runs over a boundary."""
    ids = [tokens * 8 for tokens in tiny.prompts(4, 7, VOCAB)]
    samples = [
        (ids[0][:9], flags(ids[0][:9], 3)),
        (ids[1][: len(CHAT)], CHAT),
        (ids[2][:5], flags(ids[2][:5], 1)),  # a prompt of one token, right after another sample
        (ids[3][:6], flags(ids[3][:6], 5)),  # one token of prefill: a text, but no pass
    ]
    made, batch = read(name, "Llama", pack([[samples[0], samples[1]], [samples[2], samples[3]]]))
    found = text_ratios(made, batch, 3)
    assert [t.prompt for t in found] == [0, 1, 1, 1, 1, 2, 3]
    known = []
    for sample in samples:
        known += text_ratios(made, read(name, "Llama", batch_of([sample], Sampler()))[1], 3)
    assert len(found) == len(known)
    for table, alone in zip(found, known, strict=True):
        same(table, alone)


@pytest.mark.parametrize("name", ["small", "toy-block"])
def test_replay_at_every_length(name: str) -> None:
    """Lengths 1..k over several batches: each as if it alone had been asked for."""
    texts = [(t * 3, flags(t * 3, 4)) for t in tiny.prompts(4, 9, VOCAB)]
    batches = [read(name, "Llama", batch_of(some, Sampler()))[1] for some in (texts[:3], texts[3:])]
    made = drafter(name)
    found = replay(made, batches, 3)
    assert list(found) == [1, 2, 3]
    for k, result in found.items():
        parts = [t for batch in batches for t in text_ratios(made, batch, k)]
        assert result.pooled.passes == pytest.approx(sum(moments(t, k).mean[0] for t in parts))
        assert result.pooled.tokens == sum(len(ids) - 5 for ids, _ in texts) and result.k == k
        assert [t.prompt for t in result.texts] == [0, 1, 2, 3]
        assert not result.biased
    assert found[1].pooled.passes > found[3].pooled.passes
    batches[1].foreign = True
    assert replay(made, batches, 1)[1].biased


def test_texts_that_are_not_there_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: tables that turn out empty pass for tables that were never made."""
    made, batch = read("small", "Llama", batch_of([([5, 6, 7], [False] * 3)], Sampler()))
    calls, unroll = [], type(made).unroll
    monkeypatch.setattr(type(made), "unroll", lambda *args: calls.append(args) or unroll(*args))
    assert replay(made, [batch], 3)[3].pooled.tokens == 0
    assert len(calls) == 1
