"""What every drafter's state is made of: `slabs`, and `reset`.

.venv/bin/pytest tests/drafters/test_state.py
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts as contract
from draftsmith.drafters.base import DrafterState, Policy
from draftsmith.drafters.sampling import Noise
from draftsmith.drafters.target.slab import Slab
from toys import ToyEither, ToyEitherState

CPU = torch.device("cpu")


def contents(state: DrafterState) -> list[Any]:
    """All that a state holds, read by another way than its own."""
    out: list[Any] = []
    for field in fields(state):
        value = vars(state)[field.name]
        if isinstance(value, DrafterState):
            out += contents(value)
        else:
            out.append(value.length if isinstance(value, Slab) else value)
    return out


@pytest.mark.parametrize("name", [*contract.DRAFTERS, "toy-either"])
@torch.no_grad()
def test_a_reset_state_is_a_fresh_one(name: str) -> None:
    """Faults: a field left as it was; a new tensor in the place of one that a graph reads."""
    if name == "toy-either":
        made: Any = ToyEither(contract.drafter("ngram"), contract.drafter("mtp"))
    else:
        made = contract.drafter(name)
    state, fresh = made.start(2, 64), made.start(2, 64)
    before = contents(state)
    texts = contract.prompts(2)
    contract.feed(made, state, [text[:-1] for text in texts], [0, 0])
    made.begin(state)
    root = torch.tensor([text[-1] for text in texts])
    noise = Noise(0, torch.arange(2), torch.zeros(2, dtype=torch.long))
    made.propose(state, root, Policy(3), contract.PLAIN, noise)
    assert any(t.any() for t in contents(state) if isinstance(t, Tensor))
    state.reset()
    for old, now, new in zip(before, contents(state), contents(fresh), strict=True):
        if isinstance(new, Tensor):
            assert now is old and now.equal(new)
        else:
            assert now == new


def test_slabs_at_any_depth() -> None:
    """Fault: caches of states inside a state are never bounded."""

    @dataclass
    class One(DrafterState):
        slab: Slab
        seen: bool = False

    slabs = [Slab(1, 4, CPU) for _ in range(3)]
    one, two, three = map(One, slabs)
    assert list(ToyEitherState(ToyEitherState(one, two), three).slabs()) == slabs


def test_a_field_that_cannot_be_reset() -> None:
    """Fault: slabs in a list are passed over in silence."""

    @dataclass
    class Listed(DrafterState):
        slabs_of: list[Slab]

    with pytest.raises(TypeError, match="Listed.slabs_of: `reset` does not"):
        Listed([Slab(1, 4, CPU)])
