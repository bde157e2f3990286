"""draftsmith self-prompt: prompts that the target writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.recipes.options import (
    AnyTarget,
    Seed,
    Temperature,
    Template,
    TopK,
    TopP,
    key_values,
)
from draftsmith.train.samples.self_prompt import check, write_prompts

commands = typer.Typer()


@commands.command(
    "self-prompt",
    epilog="Example: draftsmith self-prompt own.jsonl --count 2000; then: draftsmith sample "
    "samples/own --prompts own.jsonl",
)
def self_prompt(
    file: Annotated[Path, typer.Argument(help="JSONL file of prompts to make.")],
    target: AnyTarget = "smollm2",
    count: Annotated[int, typer.Option(min=1, help="Questions written; fewer are kept.")] = 1000,
    system: Annotated[str | None, typer.Option(help="A system prompt that sets the topic.")] = None,
    template: Template = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each question.")] = 128,
    languages: Annotated[str, typer.Option(help="Keep these only, e.g. en,de; empty: all.")] = "",
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: Seed = 0,
) -> None:
    """Lets the target write its own prompts, from its chat template's user turn."""
    sampler, settings = Sampler(temperature, top_k, top_p), key_values(template or [])
    kept = [code.strip() for code in languages.split(",") if code.strip()]
    check(kept)
    if file.exists():
        raise UserError(f"{file}: exists already; name another file, or remove it")
    written = write_prompts(
        file, Target.load(target), count, sampler, max_new_tokens=max_new_tokens, system=system,
        template=settings, seed=seed, batch_size=batch_size, languages=kept,
    )  # fmt: skip
    print(f"{file}: {written}")
