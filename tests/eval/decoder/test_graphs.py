"""Rounds as graphs, on the CPU: a tape stands in for a CUDA graph.

Like a graph it records the kernels that one round launched, with the very tensors they read and
wrote, and replays those and nothing else: no Python runs again. So a shape, a length or a branch
that the host decided inside a round is frozen into it, and the text goes wrong. A host read of a
tensor is an error at once, as it is in a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import contracts as contract
import tiny
import toys
from draftsmith.drafters.base import DrafterState, Policy
from draftsmith.drafters.ngram import NgramState
from draftsmith.drafters.parts.one_layer import OneLayerState
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import slab
from draftsmith.eval.decoder import graphs, loop
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.round import Rounds

HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item"}


class HostRead(Exception):
    """Not what a failed capture raises: that is told in a line, and the round runs eagerly."""


class Tape(TorchDispatchMode):
    """Records every operator with the tensors it took and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable, tuple, dict, dict[int, Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in HOST_READS or _by_mask(name, args):
            raise HostRead(f"the host reads a tensor: {name}")
        out = func(*args, **kwargs)
        taken = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
        # A view of an input, or the input itself, is up to date already.
        made = {
            number: t
            for number, t in enumerate(tree_leaves(out))
            if _is(t) and t.untyped_storage().data_ptr() not in taken
        }
        self.steps.append((func, args, kwargs, made))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, made in self.steps:
            new = func(*args, **kwargs)
            fresh = tree_leaves(new) if made else []
            for number, old in made.items():
                old.copy_(fresh[number])


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _by_mask(name: str, args: Any) -> bool:
    """Indexing with a bool tensor reads how many entries are True."""
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    return any(_is(i) and i.dtype == torch.bool for i in indices)


def capture(run: Callable[[], object], pool: Any) -> Callable[[], None]:
    """As graphs.capture: recording leaves every tensor that was there before as it was."""
    rounds: Rounds = run.__self__  # type: ignore[attr-defined]
    # Expanded tensors cannot be written to, nor is any of them written to by a round.
    kept = [t for t in _tensors(rounds, set()) if 0 not in t.stride()]
    saved = [(t, t.clone()) for t in kept]
    with Tape() as tape:
        run()
    for tensor, before in saved:
        tensor.copy_(before)
    return tape.replay


def _tensors(holder: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor that a round keeps, and those of the caches and states in it."""
    if _is(holder):
        return [holder]
    if id(holder) in seen or isinstance(holder, torch.nn.Module | str | int | float | bool):
        return []
    seen.add(id(holder))
    if isinstance(holder, dict):
        inside = list(holder.values())
    elif isinstance(holder, list | tuple):
        inside = list(holder)
    else:
        inside = list(getattr(holder, "__dict__", {}).values())
    return [t for value in inside for t in _tensors(value, seen)]


POLICIES = {
    "eagle": [Policy(3), Policy(3, block=True), Tree(3, budget=8, branch=3),
              StaticTree.of_widths((2, 2)), StaticTree.of_widths((2, 2), drawn=True)],
    "eagle1": [Tree(3, budget=8, branch=3)],
    "mtp": [Policy(3)],
    "mtp chain": [Policy(3), StaticTree.of_widths((2, 2), drawn=True)],
    "small": [Policy(3)],
    "ngram": [Policy(3)],
    "toy-block": [Policy(3), Tree(2, budget=6, branch=6)],
    "medusa": [StaticTree.of_widths((2, 2), drawn=True)],
    "hydra": [Tree(3, budget=8, branch=3)],
    "dflash": [Policy(3), Tree(2, budget=6, branch=6)],
    "peagle": [Policy(3), Tree(3, budget=8, branch=3)],
    "dspark": [Policy(3), Policy(3, confidence=0.2), Tree(3, budget=8, branch=8)],
}  # fmt: skip
CASES = [(name, policy) for name, policies in POLICIES.items() for policy in policies]
SAMPLERS = [Sampler(0.0), Sampler(0.8, top_k=9, top_p=0.95)]


def both(
    made: Any, target: Any, policy: Policy, sampler: Sampler, patch: pytest.MonkeyPatch
) -> tuple[list[Any], list[Any]]:
    """Texts decoded eagerly, and from tapes; two calls of each, the second on the first's tapes."""
    patch.setattr(graphs, "capture", capture)
    patch.setitem(slab._VIEW, "cpu", 16)  # views are outgrown soon
    out = []
    for on in (False, True):
        decoder = Decoder(target, made, policy, graphs=on)
        first = decoder.generate(tiny.prompts(2, 1, target.vocab_size), sampler, 24)
        second = decoder.generate(tiny.prompts(2, 2, target.vocab_size), sampler, 24)
        out.append(first + second)
        if on:
            (found,) = decoder.captured.values()
            assert len(found.pairs) >= 2, "the texts should outgrow the first view"
    return out[0], out[1]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize(("name", "policy"), CASES, ids=str)
def test_replayed_rounds_equal_eager_ones(
    name: str, policy: Policy, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a host read; a tensor made anew each round; a length that Python knew."""
    if sampler.greedy and not policy.is_chain and policy.sampled:
        pytest.skip("nothing is drawn at temperature 0")
    made = contract.drafter(name)
    eager, replayed = both(made, made.target, policy, sampler, monkeypatch)
    assert eager == replayed


def either() -> toys.ToyEither:
    return toys.ToyEither(contract.drafter("ngram"), contract.drafter("mtp"))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_state_inside_a_state(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: caches inside it are not bounded; other prompts find what the last ones left."""
    made = either()
    eager, replayed = both(made, made.target, Policy(3), sampler, monkeypatch)
    assert eager == replayed
    accepted = [r.accepted for text in eager for r in text.rounds]
    assert any(accepted), "no draft is accepted: what the states hold would not show"


@pytest.mark.parametrize("kind", [NgramState, OneLayerState])
def test_a_state_inside_a_state_is_not_reset(
    kind: type[DrafterState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: what either of the two read of the last prompts is still there."""
    monkeypatch.setattr(kind, "reset", lambda self: None)
    monkeypatch.setattr(loop, "_STEP", 256)  # room for both prompts
    made = either()
    eager, replayed = both(made, made.target, Policy(3), SAMPLERS[1], monkeypatch)
    assert eager[:2] == replayed[:2] and eager[2:] != replayed[2:]


def test_a_batch_is_reset_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a fresh state, as large as a cache, beside the one that graphs read."""
    monkeypatch.setattr(graphs, "capture", capture)
    made = either()
    decoder = Decoder(made.target, made, Policy(3), graphs=True)
    decoder.generate(tiny.prompts(2, 1), Sampler(0.0), 8)
    (found,) = decoder.captured.values()
    with torch.inference_mode(), Tape() as tape:
        found.rounds.reset(found.rounds.ids)
    assert len(tape.steps) > 8
    kept = {t.untyped_storage().data_ptr() for t in _tensors(found.rounds, set())}
    made_anew = [t for *_, out in tape.steps for t in tree_leaves(out) if _is(t)]
    assert all(t.untyped_storage().data_ptr() in kept for t in made_anew)


def test_views_as_wide_as_a_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is read before any view is bounded: short texts fit their capacity."""
    made = contract.drafter("eagle")
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setitem(slab._VIEW, "cpu", 256)
    monkeypatch.setattr(loop, "_STEP", 256)
    prompts = tiny.prompts(2, 1)
    eager, replayed = (
        Decoder(made.target, made, Policy(3), graphs=on).generate(prompts, Sampler(0.0), 24)
        for on in (False, True)
    )
    assert eager == replayed


def test_a_capture_that_fails_goes_on_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, and the text that would have come."""
    made = contract.drafter("eagle")

    def fails(run: Callable[[], object], pool: Any) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs, "capture", fails)
    prompts = tiny.prompts(2, 1)
    eager, other = (
        Decoder(made.target, made, Policy(3), graphs=on).generate(prompts, Sampler(0.0), 24)
        for on in (False, True)
    )
    assert eager == other
    (line,) = caplog.messages
    assert line.startswith("no CUDA graphs: ") and "\n" not in line


def test_a_batch_that_cannot_be_captured_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A target of experts refuses many rows: those run eagerly, one row goes on from graphs."""
    made = contract.drafter("eagle")
    monkeypatch.setattr(graphs, "capture", capture)
    asked: list[int] = []

    def problem(target: Any, nodes: int, rows: int) -> str | None:
        asked.append(rows)
        return "it has experts" if rows > 1 else None

    monkeypatch.setattr(loop, "capture_problem", problem)
    decoder = Decoder(made.target, made, Policy(3), graphs=True)
    many, one = tiny.prompts(2, 1), tiny.prompts(1, 2)
    eager = [Decoder(made.target, made, Policy(3)).generate(p, Sampler(0.0), 12) for p in
             (many, one)]  # fmt: skip
    monkeypatch.setattr(decoder, "_cuda", True)
    monkeypatch.setattr(decoder, "_mark", loop.time.perf_counter)
    for _ in range(2):
        assert decoder.generate(many, Sampler(0.0), 12) == eager[0] and not decoder.captured
        assert decoder.generate(one, Sampler(0.0), 12) == eager[1] and len(decoder.captured) == 1
        decoder.captured.clear()
    assert asked == [2, 1]
    (line,) = caplog.messages
    assert "no CUDA graphs at batch 2, as it has experts" in line


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_replayed_baseline_equals_eager(
    family: str, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, replayed = both(None, tiny.target(family), Policy(1), sampler, monkeypatch)
    assert eager == replayed


def made_anew(self: Rounds, known: Any) -> None:
    """What the next draft reads lies elsewhere each time: a graph would read the old place."""
    self.known = known


def read_on_the_host(self: Rounds) -> Any:
    if bool(self.active.all()):
        return JUDGE(self)
    return JUDGE(self)


JUDGE = Rounds._judge
FAULTS: dict[str, tuple[str, Any]] = {
    "what is known is made anew": ("_hand_on", made_anew),
    "a host read": ("_judge", read_on_the_host),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(Rounds, name, wrong)
    made = contract.drafter("eagle")
    try:
        eager, replayed = both(made, made.target, Policy(3), Sampler(1.0), monkeypatch)
    except HostRead:
        return
    assert eager != replayed
