"""Row statistics against plain float64 autograd, and how an unroll is cut into chunks.

A wrong gradient still trains, only worse; a chunk that forgets a row biases every number. Both
are silent, hence the checks against code that shares nothing with row_stats.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference
import tiny
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.batch import Alignment, Batch, align
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.acceptance import replay
from draftsmith.eval.overlap.divergences import DIVERGENCES, TOP
from draftsmith.eval.overlap.row_stats import RowStats, chunk_stats, chunks, row_stats

V = tiny.VOCAB
SAMPLERS = {
    "plain": Sampler(),
    "hot": Sampler(1.7),
    "cold": Sampler(0.6),
    "top-k": Sampler(1.0, top_k=9),
    "top-p": Sampler(0.8, top_p=0.85),
    "both": Sampler(1.4, top_k=12, top_p=0.9),
    "greedy": Sampler(0.0),
}
VOCABS = {
    "full": VocabMap(V),
    "reduced": VocabMap(V, torch.tensor([40, 3, 7, 1, 22, 5, 46, 9, 10, 33, 30, 2])),
}
ROWS = 24
stats_of = partial(row_stats, divergences=DIVERGENCES)


def scalar(stats: RowStats, name: str) -> Tensor:
    return stats.divergence[name] if name in DIVERGENCES else getattr(stats, name)


def inputs(vocab: VocabMap) -> tuple[Tensor, Tensor, Tensor]:
    """final (n, H), draft logits (n, Vd) near the target's on most rows, tokens (n,)."""
    target = tiny.target()
    generator = torch.Generator().manual_seed(0)
    final = 2 * torch.randn(ROWS, target.hidden_size, generator=generator)
    with torch.no_grad():
        near = vocab.kept(target.head(final))
    noise = torch.randn(near.shape, generator=generator)
    logits = near + noise * torch.linspace(0.1, 3, ROWS).unsqueeze(1)
    token = torch.randint(0, V, (ROWS,), generator=generator)
    token[0::3] = target.head(final).argmax(1)[0::3]
    token[1::3] = vocab.to_target(logits.argmax(1))[1::3]
    return final, logits.contiguous(), token


def plain_stats(
    logits_p: Tensor, draft_logits: Tensor, token: Tensor, ids: list[int], sampler: Sampler
) -> dict[str, Tensor]:
    """The statistics by their definitions, row by row in float64, differentiable in the draft."""
    cuts = (sampler.temperature, sampler.top_k, sampler.top_p)
    T = sampler.temperature or 1.0
    names = ("alpha", "logp", "logq", *DIVERGENCES)
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    zero = torch.tensor(0.0, dtype=torch.float64)
    for z_p, z, x in zip(logits_p, draft_logits, token.tolist(), strict=True):
        p = reference.sampled(z_p, *cuts)
        p_raw = p if sampler.greedy else reference.sampled(z_p, T, 0, 1.0)
        kept = torch.ones(len(ids)) if sampler.greedy else reference.sampled(z, *cuts) > 0
        raw = torch.log_softmax(z / T, -1)
        q = torch.log_softmax((z / T).masked_fill(kept == 0, -math.inf), -1).exp()
        everywhere = torch.zeros(V, dtype=torch.float64).index_add(0, torch.tensor(ids), q)
        rows["alpha"].append(torch.minimum(p, everywhere).sum())
        rows["logp"].append(p[x].log())
        if sampler.greedy:
            everywhere = torch.zeros(V, dtype=torch.float64)
            everywhere[ids[int(z.argmax())]] = 1.0
        rows["logq"].append(everywhere[x].log() if everywhere[x] > 0 else zero - math.inf)
        rows["ce"].append(-raw[ids.index(x)] if x in ids else zero * raw[0])
        # Token by token of the whole vocabulary; d is its draft id, None where it has none.
        draft = {token: d for d, token in enumerate(ids)}
        best = sorted((p_raw[i].item() for i in ids), reverse=True)[: min(TOP, len(ids))]
        sums = dict.fromkeys(("kl", "rkl", "jsd", "top_k"), raw.sum() * 0)
        for i, p_i in enumerate(p_raw):
            d = draft.get(i)
            if d is None:
                sums["jsd"] = sums["jsd"] + p_i * math.log(2) / 2
                continue
            q_i, m = raw[d].exp(), (p_i + raw[d].exp()) / 2
            if p_i > 0:
                sums["kl"] = sums["kl"] + p_i * (p_i.log() - raw[d])
                sums["jsd"] = sums["jsd"] + p_i * (p_i.log() - m.log()) / 2
            sums["jsd"] = sums["jsd"] + q_i * (raw[d] - m.log()) / 2
            floor = p_i.clamp(min=torch.finfo(torch.float32).tiny).log()
            sums["rkl"] = sums["rkl"] + q_i * (raw[d] - floor)
            if p_i >= best[-1] and p_i > 0:
                sums["top_k"] = sums["top_k"] - p_i * raw[d]
        for name, value in sums.items():
            rows[name].append(value)
    return {name: torch.stack(values) for name, values in rows.items()}


