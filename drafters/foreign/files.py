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
from draftsmith.drafters.target import Target


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
        """Reads safetensors, else EAGLE's or Medusa's pickled weights.

        Raises UserError where there are none, or they cannot be read.
        """
        self.path, self.left = folder, {}
        for self.path in weight_files(folder):
            try:
                if self.path.suffix == ".safetensors":
                    self.left.update(load_file(self.path))
                else:
                    self.left.update(torch.load(self.path, "cpu", weights_only=True))
            except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError) as error:
                line = " ".join(str(error).split())[:200]
                raise UserError(f"{self.path}: cannot be read ({line}); copy it again") from None

    path: Path  # of the last file, for messages
    left: dict[str, Tensor]  # not taken yet

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

    def take_embeddings(self, target: Target) -> None:
        """Takes embed_tokens.weight, where it is stored; it must be the target's, which our heads
        read. Raises UserError where it is not."""
        name = "embed_tokens.weight"
        if name not in self.left:
            return
        stored = self.take(name, target.vocab_size, target.hidden_size)
        if not same_embeddings(stored, target):
            raise UserError(
                f"{self.path}: {name} is not the target's; a head with embeddings of its own is "
                "not read here"
            )


def same_embeddings(stored: Tensor, target: Target) -> bool:
    """Whether a table (V, H) holds what the target's layers read, but for its dtype's rounding."""
    theirs = target.embedding(torch.arange(target.vocab_size, device=target.device)).cpu()
    return torch.allclose(stored.float(), theirs.float(), rtol=1e-2, atol=1e-4)


def weight_files(folder: Path) -> list[Path]:
    """safetensors files, or what EAGLE and Medusa publish. Raises UserError without any."""
    found = sorted(folder.glob("*.safetensors"))
    pickled = [folder / name for name in ("pytorch_model.bin", "medusa_lm_head.pt")]
    found = found or [path for path in pickled if path.is_file()]
    if not found:
        names = ", ".join(path.name for path in pickled)
        raise UserError(f"{folder}: no weights there (*.safetensors, {names}); copy them too")
    return found
