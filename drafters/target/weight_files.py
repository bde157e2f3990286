"""A local model folder: whether it is whole, and what tells its weights from another's.

Nothing here imports torch or transformers: a mistyped path is told at once.
"""

import hashlib
import json
from pathlib import Path

from draftsmith.drafters.errors import model_error, reason

MIB = 1 << 20


def fingerprint(file: Path) -> str:
    """sha256 over the size, the first and last MiB, and 64 KiB at 64 even steps in between.

    Names, sizes and headers are equal for every fine-tune of one model, hence the steps: they
    read the weights themselves, and the cost stays a few MiB of reading at any size.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(MIB))
        for step in range(1, 65):
            stream.seek(size * step // 65)
            digest.update(stream.read(MIB // 16))
        stream.seek(max(0, size - MIB))
        digest.update(stream.read(MIB))
    return digest.hexdigest()


def check_config(spec: str, folder: Path) -> str:
    """The revision of a folder whose weights nobody read; raises UserError without config.json."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = f"name the file {ggufs[0].name} itself" if ggufs else "name the folder that has it"
        raise model_error(spec, f"the folder {folder} has no config.json; {remedy}")
    return "unknown"


def folder_revision(spec: str, folder: Path) -> str:
    """sha256 over config.json and each weight file's name and fingerprint."""
    check_config(spec, folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(spec, folder):
        digest.update(f"{file.name} {fingerprint(file)}\n".encode())
    return digest.hexdigest()


def weight_files(spec: str, folder: Path) -> list[Path]:
    """The folder's weight files by name, each whole as far as its header tells."""
    stem, suffix = "model", ".safetensors"  # what transformers takes where a folder has both
    if not any(folder.glob("*.safetensors")):
        stem, suffix = "pytorch_model", ".bin"
    files = sorted(folder.glob("*.safetensors" if suffix == ".safetensors" else f"{stem}*.bin"))
    lacks = [] if files else ["weights (*.safetensors or pytorch_model*.bin)"]
    index = folder / f"{stem}{suffix}.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            text = f"{index.name} is broken ({reason(error)}); copy it again"
            raise model_error(spec, text) from error
        lacks += sorted(shards - {file.name for file in files})
    if lacks:
        text = f"the folder {folder} has no {lacks[0]}; copy the whole model again"
        raise model_error(spec, text)
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(spec, file)
    return files


def _check_safetensors(spec: str, file: Path) -> None:
    """Raises UserError for a git-lfs pointer and for a file shorter than its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if head == b"version ":
            text = f"{file.name} is a git-lfs pointer, no weights; run `git lfs pull`"
            raise model_error(spec, text)
        length = int.from_bytes(head, "little")
        short = len(head) < 8 or 8 + length > size
        if not short:
            try:
                header = json.loads(stream.read(length))
                header.pop("__metadata__", None)
                ends = [tensor["data_offsets"][1] for tensor in header.values()]
                short = 8 + length + max(ends, default=0) > size
            except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
                text = f"{file.name} is not safetensors ({reason(error)}); copy it again"
                raise model_error(spec, text) from error
    if short:
        text = f"{file.name} is cut short at {size} bytes; copy or download it again"
        raise model_error(spec, text)
