"""The servers that `make servers` sets up, serving a target with or without an export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Draft, check_family
from draftsmith.drafters.target.source import Source
from draftsmith.eval.servers.client import Kind, Running
from draftsmith.eval.servers.llama_cpp import LLAMA_CPP
from draftsmith.eval.servers.process import started
from draftsmith.eval.servers.vllm import VLLM

KINDS = {kind.name: kind for kind in (VLLM, LLAMA_CPP)}


def kind(name: str) -> Kind:
    """A kind of server by name. Raises UserError naming the known ones."""
    if name not in KINDS:
        raise UserError(f"--server: no {name!r}; give {', '.join(KINDS)} or a URL")
    return KINDS[name]


def check(name: str, family: str, k: int) -> None:
    """Raises UserError where a kind of server is not set up, or takes no such drafter or k."""
    kind(name).program()
    check_family(name, family, k)


@contextmanager
def serving(
    name: str, target: Source, draft: Draft | None, length: int, log: Path
) -> Iterator[Running]:
    """A server of the target for texts of at most `length` tokens; ended afterwards.

    log: the file that its output goes to. Raises UserError where it is not set up, or dies.
    """
    known = kind(name)
    program = known.program()
    length += 0 if draft is None else draft.k
    length += 2  # drafts past a text's end need room too
    command = partial(known.command, program, target, draft, length)
    with started(command, known.environment(program), log) as (child, url):
        yield Running(known, url, child)


def running(url: str) -> Running:
    """A server that somebody started. Raises UserError unless it is of a kind that we know."""
    problems = []
    for known in KINDS.values():
        try:
            return Running(known, url)
        except UserError as error:
            problems.append(error)
    raise problems[0]
