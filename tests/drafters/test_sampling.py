"""The serving sampler, the keyed noise and the inverse-CDF draw.

A fault here is invisible in any one text: a cut that drops the wrong token, or two draws that
share a number, bends every law downstream a little.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

import reference
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Noise, Purpose, Sampler, argmax, pick

LN = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
LAST = 1.0 - 2.0**-52  # the largest uniform that Noise can give


@pytest.mark.parametrize(
    ("sampler", "logits", "expected"),
    [
        (Sampler(), LN, [0.4, 0.3, 0.2, 0.1]),
        (Sampler(0.5), LN, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampler(top_k=2), LN, [4 / 7, 3 / 7, 0, 0]),
        (Sampler(top_k=4), LN, [0.4, 0.3, 0.2, 0.1]),
        (Sampler(top_k=9), LN, [0.4, 0.3, 0.2, 0.1]),
        (Sampler(top_k=1), torch.tensor([1.0, 3.0, 2.0]), [0, 1, 0]),
        # Ties at the k-th place are all kept: three tokens for k = 2.
        (Sampler(top_k=2), torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0]).mul(99), [0, 1, 0, 0, 0]),
        (Sampler(top_k=2), torch.tensor([0.3, 0.1, 0.3, 0.3]).log(), [1 / 3, 0, 1 / 3, 1 / 3]),
        # The token that crosses top-p stays; a mass of exactly top-p is enough.
        (Sampler(top_p=0.5), LN, [4 / 7, 3 / 7, 0, 0]),
        (Sampler(top_p=0.39), LN, [1, 0, 0, 0]),
        (Sampler(top_p=1e-9), LN.flip(0), [0, 0, 0, 1]),
        (Sampler(top_p=0.5), torch.zeros(4), [0.5, 0.5, 0, 0]),
        # Temperature comes before top-p: at T = 0.5 the first token alone holds 16/30.
        (Sampler(0.5, top_p=0.5), LN, [1, 0, 0, 0]),
        # Top-k comes before top-p: 3/7 of the two kept is crossed, of all four it is not.
        (Sampler(top_k=2, top_p=0.55), LN, [1, 0, 0, 0]),
        (Sampler(0.0), torch.tensor([1.0, 5.0, 5.0, 2.0]), [0, 1, 0, 0]),
        (Sampler(0.0, top_k=3, top_p=0.5), LN, [1, 0, 0, 0]),
    ],
)
def test_sampler_by_hand(sampler: Sampler, logits: Tensor, expected: list[float]) -> None:
    """Order of the cuts, ties at the k-th kept, crossing token kept."""
    torch.testing.assert_close(sampler.probs(logits), torch.tensor(expected, dtype=torch.float32))
    batched = sampler.log_probs(logits.expand(2, 3, -1)).exp()
    torch.testing.assert_close(batched[1, 2], torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 3, 20])
@pytest.mark.parametrize("top_p", [0.13, 0.77, 1.0])
def test_sampler_against_reference(temperature: float, top_k: int, top_p: float) -> None:
    """Random logits on a coarse grid, so that ties are everywhere."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-4, 5, (40, 12), generator=generator) * 0.7
    law = Sampler(temperature, top_k, top_p).probs(logits).double()
    known = torch.stack([reference.sampled(row, temperature, top_k, top_p) for row in logits])
    torch.testing.assert_close(law, known, atol=1e-6, rtol=1e-5)
    assert torch.equal(law > 0, known > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_lowest_id(dtype: torch.dtype) -> None:
    """torch.argmax promises no order among ties; greedy parity needs one."""
    logits = torch.full((3, 1000), -2.0, dtype=dtype)
    logits[0, [700, 31, 999]] = 4.0
    logits[1, 998:] = 0.0
    logits[1, 998] = -0.0
    logits[2] = 1.0
    assert argmax(logits).tolist() == [31, 998, 0]
    assert argmax(torch.tensor([float("-inf"), -1e9])).item() == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
     ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01), ("top_p", float("nan"))],
)  # fmt: skip
def test_sampler_refuses(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field):
        Sampler(**{field: value})


