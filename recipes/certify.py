"""draftsmith certify: decoding with a drafter writes what the target alone would write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from draftsmith.drafters import storage
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.passes import layers
from draftsmith.drafters.target.target import Target
from draftsmith.eval.certify.certify import certificate
from draftsmith.eval.certify.certify import certify as run_checks
from draftsmith.eval.certify.fixture import Fixture, untouched, untrained
from draftsmith.eval.report.provenance import provenance
from draftsmith.recipes.options import Compile, settle
from draftsmith.recipes.shared import check_file
from draftsmith.train import disk
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

commands = typer.Typer()

PROMPTS = 5


@commands.command(
    epilog="Example: draftsmith certify smollm2 runs/smol-eagle3/best --output cert.json"
)
def certify(
    target: Annotated[
        str, typer.Argument(help="Hub id, folder, GGUF file or smollm2.")
    ] = "smollm2",
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A checkpoint folder; default: untrained drafters.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 20,
    output: Annotated[Path | None, typer.Option(help="File for the certificate (JSON).")] = None,
    compiling: Compile = "auto",
) -> None:
    """Checks that decoding with a drafter writes what the target alone would write."""
    if checkpoint is not None:
        storage.read_config(checkpoint)
    check_file(output)
    loaded = Target.load(target, dtype=torch.float32)  # identity is defined in fp32
    drafters = untrained(loaded)
    if checkpoint is not None:
        drafters = {str(checkpoint): storage.load(checkpoint, loaded)}
    room = loaded.max_positions - max_new_tokens
    by_length = {len(ids): ids for ids in encode(product_prompts("heldout"), loaded)}
    prompts = [by_length[n] for n in sorted(by_length) if n <= room][:PROMPTS]
    if len(prompts) < PROMPTS:
        raise UserError(
            f"target {target}: no five prompts fit its {loaded.max_positions} positions; lower "
            "--max-new-tokens"
        )
    settle(compiling, loaded, 2 * PROMPTS * max_new_tokens)
    fixture = Fixture(loaded, untouched(loaded), drafters, prompts, max_new_tokens)
    checks = []

    def begin(name: str) -> None:
        print(f"  ..  {name}", end="", file=sys.stderr, flush=True)

    for check in run_checks(fixture, begin):
        print("\r\033[K", end="", file=sys.stderr, flush=True)
        verdict = "pass" if check.passed else "FAIL"
        print(f"{verdict}  {check.name}: {check.figure} ({check.seconds:.1f} s)", flush=True)
        checks.append(check)
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    if output is not None:
        made = certificate(checks) | {"target": loaded.identity(), "drafters": list(drafters)}
        made["compiled"] = layers.chosen()
        disk.write(output, json.dumps(made | provenance(), indent=1) + "\n")
        print(f"written: {output}")
    if failed:
        raise typer.Exit(1)