@pytest.mark.parametrize("vocab_name", VOCABS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_statistics_and_gradients(name: str, vocab_name: str) -> None:
    """Every scalar, and every gradient, by its definition over the full vocabulary."""
    sampler, vocab, target = SAMPLERS[name], VOCABS[vocab_name], tiny.target()
    ids = list(range(V)) if vocab.ids is None else vocab.ids.tolist()
    final, logits, token = inputs(vocab)
    with torch.no_grad():
        logits_p = target.head(final).double()
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    stats = stats_of(target, final, ours, token, vocab, sampler)
    known = plain_stats(logits_p, theirs, token, ids, sampler)
    assert 0 < int((known["logq"] > -math.inf).sum()) and int((known["alpha"] > 0.01).sum())
    for key, value in known.items():
        found = scalar(stats, key)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, atol=2e-5, rtol=2e-5)
    for key in ("alpha", "logq", *DIVERGENCES):
        if key == "logq" and sampler.greedy:
            continue  # a step function, see below
        value, found = known[key], scalar(stats, key)
        alive = value > -math.inf
        weight = torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)[alive]
        (expected,) = torch.autograd.grad(
            (value[alive] * weight).sum(), theirs, retain_graph=True, allow_unused=True
        )
        (grad,) = torch.autograd.grad(
            (found[alive] * weight.float()).sum(), ours, retain_graph=True
        )
        torch.testing.assert_close(grad.double(), expected, atol=2e-5, rtol=2e-4)
        assert expected.abs().max() > 1e-2


def test_gradients_by_finite_differences() -> None:
    """Along a random direction: the slope of the definitions, without anybody's autograd."""
    sampler, vocab, target = SAMPLERS["both"], VOCABS["reduced"], tiny.target()
    assert vocab.ids is not None
    final, logits, token = inputs(vocab)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    step = 1e-6  # in float64 no row comes to a cut or a kink of alpha on the way
    with torch.no_grad():
        logits_p = target.head(final).double()
        up, down = (
            plain_stats(logits_p, logits + s * direction, token, vocab.ids.tolist(), sampler)
            for s in (step, -step)
        )
    ours = logits.clone().requires_grad_()
    stats = stats_of(target, final, ours, token, vocab, sampler)
    for key in ("alpha", "logq", *DIVERGENCES):
        value = scalar(stats, key)
        alive = value > -math.inf
        slope = (up[key] - down[key])[alive] / (2 * step)
        (grad,) = torch.autograd.grad(value[alive].sum(), ours, retain_graph=True)
        moved = (grad.double() * direction).sum(1)[alive]
        torch.testing.assert_close(moved, slope, atol=1e-4, rtol=1e-3)
        assert alive.sum() >= 4 and slope.abs().max() > 1e-2


