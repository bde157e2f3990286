"""draftsmith certify: decoding with a drafter writes what the target alone would write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from draftsmith.drafters import base
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import Target
from draftsmith.eval.certify import certificate
from draftsmith.eval.certify import certify as run
from draftsmith.eval.provenance import provenance
from draftsmith.eval.subject import Subject, untouched, untrained
from draftsmith.recipes.subjects import check_file
from draftsmith.train import checkpoint as checkpoints
from draftsmith.train.prompts import product_prompts
from draftsmith.train.template import encode

PROMPTS = 5


def certify(spec: str, checkpoint: Path | None, max_new_tokens: int, output: Path | None) -> bool:
    """Runs every check, a line each, and writes the certificate; whether all of them passed.

    checkpoint None: untrained drafters. Raises UserError before the target is loaded where that
    can be told.
    """
    if checkpoint is not None:
        base.read_config(checkpoint)
    check_file(output)
    target = Target.load(spec, dtype=torch.float32)  # identity is defined in fp32
    drafters = untrained(target)
    if checkpoint is not None:
        drafters = {str(checkpoint): base.load(checkpoint, target)}
    room = target.max_positions - max_new_tokens
    by_length = {len(ids): ids for ids in encode(product_prompts("heldout"), target)}
    prompts = [by_length[n] for n in sorted(by_length) if n <= room][:PROMPTS]
    if len(prompts) < PROMPTS:
        raise UserError(
            f"target {spec}: no five prompts fit its {target.max_positions} positions; lower "
            "--max-new-tokens"
        )
    subject = Subject(target, untouched(target), drafters, prompts, max_new_tokens)
    checks = []

    def begin(name: str) -> None:
        print(f"  ..  {name}", end="", file=sys.stderr, flush=True)

    for check in run(subject, begin):
        print("\r\033[K", end="", file=sys.stderr, flush=True)
        verdict = "pass" if check.passed else "FAIL"
        print(f"{verdict}  {check.name}: {check.figure} ({check.seconds:.1f} s)", flush=True)
        checks.append(check)
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    if output is not None:
        about = {"target": target.identity(), "drafters": list(drafters), **provenance()}
        checkpoints.write(output, json.dumps(certificate(checks) | about, indent=1) + "\n")
        print(f"written: {output}")
    return not failed