def uniforms(
    purpose: Purpose = Purpose.DRAFT,
    rows: int | range = 0,
    round: int | range = 1,
    position: int | range = 10,
    node: int | range = 0,
    seed: int | range = 0,
) -> Tensor:
    """Uniforms over the product of all given ranges, flat, the last named varying fastest."""
    axes = [a if isinstance(a, range) else range(a, a + 1) for a in (rows, round, node, seed)]
    at = position if isinstance(position, range) else range(position, position + 1)
    keys = torch.tensor(list(itertools.product(axes[0], axes[1])))
    positions = torch.tensor(list(at)).expand(len(keys), -1)
    parts = [
        Noise(s, keys[:, 0], keys[:, 1]).uniform(purpose, positions, n)
        for n, s in itertools.product(axes[2], axes[3])
    ]
    return torch.stack(parts, dim=-1).flatten()


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """p-value of counts against expected counts."""
    return float(stats.chisquare(observed.double().numpy(), expected.double().numpy()).pvalue)


GRID = {
    "rows": lambda: uniforms(rows=range(20_000)),
    "rows far apart": lambda: uniforms(rows=range(0, 20_000 << 40, 1 << 40)),
    "round": lambda: uniforms(round=range(20_000)),
    "position": lambda: uniforms(position=range(20_000)),
    "node": lambda: uniforms(node=range(1_000)),
    "seed": lambda: uniforms(seed=range(1_000)),
    "all": lambda: uniforms(
        rows=range(12), round=range(12), position=range(12), node=range(6), seed=range(2)
    ),
    "target": lambda: uniforms(Purpose.TARGET, rows=range(150), position=range(150)),
}


@pytest.mark.parametrize("axis", GRID)
def test_noise_is_uniform(axis: str) -> None:
    """Small consecutive keys are what serving uses: the finaliser must not show them."""
    u = GRID[axis]()
    assert u.dtype == torch.float64 and 0 <= u.min() and u.max() < 1
    assert u.unique().numel() == u.numel()
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    low_bits = (u * 2.0**52).long() % 256
    counts = torch.bincount(low_bits, minlength=256)
    assert chi_square(counts, torch.full((256,), u.numel() / 256)) > 1e-3


def neighbours(axis: str) -> tuple[Tensor, Tensor]:
    """Uniforms of 40,000 keys and of the same keys moved by one along an axis."""
    free = "position" if axis == "rows" else "rows"
    if axis == "purpose":
        first, second = (
            uniforms(p, rows=range(200), position=range(200))
            for p in (Purpose.ACCEPT, Purpose.RESAMPLE)
        )
        return first, second
    pair = range(3, 5)
    u = uniforms(**{axis: pair, free: range(40_000)})
    if axis == "rows":
        return u[: u.numel() // 2], u[u.numel() // 2 :]
    return u[0::2], u[1::2]


@pytest.mark.parametrize("axis", ["purpose", "rows", "round", "position", "node", "seed"])
def test_neighbouring_streams_are_independent(axis: str) -> None:
    """Each part of the key counts, and a step along it gives an unrelated number."""
    first, second = neighbours(axis)
    assert not (first == second).any()
    cells = (first * 16).long() * 16 + (second * 16).long()
    counts = torch.bincount(cells, minlength=256)
    assert chi_square(counts, torch.full((256,), first.numel() / 256)) > 1e-3
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / first.numel() ** 0.5


def test_shared_streams_would_be_seen() -> None:
    """The pair test above has teeth: one draw in thirty that repeats its neighbour fails it."""
    first, second = neighbours("position")
    second = torch.where(uniforms(node=9, rows=range(40_000)) < 1 / 30, first, second)
    cells = (first * 16).long() * 16 + (second * 16).long()
    counts = torch.bincount(cells, minlength=256)
    assert chi_square(counts, torch.full((256,), first.numel() / 256)) < 1e-6


def test_no_two_draws_share_a_number() -> None:
    """Over a grid of everything at once, TARGET aside."""
    parts = [
        uniforms(purpose, range(8), range(8), range(20), range(6), range(3))
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESAMPLE)
    ]
    parts.append(uniforms(Purpose.TARGET, rows=range(8), position=range(20), seed=range(3)))
    assert torch.cat(parts).unique().numel() == sum(p.numel() for p in parts)


