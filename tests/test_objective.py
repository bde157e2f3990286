"""The objective: loss and gradients against float64 code that holds all of B*T*K*V.

A loss on the wrong cells, or weighed wrongly between micro-batches, still falls: only a comparison
with code that shares nothing shows it. Laws come from tests/reference*.py and from transformers'
own forward, one text at a time, without packing, chunks or padding.
"""

from __future__ import annotations

import copy
import dataclasses
import math
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
import reference_mtp
import reference_replay
import tiny
from draftsmith.drafters import batch as batch_module
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.batch import Batch, align
from draftsmith.drafters.eagle1 import Eagle1
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.eval import replay
from draftsmith.train import objective as objective_module
from draftsmith.train.objective import LOSSES, Objective, backward, denominator
from draftsmith.train.packing import collate
from draftsmith.train.reader import Sample, Samples
from draftsmith.train.weights import DepthWeights, Running, Sums, reached

K = 3
V = tiny.VOCAB
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"taps": [1, 2, 4]},
    "eagle-reduced": {"taps": [1, 4, "normed"], "draft_vocab": 20, "head": "own"},
    "eagle-target-head": {"taps": [2, 3], "draft_vocab": 30, "head": "target"},
    "small": {"layers": [0, 3]},
    "small-own": {"layers": [2], "embeddings": "own"},
}
STATES: dict[str, dict[str, Any]] = {"eagle1": {"regression": 10}}
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
    made = cls.create(of, cls.Config(**(SETTINGS | STATES)[name]), torch.arange(V) * 5 % 7)
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
    running: Running | None = None,
) -> tuple[Sums, dict[str, Tensor]]:
    """Our loss and gradients of one batch. total None: its own denominator."""
    of = drafter(name)
    tiny.target().read(batch, of.taps)
    of.zero_grad(set_to_none=True)
    alignment = align(batch, depths)
    total = denominator(batch, alignment, objective) if total is None else total
    by = noise(len(batch.tokens))
    sums = backward(of, batch, alignment, objective, total, rows, running, by)
    return sums, grads(of)


def noise(rows: int, step: int = 0, first: int = 0) -> Noise:
    """That of a step's rows from its `first` on."""
    places = torch.arange(first, first + rows)
    return Noise(0, places, torch.full_like(places, step))


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
    """(anchor, depth) of a text, by the rule of drafters/batch.py; label at anchor + 2 + depth."""
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
    token of each draft logit. cells: (text, anchor, depth); label: the token that each predicts.
    """

    leaves: dict[str, Tensor]
    depth: list[int]
    p: Tensor
    q: Tensor
    ids: Tensor
    cells: list[tuple[int, int, int]]
    label: list[int]


@cache
def table(name: str, depths: int = K) -> Table:
    of = drafter(name)
    hf = tiny.hf_model("Llama").double()
    hf.requires_grad_(False)
    wrt = {n: p.detach().double() for n, p in of.named_parameters()}
    leaves = {n: wrt[n].requires_grad_() for n, p in of.named_parameters() if p.requires_grad}
    depth, p, q, places, label = [], [], [], [], []
    if name.startswith("eagle"):
        weights = leaves | {n: b for n, b in of.named_buffers() if n == "draft_ids"}
        config = of.config.model_dump()
        ids = weights.get("draft_ids", torch.arange(V))
    else:
        small = copy.deepcopy(of.lm.hf).double()  # type: ignore[union-attr]
        small.set_attn_implementation("eager")
        ids = torch.arange(V)
    for i, (tokens, made) in enumerate(texts()):
        here = cells(made, depths)
        if not here:
            continue
        laws = hf(torch.tensor([tokens]), use_cache=False).logits[0]
        if not name.startswith("eagle"):
            plain = {n.removeprefix("lm.hf."): t for n, t in leaves.items()}
            inputs = {"input_ids": torch.tensor([tokens]), "use_cache": False}
            drafted = torch.func.functional_call(small, plain, (), inputs).logits[0]
        for a, j in here:
            if name.startswith("eagle") and j == 0:  # all depths that this anchor has, at once
                deepest = max(d for anchor, d in here if anchor == a)
                outputs = reference_eagle.eagle_outputs(weights, config, hf, tokens, a, deepest)
            depth.append(j)
            places.append((i, a, j))
            label.append(tokens[a + 2 + j])
            p.append(laws[a + 1 + j])
            if name.startswith("eagle"):
                q.append(reference_eagle.eagle_head(weights, config, hf, outputs[j])[0])
            else:
                q.append(drafted[a + 1 + j])
    return Table(leaves, depth, torch.stack(p), torch.stack(q), ids, places, label)


def law(logits: Tensor, cut: Cut) -> Tensor:
    """The sampler's law (n, ..), differentiable; at temperature 0 the logits' own at 1."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if cut[0]:
        kept = torch.stack([reference.sampled(z, *cut) > 0 for z in logits])
    return (logits / (cut[0] or 1.0)).masked_fill(~kept, -torch.inf).softmax(-1)


