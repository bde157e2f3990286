"""Answers made by other programs, stored as samples: as token ids, or as conversations in text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler, not_applied
from draftsmith.drafters.target.ends import to_the_end
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.columns import token_ids
from draftsmith.train.data.files import Fault, read_rows
from draftsmith.train.data.masks import given_rows
from draftsmith.train.data.prompts import Prompt, Unusable
from draftsmith.train.samples import store, writing
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.writing import Parts

_PART = 1000  # rows


def import_answers(
    file: Path,
    target: Target,
    sampler: Sampler,
    folder: Path,
    foreign: bool = False,
    audit: int = 16,
) -> Samples:
    """Stores answers that another program made with this target, and audits them.

    file: JSONL (or a JSON array) of prompt_ids, response_ids, finish_reason, source and, if the
    prompt has an id of its own, key. response_ids are the tokens drawn, the end token included.
    foreign=True takes text that is not the target's own; it is marked so, and not audited. Raises
    UserError, for rows that name a penalty, min_p or the like as well; nothing is stored then.
    """
    folder, file = Path(folder), Path(file)
    manifest = writing.begun(target, sampler, "imported") | {"foreign": foreign, "file": file.name}
    rows = _imported_rows(file, target)
    bytes_needed = 4 * file.stat().st_size if file.is_file() else 0
    return _stored(folder, manifest, rows, bytes_needed, target, audit)


def import_given(
    prompts: list[Prompt],
    target: Target,
    sampler: Sampler,
    folder: Path,
    say: Callable[[str], None],
) -> Samples:
    """Stores conversations with the answers they came with: foreign text, masked exactly.

    prompts: whole conversations (`Reading(given=True)`). Answers longer than the target's
    positions are skipped, with the rest that cannot be masked; say: prints the count. Raises
    UserError.
    """
    folder = Path(folder)
    manifest = writing.begun(target, sampler, "given") | {"foreign": True}
    rows = given_rows(prompts, target, say)
    letters = sum(len(m["content"]) for p in prompts for m in p.messages or ())
    return _stored(folder, manifest, rows, store.size(len(prompts), letters), target, audit=0)


def _stored(
    folder: Path,
    manifest: dict[str, Any],
    rows: Iterable[dict[str, Any]],
    bytes_needed: int,
    target: Target,
    audit: int,
) -> Samples:
    """Writes rows as a samples folder; if anything fails, nothing is left of it."""
    with store.claimed(folder):
        if (folder / store.MANIFEST).exists():
            before = store.read_manifest(folder)
            if before["state"] == "complete" or before["origin"] != manifest["origin"]:
                raise UserError(f"samples {folder}: holds samples already; name another folder")
            shutil.rmtree(folder / store.PARTS, ignore_errors=True)
        try:
            store.check_disk(folder, bytes_needed)
            store.write_manifest(folder, manifest)
            parts = Parts(folder)
            held: list[dict[str, Any]] = []
            for index, row in enumerate(rows):
                held.append(row | {"index": index})
                if len(held) == _PART:
                    parts.add(held)
                    held = []
            if held:
                parts.add(held)
            return writing.finish(folder, manifest, parts, target, audit)
        except UserError:
            for name in (store.PARTS, store.ROWS):
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / store.MANIFEST).unlink(missing_ok=True)
            raise


def _imported_rows(file: Path, target: Target) -> Iterator[dict[str, Any]]:
    """Answers are not data to pick from: the first that cannot be read ends the import."""
    for row_place, row in read_rows(file):
        place = f"{file} {row_place}"
        if isinstance(row, Fault):
            raise UserError(f"{place}: {row.problem}; write one JSON object a line")
        try:
            yield _imported(row, target, file.stem)
        except Unusable as error:
            raise UserError(f"{place}: {error}; mend or drop the row") from None


def _imported(row: dict[str, Any], target: Target, domain: str) -> dict[str, Any]:
    prompt = token_ids(row.get("prompt_ids"), "prompt_ids")
    answer = token_ids(row.get("response_ids"), "response_ids")
    finish = row.get("finish_reason")
    if not isinstance(finish, str) or not finish:
        raise Unusable('finish_reason is no text (write "stop" or "length")')
    if beyond := not_applied(row):
        raise Unusable(f"drawn with {beyond}, which changes the target's law")
    stop = to_the_end(answer, target.eos_ids)
    if stop is None and finish == "stop":
        raise Unusable(
            f'finish_reason is "stop", and response_ids hold none of the end tokens '
            f"{target.eos_ids} (write the one that was drawn as their last, or another reason)"
        )
    if stop is not None and stop < len(answer):
        raise Unusable(f"response_ids go on behind the end token {answer[stop - 1]} at {stop - 1}")
    ids = [*prompt, *answer]
    if max(ids) >= target.vocab_size:
        raise Unusable(
            f"token {max(ids)} is outside the vocabulary of {target.source.spec} "
            f"({target.vocab_size})"
        )
    if len(ids) > target.max_positions:
        raise Unusable(f"{len(ids)} tokens exceed the target's {target.max_positions} positions")
    domain = str(row.get("source") or domain)
    return {
        "ids": ids,
        "made": [False] * len(prompt) + [True] * len(answer),
        "finish": "stop" if stop else finish,
        "domain": domain,
        "key": str(row.get("key") or Prompt(None, prompt, domain).key),
    }
