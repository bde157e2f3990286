"""Speaking to a server over HTTP: token ids in, token ids and counters out.

Counters run over a server's whole life: an answer's are the difference of two readings.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export.server import Draft, Server
from draftsmith.drafters.target.source import Source
from draftsmith.eval.servers import http
from draftsmith.eval.servers.process import Child

T = TypeVar("T")
ANSWER = 600.0  # seconds that one answer may take
SETTLE = 20.0  # seconds until the counters must show an answer that we hold
DRAFTS = "spec_decode_num_drafts_total"
DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Kind:
    """How one kind of server is started and asked: vllm.py and llama_cpp.py hold ours.

    program(): what is started, UserError where it is not set up. command(program, target, draft or
    None, length of prompt and answer, port); environment(program) is added to ours. patched():
    whether the one set up here has the fix of tests/support/servers.sh, None where there is none.
    prefix, tokens: see `parse_counters`. version(json of version_path): its version, None where the
    reply is another server's. limit: its word for the answer's length; body: its own fields of a
    request to `path`; ids(reply): the answer's token ids. shortens: it drafts less where fewer
    tokens are left, instead of dropping what exceeds the limit. exact: the flags without which its
    counts differ from replay's by rounding or other requests.
    """

    server: Server
    program: Callable[[], Path]
    command: Callable[[Path, Source, Draft | None, int, int], list[str]]
    environment: Callable[[Path], dict[str, str]]
    version_path: str
    version: Callable[[dict[str, Any]], str | None]
    prefix: str
    tokens: str
    path: str
    limit: str
    body: dict[str, Any]
    ids: Callable[[dict[str, Any]], list[int] | None]
    shortens: bool
    exact: str
    patched: Callable[[], bool | None] = lambda: None

    @property
    def name(self) -> str:
        return self.server.name


@dataclass(frozen=True)
class Counters:
    """What a server counted of its speculation between two readings.

    drafts: rounds that drafted. drafted: tokens in them. accepted: how often at each position.
    tokens: all that were generated. Of a server that does not speculate the first three are 0.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()
    tokens: int = 0

    def __sub__(self, before: Counters) -> Counters:
        """What was counted since `before`, position by position."""
        width = max(len(self.accepted), len(before.accepted))
        ours, theirs = (c.accepted + (0,) * (width - len(c.accepted)) for c in (self, before))
        return Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            tuple(a - b for a, b in zip(ours, theirs, strict=True)),
            self.tokens - before.tokens,
        )

    def __add__(self, other: Counters) -> Counters:
        return self - (Counters() - other)


@dataclass
class Answer:
    """What a server wrote after a prompt, how long that took, and what it counted meanwhile."""

    prompt: list[int]
    tokens: list[int]
    seconds: float
    counted: Counters


class Running:
    """A server that answers at `url`. child: its process, where we started it."""

    def __init__(self, kind: Kind, url: str, child: Child | None = None) -> None:
        """Raises UserError where nothing answers, or another kind of server does."""
        self.kind, self.url, self.child = kind, url.rstrip("/"), child
        version = kind.version(self._answered(http.fetch, kind.version_path))
        if version is None:
            raise UserError(f"server {url}: answers, but is no {kind.name}; give --server its kind")
        self.version = version

    def __str__(self) -> str:
        return f"{self.kind.name} {self.version} at {self.url}"

    def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        temperature: float,
        seed: int,
        speculates: bool = True,
    ) -> Answer:
        """The answer of exactly `tokens` tokens to a prompt of ids, no other truncation than T.

        Nobody else may use the server meanwhile. Raises UserError: the server is gone or refuses,
        another answer than asked for, counters that are missing or moved by more than this answer.
        """
        before = self.counters(speculates)
        began = time.perf_counter()
        body = {"prompt": list(prompt), self.kind.limit: tokens, "temperature": temperature}
        body |= {"seed": seed, "ignore_eos": True, "top_p": 1.0, "min_p": 0.0, **self.kind.body}
        reply = self._answered(http.fetch, self.kind.path, body)
        seconds = time.perf_counter() - began
        try:
            ids = self.kind.ids(reply)
        except (KeyError, IndexError, TypeError):
            ids = None
        if ids is None or len(ids) != tokens:
            got = "no token ids" if ids is None else f"{len(ids)} tokens"
            raise UserError(
                f"server {self}: {got} in its answer where {tokens} were asked for; "
                f"{self.kind.server} is the version that was tested"
            )
        until = time.monotonic() + SETTLE
        while True:  # counters are written after the answer was sent
            counted = self.counters(speculates) - before
            if counted.tokens >= tokens or time.monotonic() > until:
                break
            time.sleep(0.05)
        if counted.tokens != tokens:
            raise UserError(
                f"server {self}: counted {counted.tokens} tokens for an answer of {tokens}; "
                "let nobody else use it during the check"
            )
        return Answer(list(prompt), ids, seconds, counted)

    def counters(self, speculates: bool = True) -> Counters:
        text = self._answered(http.page, "/metrics")
        return parse_counters(
            text, self.kind.prefix, self.kind.tokens, speculates, f"server {self}"
        )

    def _answered(self, get: Callable[..., T], path: str, body: dict[str, Any] | None = None) -> T:
        try:
            return get(self.url + path, body, ANSWER)
        except http.Fault as error:
            if error.status is not None:
                raise UserError(
                    f"server {self.url}: {path} says {error.status} ({error.said}); {error.hint}"
                ) from None
            if self.child is not None:
                time.sleep(1)  # a dying process is not gone at once
                self.child.check()
            raise UserError(
                f"server {self.url}: {path} gives no answer ({error}); start it, or check the URL"
            ) from None


def parse_counters(page: str, prefix: str, tokens: str, speculates: bool, server: str) -> Counters:
    """The counters on a Prometheus page, summed over engines.

    prefix: "vllm:" or "llamacpp:"; tokens: the name of its count of generated tokens. speculates
    False: the others may be missing. Raises UserError naming the first counter that is missing, or
    accepted tokens that do not add up to their sum.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in page.splitlines():
        found = _LINE.fullmatch(line.strip())
        if line.startswith("#") or found is None or not found[1].startswith(prefix):
            continue
        name, labels, value = found[1].removeprefix(prefix), found[2] or "", float(found[3])
        if name == PER_POSITION:
            position = _POSITION.search(labels)
            if position is not None:
                j = int(position[1])
                positions[j] = positions.get(j, 0) + round(value)
        elif name in (DRAFTS, DRAFTED, ACCEPTED, tokens):
            totals[name] = totals.get(name, 0) + round(value)
    for name in [tokens, *((DRAFTS, DRAFTED, ACCEPTED) if speculates else ())]:
        if name not in totals:
            raise UserError(
                f"{server}: its metrics have no {prefix}{name}: it does not speculate, keeps no "
                "metrics, or is a version that names them otherwise"
            )
    accepted = tuple(positions.get(j, 0) for j in range(max(positions, default=-1) + 1))
    total = totals.get(ACCEPTED, 0)
    if sum(accepted) != total:
        raise UserError(
            f"{server}: its metrics count {total} accepted tokens, but {sum(accepted)} position by "
            "position; this version is not understood"
        )
    return Counters(totals.get(DRAFTS, 0), totals.get(DRAFTED, 0), accepted, totals[tokens])
