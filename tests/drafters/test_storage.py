"""Stored drafters: what a checkpoint holds, what loading refuses, where `small` comes from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import reference
import tiny
from contracts import (
    DRAFTERS,
    LAWFUL,
    PLAIN,
    Cells,
    cells,
    check_views,
    distance,
    drafter,
    every,
    play,
    prompts,
    read,
)
from draftsmith.drafters import base, storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target


@torch.no_grad()
def jolt(made: Drafter) -> Drafter:
    """Moves every stored weight, as training would."""
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def stored(made: Drafter, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    storage.save(made, folder)
    return folder


def law_table(made: Drafter) -> Cells:
    return cells(made, read(made.target, prompts(2), made.taps))


@pytest.mark.parametrize("name", DRAFTERS)
def test_load_gives_the_same_laws(name: str, tmp_path: Path) -> None:
    """Faults: a weight or the draft vocabulary left out, or kept by the target object."""
    made = jolt(drafter(name))
    folder = stored(made, tmp_path / "out")
    again = storage.load(folder, Target(tiny.hf_model(), tiny.tokenizer(), tiny.source()))
    assert (again.config, again.training) == (made.config, False)
    assert distance(law_table(made), law_table(again)) == 0
    check_views(again)
    fresh = type(made).create(made.target, made.config, torch.ones(tiny.VOCAB))
    assert name == "ngram" or distance(law_table(made), law_table(fresh)) > 0.05


def test_the_vocabulary_moves_with_the_weights() -> None:
    """Fault: on a GPU draft ids are looked up in a table that stayed on the CPU."""
    made = drafter("eagle").to("meta")
    assert made.vocab.ids is not None and made.vocab.ids.is_meta


def test_checkpoint_holds_trained_weights_only(tmp_path: Path) -> None:
    """Fault: the target's embedding or head stored, or trained, along with the drafter."""
    for name in LAWFUL:
        names = load_file(stored(drafter(name), tmp_path / name) / "model.safetensors").keys()
        assert names and not any("embed_tokens" in n or "target" in n for n in names)


