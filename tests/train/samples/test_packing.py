"""Packing: rows are a pure function of (seed, epoch), and a packed sample reads as if alone.

.venv/bin/pytest tests/train/samples/test_packing.py
"""

from pathlib import Path

import pytest
import torch

import tiny
from draftsmith.drafters.batch import align
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.packing import Cursor, Stream, alone, buckets, collate
from draftsmith.train.samples.samples import Samples

LENGTH = 40


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def samples(family: str, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Thirty texts of up to 54 tokens: some are cut at LENGTH, two have no answer before it."""
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for i in range(30):
        ids = torch.randint(2, tiny.VOCAB, (3 + i * 7 % 40,), generator=generator).tolist()
        prompts.append(Prompt(None, tuple(ids), "d"))
    folder = tmp_path_factory.mktemp(family) / "s"
    return generate(tiny.target(family), prompts, Sampler(1.0), 12, folder)


def stream(samples: Samples, seed: int = 0, length: int = LENGTH) -> Stream:
    return Stream(samples, range(30), length, seed)


def test_an_epoch_is_a_permutation(samples: Samples) -> None:
    packed = stream(samples)
    sizes = samples.lengths.clamp(max=LENGTH).tolist()
    kept = [i for i in range(30) if samples[i].made.index(True) < LENGTH]
    orders = set()
    for epoch in range(4):
        n = packed.rows_per_epoch(epoch)
        rows, after = packed.take(Cursor(epoch), n)
        assert after == Cursor(epoch + 1) and len(rows) == n
        assert sorted(i for row in rows for i in row) == kept
        assert all(sum(sizes[i] for i in row) <= LENGTH for row in rows)
        orders.add(str(rows))
    assert len(orders) == 4
    assert sum(len(row) > 1 for row in rows) > 2


def test_first_fit_leaves_no_room_behind(samples: Samples) -> None:
    """No sample could have joined an earlier row (all rows fit into the window here)."""
    packed = stream(samples, length=400)
    rows, _ = packed.take(Cursor(), packed.rows_per_epoch(0))
    sizes = samples.lengths.tolist()
    for r, row in enumerate(rows):
        for index in row:
            for earlier in rows[:r]:
                assert sum(sizes[i] for i in earlier) + sizes[index] > 400
    assert len(rows) <= sum(sizes) // 200 + 1


def test_order_is_seed_and_epoch_alone(samples: Samples) -> None:
    one, two, other = stream(samples), stream(samples), stream(samples, seed=1)
    late = two.take(Cursor(3, 2), 4)  # nothing before it was asked for
    one.take(Cursor(), 100)
    assert one.take(Cursor(3, 2), 4) == late
    assert other.take(Cursor(), 4) != one.take(Cursor(), 4)
    rows, _ = one.take(Cursor(), 4)
    rows[0].append(99)  # what a caller does to its rows is its own matter
    assert one.take(Cursor(), 4) == two.take(Cursor(), 4)


@pytest.mark.parametrize("step", [1, 3, 7, 64])
def test_cursor_resumes_anywhere(samples: Samples, step: int) -> None:
    """Steps of any size over several epochs read the same rows, a new stream at each step."""
    want, end = stream(samples).take(Cursor(), 64)
    assert end.epoch >= 2
    got: list[list[int]] = []
    cursor = Cursor()
    while len(got) < 64:
        rows, cursor = stream(samples).take(cursor, min(step, 64 - len(got)))
        got += rows
    assert got == want and cursor == end
    assert stream(samples).take(end, 0) == ([], end)


def test_cursor_of_other_samples(samples: Samples) -> None:
    with pytest.raises(UserError, match="cursor: row 99 is beyond the"):
        stream(samples).take(Cursor(0, 99), 1)


def test_samples_that_teach_nothing(samples: Samples, caplog: pytest.LogCaptureFixture) -> None:
    few = stream(samples, length=10)
    rows, _ = few.take(Cursor(), few.rows_per_epoch(0))
    used = {i for row in rows for i in row}
    assert used == {i for i in range(30) if any(samples[i].made[:10])}
    assert f"{30 - len(used)} of 30 samples have no target-made token" in caplog.text
    with pytest.raises(UserError, match="length: 2 tokens hold no target-made token") as error:
        stream(samples, length=2)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="of any of the 0 samples"):
        Stream(samples, [], LENGTH, 0)


def test_collate(samples: Samples) -> None:
    rows, _ = stream(samples).take(Cursor(), 6)
    batch = collate(samples, rows, LENGTH)
    assert batch.sampler == samples.sampler and not batch.foreign
    widths = []
    for b, row in enumerate(rows):
        start = 0
        for s, index in enumerate(row):
            ids, made = samples[index].ids[:LENGTH], samples[index].made[:LENGTH]
            here = slice(start, start + len(ids))
            assert batch.tokens[b, here].tolist() == ids
            assert batch.made[b, here].tolist() == made
            assert batch.position[b, here].tolist() == list(range(len(ids)))
            assert batch.segment[b, here].unique().tolist() == [s]
            start += len(ids)
        assert (batch.segment[b, start:] == -1).all() and not batch.made[b, start:].any()
        widths.append(start)
    assert batch.tokens.shape == (6, max(widths))


def test_packed_reads_as_alone(samples: Samples, family: str) -> None:
    """The same features and final states, whatever else lies in the row or the batch."""
    target = tiny.target(family)
    rows, _ = stream(samples).take(Cursor(), 8)
    packed = target.read(collate(samples, rows, LENGTH), [0, 2, "normed"])
    names = [*packed.features, "final"]
    for b, row in enumerate(rows):
        for s, index in enumerate(row):
            alone = target.read(collate(samples, [[index]], LENGTH), [0, 2, "normed"])
            here = packed.segment[b] == s
            for name in names:
                one = alone.final if name == "final" else alone.features[name]
                many = packed.final if name == "final" else packed.features[name]
                torch.testing.assert_close(many[b, here], one[0], atol=2e-4, rtol=1e-4)


def test_packed_learns_the_same_labels(samples: Samples) -> None:
    """Anchors, depths and labels of packed rows are those of the samples alone."""
    rows, _ = stream(samples).take(Cursor(), 8)
    packed = align(collate(samples, rows, LENGTH), 3)
    alone = align(collate(samples, [[i] for row in rows for i in row], LENGTH), 3)
    for table in (packed, alone):
        assert table.exists.any()
    labels = [t.label[t.exists].sort().values for t in (packed, alone)]
    assert torch.equal(*labels)


def test_a_planted_leak_is_seen(samples: Samples, family: str) -> None:
    """Without segments, or with positions that run on, the states differ: the test has teeth."""
    target = tiny.target(family)
    rows = [r for r in stream(samples).take(Cursor(), 20)[0] if len(r) > 1][:1]
    good = target.read(collate(samples, rows, LENGTH), [])
    leak = collate(samples, rows, LENGTH)
    leak.segment.zero_()
    leak.position.copy_(torch.arange(leak.tokens.shape[1]))
    second = good.segment[0] == 1
    assert good.final is not None
    gap = (target.read(leak, []).final - good.final)[0, second].abs().max()
    assert gap > 0.1


def test_buckets(samples: Samples) -> None:
    """Every place once, groups apart in length, equal lengths in their order."""
    assert buckets([3, 9, 9, 1, 9], 2) == [[1, 2], [4, 0], [3]]
    assert buckets([], 4) == []
    groups = alone(samples, [7, 3, 11, 5, 20], 2)
    found = [index for rows in groups for (index,) in rows]
    assert sorted(found) == [3, 5, 7, 11, 20]
    sizes = samples.lengths[found].tolist()
    assert sizes == sorted(sizes, reverse=True) and [len(rows) for rows in groups] == [2, 2, 1]


def test_many_samples_pack_fast_and_full() -> None:
    """A hundred thousand samples: the bound on open rows keeps packing linear."""

    class Sizes:
        folder = Path("many")
        lengths = 20 + torch.arange(100_000) * 7919 % 700
        first_made = torch.full((100_000,), 10)

    packed = Stream(Sizes(), range(100_000), 2048, 0)  # type: ignore[arg-type]
    n = packed.rows_per_epoch(0)
    assert Sizes.lengths.sum() / (n * 2048) > 0.97
