"""Training-time-test attention: the merged form against all scores at once, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.parts import diagonal, one_layer
from draftsmith.drafters.parts.diagonal import causal_and_diagonal, dense
from forms import unrolled_alike
from largest import Largest
from objectives import drafter

Attend = Callable[..., Tensor]


def case(dtype: torch.dtype, depths: int, seed: int = 0) -> tuple[list[Any], Tensor]:
    """Arguments, and a direction; every query sees a key, some only one, and they are no square."""
    B, h, A, T, D = 2, 3, 19, 70, 8
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype).requires_grad_()

    seen = torch.rand(B, 1, A, T, generator=generator) > 0.4
    seen[:, :, 5] = False
    seen[..., 0] = True
    first = [random(B, h, A, D), random(B, h, T, D), random(B, h, T, D), seen]
    own = [[random(B, h, A, D) for _ in range(depths)] for _ in range(2)]
    return [*first, *own], torch.randn(B, h, A, D, generator=generator, dtype=dtype)


def gap(attend: Attend, dtype: torch.dtype, depths: int) -> float:
    """Largest difference from the dense form, of output and gradients, by each one's own size."""
    arguments, direction = case(dtype, depths)
    query, key, value, _, keys, values = arguments
    leaves = [query, key, value, *keys, *values]
    both = []
    for form in (attend, dense):
        out = form(*arguments)
        both.append([out, *torch.autograd.grad(out, leaves, direction)])
    return max(
        float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(*both, strict=True)
    )


@pytest.mark.parametrize("depths", [1, 2, 6])
def test_the_merge_is_exact(depths: int) -> None:
    assert gap(causal_and_diagonal, torch.float64, depths) < 1e-12
    assert gap(causal_and_diagonal, torch.float32, depths) < 1e-5


def test_by_finite_differences() -> None:
    (query, key, value, seen, keys, values), _ = case(torch.float64, 2, seed=1)
    leaves = [query, key, value, *keys, *values]

    def attend(*given: Tensor) -> Tensor:
        return causal_and_diagonal(*given[:3], seen, list(given[3:5]), list(given[5:]))

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("fault", ["local weights", "no own keys"])
def test_a_wrong_merge_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the causal block's own log-sum-exp in backward, and a diagonal left out."""
    if fault == "local weights":
        backward = diagonal._fused_backward

        def wrong(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **bias: Any) -> Any:
            out, lse = diagonal._fused(q, k, v, **bias)
            return backward(grad, q, k, v, out, lse, *rest[2:], **bias)

        monkeypatch.setattr(diagonal, "_fused_backward", wrong)
        assert gap(causal_and_diagonal, torch.float64, 2) > 1e-2
    else:

        def short(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, *own: list) -> Tensor:
            return causal_and_diagonal(query, key, value, seen, *(o[1:] for o in own)) + 0 * sum(
                o[0] for o in own
            )

        assert gap(short, torch.float64, 2) > 1e-2


def test_in_the_unroll_of_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-3 with either form: the same states and gradients, segments and padding included."""
    forms = [causal_and_diagonal, dense]
    unrolled_alike(monkeypatch, one_layer, forms, lambda: drafter("eagle"), 8)


def test_no_scores_in_memory() -> None:
    """Nothing of heads x anchors x positions is made; the dense form, that makes it, is noticed."""
    B, h, A, D = 1, 8, 128, 4
    sizes = [(B, h, A, D)] * 3
    query, key, value = (torch.randn(s, requires_grad=True) for s in sizes)
    own = [torch.randn(B, h, A, D) for _ in range(2)]
    seen = torch.ones(A, A, dtype=torch.bool).tril().view(1, 1, A, A)
    for form, fits in ((causal_and_diagonal, True), (dense, False)):
        with Largest() as most:
            form(query, key, value, seen, own, own).sum().backward()
        assert (most.numel < h * A * A) == fits
