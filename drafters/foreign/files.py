"""Config and tensors of a foreign folder, and the account of which tensors were read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.drafters.errors import UserError


def json_of(path: Path) -> dict[str, Any]:
    """A JSON file's object. Raises UserError where it is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no settings; copy it again")
    return found


def gguf_in(path: Path) -> Path | None:
    """The GGUF that `path` is, or holds alone."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 and not (path / "config.json").is_file() else None


def config(path: Path) -> dict[str, Any]:
    """A drafter folder's config.json; {} for a GGUF. Raises UserError where there is neither."""
    if gguf_in(path) is not None:
        return {}
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: no drafter there (config.json is missing); give a checkpoint")
    return json_of(path / "config.json")


class Tensors:
    """The tensors of a folder, each to be taken once under a name and shape."""

    def __init__(self, folder: Path) -> None:
        """Reads safetensors, else pytorch_model.bin. Raises UserError where neither can be read."""
        found = sorted(folder.glob("*.safetensors"))
        self.path = found[0] if len(found) == 1 else folder
        self.left: dict[str, Tensor] = {}
        try:
            for file in found:
                self.left.update(load_file(file))
            if not found:
                self.path = folder / "pytorch_model.bin"
                self.left = torch.load(self.path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(
                f"{folder}: no weights there (*.safetensors or pytorch_model.bin)"
            ) from None
        except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            line = " ".join(str(error).split())[:200]
            raise UserError(f"{self.path}: cannot be read ({line}); copy it again") from None

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`. Raises UserError where it is missing or of another shape."""
        if name not in self.left:
            raise UserError(f"{self.path}: tensor {name} is missing; copy the drafter again")
        tensor = self.left.pop(name)
        if tensor.shape != shape:
            raise UserError(
                f"{self.path}: tensor {name} has shape {tuple(tensor.shape)}, its config.json "
                f"asks for {shape}"
            )
        return tensor

    def rename(self, old: str, new: str) -> None:
        """Gives every name that starts with `old` the start `new`."""
        self.left = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in self.left.items()
        }

    def done(self) -> None:
        """Raises UserError where a tensor was not read: it means something not known here."""
        for name in sorted(self.left):
            raise UserError(
                f"{self.path}: tensor {name} is unexpected: draftsmith would not use it, and the "
                "drafter would differ from the one that was trained"
            )
