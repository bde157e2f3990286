"""Checkpoints and models that are not each other's.

.venv/bin/pytest tests/drafters/target/test_whole.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.target import Target

Tensors = dict[str, torch.Tensor]


def folder_of(place: Path, family: str = "Qwen3", **config: Any) -> Path:
    tiny.hf_model(family).save_pretrained(place)
    tiny.tokenizer().save_pretrained(place)
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return place


def change(place: Path, by: Callable[[Tensors], Any]) -> None:
    tensors = load_file(place / "model.safetensors")
    by(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def without(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


def beside(name: str, rows: int = 1) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(rows)})


MLP = "model.layers.1.mlp.{}_proj.weight"


@pytest.mark.parametrize(
    ("by", "named", "shell"),
    [
        (without("lm_head.weight"), "lm_head.weight is missing", True),
        (without("model.norm.weight"), "model.norm.weight is missing", True),
        (without("model.embed_tokens.weight"), "model.embed_tokens.weight is missing", True),
        (without(*map(MLP.format, ("up", "gate", "down"))), MLP.format("down"), False),
        (beside("model.layers.0.self_attn.q_proj.weight_scale"), "q_proj.weight_scale", False),
        (beside("model.layers.0.self_attn.q_proj.bias", 32), "q_proj.bias", False),
        (beside("model.layers.1.mlp.up_proj.lora_A.weight"), "lora_A.weight", False),
        (beside("medusa_head.0.0.linear.weight"), "medusa_head.0.0.linear.weight", True),
        (beside("score.weight"), "score.weight", True),
        (beside("lm_head.weight_scale"), "lm_head.weight_scale", True),
    ],
)
def test_a_tensor_too_few_or_too_many_is_named(
    by: Callable[[Tensors], Any], named: str, shell: bool, tmp_path: Path
) -> None:
    """Faults: what is missing is drawn at random; scales, biases, heads are left out."""
    change(folder_of(tmp_path), by)
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        Target.load(str(tmp_path))
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        Small.create(tiny.target(), SmallConfig(checkpoint=str(tmp_path)))
    if shell:
        with pytest.raises(UserError, match=named.replace(".", r"\.")):
            Shell.load(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        f"model.layers.{tiny.LAYERS}.eh_proj.weight",  # behind the last: it predicts further tokens
        "mtp.layers.0.input_layernorm.weight",
        "vision_tower.encoder.weight",
        "model.visual.blocks.0.attn.qkv.weight",
    ],
)
def test_what_a_causal_model_does_without_may_stand_there(name: str, tmp_path: Path) -> None:
    """Fault: checkpoints as their makers publish them are refused."""
    before = Target.load(str(folder_of(tmp_path)))
    change(tmp_path, beside(name))
    after = Target.load(str(tmp_path)).hf.state_dict()
    for own, tensor in before.hf.state_dict().items():
        assert torch.equal(after[own], tensor), own


@pytest.mark.parametrize("load", [Target.load, Shell.load])
def test_quantised_weights_are_read_with_their_scales_or_not_at_all(
    load: Any, tmp_path: Path
) -> None:
    """Faults: float8 read as it stands, by a config, by a file beside it, by nothing at all."""
    place = folder_of(tmp_path / "a", quantization_config={"quant_method": "modelopt"})
    with pytest.raises(UserError, match="quantised by modelopt"):
        load(str(place))
    place = folder_of(tmp_path / "b")
    (place / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UserError, match=r"hf_quant_config\.json"):
        load(str(place))
    (place / "hf_quant_config.json").unlink()
    change(
        place, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)})
    )
    with pytest.raises(UserError, match=r"lm_head\.weight is stored as F8_E4M3"):
        load(str(place))


def test_two_that_a_config_ties_must_be_equal(tmp_path: Path) -> None:
    """Fault: here the file's head is used, on a server the embeddings."""
    place = folder_of(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match="tie_word_embeddings"):
        Target.load(str(place))
    change(place, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    of = Target.load(str(place))
    assert torch.equal(of.lm_head.weight, of.embedding.weight)
    change(place, without("lm_head.weight"))
    assert torch.equal(Target.load(str(place)).lm_head.weight, of.lm_head.weight)


def test_an_adapters_folder_is_no_model(tmp_path: Path) -> None:
    (folder_of(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter"):
        Target.load(str(tmp_path))


@pytest.mark.parametrize(
    ("rope", "positions", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 64, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 64, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64, 64),
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            256,
            256,
        ),
    ],
)
def test_how_long_a_text_may_be(rope: dict[str, Any], positions: int, longest: int) -> None:
    """Reference: what each type's own paper or server says of it."""
    hf = tiny.hf_model(
        max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0} | rope
    )
    assert CausalLM(hf).max_positions == longest
