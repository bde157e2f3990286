"""Conversations held with a server, several at a time, and stored as they end."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.train import storage
from draftsmith.train.answering import Answering
from draftsmith.train.conversation import Conversation
from draftsmith.train.endpoint import Endpoint
from draftsmith.train.prompts import Unusable
from draftsmith.train.reader import Samples

log = logging.getLogger(__name__)

PART = 32  # conversations stored together: what a kill loses at most


def answer_by(
    endpoint: Endpoint,
    talks: list[Conversation],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    parts: storage.Parts,
    manifest: dict[str, Any],
) -> None:
    """Lets a server answer every turn of the conversations.

    The first part is audited (see reader.py) unless the manifest says foreign: a server with
    another model or sampler shows at once. Raises UserError; what is answered stays.
    """
    endpoint.stopped.clear()
    todo = iter(talks)
    running: set[Future[list[dict[str, Any]]]] = set()
    ended: list[list[dict[str, Any]]] = []
    audited = manifest["foreign"] or bool(parts.indices)
    total = len(talks) + len(set(parts.indices))
    steps = sum(1 + len(talk.prompt.later) for talk in talks) * max_new_tokens
    with (
        Answering(total, total - len(talks), max(1, steps)) as progress,
        ThreadPoolExecutor(endpoint.concurrency) as pool,
    ):
        try:
            while True:
                while len(running) < 2 * endpoint.concurrency and (talk := next(todo, None)):
                    running.add(pool.submit(_hold, endpoint, talk, sampler, max_new_tokens, seed))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    rows = future.result()
                    ended.append(rows)
                    progress.answered(sum(sum(row["made"]) for row in rows), max_new_tokens)
                    progress.stored(1)
                if len(ended) >= PART:
                    if not audited:
                        _audit(ended, manifest, parts.folder.parent, endpoint)
                        audited = True
                    _store(parts, ended)
        finally:
            # The others give up their waits; what they hold is asked for again.
            endpoint.stopped.set()
            _store(parts, ended)
    log.info("%d tokens, %.0f tokens/s", progress.tokens, progress.rate)


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


def _store(parts: storage.Parts, ended: list[list[dict[str, Any]]]) -> None:
    rows = [row for each in ended for row in each]
    if rows:
        parts.add(storage.columns(rows))
    ended.clear()


def _audit(
    ended: list[list[dict[str, Any]]], manifest: dict[str, Any], folder: Path, endpoint: Endpoint
) -> None:
    """Raises UserError where the first answers are not the target's own."""
    rows = [row for each in ended for row in each if row["ids"]]
    try:
        Samples(folder, manifest, rows).prove(endpoint.target, 16)
    except UserError as error:
        ended.clear()
        raise UserError(
            f"{error} (server {endpoint.url}, model {endpoint.model}: serve the target as it is "
            "loaded here, or mark the answers --foreign)"
        ) from None
