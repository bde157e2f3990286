"""What a drafter keeps between calls about the requests it drafts for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields

from torch import Tensor

from draftsmith.drafters.target.slab import Slab


@dataclass
class DrafterState:
    """Base of every family's state, a dataclass. A field is a tensor that starts at 0, a slab, the
    state of another drafter, or a plain value with a default.

    Everything changes in place: a captured graph goes on reading the tensors that it has seen.
    """

    def __post_init__(self) -> None:
        """Raises TypeError for any other field: `reset` would leave it as it is."""
        for field in fields(self):
            known = isinstance(getattr(self, field.name), Tensor | Slab | DrafterState)
            if not known and field.default is MISSING:
                raise TypeError(f"{type(self).__name__}.{field.name}: `reset` does not reach it")

    def slabs(self) -> Iterator[Slab]:
        """All caches, those of states inside it too."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Slab):
                yield value
            elif isinstance(value, DrafterState):
                yield from value.slabs()

    def reset(self) -> None:
        """Makes it what `start` returned, ready for other prompts, in the same tensors."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value.zero_()
            elif isinstance(value, Slab | DrafterState):
                value.reset()
            else:
                setattr(self, field.name, field.default)
