"""Commands whose work takes several functions: what each may be asked, which those are handed.

A command is a frozen dataclass of its options. typer makes one of the command line, and it is then
called; a program makes its own. What does the work is imported then, so that --help is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.recipes.options import OwnTarget, Prompts, Seed

commands = typer.Typer()


@commands.command(
    "report", epilog="Example: draftsmith report runs/smol-eagle3 --limit 32 --max-new-tokens 128"
)
@dataclass(frozen=True)
class Report:
    """Replays every checkpoint of a run, decodes the best one, writes RUN/report."""

    run: Annotated[Path, typer.Argument(help="A run's folder, as `draftsmith train` made it.")]
    target: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 16
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128
    k: Annotated[int | None, typer.Option(min=1, help="Longest draft; default: the run's.")] = None
    seed: Seed = 0

    def __call__(self) -> None:
        from draftsmith.recipes.report import run

        run(self)


@commands.command(
    "compare", epilog="Example: draftsmith compare runs/smol-eagle3 runs/smol-small ngram"
)
@dataclass(frozen=True)
class Compare:
    """Drafters of one target side by side: acceptance, cost, speed, and what each one lacks."""

    drafters: Annotated[list[str], typer.Argument(help="Runs' folders, checkpoints, or ngram.")]
    target: Annotated[str | None, typer.Option(help="Default: the drafters' own.")] = None
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 8
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96
    k: Annotated[int, typer.Option(min=1, help="Longest draft.")] = 4
    output: Annotated[Path, typer.Option(help="Folder for the comparison.")] = Path("compare")
    seed: Seed = 0

    def __call__(self) -> None:
        from draftsmith.recipes.compare import run

        run(self)


@commands.command(
    "bench",
    epilog="Example: draftsmith bench smollm2 ngram runs/smol-small/best --k 2,4; "
    "without weights: draftsmith bench --shape llama-8b --alpha 0.7 --batch 1,4,16",
)
@dataclass(frozen=True)
class Bench:
    """Times speculation against the loop without it; goes on where it was stopped."""

    target: Annotated[str, typer.Argument(help="Hub id, folder, GGUF file or smollm2.")] = "smollm2"
    drafters: Annotated[
        list[str] | None, typer.Argument(help="Checkpoint folders, or ngram (the default).")
    ] = None
    k: Annotated[str, typer.Option(help="Draft lengths of chains; empty for none.")] = "2,4"
    tree: Annotated[str, typer.Option(help="Node budgets of trees, as deep as the longest k.")] = ""
    batch: Annotated[str, typer.Option(help="Rows decoded at once.")] = "1"
    temperature: Annotated[str, typer.Option(help="0 is greedy.")] = "0"
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 16
    shape: Annotated[
        str | None, typer.Option(help="SYNTHETIC: a random target of this shape, e.g. llama-8b.")
    ] = None
    alpha: Annotated[float, typer.Option(help="With --shape: the chance of acceptance.")] = 0.7
    output: Annotated[Path, typer.Option(help="Folder for bench.json and .md.")] = Path("bench")
    seed: Seed = 0

    def __call__(self) -> None:
        from draftsmith.recipes.bench import run

        run(self)


@commands.command(
    "export",
    epilog="Example: draftsmith export runs/smol-eagle3/best --to vllm --output exports/smol-vllm; "
    "for llama.cpp: draftsmith export runs/smol-eagle3/best --to llama.cpp",
)
@dataclass(frozen=True)
class Export:
    """Writes a drafter as a server loads it, reads it back, and says how to serve it."""

    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")]
    to: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm, llama.cpp or transformers.")]
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; default: exports/RUN-SERVER.")
    ] = None
    target: OwnTarget = None
    k: Annotated[int | None, typer.Option(min=1, help="Draft length; default: the run's.")] = None
    length: Annotated[
        int | None, typer.Option(help="Longest text to serve; default: the target's positions.")
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    target_gguf: Annotated[
        Path | None, typer.Option(help="llama.cpp: the target's GGUF, whose tokenizer is copied.")
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain", help="vllm: EAGLE-3 in its original layout.")
    ] = False

    def __call__(self) -> None:
        from draftsmith.recipes.export import run

        run(self)


@commands.command(
    "serve-check",
    epilog="Example: draftsmith serve-check exports/eagle3-vllm --server vllm; a running one: "
    "--server http://127.0.0.1:8000",
)
@dataclass(frozen=True)
class ServeCheck:
    """Serves an export for real: the server's own counters beside replay of what it wrote.

    A running server may serve nobody else meanwhile, and its counts are exact when it runs with

    \b
    vllm: --dtype float32 --max-num-seqs 1 --enforce-eager
      --no-enable-prefix-caching --generation-config vllm
    llama.cpp: -np 1 -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32
      --spec-draft-p-min 0
    """

    export: Annotated[Path, typer.Argument(help="A folder that `draftsmith export` wrote.")]
    server: Annotated[str, typer.Option(help="vllm, llama.cpp, or a running server's URL.")]
    target: OwnTarget = None
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: the one that the export's card names.")
    ] = None
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 8
    k: Annotated[int | None, typer.Option(min=1, help="Default: the export's own.")] = None
    drafts: Annotated[
        str | None,
        typer.Option(
            help="greedy (counts compared as integers) or sampled (by z at T=1; vllm); default: "
            "as the export's command has it."
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48
    output: Annotated[Path | None, typer.Option(help="File for the report (JSON).")] = None
    seed: Seed = 0

    def __call__(self) -> None:
        from draftsmith.recipes.serve_check import run

        run(self)
