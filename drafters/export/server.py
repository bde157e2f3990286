"""A server as exports see it: a name, a version, a method for each drafter family it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.sampling import Sampler

D = TypeVar("D", bound=Drafter)


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


@dataclass(frozen=True)
class Draft:
    """An exported drafter: its folder, its family, the draft length, and how drafts are made at
    temperatures above 0, "greedy" or "sampled" (see `Server.drafting`)."""

    folder: Path
    family: str
    k: int
    drafts: str = "greedy"


@dataclass(frozen=True)
class Method(Generic[D]):
    """How a server drafts by one family; its commands call that a method, type or algorithm.

    name: in the server's own words. check(drafter, serving) raises UserError for what the
    server would ignore or misread; write(drafter, folder, serving) writes the files into an empty
    folder. draws(drafter): whether the server can draw this drafter's drafts from q.
    arguments(drafter): what its command needs beside its folder and k.
    """

    name: str
    check: Callable[[D, Serving], None]
    write: Callable[[D, Path, Serving], None]
    draws: Callable[[D], bool] = lambda drafter: False
    arguments: Callable[[D], str] = lambda drafter: ""


@dataclass(frozen=True)
class Server:
    """One server.

    name: the one that users, cards, folders and errors have. version: what its form was checked
    against. methods: by drafter family. start(drafter, draft, serving): the command that serves an
    export. run: whether that version was really run, else its source was read. limit: the longest
    draft it takes, None where it sets none. cuts: whether q, where drafts are drawn from it, has
    the request's top-k and top-p as p has.
    """

    name: str
    version: str
    methods: dict[str, Method[Any]]
    start: Callable[[Any, Draft, Serving], str]
    run: bool
    limit: int | None = None
    cuts: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def draws(self, drafter: Drafter) -> bool:
        """Whether it can draw this drafter's drafts from q."""
        method = self.methods.get(drafter.family)
        return method is not None and method.draws(drafter)

    def drafting(self, drafter: Drafter, serving: Serving) -> str:
        """How drafts are made at temperatures above 0 by the command of the export.

        "sampled": drawn from q and accepted with chance min(1, p/q), so that acceptance is the
        overlap sum min(p, q) that a drafter is trained for. "greedy", every server's default: the
        argmax of q, a point mass, accepted with chance p(argmax q). At temperature 0 there is no
        difference.
        """
        hot = serving.sampler is not None and not serving.sampler.greedy
        return "sampled" if hot and self.draws(drafter) else "greedy"

    def command(self, drafter: Drafter, folder: Path, serving: Serving) -> str:
        """The command that serves an export in `folder`."""
        drafts = self.drafting(drafter, serving)
        return self.start(drafter, Draft(folder, drafter.family, serving.k, drafts), serving)
