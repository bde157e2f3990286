"""A run's folder: checkpoints that are whole or absent, and the best one.

    runs/NAME/recipe.yaml            the recipe as run, defaults filled in
    runs/NAME/metrics.jsonl          one JSON line per logged step and per replay
    runs/NAME/checkpoint-STEP/       config.json + model.safetensors (a drafter), state.pt
    runs/NAME/best -> checkpoint-STEP

A checkpoint is written beside its place, flushed to disk and renamed, so a run killed at any
moment finds either all of it or none.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import LOAD_ERRORS, NOT_WRITTEN, UserError, cannot_write, said
from draftsmith.train import disk, trackers
from draftsmith.train.recipe import Recipe, parse

# Keys that do not decide the weights: a run may go on with other values. (What the samples hold
# is compared by content, wherever they lie.)
_FREE = {"runs", "samples", "log_every", "tracker", "device_map"}
STATE = "state.pt"
_MOMENTS = 2 * 4  # bytes of AdamW's two fp32 moments of a number


@contextmanager
def claimed(recipe: Recipe) -> Iterator[None]:
    """Makes the run's folder, or recognises it as this run's own, and keeps other processes out.

    A killed run's claim ends with it. Raises UserError when the folder holds another run, or one
    that is going on, or cannot be written.
    """
    folder = recipe.folder
    taken = f"{folder}: another process is training there; wait for it, or give another name"
    unwritable = f"{folder}: cannot be written ({{reason}}); change runs"
    with disk.locked(folder, taken, unwritable):
        path = folder / "recipe.yaml"
        if path.is_file() and steps(folder):
            # Parsed, so that keys which were not known then have their defaults.
            before = _deciding(parse(yaml.safe_load(path.read_text()), str(path)))
            now = _deciding(recipe)
            differ = [k for k in sorted(before | now) if before.get(k) != now.get(k)]
            for key in differ:
                raise UserError(
                    f"{folder}: holds another run ({key}: {before.get(key)} there, {now.get(key)} "
                    "here); give this one another name"
                )
        else:
            # Without a checkpoint only samples are worth keeping, and they check themselves.
            own = {"recipe.yaml", "metrics.jsonl", "samples", *trackers.FOLDERS}
            if any(p.name not in own for p in folder.iterdir() if p.name[0] != "."):
                raise UserError(f"{folder}: not empty and no run of draftsmith; give another name")
            disk.write(path, yaml.safe_dump(recipe.flat(), sort_keys=False))
        yield


def check_idle(folder: Path) -> None:
    """Raises UserError while a process trains in a run's folder, or where it cannot be written."""
    taken = (
        f"{folder}: a process is still training there; wait for it, or stop it (training goes on "
        "from its last checkpoint)"
    )
    with disk.locked(folder, taken, f"{folder}: cannot be written ({{reason}}); copy the run"):
        pass


def _deciding(recipe: Recipe) -> dict[str, Any]:
    """The keys that decide the weights. A cache's size is none of them, but stored states are
    rounded ones."""
    keys = {key: value for key, value in recipe.flat().items() if key not in _FREE}
    return keys | {"feature_cache": "set" if recipe.feature_cache else None}


def size(stored: int, trained: int, adapters: int) -> int:
    """Bytes of a checkpoint, roughly: the drafter's own, `stored` bytes of them, the moments of all
    trained numbers, and those of them that are adapters (fp32) beside."""
    return stored + _MOMENTS * trained + 4 * adapters


def save(
    folder: Path, step: int, drafter: Drafter, weights: dict[str, Tensor], state: dict[str, Any]
) -> Path:
    """Writes checkpoint-STEP: the drafter with these weights, and all that resuming needs."""
    place = folder / f"checkpoint-{step}"
    if place.exists():  # stopped right after it was made
        return place
    scratch = folder / f".writing-{step}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        torch.save(state | {"step": step, "rng": rng_state()}, scratch / STATE)
        storage.save(drafter, scratch, weights)  # last: it hashes what lies there
        disk.publish(scratch, place)
    except torch.OutOfMemoryError:  # of a device: a RuntimeError, but not the disk's
        raise
    except NOT_WRITTEN as error:
        shutil.rmtree(scratch, ignore_errors=True)
        remedy = "those before it are whole: make room, and run the same command again"
        raise cannot_write(place, error, remedy) from None
    return place


def mark_best(folder: Path, step: int) -> None:
    """Points `best` at checkpoint-STEP, atomically."""
    link = folder / ".best"
    link.unlink(missing_ok=True)
    link.symlink_to(f"checkpoint-{step}")
    os.replace(link, folder / "best")


def steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a run, ascending."""
    found = [p.name.removeprefix("checkpoint-") for p in folder.glob("checkpoint-*")]
    return sorted(int(name) for name in found if name.isdigit())


def restore(folder: Path, step: int) -> dict[str, Any]:
    """What checkpoint-STEP holds beside the drafter. Raises UserError where any of its files is
    damaged."""
    place = folder / f"checkpoint-{step}"
    path = place / STATE
    remedy = f"delete {place}, and the same command goes on from the checkpoint before it"
    storage.check_hashes(place, storage.WEIGHTS, STATE, remedy=remedy)
    try:
        state = torch.load(path, map_location="cpu", weights_only=False)
        set_rng_state(state["rng"])
    except LOAD_ERRORS as error:  # a damaged pickle raises anything
        raise UserError(f"{path}: cannot be read ({said(error)}); {remedy}") from None
    return state


def rng_state() -> dict[str, Any]:
    """States of every generator a training step could draw from."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    for index, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(one, index)  # there may be fewer devices now
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