def test_target_leaves_round_and_node_out() -> None:
    """So that prefill, baseline and the match rule equal plain sampling token for token."""
    rows, position = torch.tensor([4, 9]), torch.tensor([[5, 6], [7, 8]])
    one = Noise(1, rows, torch.tensor([1, 2])).uniform(Purpose.TARGET, position, 0)
    two = Noise(1, rows, torch.tensor([7, 0])).uniform(Purpose.TARGET, position, 3)
    assert torch.equal(one, two)
    assert one.unique().numel() == 4


@pytest.mark.parametrize("purpose", list(Purpose))
def test_noise_does_not_see_the_batch(purpose: Purpose) -> None:
    """A request draws the same numbers alone, in any slot, and in either shape of position."""
    rows, rounds = torch.tensor([5, 0, 77, 5]), torch.tensor([1, 2, 3, 9])
    position = torch.tensor([[3, 4, 5], [9, 9, 1], [0, 1, 2], [6, 7, 8]])
    whole = Noise(3, rows, rounds).uniform(purpose, position, 2)
    order = torch.tensor([2, 0, 3])
    some = Noise(3, rows[order], rounds[order]).uniform(purpose, position[order], 2)
    assert torch.equal(some, whole[order])
    for b, t in itertools.product(range(4), range(3)):
        alone = Noise(3, rows[b : b + 1], rounds[b : b + 1])
        assert alone.uniform(purpose, position[b : b + 1, t], 2).item() == whole[b, t].item()


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "zeros at both ends": lambda: torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]),
    "a single token": lambda: torch.tensor([0.0, 1.0, 0.0]),
    "not normalised": lambda: torch.tensor([0.0, 12.0, 0.0, 3.0, 0.0]),
    "tiny": lambda: torch.tensor([0.0, 1e-30, 0.0, 3e-30, 0.0]),
    "uneven": lambda: torch.tensor([1e-38, 0.0, 1.0, 0.0, 1e-38, 0.0]),
    "power of two": lambda: torch.tensor([0.0, 0.5, 0.5, 0.0]),
    "wide": lambda: torch.cat([torch.zeros(7), torch.rand(150_000).softmax(0), torch.zeros(9)]),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_pick_never_draws_weight_zero(name: str) -> None:
    """At the edges of [0, 1), and where a uniform falls exactly on a step of the CDF."""
    weights = WEIGHTS[name]()
    mass = weights.double().cumsum(0)
    steps = (mass / mass[-1])[:: max(1, len(mass) // 50)]
    edges = torch.tensor([0.0, 2.0**-52, 0.5, LAST - 2.0**-52, LAST], dtype=torch.float64)
    beside = torch.cat([steps, steps - 2.0**-53, steps + 2.0**-53])
    uniform = torch.cat([edges, beside.clamp(0, LAST)])
    index = pick(weights.expand(len(uniform), -1), uniform)
    assert 0 <= index.min() and index.max() < len(weights)
    assert (weights[index] > 0).all()


def test_pick_by_hand() -> None:
    weights = torch.tensor([[1.0, 2.0, 0.0, 1.0]]).expand(6, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LAST], dtype=torch.float64)
    assert pick(weights, uniform).tolist() == [0, 0, 1, 1, 3, 3]
    assert pick(weights.view(2, 3, 4), uniform.view(2, 3)).tolist() == [[0, 0, 1], [1, 3, 3]]


def test_pick_follows_the_weights() -> None:
    """Keyed draws of one position over rows: the law that serving draws from."""
    weights = torch.tensor([0.0, 0.5, 0.02, 0.0, 0.28, 0.2])
    u = uniforms(rows=range(50_000))
    counts = torch.bincount(pick(weights.expand(len(u), -1), u), minlength=6)
    assert counts[weights == 0].sum() == 0
    kept = weights > 0
    assert chi_square(counts[kept], weights[kept] * len(u)) > 1e-3
    wrong = torch.tensor([0.0, 0.48, 0.04, 0.0, 0.28, 0.2])
    assert chi_square(counts[kept], wrong[kept].double() * len(u)) < 1e-6
