"""Conversations held with a server, several at a time, and stored as they end."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.train.data.conversation import Conversation
from draftsmith.train.data.endpoint import Endpoint
from draftsmith.train.data.prompts import Unusable
from draftsmith.train.progress import Answering
from draftsmith.train.samples import store as storage
from draftsmith.train.samples.parts import Parts
from draftsmith.train.samples.samples import Samples

log = logging.getLogger(__name__)

PART = 32  # answered conversations stored together: what a kill loses at most

_Held = tuple[Conversation, list[dict[str, Any]]]  # a conversation that ended, and its rows


def answer_by(
    endpoint: Endpoint,
    talks: list[Conversation],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    parts: Parts,
    manifest: dict[str, Any],
) -> None:
    """Lets a server answer every turn of the conversations.

    The first answers of every call are audited (see reader.py) before any is stored, unless the
    manifest says foreign: a server with another model or sampler shows at once. Whatever ends the
    call, conversations that were finished by then are kept. Raises UserError.
    """
    endpoint.begin()
    store = _Store(endpoint, parts, manifest)
    todo, done = deque(talks), SimpleQueue[_Held | Exception]()
    stopped = endpoint.stopped

    def work() -> None:
        while not stopped.is_set():
            try:
                talk = todo.popleft()
            except IndexError:  # none is left
                return
            try:
                done.put((talk, _hold(endpoint, talk, sampler, max_new_tokens, seed)))
            except Exception as error:  # raised by the thread that waits for it
                done.put(error)

    # Daemons: a request under way may take minutes more, and nobody waits for it after a failure.
    for _ in range(min(endpoint.concurrency, len(talks))):
        Thread(target=work, daemon=True).start()
    total = len(talks) + len(set(parts.indices))
    steps = sum(map(_turns, talks)) * max_new_tokens
    with Answering(total, total - len(talks), max(1, steps)) as progress:
        try:
            for _ in talks:
                found = done.get()
                if isinstance(found, Exception):
                    raise found
                talk, rows = found
                progress.answered(
                    sum(sum(row["made"]) for row in rows), _turns(talk) * max_new_tokens
                )
                progress.stored(1)
                store.add(rows)
        finally:
            stopped.set()
            while not done.empty():
                if not isinstance(found := done.get(), Exception):
                    store.add(found[1])
            store.flush()
    log.info("%d tokens, %.0f tokens/s", progress.tokens, progress.rate)


class _Store:
    """Puts finished conversations on disk, PART at a time; the first ones once they are audited."""

    def __init__(self, endpoint: Endpoint, parts: Parts, manifest: dict[str, Any]) -> None:
        self.endpoint, self.parts, self.manifest = endpoint, parts, manifest
        self.audited = manifest["foreign"]
        self.refused = False
        self.held: list[dict[str, Any]] = []
        self.answered = 0  # conversations held that have an answer: others are nothing to audit

    def add(self, rows: list[dict[str, Any]]) -> None:
        """A finished conversation's rows. Raises UserError where an audit fails."""
        self.held += rows
        self.answered += bool(rows[0]["ids"])
        if self.answered >= PART:
            self.flush()

    def flush(self) -> None:
        """Stores what is held. Raises UserError, and stores none from then on, as `add`."""
        rows, self.held, self.answered = self.held, [], 0
        if not rows or self.refused:
            return
        answered = [row for row in rows if row["ids"]]
        if answered and not self.audited:
            self._audit(answered)
        self.parts.add(storage.columns(rows))

    def _audit(self, rows: list[dict[str, Any]]) -> None:
        endpoint = self.endpoint
        try:
            Samples(self.parts.folder.parent, self.manifest, rows).prove(endpoint.target, 16)
        except UserError as error:
            self.refused = True
            raise UserError(
                f"{error} (server {endpoint.url}, model {endpoint.model}: serve the target as it "
                "is loaded here, or mark the answers --foreign)"
            ) from None
        self.audited = True


def _turns(talk: Conversation) -> int:
    return 1 + len(talk.prompt.later)


def _hold(
    endpoint: Endpoint, talk: Conversation, sampler: Sampler, max_new_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """One conversation, turn by turn: its rows."""
    while True:
        try:
            answer = endpoint.answer(
                talk.ids, sampler, max_new_tokens, _request_seed(seed, talk.index, talk.turn)
            )
        except Unusable as error:
            return talk.give_up(error.reason)
        talk.take(*answer)
        if not talk.ask(max_new_tokens):
            return talk.rows()


def _request_seed(seed: int, index: int, turn: int) -> int:
    """31 bits: what every server takes."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
