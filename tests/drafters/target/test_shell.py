"""The target's shell, loaded alone: what it gives, what it is named, and what is read for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import modeling_utils

import contracts
import tiny
from draftsmith.drafters import base, storage
from draftsmith.drafters.batch import align
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target import shell
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.target import Target
from draftsmith.eval.overlap.row_stats import chunk_stats, chunks
from ggufs import tiny_model, write_gguf

LAYER = ".layers."


def folder_of(folder: Path, family: str = "Llama", parts: bool = False, **settings: Any) -> str:
    """A tiny model of a family, of several files if asked for."""
    size: dict[str, Any] = {"max_shard_size": "10KB"} if parts else {}
    tiny.hf_model(family, **settings).save_pretrained(folder, **size)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def check_same(alone: Shell, whole: Target) -> None:
    """All that a shell gives, bit for bit."""
    torch.manual_seed(0)
    final = 3 * torch.randn(5, whole.hidden_size).to(whole.dtype)
    ids = torch.arange(whole.vocab_size)
    with torch.no_grad():
        assert torch.equal(alone.head(final), whole.head(final))
        assert torch.equal(alone.unembed(final), whole.unembed(final))
        assert torch.equal(alone.embedding(ids), whole.embedding(ids))
    assert alone.identity() == whole.identity()
    for name in ("eos_ids", "max_positions", "logit_scale", "num_layers", "device", "dtype"):
        assert getattr(alone, name) == getattr(whole, name)
    for tap in ("normed", 0, whole.num_layers):
        assert alone.width(tap) == whole.width(tap) == whole.hidden_size
    as_loaded = {"dtype": None, "_name_or_path": None}
    told = [of.config.to_dict() | as_loaded for of in (alone, whole)]
    assert told[0] == told[1]
    assert not any(p.requires_grad for p in alone.parameters())


@pytest.mark.parametrize("family", [*tiny.SETTINGS, "Bloom", "Mamba2", "Qwen3Next"])
def test_a_shell_gives_what_the_target_gives(family: str, tmp_path: Path) -> None:
    """Faults: a scale, softcap or scaled embedding lost, a tie missed, a norm left out."""
    folder = folder_of(tmp_path, family)
    check_same(Shell.load(folder), Target.load(folder))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_several_files(tied: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Qwen3", parts=True, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    alone = Shell.load(folder)
    check_same(alone, Target.load(folder))
    assert (alone.lm_head.weight is alone.embedding.weight) == tied


def test_an_adapted_target_keeps_its_record(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    edit(tmp_path, adapted_from={"spec": "old", "revision": "r"})
    alone = Shell.load(folder, dtype=torch.bfloat16)
    assert alone.identity()["adapted_from"] == {"spec": "old", "revision": "r"}
    check_same(alone, Target.load(folder, dtype=torch.bfloat16))


def edit(folder: Path, **about: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | about))


class Opened:
    """A safetensors file that notes which of its tensors are read."""

    def __init__(self, inner: Any, seen: set[str], name: str = "") -> None:
        self.inner, self.seen, self.name = inner, seen, name

    def __enter__(self) -> Opened:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_slice(self, name: str) -> Opened:
        return Opened(self.inner.get_slice(name), self.seen, name)

    def __getitem__(self, part: Any) -> Tensor:
        self.seen.add(self.name)
        return self.inner[part]

    def get_tensor(self, name: str) -> Tensor:
        self.seen.add(name)
        return self.inner.get_tensor(name)


def check_read(folder: Path, patch: pytest.MonkeyPatch) -> None:
    name = folder_of(folder, "Qwen3Moe", parts=True)
    index = folder / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    shard = about["weight_map"]["lm_head.weight"]
    more = {"mtp.fc.weight": torch.zeros(8, 8), "mtp.layers.0.fc.weight": torch.zeros(8, 8)}
    save_file(load_file(folder / shard) | more, folder / shard, metadata={"format": "pt"})
    about["weight_map"] |= dict.fromkeys(more, shard)
    index.write_text(json.dumps(about))
    seen: set[str] = set()
    real = modeling_utils.safe_open
    patch.setattr(modeling_utils, "safe_open", lambda *a, **k: Opened(real(*a, **k), seen))
    Shell.load(name)
    assert seen == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def test_nothing_of_the_body_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_read(tmp_path, monkeypatch)


def test_a_body_that_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: all layers are kept."""
    monkeypatch.setattr(shell, "cut", lambda config, layers: config)
    with pytest.raises(AssertionError):
        check_read(tmp_path, monkeypatch)