def chains(t: Table, values: Tensor) -> Tensor:
    """Product of values (n,) over the depths of a cell's anchor up to it."""
    out: list[Tensor] = []
    for (_, _, j), value in zip(t.cells, values, strict=True):
        out.append(value if j == 0 else out[-1] * value)
    return torch.stack(out)


def expected_passes(t: Table, survival: Tensor) -> Tensor:
    """n(first anchor) summed over texts, by the recursion of eval/replay.py; differentiable."""
    at = {cell: survival[i] for i, cell in enumerate(t.cells)}
    one = torch.ones((), dtype=torch.float64)

    @cache
    def n(text: int, a: int) -> Tensor:
        if (text, a, 0) not in at:  # the root ends the text
            return 0 * one
        S = [one]
        while (cell := (text, a, len(S) - 1)) in at:
            S.append(at[cell])
        ends = [*S[1:], 0 * one]
        return 1 + sum((S[m] - ends[m]) * n(text, a + 1 + m) for m in range(len(S)))

    total = 0 * one
    for text, (_, made) in enumerate(texts()):
        for a in range(len(made) - 1):
            if made[a + 1] and not made[a]:
                total = total + n(text, a)
        if made[0]:
            total = total + n(text, 0)
    return total


def statistics(t: Table, cut: Cut) -> dict[str, Tensor]:
    """What losses are made of, over the whole vocabulary, by definition."""
    raw = (cut[0] or 1.0, 0, 1.0)
    p = torch.stack([reference.sampled(z, *cut) for z in t.p])
    p_raw = torch.stack([reference.sampled(z, *raw) for z in t.p]) if cut[0] else p
    zero = torch.zeros_like(p)
    q, q_raw = (zero.index_copy(1, t.ids, law(t.q, c)) for c in (cut, raw))
    kept = torch.zeros(V, dtype=torch.bool).index_fill(0, t.ids, True)
    label = torch.tensor(t.label).unsqueeze(1)
    log_q = torch.where(kept, q_raw.clamp(min=1e-300).log(), 0.0)
    log_p = p_raw.clamp(min=1e-300).log()
    middle = ((p_raw + q_raw) / 2).clamp(min=1e-300).log()
    best = p_raw * kept >= (p_raw * kept).topk(10, dim=1).values[:, -1:]
    overlap = torch.minimum(p, q).sum(1)
    ours, theirs = (x.gather(1, label).squeeze(1) for x in (q, p))
    ratio = torch.where(theirs > 0, ours / theirs.clamp(min=1e-300), (ours > 0).double())
    return {
        "alpha": overlap,
        "ratio": ratio.clamp(max=1.0) if cut[0] else overlap,
        "likelihood": ours if cut[0] else overlap,
        "ce": -log_q.gather(1, label).squeeze(1),
        "kl": (kept * (torch.xlogy(p_raw, p_raw) - p_raw * log_q)).sum(1),
        "rkl": (q_raw * (log_q - log_p)).sum(1),
        "jsd": (p_raw * (log_p - middle) + q_raw * (log_q - middle)).sum(1) / 2,
        "top_k": -(best * kept * p_raw * log_q).sum(1),
    }


