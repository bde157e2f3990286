"""Samples: the target's own answers as token ids, stored with what they are, audited when read."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train import storage
from draftsmith.train.answering import Answering
from draftsmith.train.audit import TOLERANCE, audit
from draftsmith.train.prompts import Prompt, encode, json_rows, token_ids

log = logging.getLogger(__name__)

_IMPORT_PART = 1000  # rows


@dataclass(frozen=True)
class Sample:
    """One text. made: per token, whether the target drew it; finish: "stop", "length", .."""

    ids: list[int]
    made: list[bool]
    finish: str
    domain: str
    key: str  # of the prompt


class Samples:
    """Stored samples, in order; rows are read from disk when asked for."""

    def __init__(self, folder: Path, manifest: dict[str, Any], rows: Any) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sampler = Sampler(**manifest["sampler"])
        self.foreign: bool = manifest["foreign"]
        self._rows = rows

    @classmethod
    def open(cls, folder: Path, target: Target, audit: int = 16) -> Samples:
        """Reads samples and checks them: complete, unchanged, this target's, and its own.

        audit: how many samples, chosen by a fixed seed, the target reads to prove the last
        (0 = none; foreign text is never audited). Raises UserError.
        """
        folder = Path(folder)
        manifest = storage.read_manifest(folder)
        if manifest["state"] != "complete":
            raise UserError(
                f"samples {folder}: are still being written; wait for that run, or run it again "
                "to let it finish"
            )
        _same_target(folder, manifest, target)
        rows = storage.load(folder / storage.ROWS)
        storage.check(rows, manifest["samples"], manifest["content_hash"], folder / storage.ROWS)
        out = cls(folder, manifest, rows)
        out.prove(target, audit)
        return out

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return Sample(**self._rows[int(index)])

    @cached_property
    def lengths(self) -> Tensor:
        """(n,) tokens of each sample."""
        sizes = [torch.as_tensor(s.copy()) for s, _ in storage.chunks(self._rows, "ids")]
        return torch.cat(sizes).long() if sizes else torch.zeros(0, dtype=torch.long)

    @cached_property
    def first_made(self) -> Tensor:
        """(n,) position of each sample's first target-made token; its length where it has none."""
        out = []
        for sizes, made in storage.chunks(self._rows, "made"):
            length = torch.as_tensor(sizes.copy()).long()
            row = torch.repeat_interleave(torch.arange(len(length)), length)
            where = torch.arange(len(row)) - (length.cumsum(0) - length)[row]
            flags = torch.as_tensor(made.copy())
            out.append(length.scatter_reduce(0, row[flags], where[flags], "amin"))
        return torch.cat(out) if out else torch.zeros(0, dtype=torch.long)

    def token_counts(self, indices: Sequence[int] | None = None) -> Tensor:
        """(V,) long: how often the target made each token, over all samples or some."""
        wanted = torch.ones(len(self), dtype=torch.bool)
        if indices is not None:
            wanted = torch.zeros_like(wanted)
            wanted[torch.as_tensor(list(indices), dtype=torch.long)] = True
        V = self.manifest["target"]["vocab_size"]
        counts = torch.zeros(V, dtype=torch.long)
        start = 0
        pairs = zip(
            storage.chunks(self._rows, "ids"), storage.chunks(self._rows, "made"), strict=True
        )
        for (sizes, ids), (_, made) in pairs:
            length = torch.as_tensor(sizes.copy()).long()
            use = wanted[start : start + len(length)].repeat_interleave(length)
            use &= torch.as_tensor(made.copy())
            counts += torch.bincount(torch.as_tensor(ids.copy())[use].long(), minlength=V)
            start += len(length)
        return counts

    def split(self, heldout: int, seed: int) -> tuple[list[int], list[int]]:
        """(train, heldout) sample indices, shuffled by (seed, key): row order has no say.

        Samples of one prompt stay together, so that a few less than `heldout` may come out.
        Raises UserError where that leaves a side that was asked for empty.
        """
        groups: dict[str, list[int]] = {}
        for index, key in enumerate(self._rows["key"]):
            groups.setdefault(key, []).append(index)
        order = sorted(groups, key=lambda k: hashlib.sha256(f"{seed} {k}".encode()).digest())
        train: list[int] = []
        held: list[int] = []
        for key in order:
            group = groups[key]
            if len(group) > 1:
                group = sorted(group, key=lambda i: self[i].ids)
            (held if len(held) + len(group) <= heldout else train).extend(group)
        if heldout < 0 or not train or (heldout and not held):
            raise UserError(
                f"heldout: {heldout} of the {len(self)} samples ({len(groups)} prompts) in "
                f"{self.folder} cannot be held out; choose between 0 and {len(self) - 1}, or "
                "sample more prompts"
            )
        return train, held

    def prove(self, target: Target, count: int) -> None:
        """Audits `count` samples (see audit.py); raises UserError where they fail."""
        if self.foreign or not count:
            return
        chosen = random.Random(0).sample(range(len(self)), min(count, len(self)))
        texts = [(i, self[i].ids, self[i].made) for i in chosen]
        tolerance = max(
            TOLERANCE.get(name, TOLERANCE["bfloat16"])
            for name in (self.manifest["dtype"], _dtype(target))
        )
        try:
            found = audit(target, texts, self.sampler, tolerance)
            fault = found.fault()
        except UserError as error:
            fault = str(error)
        if fault:
            raise UserError(
                f"samples {self.folder}: {fault}; they are not this target's own at "
                f"{_words(self.sampler)}: name the sampler they were drawn at, sample again, or "
                "import them with foreign=True"
            )
        log.info("samples %s: audit passed: %s", self.folder, found)


# ---------------------------------------------------------------- making


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
        longest = [len(ids) + max_new_tokens for ids in encoded]
        storage.check_disk(folder, 10 * sum(longest) + 8192 * len(prompts))  # parts and rows
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
            texts = decoder.generate(
                [encoded[i] for i in batch],
                sampler,
                max_new_tokens,
                rows=batch,
                seed=seed,
                progress=progress.step,
            )
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
        "dtype": _dtype(target),
        "sampler": asdict(sampler),
        "seed": None,
        "max_new_tokens": None,
    }


def _dtype(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _words(sampler: Sampler) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(sampler).items())


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _same_target(folder: Path, manifest: dict[str, Any], target: Target) -> None:
    theirs, ours = manifest["target"], target.identity()
    for name in ("tokenizer_hash", "vocab_size", "hidden_size", "num_layers", "template_hash"):
        _same(folder, f"target's {name}", theirs.get(name), ours[name], target)
    _same(folder, "target's revision", theirs.get("revision"), ours["revision"], target)


def _same(folder: Path, name: str, theirs: Any, ours: Any, target: Target) -> None:
    if theirs != ours:
        raise UserError(
            f"samples {folder}: their {name} is {_short(theirs)}, that of {target.source.spec} is "
            f"{_short(ours)}; use the target they were made with, or sample again"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + ".."


def _same_settings(folder: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError unless a run may go on with what another began."""
    for name in ("origin", "target", "dtype", "sampler", "seed", "max_new_tokens", "prompts"):
        then, new = stored.get(name), now[name]
        if name == "target":
            then, new = dict(then or {}, spec=""), dict(new, spec="")
        if then != new:
            what = "other prompts, or another order" if name == "prompts" else f"{then}, now {new}"
            raise UserError(
                f"samples {folder}: were begun with other settings ({name}: {what}); use the same, "
                "or name another folder"
            )


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
