"""Tensors of a model's checkpoint by name: which file holds each, and those alone are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from draftsmith.drafters.errors import model_error, reason
from draftsmith.drafters.source import Source


def files_by_name(source: Source) -> dict[str, str]:
    """Every tensor's name and its file's: the one that transformers takes, or an index's.

    Raises UserError for a checkpoint in another format than safetensors.
    """
    if path := _path(source, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        with safe_open(path, "pt") as opened:
            return dict.fromkeys(opened.keys(), SAFE_WEIGHTS_NAME)
    if path := _path(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False):
        return json.loads(Path(path).read_text())["weight_map"]
    text = "has no model.safetensors, and no other file is read in parts; store it as one"
    raise model_error(source.spec, text)


def read(source: Source, wanted: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors named by a part of what `files_by_name` gave; no other file is fetched."""
    out = {}
    for file in sorted(set(wanted.values())):
        with safe_open(_path(source, file), "pt") as opened:
            out.update({n: opened.get_tensor(n) for n, its in wanted.items() if its == file})
    return out


def _path(source: Source, file: str, **how: Any) -> str | None:
    """Where a model's file lies on this machine; a hub model's is fetched."""
    revision = source.revision if source.kind == "hub" else None
    try:
        return cached_file(source.path, file, revision=revision, **how)
    except OSError as error:
        text = f"{file} cannot be had ({reason(error)}); check the connection, or name a folder"
        raise model_error(source.spec, text) from None
