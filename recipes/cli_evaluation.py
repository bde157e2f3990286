"""Commands that measure drafters: eval, report, compare, certify, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.recipes.options import (
    OwnTarget,
    Prompts,
    Seed,
    Temperature,
    TopK,
    TopP,
    judge,
    numbers,
)

commands = typer.Typer()


@commands.command(
    "eval", epilog="Example: draftsmith eval runs/smol-eagle3/best --k 4 --output reports/eagle3"
)
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder, an exported or published drafter, or ngram.")
    ],
    target: OwnTarget = None,
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 16,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    k: Annotated[int, typer.Option(help="Draft length; of a tree its depth.")] = 4,
    tree: Annotated[
        int | None, typer.Option(help="Draft a dynamic tree of at most this many tokens.")
    ] = None,
    branch: Annotated[int, typer.Option(help="With --tree: nodes expanded at each depth.")] = 10,
    static: Annotated[
        bool,
        typer.Option("--static", help="With --tree: one shape, the best on the run's held-out."),
    ] = False,
    block: Annotated[
        bool, typer.Option("--block", help="Judge sampled chains by block verification.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a text.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json.")] = None,
    seed: Seed = 0,
) -> None:
    """Decodes prompts with a drafter: acceptance by replay and decode, parity, speed."""
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.recipes.evaluate import Settings, policy
    from draftsmith.recipes.evaluate import evaluate as run

    sampler = Sampler(temperature, top_k, top_p)
    drafting = policy(k, tree, branch, block, static)
    settings = Settings(
        checkpoint, target, prompts, limit, sampler, drafting, max_new_tokens, stop or [], seed,
        static,
    )  # fmt: skip
    judge(run(settings, output))


@commands.command(
    epilog="Example: draftsmith report runs/smol-eagle3 --limit 32 --max-new-tokens 128"
)
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, as `draftsmith train` made it.")],
    target: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None,
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32,
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    k: Annotated[int | None, typer.Option(min=1, help="Longest draft; default: the run's.")] = None,
    seed: Seed = 0,
) -> None:
    """Replays every checkpoint of a run, decodes the best one, writes RUN/report."""
    from draftsmith.recipes.report import Settings
    from draftsmith.recipes.report import report as make

    found = make(run, Settings(target, prompts, limit, decode_limit, max_new_tokens, k, seed))
    for name, speed in found["speed"].items():
        print(f"{name}: {speed['verdict']}")
    print(f"written: {run / 'report'}/report.html, report.md, report.json")
    judge(all(decoded["parity"]["holds"] for decoded in found["decode"].values()))


@commands.command(epilog="Example: draftsmith compare runs/smol-eagle3 runs/smol-small ngram")
def compare(
    drafters: Annotated[list[str], typer.Argument(help="Runs' folders, checkpoints, or ngram.")],
    target: Annotated[str | None, typer.Option(help="Default: the drafters' own.")] = None,
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32,
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    k: Annotated[int, typer.Option(min=1, help="Longest draft.")] = 4,
    output: Annotated[Path, typer.Option(help="Folder for the comparison.")] = Path("compare"),
    seed: Seed = 0,
) -> None:
    """Drafters of one target side by side: acceptance, cost, speed, and what each one lacks."""
    from draftsmith.recipes.compare import Settings
    from draftsmith.recipes.compare import compare as run
    from draftsmith.recipes.compare_page import broken, show

    settings = Settings(target, prompts, limit, decode_limit, max_new_tokens, k, seed)
    found = run(drafters, settings, output)
    show(found)
    print(f"written: {output}/compare.html, compare.md, compare.json")
    judge(not broken(found))


@commands.command(
    epilog="Example: draftsmith bench smollm2 ngram runs/smol-small/best --k 2,4; "
    "without weights: draftsmith bench --shape llama-8b --alpha 0.7 --batch 1,4,16"
)
def bench(
    target: Annotated[
        str, typer.Argument(help="Hub id, folder, GGUF file or smollm2.")
    ] = "smollm2",
    drafters: Annotated[
        list[str] | None, typer.Argument(help="Checkpoint folders, or ngram (the default).")
    ] = None,
    k: Annotated[str, typer.Option(help="Draft lengths of chains; empty for none.")] = "2,4",
    tree: Annotated[
        str, typer.Option(help="Node budgets of trees, as deep as the longest k.")
    ] = "",
    batch: Annotated[str, typer.Option(help="Rows decoded at once.")] = "1",
    temperature: Annotated[str, typer.Option(help="0 is greedy.")] = "0",
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 16,
    shape: Annotated[
        str | None, typer.Option(help="SYNTHETIC: a random target of this shape, e.g. llama-8b.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="With --shape: the chance of acceptance.")] = 0.7,
    output: Annotated[Path, typer.Option(help="Folder for bench.json and .md.")] = Path("bench"),
    seed: Seed = 0,
) -> None:
    """Times speculation against the loop without it; goes on where it was stopped."""
    from draftsmith.recipes.bench import Request
    from draftsmith.recipes.bench import bench as run

    request = Request(
        target, drafters or [], numbers("--k", k, int), numbers("--tree", tree, int),
        numbers("--batch", batch, int), numbers("--temperature", temperature, float),
        max_new_tokens, prompts, limit, shape, alpha, output, seed,
    )  # fmt: skip
    run(request)
