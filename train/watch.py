"""Watch-dogs of a run: they name what is wrong before it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError


def check_finite(step: int, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises UserError naming the step and the first tensor that holds a NaN or an infinity."""
    for name, tensor in named:
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"step {step}: {name} is not finite; nothing was stored, the last checkpoint is "
                "intact; lower lr or check the samples"
            )


def inputs(drafter: Drafter, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """What a loss that is not finite was made from, in that order."""
    yield from drafter.weights().items()
    yield from ((f"feature {tap} of the target", f) for tap, f in batch.features.items())
    if batch.final is not None:
        yield "the target's final state", batch.final
    yield "the loss", torch.tensor(float("nan"))


def gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gradients whose norm is not finite, from the head down, as they were computed."""
    for name, parameter in reversed(list(module.named_parameters())):
        if parameter.grad is not None:
            yield f"the gradient of {name}", parameter.grad
    yield "the norm of the gradient", torch.tensor(float("inf"))


def gradient_norms(module: nn.Module) -> dict[str, float]:
    """Norm of the gradients of each direct part of a module."""
    squares: dict[str, float] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            part = name.split(".")[0]
            norm = float(parameter.grad.norm())
            squares[part] = squares.get(part, 0.0) + norm * norm
    return {part: math.sqrt(square) for part, square in squares.items()}


def unmoved(names: Iterable[str], module: nn.Module) -> set[str]:
    """Those of the parameters named whose gradient is missing or all zero."""
    grads = {n: p.grad for n, p in module.named_parameters()}
    return {n for n in names if (g := grads[n]) is None or not bool(g.any())}


def falling(lines: Sequence[dict[str, Any]], patience: int) -> str | None:
    """Why a run should end, from its log: `patience` replays since the best one; None to go on.

    patience 0 never ends a run. The loss beside it is the log's: one that still falls while tau
    does is overfitting.
    """
    replays = [m for m in lines if m["kind"] == "replay" and m["step"] > 0]
    if not patience or not replays:
        return None
    best = max(replays, key=lambda m: m["tau"])
    since = [m for m in replays if m["step"] > best["step"]]
    if len(since) < patience:
        return None

    def loss(step: int) -> str:
        losses = [m["loss"] for m in lines if m["kind"] == "train" and m["step"] <= step]
        return f"{losses[-1]:.4f}" if losses else "unknown"

    last = since[-1]
    return (
        f"replay tau fell from {best['tau']:.3f} to {last['tau']:.3f} over {len(since)} replays "
        f"while the loss went from {loss(best['step'])} to {loss(last['step'])}"
    )
