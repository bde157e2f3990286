"""Stored samples as they are read: checked, audited, counted, split."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.train.samples import store
from draftsmith.train.samples.audit import TOLERANCE, audit
from draftsmith.train.states.computed import Computed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One text, of one turn or several. made: per token, whether the target drew it.

    finish: how its last turn ends ("stop", "length", ..); those before it ended by themselves.
    """

    ids: list[int]
    made: list[bool]
    finish: str
    domain: str
    key: str  # of the prompt

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each answer, end excluded."""
        edges = [False, *self.made, False]
        turns = [i for i in range(len(self.made) + 1) if edges[i] != edges[i + 1]]
        return list(zip(turns[::2], turns[1::2], strict=True))


class Samples:
    """Stored samples, in order; rows are read from disk when asked for."""

    def __init__(self, folder: Path, manifest: dict[str, Any], rows: Any) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sampler = Sampler(**manifest["sampler"])
        self.foreign: bool = manifest["foreign"]
        self._rows = rows

    @classmethod
    def open(cls, folder: Path, target: Target, audit: int = 16) -> Samples:
        """Reads samples and checks them: complete, unchanged, this target's, and its own.

        audit: how many samples, chosen by a fixed seed, the target reads to prove the last
        (0 = none; foreign text is never audited). Raises UserError.
        """
        folder = Path(folder)
        manifest = store.read_manifest(folder)
        if manifest["state"] != "complete":
            raise UserError(
                f"samples {folder}: are still being written; wait for that run, or run it again "
                "to let it finish"
            )
        _check_target(folder, manifest["target"], target)
        rows = store.load(folder / store.ROWS)
        store.check(rows, manifest["samples"], manifest["content_hash"], folder / store.ROWS)
        out = cls(folder, manifest, rows)
        out.prove(target, audit)
        return out

    def as_foreign(self) -> Samples:
        """The same texts, read as not the target's own."""
        return Samples(self.folder, self.manifest | {"foreign": True}, self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[int(index)]
        return Sample(*(row[column] for column in store.COLUMNS))

    @cached_property
    def lengths(self) -> Tensor:
        """(n,) tokens of each sample."""
        sizes = [torch.as_tensor(s.copy()) for s, _ in store.chunks(self._rows, "ids")]
        return torch.cat(sizes).long() if sizes else torch.zeros(0, dtype=torch.long)

    @cached_property
    def first_made(self) -> Tensor:
        """(n,) position of each sample's first target-made token; its length where it has none."""
        out = []
        for sizes, made in store.chunks(self._rows, "made"):
            length = torch.as_tensor(sizes.copy()).long()
            row = torch.repeat_interleave(torch.arange(len(length)), length)
            place = torch.arange(len(row)) - (length.cumsum(0) - length)[row]
            flags = torch.as_tensor(made.copy())
            out.append(length.scatter_reduce(0, row[flags], place[flags], "amin"))
        return torch.cat(out) if out else torch.zeros(0, dtype=torch.long)

    def token_counts(self, indices: Sequence[int] | None = None) -> Tensor:
        """(V,) long: how often the target made each token, over all samples or some."""
        wanted = torch.ones(len(self), dtype=torch.bool)
        if indices is not None:
            wanted = torch.zeros_like(wanted)
            wanted[torch.as_tensor(list(indices), dtype=torch.long)] = True
        V = self.manifest["target"]["vocab_size"]
        counts = torch.zeros(V, dtype=torch.long)
        start = 0
        pairs = zip(store.chunks(self._rows, "ids"), store.chunks(self._rows, "made"), strict=True)
        for (sizes, ids), (_, made) in pairs:
            length = torch.as_tensor(sizes.copy()).long()
            use = wanted[start : start + len(length)].repeat_interleave(length)
            use &= torch.as_tensor(made.copy())
            counts += torch.bincount(torch.as_tensor(ids.copy())[use].long(), minlength=V)
            start += len(length)
        return counts

    def split(self, heldout: int, seed: int) -> tuple[list[int], list[int]]:
        """(train, heldout) sample indices, shuffled by (seed, key): row order has no say.

        Samples of one prompt stay together, so that a few less than `heldout` may come out.
        Raises UserError where that leaves a side that was asked for empty.
        """
        groups: dict[str, list[int]] = {}
        for index, key in enumerate(self._rows["key"]):
            groups.setdefault(key, []).append(index)
        order = sorted(groups, key=lambda k: hashlib.sha256(f"{seed} {k}".encode()).digest())
        train: list[int] = []
        held: list[int] = []
        for key in order:
            group = groups[key]
            if len(group) > 1:
                group = sorted(group, key=lambda i: self[i].ids)
            (held if len(held) + len(group) <= heldout else train).extend(group)
        if heldout < 0 or not train or (heldout and not held):
            raise UserError(
                f"heldout: {heldout} of the {len(self)} samples ({len(groups)} prompts) in "
                f"{self.folder} cannot be held out; choose between 0 and {len(self) - 1}, or "
                "sample more prompts"
            )
        return train, held

    def prove(self, target: Target, count: int) -> None:
        """Audits `count` samples (see audit.py); raises UserError where they fail."""
        if self.foreign or not count:
            return
        chosen = random.Random(0).sample(range(len(self)), min(count, len(self)))
        texts = [(i, self[i].ids, self[i].made) for i in chosen]
        tolerance = max(
            TOLERANCE.get(name, TOLERANCE["bfloat16"])
            for name in (self.manifest["dtype"], dtype_name(target))
        )
        try:
            found = audit(target, texts, Computed(target), self.sampler, tolerance)
            fault = found.fault()
        except UserError as error:
            fault = str(error)
        if fault:
            settings = asdict(self.sampler).items()
            drawn_at = ", ".join(f"{name} {value:g}" for name, value in settings)
            raise UserError(
                f"samples {self.folder}: {fault}; they are not this target's own at "
                f"{drawn_at}: name the sampler they were drawn at, sample again, or "
                "import them with foreign=True"
            )
        log.info("samples %s: audit passed: %s", self.folder, found)


def dtype_name(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _check_target(folder: Path, theirs: dict[str, Any], target: Target) -> None:
    """Raises UserError where samples are another target's; theirs: its identity."""
    ours = target.identity()
    for name in ("tokenizer_hash", "vocab_size", "hidden_size", "num_layers", "template_hash",
                 "revision"):  # fmt: skip
        if theirs.get(name) != ours[name]:
            raise UserError(
                f"samples {folder}: their target's {name} is {_short(theirs.get(name))}, that of "
                f"{target.source.spec} is {_short(ours[name])}; use the target they were made "
                "with, or sample again"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + ".."
