"""What a GGUF's header says beside what transformers reads: against the model that it was made of.

.venv/bin/pytest tests/drafters/target/test_gguf_keys.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from ggufs import tiny_model, write_gguf

TOKENS = torch.arange(3, 60).unsqueeze(0)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def divisors(dims: int = 8, low: float = 1.0, original: int = 8192) -> torch.Tensor:
    """rope_freqs as llama.cpp's converter writes them for LLAMA3."""
    out = []
    for i in range(0, dims, 2):
        wave = 2 * math.pi * 10000.0 ** (i / dims)
        if wave < original / 4:
            out.append(1.0)
        elif wave > original / low:
            out.append(8.0)
        else:
            smooth = (original / wave - low) / (4 - low)
            out.append(1 / ((1 - smooth) / 8 + smooth))
    return torch.tensor(out)


def load(path: Path, patch: pytest.MonkeyPatch) -> Target:
    patch.setenv("DRAFTSMITH_CACHE", str(path.parent / "cache"))
    return Target.load(str(path))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS, use_cache=False).logits


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        {"rope_parameters": LLAMA3, "head_dim": 16},
        {"tensors": {"rope_freqs.weight": divisors(16)}, "llama__attention__key_length": 16},
    ),
    "linear": (
        {"rope_parameters": LINEAR},
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
    ),
    "linear, as older files have it": (
        {"rope_parameters": LINEAR}, {"llama__rope__scale_linear": 4.0},
    ),
    "yarn": (
        {"rope_parameters": YARN},
        {
            "llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
            "llama__rope__scaling__original_context_length": 16,
        },
    ),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {}),
    "biases of attention": ({"attention_bias": True}, {}),
    "wide heads": ({"head_dim": 16}, {"llama__attention__key_length": 16}),
    "a window that no text outgrows": ({}, {"llama__attention__sliding_window": 64}),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_a_gguf_is_the_model_it_was_made_of(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: rope's scaling, biases or head size passed over: other logits, without a word."""
    settings, fields = CASES[what]
    model = tiny_model(**settings)
    target = load(write_gguf(tmp_path / "tiny.gguf", model, **fields), monkeypatch)
    target.hf.set_attn_implementation("eager")
    assert torch.allclose(logits(target.hf), logits(model), atol=1e-4)
    if {"rope_parameters", "attention_bias"} & settings.keys():  # they matter
        plain = tiny_model(head_dim=model.config.head_dim)
        plain.load_state_dict(model.state_dict(), strict=False)
        assert not torch.allclose(logits(plain), logits(model), atol=1e-2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window": (
        {"llama__attention__sliding_window": 16},
        "llama.attention.sliding_window 16 is not read by transformers; use the model's",
    ),
    "longrope": (
        {"tensors": {f"rope_factors_{k}.weight": torch.ones(4) for k in ("long", "short")}},
        "rope_factors_long .* longrope",
    ),
    "type": ({"llama__rope__scaling__type": "su"}, "llama.rope.scaling.type .* type su"),
    "yarn's strength": (
        {
            "llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
            "llama__rope__scaling__yarn_ext_factor": 0.5,
        },
        "rope.scaling.yarn_ext_factor",
    ),
    "other factors": (
        {"tensors": {"rope_freqs.weight": torch.tensor([1.0, 3.0, 8.0, 2.0])}},
        "rope_freqs.weight are not those of Llama 3's rope",
    ),
    "partial rotary": ({"llama__rope__dimension_count": 4}, "rope.dimension_count 4 of 8"),
    "left over": (
        {"tensors": {"blk.0.ffn_gate_inp.weight": torch.ones(4, 32)}},
        r"reads .* \(blk.0.ffn_gate_inp.weight is left over\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_transformers_does_not_read_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, words = REFUSED[what]
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), **fields)
    with pytest.raises(UserError, match=words) as caught:
        load(path, monkeypatch)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
