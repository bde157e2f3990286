"""The drafter contract: two views of one function.

`unroll` is the teacher-forced view (training, replay), `propose` the serving view on its own
cache. `logits` is the only way from hidden states to q in both. Neither may call the other: the
tests that every family inherits compare them.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import Proposal
from draftsmith.drafters.policy import Policy, StaticTree
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.causal_lm import Tap
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.vocab import VocabMap


@dataclass
class Unroll:
    """Hidden states of every (anchor, depth), teacher forced.

    hidden (M, H); index (B, A, K) into its rows, -1 where the depth does not exist or nothing is
    proposed; prev (M,) = x_{a+1+j}; depth (M,), 0 where rows are shared between depths.
    extras {name: (M, ..)}: what else the family's own loss term reads; "confidence" (M,) is the
    logit of the chance that a depth is accepted, of families that are `confident`.
    """

    hidden: Tensor
    index: Tensor
    prev: Tensor
    depth: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_states(cls, states: Tensor, alignment: Alignment, batch: Batch) -> Unroll:
        """Of states (B, A, k, H): one row per existing (anchor, depth).

        Nothing is proposed at depths from k on.
        """
        k, depths = states.shape[2], alignment.exists.shape[2]
        exists, compare = alignment.exists[..., :k], alignment.compare[..., :k]
        index = torch.where(exists, exists.flatten().cumsum(0).view_as(exists) - 1, -1)
        index = F.pad(index, (0, depths - k), value=-1)
        depth = torch.arange(k, device=exists.device).expand_as(exists)
        row = torch.arange(exists.shape[0], device=exists.device).view(-1, 1, 1)
        prev = batch.tokens[row, compare]  # (B, A, k) x_{a+1+j}
        return cls(states[exists], index, prev[exists], depth[exists])

    @property
    def survival(self) -> Tensor:
        """(B, A, K): the chance, as predicted, that a depth and all before it are accepted."""
        chance = F.pad(self.extras["confidence"].sigmoid(), (0, 1))  # at -1: nothing is proposed
        return chance[self.index].cumprod(2)


@dataclass
class Guesses:
    """What a drafter without q proposes: tokens (B, A, K) in target ids, -1 for none."""

    tokens: Tensor


@dataclass
class DrafterState:
    """What a drafter keeps between calls about the requests it drafts for: a dataclass.

    A field is a tensor that starts at 0, a slab, the state of another drafter, or a plain value
    with a default. Everything changes in place: a captured graph goes on reading the tensors that
    it has seen.
    """

    def __post_init__(self) -> None:
        """Raises TypeError for any other field: `reset` would leave it as it is."""
        for each in fields(self):
            known = isinstance(getattr(self, each.name), Tensor | Slab | DrafterState)
            if not known and each.default is MISSING:
                raise TypeError(f"{type(self).__name__}.{each.name}: `reset` does not reach it")

    def slabs(self) -> Iterator[Slab]:
        """All caches, those of states inside it too."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Slab):
                yield value
            elif isinstance(value, DrafterState):
                yield from value.slabs()

    def reset(self) -> None:
        """Makes it what `start` returned, ready for other prompts, in the same tensors."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                value.zero_()
            elif isinstance(value, Slab | DrafterState):
                value.reset()
            else:
                setattr(self, each.name, each.default)


State = TypeVar("State", bound=DrafterState)


def entry(default: Any, meaning: str, **bounds: Any) -> Any:
    """A key of a recipe or of a family: `draftsmith keys` lists all three."""
    return Field(default=default, description=meaning, **bounds)


class DrafterConfig(BaseModel):
    """Base of every family's settings; an unknown key is an error.

    training: keys that say how it is trained, not what it is; a checkpoint does not hold them.
    """

    model_config = ConfigDict(extra="forbid")
    training: ClassVar[frozenset[str]] = frozenset()

    def stored(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return self.model_dump(exclude=set(self.training))


class Drafter(nn.Module, ABC, Generic[State]):
    """A drafter for one target. Its own parameters are what is trained and stored.

    State: the family's own, which `start` makes and `extend`, `begin` and `propose` update.
    """

    family: ClassVar[str]
    Config: ClassVar[type[DrafterConfig]]
    deterministic: ClassVar[bool] = False  # a point mass given the state, at any temperature
    depth_causal: ClassVar[bool] = True  # depth j does not depend on k
    rows_shared: ClassVar[bool] = False  # one row serves every (a, j) with the same a + j
    weights_per_depth: ClassVar[bool] = False  # each of `longest` depths has weights of its own
    trees: ClassVar[bool] = False  # whether it can draft trees
    confident: ClassVar[bool] = False  # predicts whether its drafts are accepted
    capturable: ClassVar[bool] = True  # extend and propose read nothing on the host

    def __init__(self, target: Shell, config: Any) -> None:
        super().__init__()
        object.__setattr__(self, "target", target)  # frozen and shared: not a submodule
        self.config = config
        self.vocab = VocabMap(target.vocab_size)
        self.taps: Sequence[Tap] = ()
        self.longest: int | None = None  # how deep a draft can be; None: no end

    target: Shell

    @classmethod
    def create(cls, target: Shell, config: Any, counts: Tensor | None = None) -> Drafter:
        """A fresh drafter. counts (V,): how often each token stands in the training answers."""
        return cls(target, config)

    @abstractmethod
    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll | Guesses:
        """Every (anchor, depth) of an alignment on a batch whose features are filled.

        Shapes: see Unroll. The alignment is the caller's, and stays as it is.
        """

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        """Draft logits (n, Vd) of hidden (n, H), prev (n,) target ids, depth (n,)."""
        raise NotImplementedError(f"{self.family} proposes without logits")

    @property
    def own_weight(self) -> float:
        """How much `own_loss` counts beside a loss of 1; 0: there is none."""
        return 0.0

    def own_loss(
        self, batch: Batch, unroll: Unroll, rows: Tensor, place: Tensor, alpha: Tensor
    ) -> Tensor:
        """What the family adds to the loss of rows (n,) of an unroll: (n,).

        batch: as its target has read it; place (n,): flat position b * T + a+1+j of each row; alpha
        (n,): sum_x min(p, q) there, without a gradient.
        """
        raise NotImplementedError(f"{self.family} has no loss of its own")

    @abstractmethod
    def start(self, rows: int, capacity: int) -> State:
        """A fresh state for `rows` requests of at most `capacity` positions."""

    @abstractmethod
    def extend(
        self, state: State, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        """The next counts[b] tokens with known features, g_t beside x_t, right padded.

        tokens (B, W), features {tap: (B, W, H)}, counts (B,). First the prompt, in one or more
        calls; then, after each propose, the root and the accepted drafts. The last token becomes
        the anchor. A row with count 0 stays as it is.
        """

    def begin(self, state: State) -> None:
        """The whole prompt has been given: from here on each extend follows a propose."""

    @abstractmethod
    def propose(
        self, state: State, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """Drafts after root (B,), the token that follows the anchor."""

    def check(self, policy: Policy) -> None:
        """Raises UserError for a policy that this drafter cannot follow."""
        if not (policy.is_chain or self.trees):
            raise UserError(f"{policy}: a {self.family} drafter drafts chains only; give k alone")
        if policy.confidence is not None and not self.confident:
            raise UserError(
                f"{policy}: a {self.family} drafter predicts no acceptance; leave confidence out"
            )
        if self.longest is not None and policy.k > self.longest:
            raise UserError(f"{policy}: deeper than this drafter's {self.longest}; lower k")
        if isinstance(policy, StaticTree):
            widest = max(path[-1] for path in policy.paths)
            if widest >= self.vocab.draft_size:
                raise UserError(
                    f"{policy}: rank {widest} of {self.vocab.draft_size} draft tokens; use less"
                )

    def _apply(self, fn: Any, recurse: bool = True) -> Drafter:
        """What `to` goes through: the vocabulary follows, and rope's frequencies keep fp32."""
        exact = [
            (module, name, buffer)
            for module in self.modules()
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers[name]) is not None and buffer.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in exact:
            moved = module._buffers[name]
            assert moved is not None
            module._buffers[name] = buffer.to(moved.device)
        first = next(self.parameters(), None)
        if first is not None:
            self.vocab.to(first.device)
        return self

    def weights(self) -> dict[str, Tensor]:
        """What the checkpoint stores: the trained parameters, and buffers that define them."""
        stored = self.state_dict().keys()  # without buffers that are not persistent
        kept: dict[str, Tensor] = {n: p for n, p in self.named_parameters() if p.requires_grad}
        kept.update((n, b) for n, b in self.named_buffers() if n in stored)
        return {n: t.detach().contiguous() for n, t in kept.items()}


BUILT_IN = (
    "ngram",
    "small",
    "medusa",
    "hydra",
    "eagle",
    "eagle1",
    "mtp",
    "dflash",
    "dspark",
    "peagle",
)
_FAMILIES: dict[str, type[Drafter]] = {}


def register(cls: type[Drafter]) -> type[Drafter]:
    """Class decorator: makes a family known under its name."""
    _FAMILIES[cls.family] = cls
    return cls


def family(name: str) -> type[Drafter]:
    """The drafter class called `name`. Raises UserError naming the known ones."""
    if name in BUILT_IN:
        importlib.import_module(f"draftsmith.drafters.{name}")
    if name not in _FAMILIES:
        raise UserError(f"drafter: no family {name!r}; known are {', '.join(BUILT_IN)}")
    return _FAMILIES[name]
