"""What several commands share: prompts, runs, the drafter without weights, places for figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError, cannot_write
from draftsmith.drafters.target.shell import Shell
from draftsmith.train import checkpoint, disk
from draftsmith.train.data.prompts import Prompt, product_prompts
from draftsmith.train.data.sources import balanced, read_source
from draftsmith.train.recipe import Recipe, parse


def take_prompts(spec: str | None, limit: int) -> list[Prompt]:
    """At most `limit` prompts from all domains of a suite; None: of draftsmith's own, held out.

    Raises UserError.
    """
    return balanced(read_source(spec) if spec else product_prompts("heldout"), limit)


def check_room(longest: int, max_new_tokens: int, target: Shell) -> None:
    """Raises UserError unless an answer fits behind a prompt of `longest` tokens."""
    if longest + max_new_tokens > target.max_positions:
        raise UserError(
            f"--max-new-tokens: {max_new_tokens} after a prompt of {longest} tokens exceed the "
            f"target's {target.max_positions} positions; lower it"
        )


def ngram(target: Shell) -> Drafter:
    """The drafter without weights, at its defaults."""
    family = base.family("ngram")
    return family.create(target, family.Config())


# ---------------------------------------------------------------- a run


def read_run(run: Path) -> tuple[Recipe, list[int]]:
    """A run's recipe and the steps of its checkpoints. Raises UserError where it is none.

    Of a run that adapted its target: the new target in the recipe, and the last step alone. Heads
    of earlier steps belong to targets that nobody kept.
    """
    path = run / "recipe.yaml"
    if not path.is_file():
        raise UserError(f"{run}: no run there (recipe.yaml is missing); give a folder of runs/")
    recipe = parse(yaml.safe_load(path.read_text()), str(path))
    checkpoint.check_idle(run)
    steps = checkpoint.steps(run)
    if not steps:
        raise UserError(f"{run}: has no checkpoint yet; train it first, or lower save_every")
    if recipe.adapt:
        if not (run / "target").is_dir():
            raise UserError(f"{run}: its new target is not finished; run the same command again")
        return recipe.model_copy(update={"target": str(run / "target")}), steps[-1:]
    return recipe, steps


def samples_of(run: Path, recipe: Recipe) -> Path:
    """The samples folder that the run learned from; it may be gone."""
    return Path(recipe.samples) if recipe.samples else run / "samples"


def digest(file: Path) -> str:
    """sha256 of a checkpoint's file. Raises UserError where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); copy the checkpoint again"
        ) from None


# ---------------------------------------------------------------- where figures go


def check_file(output: Path | None) -> None:
    """Raises UserError, before any work is done, for an --output that is no file to be written."""
    if output is None:
        return
    if output.is_dir():
        raise UserError(f"{output}: is a folder; name a file for --output, e.g. {output}/out.json")
    if not output.parent.is_dir():
        raise UserError(f"{output}: no folder {output.parent}; make it, or give another --output")
    _probe(output.parent)


def make_folder(output: Path) -> None:
    """Makes an --output folder. Raises UserError, before any work is done, where it cannot be."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output, error, "give another --output") from None
    _probe(output)


def _probe(folder: Path) -> None:
    probe = folder / ".probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(folder, error, "give another --output") from None


def once(
    file: Path, key: dict[str, Any], make: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """What `file` holds if it was made with this key, else `make()`, stored; and which it was."""
    try:
        stored = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:  # cut short
        stored = {}
    made = stored.get("key") != key
    if made:
        stored = {"key": key, "made": make()}
        disk.write(file, json.dumps(stored, indent=1, allow_nan=False) + "\n")
        stored = json.loads(file.read_text())  # the same types, made or read
    return stored["made"], made
