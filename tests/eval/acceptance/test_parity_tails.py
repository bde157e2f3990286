"""The z of parity as a statistic: its law is that of all walks, it raises no false alarm, it sees
what it is there for.

.venv/bin/pytest tests/eval/acceptance/test_parity_tails.py
"""

from __future__ import annotations

from collections import defaultdict
from statistics import NormalDist

import numpy as np
import pytest

import reference_replay
from draftsmith.eval.acceptance import parity
from draftsmith.eval.acceptance.parity import compare, count_wave, counts, local_z, z_score
from draftsmith.eval.acceptance.replay import TextRatios, moments, summarise
from draftsmith.eval.decoder.text import Round, Text

NORMAL = NormalDist()


def table_of(weight: np.ndarray) -> TextRatios:
    """weight (L, k): q / p of the text's own tokens. Depths past the text's end do not exist."""
    L, k = weight.shape
    limit = np.minimum(k, L - 1 - np.arange(L))
    exists = np.arange(k) < limit[:, None]
    return TextRatios(np.where(exists, weight, 0.0), limit, np.full((L, k), np.inf), 0)


def walked(table: TextRatios, rng: np.random.Generator, k: int) -> Text:
    """A right decoder's rounds, drawn by the table's chances. Anchor i is position i."""
    text, i = Text([0], [0] * len(table.limit)), 0
    while i < table.tokens:
        m, limit = 0, int(min(k, table.limit[i]))
        while m < limit and rng.random() < table.chance[i, m]:
            m += 1
        text.rounds.append(Round(i, limit, m))
        i += 1 + m
    return text


def law_of(tables: list[TextRatios], count: int, rule: str = "token") -> dict[int, float]:
    """The law of one of [passes, accepted at depth 0, 1, ..], by every walk there is."""
    law = {0: 1.0}
    for table in tables:
        rows = [table.ratio[i, : table.limit[i]].tolist() for i in range(table.tokens)]
        longer: dict[int, float] = defaultdict(float)
        for chance, walk in reference_replay.rounds(rows, rule):
            n = sum(1 if count == 0 else m >= count for _, m in walk)
            for before, so_far in law.items():
                longer[before + n] += so_far * chance
        law = longer
    return law


def score(
    tables: list[TextRatios], k: int, count: int, total: int, block: bool = False
) -> float | None:
    parts = [moments(table, k, block) for table in tables]
    mean, variance = (sum(float(getattr(m, part)[count]) for m in parts) for part in
                      ("mean", "variance"))  # fmt: skip
    return z_score(total, mean, variance, lambda: count_wave(tables, k, count, block))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_z_is_the_tail_over_all_walks(rule: str) -> None:
    """Faults: another rule, a text left out, the last round's missing depths, a tail off by one."""
    rng = np.random.default_rng(0)
    tables = [table_of(rng.uniform(0, 1.6, shape)) for shape in ((8, 3), (6, 3))]
    for count in range(4):
        law = law_of(tables, count, rule)
        for total in range(14):
            low = sum(chance for n, chance in law.items() if n <= total)
            high = sum(chance for n, chance in law.items() if n >= total)
            z = -NORMAL.inv_cdf(min(max(min(low, high), 1e-12), 0.5))
            found = score(tables, 3, count, total, rule == "block")
            assert found == pytest.approx(z if high <= low else -z, abs=1e-4)


def test_rare_acceptances_are_no_alarm() -> None:
    """One where 0.07 are expected has a chance of 7%; (1 - 0.07) / sqrt(0.07) is above 3.5."""
    tables = [table_of(np.full((8, 1), 0.01))]
    zero, one, _, three = (score(tables, 1, 1, n) for n in range(4))
    assert zero == 0.0 and one is not None and three is not None
    assert 1.4 < one < 1.6 and three > 3.5


def all_but_certain() -> np.ndarray:
    """Chances (301, 1) of 150 passes or a few more: certain drafts at even anchors, none at odd
    ones, and two coins."""
    chance = np.zeros((301, 1))
    chance[::2] = 1.0
    chance[[40, 90]] = 0.5
    return chance


def test_many_passes_that_hardly_vary() -> None:
    """Low temperature. Faults: a count's power that overflows; a law as wide as its mean."""
    chance, rng = all_but_certain(), np.random.default_rng(1)
    table = table_of(chance)
    assert moments(table, 1).variance == pytest.approx([0.5, 0.5])
    assert compare([walked(table, rng, 1)], summarise([table], 1), deterministic=False).holds
    chance[100:250:30] = 0.0  # five certain drafts are refused
    found = compare([walked(table_of(chance), rng, 1)], summarise([table], 1), deterministic=False)
    assert not found.holds and found.z[0] is not None and found.z[0] > 6, found.report()


KINDS = {
    "mixed": lambda rng: rng.beta(0.5, 0.5, (16, 2)),
    "rare": lambda rng: rng.uniform(0, 0.011, (16, 2)),
    "all but certain": lambda rng: rng.beta(6, 0.1, (16, 2)),
}


