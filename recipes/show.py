"""`draftsmith sample PATH --show`: conversations as they are learned from, and counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.source import resolve
from draftsmith.recipes.sample import Request
from draftsmith.train import storage
from draftsmith.train.reader import Sample, Samples

CONVERSATIONS = 4  # printed, spread over the whole
LEARNED, READ, END = "bold green", "dim", "bold magenta"


def show(request: Request) -> None:
    """Prints a samples folder, or what a file of prompts would become. Raises UserError.

    Of a file: what each prompt is asked as; with given=True what would be learned from its answers.
    """
    of_samples = (request.folder / storage.MANIFEST).is_file()
    _refuse_unread(request, of_samples)
    console = Console()
    samples: Samples | list[Sample]
    if of_samples:
        samples, spec = stored(request.folder)
        tokenizer = _tokenizer(spec)
    else:
        samples, tokenizer = _asked(request, console)
    step = max(1, len(samples) // CONVERSATIONS)
    for i in range(0, min(len(samples), step * CONVERSATIONS), step):
        console.rule(f"{i}: {samples[i].domain}, {samples[i].finish or 'asked'}", align="left")
        console.print(coloured(samples[i], tokenizer))
    console.print(counts(samples))


def _refuse_unread(request: Request, samples: bool) -> None:
    """Raises UserError for options that would change nothing of what is shown."""
    unread: dict[str, Any] = {
        "--prompts": request.prompts, "--import": request.answers, "--foreign": request.foreign,
        "--server": request.server, "--model": request.model, "--concurrency": request.concurrency,
        "--device-map": request.device_map,
    }  # fmt: skip
    if samples:  # are shown as they are stored
        unread |= {
            "--column": request.column, "--template": request.template, "--given": request.given,
            "--continue": request.continue_,
        }  # fmt: skip
    for option, value in unread.items():
        if value:
            raise UserError(f"--show: takes the folder or file itself; leave {option} out")


def stored(folder: Path) -> tuple[Samples, str]:
    """A finished samples folder, without its target, and the target's name."""
    manifest = storage.read_manifest(folder)
    if manifest["state"] != "complete":
        raise UserError(f"samples {folder}: are still being written; run it again to finish it")
    rows = storage.load(folder / storage.ROWS)
    return Samples(folder, manifest, rows), manifest["target"]["spec"]


def _tokenizer(spec: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(spec, weights=False).path)


def _asked(request: Request, console: Console) -> tuple[list[Sample], Any]:
    """A file's conversations, as samples that nobody has answered yet."""
    from dataclasses import replace

    from draftsmith.drafters.target import Target
    from draftsmith.train.given import given_rows
    from draftsmith.train.samples import encode_fitting

    asked = replace(request, prompts=str(request.folder))
    asked.check()
    prompts = asked.read(console.print)
    target = Target.load(request.target)
    if request.given:
        rows = given_rows(prompts, target, console.print)
        found = [Sample(*(row[name] for name in storage.COLUMNS)) for row in rows]
    else:
        found = [
            Sample(ids, [False] * len(ids), "", p.domain, p.key)
            for p, ids in zip(
                prompts, encode_fitting(prompts, target, request.max_new_tokens), strict=True
            )
            if ids
        ]
    return found, target.tokenizer


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
