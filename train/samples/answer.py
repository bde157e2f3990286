"""Samples: the target's own answers as token ids, made here or by a server, and stored."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.train.data.chat_template import (
    check_template,
    control_tokens,
    misfit,
    names_read,
    opening,
)
from draftsmith.train.data.conversation import Conversation
from draftsmith.train.data.endpoint import Endpoint
from draftsmith.train.data.hub import Skips
from draftsmith.train.data.prompts import Prompt, Unusable
from draftsmith.train.data.server import answer_by
from draftsmith.train.processes import ALONE, SEEN, Ranks
from draftsmith.train.progress import Answering
from draftsmith.train.samples import manifest as record
from draftsmith.train.samples import store
from draftsmith.train.samples.checks import check_request, check_sizes, differences
from draftsmith.train.samples.packing import buckets
from draftsmith.train.samples.parts import Parts
from draftsmith.train.samples.samples import Sample, Samples

__all__ = ["Sample", "Samples", "generate"]

log = logging.getLogger(__name__)

WINDOW = 8  # batches of conversations under way at a time: what a kill loses of several turns


def generate(
    target: Target,
    prompts: list[Prompt],
    sampler: Sampler,
    max_new_tokens: int,
    folder: Path,
    seed: int = 0,
    batch_size: int = 16,
    server: Endpoint | None = None,
    foreign: bool = False,
    stop: Sequence[str] = (),
    about: Sequence[str] = (),
    ranks: Ranks = ALONE,
) -> Samples:
    """The target's answers to all prompts, turn by turn, in their order, stored in `folder`.

    A conversation's later turns are asked after the target's own answers (see conversation.py).
    What cannot be asked (too long, refused by the chat template) is left out, counted in the log.
    An answer depends on the seed and the prompt's place in the list, not on batches. A killed run
    goes on where it stopped when called again with the same arguments (batch_size and the number of
    processes may differ); a finished one is opened.

    server: it answers, and the target here audits it: by the first answers of every call, and at
    the end; foreign=True leaves that out, and marks the samples. While it answers nobody it is
    waited for (see endpoint.py); prompts that it failed at are asked again where a call goes on,
    not once the samples are whole. stop: strings that end an answer, besides the end tokens
    (answers made here only). about: lines for stderr, printed once nothing more can be refused.
    ranks: processes that call this together, on one disk; each answers its share, the main one
    merges them. Raises UserError, all that can be told before anything is computed.
    """
    folder = Path(folder)
    check_request(prompts, max_new_tokens, batch_size)
    encoded = encode_fitting(prompts, target, max_new_tokens)
    manifest = record.begun(target, sampler, "served" if server else "generated") | {
        "foreign": foreign,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "prompts": record.digest([(p.key, ids) for p, ids in zip(prompts, encoded, strict=True)]),
    }
    if stop:
        manifest["stop"] = list(stop)
    if server:
        manifest["server"] = {"kind": server.kind, "model": server.model}
    audit = 16 if server and not foreign else 0
    with store.claimed(folder) if ranks.main else nullcontext():
        if ranks.main and not _complete(folder, manifest):
            check_sizes(target, prompts, encoded, max_new_tokens, batch_size, folder)
            store.write_manifest(folder, manifest)
            for line in [*about, *differences(target, sampler)]:
                print(line, file=sys.stderr)
        ranks.meet()
        ranks.see(folder / store.MANIFEST)
        if _complete(folder, manifest):
            if ranks.main:
                shutil.rmtree(folder / store.PARTS, ignore_errors=True)
            return Samples.open(folder, target, audit=0)
        parts = Parts(folder)
        talks = ranks.share(_to_answer(prompts, encoded, target, parts))
        ranks.meet()  # nobody stores before all have seen what is stored
        if server:
            answer_by(server, talks, sampler, max_new_tokens, seed, parts, manifest)
        else:
            _answer(
                talks, sampler, max_new_tokens, seed, batch_size, stop, parts, len(prompts),
                shown=ranks.main,
            )  # fmt: skip
        _tell_unasked(talks)
        ranks.meet()
        if ranks.main:
            parts = _gathered(parts, {i for i, ids in enumerate(encoded) if ids})
            made = record.finish(folder, manifest, parts, target, audit)
        ranks.meet()
        ranks.see(folder / store.ROWS)
        return made if ranks.main else Samples.open(folder, target, audit=0)


def _complete(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether the folder holds the samples asked for; UserError where it holds others."""
    if not (folder / store.MANIFEST).exists():
        return False
    stored = store.read_manifest(folder)
    record.same_settings(folder, stored, manifest)
    return bool(stored["state"] == "complete")


