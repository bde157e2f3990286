"""Where prompts come from: a file, a folder, a data set on the hub, or a mix of those.

    mine.jsonl, mine.csv      one file (formats: files.py; what a row may look like: columns.py)
    spec_bench/               every file of a folder, by name; a folder that `datasets` saved, or
                              laid out as a data set (data/train-*.parquet), is read as such
    org/name                  a data set on the hub, through `datasets`, row by row
    mix.yaml                  a list of such sources:

        - source: chat.jsonl              # a path, beside the mix file or not, or a hub name
          weight: 3
        - source: HuggingFaceH4/ultrachat_200k
          split: train_sft
          limit: 20000                    # rows read at most
          template: {enable_thinking: false}

Weights are shares of the prompts taken. The source that runs out first decides how many there are:
none is asked twice. Which ones are taken is fixed by their content, not by their order.

Of a data set's splits the one that fits the use is read: train first to sample from, test first to
measure on. A line is printed for every source: its column, how many rows ask something, and how
many were skipped for what reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from draftsmith.drafters.errors import UserError, said
from draftsmith.drafters.target.source import HUB_ID, HUB_TIMEOUT
from draftsmith.train.data.columns import find_column, given_of, prompt_of, text_of
from draftsmith.train.data.files import BROKEN, SUFFIXES, Fault, Row, library, read_rows, suffix
from draftsmith.train.data.prompts import Prompt, Skips, Unusable, plain_yaml, product_prompts

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


PLAIN = Reading()
Say = Callable[[str], None]  # prints a line


def prompts_to_learn(spec: str | None, say: Say | None = None) -> list[Prompt]:
    """Prompts to sample from: those that `spec` names, else draftsmith's own."""
    if not spec:
        return product_prompts("train")
    return read_source(spec, Reading(use="train"), say)


def read_source(spec: str, reading: Reading = PLAIN, say: Say | None = None) -> list[Prompt]:
    """The prompts that `spec` names (forms: see the top), in order.

    A path wins over a hub name. say: prints the line about each source (default: the log). Raises
    UserError: no such path or data set, a folder without files, a hub that cannot be reached, no
    usable row.
    """
    path = Path(os.path.expanduser(spec))  # unlike pathlib's it never raises
    if path.suffix in (".yaml", ".yml"):
        return _mix(path, reading, say)
    return _one(spec, path, reading, say)


def _one(spec: str, path: Path, reading: Reading, say: Say | None) -> list[Prompt]:
    """The prompts of what is no mix; path: what spec is, if it is one."""
    if path.is_dir():
        return _folder(Path(os.path.abspath(path)), reading, say)
    if path.exists() or suffix(path) in SUFFIXES or not HUB_ID.fullmatch(spec):
        return read_prompts(path, reading, say)
    _check_reachable(spec)
    domain = spec.rpartition("/")[2]
    return prompts_of(_data_set(spec, spec, reading), spec, domain, reading, say)


def read_prompts(path: Path, reading: Reading = PLAIN, say: Say | None = None) -> list[Prompt]:
    """Prompts of one file; the default domain is its name. Raises UserError."""
    return prompts_of(read_rows(path), str(path), path.name.split(".")[0], reading, say)


