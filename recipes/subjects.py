"""What several commands share: prompts, the drafter without weights, room, places for output."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError, cannot_write
from draftsmith.drafters.target import Target
from draftsmith.train.prompts import Prompt, product_prompts
from draftsmith.train.suites import read_suite, spread


def asked(spec: str | None, limit: int) -> list[Prompt]:
    """At most `limit` prompts from all domains of a suite; None: of draftsmith's own, held out.

    Raises UserError.
    """
    return spread(read_suite(spec) if spec else product_prompts("heldout"), limit)


def check_room(longest: int, max_new_tokens: int, target: Target) -> None:
    """Raises UserError unless an answer fits behind a prompt of `longest` tokens."""
    if longest + max_new_tokens > target.max_positions:
        raise UserError(
            f"--max-new-tokens: {max_new_tokens} after a prompt of {longest} tokens exceed the "
            f"target's {target.max_positions} positions; lower it"
        )


def ngram(target: Target) -> Drafter:
    """The drafter without weights, at its defaults."""
    family = base.family("ngram")
    return family.create(target, family.Config())


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