def test_an_infinite_row_does_not_poison_its_batch() -> None:
    """logq is -inf where q cuts the token: its gradient is 0, and its neighbours' is whole."""
    sampler, vocab, target = Sampler(top_k=2), VOCABS["full"], tiny.target()
    final, logits, token = inputs(vocab)
    token[0] = logits[0].argmin()
    ours = logits.clone().requires_grad_()
    stats = stats_of(target, final, ours, token, vocab, sampler)
    assert stats.logq[0] == -math.inf
    stats.logq.backward(torch.ones(ROWS))
    assert ours.grad is not None and ours.grad.isfinite().all()
    assert ours.grad[0].abs().max() == 0
    assert ours.grad[(stats.logq > -math.inf).nonzero()[0]].abs().max() > 0


@pytest.mark.parametrize("vocab_name", VOCABS)
def test_alpha_is_one_minus_tv(vocab_name: str) -> None:
    """Over all of V: mass on tokens the drafter lacks counts as rejected."""
    sampler, vocab, target = SAMPLERS["top-p"], VOCABS[vocab_name], tiny.target()
    final, logits, token = inputs(vocab)
    stats = stats_of(target, final, logits, token, vocab, sampler)
    cuts = (sampler.temperature, sampler.top_k, sampler.top_p)
    for i, z_p in enumerate(target.head(final)):
        p, law = reference.sampled(z_p, *cuts), reference.sampled(logits[i], *cuts)
        q = torch.zeros(V, dtype=torch.float64)
        q[torch.arange(V) if vocab.ids is None else vocab.ids] = law
        assert stats.alpha[i].item() == pytest.approx(
            1 - 0.5 * (p - q).abs().sum().item(), abs=1e-5
        )


