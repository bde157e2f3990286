"""Commands that take drafters to servers: export, serve-check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.recipes.options import OwnTarget, Prompts, Seed

commands = typer.Typer()


@commands.command(
    epilog="Example: draftsmith export runs/smol-eagle3/best --to vllm --output exports/smol-vllm; "
    "for llama.cpp: draftsmith export runs/smol-eagle3/best --to llama.cpp"
)
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm, llama.cpp or transformers.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; default: exports/RUN-SERVER.")
    ] = None,
    target: OwnTarget = None,
    k: Annotated[int | None, typer.Option(min=1, help="Draft length; default: the run's.")] = None,
    length: Annotated[
        int | None, typer.Option(help="Longest text to serve; default: the target's positions.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    target_gguf: Annotated[
        Path | None, typer.Option(help="llama.cpp: the target's GGUF, whose tokenizer is copied.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="vllm: EAGLE-3 in its original layout.")
    ] = False,
) -> None:
    """Writes a drafter as a server loads it, reads it back, and says how to serve it."""
    from draftsmith.recipes.export import Request, export_checkpoint

    asked = Request(checkpoint, to, output, target, k, length, dtype, target_gguf, plain)
    folder, command = export_checkpoint(asked)
    print(
        f"written and read back: {folder} (card: README.md, card.json)\nserve it with:\n{command}"
    )


@commands.command(
    "serve-check",
    epilog="Example: draftsmith serve-check exports/eagle3-vllm --server vllm; a running one: "
    "--server http://127.0.0.1:8000",
)
def serve_check(
    export: Annotated[Path, typer.Argument(help="A folder that `draftsmith export` wrote.")],
    server: Annotated[str, typer.Option(help="vllm, llama.cpp, or a running server's URL.")],
    target: OwnTarget = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: the one that the export's card names.")
    ] = None,
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 8,
    k: Annotated[int | None, typer.Option(min=1, help="Default: the export's own.")] = None,
    drafts: Annotated[
        str | None,
        typer.Option(
            help="greedy (counts compared as integers) or sampled (by z at T=1; vllm); default: "
            "as the export's command has it."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48,
    output: Annotated[Path | None, typer.Option(help="File for the report (JSON).")] = None,
    seed: Seed = 0,
) -> None:
    """Serves an export for real: the server's own counters beside replay of what it wrote.

    A running server may serve nobody else meanwhile, and its counts are exact when it runs with

    \b
    vllm: --dtype float32 --max-num-seqs 1 --enforce-eager
      --no-enable-prefix-caching --generation-config vllm
    llama.cpp: -np 1 -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32
      --spec-draft-p-min 0
    """
    from draftsmith.recipes.serve_check import Settings
    from draftsmith.recipes.serve_check import serve_check as run

    settings = Settings(
        export, server, target, checkpoint, prompts, limit, k, drafts, max_new_tokens, seed
    )  # fmt: skip
    if not run(settings, output):
        raise typer.Exit(1)
