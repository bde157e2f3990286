"""Config and tensors of a foreign folder, and the account of which tensors were read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.drafters.errors import UserError, reason
from draftsmith.drafters.target.shell import Shell

PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
# What torch.load raises for an empty file, one cut short, and one that is no pickle.
_UNREADABLE = (OSError, RuntimeError, EOFError, LookupError, pickle.UnpicklingError)


class StoredConfig(dict[str, Any]):
    """A config that was read from `path`. To index a key that is not there raises UserError."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        super().__init__(found)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self.path}: has no {key}; copy it again")


def json_of(path: Path) -> StoredConfig:
    """A JSON file's object, and those within it. Raises UserError where it is none."""
    try:
        found = json.loads(path.read_text(), object_hook=lambda each: StoredConfig(path, each))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy it again") from None
    if not isinstance(found, StoredConfig):
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
        found = weight_files(folder)
        if not found:
            names = ", ".join(PICKLED)
            raise UserError(f"{folder}: no weights there (*.safetensors, {names}); copy them too")
        for self.path in found:
            try:
                if self.path.suffix == ".safetensors":
                    stored = load_file(self.path)
                else:
                    stored = torch.load(self.path, "cpu", weights_only=True)
            except (SafetensorError, *_UNREADABLE) as error:
                text = f"{self.path}: cannot be read ({reason(error)}); copy it again"
                raise UserError(text) from None
            if not isinstance(stored, dict) or any(
                not isinstance(each, Tensor) for each in stored.values()
            ):
                raise UserError(f"{self.path}: holds no named tensors alone; give a state dict")
            self.left.update(stored)

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

    def take_embeddings(self, target: Shell) -> None:
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


def same_embeddings(stored: Tensor, target: Shell) -> bool:
    """Whether a table (V, H) holds what the target's layers read, but for its dtype's rounding."""
    theirs = target.embedding(torch.arange(target.vocab_size, device=target.device)).cpu()
    return torch.allclose(stored.float(), theirs.float(), rtol=1e-2, atol=1e-4)


def names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's weight files."""
    out: set[str] = set()
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            return set(Tensors(folder).left)
        try:
            with safe_open(file, "pt") as opened:
                out.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: cannot be read ({error}); copy it again") from None
    return out


def weight_files(folder: Path) -> list[Path]:
    """safetensors files, else what EAGLE and Medusa publish."""
    found = sorted(folder.glob("*.safetensors"))
    return found or [folder / name for name in PICKLED if (folder / name).is_file()]