def test_layers_need_not_even_fit(tmp_path: Path) -> None:
    """Layers of 12 GiB, of which the disk holds nothing: sparse files, all zeros."""
    folder = folder_of(tmp_path, parts=True)
    made = 0
    for shard in tmp_path.glob("*.safetensors"):
        names = list(load_file(shard))
        if all(LAYER in name for name in names) and made < 3:
            made += 1
            size = (4 << 30) // len(names)
            header: dict[str, Any] = {
                name: {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
                for i, name in enumerate(names)
            }
            text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
            with shard.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(8 + len(text) + size * len(names))
    assert made == 3
    hf, final = tiny.hf_model(), torch.randn(3, 32)
    with torch.no_grad():
        theirs = hf.lm_head(hf.model.norm(final))
        assert torch.equal(Shell.load(folder).head(final), theirs)


@pytest.mark.parametrize("ready", [False, True])
def test_a_gguf_is_not_converted_whole(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ends alone are dequantised, to the same numbers; a whole folder serves where it is."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "model.gguf", tiny_model())
    spec = str(file)
    if ready:
        whole = Target.load(spec)
    alone = Shell.load(spec)
    (made,) = (tmp_path / "cache").glob("*/model.safetensors")
    bodies = [name for name in load_file(made) if LAYER in name]
    assert bool(bodies) == ready == (not alone.source.path.endswith("-shell"))
    if not ready:
        whole = Target.load(spec)
    check_same(alone, whole)
    assert len(Shell.load(spec).layer_states([1])) == 1  # which converts it, where it must
    assert Shell.load(spec).source == whole.source


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


HEAD = "lm_head.weight"
SCALE = {f"{HEAD}_scale_inv": torch.ones(1)}
CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "no head": (without(HEAD), "lm_head.weight is missing in its checkpoint; name"),
    "no norm": (without("model.norm.weight"), "model.norm.weight is missing in its checkpoint"),
    "fp8": (
        lambda t: t | {HEAD: t[HEAD].to(torch.float8_e4m3fn)} | SCALE,
        "lm_head.weight is stored as F8_E4M3",
    ),
    "embeddings": (
        lambda t: t | {"model.embed_tokens.scales": torch.ones(1)},
        "nothing reads model.embed_tokens.scales",
    ),
    "packed": (
        lambda t: without(HEAD)(t) | {"lm_head.qweight": torch.ones(4, 4, dtype=torch.int32)},
        "lm_head.qweight is stored as I32",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_ends_that_cannot_be_had(name: str, tmp_path: Path) -> None:
    """Faults: random weights where a tensor is missing, garbage where it is quantised."""
    change, words = CHANGES[name]
    folder, file = folder_of(tmp_path, "Qwen3"), tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=words) as error:
        Shell.load(folder)
    assert folder in str(error.value) and "\n" not in str(error.value)


def test_quantised_layers_are_no_matter(tmp_path: Path) -> None:
    """transformers' quantiser would want its packages, and change what is not quantised."""
    whole = Target.load(folder_of(tmp_path, "Qwen3"))
    edit(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    final = torch.randn(3, 32)
    with torch.no_grad():
        assert torch.equal(Shell.load(str(tmp_path)).head(final), whole.head(final))


def test_quantised_layers_are_not_pruned(tmp_path: Path) -> None:
    folder, file = folder_of(tmp_path, "Qwen3"), tmp_path / "model.safetensors"
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(file)
    scales = {name: tensors[name].to(torch.int8), f"{name}_scale": torch.ones(1)}
    save_file(tensors | scales, file, metadata={"format": "pt"})
    alone = Shell.load(folder)
    with pytest.raises(UserError, match="nothing reads .*mlp.up_proj.weight_scale"):
        alone.layer_states([1, 2])
    assert len(alone.layer_states([1, 3])) == 2


@pytest.mark.parametrize("family", ["Llama", "Gemma3 mixed", "Qwen3Moe", "GPTNeoX"])
def test_a_shell_prunes_as_its_target_does(family: str, tmp_path: Path) -> None:
    """Faults: a layer of another number, or of another type, under the number it gets."""
    folder = folder_of(tmp_path, family, parts=True)
    config = SmallConfig(layers=[3, 1], embeddings="own")
    made = []
    for load in (Shell.load, Target.load):
        torch.manual_seed(0)
        made.append(Small.create(load(folder), config).weights())
    assert made[0].keys() == made[1].keys()
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name]), name


def test_a_shell_knows_layers_of_their_own_attention(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layers: those of BloomForCausalLM") as error:
        Small.create(Shell.load(folder_of(tmp_path, "Bloom")), SmallConfig(layers=[0, 1]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["eagle", "eagle1", "medusa", "mtp", "dflash", "dspark", "peagle", "small"]
)
def test_drafters_take_a_shell(name: str, tmp_path: Path) -> None:
    """Fault: a drafter asks for more of its target than a shell has. What reads the batch is the
    target; what drafts, and what losses and replay compare it with, is not."""
    folder = folder_of(tmp_path, "Gemma3")
    whole, alone = Target.load(folder), Shell.load(folder)
    settings: dict[str, Any] = {
        "eagle": {"taps": [1, 4]}, "small": {"layers": [0, 3]}, "dflash": {"taps": [1, 4]},
        "dspark": {"taps": [1, 4]},
        "peagle": {"taps": [1, 4]},
    }  # fmt: skip
    found = []
    for of in (alone, whole):
        torch.manual_seed(0)
        cls = base.family(name)
        drafter = cls.create(of, cls.Config(**settings.get(name, {})))
        storage.save(drafter, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shell, "resolve", None)  # a stored drafter needs no file of the target
            drafter = storage.load(tmp_path, of)
        batch = contracts.read(whole, contracts.prompts(2), drafter.taps)
        alignment = align(batch, 2)
        unroll = drafter.unroll(batch, alignment)
        with torch.no_grad():
            chunk = next(chunks(batch, alignment, unroll, 64))
            found.append(chunk_stats(drafter, batch, unroll, chunk, divergences=["kl"]))
    for key in ("alpha", "logp", "logq"):
        assert torch.equal(getattr(found[0], key), getattr(found[1], key))
    assert torch.equal(found[0].divergence["kl"], found[1].divergence["kl"])
