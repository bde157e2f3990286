"""Where prompts come from: a file, a folder, or a data set on the hub.

    mine.jsonl, mine.csv      one file (formats: see rows.py; what a row may look like: shapes.py)
    spec_bench/               every file of a folder, by name; a folder that `datasets` saved, or
                              laid out as a data set (data/train-*.parquet), is read as such
    org/name                  a data set on the hub, through `datasets`, row by row

Of a data set's splits the one that fits the use is read: train first to sample from, test first to
measure on. Every source is told in one line: its column, how many rows ask something, and how many
were skipped for what reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.source import HUB_ID, HUB_TIMEOUT
from draftsmith.train.data.columns import find_column, given_of, prompt_of, text_of
from draftsmith.train.data.files import SUFFIXES, Fault, Row, read_rows, suffix
from draftsmith.train.data.prompts import Prompt, Unusable
from draftsmith.train.samples.store import BROKEN, library

log = logging.getLogger(__name__)

Use = Literal["train", "test"]
SPLITS: dict[Use, tuple[str, ...]] = {
    "train": ("train", "validation", "test"),
    "test": ("test", "validation", "train"),
}


@dataclass(frozen=True)
class Reading:
    """How a source is read. column: the one that asks (None: found); given: with the answers that
    stand there; prefix: as texts, of which so many tokens are continued; use: which split of a data
    set is preferred; split, config: of a data set; limit: rows at most; template: what the chat
    template is given besides messages."""

    column: str | None = None
    given: bool = False
    prefix: int | None = None
    use: Use = "test"
    split: str | None = None
    config: str | None = None
    limit: int | None = None
    template: dict[str, Any] = field(default_factory=dict)


TRAIN = Reading(use="train")  # prompts to sample from


def read_source(
    spec: str, reading: Reading | None = None, tell: Callable[[str], None] | None = None
) -> list[Prompt]:
    """The prompts that `spec` names (forms: see the top), in order.

    A path wins over a hub name. tell gets the line about each source (default: the log). Raises
    UserError: no such path or data set, a folder without files, a hub that cannot be reached, no
    usable row.
    """
    reading = reading or Reading()
    path = Path(os.path.expanduser(spec))  # unlike pathlib's it never raises
    if path.is_dir():
        return _folder(Path(os.path.abspath(path)), reading, tell)
    if path.exists() or suffix(path) in SUFFIXES or not HUB_ID.fullmatch(spec):
        return read_prompts(path, reading, tell)
    _check_reachable(spec)
    return prompts_of(_data_set(spec, spec, reading), spec, _last(spec), reading, tell)


def read_prompts(
    path: Path, reading: Reading | None = None, tell: Callable[[str], None] | None = None
) -> list[Prompt]:
    """Prompts of one file; the default domain is its name. Raises UserError."""
    return prompts_of(read_rows(path), str(path), path.name.split(".")[0], reading, tell)


# ---------------------------------------------------------------- rows to prompts


class Skips:
    """What was skipped, counted by its reason; where the first of each stood."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str, where: str, detail: str = "") -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self._first.setdefault(reason, where + (f": {detail}" if detail else ""))

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """The commonest reasons first, e.g. "3 not JSON (first: line 7)"."""
        order = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return ", ".join(f"{self.counts[r]} {r} (first: {self._first[r]})" for r in order)


def prompts_of(
    rows: Iterable[Row],
    source: str,
    domain: str,
    reading: Reading | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Prompt]:
    """Prompts of rows, all by the column of the first row that has one.

    Raises UserError where no row can be used.
    """
    reading = reading or Reading()
    column = reading.column
    out: list[Prompt] = []
    skipped = Skips()
    for where, row in islice(rows, reading.limit):
        try:
            if isinstance(row, Fault):
                raise Unusable(*_split(row.problem))
            column = column or find_column(row)
            if column is None or row.get(column) is None:
                has = ", ".join(map(str, row)) or "nothing"
                raise Unusable(f"has no {column or 'text to ask'}", f"it has {has}")
            prompt = _prompt(row, column, domain, reading)
            out.append(with_template(prompt, reading.template))
        except Unusable as error:
            skipped.add(error.reason, where, error.detail)
    total = len(out) + len(skipped)
    if not out:
        raise UserError(
            f"{source}: none of its {total} rows can be used: {skipped}; write one like "
            '{"prompt": "..."} or {"messages": [..]}, or name the column that asks'
        )
    turns = sum(_turns(prompt, reading.given) for prompt in out)
    line = f"prompts {source}: column {column}, {len(out)} of {total} rows, {turns} turns"
    if skipped:
        line += f"; skipped {skipped}"
    (tell or (log.warning if skipped else log.info))(line)
    return out


