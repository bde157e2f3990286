"""The objective in float64, by definition: losses, weights, every gradient of a packed batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import reference
import reference_eagle
import tiny
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.batch import Batch, align
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.train.objective.losses import Objective, backward, denominator
from draftsmith.train.objective.weights import DepthWeights, Running, Sums
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Sample, Samples

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


PLAIN, CUT, GREEDY = (1.0, 0, 1.0), (0.7, 12, 0.95), (0.0, 0, 1.0)
