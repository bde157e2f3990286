"""MTP modules from a target's own checkpoint: tiny folders in each kind of names, written by hand.

What is read equals what was written, and drafts by the laws that the independent reference takes
from it.

    .venv/bin/pytest tests/drafters/parts/test_mtp_weights.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor

import contracts as contract
import reference
import reference_mtp
import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.mtp import Mtp, MtpConfig
from draftsmith.drafters.target.source import Source
from draftsmith.drafters.target.target import Target

H, INNER, KV = 32, 40, 16
LAYER = {
    "input_layernorm": (H,),
    "post_attention_layernorm": (H,),
    "self_attn.q_proj": (H, H),
    "self_attn.k_proj": (KV, H),
    "self_attn.v_proj": (KV, H),
    "self_attn.o_proj": (H, H),
    "mlp.gate_proj": (INNER, H),
    "mlp.up_proj": (INNER, H),
    "mlp.down_proj": (H, INNER),
}
JOINT = {"enorm": (H,), "hnorm": (H,), "eh_proj": (H, 2 * H), "norm": (H,)}
Tensors = dict[str, Tensor]


def module(
    bias: bool = False, qk_norm: bool = False, gated: bool = False, seed: int = 0
) -> Tensors:
    """A module under our names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{n}.weight": s for n, s in (LAYER | JOINT).items()}
    if bias:
        shapes |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", H), ("k", KV), ("v", KV))}
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
    if gated:
        shapes |= {"self_attn.g_proj.weight": (H, H)}
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        out[name] = 1 + 0.2 * noise if "norm" in name else 0.35 * noise
    return out


def mimo(made: Tensors, i: int = 0) -> Tensors:
    """model.mtp_layers.I: the state's half of input_proj first."""
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "norm": "final_layernorm"}
    embedding, state = made["eh_proj.weight"].split(H, dim=1)
    out = {"input_proj.weight": torch.cat([state, embedding], dim=1)}
    for name, tensor in made.items():
        part, _, kind = name.rpartition(".")
        if part != "eh_proj":
            out[f"{names.get(part, part)}.{kind}"] = tensor
    return {f"model.mtp_layers.{i}.{n}": t for n, t in out.items()}


def qwen(made: Tensors, offset: float = 0.0) -> Tensors:
    """mtp.*; norms that multiply by 1 + weight store one less; of each of the four heads first the
    queries, then the gate."""
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
    made, gate = dict(made), made.get("self_attn.g_proj.weight")
    if gate is not None:
        queries, gates = made["self_attn.q_proj.weight"].split(8), gate.split(8)
        both = [torch.cat(pair) for pair in zip(queries, gates, strict=True)]
        made["self_attn.q_proj.weight"] = torch.cat(both)
        del made["self_attn.g_proj.weight"]
    out = {}
    for name, tensor in made.items():
        part, _, kind = name.rpartition(".")
        stored = {**names, "eh_proj": "fc"}.get(part, f"layers.0.{part}")
        out[f"mtp.{stored}.{kind}"] = tensor - offset if "norm" in part else tensor
    return out


def deepseek(made: Tensors, i: int = 0) -> Tensors:
    """model.layers.L+I, with copies of the embedding and head, which are the target's."""
    lead = f"model.layers.{tiny.LAYERS + i}."
    out = {
        lead + ("shared_head.norm.weight" if n == "norm.weight" else n): t for n, t in made.items()
    }
    copies = {"embed_tokens.weight", "shared_head.head.weight"}
    return out | {lead + name: torch.zeros(tiny.VOCAB, H) for name in copies}


def checkpoint(folder: Path, family: str, extra: Tensors, **config: Any) -> Target:
    """A tiny target whose file also holds `extra`, loaded from disk."""
    tiny.hf_model(family).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    kept = {n: t.contiguous() for n, t in (load_file(path) | extra).items()}
    save_file(kept, path, metadata={"format": "pt"})
    about = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(about))
    return Target.load(str(folder))


PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SCALED = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
# target, tensors, how they are stored, zero_first, config
Case = tuple[str, Tensors, Callable[[Tensors], Tensors], bool, dict[str, Any]]
CASES: dict[str, Case] = {
    "MiMo": ("Qwen2", module(bias=True), mimo, True, {}),
    "Qwen": ("Qwen3", module(qk_norm=True), qwen, False, {}),
    "Qwen, 1 + weight": ("Gemma3", module(), lambda made: qwen(made, 1.0), False, {}),
    "Qwen3.5": (
        "Llama", module(qk_norm=True, gated=True), qwen, False, {"rope_parameters": PARTIAL}
    ),
    "DeepSeek": ("Llama", module(), deepseek, False, {}),
    "GLM": ("Qwen3", module(bias=True, qk_norm=True), deepseek, False, {}),
}  # fmt: skip


