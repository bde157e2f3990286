"""Attention of blocks: the merged form against all scores at once, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from contracts import drafter
from draftsmith.drafters import dflash
from draftsmith.drafters.batch import align
from draftsmith.drafters.parts import block_attention
from draftsmith.drafters.parts.block_attention import context_and_block
from draftsmith.drafters.parts.diagonal import causal_and_diagonal
from forms import unrolled_alike
from largest import Largest
from objectives import packed

Attend = Callable[..., Tensor]
TRIANGLE = torch.ones(5, 5, dtype=torch.bool).tril()
SHAPES = [(1, 1, None), (1, 4, None), (5, 5, None), (5, 5, TRIANGLE)]  # N, M, own


def case(dtype: torch.dtype, N: int, M: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves, what is seen, and a direction; every query sees a key, some only one."""
    B, h, A, T, D = 2, 3, 19, 70, 8
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype).requires_grad_()

    seen = torch.rand(B, A, T, generator=generator) > 0.4
    seen[:, 5] = False
    seen[..., 0] = True
    sizes = [(B, h, A, N, D), (B, h, T, D), (B, h, T, D), (B, h, A, M, D), (B, h, A, M, D)]
    leaves = [random(*size) for size in sizes]
    return leaves, seen, torch.randn(sizes[0], generator=generator, dtype=dtype)


def run(form: Attend, leaves: list[Tensor], seen: Tensor, own: Tensor | None) -> Tensor:
    query, key0, value0, key, value = leaves
    return form(query, key0, value0, seen, key, value, own)


def dense(query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, *block: Any) -> Tensor:
    """All scores at once, (B, h, A, N, T + M)."""
    key, value, own = block if len(block) == 3 else (*block, None)
    T, split = key0.shape[2], query.shape[2:4]
    past = (query.flatten(2, 3) @ key0.transpose(-1, -2)).unflatten(2, split)
    past = past.masked_fill(~seen[:, None, :, None], float("-inf"))
    scores = query @ key.transpose(-1, -2)
    scores = scores if own is None else scores.masked_fill(~own, float("-inf"))
    weights = (torch.cat([past, scores], dim=-1) * query.shape[-1] ** -0.5).softmax(-1)
    mixed = (weights[..., :T].flatten(2, 3) @ value0).unflatten(2, split)
    return mixed + weights[..., T:] @ value


def plain(query: Tensor, key0: Tensor, value0: Tensor, seen: Tensor, *own: Any) -> Tensor:
    """One query after another, in a loop over rows, heads, anchors and slots."""
    key, value, visible = own
    B, h, A, N, D = query.shape
    out = torch.zeros_like(query)
    for b, head, a, n in torch.cartesian_prod(*map(torch.arange, (B, h, A, N))).tolist():
        past = seen[b, a]
        slots = slice(None) if visible is None else visible[n]
        keys = torch.cat([key0[b, head][past], key[b, head, a][slots]])
        values = torch.cat([value0[b, head][past], value[b, head, a][slots]])
        weights = (keys @ query[b, head, a, n] / D**0.5).softmax(0)
        out[b, head, a, n] = weights @ values
    return out


def gap(attend: Attend, dtype: torch.dtype, N: int, M: int, own: Tensor | None) -> float:
    """Largest difference from the dense form, of output and gradients, by each one's own size."""
    leaves, seen, direction = case(dtype, N, M)
    both = []
    for form in (attend, dense):
        out = run(form, leaves, seen, own)
        both.append([out, *torch.autograd.grad(out, leaves, direction)])
    return max(
        float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(*both, strict=True)
    )


@pytest.mark.parametrize(("N", "M", "own"), SHAPES)
def test_the_dense_form_is_attention(N: int, M: int, own: Tensor | None) -> None:
    leaves, seen, _ = case(torch.float64, N, M)
    with torch.no_grad():
        torch.testing.assert_close(run(dense, leaves, seen, own), run(plain, leaves, seen, own))


