"""The objective: loss and gradients against float64 code that holds all of B*T*K*V.

A loss on the wrong cells, or weighed wrongly between micro-batches, still falls: only a comparison
with code that shares nothing shows it. Laws come from tests/reference*.py and from transformers'
own forward, one text at a time, without packing, chunks or padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
import reference_eagle
import tiny
from draftsmith.drafters import batch as batch_module
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.sampling import Sampler
from draftsmith.train.objective import Objective, backward, denominator
from draftsmith.train.packing import collate
from draftsmith.train.reader import Sample, Samples
from draftsmith.train.weights import DepthWeights, Sums

K = 3
V = tiny.VOCAB
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"taps": [1, 2, 4]},
    "eagle-reduced": {"taps": [1, 4, "normed"], "draft_vocab": 20, "head": "own"},
    "eagle-target-head": {"taps": [2, 3], "draft_vocab": 30, "head": "target"},
    "small": {"layers": [0, 3]},
    "small-own": {"layers": [2], "embeddings": "own"},
}
# Turns as (count, made by the target?): a long answer, two turns, a text without a prompt, an
# answer of two tokens (one cell), of one (none), and a prompt alone.
TURNS = [
    [(4, False), (10, True)],
    [(3, False), (4, True), (3, False), (7, True)],
    [(3, True)],
    [(5, False), (2, True)],
    [(6, False), (1, True)],
    [(4, False)],
]
ROWS = [[0, 2, 4], [3, 5, 1]]  # packed; text 2 starts made, right after text 0 ended made


@cache
def texts() -> list[tuple[list[int], list[bool]]]:
    generator = torch.Generator().manual_seed(5)
    out = []
    for turns in TURNS:
        made = [flag for count, flag in turns for _ in range(count)]
        ids = torch.randint(2, V, (len(made),), generator=generator).tolist()
        out.append((ids, made))
    return out


class Stored(Samples):
    """Samples in memory."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.foreign = sampler, False

    def __getitem__(self, index: int) -> Sample:
        return Sample(*texts()[index], "stop", "", "")


def packed(rows: list[list[int]] = ROWS, sampler: Sampler | None = None) -> Batch:
    return collate(Stored(sampler or Sampler()), rows, 64)


@cache
def drafter(name: str) -> Drafter:
    """A drafter whose laws are peaked; treat it as read-only."""
    cls, of = family(name.split("-")[0]), tiny.target()
    torch.manual_seed(1)
    made = cls.create(of, cls.Config(**SETTINGS[name]), torch.arange(V) * 5 % 7)
    with torch.no_grad():
        for parameter in (p for p in made.parameters() if p.requires_grad):
            scale = 0.3 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn_like(parameter))
    return made


Cut = tuple[float, int, float]


def run(
    name: str,
    batch: Batch,
    objective: Objective,
    total: float | None = None,
    rows: int = 16,
    depths: int = K,
) -> tuple[Sums, dict[str, Tensor]]:
    """Our loss and gradients of one batch. total None: its own denominator."""
    of = drafter(name)
    tiny.target().read(batch, of.taps)
    of.zero_grad(set_to_none=True)
    total = denominator(batch, depths, objective) if total is None else total
    sums = backward(of, batch, depths, objective, total, rows)
    return sums, grads(of)


def grads(of: Drafter) -> dict[str, Tensor]:
    """Of every trained parameter: zeros where none arrived."""
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in of.named_parameters()
        if p.requires_grad
    }


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, by each tensor's own size."""
    assert ours.keys() == theirs.keys()
    scale = max(float(t.abs().max()) for t in theirs.values())
    return max(
        float((ours[n].double() - theirs[n].double()).abs().max())
        / max(float(theirs[n].abs().max()), 1e-3 * scale)
        for n in ours
    )


# ---------------------------------------------------------------- everything at once, in float64


def cells(made: list[bool], depths: int) -> list[tuple[int, int]]:
    """(anchor, depth) of one text, by walking DESIGN.md's rule; label at anchor + 2 + depth."""
    return [
        (a, j)
        for a in range(len(made) - 1)
        for j in range(depths)
        if a + 2 + j < len(made) and all(made[a + 1 : a + 3 + j])
    ]


@dataclass
class Table:
    """Every cell's depth, target logits (n, V) and draft logits (n, Vd), in float64.

    leaves: the drafter's parameters that the draft logits are a function of. ids: the target
    token of each draft logit.
    """

    leaves: dict[str, Tensor]
    depth: list[int]
    p: Tensor
    q: Tensor
    ids: Tensor


@cache
def table(name: str, depths: int = K) -> Table:
    of = drafter(name)
    hf = tiny.hf_model("Llama").double()
    hf.requires_grad_(False)
    wrt = {n: p.detach().double() for n, p in of.named_parameters()}
    leaves = {n: wrt[n].requires_grad_() for n, p in of.named_parameters() if p.requires_grad}
    depth, p, q = [], [], []
    if name.startswith("eagle"):
        weights = leaves | {n: b for n, b in of.named_buffers() if n == "draft_ids"}
        config = of.config.model_dump()
        logits_of = reference_eagle.eagle_logits.__wrapped__  # type: ignore[attr-defined]
        ids = weights.get("draft_ids", torch.arange(V))
    else:
        small = copy.deepcopy(of.lm.hf).double()  # type: ignore[union-attr]
        small.set_attn_implementation("eager")
        ids = torch.arange(V)
    for tokens, made in texts():
        here = cells(made, depths)
        if not here:
            continue
        laws = hf(torch.tensor([tokens]), use_cache=False).logits[0]
        if not name.startswith("eagle"):
            plain = {n.removeprefix("lm.hf."): t for n, t in leaves.items()}
            inputs = {"input_ids": torch.tensor([tokens]), "use_cache": False}
            drafted = torch.func.functional_call(small, plain, (), inputs).logits[0]
        for a, j in here:
            depth.append(j)
            p.append(laws[a + 1 + j])
            if name.startswith("eagle"):
                q.append(logits_of(weights, config, hf, tokens, a, j)[0])
            else:
                q.append(drafted[a + 1 + j])
    return Table(leaves, depth, torch.stack(p), torch.stack(q), ids)