def _gathered(parts: Parts, asked: set[int]) -> Parts:
    """The parts of all processes, with an answer to everything that was asked.

    Those of another node may take a while to show on a shared disk; UserError where they do not.
    """
    deadline = time.monotonic() + SEEN
    while missing := asked.difference(parts.indices, parts.given_up):
        if time.monotonic() > deadline:
            raise UserError(
                f"{parts.folder}: {len(missing)} answers of other processes are not there; put it "
                "on a disk that all nodes share, and run again"
            )
        time.sleep(0.2)
        parts = Parts(parts.folder.parent)
    return parts


def encode_fitting(
    prompts: Sequence[Prompt], target: Target, max_new_tokens: int
) -> list[list[int]]:
    """Each prompt's token ids up to its first answer; [] for those that cannot be asked.

    They are counted in a warning. Raises UserError where none is left.
    """
    check_template(prompts, target)
    chat = any(p.messages is not None for p in prompts)
    reads = names_read(target.tokenizer) if chat else set()
    control = control_tokens(target.tokenizer)
    out: list[list[int]] = []
    skipped = Skips()
    for i, prompt in enumerate(prompts):
        try:
            misfit(prompt, target, reads, control)
            ids = opening(prompt, target)
            if len(ids) + max_new_tokens > target.max_positions:
                raise Unusable(
                    f"too long for the target's {target.max_positions} positions",
                    f"{len(ids)} tokens and max_new_tokens {max_new_tokens}",
                )
            out.append(ids)
        except Unusable as error:
            out.append([])
            skipped.add(error.reason, f"prompt {i}", error.detail or prompt.shown)
    if len(skipped) == len(prompts):
        raise UserError(f"prompts: none of {len(prompts)} can be asked: {skipped}")
    if skipped:
        log.warning("%d of %d prompts cannot be asked: %s", len(skipped), len(prompts), skipped)
    return out


def _to_answer(
    prompts: list[Prompt], encoded: list[list[int]], target: Target, parts: Parts
) -> list[Conversation]:
    """Conversations that `parts` lacks: those with most turns first, then the longest.

    So too little memory shows at once, the time left is not underestimated, and conversations of
    as many turns are answered together.
    """
    stored = set(parts.indices)
    todo = [i for i, ids in enumerate(encoded) if ids and i not in stored]
    if stored:
        log.info("%d of %d prompts are answered already", len(stored), len(prompts))
    todo.sort(key=lambda i: (-len(prompts[i].later), -len(encoded[i]), i))
    return [Conversation(i, prompts[i], encoded[i], target) for i in todo]


def _answer(
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
                        parts.add(store.columns([row for talk in ended for row in talk.rows()]))
                        progress.stored(len(ended))
                live = asked
    log.info("%d tokens, %.0f tokens/s", progress.tokens, progress.rate)


def _batches(talks: Sequence[Conversation], size: int) -> int:
    """How many batches a window takes at most: each turn those that are asked it."""
    most = max(len(talk.prompt.later) for talk in talks)
    asked = [sum(len(talk.prompt.later) >= turn for talk in talks) for turn in range(most + 1)]
    return sum(-(-count // size) for count in asked)


def _tell_unasked(talks: Sequence[Conversation]) -> None:
    """Warns of turns that were not asked, and of templates that rewrite earlier turns."""
    unasked = Skips()
    for talk in talks:
        for _ in range(len(talk.prompt.later) - talk.turn):
            unasked.add(talk.unasked, f"prompt {talk.index}")
    if unasked:
        log.warning("%d later turns were not asked: %s", len(unasked), unasked)
    rewritten = sum(talk.rewritten for talk in talks)
    if rewritten:
        log.warning(
            "the chat template writes earlier turns anew: %d turns became rows of their own",
            rewritten,
        )
