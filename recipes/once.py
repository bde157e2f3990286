"""Work that is done once: its result beside the key that says what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.train import checkpoint


def once(
    file: Path, key: dict[str, Any], make: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """What `file` holds if it was made with this key, else `make()`, stored; and which it was."""
    try:
        stored = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:  # cut short
        stored = {}
    made = stored.get("key") != key
    if made:
        stored = {"key": key, "made": make()}
        checkpoint.write(file, json.dumps(stored, indent=1, allow_nan=False) + "\n")
        stored = json.loads(file.read_text())  # the same types, made or read
    return stored["made"], made


def digest(file: Path) -> str:
    """sha256 of a checkpoint's file. Raises UserError where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); copy the checkpoint again"
        ) from None