def share_beyond(scores: np.ndarray, bound: float) -> float:
    return float((np.abs(scores) >= bound).mean())


def check_alarms(kind: str, tries: int = 500) -> None:
    """A right decoder's z lie no further out than a normal variable, and not all in the middle."""
    rng = np.random.default_rng(2)
    tables = [table_of(KINDS[kind](rng)) for _ in range(3)]
    waves = [count_wave(tables, 2, count) for count in range(3)]
    parts = [moments(table, 2) for table in tables]
    mean, variance = sum(m.mean for m in parts), sum(m.variance for m in parts)
    scores: list[list[float]] = [[], [], [], []]
    for _ in range(tries):
        texts = [walked(table, rng, 2) for table in tables]
        for i, n in enumerate(counts(texts, 2)):
            scores[i].append(z_score(n, mean[i], variance[i], lambda i=i: waves[i]) or 0.0)
        scores[3].append(local_z(texts, tables, 2) or 0.0)
    for of in map(np.array, scores):
        for bound in (1, 2, 3):
            chance = 2 * NORMAL.cdf(-bound)
            assert share_beyond(of, bound) < chance + 4 * (chance / tries) ** 0.5
        assert kind != "mixed" or share_beyond(of, 1) > 0.1


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_false_alarms(kind: str) -> None:
    check_alarms(kind)


def test_a_normal_law_for_everything_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "NORMAL", 0.0)
    with pytest.raises(AssertionError):
        check_alarms("rare")


# ---------------------------------------------------------------- the local z

LEVELS, EACH = (0.05, 0.1, 0.2), 800  # chances of tries, and how many there are of each


def taken(*accepted: int) -> tuple[list[Text], list[TextRatios]]:
    """Single tries, of which so many were accepted at each level."""
    table = table_of(np.repeat([*LEVELS, 0.0], [EACH] * 3 + [1])[:, None])
    text = Text([0], [0] * len(table.limit))
    for level, count in enumerate(accepted):
        first = level * EACH
        text.rounds += [Round(first + i, 1, int(i < count)) for i in range(EACH)]
    return [text], [table]


def check_orthogonal() -> None:
    """More acceptances everywhere, by half of r (1 - r): a pooled z of 7.7, and nothing local."""
    expected = (40, 80, 160)
    assert local_z(*taken(*expected), 1) == pytest.approx(0, abs=0.2)
    surplus = [e + round(EACH * r * (1 - r) / 2) for e, r in zip(expected, LEVELS, strict=True)]
    pooled = (sum(surplus) - 280) / (EACH * sum(r * (1 - r) for r in LEVELS)) ** 0.5
    assert pooled > 7
    assert abs(local_z(*taken(*surplus), 1) or 9) < 1
    # As many in all, but at other chances: 35 of them moved.
    assert (local_z(*taken(5, 80, 195), 1) or 0) > 4
    assert (local_z(*taken(75, 80, 125), 1) or 0) < -4


def test_local_z_is_orthogonal_to_the_count() -> None:
    check_orthogonal()


def test_a_weight_that_is_not_centred_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """r - 1/2 is, for small r, about minus the pooled count."""

    class Uncentred:
        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

        def rint(self, weight: np.ndarray) -> np.ndarray:
            return np.rint(weight + parity.STEP * (0.1458 - 0.5))

    monkeypatch.setattr(parity, "np", Uncentred())
    with pytest.raises(AssertionError):
        check_orthogonal()


def test_large_sums_by_their_definitions() -> None:
    """(counted - expected) / sqrt(variance), against 3.5; the local sum likewise."""
    rng, k = np.random.default_rng(3), 3
    tables = [table_of(rng.uniform(0, 1.1, (21, k))) for _ in range(300)]
    texts = [walked(table, rng, k) for table in tables]
    parts = [moments(table, k) for table in tables]
    mean, variance = sum(m.mean for m in parts), sum(m.variance for m in parts)
    assert (variance > parity.NORMAL).all()
    found = compare(texts, summarise(tables, k), deterministic=False)
    np.testing.assert_allclose(found.z, (counts(texts, k) - mean) / np.sqrt(variance), rtol=1e-6)
    assert found.holds
    tries = [
        (float(table.chance[r.anchor, j]), float(r.accepted > j))
        for text, table in zip(texts, tables, strict=True)
        for r in text.rounds
        for j in range(min(r.proposed, r.accepted + 1))
    ]
    centre = sum(r * r * (1 - r) for r, _ in tries) / sum(r * (1 - r) for r, _ in tries)
    weighed = [(round(16 * (r - centre)), r, came) for r, came in tries]
    spread = sum(w * w * r * (1 - r) for w, r, _ in weighed)
    assert spread > parity.NORMAL * 16**2
    local = sum(w * (came - r) for w, r, came in weighed) / spread**0.5
    assert found.z_local == pytest.approx(local)
    texts[0].rounds += [Round(0, 3, 2)] * 400
    found = compare(texts, summarise(tables, k), deterministic=False)
    assert not found.holds and all(z is not None and abs(z) > 3.5 for z in found.z[:3])
