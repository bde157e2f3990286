"""One decoder layer as compiled code: traced with symbols for sizes, compiled, kept in a file.

It is traced by running the layer itself, our attention included, on stand-ins that have shapes but
no values: nothing is guarded, and whoever calls the code gives it what it was traced for.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftsmith.drafters.cache import cache_folder
from draftsmith.drafters.target.attention import Step, active
from draftsmith.drafters.target.slab import Slab

Code = Callable[..., Sequence[Tensor]]


def flat(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Tensor], tuple]:
    """A call's tensors, and the rest of it: names, constants, where tensors stood."""
    tensors: list[Tensor] = []
    how: list[Any] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            tensors.append(value)
            how.append(name)
        elif isinstance(value, tuple):
            tensors.extend(value)
            how.append((name, len(value)))
        else:
            how.append((name, None, value))
    return tensors, tuple(how)


def _call(how: tuple, tensors: Iterator[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The call that `flat` took apart, with other tensors."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for entry in how:
        value: Any
        if not isinstance(entry, tuple):
            name, value = entry, next(tensors)
        elif len(entry) == 2:
            name, value = entry[0], tuple(next(tensors) for _ in range(entry[1]))
        else:
            name, _, value = entry
        if isinstance(name, int):
            args.append(value)
        else:
            kwargs[name] = value
    return args, kwargs


class _Held(Slab):
    """A layer's slots, given from outside."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._both = keys, values

    def stores(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._both


def code_of(file: Path, graph: Any, inputs: list) -> Code:
    """A graph's compiled function, loaded where its file is there."""
    from torch._inductor import CompiledArtifact, standalone_compile

    with _caching(file.parent):
        if not file.exists():
            began = time.perf_counter()
            console = Console(stderr=True)
            with console.status("compiling decoder layers, once on this machine: about 15 s"):
                with torch.no_grad():
                    made = standalone_compile(graph, inputs, dynamic_shapes="from_graph")
                scratch = file.with_name(f"{file.name}.{os.getpid()}.tmp")
                made.save(path=str(scratch), format="binary")
                os.replace(scratch, file)
            took = time.perf_counter() - began
            console.print(f"compiled a kind of decoder layer in {took:.0f} s", soft_wrap=True)
        return CompiledArtifact.load(path=str(file), format="binary")


@contextmanager
def quiet() -> Iterator[None]:
    """Within it torch prints no tracebacks of its own where something cannot be traced."""
    noise = logging.getLogger("torch._subclasses.fake_tensor")
    level = noise.level
    noise.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        noise.setLevel(level)


def traced(layer: Any, how: tuple, first: list[Tensor], second: list[Tensor]) -> tuple[Any, list]:
    """The layer as a graph of its inputs, and stand-ins for them. first, second: inputs of two
    calls: what differs in their shapes is a symbol."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.nn.utils.stateless import _reparametrize_module

    names = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    count = len(first) - len(names) - 4
    own: Any = type(layer).__mro__[1]  # transformers'

    def run(*inputs: Tensor) -> Tensor:
        args, kwargs = _call(how, iter(inputs[:count]))
        positions, slots, keys, values = inputs[count : count + 4]
        weights = dict(zip(names, inputs[count + 4 :], strict=True))
        step = Step(positions, positions, positions, _Held(keys, values), slots)
        with active(step), _reparametrize_module(layer, weights):
            out = own.forward(layer, *args, **kwargs)
        if not isinstance(out, Tensor):
            raise TypeError(f"a layer that returns {type(out).__name__}")
        return out

    fake = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    inputs = []
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        pairs = zip(a.shape, b.shape, strict=True)
        sizes = [DimDynamic.DYNAMIC if m != n else DimDynamic.STATIC for m, n in pairs]
        plain = a.detach().clone()
        if DimDynamic.DYNAMIC not in sizes:
            inputs.append(fake.from_tensor(plain, static_shapes=True))
            continue
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(f"input{i}")
        inputs.append(
            fake.from_tensor(plain, static_shapes=False, symbolic_context=context, source=source)
        )
    with torch.no_grad(), fake:
        return make_fx(run)(*inputs), inputs


def folder() -> Path:
    out = cache_folder() / "layers"
    out.mkdir(parents=True, exist_ok=True)
    return out


@contextmanager
def _caching(folder: Path) -> Iterator[None]:
    """torch's own cache of what it compiles, which our files refer to, lies beside them."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(folder / "inductor")
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