def per_cell(loss: str, s: dict[str, Tensor], t: Table, mix: Tensor | None = None) -> Tensor:
    """A loss's value (n,), by its paper."""
    if loss == "tv":
        return 1 - s["alpha"]
    if loss == "log_alpha":
        return -s["alpha"].clamp(min=1e-6).log()
    if loss == "lk":
        lam = torch.ones_like(s["alpha"]) if mix is None else mix.double()[torch.tensor(t.depth)]
        return lam * s["kl"] + (1 - lam) * (1 - s["alpha"])
    if loss == "l1_ce":
        return 0.1 * s["ce"] + 0.9 * 2 * (1 - s["alpha"])
    if loss == "hass":
        return s["kl"] + s["top_k"]
    if loss == "expected":
        return 1 - chains(t, s["alpha"])
    return s[loss]


def cell_weights(weights: DepthWeights, t: Table, s: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weights (n,) known beforehand, and those that follow from the drafter, by their papers."""
    depth = torch.tensor(t.depth)
    fixed = torch.ones(len(depth), dtype=torch.float64)
    if weights.kind == "geometric":
        fixed = weights.decay ** depth.double()
    if weights.kind == "exponential":
        fixed = torch.exp(-depth.double() / weights.span)
    if weights.per == "sequence":  # a text counts 1 in all, however long it is
        text = torch.tensor([cell[0] for cell in t.cells])
        fixed = fixed / torch.zeros(len(TURNS)).double().index_add(0, text, fixed)[text]
    moving = torch.ones_like(fixed)
    with torch.no_grad():
        if weights.kind == "reach":  # that all depths before it are accepted
            whole = chains(t, s["ratio"])
            for i, j in enumerate(t.depth):
                moving[i] = whole[i - 1] if j else 1.0
        if weights.kind == "dpace":  # sum over k >= j of prod over i <= k of (q_i + 1) / 2
            whole = chains(t, (s["likelihood"] + 1) / 2)
            for i, (text, a, j) in enumerate(t.cells):
                later = [
                    t.cells.index((text, a, k)) for k in range(j, K) if (text, a, k) in t.cells
                ]
                moving[i] = whole[later].sum()
    return fixed, moving


def expected(
    name: str, objective: Objective, cut: Cut, depths: int = K, mix: Tensor | None = None
) -> tuple[float, dict]:
    """Weighted sum of the loss, and the gradients of its weighted mean."""
    t = table(name, depths)
    s = statistics(t, cut)
    if objective.loss.startswith("replay"):
        survival = chains(t, s["ratio"])
        loss = expected_passes(t, survival)
        numerator, total = loss.item(), float(t.depth.count(0))
        if objective.loss == "replay_alpha":  # slopes by autograd, then the last factor replaced
            leaf = survival.detach().requires_grad_()
            (slope,) = torch.autograd.grad(expected_passes(t, leaf), leaf)
            before = torch.stack(
                [chains(t, s["ratio"])[i - 1] if j else torch.ones_like(s["ratio"][0])
                 for i, (_, _, j) in enumerate(t.cells)]
            )  # fmt: skip
            loss = (slope * before * s["alpha"]).sum()
        loss = loss / total
    else:
        value = per_cell(objective.loss, s, t, mix)
        fixed, moving = cell_weights(objective.weights, t, s)
        numerator = (fixed * moving * value).sum().item()
        loss = (fixed * moving * value).sum() / fixed.sum()
    found = torch.autograd.grad(loss, list(t.leaves.values()), retain_graph=True, allow_unused=True)
    pairs = zip(t.leaves.items(), found, strict=True)
    return numerator, {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}


PLAIN, CUT, GREEDY = (1.0, 0, 1.0), (0.7, 12, 0.95), (0.0, 0, 1.0)
WIDE = (2.0, 44, 0.999)  # keeps most of these random texts possible


@pytest.mark.parametrize(
    ("loss", "cut"),
    [("kl", PLAIN), ("kl", CUT), ("tv", GREEDY), ("log_alpha", CUT), ("replay", PLAIN)],
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


@pytest.mark.parametrize("cut", [PLAIN, WIDE, GREEDY], ids=["plain", "cut", "greedy"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss(loss: str, cut: Cut) -> None:
    """Value and gradients of each loss by its definition, with a reduced vocabulary."""
    if (loss, cut) == ("rkl", GREEDY):
        pytest.skip("infinite there; a recipe is refused")
    objective = Objective(loss, DepthWeights("exponential", span=2.0))
    running = Running(torch.tensor([3.0, 1.0, 0.5]), torch.tensor([5.0, 4.0, 2.0]))
    sums, ours = run("eagle-reduced", packed(sampler=Sampler(*cut)), objective, running=running)
    mix = torch.exp(-3.0 * torch.tensor([0.6, 0.25, 0.25]))
    value, theirs = expected("eagle-reduced", objective, cut, mix=mix)
    assert sums.loss == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert distance(ours, theirs) < 2e-3
    assert max(float(g.abs().max()) for g in theirs.values()) > 1e-4


@pytest.mark.parametrize("loss", ["replay", "replay_alpha"])
@pytest.mark.parametrize("cut", [PLAIN, WIDE], ids=["plain", "cut"])
def test_the_replay_objective_is_what_replay_measures(loss: str, cut: Cut) -> None:
    """Verify passes as eval/replay.py counts them, and as tests/ enumerates every walk."""
    batch = packed(sampler=Sampler(*cut))
    sums, _ = run("eagle", batch, Objective(loss))
    with torch.no_grad():
        tables = replay.tables(drafter("eagle"), batch, K)
    measured = sum(float(replay.moments(t, K).mean[0]) for t in tables)
    t = table("eagle")
    ratio = statistics(t, cut)["ratio"].tolist()
    rows: dict[tuple[int, int], list[list[float]]] = {}
    span = 0
    for i, (text, a, j) in enumerate(t.cells):
        if j == 0:
            span += not (i and t.cells[i - 1][:2] == (text, a - 1))
            rows.setdefault((text, span), []).append([])
        rows[text, span][-1].append(ratio[i])
    walked = sum(reference_replay.expected_passes(r) for r in rows.values())
    assert sums.loss == pytest.approx(measured, rel=1e-6)
    assert sums.loss == pytest.approx(walked, rel=1e-5)
    assert sums.total == sum(t.tokens for t in tables)


def test_a_wrong_slope_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: slopes that forget how likely a round starts there, or what a rejection saves."""
    objective = Objective("replay")
    _, theirs = expected("eagle", objective, PLAIN)
    right = objective_module.passes

    def flat(survival: Tensor, *rest: Any) -> tuple[float, Tensor]:
        count, slope = right(survival, *rest)
        return count, -slope.bool().to(slope.dtype)

    monkeypatch.setattr(objective_module, "passes", flat)
    assert distance(run("eagle", packed(), objective)[1], theirs) > 0.05


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["constant", "geometric", "exponential", (1.0, 0.0, 2.0)])
def test_fixed_weights(kind: Any, per: str) -> None:
    """Each cell's weight by hand; their sum is the denominator, or the number of texts."""
    weights = DepthWeights(kind, 0.5, 3.0, per)
    batch = packed()
    found = weights.cells(batch, batch_module.align(batch, K))
    t = table("eagle")
    by_hand = {"constant": [1, 1, 1], "geometric": [1, 0.5, 0.25],
               "exponential": [math.exp(-j / 3) for j in range(3)]}  # fmt: skip
    each = by_hand[kind] if isinstance(kind, str) else list(kind)
    wanted = torch.tensor([float(each[j]) for _, _, j in t.cells])
    texts_of = torch.tensor([text for text, _, _ in t.cells])
    if per == "sequence":
        totals = torch.zeros(len(TURNS)).index_add(0, texts_of, wanted)
        wanted = wanted / totals[texts_of]
        assert found.sum() == pytest.approx(len({*texts_of.tolist()}))
    assert sorted(found[found > 0].tolist()) == pytest.approx(sorted(wanted[wanted > 0].tolist()))
    assert denominator(batch, align(batch, K), Objective("kl", weights)) == pytest.approx(
        wanted.sum().item()
    )


