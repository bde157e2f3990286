"""How a batch is cut changes nothing, and what may carry loss: chunks, micro-batches, features,
noise, positions.

    .venv/bin/pytest tests/train/objective/test_losses_batches.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import reference_eagle
import reference_mtp
import tiny
from draftsmith.drafters import batch as batch_module
from draftsmith.drafters.batch import Batch, align
from draftsmith.drafters.eagle1 import Eagle1
from draftsmith.drafters.sampling import Noise
from draftsmith.train.objective.losses import Objective, backward, denominator
from objectives import ROWS, K, cells, distance, drafter, grads, noise, packed, run, table, texts


def test_log_of_the_pass() -> None:
    """What the progress line shows: cells and mean alpha of each depth."""
    sums, _ = run("eagle", packed(), Objective())
    t = table("eagle")
    q = torch.zeros_like(t.p).index_copy(1, t.ids, t.q.softmax(-1))
    overlap = torch.minimum(t.p.softmax(-1), q).sum(1)
    for j in range(K):
        at = torch.tensor(t.depth) == j
        assert sums.cells[j] == at.sum()
        assert sums.alpha[j] == pytest.approx(overlap[at].sum().item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["kl", "log_alpha", "expected", "replay", "replay_alpha"])
@pytest.mark.parametrize("name", ["eagle-reduced", "small"])
def test_chunks_change_nothing(name: str, loss: str) -> None:
    """A chunk that loses or repeats a row: one row at a time, ragged chunks, all at once."""
    objective = Objective(loss)
    whole, theirs = run(name, packed(), objective, rows=10_000)
    for rows in (1, 7):
        sums, ours = run(name, packed(), objective, rows=rows)
        assert sums.loss == pytest.approx(whole.loss, rel=1e-5)
        assert distance(ours, theirs) < 1e-4


# ---------------------------------------------------------------- micro-batches


def counted(batch: Batch, objective: Objective) -> float:
    return denominator(batch, align(batch, K), objective)


UNEVEN = [[0], [3], [1], [2]]  # 24, 1, 21 and 1 cells


def micro_batched(
    name: str, objective: Objective, total_of: Callable[[Batch], float]
) -> dict[str, Tensor]:
    """Gradients of one row a micro-batch, each divided by total_of(its batch)."""
    of = drafter(name)
    of.zero_grad(set_to_none=True)
    for row in UNEVEN:
        batch = tiny.target().read(packed([row]), of.taps)
        backward(of, batch, align(batch, K), objective, total_of(batch), 16)
    return grads(of)


@pytest.mark.parametrize("name", ["eagle", "small"])
def test_micro_batches_weigh_tokens(name: str) -> None:
    """Four micro-batches are the one batch they were cut from; a mean of their means is not."""
    objective = Objective()
    whole = counted(packed(UNEVEN), objective)
    parts = [counted(packed([row]), objective) for row in UNEVEN]
    assert sum(parts) == pytest.approx(whole) and max(parts) > 10 * min(parts)
    _, theirs = run(name, packed(UNEVEN), objective, whole)
    assert distance(micro_batched(name, objective, lambda _: whole), theirs) < 1e-4
    planted = micro_batched(name, objective, lambda b: len(UNEVEN) * counted(b, objective))
    assert distance(planted, theirs) > 0.1


# ---------------------------------------------------------------- features


def check_features(noise: float = 0.0) -> None:
    """KL and ten times the distance of EAGLE-1's states, and every gradient, in float64."""
    objective = Objective(feature_noise=noise)
    sums, ours = run("eagle1", packed(), objective)
    of, hf = drafter("eagle1"), tiny.hf_model("Llama").double().requires_grad_(False)
    leaves = {n: p.detach().double().requires_grad_() for n, p in of.named_parameters()}
    config, total, weights = of.config.model_dump(), torch.zeros(()).double(), 0.0
    for tokens, made in texts():
        laws = hf(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        true = reference_eagle.tapped(hf, tokens, ["normed"])
        for a, j in cells(made, K):
            state = reference_mtp.eagle1_state(leaves, config, hf, tokens, a, j, noise)
            q, p = hf.lm_head(state).log_softmax(-1), laws[a + 1 + j]
            apart = (state - true[a + 1 + j]).abs()
            smooth = torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
            total = total + 0.8**j * ((p.exp() * (p - q)).sum() + 10 * smooth)
            weights += 0.8**j
    found = torch.autograd.grad(total / weights, list(leaves.values()))
    assert sums.loss == pytest.approx(total.item(), rel=1e-4)
    assert distance(ours, dict(zip(leaves, found, strict=True))) < 1e-3


def test_regression_and_its_gradient() -> None:
    check_features()


def test_noise_is_read_and_never_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: noise on what states are compared with, on what replay reads, or none at all."""

    def ones(self: Noise, purpose: Any, position: Tensor, node: int) -> Tensor:
        return torch.ones(len(self.rows), position.shape[1], dtype=torch.float64)

    with monkeypatch.context() as patch:
        patch.setattr(Noise, "uniform", ones)  # noise is then its width, everywhere
        check_features(0.3)
    batch = tiny.target().read(packed(), ["normed"])
    clean = batch.features["normed"].clone()
    added = noised(batch, noise(2))["normed"]
    assert batch.features["normed"].equal(clean) and Objective().noisy(batch, None) is batch
    assert 0.28 < added.max() <= 0.301 and -0.301 <= added.min() < -0.28
    assert abs(added.mean()) < 0.02


def noised(batch: Batch, by: Noise) -> dict[str, Tensor]:
    """What is added to each feature."""
    noisy = Objective(feature_noise=0.3).noisy(batch, by).features
    return {tap: noisy[tap] - values for tap, values in batch.features.items()}


def test_noise_is_a_rows_own() -> None:
    """Neither padding, nor the rows beside it, nor the order of taps: a row's place in the step
    decides, with the step, the position and the tap."""
    target, taps = tiny.target(), [2, "normed"]
    both = noised(target.read(packed(), taps), noise(2))
    for place, row in enumerate(ROWS):
        alone = noised(target.read(packed([row]), taps[::-1]), noise(1, first=place))
        for tap, added in alone.items():
            torch.testing.assert_close(added[0], both[tap][place, : added.shape[1]])
    flat = [both["2"][0], both["2"][1], both["normed"][0]]
    flat.append(noised(target.read(packed(), taps), noise(2, step=1))["2"][0])
    for i, one in enumerate(flat):  # streams of their own: no two numbers alike
        assert all(float((one - other).abs().mean()) > 0.15 for other in flat[:i])
        assert float((one[1:] - one[:-1]).abs().mean()) > 0.15


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_feature_of_another_position_is_noticed(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: states learn the feature beside theirs."""
    right = Eagle1.own_loss

    def wrong(of: Eagle1, batch: Batch, *rest: Any) -> Tensor:
        features = {n: f.roll(shift, dims=1) for n, f in batch.features.items()}
        return right(of, dataclasses.replace(batch, features=features), *rest)

    monkeypatch.setattr(Eagle1, "own_loss", wrong)
    with pytest.raises(AssertionError):
        check_features()


def test_a_batch_without_cells() -> None:
    """A row whose answers have one token each adds nothing, and does not divide by zero."""
    batch = packed([[4, 5]])
    assert counted(batch, Objective()) == 0
    sums, found = run("eagle", batch, Objective(), total=1.0)
    assert sums.loss == 0 and all(float(g.abs().max()) == 0 for g in found.values())


# ---------------------------------------------------------------- where the loss is


def lossy_positions(name: str) -> set[tuple[int, int]]:
    """(row, position) whose target law the loss depends on: found by spoiling one at a time."""
    of, batch, objective = drafter(name), packed(), Objective()
    tiny.target().read(batch, of.taps)
    assert batch.final is not None
    clean = batch.final.clone()

    def loss() -> float:
        of.zero_grad(set_to_none=True)
        return backward(of, batch, align(batch, K), objective, 1.0, 10_000).loss

    before, out = loss(), set()
    for b in range(clean.shape[0]):
        for t in range(clean.shape[1]):
            batch.final = clean.clone()
            batch.final[b, t] = -3 * clean[b, t].flip(0)
            if loss() != before:
                out.add((b, t))
    return out


def wanted_positions() -> set[tuple[int, int]]:
    """Positions a + 1 + j of existing cells, in the packed rows."""
    out = set()
    for b, row in enumerate(ROWS):
        start = 0
        for i in row:
            ids, made = texts()[i]
            out |= {(b, start + a + 1 + j) for a, j in cells(made, K)}
            start += len(ids)
    return out


@pytest.mark.parametrize("name", ["eagle", "small"])
def test_only_target_made_tokens_carry_loss(name: str) -> None:
    """No prompt, turn separator, padding or neighbouring text; and the first drafted token does.

    The first anchor is the prompt's last token: its root is the answer's first token (prefill's),
    its label the second. A mask that is shifted by one leaves just this out.
    """
    found = lossy_positions(name)
    assert found == wanted_positions()
    made = texts()[0][1]
    first = made.index(True)
    assert (0, first) in found and (0, first - 1) not in found
    anchors = batch_module.all_anchors(packed())
    assert anchors[0, 0] == first - 1


def _without_first(batch: Batch) -> Tensor:
    """Anchors, but for the first of each span: a mask that was not shifted with its labels."""
    shifted = torch.zeros_like(batch.made)
    shifted[:, 1:] = batch.made[:, 1:] & batch.made[:, :-1]
    return ALL_ANCHORS(SimpleNamespace(**vars(batch) | {"made": shifted, "device": batch.device}))


def _across_segments(batch: Batch) -> Tensor:
    """Spans that run on into the next text of a packed row."""
    one = torch.zeros_like(batch.segment)
    return SPAN_ENDS(SimpleNamespace(**vars(batch) | {"segment": one}))


ALL_ANCHORS: Callable[[Any], Tensor] = batch_module.all_anchors
SPAN_ENDS: Callable[[Any], Tensor] = batch_module.span_ends


@pytest.mark.parametrize(
    ("attribute", "fault"), [("all_anchors", _without_first), ("span_ends", _across_segments)]
)
def test_a_wrong_mask_is_noticed(
    monkeypatch: pytest.MonkeyPatch, attribute: str, fault: Callable[[Batch], Tensor]
) -> None:
    """Planted faults: the search above finds both."""
    monkeypatch.setattr(batch_module, attribute, fault)
    assert lossy_positions("small") != wanted_positions()