def check(name: str, folder: Path) -> None:
    """Tensors as they were written, and the laws that they make."""
    family, truth, stored, zero_first, about = CASES[name]
    target = checkpoint(folder, family, stored(truth), **about)
    made = Mtp.create(target, MtpConfig(init="target")).eval()
    own = made.weights()
    assert own.keys() == {f"layers.0.{n}" for n in truth}
    for n, tensor in truth.items():
        torch.testing.assert_close(own[f"layers.0.{n}"], tensor, atol=1e-6, rtol=0)
    assert made.config.zero_first == zero_first
    assert made.config.block is not None and made.config.block.intermediate_size == INNER
    laws = contract.cells(made, contract.read(target, contract.prompts(1), made.taps), 2)
    hf, text = tiny.hf_model(family).double(), contract.prompts(1)[0]
    config = {"modules": 1, "zero_first": zero_first, "block": made.config.block.model_dump()}
    weights = {f"layers.0.{n}": tensor for n, tensor in truth.items()}
    for a, j in ((0, 0), (3, 0), (3, 1)):
        law = reference.head_law(reference_mtp.mtp_logits, weights, config, hf, text, a, j)
        torch.testing.assert_close(laws[0, a, j].double(), law, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_shipped_modules_are_read(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("MiMo", lambda t: {**t, "eh_proj.weight": t["eh_proj.weight"].roll(H, dims=1)}),
        (
            "DeepSeek",
            lambda t: {**t, "enorm.weight": t["hnorm.weight"], "hnorm.weight": t["enorm.weight"]},
        ),
        ("Qwen, 1 + weight", lambda t: {**t, "norm.weight": t["norm.weight"] + 1}),
    ],
)
def test_other_names_are_noticed(
    name: str, change: Callable[[Tensors], Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: halves in the other order, norms swapped, 1 + weight forgotten."""
    family, truth, stored, *rest = CASES[name]
    wrong = family, truth, lambda made: stored(change(made)), *rest
    monkeypatch.setitem(CASES, name, wrong)
    with pytest.raises(AssertionError):
        check(name, tmp_path)


def test_several_modules(tmp_path: Path) -> None:
    """Each depth its own; fewer may be taken than are there, not more."""
    both = [module(seed=i) for i in range(2)]
    extra = deepseek(both[0]) | deepseek(both[1], 1)
    target = checkpoint(tmp_path, "Llama", extra)
    made = Mtp.create(target, MtpConfig(init="target", modules=2))
    for i, truth in enumerate(both):
        assert made.weights()[f"layers.{i}.eh_proj.weight"].equal(truth["eh_proj.weight"])
    assert made.longest == 2
    with pytest.raises(UserError, match=r"modules: 3, but .* ships 2 MTP module\(s\); lower it"):
        Mtp.create(target, MtpConfig(init="target", modules=3))


def test_the_targets_own_revision_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: weights of another commit than the target's; a trace where they are not here."""
    asked = {}

    def found(path: str, **how: Any) -> str:
        asked.update(how)
        return str(tmp_path)

    source = Source("org/name", "org/name", "0123456789" * 4, "hub")
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", found)
        source.tensor_files("init")
    assert asked == {"revision": source.revision, "local_files_only": True}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="init: the files of org/name at revision 012345678901 are"):
        source.tensor_files("init")


def without(name: str) -> Tensors:
    return {n: t for n, t in deepseek(module()).items() if not n.endswith(name)}


LEAD = f"model.layers.{tiny.LAYERS}."
LARGER = {**module(), "self_attn.q_proj.weight": torch.zeros(3 * H, H)}


@pytest.mark.parametrize(
    ("extra", "config", "words"),
    [
        ({}, {}, r"ships no MTP weights \(model.mtp_layers.4.\*, mtp.\*, model.layers.4.\*\)"),
        (
            {**without("up_proj.weight"), LEAD + "mlp.experts.0.up_proj.weight": torch.zeros(2, 2)},
            {},
            "is a mixture of experts",
        ),
        (
            {**without("k_proj.weight"), LEAD + "self_attn.kv_a_proj.weight": torch.zeros(2, 2)},
            {},
            r"has latent attention \(MLA\)",
        ),
        (
            {**deepseek(module()), LEAD + "mlp.up_proj.weight_scale_inv": torch.zeros(1)},
            {},
            "is quantised",
        ),
        ({**deepseek(module()), LEAD + "self_attn.sinks": torch.zeros(4)}, {}, "is no dense block"),
        (without("hnorm.weight"), {}, "lacks hnorm.weight"),
        (qwen(LARGER), {}, "has 96 rows of queries where the target has 32"),
        (deepseek(module()), {"rope_parameters": SCALED}, "has linear RoPE"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_modules_that_no_block_here_can_hold(
    extra: Tensors, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """One line, before any weights are read."""
    target = checkpoint(tmp_path, "Llama", extra, **config)
    with pytest.raises(UserError, match=words) as error:
        Mtp.create(target, MtpConfig(init="target"))
    assert "\n" not in str(error.value) and "use init: fresh" in str(error.value)