def edit(key: str, field: str, value: Any) -> Callable[[Path], None]:
    """Changes config.json[key][field], or config.json[key] where field is empty."""

    def change(folder: Path) -> None:
        about = json.loads((folder / "config.json").read_text())
        (about[key] if field else about)[field or key] = value
        (folder / "config.json").write_text(json.dumps(about))

    return change


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return rewrite


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "tokenizer": (edit("target", "tokenizer_hash", "f" * 64), "", "tokenizer.*give the target"),
    "hidden size": (edit("target", "hidden_size", 64), "", "hidden size.*64.*32.*give the target"),
    "layers": (edit("target", "num_layers", 6), "", "number of layers.*6.*4.*give the target"),
    "vocabulary": (edit("target", "vocab_size", 99), "", "vocabulary size.*99.*give the target"),
    "family": (edit("family", "", "eagel"), "config.json", "no family 'eagel'; known are.*eagle"),
    "key": (edit("config", "tapps", [1]), "config.json", "tapps.*not permitted"),
    "value": (edit("config", "taps", [1, 9, 2]), "config.json", r"layer 9 is not in 0\.\.4"),
    "no config": (lambda f: (f / "config.json").unlink(), "", r"config.json is missing\); give"),
    "json": (lambda f: (f / "config.json").write_text("{"), "config.json", "not valid JSON"),
    "stranger": (
        lambda f: (f / "config.json").write_text("[1]"),
        "config.json",
        "not a draftsmith",
    ),
    "halves": (edit("target", "", None), "config.json", "not a draftsmith drafter.*give a folder"),
    "vocabulary ids": (
        tensors(lambda w: w["draft_ids"].fill_(60)),
        "model.safetensors",
        "ids must lie in 0..47.*copy",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors", "copy"),
    "cut": (cut_short, "model.safetensors", "cannot be read.*copy the checkpoint again"),
    "missing": (
        tensors(lambda w: w.pop("fc.weight")),
        "model.safetensors",
        "fc.weight is missing.*",
    ),
    "unexpected": (
        tensors(lambda w: w.update(extra=torch.ones(2))),
        "model.safetensors",
        "extra is unexpected.*",
    ),
    "shape": (
        tensors(lambda w: w.update({"fc.weight": torch.ones(3, 2)})),
        "model.safetensors",
        r"fc.weight has shape \(3, 2\).*",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_load_refuses(what: str, tmp_path: Path) -> None:
    """Fault: a drafter that loads and then drafts nonsense. One line: file, field, remedy."""
    damage, file, words = DAMAGE[what]
    folder = stored(drafter("eagle"), tmp_path)
    damage(folder)
    with pytest.raises(UserError, match=words) as caught:
        storage.load(folder, tiny.target())
    text = str(caught.value)
    assert text.startswith(str(folder / file)) and "\n" not in text
    assert any(word in text for word in ("; give", "; copy", "; correct", "not in 0", "known are"))


def flipped(file: Path, bit: int = 0, share: float = 0.7) -> None:
    """Flips one bit of a byte in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[4 * int(len(content) * share / 4)] ^= 1 << bit
    file.write_bytes(content)


def unhashed(folder: Path) -> Path:
    """Makes a checkpoint one of earlier versions."""
    about = json.loads((folder / "config.json").read_text())
    del about["sha256"]
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("name", ["eagle", "small", "medusa"])
def test_a_flipped_bit_is_refused(name: str, tmp_path: Path) -> None:
    """Fault: weights that are finite and of the right shape, and not those that were trained."""
    folder = stored(drafter(name), tmp_path)
    assert storage.load(folder, tiny.target()).family == name
    about = json.loads((folder / "config.json").read_text())
    content = (folder / "model.safetensors").read_bytes()
    assert about["sha256"]["model.safetensors"] == hashlib.sha256(content).hexdigest()
    flipped(folder / "model.safetensors")
    with pytest.raises(UserError, match="model.safetensors: is not what was stored .*copy"):
        storage.load(folder, tiny.target())


SETTINGS = {
    "flag": ("eagle", ["config", "norm_before_residual"], True),
    "rope": ("eagle", ["config", "block", "rope_theta"], 20000.0),
    "taps": ("eagle", ["config", "taps"], [2, 1, 3]),
    "layers": ("small", ["config", "layers"], [0, 3, 2]),
    "revision": ("eagle", ["target", "revision"], "another"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_changed_setting_is_refused(what: str, tmp_path: Path) -> None:
    """Fault: tensors still fit, and are read as another drafter's."""
    name, keys, value = SETTINGS[what]
    folder = stored(drafter(name), tmp_path)
    about = json.loads((folder / "config.json").read_text())
    inner = about
    for key in keys[:-1]:
        inner = inner[key]
    assert inner[keys[-1]] != value
    inner[keys[-1]] = value
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="config.json: is not what was stored") as caught:
        storage.load(folder, tiny.target())
    assert str(folder / "config.json") in str(caught.value)


def test_a_target_may_be_moved(tmp_path: Path) -> None:
    folder = stored(drafter("eagle"), tmp_path)
    edit("target", "spec", "/elsewhere")(folder)
    storage.load(folder, tiny.target())


@pytest.mark.parametrize("old", [False, True], ids=["hashed", "earlier"])
@pytest.mark.parametrize("content", [b"\xff" * 512, b"\x00\x00\x80\x7f"], ids=["NaN", "infinity"])
def test_weights_are_finite(content: bytes, old: bool, tmp_path: Path) -> None:
    """0xFF in place of a block of the disk; also where no hash tells of it."""
    folder = stored(drafter("eagle"), tmp_path)
    file = folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    start = len(whole) - 4 * 4000  # of its last tensor, which are fp32
    whole[start : start + len(content)] = content
    file.write_bytes(whole)
    if old:
        unhashed(folder)
    with pytest.raises(UserError, match="holds NaN or infinities; copy the checkpoint") as caught:
        storage.load(folder, tiny.target())
    assert str(caught.value).startswith(str(file))


def test_earlier_checkpoints_load_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    made = jolt(drafter("eagle"))
    again = storage.load(unhashed(stored(made, tmp_path)), made.target)
    assert distance(law_table(made), law_table(again)) == 0
    assert not caplog.records and capsys.readouterr() == ("", "")


def test_a_key_that_older_checkpoints_hold(tmp_path: Path) -> None:
    """Fault: theirs no longer load. Nothing ever read a block's max_positions."""
    made = drafter("eagle")
    path = stored(made, tmp_path) / "config.json"
    about = json.loads(path.read_text())
    about["config"]["block"]["max_positions"] = 512
    del about["sha256"]
    path.write_text(json.dumps(about))
    assert storage.load(tmp_path, made.target).config == made.config


def test_load_refuses_a_target_with_another_tokenizer(tmp_path: Path) -> None:
    """Fault: same sizes, other words."""
    folder = stored(drafter("medusa"), tmp_path)
    other = Target(tiny.hf_model(), tiny.tokenizer(40), tiny.source())
    with pytest.raises(UserError, match="tokenizer"):
        storage.load(folder, other)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("eagle", {"taps": [1, 2, 5]}, r"taps: layer 5 is not in 0\.\.4"),
        ("eagle", {"taps": [-1, 2]}, r"taps: layer -1 is not in 0\.\.4"),
        ("eagle", {"taps": [1, 1]}, "taps: .* twice"),
        ("eagle", {"draft_vocab": 49}, "draft_vocab: 49 .*48"),
        ("medusa", {"draft_vocab": 49}, "draft_vocab: 49 .*48"),
        ("toy-block", {"taps": [7]}, r"taps: layer 7 is not in 0\.\.4"),
        ("dflash", {"taps": [1, 1]}, "taps: .* twice"),
        ("dflash", {"taps": None}, "taps: .* 2 layers from 2 to L-2, needs 5 layers, .* has 4"),
        ("peagle", {"mask_token": 48}, r"mask_token: 48 is not in 0\.\.47"),
        ("peagle", {"norm_output": True}, "norm_output: peagle feeds no state back"),
        ("dflash", {"mask_token": 48}, r"mask_token: 48 is not in 0\.\.47"),
        ("small", {"layers": [0, 4]}, r"layers: 4 is not in 0\.\.3"),
        ("small", {"layers": [-1]}, r"layers: -1 is not in 0\.\.3"),
        ("small", {"layers": []}, "layers: keep at least one"),
        ("small", {"layers": None}, "either layers .* or checkpoint"),
        ("small", {"layers": [0], "checkpoint": "x"}, "either layers .* or checkpoint"),
        ("small", {"layers": None, "checkpoint": "./none/here"}, "'./none/here'"),
    ],
    ids=str,
)
def test_create_refuses(name: str, config: dict[str, Any], words: str) -> None:
    """Fault: a mistake in the recipe that costs a training run, or a stack trace, to find out."""
    with pytest.raises(UserError, match=words) as caught:
        drafter(name, **config)
    assert "\n" not in str(caught.value)