def balanced(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, in turn from each domain as long as it lasts.

    A file often lies sorted by category: its first prompts would stand for one of them.
    """
    place: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        place[prompt.domain] = place.get(prompt.domain, -1) + 1
        ranked.append((place[prompt.domain], i))
    return [prompts[i] for _, i in sorted(ranked)[:limit]]


# ---------------------------------------------------------------- rows to prompts


def prompts_of(
    rows: Iterable[Row], source: str, domain: str, reading: Reading = PLAIN, say: Say | None = None
) -> list[Prompt]:
    """Prompts of rows, all by the column of the first row that has one.

    Raises UserError where no row can be used.
    """
    column = reading.column
    out: list[Prompt] = []
    skipped = Skips()
    for place, row in islice(rows, reading.limit):
        try:
            if isinstance(row, Fault):
                reason, _, detail = row.problem.partition(" (")  # "not JSON (at column 1)"
                raise Unusable(reason, detail.removesuffix(")"))
            column = column or find_column(row)
            if column is None or row.get(column) is None:
                has = ", ".join(map(str, row)) or "nothing"
                raise Unusable(f"has no {column or 'text to ask'}", f"it has {has}")
            if reading.prefix is not None:
                prompt = text_of(row, column, domain, reading.prefix)
            else:
                prompt = (given_of if reading.given else prompt_of)(row, column, domain)
            out.append(with_template(prompt, reading.template))
        except Unusable as error:
            skipped.add(error.reason, place, error.detail)
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
    (say or (log.warning if skipped else log.info))(line)
    return out


def _turns(prompt: Prompt, given: bool) -> int:
    """Answers that are asked for, or stand there."""
    said = [m for m in prompt.messages or () if given and m["role"] == "assistant"]
    return len(said) if given else 1 + len(prompt.later)


def with_template(prompt: Prompt, template: dict[str, Any]) -> Prompt:
    """The prompt with settings for its chat template; its own win."""
    if not template or prompt.messages is None:
        return prompt
    settings = {**template, **prompt.template}
    return Prompt(prompt.messages, None, prompt.domain, prompt.later, settings)


# ---------------------------------------------------------------- folders and the hub


def _folder(folder: Path, reading: Reading, say: Say | None) -> list[Prompt]:
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    files = sorted(p for p in folder.iterdir() if suffix(p) in SUFFIXES)
    if not saved and files:
        return [prompt for file in files for prompt in read_prompts(file, reading, say)]
    if not saved and not any(suffix(p) in SUFFIXES for p in folder.rglob("*")):
        raise UserError(
            f"prompts {folder}: the folder has no file of {', '.join(SUFFIXES)}; name another"
        )
    rows = _data_set(str(folder), str(folder), reading, saved)
    return prompts_of(rows, str(folder), folder.name, reading, say)


def _data_set(name: str, place: str, reading: Reading, saved: bool = False) -> Iterator[Row]:
    """Rows of a data set that `datasets` knows how to read, one after the other."""
    datasets = library()
    with _one_line(name):
        if saved:
            found = datasets.load_from_disk(place)
        else:
            found = datasets.load_dataset(place, reading.config, streaming=True)
    splits = found if isinstance(found, dict) else {reading.split or "train": found}
    split = _chosen(name, list(splits), reading)
    with _one_line(name):
        for i, row in enumerate(splits[split], start=1):
            yield f"{split} row {i}", row


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """What `datasets` raises, as one line."""
    try:
        yield
    except (*BROKEN, RuntimeError, library().exceptions.DatasetsError) as error:
        raise UserError(
            f"prompts {name}: cannot be read ({said(error)}); download it, and name a file"
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


# ---------------------------------------------------------------- mixes


class MixPart(BaseModel):
    """One entry of a mix."""

    model_config = ConfigDict(extra="forbid")

    source: str
    weight: float = Field(default=1.0, gt=0)
    column: str | None = None
    split: str | None = None
    config: str | None = None
    limit: int | None = Field(default=None, ge=1)
    template: dict[str, Any] = Field(default_factory=dict)


def _mix(path: Path, reading: Reading, say: Say | None) -> list[Prompt]:
    """The prompts of a mix file, source after source. Raises UserError naming file and field."""
    parts = _parse(path)
    found = []
    for part in parts:
        own = replace(
            reading,
            column=part.column or reading.column,
            template=reading.template | part.template,
            split=part.split,
            config=part.config,
            limit=part.limit,
        )
        local = path.parent / part.source
        spec = str(local if local.exists() else part.source)
        found.append(_one(spec, Path(os.path.expanduser(spec)), own, say))
    unit = min(len(prompts) / part.weight for prompts, part in zip(found, parts, strict=True))
    out: list[Prompt] = []
    for prompts, part in zip(found, parts, strict=True):
        count = max(1, round(unit * part.weight))
        taken = set(sorted(range(len(prompts)), key=lambda i: (prompts[i].key, i))[:count])
        out += [prompt for i, prompt in enumerate(prompts) if i in taken]
        if say:
            say(f"mix {path}: {count} of the {len(prompts)} prompts of {part.source}")
    return out


def _parse(path: Path) -> list[MixPart]:
    try:
        raw = plain_yaml(path.read_text(encoding="utf-8-sig"))
        parts = TypeAdapter(list[MixPart]).validate_python(raw)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as a mix of prompts ({line})") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(
            f"{path}: {field}: {first['msg']}; write a list of `- source: ..` with weight, column, "
            "split, config, limit or template"
        ) from None
    if not parts:
        raise UserError(f"{path}: names no source; write a list of `- source: ..`")
    return parts
