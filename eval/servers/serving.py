"""The servers that `make servers` sets up, serving a target with or without an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import check_family, server
from draftsmith.drafters.source import Source
from draftsmith.eval.servers import llama_cpp, tools, vllm
from draftsmith.eval.servers.client import Kind, Server
from draftsmith.eval.servers.process import started

KINDS = {"vllm": vllm.VLLM, "llama.cpp": llama_cpp.LLAMA_CPP}
FORMS = {"vllm": "vllm", "llama.cpp": "gguf"}  # what `draftsmith export --to` calls its form


@dataclass(frozen=True)
class Draft:
    """An exported drafter: its folder, its family, the draft length and how drafts are made (as
    `drafters.export.drafting` names it)."""

    folder: Path
    family: str
    k: int
    drafts: str = "greedy"


def kind(name: str) -> Kind:
    """A kind of server by name. Raises UserError naming the known ones."""
    if name not in KINDS:
        raise UserError(f"--server: no {name!r}; give {', '.join(KINDS)} or a URL")
    return KINDS[name]


def check(name: str, family: str, k: int) -> None:
    """Raises UserError where a kind of server is not set up, or takes no such drafter or k."""
    kind(name)
    tools.vllm_python() if name == "vllm" else tools.llama_server()
    check_family(FORMS[name], family, k)


@contextmanager
def serving(
    name: str, target: Source, draft: Draft | None, length: int, log: Path
) -> Iterator[Server]:
    """A server of the target for texts of at most `length` tokens; ended afterwards.

    log: the file that its output goes to. Raises UserError where it is not set up, or dies.
    """
    k = 0 if draft is None else draft.k
    length += k + 2  # drafts past a text's end need room too
    form = server(FORMS[name])
    command: Callable[[int], list[str]]
    if name == "vllm":
        how = form.speculation(draft.family, draft.folder, k, draft.drafts) if draft else None
        command = partial(vllm.command, tools.vllm_python(), target.path, how, length)
        environment = vllm.ENVIRONMENT
    else:
        file = draft_gguf(draft.folder) if draft else None
        method = form.METHODS[draft.family] if draft else ""
        program, gguf = tools.llama_server(), tools.target_gguf(target)
        command = partial(llama_cpp.command, program, gguf, file, method, k, length)
        environment = {"LD_LIBRARY_PATH": str(program.parent)}
    with started(command, environment, log) as (child, url):
        yield Server(kind(name), url, child)


def draft_gguf(folder: Path) -> Path:
    """The one GGUF of an export. Raises UserError where there is none, or are several."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"{folder}: holds {len(files)} .gguf files; export --to gguf makes one")
    return files[0]


def running(url: str) -> Server:
    """A server that somebody started. Raises UserError unless it is of a kind that we know."""
    problems = []
    for known in KINDS.values():
        try:
            return Server(known, url)
        except UserError as error:
            problems.append(error)
    raise problems[0]
