"""What is told of a sampling run before it: faults, sizes, and where a server's law is another."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler, not_applied
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.samples import store

log = logging.getLogger(__name__)


def differences(target: Target, sampler: Sampler) -> list[str]:
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


def check_request(prompts: list[Prompt], max_new_tokens: int, batch_size: int) -> None:
    if not prompts:
        raise UserError("prompts: there are none; give at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {max_new_tokens} leaves nothing to write; use >= 1")
    if batch_size < 1:
        raise UserError(f"batch_size: {batch_size} answers nothing; use >= 1")


def check_sizes(
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