def test_create_refuses_a_draft_vocabulary_without_counts() -> None:
    cls = base.family("eagle")
    with pytest.raises(UserError, match="draft_vocab: needs"):
        cls.create(tiny.target(), cls.Config(taps=[1, 2], draft_vocab=20))


# The small drafter's own sources


def model_folder(folder: Path, words: int = tiny.VOCAB) -> str:
    """A tiny Llama of other weights than any target, with its tokenizer, as users keep models."""
    hf = tiny.hf_model("Llama", seed=5, layers=2)
    hf.save_pretrained(folder)
    tiny.tokenizer(words).save_pretrained(folder)
    return str(folder)


def assert_small_is(made: Drafter, hf: Any) -> None:
    """Proposals follow the laws of an HF model that was loaded apart."""
    for (moment,) in play(made, prompts(1), [1], PLAIN, 3)[2:]:
        assert moment.law is not None
        for depth, law in enumerate(moment.law):
            text, anchor = moment.known + moment.drafts, len(moment.known) - 2
            theirs = reference.small_law(hf, text, anchor, depth)
            torch.testing.assert_close(law.double(), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_small_from_a_checkpoint(family: str, tmp_path: Path) -> None:
    """Faults: other weights than the folder's; a trained drafter that still needs the folder."""
    folder = model_folder(tmp_path / "model")
    made = drafter("small", family, layers=None, checkpoint=folder)
    assert_small_is(made, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    check_views(made)
    out = stored(jolt(made), tmp_path / "out")
    shutil.rmtree(folder)
    assert distance(law_table(storage.load(out, made.target)), law_table(made)) == 0


def test_small_refuses_a_checkpoint_of_another_tokenizer(tmp_path: Path) -> None:
    """Fault: ids that mean other words, which accept nothing for reasons hard to see."""
    folder = model_folder(tmp_path / "model", words=40)
    with pytest.raises(UserError, match="checkpoint: .*model has another tokenizer"):
        drafter("small", layers=None, checkpoint=folder)


@every
def test_small_with_all_layers_is_the_target(family: str) -> None:
    """Fault: a layer, norm, scale or softcap that pruning loses; a wrong layer kept."""
    made = drafter("small", family, layers=[0, 1, 2, 3])
    assert_small_is(made, tiny.hf_model(family).double())


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])  # tied, untied
@pytest.mark.parametrize("embeddings", ["own", "shared"])
def test_small_embeddings(embeddings: str, family: str, tmp_path: Path) -> None:
    """Faults: training that moves the target's embedding, or copies that are not stored."""
    made = drafter("small", family, embeddings=embeddings)
    of = made.target
    before = {n: p.clone() for n, p in of.named_parameters()}
    assert not any(p.requires_grad for p in of.parameters())
    check_views(jolt(made))
    check = {n: p for n, p in of.named_parameters() if not p.equal(before[n])}
    assert not check and not any(p.requires_grad for p in of.parameters())
    names = load_file(stored(made, tmp_path) / "model.safetensors").keys()
    kept = [n for n in names if "embed_tokens" in n or "lm_head" in n]
    assert len(kept) == {"shared": 0, "own": 1 if family == "Llama" else 2}[embeddings]
    assert distance(law_table(storage.load(tmp_path, of)), law_table(made)) == 0