def law(logits: Tensor, cut: Cut) -> Tensor:
    """The sampler's law (n, ..), differentiable; at temperature 0 the logits' own at 1."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if cut[0]:
        kept = torch.stack([reference.sampled(z, *cut) > 0 for z in logits])
    return (logits / (cut[0] or 1.0)).masked_fill(~kept, -torch.inf).softmax(-1)


def expected(name: str, objective: Objective, cut: Cut, depths: int = K) -> tuple[float, dict]:
    """Weighted sum of the loss, and the gradients of its weighted mean."""
    t = table(name, depths)
    p = torch.stack([reference.sampled(z, *cut) for z in t.p])
    if objective.loss == "kl":
        raw = (cut[0] or 1.0, 0, 1.0)
        p = torch.stack([reference.sampled(z, *raw) for z in t.p]) if cut[0] else p
        terms = torch.xlogy(p[:, t.ids], p[:, t.ids]) - p[:, t.ids] * law(t.q, raw).log()
        value = terms.sum(1)
    else:
        q = torch.zeros_like(p).index_copy(1, t.ids, law(t.q, cut))
        overlap = torch.minimum(p, q).sum(1)
        value = 1 - overlap if objective.loss == "tv" else -overlap.clamp(min=1e-6).log()
    weight = torch.tensor([objective.weights.decay**j for j in t.depth], dtype=torch.float64)
    numerator = (weight * value).sum()
    found = torch.autograd.grad(
        numerator / weight.sum(), list(t.leaves.values()), retain_graph=True, allow_unused=True
    )
    pairs = zip(t.leaves.items(), found, strict=True)
    return numerator.item(), {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}


PLAIN, CUT, GREEDY = (1.0, 0, 1.0), (0.7, 12, 0.95), (0.0, 0, 1.0)


@pytest.mark.parametrize(
    ("loss", "cut"),
    [("kl", PLAIN), ("kl", CUT), ("tv", PLAIN), ("tv", GREEDY), ("log_alpha", CUT)],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_every_gradient(name: str, loss: str, cut: Cut) -> None:
    """A wrong offset, mask, weight, vocabulary or chain rule in the chunked pass."""
    objective = Objective(loss, DepthWeights(decay=0.8 if loss == "kl" else 0.5))
    sums, ours = run(name, packed(sampler=Sampler(*cut)), objective)
    value, theirs = expected(name, objective, cut)
    assert sums.loss == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert distance(ours, theirs) < 2e-3
    alive = sum(float(g.abs().max()) > 1e-5 for g in theirs.values())
    assert alive == len(theirs), "every parameter is reached"


def test_the_comparison_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: equal depth weights, another loss, a missing last depth."""
    objective = Objective("kl")
    value, theirs = expected("eagle", objective, PLAIN)
    for fault in (Objective("kl", DepthWeights("constant")), Objective("tv")):
        sums, ours = run("eagle", packed(), fault)
        assert distance(ours, theirs) > 0.05 and abs(sums.loss / value - 1) > 0.05
    sums, ours = run("eagle", packed(), objective, depths=K - 1)
    assert distance(ours, theirs) > 0.05


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


@pytest.mark.parametrize("loss", ["kl", "log_alpha"])
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

UNEVEN = [[0], [3], [1], [2]]  # 24, 1, 21 and 1 cells


def micro_batched(
    name: str, objective: Objective, total_of: Callable[[Batch], float]
) -> dict[str, Tensor]:
    """Gradients of one row a micro-batch, each divided by total_of(its batch)."""
    of = drafter(name)
    of.zero_grad(set_to_none=True)
    for row in UNEVEN:
        batch = tiny.target().read(packed([row]), of.taps)
        backward(of, batch, K, objective, total_of(batch), 16)
    return grads(of)


@pytest.mark.parametrize("name", ["eagle", "small"])
def test_micro_batches_weigh_tokens(name: str) -> None:
    """Four micro-batches are the one batch they were cut from; a mean of their means is not."""
    objective = Objective()
    whole = denominator(packed(UNEVEN), K, objective)
    parts = [denominator(packed([row]), K, objective) for row in UNEVEN]
    assert sum(parts) == pytest.approx(whole) and max(parts) > 10 * min(parts)
    _, theirs = run(name, packed(UNEVEN), objective, whole)
    assert distance(micro_batched(name, objective, lambda _: whole), theirs) < 1e-4
    planted = micro_batched(name, objective, lambda b: len(UNEVEN) * denominator(b, K, objective))
    assert distance(planted, theirs) > 0.1


def test_a_batch_without_cells() -> None:
    """A row whose answers have one token each adds nothing, and does not divide by zero."""
    batch = packed([[4, 5]])
    assert denominator(batch, K, Objective()) == 0
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
        return backward(of, batch, K, objective, 1.0, 10_000).loss

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
    its label the second. A mask that is shifted by one leaves just this out (pitfall T5).
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
