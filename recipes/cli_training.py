"""Commands that make drafters: quickstart, sample, self-prompt, plan, train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.drafters.errors import UserError
from draftsmith.recipes.options import AnyTarget, Seed, Temperature, TopK, TopP

commands = typer.Typer()


@commands.command(
    epilog="Example: draftsmith quickstart runs/demo; run again, it goes on, or decodes again"
)
def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")] = Path(
        "runs/quickstart"
    ),
) -> None:
    """The whole job small: samples, two drafters, decoding, one page; 15 minutes on 2 cores."""
    from draftsmith.recipes.quickstart import quickstart as run

    raise typer.Exit(run(folder))


@commands.command(
    epilog="Example: draftsmith sample samples/smol --prompts chats.jsonl --max-new-tokens 256; "
    "look at it: draftsmith sample samples/smol --show; by several GPUs: accelerate launch "
    "--no_python draftsmith sample samples/smol"
)
def sample(
    folder: Annotated[
        Path, typer.Argument(help="Samples folder to make or go on with; --show: or a file.")
    ],
    target: AnyTarget = "smollm2",
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread the target over all GPUs.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="A file, a folder, a data set on the hub, or a mix (YAML) of them."),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column that asks; default: found, and told.")
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the chat template, e.g. enable_thinking=false."),
    ] = None,
    continue_: Annotated[
        int | None,
        typer.Option("--continue", min=1, help="Let texts be continued after so many tokens."),
    ] = None,
    given: Annotated[
        bool, typer.Option("--given", help="Keep the answers that stand there (foreign text).")
    ] = False,
    answers: Annotated[
        Path | None, typer.Option("--import", help="JSONL of prompt_ids and response_ids.")
    ] = None,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Take answers that are not the target's own.")
    ] = False,
    server: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server that answers.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --server: its name there.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="With --server: requests at a time; default: 8.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print conversations, coloured by what is learned.")
    ] = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each turn.")] = 192,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: Seed = 0,
) -> None:
    """Lets the target answer prompts, turn by turn; or imports answers; or shows samples."""
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.recipes.sample import Request
    from draftsmith.recipes.sample import sample as run
    from draftsmith.recipes.show import show as display

    request = Request(
        folder, target, device_map, prompts, column, template or [], continue_, given, answers,
        foreign, server, model, concurrency, Sampler(temperature, top_k, top_p), max_new_tokens,
        batch_size, seed,
    )  # fmt: skip
    (display if show else run)(request)


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
    template: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the chat template.")
    ] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each question.")] = 128,
    languages: Annotated[str, typer.Option(help="Keep these only, e.g. en,de; empty: all.")] = "",
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: Seed = 0,
) -> None:
    """Lets the target write its own prompts, from its chat template's user turn."""
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.drafters.target import Target
    from draftsmith.recipes.sample import settings
    from draftsmith.train.language import check_languages
    from draftsmith.train.selfprompt import write_prompts

    sampler, given = Sampler(temperature, top_k, top_p), settings(template or [])
    kept = [code.strip() for code in languages.split(",") if code.strip()]
    check_languages(kept)
    if file.exists():
        raise UserError(f"{file}: exists already; name another file, or remove it")
    written = write_prompts(
        file, Target.load(target), count, sampler, max_new_tokens=max_new_tokens, system=system,
        template=given, seed=seed, batch_size=batch_size, languages=kept,
    )  # fmt: skip
    print(f"{file}: {written}")


@commands.command(epilog="Example: draftsmith plan smol-eagle3 steps=2000 rows=4")
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a shipped recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ..")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes of the launch; each adds its rows to a step.")
    ] = 1,
) -> None:
    """What a recipe will take: parameters, memory, disk, tokens, time; from configs alone."""
    from draftsmith.train.plan import plan as make
    from draftsmith.train.plan import table
    from draftsmith.train.recipe import load

    made = make(load(recipe, overrides or []), processes=processes)
    each = f", each of {processes} processes" if processes > 1 else ""
    shown = Table(title=f"{recipe} on {made.device}{each}", title_justify="left")
    for name in ("", "part", "figure"):
        shown.add_column(name, justify="right" if name == "figure" else "left")
    for row in table(made):
        shown.add_row(*row)
    Console().print(shown)


@commands.command(
    epilog="Example: draftsmith train smol-eagle3 samples=samples/smol steps=500; with several "
    "processes: accelerate launch -m draftsmith.train smol-eagle3 samples=samples/smol"
)
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a shipped recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ..")] = None,
) -> None:
    """Trains a drafter; a run that was stopped goes on where its last checkpoint is."""
    from draftsmith.train.__main__ import run

    raise typer.Exit(run(recipe, overrides or []))