@pytest.mark.parametrize("device", ["cpu", "others"])
@pytest.mark.parametrize(("N", "M", "own"), SHAPES)
def test_the_merge_is_exact(
    N: int, M: int, own: Tensor | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and in parts of which the last one is short."""
    if device == "others":
        monkeypatch.setattr(block_attention, "_fuses", lambda query: False)
    for queries in (512, 4 * N):
        monkeypatch.setattr(block_attention, "QUERIES", queries)
        assert gap(context_and_block, torch.float64, N, M, own) < 1e-12
        assert gap(context_and_block, torch.float32, N, M, own) < 1e-5


def test_by_finite_differences() -> None:
    leaves, seen, _ = case(torch.float64, 3, 3, seed=1)
    own = torch.ones(3, 3, dtype=torch.bool).tril()
    assert torch.autograd.gradcheck(
        lambda *given: run(context_and_block, list(given), seen, own), leaves, fast_mode=True
    )


def test_blocks_of_one_slot_are_the_diagonal() -> None:
    """EAGLE's depths see the causal keys and their own: the same numbers, gradients included."""
    leaves, seen, direction = case(torch.float64, 1, 4)
    query, key0, value0, key, value = leaves
    ours = run(context_and_block, leaves, seen, None)
    keys, values = list(key.unbind(3)), list(value.unbind(3))
    theirs = causal_and_diagonal(
        query.squeeze(3), key0, value0, seen.unsqueeze(1), keys, values
    ).unsqueeze(3)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    for mine, other in zip(
        torch.autograd.grad(ours, leaves, direction),
        torch.autograd.grad(theirs, leaves, direction),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)


def test_a_wrong_merge_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the context's own log-sum-exp in backward."""
    backward = block_attention._fused_backward

    def wrong(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **bias: Any) -> Any:
        out, lse = block_attention._fused(q, k, v, **bias)
        return backward(grad, q, k, v, out, lse, *rest[2:], **bias)

    monkeypatch.setattr(block_attention, "_fused_backward", wrong)
    assert gap(context_and_block, torch.float64, 5, 5, None) > 1e-2


def test_in_the_unroll_of_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """DFlash with either form: the same states and gradients, segments and padding included."""
    forms = [context_and_block, dense]
    unrolled_alike(monkeypatch, dflash, forms, lambda: drafter("dflash"), 20)


@pytest.mark.parametrize("device", ["cpu", "others"])
@pytest.mark.parametrize("name", ["dflash", "dspark", "peagle"])
def test_under_autocast(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: queries that a norm has made fp32 again beside values in bf16."""
    if device == "others":
        monkeypatch.setattr(block_attention, "_fuses", lambda query: False)
    of = drafter(name)
    batch = tiny.target().read(packed(), of.taps)
    found = []
    for on in (True, False):
        of.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            hidden = of.unroll(batch, align(batch, 4)).hidden
        hidden.float().square().mean().backward()
        grads = [p.grad for p in of.parameters() if p.grad is not None]
        found.append([hidden.detach(), *grads])
    assert len(found[0]) == len(found[1]) > 15
    for part in (slice(1), slice(1, None)):  # states, and all gradients together
        low, full = (torch.cat([t.float().flatten() for t in each[part]]) for each in found)
        assert float((low - full).norm() / full.norm()) < 0.1


def test_no_mask_of_all_blocks() -> None:
    """Nothing of anchors x slots x positions is made; the dense form, that makes it, is noticed."""
    B, h, A, N, T, D = 1, 2, 128, 8, 512, 4
    query, key, value = (torch.randn(B, h, A, N, D, requires_grad=True) for _ in range(3))
    key0, value0 = (torch.randn(B, h, T, D, requires_grad=True) for _ in range(2))
    seen = torch.arange(T) <= 4 * torch.arange(A).unsqueeze(1)
    for form, fits in ((context_and_block, True), (dense, False)):
        with Largest() as most:
            form(query, key0, value0, seen.unsqueeze(0), key, value).sum().backward()
        assert (most.numel < A * N * T) == fits
