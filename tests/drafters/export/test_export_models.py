"""Draft models of many shapes to llama.cpp: read back equal, or refused by the name of what a GGUF
cannot hold.

.venv/bin/pytest tests/drafters/export/test_export_models.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reference_export as rules
import tiny
from draftsmith.drafters import base, export, foreign
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving
from draftsmith.drafters.small import Small
from exports import TEXT, K, logits, target_gguf
from targets import LONGROPE, build_as

BIASES = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def pruned(family: str, **more: Any) -> Small:
    """The target's first and last layer, every weight its own, biases too."""
    target, cls = build_as(family, **more), base.family("small")
    made = cls.create(target, cls.Config(layers=[0, 3], embeddings="own")).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert isinstance(made, Small)
    return made


def to_gguf(made: Small, folder: Path, length: int = 128) -> Path:
    place = folder / "out"
    place.mkdir()
    path = target_gguf(made.target, folder / "target.gguf")  # type: ignore[arg-type]
    export.write("llama.cpp", made, place, Serving("TARGET", K, length, target_gguf=path))
    return place


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2, wide heads": ("Qwen2", {"head_dim": 16}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama, biases": ("Llama", BIASES),
    "llama, biases of attention": ("Llama", {"attention_bias": True, "tie_word_embeddings": False}),
    "llama, biases of MLPs": ("Llama", {"mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 16}),
    "llama, one kv head": ("Llama", {"num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, a window that no text outgrows": ("Mistral", {"sliding_window": 128}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_is_the_draft_model(name: str, tmp_path: Path) -> None:
    """Read back equal; for Llama's layers by llama.cpp's rules too, in float64."""
    family, more = MODELS[name]
    made = pruned(family, **more)
    place = to_gguf(made, tmp_path)
    ours, again = logits(made), logits(foreign.load(place, made.target))
    for where, row in ours.items():
        torch.testing.assert_close(again[where], row, atol=1e-4, rtol=0)
    if family == "Llama":
        for anchor, depth in ((0, 0), (4, 1), (3, 2)):
            row, _ = rules.small_llama(place, None, TEXT, anchor, depth)
            torch.testing.assert_close(ours[anchor, depth].double(), row, atol=2e-4, rtol=0)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("Mistral", {}, r"sliding_window: 8, and .* mistral holds none.*--length 8\)"),
    "windows of some layers": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "sliding_window: 8, and .* qwen3 holds none",
    ),
    "biases of qwen3": ("Qwen3", {"attention_bias": True}, "attention_bias true"),
    "activation": ("Llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "type linear"),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}, "rope type llama3"),
    "yarn": ("Qwen3", {"rope_parameters": YARN}, "rope type yarn"),
    "longrope": ("Llama", {"rope_parameters": LONGROPE}, "rope type longrope"),
    "phi3": ("Phi3", {}, "model type phi3"),
    "gemma": ("Gemma3 mixed", {}, "model type gemma3_text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gguf_cannot_hold_is_named(name: str, tmp_path: Path) -> None:
    """Fault: a file without the window, whose logits are another model's beyond it."""
    family, more, words = REFUSED[name]
    rope = more.get("rope_parameters")
    if rope:
        more = more | {"rope_parameters": {"rope_theta": 10000.0} | rope}
    with pytest.raises(UserError, match=words) as caught:
        to_gguf(pruned(family, **more), tmp_path, length=64)
    assert "--to transformers" in str(caught.value)


def test_windows_of_a_model() -> None:
    """Those that some layer has, ascending."""
    known = {"Llama": [], "Mistral": [8], "Gemma2": [8], "Gemma3 mixed": [8], "Llama4": [8]}
    for family, windows in known.items():
        assert tiny.target(family).windows == windows, family
    assert build_as("Mistral", sliding_window=None).windows == []
    whole = {"layer_types": ["full_attention"] * tiny.LAYERS}
    assert build_as("Gemma3", **whole).windows == []