def test_moving_weights_by_hand() -> None:
    """D-PACE and reach on two anchors, the second of which has one depth only."""
    ratio = torch.tensor([[0.5, 0.2, 1.0], [0.4, 0.0, 0.0]])
    exists = torch.tensor([[True, True, True], [True, False, False]])
    reach = DepthWeights("reach").moving(ratio, ratio, exists)
    assert reach is not None
    torch.testing.assert_close(reach, torch.tensor([[1.0, 0.5, 0.1], [1.0, 0.0, 0.0]]))
    dpace = DepthWeights("dpace").moving(ratio, ratio, exists)
    assert dpace is not None
    a, b, c = 0.75, 0.75 * 0.6, 0.75 * 0.6 * 1.0
    torch.testing.assert_close(dpace, torch.tensor([[a + b + c, b + c, c], [0.7, 0.0, 0.0]]))


MOVING = [
    DepthWeights("dpace"), DepthWeights("reach"), DepthWeights("reach", per="sequence"),
    DepthWeights(per="sequence"),
]  # fmt: skip


def check_weights(weights: DepthWeights, cut: Cut) -> None:
    """Loss and gradients of a first step, and of one that knows the weights' mean."""
    objective, running = Objective("tv", weights), Running.start(K)
    batch = packed(sampler=Sampler(*cut))
    value, theirs = expected("eagle-reduced", objective, cut)
    t = table("eagle-reduced")
    fixed, moving = cell_weights(weights, t, statistics(t, cut))
    mean = float((fixed * moving).sum() / fixed.sum())
    for divided in (1.0, mean):
        sums, ours = run("eagle-reduced", batch, objective, running=running)
        assert sums.loss == pytest.approx(value / divided, rel=1e-4)
        assert distance(ours, {n: g / divided for n, g in theirs.items()}) < 2e-3
        running.update(sums)


