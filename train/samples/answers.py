"""Conversations held turn by turn, with the target here or a server, and stored as they end."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.train.data.conversation import Conversation
from draftsmith.train.data.endpoint import Endpoint
from draftsmith.train.data.prompts import Unusable
from draftsmith.train.progress import Answering
from draftsmith.train.samples.packing import buckets
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.writing import Parts

log = logging.getLogger(__name__)

WINDOW = 8  # batches of conversations under way at a time: what a kill loses of several turns
PART = 32  # conversations that a server answered stored together: what a kill loses at most

_Held = tuple[Conversation, list[dict[str, Any]]]  # a conversation that ended, and its rows


def answer_here(
    talks: list[Conversation],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
    stop: Sequence[str],
    parts: Parts,
    prompts: int,
    shown: bool,
) -> None:
    """Holds every conversation with the target here, turn by turn.

    Answers make conversations differ in length, and some end: those of a window are put into
    batches anew for each turn, by length, so that little is padding and batches stay full. Each is
    stored when it ends.
    """
    if not talks:
        return
    size = WINDOW * batch_size
    windows = [talks[s : s + size] for s in range(0, len(talks), size)]
    turns = sum(_batches(window, batch_size) for window in windows)
    decoder = Decoder(talks[0].target)

    def answers(batch: list[Conversation], progress: Answering) -> list[Text]:
        try:
            return decoder.generate(
                [talk.ids for talk in batch],
                sampler,
                max_new_tokens,
                # Each turn its own, so that no draw is used twice.
                rows=[talk.index + talk.turn * prompts for talk in batch],
                seed=seed,
                stop=stop,
                progress=progress.step,
            )
        except torch.OutOfMemoryError:
            raise UserError(
                f"batch_size: {batch_size} answers at once do not fit in the device's memory; "
                "lower it and run again (what is answered stays)"
            ) from None

    stored = len(set(parts.indices))
    steps = turns * max_new_tokens
    with Answering(stored + len(talks), stored, steps, shown) as progress:
        for live in windows:
            while live:  # a turn
                groups = buckets([len(talk.ids) for talk in live], batch_size)
                asked: list[Conversation] = []
                for batch in ([live[i] for i in group] for group in groups):
                    for talk, text in zip(batch, answers(batch, progress), strict=True):
                        talk.take(text.tokens, text.finish)
                    progress.answered(len(batch), max_new_tokens)
                    more = [talk for talk in batch if talk.ask(max_new_tokens)]
                    asked += more
                    if ended := [talk for talk in batch if talk not in more]:
                        parts.add([row for talk in ended for row in talk.rows()])
                        progress.stored(len(ended))
                live = asked
    log.info("%d tokens, %.0f tokens/s", progress.tokens, progress.rate)


def _batches(talks: Sequence[Conversation], size: int) -> int:
    """How many batches a window takes at most: each turn those that are asked it."""
    most = max(len(talk.prompt.later) for talk in talks)
    asked = [sum(len(talk.prompt.later) >= turn for talk in talks) for turn in range(most + 1)]
    return sum(-(-count // size) for count in asked)


def answer_by_server(
    endpoint: Endpoint,
    talks: list[Conversation],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    parts: Parts,
    manifest: dict[str, Any],
) -> None:
    """Lets a server answer every turn of the conversations.

    The first answers of every call are audited (see audit.py) before any is stored, unless the
    manifest says foreign: a server with another model or sampler shows at once. Whatever ends the
    call, conversations that were finished by then are kept. Raises UserError.
    """
    endpoint.begin()
    finished = _Finished(endpoint, parts, manifest)
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

    # Daemons: a request under way may take minutes more, and after a failure it is not waited for.
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
                finished.add(rows)
        finally:
            stopped.set()
            while not done.empty():
                if not isinstance(found := done.get(), Exception):
                    finished.add(found[1])
            finished.flush()
    log.info("%d tokens, %.0f tokens/s", progress.tokens, progress.rate)


class _Finished:
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
        self.parts.add(rows)

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
        digest = hashlib.sha256(f"{seed} {talk.index} {talk.turn}".encode()).digest()
        own_seed = int.from_bytes(digest[:4], "big") >> 1  # 31 bits: what every server takes
        try:
            answer = endpoint.answer(talk.ids, sampler, max_new_tokens, own_seed)
        except Unusable as error:
            return talk.give_up(error.reason)
        talk.take(*answer)
        if not talk.ask(max_new_tokens):
            return talk.rows()
