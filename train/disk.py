"""Files and folders that a kill leaves whole or absent, and folders that one process holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.drafters.errors import UserError, cannot_write


@contextmanager
def locked(folder: Path, taken: str, unwritable: str) -> Iterator[None]:
    """Makes a folder and keeps other processes out of it; a killed one's lock ends with it.

    Raises UserError: `taken` where another one holds it; `unwritable`, its {reason} filled in,
    where it cannot be made or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(taken) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(unwritable.replace("{reason}", reason)) from None
    try:
        yield
    finally:
        lock.release()


def write(path: Path, text: str, remedy: str = "make room, or name another place") -> None:
    """Replaces a file by `text` in one step, on disk when it returns. Raises UserError."""
    scratch = path.with_name(f".{path.name}")
    try:
        scratch.write_text(text, encoding="utf-8")
        flush(scratch)
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise cannot_write(path, error, remedy) from None


def publish(scratch: Path, place: Path) -> None:
    """Renames a folder of files once all of it is on disk: its name stands for the whole."""
    for file in scratch.iterdir():
        flush(file)
    flush(scratch)
    os.replace(scratch, place)
    flush(place.parent)


def flush(path: Path) -> None:
    """Waits until a file's or folder's content is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