def test_greedy_alpha_is_the_likelihood() -> None:
    """At temperature 0 p is one-hot: -log alpha, KL and cross-entropy are one and the same."""
    vocab, target = VOCABS["full"], tiny.target()
    final, logits, _ = inputs(vocab)
    with torch.no_grad():
        best = target.head(final).argmax(1)
    grads = []
    for loss in ("alpha", "kl", "nll"):
        ours = logits.clone().requires_grad_()
        stats = stats_of(target, final, ours, best, vocab, Sampler(0.0))
        nll = torch.nn.functional.cross_entropy(ours, best, reduction="none")
        value = {"alpha": -stats.alpha.log(), "kl": stats.divergence["kl"], "nll": nll}[loss]
        torch.testing.assert_close(value, nll, atol=1e-5, rtol=1e-5)
        grads.append(torch.autograd.grad(value.sum(), ours)[0])
        hit = (logits.argmax(1) == best).float()
        assert torch.equal(stats.logq, hit.log()) and torch.equal(stats.logp, torch.zeros(ROWS))
    torch.testing.assert_close(grads[0], grads[2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grads[1], grads[2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sampler", [Sampler(top_k=1), Sampler(top_k=3), Sampler(0.7, top_k=3)])
def test_tv_gradient_vanishes_at_disjoint_support(sampler: Sampler) -> None:
    """Why alpha alone cannot train a drafter that is wrong everywhere, and KL can."""
    target = tiny.target()
    final, _, token = inputs(VOCABS["full"])
    with torch.no_grad():
        ours = -target.head(final)  # its likeliest tokens are the target's unlikeliest
    ours.requires_grad_()
    stats = stats_of(target, final, ours, token, VOCABS["full"], sampler)
    assert torch.equal(stats.alpha, torch.zeros(ROWS))
    (grad,) = torch.autograd.grad(stats.alpha.sum(), ours, retain_graph=True)
    assert grad.abs().max() == 0
    (grad,) = torch.autograd.grad(stats.divergence["kl"].sum(), ours)
    assert grad.abs().sum(1).min() > 1e-2


def test_large_logits_stay_finite() -> None:
    """0 log 0 and underflow: KL and every gradient stay finite where q is all but one-hot."""
    target, vocab = tiny.target(), VOCABS["full"]
    final, logits, token = inputs(vocab)
    ours = (logits * 300).requires_grad_()
    stats = stats_of(target, final * 50, ours, token, vocab, Sampler(0.5))
    assert stats.divergence["kl"].isfinite().all() and stats.alpha.isfinite().all()
    (stats.divergence["kl"].sum() + stats.alpha.sum()).backward()
    assert ours.grad is not None and ours.grad.isfinite().all()


def test_gap_by_hand() -> None:
    target, vocab = tiny.target(), VocabMap(V, torch.tensor([4, 9, 11]))
    final = torch.zeros(3, target.hidden_size)
    logits = torch.tensor([[1.0, 4.0, 3.5], [2.0, 2.0, 0.0], [-1.0, -7.0, -3.0]])
    stats = stats_of(target, final, logits, torch.tensor([4, 4, 4]), vocab, Sampler(0.0))
    torch.testing.assert_close(stats.gap, torch.tensor([0.5, 0.0, 2.0]))
    stats = stats_of(target, final, logits, torch.tensor([4, 4, 4]), vocab, Sampler(1.0))
    assert (stats.gap == float("inf")).all()


def test_rows_that_share_a_position() -> None:
    """`which` gives what repeating the target's states would give, gradients included."""
    vocab, target, sampler = VOCABS["reduced"], tiny.target(), SAMPLERS["both"]
    final, logits, token = inputs(vocab)
    which = torch.randint(0, 5, (ROWS,), generator=torch.Generator().manual_seed(3))
    grads = []
    for args in ((final[:5], which), (final[which], None)):
        ours = logits.clone().requires_grad_()
        stats = stats_of(target, args[0], ours, token, vocab, sampler, args[1])
        (stats.alpha + stats.divergence["kl"]).sum().backward()
        grads.append((stats.alpha, stats.logp, stats.divergence["kl"], ours.grad))
    for shared, repeated in zip(*grads, strict=True):
        torch.testing.assert_close(shared, repeated, atol=1e-6, rtol=1e-5)


def packed(rows: int = 2, vocab: int = V, length: int = 30) -> Batch:
    """Segments of unequal length in each row, of two turns each, and padding at the end."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, vocab, (rows, length), generator=generator)
    segment = torch.full((rows, length), -1)
    position, made = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    for b in range(rows):
        ends = [0, 11 + b % 3, 24 - b % 3, length - b % 4]
        for s, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            segment[b, start:end] = s
            position[b, start:end] = torch.arange(end - start)
            made[b, start + 3 * (s < 2) : start + 6] = True  # the last one begins with its answer
            made[b, start + 7 : end] = True
    return Batch(tokens, position, segment, made)


@cache
def drafter(name: str, vocab: int = V) -> Drafter:
    settings: dict[str, Any] = {"small": {"layers": [0, 2]}, "eagle": {"taps": [1, 2, 4]}}[name]
    cls = family(name)
    torch.manual_seed(0)
    return cls.create(tiny.target(vocab=vocab), cls.Config(**settings)).eval()


def cells(batch: Batch, depths: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(row, anchor, depth) -> (position compared, label), by the rule of drafters/batch.py."""
    out = {}
    made, segment = batch.made.tolist(), batch.segment.tolist()
    for b, row in enumerate(batch.tokens.tolist()):
        for a in range(len(row) - 1):
            if not made[b][a + 1] or segment[b][a] != segment[b][a + 1]:
                continue
            for j in range(depths):
                x = a + 2 + j
                within = x < len(row) and made[b][x] and segment[b][x] == segment[b][a]
                if not within:
                    break
                out[b, a, j] = (a + 1 + j, row[x])
    return out


@pytest.mark.parametrize("name", ["small", "eagle"])
@pytest.mark.parametrize("limit", [1, 7, 16, 10_000])
def test_chunks_cover_every_cell_once(name: str, limit: int) -> None:
    """Each existing (anchor, depth) once, with its own label and the position it is compared at."""
    batch, depths = packed(), 3
    T = batch.tokens.shape[1]
    tiny.target().read(batch, drafter(name).taps)
    alignment = align(batch, depths)
    unroll = drafter(name).unroll(batch, alignment)
    parts = list(chunks(batch, alignment, unroll, limit))
    assert all(part.exists.sum() <= max(limit, depths) for part in parts)
    wanted = cells(batch, depths)
    exists = torch.cat([part.exists for part in parts])
    label = torch.cat([part.by_depth(part.token, -1) for part in parts])
    compare = torch.cat([part.by_depth(part.final[part.which], -1) for part in parts])
    rows = torch.cat([part.by_depth(part.rows, -1) for part in parts])
    assert int(exists.sum()) == len(wanted)
    anchors = list(dict.fromkeys((b, a) for b, a, _ in wanted))  # in order, each once
    assert len(anchors) == len(exists)
    index = {
        (b, int(a)): unroll.index[b, i]
        for b in range(2) for i, a in enumerate(alignment.anchors[b]) if a >= 0
    }  # fmt: skip
    for i, (b, a) in enumerate(anchors):
        for j in range(depths):
            at, token = wanted.get((b, a, j), (-1, -1))
            assert label[i, j] == token
            assert compare[i, j] == (b * T + at if at >= 0 else -1)
            assert rows[i, j] == (index[b, a][j] if at >= 0 else -1)
    for part in parts:
        assert part.rows.unique().numel() == len(part.rows), "a row's logits are made once"
        assert part.final.unique().numel() == len(part.final)


def table(
    name: str, batch: Batch, alignment: Alignment, limit: int, value: Callable[[RowStats], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """A statistic over all cells in order, and the drafter's gradients of its sum."""
    model = drafter(name)
    model.zero_grad()
    unroll = model.unroll(batch, alignment)
    out = []
    for part in chunks(batch, alignment, unroll, limit):
        stats = chunk_stats(model, batch, unroll, part, ("kl",))
        cell = part.by_depth(value(stats), 0.0)
        cell.sum().backward(retain_graph=True)
        out.append(cell.detach())
    grads = [w.grad.clone() for w in model.parameters() if w.grad is not None]
    return torch.cat(out), grads


@pytest.mark.parametrize("name", ["small", "eagle"])
@pytest.mark.parametrize("key", ["alpha", "kl"])
def test_chunk_size_changes_nothing(name: str, key: str) -> None:
    """Neither a value nor a gradient, beyond fp32 rounding."""
    batch = packed()
    tiny.target().read(batch, drafter(name).taps)
    alignment = align(batch, 3)
    whole, grads = table(name, batch, alignment, 10_000, lambda s: scalar(s, key))
    assert whole.abs().max() > 0 and grads
    for limit in (1, 8):
        values, again = table(name, batch, alignment, limit, lambda s: scalar(s, key))
        torch.testing.assert_close(values, whole, atol=1e-5, rtol=1e-5)
        for a, b in zip(again, grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * float(b.abs().max() + 1), rtol=1e-4)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):  # an expanded view is as small as what it views
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return out


@pytest.mark.parametrize("name", ["small", "eagle"])
def test_no_tensor_over_all_positions_and_tokens(name: str) -> None:
    """Memory grows with the chunk: nothing of size B * T * V is ever made in a replay."""
    vocab = 4096
    batch = packed(rows=16, vocab=vocab, length=80)
    model = drafter(name, vocab)
    size = batch.tokens.numel() * vocab
    with Largest() as seen:
        model.target.read(batch, model.taps)
        tables = replay.text_ratios(model, batch, 2)
    assert sum(t.tokens for t in tables) > 800
    assert seen.numel <= 512 * vocab < size / 2
    with Largest() as seen, torch.no_grad():  # and the probe sees one when it is there
        assert batch.final is not None
        model.target.head(batch.final)
    assert seen.numel == size
