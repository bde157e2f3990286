"""Two forms of one attention, in a drafter's unroll."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import align
from objectives import packed


def unrolled_alike(
    patch: pytest.MonkeyPatch,
    module: Any,
    forms: list[Callable[..., Tensor]],
    make: Callable[[], Drafter],
    more_than: int,
) -> None:
    """The same states and gradients of packed rows, padding included, by either form, put into the
    module under the first one's name. more_than: parameters with a gradient."""
    both = []
    for form in forms:
        patch.setattr(module, forms[0].__name__, form)
        made: Any = make()
        batch = tiny.target().read(packed(), made.taps)
        hidden = made.unroll(batch, align(batch, 4)).hidden
        parameters = [p for p in made.parameters() if p.requires_grad]
        direction = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
        grads = torch.autograd.grad(hidden, parameters, direction, allow_unused=True)
        both.append([hidden, *(g for g in grads if g is not None)])
    assert len(both[0]) > more_than
    for ours, theirs in zip(*both, strict=True):
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, atol=1e-5 * max(scale, 1), rtol=1e-5)
