"""The target's states of every text, kept on disk: it then reads each text once, not once an epoch.

    SAMPLES/features/HASH/about.json           what the states are of
    SAMPLES/features/HASH/00012.safetensors    those of some packed rows: `states` (n, C, H) of n
                                               tokens in C layers, the pre-norm state last

HASH is taken over all that decides a state: target, tokenizer and template, precision, layers, the
samples' content, their cut and order. So another target, tap or sample makes another cache, and
runs that differ in loss or seed share one: all texts are in it, for another seed holds out others.
Replay, which chooses the checkpoint, is always of what the target computes. A shard appears whole
under its name, or not at all: a killed run goes on with the next.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError, said
from draftsmith.drafters.target.causal_lm import Tap
from draftsmith.drafters.target.target import Target
from draftsmith.train import disk
from draftsmith.train.processes import SINGLE, Processes
from draftsmith.train.progress import CountLine
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import store
from draftsmith.train.samples.packing import Cursor, Stream, collate, teaching
from draftsmith.train.samples.samples import Samples, dtype_name
from draftsmith.train.states.computed import Computed

FORMAT = 1
FOLDER = "features"
SHARD = 256 << 20  # bytes: what is lost when a run is killed, and held in memory while written
RECOMPUTED = 4  # texts, each time a cache is opened
# How far a token's states may lie from those computed anew, relative to their length, and the share
# of tokens that may lie further: near ties of a router send a few to other experts.
TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
STRAY = 0.01
_OPEN = 256  # shards whose files are open at a time


def stored_taps(taps: Sequence[Tap], num_layers: int) -> list[Tap]:
    """Those of a drafter's taps that do not follow from the pre-norm state."""
    return [tap for tap in taps if tap not in ("normed", num_layers)]