@pytest.mark.parametrize("cut", [PLAIN, WIDE, GREEDY], ids=["plain", "cut", "greedy"])
@pytest.mark.parametrize("weights", MOVING, ids=["dpace", "reach", "reach by text", "by text"])
def test_weights_and_every_gradient(weights: DepthWeights, cut: Cut) -> None:
    """Once the mean of weights that move is known, it is 1: the learning rate stays what it is."""
    check_weights(weights, cut)


def _learned(self: DepthWeights, ratio: Tensor, likelihood: Tensor, exists: Tensor) -> Tensor:
    """Weights that are part of the loss."""
    if self.kind == "reach":
        return reached(ratio) * exists
    chain = torch.cumprod((likelihood + 1) / 2, 1) * exists
    return chain.flip(1).cumsum(1).flip(1)


def _accepted(self: DepthWeights, ratio: Tensor, likelihood: Tensor, exists: Tensor) -> Tensor:
    """The chance that a depth is accepted too, not only reached."""
    return torch.cumprod(ratio.detach() if self.kind == "reach" else likelihood.detach(), 1)


@pytest.mark.parametrize("fault", [_learned, _accepted])
@pytest.mark.parametrize("weights", MOVING[:2], ids=["dpace", "reach"])
def test_weights_planted(
    weights: DepthWeights, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DepthWeights, "moving", fault)
    with pytest.raises(AssertionError):
        check_weights(weights, PLAIN)


def test_a_replay_loss_leaves_the_mean_of_weights_alone() -> None:
    """It reads no weights that move: after thirty steps of it, the next loss begins as a first."""
    weights, running = DepthWeights("reach"), Running.start(K)
    before, _ = run("eagle", packed(), Objective("replay", weights))
    for _ in range(30):
        running.update(before)
    assert running.mean_factor == 1.0
    sums, _ = run("eagle", packed(), Objective("kl", weights), running=running)
    running.update(sums)
    assert running.mean_factor == pytest.approx(sums.factor / sums.total)


def test_curriculum_advances_by_alpha() -> None:
    running = Running(torch.tensor([4.0]), torch.tensor([10.0]))
    assert not running.advance([0.5, 0.6]) and running.stage == 0
    running.alpha += 1.5
    assert running.advance([0.5, 0.6]) and running.stage == 1
    assert not running.advance([0.5, 0.6])
    running.alpha += 1
    assert running.advance([0.5, 0.6]) and not running.advance([0.5, 0.6])


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
