"""Drafters in the forms that servers load: one module per server, and what they share.

A server's module declares `SERVER`: its name and version, a method for each family that it takes
(server.py), and the command that serves an export. SERVERS, below, lists them. Inside draftsmith
there is one truth: layer ids (0 is the embedding's output), absolute draft ids, norm flags,
positions. Writers translate it, never copy. Flags that servers default differently are always
written. Readers are in `drafters/foreign` and share no code with the writers.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import llama_cpp, sglang, tensorrt_llm, transformers, vllm
from draftsmith.drafters.export.server import Draft, Server, Serving

__all__ = ["SERVERS", "Draft", "Server", "Serving", "check", "check_family", "server", "write"]

SERVERS = {
    one.name: one
    for one in (
        vllm.SERVER, sglang.SERVER, tensorrt_llm.SERVER, llama_cpp.SERVER, transformers.SERVER
    )
}  # fmt: skip

# What is written for no server, and what to do instead.
_NOWHERE = {
    "hydra": "no server has heads that read drafted tokens: train medusa or eagle",
    "mtp": "servers read MTP modules from the target's own checkpoint alone: train eagle",
}


# Servers load these, but no writer makes their files yet.
_UNWRITTEN = {server: ("dflash", "dspark") for server in ("sglang", "llama.cpp", "tensorrt-llm")}


def server(name: str) -> Server:
    """A server by name. Raises UserError naming the known ones."""
    if name not in SERVERS:
        raise UserError(f"--to: no server {name!r}; known are {', '.join(SERVERS)}")
    return SERVERS[name]


def check_family(name: str, family: str, k: int) -> None:
    """Raises UserError where a server cannot load a family, or drafts of k tokens."""
    chosen = server(name)
    if family not in chosen.methods:
        others = [other.name for other in SERVERS.values() if family in other.methods]
        remedy = f"export it --to {' or '.join(others)}" if others else _NOWHERE.get(family, "")
        lacks = f"{chosen} loads no {family} drafter"
        if family in _UNWRITTEN.get(name, ()):
            lacks = f"no {family} drafter is written for {chosen} yet"
        raise UserError(f"--to: {lacks}; {remedy or 'decode it with draftsmith'}")
    if chosen.limit is not None and k > chosen.limit:
        raise UserError(f"--k: {chosen} drafts at most {chosen.limit} tokens")


def write(name: str, drafter: Drafter, folder: Path, serving: Serving) -> None:
    """Writes a drafter for a server into an existing, empty folder.

    Raises UserError, before anything is written, for what the server would ignore or misread.
    """
    check(name, drafter, serving)
    server(name).methods[drafter.family].write(drafter, folder, serving)


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
    server(name).methods[drafter.family].check(drafter, serving)
