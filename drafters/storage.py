"""How a drafter is stored: config.json beside model.safetensors, which hold what was trained.

config.json holds sha256 of every file of the checkpoint, and of itself: bits that flip in a copy,
and a setting changed by hand, give another drafter that still loads. Checkpoints of earlier
versions have none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.errors import UserError, naming
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.whole import check_finite

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save(drafter: Drafter, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Writes config.json and model.safetensors (weights; None: its own) into a folder.

    Whatever else lies there by then belongs to the checkpoint, and is hashed with it.
    """
    config = {
        "format": 1,
        "family": drafter.family,
        "config": drafter.config.stored(),
        "target": drafter.target.identity(),
    }
    _write_weights(folder, drafter.weights() if weights is None else weights)
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and p.name != CONFIG]
    hashes = {CONFIG: _hash_of(config)} | {p.name: _file_hash(p) for p in files}
    _write_config(folder, config | {"sha256": hashes})


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json and model.safetensors, which is how servers but llama.cpp read heads too."""
    _write_weights(folder, tensors)
    _write_config(folder, config)


def _write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a drafter folder. Raises UserError when it is not one."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: no drafter there (config.json is missing); give a checkpoint")
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not even text
        raise UserError(f"{path}: not valid JSON ({error}); copy the checkpoint again") from None
    parts = {"family": str, "config": dict, "target": dict}
    if not isinstance(stored, dict) or any(
        not isinstance(stored.get(key), kind) for key, kind in parts.items()
    ):
        raise UserError(
            f"{path}: not a draftsmith drafter (no family, config and target in it); "
            "give a folder that `draftsmith train` wrote"
        )
    return stored


def load(folder: Path, target: Shell) -> Drafter:
    """What `read` gives, as it is served: on the target's device, in its dtype."""
    return read(folder, target).to(target.device, target.dtype).eval()


def read(folder: Path, target: Shell) -> Drafter:
    """The drafter stored in a folder, its own weights in fp32, as they are trained.

    Raises UserError when it was made for another target, its tensors are not exactly those that its
    config asks for, and as `check_hashes` does.
    """
    stored = read_config(folder)
    check_target(folder, stored["target"], target)
    with naming(folder / CONFIG):
        cls = family(stored["family"])
        try:
            config = cls.Config(**stored["config"])
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            text = f"{key}: {first['msg']}; correct it, or copy the checkpoint again"
            raise UserError(text) from None
        drafter = cls(target, config)
    path = folder / WEIGHTS
    fill(drafter, read_weights(path), path)
    check_hashes(folder, WEIGHTS)
    return drafter


def check_hashes(folder: Path, *names: str, remedy: str = "copy the checkpoint again") -> None:
    """Raises UserError where config.json or one of these files is not what was stored."""
    stored = read_config(folder)
    hashes = stored.get("sha256")
    if hashes is None:  # of an earlier version
        return
    known = hashes if isinstance(hashes, dict) else {}
    for name in (CONFIG, *names):
        found = _hash_of(stored) if name == CONFIG else _file_hash(folder / name)
        if found != known.get(name):
            raise UserError(
                f"{folder / name}: is not what was stored (sha256 {found[:12]}, "
                f"{str(known.get(name))[:12]} in {CONFIG}): damaged or changed; {remedy}"
            )


def _hash_of(config: dict[str, Any]) -> str:
    """sha256 of a config, less where its target lies: that folder may be moved."""
    kept = json.loads(json.dumps(config))  # its keys as they are read again
    kept.pop("sha256", None)
    kept["target"].pop("spec", None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    """Raises UserError for a file that cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error}); copy the checkpoint again") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file. Raises UserError where it cannot be read."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); copy the checkpoint again") from None


def fill(drafter: Drafter, stored: dict[str, Tensor], path: Path) -> None:
    """Puts tensors that were read from `path` into a drafter. Raises UserError unless they are
    exactly those that its config asks for, and finite."""
    wanted = drafter.weights()
    remedy = "the file does not belong to config.json beside it; copy the checkpoint again"
    for name in sorted(wanted.keys() ^ stored.keys()):
        kind = "missing" if name in wanted else "unexpected"
        raise UserError(f"{path}: tensor {name} is {kind} for family {drafter.family}; {remedy}")
    for name, tensor in wanted.items():
        if tensor.shape != stored[name].shape:
            shapes = f"{tuple(stored[name].shape)} where {tuple(tensor.shape)} is needed"
            raise UserError(f"{path}: tensor {name} has shape {shapes}; {remedy}")
    check_finite(str(path), stored, "copy the checkpoint again, or take an earlier one")
    try:
        drafter.load_state_dict(stored, strict=False)
    except UserError as error:  # a draft vocabulary that the target lacks
        raise UserError(f"{path}: {error}; {remedy}") from None


def check_target(folder: Path, made_for: dict[str, Any], target: Shell) -> None:
    """Raises UserError unless a drafter made for `made_for` fits `target`."""
    own = target.identity()
    remedy = f"give the target it was made for ({made_for.get('spec')})"
    for key, word in (
        ("tokenizer_hash", "tokenizer"),
        ("vocab_size", "vocabulary size"),
        ("hidden_size", "hidden size"),
        ("num_layers", "number of layers"),
    ):
        if made_for.get(key) != own[key]:
            raise UserError(
                f"{folder}: this drafter was made for another {word} "
                f"({str(made_for.get(key))[:12]}, the target has {str(own[key])[:12]}); {remedy}"
            )
    if made_for.get("adapted_from") != own.get("adapted_from"):
        raise UserError(
            f"{folder}: this drafter was made for {made_for.get('spec')} at revision "
            f"{str(made_for.get('revision'))[:12]}, not {own['spec']} at {own['revision'][:12]}: "
            f"adapting a target makes another one; {remedy}, or train a drafter for this one"
        )
    if made_for.get("revision") != own["revision"]:
        logger.warning(
            "%s was made for revision %.12s of its target, this one is %.12s: output stays exact, "
            "acceptance may differ", folder, made_for.get("revision"), own["revision"],
        )  # fmt: skip
