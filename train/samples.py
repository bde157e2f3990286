"""Samples: the target's own answers as token ids, made or imported, stored with what they are."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train import storage
from draftsmith.train.answering import Answering
from draftsmith.train.prompts import Prompt, encode, json_rows, token_ids
from draftsmith.train.reader import Sample, Samples, dtype_name

__all__ = ["Sample", "Samples", "generate", "import_answers"]

log = logging.getLogger(__name__)

_IMPORT_PART = 1000  # rows


def generate(
    target: Target,
    prompts: list[Prompt],
    sampler: Sampler,
    max_new_tokens: int,
    folder: Path,
    seed: int = 0,
    batch_size: int = 16,
) -> Samples:
    """The target's answers to all prompts, sample i to prompt i, stored in `folder`.

    A prompt's answer depends on the seed and its place in the list, not on batches. A killed run
    goes on where it stopped when called again with the same arguments (batch_size may differ); a
    finished one is opened. Raises UserError, before anything is computed.
    """
    folder = Path(folder)
    encoded = encode(prompts, target)
    _check_request(target, encoded, max_new_tokens, batch_size)
    manifest = _manifest(target, sampler, "generated") | {
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "prompts": _digest([(p.key, ids) for p, ids in zip(prompts, encoded, strict=True)]),
    }
    with storage.claimed(folder):
        if (folder / storage.MANIFEST).exists():
            stored = storage.read_manifest(folder)
            _same_settings(folder, stored, manifest)
            if stored["state"] == "complete":
                shutil.rmtree(folder / storage.PARTS, ignore_errors=True)
                return Samples.open(folder, target, audit=0)
        _check_sizes(target, encoded, max_new_tokens, batch_size, folder)
        storage.write_manifest(folder, manifest)
        parts = storage.Parts(folder)
        _answer(target, prompts, encoded, sampler, max_new_tokens, seed, batch_size, parts)
        return _finish(folder, manifest, parts, target, audit=0)


def _answer(
    target: Target,
    prompts: list[Prompt],
    encoded: list[list[int]],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
    parts: storage.Parts,
) -> None:
    """Answers every prompt that `parts` lacks, batch by batch."""
    stored = set(parts.indices)
    # Longest first: too little memory shows at once, and the time left is not underestimated.
    plan = sorted(range(len(prompts)), key=lambda i: (-len(encoded[i]), i))
    todo = [i for i in plan if i not in stored]
    if stored:
        log.info("%d of %d prompts are answered already", len(stored), len(prompts))
    batches = [todo[s : s + batch_size] for s in range(0, len(todo), batch_size)]
    decoder = Decoder(target)
    with Answering(len(prompts), len(stored), len(batches), max_new_tokens) as progress:
        for batch in batches:
            try:
                texts = decoder.generate(
                    [encoded[i] for i in batch],
                    sampler,
                    max_new_tokens,
                    rows=batch,
                    seed=seed,
                    progress=progress.step,
                )
            except torch.OutOfMemoryError:
                raise UserError(
                    f"batch_size: {batch_size} answers at once do not fit in the device's memory; "
                    "lower it and run again (what is answered stays)"
                ) from None
            parts.add(
                {
                    "ids": [t.prompt + t.tokens for t in texts],
                    "made": [[False] * len(t.prompt) + [True] * len(t.tokens) for t in texts],
                    "finish": [t.finish for t in texts],
                    "domain": [prompts[i].domain for i in batch],
                    "key": [prompts[i].key for i in batch],
                    "index": batch,
                }
            )
            progress.batch(len(batch), len(batch))
    if todo:
        log.info("%d tokens, %.0f tokens/s", progress.tokens, progress.rate)


def import_answers(
    file: Path,
    target: Target,
    sampler: Sampler,
    folder: Path,
    foreign: bool = False,
    audit: int = 16,
) -> Samples:
    """Stores answers that another program made with this target, and audits them.

    file: JSONL (or a JSON array) of prompt_ids, response_ids, finish_reason, source and, if the
    prompt has an id of its own, key. response_ids are the tokens drawn, the end token included.
    foreign=True takes text that is not the target's own; it is marked so, and not audited. Raises
    UserError; nothing is stored then.
    """
    folder, file = Path(folder), Path(file)
    manifest = _manifest(target, sampler, "imported") | {"foreign": foreign, "file": file.name}
    with storage.claimed(folder):
        if (folder / storage.MANIFEST).exists():
            stored = storage.read_manifest(folder)
            if stored["state"] == "complete" or stored["origin"] != "imported":
                raise UserError(f"samples {folder}: holds samples already; name another folder")
            shutil.rmtree(folder / storage.PARTS, ignore_errors=True)
        try:
            if file.is_file():
                storage.check_disk(folder, 4 * file.stat().st_size)
            storage.write_manifest(folder, manifest)
            parts = storage.Parts(folder)
            rows: list[dict[str, Any]] = []
            for count, (where, row) in enumerate(json_rows(file)):
                rows.append(_imported(where, row, target, file.stem) | {"index": count})
                if len(rows) == _IMPORT_PART:
                    parts.add(_columns(rows))
                    rows = []
            if rows:
                parts.add(_columns(rows))
            return _finish(folder, manifest, parts, target, audit)
        except UserError:
            for name in (storage.PARTS, storage.ROWS):
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / storage.MANIFEST).unlink(missing_ok=True)
            raise


def _imported(where: str, row: dict[str, Any], target: Target, domain: str) -> dict[str, Any]:
    prompt = token_ids(where, "prompt_ids", row.get("prompt_ids"))
    answer = token_ids(where, "response_ids", row.get("response_ids"))
    finish = row.get("finish_reason")
    if not isinstance(finish, str) or not finish:
        raise UserError(f'{where}: finish_reason is no text; write "stop" or "length"')
    if max(prompt + answer) >= target.vocab_size:
        raise UserError(
            f"{where}: token {max(prompt + answer)} is outside the vocabulary of "
            f"{target.source.spec} ({target.vocab_size}); its ids are another tokenizer's"
        )
    if len(prompt + answer) > target.max_positions:
        raise UserError(
            f"{where}: {len(prompt + answer)} tokens exceed the target's {target.max_positions} "
            "positions; drop the row"
        )
    domain = str(row.get("source") or domain)
    return {
        "ids": list(prompt + answer),
        "made": [False] * len(prompt) + [True] * len(answer),
        "finish": finish,
        "domain": domain,
        "key": str(row.get("key") or Prompt(None, prompt, domain).key),
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _finish(
    folder: Path, manifest: dict[str, Any], parts: storage.Parts, target: Target, audit: int
) -> Samples:
    """Merges the parts, audits, completes the manifest."""
    rows = parts.merge()
    finish = list(rows["finish"])
    made = sum(int(values.sum()) for _, values in storage.chunks(rows, "made"))
    manifest = manifest | {
        "samples": len(rows),
        "tokens_made": made,
        "finish": {reason: finish.count(reason) for reason in sorted(set(finish))},
        "content_hash": storage.content_hash(rows),
        "state": "complete",
    }
    out = Samples(folder, manifest, rows)
    out.prove(target, audit)
    storage.write_manifest(folder, manifest)
    parts.remove()
    log.info("samples %s: %d, %d tokens made, %s", folder, len(rows), made, manifest["finish"])
    return out


# ---------------------------------------------------------------- what samples are


def _manifest(target: Target, sampler: Sampler, origin: str) -> dict[str, Any]:
    identity = target.identity()
    return {
        "format": storage.FORMAT,
        "state": "writing",
        "origin": origin,
        "foreign": False,
        "target": identity,
        "template_hash": identity["template_hash"],
        "dtype": dtype_name(target),
        "sampler": asdict(sampler),
        "seed": None,
        "max_new_tokens": None,
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _same_settings(folder: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError unless a run may go on with what another began."""
    then, new = _settings(stored), _settings(now)
    for name in new:
        if then.get(name) != new[name]:
            what = f"{then.get(name)} then, {new[name]} now"
            if name == "prompts":
                what = "other ones, or in another order"
            raise UserError(
                f"samples {folder}: were begun with other settings ({name}: {what}); use the same, "
                "or name another folder"
            )


