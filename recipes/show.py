"""`draftsmith sample PATH --show`: conversations as they are learned from, and counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.source import resolve
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.chat_template import encode_fitting
from draftsmith.train.data.masks import given_rows
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.sources import Reading, read_source
from draftsmith.train.samples import store
from draftsmith.train.samples.samples import Sample, Samples

CONVERSATIONS = 4  # printed, spread over the whole
LEARNED, READ, END = "bold green", "dim", "bold magenta"


def show(path: Path, target: str, reading: Reading, max_new_tokens: int) -> None:
    """Prints a samples folder, or what a file of prompts would become. Raises UserError.

    Of a file: what each prompt is asked as; with reading.given what would be learned from its
    answers.
    """
    console = Console()
    samples: Samples | list[Sample]
    if (path / store.MANIFEST).is_file():
        samples, spec = stored(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(resolve(spec, weights=False).path)
    else:
        prompts = read_source(str(path), reading, console.print)
        loaded = Target.load(target)
        samples, tokenizer = asked(prompts, loaded, max_new_tokens, reading.given), loaded.tokenizer
    step = max(1, len(samples) // CONVERSATIONS)
    for i in range(0, min(len(samples), step * CONVERSATIONS), step):
        console.rule(f"{i}: {samples[i].domain}, {samples[i].finish or 'asked'}", align="left")
        console.print(coloured(samples[i], tokenizer))
    console.print(counts(samples))


def stored(folder: Path) -> tuple[Samples, str]:
    """A finished samples folder, without its target, and the target's name."""
    manifest = store.read_manifest(folder)
    if manifest["state"] != "complete":
        raise UserError(f"samples {folder}: are still being written; run it again to finish it")
    rows = store.load(folder / store.ROWS)
    return Samples(folder, manifest, rows), manifest["target"]["spec"]


def asked(prompts: list[Prompt], target: Target, max_new_tokens: int, given: bool) -> list[Sample]:
    """A file's conversations, as samples that nobody has answered yet; given: as they stand."""
    if given:
        rows = given_rows(prompts, target, Console().print)
        return [Sample(*(row[name] for name in store.COLUMNS)) for row in rows]
    encoded = encode_fitting(prompts, target, max_new_tokens)
    return [
        Sample(ids, [False] * len(ids), "", p.domain, p.key)
        for p, ids in zip(prompts, encoded, strict=True)
        if ids
    ]


def coloured(sample: Sample, tokenizer: Any) -> Text:
    """A conversation: what is learned from in green, its end token marked, the rest dim."""
    out = Text()
    last = 0
    for start, end in sample.spans:
        out.append(_decoded(tokenizer, sample.ids[last:start]), READ)
        out.append(_decoded(tokenizer, sample.ids[start : end - 1]), LEARNED)
        token = _decoded(tokenizer, sample.ids[end - 1 : end])
        special = sample.ids[end - 1] in tokenizer.all_special_ids
        out.append(token, END if special else LEARNED)
        last = end
    out.append(_decoded(tokenizer, sample.ids[last:]), READ)
    return out


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def counts(samples: Samples | list[Sample]) -> Table:
    """Per domain: conversations, turns learned from, tokens read and learned, how they end."""
    rows: dict[str, Counter[str]] = {}
    ends: Counter[str] = Counter()
    for i in range(len(samples)):
        sample = samples[i]
        for name in (sample.domain, "all"):
            rows.setdefault(name, Counter()).update(
                conversations=1,
                turns=len(sample.spans),
                tokens=len(sample.ids),
                learned=sum(sample.made),
            )
        ends[sample.finish] += 1
    out = Table(title="green is learned from", title_justify="left")
    out.caption = ", ".join(f"{count} end by {why or 'a question'}" for why, count in ends.items())
    for column in ("domain", "conversations", "turns", "tokens", "learned from"):
        out.add_column(column, justify="left" if column == "domain" else "right")
    rows["all"] = rows.pop("all", Counter())
    for name, row in rows.items():
        out.add_row(name, *(f"{row[c]:,}" for c in ("conversations", "turns", "tokens", "learned")))
    return out
