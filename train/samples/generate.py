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

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler, not_applied
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.chat_template import encode_fitting
from draftsmith.train.data.conversation import Conversation
from draftsmith.train.data.endpoint import Endpoint
from draftsmith.train.data.prompts import Prompt, Skips
from draftsmith.train.processes import DISK_DELAY, SINGLE, Processes
from draftsmith.train.samples import store, writing
from draftsmith.train.samples.answers import answer_by_server, answer_here
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.writing import Parts

log = logging.getLogger(__name__)


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
    notes: Sequence[str] = (),
    processes: Processes = SINGLE,
) -> Samples:
    """The target's answers to all prompts, turn by turn, in their order, stored in `folder`.

    A conversation's later turns are asked after the target's own answers (see conversation.py).
    What cannot be asked (too long, refused by the chat template) is left out, counted in the log.
    An answer depends on the seed and the prompt's place in the list, not on batches. A killed run
    goes on where it stopped when called again with the same arguments (batch_size and the number of
    processes may differ); a finished one is opened.

    server: it answers, and the target here audits it: by the first answers of every call, and at
    the end; foreign=True leaves that out, and marks the samples. While it answers no request it
    is waited for (see endpoint.py); prompts that it failed at are asked again where a call goes on,
    not once the samples are whole. stop: strings that end an answer, besides the end tokens
    (answers made here only). notes: lines for stderr, printed once nothing more can be refused.
    processes: processes that call this together, on one disk; each answers its share, the main one
    merges them. Raises UserError, before anything is computed where it can.
    """
    folder = Path(folder)
    _check_request(prompts, max_new_tokens, batch_size)
    encoded = encode_fitting(prompts, target, max_new_tokens)
    manifest = writing.begun(target, sampler, "served" if server else "generated") | {
        "foreign": foreign,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "prompts": store.digest([(p.key, ids) for p, ids in zip(prompts, encoded, strict=True)]),
    }
    if stop:
        manifest["stop"] = list(stop)
    if server:
        manifest["server"] = {"kind": server.kind, "model": server.model}
    audit = 16 if server and not foreign else 0
    with store.claimed(folder) if processes.main else nullcontext():
        if processes.main and not _complete(folder, manifest):
            _check_sizes(target, prompts, encoded, max_new_tokens, batch_size, folder)
            store.write_manifest(folder, manifest)
            for line in [*notes, *_differences(target, sampler)]:
                print(line, file=sys.stderr)
        processes.meet()
        processes.wait_for(folder / store.MANIFEST)
        if _complete(folder, manifest):
            if processes.main:
                shutil.rmtree(folder / store.PARTS, ignore_errors=True)
            return Samples.open(folder, target, audit=0)
        parts = Parts(folder)
        talks = processes.share(_to_answer(prompts, encoded, target, parts))
        processes.meet()  # no process stores before all have seen what is stored
        if server:
            answer_by_server(server, talks, sampler, max_new_tokens, seed, parts, manifest)
        else:
            answer_here(
                talks, sampler, max_new_tokens, seed, batch_size, stop, parts, len(prompts),
                shown=processes.main,
            )  # fmt: skip
        _tell_unasked(talks)
        processes.meet()
        if processes.main:
            parts = _gathered(parts, {i for i, ids in enumerate(encoded) if ids})
            made = writing.finish(folder, manifest, parts, target, audit)
        processes.meet()
        processes.wait_for(folder / store.ROWS)
        return made if processes.main else Samples.open(folder, target, audit=0)


def _complete(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether the folder holds the samples asked for; UserError where it holds others."""
    if not (folder / store.MANIFEST).exists():
        return False
    stored = store.read_manifest(folder)
    writing.same_settings(folder, stored, manifest)
    return bool(stored["state"] == "complete")


def _gathered(parts: Parts, asked: set[int]) -> Parts:
    """The parts of all processes, with an answer to everything that was asked.

    Those of another node may take a while to show on a shared disk; UserError where they do not.
    """
    deadline = time.monotonic() + DISK_DELAY
    while missing := asked.difference(parts.indices, parts.given_up):
        if time.monotonic() > deadline:
            raise UserError(
                f"{parts.folder}: {len(missing)} answers of other processes are not there; put it "
                "on a disk that all nodes share, and run again"
            )
        time.sleep(0.2)
        parts = Parts(parts.folder.parent)
    return parts


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


def _tell_unasked(talks: Sequence[Conversation]) -> None:
    """Warns of turns that were not asked, and of templates that rewrite earlier turns."""
    unasked = Skips()
    for talk in talks:
        for _ in range(len(talk.prompt.later) - talk.turn):
            unasked.add(talk.unasked, f"prompt {talk.index}")
    if unasked:
        log.warning("%d later turns were not asked: %s", len(unasked), unasked)
    if rewritten := sum(talk.rewritten for talk in talks):
        log.warning(
            "the chat template writes earlier turns anew: %d turns became rows of their own",
            rewritten,
        )


# ---------------------------------------------------------------- what is checked before


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
    disk = store.size(len(lengths), tokens)
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
    store.check_disk(folder, disk)


def _about(messages: Sequence[dict[str, Any]]) -> int:
    """Tokens of a turn, not yet encoded: three characters each, and the template's share."""
    return sum(16 + len(m["content"]) // 3 for m in messages)


def _differences(target: Target, sampler: Sampler) -> list[str]:
    """Lines on where p may be another on a server that takes the target as it comes.

    vLLM and SGLang take temperature, top_k, top_p, min_p and repetition_penalty from the target's
    generation_config where a request does not name them (requests of ours do, every one).
    """
    name = f"target {target.source.spec}"
    config = target.hf.generation_config.to_diff_dict()
    out = []
    if found := not_applied(config):
        named = ", ".join(f"{key} {value}" for key, value in found.items())
        out.append(
            f"{name}: its generation_config asks for {named}, which is not applied here; serve "
            "without it (vLLM: --generation-config vllm)"
        )
    own = {key: config[key] for key in ("temperature", "top_k", "top_p") if config.get(key)}
    other = [f"{key} {value}" for key, value in own.items() if value != getattr(sampler, key)]
    if other:
        out.append(
            f"{name}: its generation_config asks for {', '.join(other)}, which servers take where "
            f"a request names none; the answers here are drawn at {sampler}: serve at that"
        )
    if target.quantised:
        out.append(
            f"{name}: its checkpoint is quantised ({target.quantised}); a server whose arithmetic "
            "is another has another p: let that one answer (--server)"
        )
    return out