def _settings(manifest: dict[str, Any]) -> dict[str, Any]:
    """What decides the answers."""
    out = {f"target {k}": v for k, v in manifest["target"].items() if k != "spec"}
    out |= {name: manifest.get(name) for name in ("origin", "dtype", "seed", "max_new_tokens")}
    return out | manifest["sampler"] | {"prompts": manifest.get("prompts")}


def _check_request(
    target: Target, encoded: list[list[int]], max_new_tokens: int, batch_size: int
) -> None:
    if not encoded:
        raise UserError("prompts: there are none; give at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {max_new_tokens} leaves nothing to write; use >= 1")
    if batch_size < 1:
        raise UserError(f"batch_size: {batch_size} answers nothing; use >= 1")
    for i, ids in enumerate(encoded):
        if len(ids) + max_new_tokens > target.max_positions:
            raise UserError(
                f"prompt {i}: {len(ids)} tokens and max_new_tokens {max_new_tokens} exceed the "
                f"target's {target.max_positions} positions; shorten either"
            )


def _check_sizes(
    target: Target, encoded: list[list[int]], max_new_tokens: int, batch_size: int, folder: Path
) -> None:
    """Tells the sizes of files and cache; raises UserError where the disk is too small."""
    tokens = sum(len(ids) + max_new_tokens for ids in encoded)
    disk = storage.size(len(encoded), tokens)
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    slots = min(batch_size, len(encoded)) * (max(map(len, encoded)) + max_new_tokens)
    cache = slots * target.num_layers * 2 * heads * width * target.dtype.itemsize
    log.info(
        "answers: %d prompts, at most %d tokens and %.0f MiB on disk; cache at most %.0f MiB",
        len(encoded),
        tokens,
        disk / 2**20,
        cache / 2**20,
    )
    storage.check_disk(folder, disk)
