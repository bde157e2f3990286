"""Samples while they are written: what their manifest says, and the batches that are finished.

A folder is begun, gone on with after a kill, and finished; until then FOLDER/parts/ holds the rows.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.files import library
from draftsmith.train.samples import store
from draftsmith.train.samples.samples import Samples, dtype_name

log = logging.getLogger(__name__)


def begun(target: Target, sampler: Sampler, origin: str) -> dict[str, Any]:
    """The manifest of samples whose rows are still to come."""
    return {
        "format": store.FORMAT,
        "state": "writing",
        "origin": origin,
        "foreign": False,
        "target": target.identity(),
        "dtype": dtype_name(target),
        "sampler": asdict(sampler),
        "seed": None,
        "max_new_tokens": None,
    }


def same_settings(folder: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
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
    old = {"llama-server": "llama.cpp"}  # a name in samples from before
    out |= {f"server's {k}": old.get(v, v) for k, v in (manifest.get("server") or {}).items()}
    own = ("origin", "foreign", "dtype", "seed", "max_new_tokens", "prompts", "stop")
    return out | manifest["sampler"] | {name: manifest.get(name) for name in own}


def finish(
    folder: Path, manifest: dict[str, Any], parts: Parts, target: Target, audit: int
) -> Samples:
    """Merges the parts, audits, completes the manifest."""
    rows, given_up = parts.merge()
    finish = list(rows["finish"])
    made = sum(int(values.sum()) for _, values in store.chunks(rows, "made"))
    manifest = manifest | {
        "samples": len(rows),
        "tokens_made": made,
        "finish": {reason: finish.count(reason) for reason in sorted(set(finish))},
        "content_hash": store.content_hash(rows),
        "state": "complete",
    }
    if given_up:
        manifest["given_up"] = given_up
        why = ", ".join(f"{count} {reason}" for reason, count in given_up.items())
        log.warning("samples %s: prompts given up: %s", folder, why)
    out = Samples(folder, manifest, rows)
    out.prove(target, audit)
    store.write_manifest(folder, manifest)
    parts.remove()
    log.info("samples %s: %d, %d tokens made, %s", folder, len(rows), made, manifest["finish"])
    return out


# ---------------------------------------------------------------- parts


class Parts:
    """The finished batches of a run that is still writing, each a small dataset of its own.

    A row carries the `index` of its prompt; a conversation may take several rows, which then lie in
    one part. A row without ids stands for a prompt that was given up, `finish` saying why; it is
    asked again where a call goes on. A part's name holds its lowest index, so that several
    processes may add parts at once, its row count and the start of its content hash, so that one
    cut short is told apart. Raises UserError for parts that are broken, or answer a prompt twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / store.PARTS
        self.folder.mkdir(exist_ok=True)
        self.indices: list[int] = []  # of the stored rows that hold a text, in no order
        self.given_up: dict[int, str] = {}  # prompts, and why; a later part may answer them
        seen: set[int] = set()
        for part in self._paths():
            rows, given_up = _answers(self._read(part))
            self.given_up |= given_up
            if twice := seen.intersection(rows):
                raise UserError(
                    f"{part}: answers prompt {min(twice)} a second time; delete it and run again"
                )
            seen.update(rows)
            self.indices += rows

    def _paths(self) -> list[Path]:
        return sorted(p for p in self.folder.iterdir() if p.suffix != ".tmp")

    def _read(self, part: Path) -> Any:
        # In memory: thousands of mapped files would exceed a process's limit of open files.
        dataset = store.load(part, in_memory=True)
        try:
            _, rows, digest = part.name.split("-")
            count = int(rows)
        except ValueError:
            raise UserError(f"{part}: is no part of these samples; move it away") from None
        store.check(dataset, count, digest, part)
        return dataset

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Stores rows, `index` among their columns."""
        datasets = library()
        value = datasets.Value
        features = datasets.Features(
            {
                "ids": datasets.Sequence(value("int32")),
                "made": datasets.Sequence(value("bool")),
                "finish": value("string"),
                "domain": value("string"),
                "key": value("string"),
                "index": value("int64"),
            }
        )
        dataset = datasets.Dataset.from_list(rows, features=features)
        digest = store.content_hash(dataset)[:16]
        first = min(row["index"] for row in rows)
        store.save(dataset, self.folder / f"{first:06d}-{len(dataset)}-{digest}")
        answered, given_up = _answers(dataset)
        self.indices += answered
        self.given_up |= given_up

    def merge(self) -> tuple[Any, dict[str, int]]:
        """Writes all rows that hold a text, in the order of their index, beside the parts.

        Returns the dataset, and how many prompts were given up for which reason.
        """
        final = self.folder.parent / store.ROWS
        whole = library().concatenate_datasets([self._read(part) for part in self._paths()])
        answered, given_up = _answers(whole)
        left = [given_up[i] for i in sorted(given_up.keys() - set(answered))]
        lost = {reason: left.count(reason) for reason in sorted(set(left))}
        if not answered:
            why = ", ".join(f"{count} {reason}" for reason, count in lost.items())
            problem = f"no prompt could be answered: {why}; see the server's log and run again"
            raise UserError(f"samples {final.parent}: {problem}")
        sizes, index = _sizes(whole), list(whole["index"])
        order = [i for i in sorted(range(len(index)), key=index.__getitem__) if sizes[i]]
        store.save(whole.select(order).remove_columns("index"), final)
        return store.load(final), lost

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _sizes(dataset: Any) -> list[int]:
    """Tokens of each row."""
    return [size for lengths, _ in store.chunks(dataset, "ids") for size in lengths.tolist()]


def _answers(part: Any) -> tuple[list[int], dict[int, str]]:
    """The indices of rows that hold a text; and of those that do not, why."""
    rows = list(zip(part["index"], part["finish"], _sizes(part), strict=True))
    return [i for i, _, size in rows if size], {i: why for i, why, size in rows if not size}
