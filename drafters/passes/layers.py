"""Decoder layers as compiled code: what is left of transformers' Python in a pass over few tokens.

Layers of one kind (the same code, the same shapes) share one compiled function, which takes the
weights as inputs; batch, width, view and capacity are symbols in it, so that one serves all of them
(one token and one row are compiled apart). It is traced by running the layer itself, our attention
included: a family needs no code here. Linear layers and attention stay our kernels; norms, rope,
activations and residuals become loops of their own.

Code lies in the cache folder, under a name that stands for all it depends on; a later process loads
it without tracing. Each piece is proven when it is made or loaded: logits of a pass over real text
against the layers' own. Whatever cannot be compiled runs as it did, and one line says so.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from draftsmith.drafters.errors import reason
from draftsmith.drafters.passes import build, compiling, narrow
from draftsmith.drafters.target import attention, slab
from draftsmith.drafters.target.attention import active_step, chain_step, current
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.slab import Slab

logger = logging.getLogger(__name__)

PAYS = 3000  # passes of a run from which on compiling (20 s) costs less than it saves (7 ms each)
_TOLERANCE = 1e-4  # of logits, where they are of size 10 or below
_PROBES = ((3, 7, 40), (2, 11, 104))  # rows, width and committed tokens of two passes
_PROVEN = (2, 9, narrow.WIDEST)  # widths, beside 1

_SIMPLE = (int, float, str, tuple, type(None))

Key = tuple[Any, ...]  # what a compiled function is for: kind of layer, how it is called


@dataclass
class Compiled:
    """A model's compiled layers: code by key; weights and kind by layer."""

    kinds: list[str]
    weights: list[list[Tensor]]
    codes: dict[Key, compiling.Code] = field(default_factory=dict)
    tried: set[tuple[bool, bool]] = field(default_factory=set)
    on: bool = True
    failed: bool = False

    def __deepcopy__(self, memo: Any) -> Compiled:
        """Of a copied model: it stays what it was, for the model that it was made for."""
        return self


_chosen = False


def choose(on: bool) -> None:
    """Whether decoders of this process compile layers."""
    global _chosen
    _chosen = on


def chosen() -> bool:
    return _chosen


def find(model: CausalLM) -> Compiled | None:
    """Of a model whose layers `ready` has prepared."""
    return getattr(model.layers[0], "_compiled", (None, 0))[0] if len(model.layers) else None


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A prepared layer's: by compiled code where there is some for this call."""
    compiled, index = self._compiled
    step = active_step()
    if compiled.on and step and isinstance(step.slab, Slab) and narrow.fast():
        held = step.slab.held(index)
        if held is not None:
            tensors, how = compiling.flat(args, kwargs)
            rows, width = step.positions.shape
            code = compiled.codes.get((compiled.kinds[index], how, rows == 1, width == 1))
            if code is not None and rows * width <= narrow.WIDEST:
                inputs = (*tensors, step.positions, step.slots, *held, *compiled.weights[index])
                return code(*inputs)[0]
    return super(type(self), self).forward(*args, **kwargs)


def ready(model: CausalLM, tokenizer: Any, rows: int, widths: Sequence[int]) -> None:
    """Compiles, or loads, what passes of `rows` texts need; one line where that fails."""
    shapes = {(rows == 1, width == 1) for width in widths if rows * width <= narrow.WIDEST}
    compiled = _prepared(model)
    for shape in sorted(shapes - compiled.tried):
        if compiled.failed:
            return
        compiled.tried.add(shape)
        try:
            with narrow.decoding():
                _add(model, compiled, *shape)
                gap, bound = _gap(model, compiled, tokenizer, *shape)
        except Exception as error:  # whatever torch's compiler or a family's code raises
            problem = reason(error)
        else:
            problem = "" if gap <= bound else f"their logits differ by {gap:.3g}"
        if problem:
            for key in [k for k in compiled.codes if k[2:] == shape]:
                del compiled.codes[key]
            compiled.failed = True
            logger.warning("%s: layers are not compiled (%s)", type(model.hf).__name__, problem)


def able(model: CausalLM) -> bool:
    """Whether its layers can be compiled here: ours are CPU kernels, read through the slab."""
    fits = model.device.type == "cpu" and model.dtype == torch.float32
    return fits and model.trees and bool(len(model.layers)) and not narrow.problem()


def kept(model: CausalLM) -> bool:
    """Whether an earlier process has compiled layers of this kind for one token at a time."""
    kinds = {_kind(layer) for layer in model.layers}
    return all(any(compiling.folder().glob(f"{kind}-True-True-*")) for kind in kinds)


def _prepared(model: CausalLM) -> Compiled:
    layers = list(model.layers)
    kinds, weights = [_kind(x) for x in layers], [_tensors(x) for x in layers]
    compiled = find(model)
    if compiled is None or compiled.kinds != kinds:  # an adapter has changed them meanwhile
        compiled = Compiled(kinds, weights)
        for i, layer in enumerate(layers):
            if not hasattr(layer, "_compiled"):
                own = type(layer)
                layer.__class__ = type(own.__name__, (own,), {"forward": forward})
            object.__setattr__(layer, "_compiled", (compiled, i))
    compiled.weights = weights
    return compiled


def _tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


