"""Samples: the target's own answers as token ids, made here or by a server, and stored."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler, not_applied
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.train import record, storage
from draftsmith.train.answering import Answering
from draftsmith.train.conversation import Conversation
from draftsmith.train.endpoint import Endpoint
from draftsmith.train.packing import buckets
from draftsmith.train.prompts import Prompt, Unusable
from draftsmith.train.reader import Sample, Samples
from draftsmith.train.served import answer_by
from draftsmith.train.sources import Skips
from draftsmith.train.template import (
    check_template,
    control_tokens,
    misfit,
    names_read,
    opening,
)

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
) -> Samples:
    """The target's answers to all prompts, turn by turn, in their order, stored in `folder`.

    A conversation's later turns are asked after the target's own answers (see conversation.py).
    What cannot be asked (too long, refused by the chat template) is left out, counted in the log.
    An answer depends on the seed and the prompt's place in the list, not on batches. A killed run
    goes on where it stopped when called again with the same arguments (batch_size may differ); a
    finished one is opened.

    server: it answers, and the target here audits it: by the first answers, and at the end;
    foreign=True leaves that out, and marks the samples. stop: strings that end an answer, besides
    the end tokens (answers made here only). about: lines for stderr, printed once nothing more can
    be refused. Raises UserError, all that can be told before anything is computed.
    """
    folder = Path(folder)
    _check_request(prompts, max_new_tokens, batch_size)
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
    with storage.claimed(folder):
        if (folder / storage.MANIFEST).exists():
            stored = storage.read_manifest(folder)
            record.same_settings(folder, stored, manifest)
            if stored["state"] == "complete":
                shutil.rmtree(folder / storage.PARTS, ignore_errors=True)
                return Samples.open(folder, target, audit=0)
        _check_sizes(target, prompts, encoded, max_new_tokens, batch_size, folder)
        storage.write_manifest(folder, manifest)
        for line in [*about, *_sampler_of(target)]:
            print(line, file=sys.stderr)
        parts = storage.Parts(folder)
        talks = _to_answer(prompts, encoded, target, parts)
        if server:
            answer_by(server, talks, sampler, max_new_tokens, seed, parts, manifest)
        else:
            _answer(talks, sampler, max_new_tokens, seed, batch_size, stop, parts, len(prompts))
        _tell_unasked(talks)
        return record.finish(folder, manifest, parts, target, audit)


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
    prompts: list[Prompt], encoded: list[list[int]], target: Target, parts: storage.Parts
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
    parts: storage.Parts,
    prompts: int,
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

    with Answering(prompts, prompts - len(talks), turns * max_new_tokens) as progress:
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
                        parts.add(storage.columns([row for talk in ended for row in talk.rows()]))
                        progress.stored(len(ended))
                live = asked
    log.info("%d tokens, %.0f tokens/s", progress.tokens, progress.rate)


def _batches(talks: Sequence[Conversation], size: int) -> int:
    """How many batches a window takes at most: each turn those that are asked it."""
    most = max(len(talk.prompt.later) for talk in talks)
    asked = [sum(len(talk.prompt.later) >= turn for talk in talks) for turn in range(most + 1)]
    return sum(-(-count // size) for count in asked)


def _sampler_of(target: Target) -> list[str]:
    """A line on settings that servers take from the target's generation_config and we do not."""
    found = not_applied(target.hf.generation_config.to_dict())
    if not found:
        return []
    named = ", ".join(f"{name} {value}" for name, value in found.items())
    return [
        f"target {target.source.spec}: its generation_config asks for {named}, which is not "
        "applied here; serve without it (vLLM: --generation-config vllm)"
    ]


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


# ---------------------------------------------------------------- what is asked of a run


def _check_request(prompts: list[Prompt], max_new_tokens: int, batch_size: int) -> None:
    if not prompts:
        raise UserError("prompts: there are none; give at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {max_new_tokens} leaves nothing to write; use >= 1")
    if batch_size < 1:
        raise UserError(f"batch_size: {batch_size} answers nothing; use >= 1")


def _check_sizes(
    target: Target,
    prompts: list[Prompt],
    encoded: list[list[int]],
    max_new_tokens: int,
    batch_size: int,
    folder: Path,
) -> None:
    """Tells the sizes of files and cache; raises UserError where the disk is too small."""
    lengths = [
        len(ids) + max_new_tokens + sum(max_new_tokens + _about(step) for step in prompt.later)
        for prompt, ids in zip(prompts, encoded, strict=True)
        if ids
    ]
    lengths = [min(length, target.max_positions) for length in lengths]
    tokens = sum(lengths)
    disk = storage.size(len(lengths), tokens)
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    slots = min(batch_size, len(lengths)) * max(lengths)
    cache = slots * target.num_layers * 2 * heads * width * target.dtype.itemsize
    log.info(
        "answers: %d prompts, at most %d tokens and %.0f MiB on disk; cache at most %.0f MiB",
        len(lengths),
        tokens,
        disk / 2**20,
        cache / 2**20,
    )
    storage.check_disk(folder, disk)


def _about(messages: Sequence[dict[str, Any]]) -> int:
    """Tokens of a turn, not yet encoded: three characters each, and the template's share."""
    return sum(16 + len(m["content"]) // 3 for m in messages)
