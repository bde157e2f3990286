"""Linear layers and attention over few tokens on a CPU: which way each of them is computed.

At 1 to 32 rows (a token, a chain or small tree of drafts, a small batch) a linear layer costs what
reading its weights costs, if its kernel is made for that; torch's own are not (a third of the
memory's speed at one row, less at two). `prepare` gives a model's layers a class whose forward
takes our kernel wherever no gradient is asked for, and attention over the slab its own. Where they
cannot be built: torch's matrix product with the weights on the left, for the shapes and rows for
which a short measurement finds it faster.

With gradients, outside of `decoding`, in other dtypes, on other devices and for more rows a layer
computes what it always did: what training reads from a target, replay too, does not depend on
whether anything was decoded before in the process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.passes import build

logger = logging.getLogger(__name__)

WIDEST = 32  # rows
_TOLERANCE = 1e-5  # of the proof's results, which are of size 1


_decoding: ContextVar[bool] = ContextVar("decoding", default=False)  # each thread has its own


@contextmanager
def decoding() -> Iterator[None]:
    """Within it layers that `prepare` has seen, compiled layers and attention go the fast way."""
    token = _decoding.set(True)
    try:
        yield
    finally:
        _decoding.reset(token)


def fast() -> bool:
    """Whether what decodes is running: nothing else leaves the way that it always went."""
    return _decoding.get() and not torch.is_grad_enabled()


class NarrowLinear(nn.Linear):
    """An nn.Linear by our kernel, where it decodes."""

    def forward(self, x: Tensor) -> Tensor:
        if not fast():
            return F.linear(x, self.weight, self.bias)
        return torch.ops.draftsmith.linear.default(x, self.weight, self.bias)


class LeftLinear(nn.Linear):
    """An nn.Linear by torch's product, weights on the left for the rows that `_turned` names."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if not fast() or (self.weight.shape, rows) not in _turned:
            return F.linear(x, self.weight, self.bias)
        return left(x, self.weight, self.bias)


_turned: set[tuple[torch.Size, int]] = set()  # shapes and rows that are faster so
_measured: set[torch.Size] = set()


def left(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T as (W x^T)^T; one row is doubled, as torch's matrix-vector product is slow."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.mm(weight, (rows if len(rows) > 1 else rows.expand(2, -1)).t())[:, : len(rows)].t()
    out = out if bias is None else out + bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


_on = False  # `prepare` has found that the kernels are there


def attends(query: Tensor) -> bool:
    """Whether `attend` takes queries (B, heads, T, D)."""
    return (
        _on
        and query.shape[2] <= WIDEST
        and query.dtype == torch.float32
        and query.device.type == "cpu"
        and fast()
    )


def attend(*given: Any) -> Tensor:
    """(B, T, heads, E): `attend` of narrow.cpp, which says what it takes."""
    return torch.ops.draftsmith.attend.default(*given)


@cache
def problem() -> str:
    """Why our kernels are not used in this process; "": they are. One line says so, once."""
    global _on
    why = build.load() or wrong(torch.ops.draftsmith.linear.default) or wrong_attention(attend)
    _on = not why
    if why:
        logger.warning(
            "no CPU kernels: %s; linear layers of few rows take the faster of torch's own", why
        )
    else:
        torch.library.register_fake("draftsmith::linear", F.linear)
        torch.library.register_fake("draftsmith::attend", _attended)
    return why


def _attended(query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
    B, heads, T, _ = query.shape
    return query.new_empty(B, T, heads, value.shape[3])


def wrong(linear: Callable[..., Tensor]) -> str:
    """How far a kernel's results lie off, in words; "": they are right. Odd sizes, every width."""
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(37, 83, generator=draw) / 83**0.5, torch.randn(37, generator=draw)
    for rows in range(1, WIDEST + 2):
        x = torch.randn(rows, 83, generator=draw)
        true = F.linear(x.double(), weight.double(), bias.double())
        gap = (linear(x, weight, bias) - true).abs().max().item()
        if not gap <= _TOLERANCE:
            return f"a linear layer of {rows} rows is wrong by {gap:.3g}"
    return ""


def wrong_attention(attend: Callable[..., Tensor]) -> str:
    """The same of attention: grouped heads of odd sizes, hidden slots, with and without a softcap
    and sinks."""
    draw = torch.Generator().manual_seed(0)
    B, heads, groups, T, D, E, S, view = 2, 6, 3, 5, 37, 21, 50, 43
    for softcap, sinks in ((0.0, None), (4.0, None), (0.0, torch.randn(heads, generator=draw))):
        query = torch.randn(B, heads, T, D, generator=draw)
        keys = torch.randn(B, heads // groups, S, D, generator=draw)
        values = torch.randn(B, heads // groups, S, E, generator=draw)
        key, value = (torch.randn(B, 2, T, n, generator=draw) for n in (D, E))
        slots = torch.arange(T) + torch.tensor([[9], [20]])
        mask = torch.zeros(B, 1, T, view)
        mask.masked_fill_(torch.arange(view) > slots[:, None, :, None], -torch.inf)
        ours = attend(query, key, value, keys, values, slots, mask, D**-0.5, softcap, sinks)
        for b in range(B):
            keys[b, :, slots[b]], values[b, :, slots[b]] = key[b], value[b]
        seen, mixed = (t[:, :, :view].double().repeat_interleave(groups, 1) for t in (keys, values))
        scores = query.double() @ seen.transpose(-1, -2) * D**-0.5
        scores = (softcap * torch.tanh(scores / softcap) if softcap else scores) + mask
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(B, -1, T, 1)], -1)
        true = torch.softmax(scores, -1)[..., :view] @ mixed
        gap = (ours - true.transpose(1, 2)).abs().max().item()
        if not gap <= _TOLERANCE:
            return f"attention is wrong by {gap:.3g}"
    return ""


def prepare(*models: nn.Module | None) -> None:
    """Gives their linear layers (fp32, on the CPU) the faster forward."""
    for model in models:
        for module in model.modules() if model is not None else ():
            if type(module) is nn.Linear and _fits(module.weight):
                to: type[nn.Linear] = LeftLinear if problem() else NarrowLinear
                module.__class__ = to
            if isinstance(module, LeftLinear):
                _measure(module.weight)


def restore(model: nn.Module) -> nn.Module:
    """The model with torch's own layers: what others' decoders are measured with."""
    for module in model.modules():
        if type(module) in (NarrowLinear, LeftLinear):
            module.__class__ = nn.Linear
    return model


def _fits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.inference_mode()
def _measure(weight: Tensor) -> None:
    """Settles for a shape which numbers of rows are faster with the weights on the left."""
    if weight.shape in _measured:
        return
    _measured.add(weight.shape)
    for rows in range(1, WIDEST + 1):
        x = torch.randn(rows, weight.shape[1])
        ways = [lambda: F.linear(x, weight), lambda: left(x, weight, None)]  # noqa: B023
        plain, turned = (min(_seconds(way) for _ in range(3)) for way in ways)
        if turned < plain:
            _turned.add((weight.shape, rows))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
