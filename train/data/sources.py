"""Prompt sets by name: one source (see sources.py), or a mix of them in a YAML file.

    - source: chat.jsonl              # a path, beside the mix file or not, or a name on the hub
      weight: 3
    - source: HuggingFaceH4/ultrachat_200k
      split: train_sft
      limit: 20000                    # rows read at most
      weight: 1
      template: {enable_thinking: false}

Weights are shares of the prompts taken. The source that runs out first decides how many there are:
none is asked twice. Which ones are taken is fixed by their content, not by their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from draftsmith.drafters.errors import UserError
from draftsmith.train.data.hub import Reading, read_source
from draftsmith.train.data.prompts import Prompt


class Source(BaseModel):
    """One entry of a mix."""

    model_config = ConfigDict(extra="forbid")

    source: str
    weight: float = Field(default=1.0, gt=0)
    column: str | None = None
    split: str | None = None
    config: str | None = None
    limit: int | None = Field(default=None, ge=1)
    template: dict[str, Any] = Field(default_factory=dict)


def read_suite(
    spec: str, reading: Reading | None = None, tell: Callable[[str], None] | None = None
) -> list[Prompt]:
    """The prompts that `spec` names: a source, or a mix file. Raises UserError (see sources.py).

    tell gets a line about each source: its column, rows used, rows skipped (default: the log).
    """
    path = Path(os.path.expanduser(spec))
    if path.suffix in (".yaml", ".yml"):
        return _mix(path, reading or Reading(), tell)
    return read_source(spec, reading, tell)


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, in turn from each domain as long as it lasts.

    A suite lies sorted by category: its first prompts would stand for one of them.
    """
    place: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        place[prompt.domain] = place.get(prompt.domain, -1) + 1
        ranked.append((place[prompt.domain], i))
    return [prompts[i] for _, i in sorted(ranked)[:limit]]


def _mix(path: Path, reading: Reading, tell: Callable[[str], None] | None) -> list[Prompt]:
    """The prompts of a mix file, source after source. Raises UserError naming file and field."""
    sources = _parse(path)
    found = []
    for source in sources:
        own = replace(
            reading,
            column=source.column or reading.column,
            template=reading.template | source.template,
            split=source.split,
            config=source.config,
            limit=source.limit,
        )
        beside = path.parent / source.source
        found.append(read_source(str(beside if beside.exists() else source.source), own, tell))
    unit = min(len(prompts) / source.weight for prompts, source in zip(found, sources, strict=True))
    out: list[Prompt] = []
    for prompts, source in zip(found, sources, strict=True):
        count = max(1, round(unit * source.weight))
        taken = set(sorted(range(len(prompts)), key=lambda i: (prompts[i].key, i))[:count])
        out += [prompt for i, prompt in enumerate(prompts) if i in taken]
        if tell:
            tell(f"mix {path}: {count} of the {len(prompts)} prompts of {source.source}")
    return out


def _parse(path: Path) -> list[Source]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        sources = TypeAdapter(list[Source]).validate_python(raw)
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
    if not sources:
        raise UserError(f"{path}: names no source; write a list of `- source: ..`")
    return sources