def _prompt(row: dict[str, Any], column: str, domain: str, reading: Reading) -> Prompt:
    if reading.prefix is not None:
        return text_of(row, column, domain, reading.prefix)
    return (given_of if reading.given else prompt_of)(row, column, domain)


def _turns(prompt: Prompt, given: bool) -> int:
    """Answers that are asked for, or stand there."""
    said = [m for m in prompt.messages or () if given and m["role"] == "assistant"]
    return len(said) if given else 1 + len(prompt.later)


def _split(problem: str) -> tuple[str, str]:
    """Reason and detail of "not JSON (Expecting value at column 1)"."""
    reason, _, detail = problem.partition(" (")
    return reason, detail.removesuffix(")")


def with_template(prompt: Prompt, template: dict[str, Any]) -> Prompt:
    """The prompt with settings for its chat template; its own win."""
    if not template or prompt.messages is None:
        return prompt
    settings = {**template, **prompt.template}
    return Prompt(prompt.messages, None, prompt.domain, prompt.later, settings)


# ---------------------------------------------------------------- folders and the hub


def _folder(folder: Path, reading: Reading, tell: Callable[[str], None] | None) -> list[Prompt]:
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    files = sorted(p for p in folder.iterdir() if suffix(p) in SUFFIXES)
    if not saved and files:
        return [prompt for file in files for prompt in read_prompts(file, reading, tell)]
    if not saved and not any(suffix(p) in SUFFIXES for p in folder.rglob("*")):
        raise UserError(
            f"prompts {folder}: the folder has no file of {', '.join(SUFFIXES)}; name another"
        )
    rows = _data_set(str(folder), str(folder), reading, saved)
    return prompts_of(rows, str(folder), folder.name, reading, tell)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _data_set(name: str, place: str, reading: Reading, saved: bool = False) -> Iterator[Row]:
    """Rows of a data set that `datasets` knows how to read, one after the other."""
    datasets = library()
    with _told(name):
        if saved:
            found = datasets.load_from_disk(place)
        else:
            found = datasets.load_dataset(place, reading.config, streaming=True)
    splits = found if isinstance(found, dict) else {reading.split or "train": found}
    split = _chosen(name, list(splits), reading)
    with _told(name):
        for i, row in enumerate(splits[split], start=1):
            yield f"{split} row {i}", row


@contextmanager
def _told(name: str) -> Iterator[None]:
    """What `datasets` raises, as one line."""
    try:
        yield
    except (*BROKEN, RuntimeError, library().exceptions.DatasetsError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(
            f"prompts {name}: cannot be read ({line}); download it, and name a file"
        ) from None


def _chosen(name: str, splits: list[str], reading: Reading) -> str:
    """The split named, else the first that fits the use (train, or train_sft and the like)."""
    if reading.split is not None and reading.split not in splits:
        raise UserError(f"prompts {name}: has no split {reading.split}; it has {', '.join(splits)}")
    if reading.split is not None:
        return reading.split
    wanted = SPLITS[reading.use]
    near = [s for w in wanted for s in [w, *splits] if s in splits and s.startswith(w)]
    if not near:
        raise UserError(
            f"prompts {name}: has no split {' or '.join(wanted)} but {', '.join(splits)}; name one "
            "in a mix file"
        )
    return near[0]


def _check_reachable(name: str) -> None:
    """One short request: without a network `datasets` retries for minutes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    problem = "neither a file nor a folder here, nor a data set on the hub; check the name"
    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT)
        return
    except RepositoryNotFoundError:
        pass
    except Exception as error:  # the transport's own classes, which changed with hub 2.0
        problem = (
            f"neither a file nor a folder here, and the hub cannot be reached "
            f"({type(error).__name__}); check the name and the connection, or name a file"
        )
    raise UserError(f"prompts {name}: {problem}")
