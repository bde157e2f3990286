"""The drafter contract: two views of one function, and how a drafter is stored.

`unroll` is the teacher-forced view (training, replay), `propose` the serving view on its own
cache. `logits` is the only way from hidden states to q in both. Neither may call the other: the
tests that every family inherits compare them.
"""

from __future__ import annotations

import importlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import Proposal
from draftsmith.drafters.policy import Policy, StaticTree
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.state import DrafterState
from draftsmith.drafters.target.causal_lm import Tap
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.vocab import VocabMap

logger = logging.getLogger(__name__)

State = TypeVar("State", bound=DrafterState)


@dataclass
class Unroll:
    """Hidden states of every (anchor, depth), teacher forced.

    hidden (M, H); index (B, A, K) into its rows, -1 where the depth does not exist or nothing is
    proposed; prev (M,) = x_{a+1+j}; depth (M,), 0 where rows are shared between depths.
    extras {name: (M, ..)}: what else the family's own loss term reads.
    """

    hidden: Tensor
    index: Tensor
    prev: Tensor
    depth: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Guesses:
    """What a drafter without q proposes: tokens (B, A, K) in target ids, -1 for none."""

    tokens: Tensor


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


def rows_of(states: Tensor, alignment: Alignment, batch: Batch) -> Unroll:
    """An Unroll from states (B, A, k, H): one row per existing (anchor, depth).

    Nothing is proposed at depths from k on.
    """
    k, depths = states.shape[2], alignment.exists.shape[2]
    exists, compare = alignment.exists[..., :k], alignment.compare[..., :k]
    index = torch.where(exists, exists.flatten().cumsum(0).view_as(exists) - 1, -1)
    index = F.pad(index, (0, depths - k), value=-1)
    depth = torch.arange(k, device=exists.device).expand_as(exists)
    row = torch.arange(exists.shape[0], device=exists.device).view(-1, 1, 1)
    prev = batch.tokens[row, compare]  # (B, A, k) x_{a+1+j}
    return Unroll(states[exists], index, prev[exists], depth[exists])


BUILT_IN = ("ngram", "small", "medusa", "hydra", "eagle", "eagle1", "mtp")
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


def save(drafter: Drafter, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Writes config.json and model.safetensors (weights; None: its own) into a folder."""
    about = {
        "format": 1,
        "family": drafter.family,
        "config": drafter.config.stored(),
        "target": drafter.target.identity(),
    }
    stored = drafter.weights() if weights is None else weights
    tensors = {n: t.cpu() for n, t in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(about, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a drafter folder. Raises UserError when it is not one."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no drafter there (config.json is missing); give a checkpoint")
    try:
        about = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not even text
        raise UserError(f"{path}: not valid JSON ({error}); copy the checkpoint again") from None
    parts = {"family": str, "config": dict, "target": dict}
    if not isinstance(about, dict) or any(
        not isinstance(about.get(key), kind) for key, kind in parts.items()
    ):
        raise UserError(
            f"{path}: not a draftsmith drafter (no family, config and target in it); "
            "give a folder that `draftsmith train` wrote"
        )
    return about


def load(folder: Path, target: Shell) -> Drafter:
    """The drafter stored in a folder, as it is served: on the target's device, in its dtype.

    Raises UserError as `read` does.
    """
    return read(folder, target).to(target.device, target.dtype).eval()


def read(folder: Path, target: Shell) -> Drafter:
    """The drafter stored in a folder, its own weights in fp32, as they are trained.

    Raises UserError when it was made for another target, or its tensors are not exactly those
    that its config asks for.
    """
    about = read_config(folder)
    check_target(folder, about["target"], target)
    try:
        cls = family(about["family"])
        drafter = cls(target, cls.Config(**about["config"]))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        line = f"{where}: {first['msg']}; correct it, or copy the checkpoint again"
        raise UserError(f"{folder / 'config.json'}: {line}") from None
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    load_weights(drafter, folder / "model.safetensors")
    return drafter


def load_weights(drafter: Drafter, path: Path) -> None:
    """Reads a drafter's weights. Raises UserError unless they are exactly those it asks for."""
    fill(drafter, read_weights(path), path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file. Raises UserError where it cannot be read."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); copy the checkpoint again") from None


def fill(drafter: Drafter, stored: dict[str, Tensor], path: Path) -> None:
    """Puts tensors that were read from `path` into a drafter. Raises UserError unless they are
    exactly those that its config asks for."""
    wanted = drafter.weights()
    remedy = "the file does not belong to config.json beside it; copy the checkpoint again"
    for name in sorted(wanted.keys() ^ stored.keys()):
        kind = "missing" if name in wanted else "unexpected"
        raise UserError(f"{path}: tensor {name} is {kind} for family {drafter.family}; {remedy}")
    for name, tensor in wanted.items():
        if tensor.shape != stored[name].shape:
            shapes = f"{tuple(stored[name].shape)} where {tuple(tensor.shape)} is needed"
            raise UserError(f"{path}: tensor {name} has shape {shapes}; {remedy}")
    try:
        drafter.load_state_dict(stored, strict=False)
    except UserError as error:  # a draft vocabulary that the target lacks
        raise UserError(f"{path}: {error}; {remedy}") from None


def check_target(folder: Path, made_for: dict[str, Any], target: Shell) -> None:
    """Raises UserError unless a drafter made for `made_for` fits `target`."""
    here = target.identity()
    remedy = f"give the target it was made for ({made_for.get('spec')})"
    for key, word in (
        ("tokenizer_hash", "tokenizer"),
        ("vocab_size", "vocabulary size"),
        ("hidden_size", "hidden size"),
        ("num_layers", "number of layers"),
    ):
        if made_for.get(key) != here[key]:
            raise UserError(
                f"{folder}: this drafter was made for another {word} "
                f"({str(made_for.get(key))[:12]}, the target has {str(here[key])[:12]}); {remedy}"
            )
    if made_for.get("adapted_from") != here.get("adapted_from"):
        raise UserError(
            f"{folder}: this drafter was made for {made_for.get('spec')} at revision "
            f"{str(made_for.get('revision'))[:12]}, not {here['spec']} at {here['revision'][:12]}: "
            f"adapting a target makes another one; {remedy}, or train a drafter for this one"
        )
    if made_for.get("revision") != here["revision"]:
        logger.warning(
            "%s was made for revision %.12s of its target, this one is %.12s: output stays exact, "
            "acceptance may differ", folder, made_for.get("revision"), here["revision"],
        )  # fmt: skip