@cache
def _around() -> str:
    """What all code depends on beside the layers: versions, our own sources, the kernels."""
    files = [Path(str(module.__file__)) for module in (attention, slab, narrow, compiling)]
    sources = [file.read_text() for file in (*files, Path(__file__))]
    return "".join([torch.__version__, transformers.__version__, build.key(), *sources])


def _kind(layer: nn.Module) -> str:
    """A name for all that a layer's code depends on but its inputs: where two have the same, so
    they have the same code."""
    facts: list[Any] = [_around()]
    for name, module in layer.named_modules():
        simple = {k: v for k, v in vars(module).items() if isinstance(v, _SIMPLE)}
        plain = [(k, v) for k, v in simple.items() if k not in ("layer_idx", "_compiled")]
        own = [(n, tuple(t.shape), t.dtype, t.stride()) for n, t in module.named_parameters()]
        facts += [name, type(module).__name__, sorted(plain, key=str), own]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _add(model: CausalLM, compiled: Compiled, one_row: bool, one_token: bool) -> None:
    """Puts code for a shape of passes into `compiled`, for every kind of layer."""
    shapes = [(1 if one_row else r, 1 if one_token else w, n) for r, w, n in _PROBES]
    calls = [_probe(model, compiled, *shape) for shape in shapes]
    wanted: dict[Key, Path] = {}
    graphs: dict[Key, tuple[Any, list]] = {}
    with compiling.quiet():
        for i, layer in enumerate(model.layers):
            (how, first), (_, second) = calls[0][i], calls[1][i]
            key = (compiled.kinds[i], how, one_row, one_token)
            hashed = hashlib.sha256(repr(how).encode()).hexdigest()[:8]
            file = compiling.folder() / f"{compiled.kinds[i]}-{one_row}-{one_token}-{hashed}"
            if key not in wanted and not file.exists():  # all of them, before any is compiled
                graphs[key] = compiling.traced(layer, how, first, second)
            wanted[key] = file
        for key, file in wanted.items():
            compiled.codes[key] = compiling.code_of(file, *graphs.get(key, (None, [])))


@torch.inference_mode()
def _probe(
    model: CausalLM, compiled: Compiled, rows: int, width: int, committed: int
) -> list[tuple[tuple, list[Tensor]]]:
    """How every layer is called in such a pass, with all its inputs."""
    found: list[tuple[tuple, list[Tensor]]] = []

    def keep(layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        step, index = current(), layer._compiled[1]
        tensors, how = compiling.flat(args, kwargs)
        held = store.held(index)
        if held is None or step.slots is None:
            raise TypeError(f"layer {index} keeps no keys")
        weights = compiled.weights[index]
        found.append((how, [*tensors, step.positions, step.slots, *held, *weights]))

    store = Slab(rows, committed + 64 * rows, model.device)
    tokens = torch.arange(committed).remainder(model.vocab_size).expand(rows, -1)
    with paused(compiled):
        model(tokens, chain_step(store, committed))
        store.commit(torch.full_like(store.length, committed))
        hooks = [x.register_forward_pre_hook(keep, with_kwargs=True) for x in model.layers]
        try:
            model(tokens[:, :width], chain_step(store, width))
        finally:
            for hook in hooks:
                hook.remove()
    return found


@contextmanager
def paused(compiled: Compiled) -> Iterator[None]:
    """Within it the layers run as they did."""
    compiled.on = False
    try:
        yield
    finally:
        compiled.on = True


# ---------------------------------------------------------------- proof

TEXT = (
    "The first bridge over the river was built of wood in 1284 and burnt down twice. In spring, "
    "when snow melts in the hills, the water rises by as much as 3.5 metres: boats cannot pass. "
    "def area(width, height):\n    return width * height\n\nWhat is 17 * 24? It is 408, since "
    "17 * 20 = 340 and 17 * 4 = 68. Ask the keeper; he has lived there for forty years."
)


@torch.inference_mode()
def _gap(
    model: CausalLM, compiled: Compiled, tokenizer: Any, one_row: bool, one_token: bool
) -> tuple[float, float]:
    """(largest logit difference between compiled layers and their own on real text, allowed)."""
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    if len(set(ids)) < 32:  # a tokenizer that knows none of these words: such a text shows nothing
        ids = [i * 7919 % model.vocab_size for i in range(1, 65)]
    ids = torch.tensor(ids[:64])
    rows = 1 if one_row else 2
    texts = torch.stack([ids.roll(b) for b in range(rows)])
    start, gap, size = 64 - narrow.WIDEST, 0.0, 0.0
    for width in [1] if one_token else sorted({w // rows for w in _PROVEN if w // rows > 1}):
        both = []
        for on in (False, True):
            cache = Slab(rows, 64, model.device)
            model(texts[:, :start], chain_step(cache, start))
            cache.commit(torch.full_like(cache.length, start) - torch.arange(rows))
            compiled.on = on
            try:
                step = chain_step(cache, width)
                both.append(model.head(model(texts[:, start : start + width], step).final))
            finally:
                compiled.on = True
        gap = max(gap, (both[0] - both[1]).abs().max().nan_to_num(torch.inf).item())
        size = max(size, both[0].abs().max().item())
    return gap, _TOLERANCE * max(1.0, size / 10)