def stored_dtype(recipe: Recipe, target_dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if recipe.feature_dtype else target_dtype


def token_bytes(taps: Sequence[Tap], num_layers: int, hidden: int, dtype: torch.dtype) -> int:
    """Disk that one token takes."""
    return (len(stored_taps(taps, num_layers)) + 1) * hidden * dtype.itemsize


class FeatureCache:
    """The states of all samples that teach anything, each cut at the recipe's `length`."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        samples: Samples,
        taps: Sequence[Tap],
        mixed_precision: str,
    ) -> None:
        self.recipe, self.target, self.samples = recipe, target, samples
        self.taps = list(taps)
        self.stored = stored_taps(taps, target.num_layers)
        self.computed = Computed(target, self.stored)
        self.dtype = stored_dtype(recipe, target.dtype)
        stream = Stream(samples, teaching(samples, recipe.length), recipe.length, seed=0)
        rows, _ = stream.take(Cursor(), stream.rows_per_epoch(0))
        each = token_bytes(taps, target.num_layers, target.hidden_size, self.dtype)
        per = max(1, SHARD // (each * recipe.length))
        self.shards = [rows[i : i + per] for i in range(0, len(rows), per)]
        sizes = samples.lengths.clamp(max=recipe.length).tolist()
        self._place: dict[int, tuple[int, slice]] = {}  # of each sample: shard, tokens in it
        self.tokens: list[int] = []  # of each shard
        for number, shard in enumerate(self.shards):
            start = 0
            for index in (i for row in shard for i in row):
                self._place[index] = number, slice(start, start + sizes[index])
                start += sizes[index]
            self.tokens.append(start)
        self.size = each * sum(self.tokens)  # bytes, headers apart
        identity = target.identity()
        del identity["spec"]
        self.identity = {
            "format": FORMAT,
            "target": identity,
            "computed": [dtype_name(target), mixed_precision],
            "stored": str(self.dtype).removeprefix("torch."),
            "layers": [*self.stored, "final"],
            "samples": samples.manifest["content_hash"],
            "length": recipe.length,
            "shards": store.digest(self.shards),
        }
        self.digest = store.digest(self.identity)
        self.folder = samples.folder / FOLDER / self.digest[:16]
        self._open = lru_cache(maxsize=_OPEN)(self._opened)

    # ---------------------------------------------------------------- making it

    def prepare(self, accelerator: Accelerator, processes: Processes = SINGLE) -> None:
        """Computes what is not there yet, each process its share, and proves what is there.

        Processes wait for each other where waiting costs nothing (processes.py): it may take hours.

        Raises UserError before anything is computed: beyond the budget or the disk, another run is
        writing there, a shard is broken; and for states that are not the target's.
        """
        main = accelerator.is_main_process
        stored = [n for n in range(len(self.shards)) if self._path(n).exists()]
        for number in stored:
            self._open(number)
        each = self.size // sum(self.tokens)
        need = self.size - each * sum(self.tokens[n] for n in stored)
        if main:
            print(
                f"features: {shown(self.size)} in {self.folder} ({sum(self.tokens):,} tokens "
                f"of {each:,} bytes, {self.identity['stored']}), {shown(need)} still to be "
                "computed",
                file=sys.stderr,
            )
        if need:
            self._check_room(need)
        with self._claimed() if main and need else nullcontext():
            processes.meet()  # the folder is this launch's own
            self._compute(accelerator)
            processes.meet()
        for number in range(len(self.shards)):
            self._open(number)
        with accelerator.autocast():
            self.prove()

    def _check_room(self, need: int) -> None:
        budget, folder = int(self.recipe.feature_cache or 0), self.folder.parent
        files = (f for f in folder.glob("*/*.safetensors") if f.parent != self.folder)
        others = sum(file.stat().st_size for file in files)
        if self.size + others > budget:
            more = f" and {shown(others)} of other caches in {folder} (delete those no longer used)"
            raise beyond(budget, self.size, more if others else "")
        free = shutil.disk_usage(self.samples.folder).free
        if need > free:
            raise UserError(
                f"feature_cache: {shown(need)} of states are to be written to {folder}, where "
                f"{shown(free)} are free; free some, or leave the key out"
            )

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Makes the folder, and keeps other runs from computing the same; a kill ends the claim."""
        taken = f"feature_cache: another run is filling {self.folder}; wait for it, and run again"
        unwritable = (
            f"feature_cache: {self.folder} cannot be written ({{reason}}); copy the samples to "
            "where it can, or leave the key out"
        )
        with disk.locked(self.folder, taken, unwritable):
            disk.write(self.folder / "about.json", json.dumps(self.identity, indent=1) + "\n")
            yield

    def _compute(self, accelerator: Accelerator) -> None:
        # By number, not by what is missing: that changes while others write.
        mine = range(accelerator.process_index, len(self.shards), accelerator.num_processes)
        missing = [number for number in mine if not self._path(number).exists()]
        line = CountLine("features", len(missing)) if accelerator.is_main_process else None
        with accelerator.autocast():
            for number in missing:
                self._write(number)
                if line:
                    line.count()

    def _write(self, number: int) -> None:
        """One shard. The target reads as many rows at a time as in a training step."""
        parts, shard, count = [], self.shards[number], self.recipe.rows
        for rows in (shard[i : i + count] for i in range(0, len(shard), count)):
            batch = collate(self.samples, rows, self.recipe.length)
            states = self._states(batch, rows)
            parts += [s[b >= 0] for s, b in zip(states, batch.segment, strict=True)]
        path = self._path(number)
        scratch = path.with_suffix(".tmp")
        save_file({"states": torch.cat(parts)}, scratch, {"cache": self.digest})
        disk.flush(scratch)
        os.replace(scratch, path)

    def _states(self, batch: Batch, rows: list[list[int]]) -> Tensor:
        """States (B, T, C, H) of a batch, on the CPU, as they are stored."""
        read = self.computed.fill(batch, rows)
        assert read.final is not None
        layers = [read.features[str(tap)] for tap in self.stored] + [read.final]
        return torch.stack([layer.to(self.dtype) for layer in layers], dim=2).cpu()

    # ---------------------------------------------------------------- reading it

    def fill(self, batch: Batch, rows: list[list[int]]) -> Batch:
        """As `States.fill` says: what `Computed` gives, but for rounding (other rows in the batch,
        the stored dtype), and 0 on padding."""
        batch = batch.to(self.target.device)
        B, T = batch.tokens.shape
        C = len(self.stored) + 1
        states = torch.zeros(C, B, T, self.target.hidden_size, dtype=self.dtype)
        for b, row in enumerate(rows):
            start = 0
            for index in row:
                text = self.text(index)  # (n, C, H)
                states[:, b, start : start + len(text)] = text.transpose(0, 1)
                start += len(text)
        *layers, final = states.to(batch.device).to(self.target.dtype)
        batch.final = final
        batch.features = {str(tap): s for tap, s in zip(self.stored, layers, strict=True)}
        with torch.no_grad():
            for tap in self.taps:
                if tap == "normed":
                    # By a device map the norm may lie on another device.
                    batch.features[tap] = self.target.norm(final).to(final.device)
                elif tap == self.target.num_layers:
                    batch.features[str(tap)] = final
        return batch

    def text(self, index: int) -> Tensor:
        """Stored states (n, C, H) of a sample."""
        number, tokens = self._place[index]
        return self._open(number)[tokens]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def _opened(self, number: int) -> Any:
        """A shard's states, read from disk when sliced. Raises UserError for a broken one."""
        path = self._path(number)
        remedy = "delete it and run again: only what it holds is computed anew"
        try:
            file = safe_open(path, framework="pt")
            made_for, states = (file.metadata() or {}).get("cache"), file.get_slice("states")
        except FileNotFoundError:
            raise UserError(
                f"{path}: is missing; run again, with the samples in a folder that all nodes share"
            ) from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read ({said(error)}); {remedy}") from None
        if made_for != self.digest:
            raise UserError(f"{path}: was made for another target, layers or samples; {remedy}")
        return states

    def prove(self) -> None:
        """Computes a few texts anew, each alone; raises UserError where the stored states differ
        by more than rounding."""
        seed, count = self.recipe.seed, min(RECOMPUTED, len(self._place))
        chosen = random.Random(seed).sample(sorted(self._place), count)
        allowed = max(TOLERANCE[n] for n in (dtype_name(self.target), self.identity["stored"]))
        gaps = []
        for index in chosen:
            alone = collate(self.samples, [[index]], self.recipe.length)
            anew = self._states(alone, [[index]])[0].float()
            gap = (self.text(index).float() - anew).norm(dim=2)  # (n, C)
            gaps.append((gap / anew.norm(dim=2).clamp(min=1e-20)).amax(1))
        apart = torch.cat(gaps)  # (tokens,)
        strays = int((~(apart <= allowed)).sum())
        if strays > STRAY * len(apart):
            raise UserError(
                f"{self.folder}: the states of {strays} of {len(apart)} tokens in {count} texts "
                f"are not those that the target computes (up to {apart.max():.2g} of their length "
                f"apart, {allowed:g} is rounding); delete the folder and run again"
            )


def beyond(budget: int, size: int, more: str = "") -> UserError:
    return UserError(
        f"feature_cache: {shown(budget)} cannot hold {shown(size)} of states{more}; raise it, or "
        "leave the key out: the target then runs in every step"
    )


def shown(size: float) -> str:
    """Bytes in the key's own units."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
