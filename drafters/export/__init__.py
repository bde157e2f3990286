"""Drafters in the forms that servers load: one module per server, and what they share.

A server's module has

    NAME, VERSION               of the server that its form was checked against
    RUN                         whether that version was really run; else its source was read
    LIMIT                       the longest draft it takes, None where it sets none
    FAMILIES                    the drafter families it can load
    draws(drafter)              whether it can draw this drafter's drafts from q (see `drafting`)
    check(drafter, serving)     raises UserError for what it would ignore or misread
    write(drafter, folder, serving)
    command(drafter, folder, serving) -> str     how to serve the folder

Inside draftsmith there is one truth: layer ids (0 is the embedding's output), absolute draft ids,
norm flags, positions. Writers translate it, never copy. Flags that servers default differently are
always written. Readers are in `drafters/foreign` and share no code with the writers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler

SERVERS = ("vllm", "sglang", "tensorrt-llm", "gguf", "transformers")

# What is written for no server, and what to do instead.
_NOWHERE = {
    "hydra": "no server has heads that read drafted tokens: train medusa or eagle",
    "mtp": "servers read MTP modules from the target's own checkpoint alone: train eagle",
}


@dataclass(frozen=True)
class Serving:
    """How an export is to be served.

    target: what the server is given as target model. k: draft length. length: the longest text.
    dtype: of the weights. target_gguf: the target as llama.cpp gets it. plain: for vLLM, EAGLE-3 in
    its original layout instead of that of the speculators library. sampler: what the drafter was
    trained for, None where that is not known.
    """

    target: str
    k: int
    length: int
    dtype: torch.dtype = torch.float32
    target_gguf: Path | None = None
    plain: bool = False
    sampler: Sampler | None = None


def server(name: str) -> Any:
    """A server's module. Raises UserError naming the known ones."""
    if name not in SERVERS:
        raise UserError(f"--to: no server {name!r}; known are {', '.join(SERVERS)}")
    return importlib.import_module(f"draftsmith.drafters.export.{name.replace('-', '_')}")


def drafting(name: str, drafter: Drafter, serving: Serving) -> str:
    """How drafts are made at temperatures above 0 by the command that `command` gives.

    "sampled": drawn from q and accepted with chance min(1, p/q), so that acceptance is the overlap
    sum min(p, q) that a drafter is trained for. "greedy", every server's default: the argmax of q,
    a point mass, accepted with chance p(argmax q). At temperature 0 there is no difference.
    """
    hot = serving.sampler is not None and not serving.sampler.greedy
    return "sampled" if hot and server(name).draws(drafter) else "greedy"


def check_family(name: str, family: str, k: int) -> None:
    """Raises UserError where a server cannot load a family, or drafts of k tokens."""
    chosen = server(name)
    if family not in chosen.FAMILIES:
        others = [other for other in SERVERS if family in server(other).FAMILIES]
        remedy = f"export it --to {' or '.join(others)}" if others else _NOWHERE.get(family, "")
        raise UserError(
            f"--to: {chosen.NAME} {chosen.VERSION} loads no {family} drafter; "
            f"{remedy or 'decode it with draftsmith'}"
        )
    if chosen.LIMIT is not None and k > chosen.LIMIT:
        raise UserError(f"--k: {chosen.NAME} {chosen.VERSION} drafts at most {chosen.LIMIT} tokens")


def write(name: str, drafter: Drafter, folder: Path, serving: Serving) -> None:
    """Writes a drafter for a server into an existing, empty folder.

    Raises UserError, before anything is written, for what the server would ignore or misread.
    """
    check(name, drafter, serving)
    server(name).write(drafter, folder, serving)


def check(name: str, drafter: Drafter, serving: Serving) -> None:
    """Raises UserError where a server would refuse, ignore or misread this drafter."""
    check_family(name, drafter.family, serving.k)
    if drafter.longest is not None and serving.k > drafter.longest:
        raise UserError(f"--k: {serving.k} is more than this drafter's {drafter.longest} depths")
    if serving.k < 1:
        raise UserError(f"--k: {serving.k} drafts nothing; use >= 1")
    if not 1 <= serving.length <= drafter.target.max_positions:
        raise UserError(
            f"--length: {serving.length} is not in 1..{drafter.target.max_positions}, the "
            "target's positions"
        )
    server(name).check(drafter, serving)
