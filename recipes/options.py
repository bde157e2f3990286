"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from draftsmith.drafters.errors import UserError

Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 switches top-k off.")]
TopP = Annotated[float, typer.Option(help="1 switches top-p off.")]
SUITE = (
    "A file (JSONL, JSON, CSV, TSV, text, Parquet), a folder of them, a data set on the hub, or a "
    "mix (YAML); default: our own."
)
Prompts = Annotated[str | None, typer.Option(help=SUITE)]
AnyTarget = Annotated[str, typer.Option(help="Hub id, folder, GGUF file or smollm2.")]
OwnTarget = Annotated[str | None, typer.Option(help="Default: the one the drafter was made for.")]
Seed = Annotated[int, typer.Option(help="Keys every draw.")]


def numbers(option: str, text: str, kind: type) -> list[Any]:
    """The numbers of "1,4,16", each once."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise UserError(f"{option}: {text!r} is no list of numbers; write e.g. 1,4") from None
