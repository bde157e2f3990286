"""How samples lie on disk: a `datasets` folder beside a manifest, written so that a kill is safe.

    FOLDER/manifest.json    what the samples are; state "writing" until everything below is whole
    FOLDER/samples/         the rows (`datasets.load_from_disk` reads them): ids, made, finish,
                            domain, key
    FOLDER/parts/           while writing: the batches that are finished (writing.py)

Every file and folder appears under its name by one rename, after its bytes are on the disk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError, cannot_write, said
from draftsmith.train import disk
from draftsmith.train.data.files import BROKEN, library

FORMAT = 1
MANIFEST = "manifest.json"
ROWS = "samples"
PARTS = "parts"
# What a manifest holds, by its state.
_BEGUN = ("origin", "foreign", "target", "dtype", "sampler")
_WHOLE = ("samples", "tokens_made", "finish", "content_hash")
FIELDS = {"writing": _BEGUN, "complete": _BEGUN + _WHOLE}
COLUMNS = ("ids", "made", "finish", "domain", "key")
ROOM = "make room, and run the same command again"  # the remedy for a full disk


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of samples; raises UserError where none can be read."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format"]
        lacks = [name for name in FIELDS[manifest["state"]] if name not in manifest]
    except FileNotFoundError:
        what = f"has no {MANIFEST}" if folder.is_dir() else "no such folder"
        raise UserError(f"samples {folder}: {what}; make them with `draftsmith sample`") from None
    except BROKEN as error:
        line = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read ({line}); restore it, or sample again") from None
    if lacks:
        raise UserError(f"{file}: has no {lacks[0]}; restore it, or sample again")
    if version != FORMAT:
        raise UserError(
            f"{file}: format {version} is not this version's {FORMAT}; sample again, or use the "
            "draftsmith that wrote it"
        )
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replaces the manifest in one step. Raises UserError."""
    disk.write(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n", ROOM)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it; a killed run's claim ends with it.

    Raises UserError: another run is writing there, or it holds other files than samples.
    """
    taken = f"samples {folder}: another run is writing there; wait for it"
    unwritable = f"samples {folder}: cannot be written ({{reason}}); name another"
    with disk.locked(folder, taken, unwritable):
        others = {f.name for f in folder.iterdir()} - {".lock", f".{MANIFEST}", f"{MANIFEST}.tmp"}
        if others and MANIFEST not in others:
            raise UserError(
                f"samples {folder}: holds other files ({min(others)}); name an empty folder"
            )
        yield


def size(texts: int, tokens: int) -> int:
    """Bytes that samples take while they are written: ids and flags, as parts and as rows."""
    return 10 * tokens + 8192 * texts


def check_disk(folder: Path, need: int) -> None:
    """Raises UserError unless `need` bytes are free where `folder` is."""
    free = shutil.disk_usage(folder).free
    if need > free:
        sizes = f"need up to {need / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free"
        raise UserError(f"samples {folder}: {sizes}; free some, or name a folder on a larger disk")


# ---------------------------------------------------------------- rows


def save(dataset: Any, folder: Path) -> None:
    """Writes a dataset as `folder`, which appears whole or not at all. Raises UserError."""
    temp = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temp, ignore_errors=True)
    try:
        dataset.save_to_disk(str(temp))
        if folder.exists():
            shutil.rmtree(folder)
        disk.publish(temp, folder)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        raise cannot_write(folder, error, ROOM) from None


def load(folder: Path, in_memory: bool = False) -> Any:
    """The dataset in a folder, mapped unless in_memory; raises UserError for a broken one."""
    try:
        dataset = library().load_from_disk(str(folder), keep_in_memory=in_memory)
        lacks = set(COLUMNS) - set(dataset.column_names)
    except BROKEN as error:
        raise UserError(f"{folder}: cannot be read ({said(error)}); {_remedy(folder)}") from None
    if lacks:
        raise UserError(f"{folder}: has no column {min(lacks)}; {_remedy(folder)}")
    return dataset


def check(dataset: Any, rows: int, digest: str, folder: Path) -> None:
    """Raises UserError unless the dataset has `rows` rows, whose content hash is `digest`."""
    if len(dataset) != rows:
        problem = f"holds {len(dataset)} rows where {rows} were written"
    else:
        try:
            if content_hash(dataset).startswith(digest):
                return
            problem = "its content is not what was written"
        except BROKEN as error:
            problem = f"cannot be read ({said(error)})"
    raise UserError(f"{folder}: {problem}; {_remedy(folder)}")


def _remedy(folder: Path) -> str:
    if folder.parent.name == PARTS:
        return "delete it and run again: only its answers are made anew"
    return "copy it again, or sample again"


def chunks(dataset: Any, column: str) -> Iterator[tuple[Any, Any]]:
    """(lengths, values) of a list column as numpy arrays, chunk by chunk, in row order."""
    for chunk in dataset.with_format("arrow").data.column(column).chunks:
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        yield chunk.value_lengths().to_numpy(zero_copy_only=False), values


def content_hash(dataset: Any) -> str:
    """sha256 over ids and made, row by row (however the file is chunked)."""
    digests = []
    for column, kind in (("ids", "<i4"), ("made", "u1")):
        lengths, values = hashlib.sha256(), hashlib.sha256()
        for sizes, numbers in chunks(dataset, column):
            lengths.update(sizes.astype("<i8").tobytes())
            values.update(numbers.astype(kind).tobytes())
        digests += [lengths.digest(), values.digest()]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
