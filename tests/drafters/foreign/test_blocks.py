"""Block drafters in their authors' own layouts, and the slot rule that no tensor shows.

A folder is written here by the rules of z-lab's and DeepSpec's repositories, as SGLang and vLLM
read them, from a drafter whose laws are known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.drafters import foreign
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from exports import K, drafter, logits, written

SHAPE = {"taps": [1, 3], "layers": 2, "mask_token": 6}


def author(made: Any, folder: Path, **changes: Any) -> Path:
    """The folder of z-lab's DFlash (mask and layers in dflash_config), or DeepSpec's DSpark (at the
    top level); neither has an embedding or an lm_head."""
    block, spark = made.config.block, made.family == "dspark"
    ids = {"mask_token_id": 6, "target_layer_ids": [0, 2]}  # outputs of layers, from 0
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel" if spark else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": made.target.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope_theta,
        "layer_types": ["full_attention"] * 2,
        "block_size": made.config.block_size,
        **(ids | {"markov_rank": 5} if spark else {"dflash_config": ids}),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = {n: t.clone() for n, t in made.weights().items() if not n.startswith("confidence")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def block_drafter(name: str, **more: Any) -> Drafter:
    own = {"dflash": {"block_size": K + 1}, "dspark": {"block_size": K, "markov_rank": 5}}[name]
    return drafter(name, "Qwen3", **SHAPE, **own, **more)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_authors_layouts(name: str, tmp_path: Path) -> None:
    """Faults: layers counted from 0 taken for ours, the other slot rule, a mask of another id."""
    made = block_drafter(name)
    again = foreign.load(author(made, tmp_path / "out"), made.target)
    ours, theirs = logits(made), logits(again)
    assert ours.keys() == theirs.keys() and type(again) is type(made)
    for where, row in ours.items():
        torch.testing.assert_close(theirs[where], row, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("dflash", {"sample_from_anchor": True}, "is true: depth 0 .* first slot, .* dflash has"),
        ("dspark", {"sample_from_anchor": False}, "is false: depth 0 .* second slot, .* dspark"),
        ("dflash", {"layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention"),
        ("dflash", {"block_size": 1}, "block_size: .* 2; correct its config"),
        ("dflash", {"vocab_size": 47}, "vocab_size is 47, the target .* has 48"),
        ("dspark", {"markov_rank": 4}, "tensor markov_head.markov_w1.weight has shape"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    made = block_drafter(name)
    with pytest.raises(UserError, match=words) as error:
        foreign.load(author(made, tmp_path / "out", **changes), made.target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_speculators_slot_rule(name: str, tmp_path: Path) -> None:
    """Missing, it is DFlash's: DSpark's folder must say it."""
    made = block_drafter(name)
    place = written("vllm", made, tmp_path)
    config = json.loads((place / "config.json").read_text())
    assert config.pop("sample_from_anchor") == (name == "dspark")
    (place / "config.json").write_text(json.dumps(config))
    if name == "dflash":
        assert logits(foreign.load(place, made.target)).keys() == logits(made).keys()
    else:
        with pytest.raises(UserError, match="sample_from_anchor is false"):
            foreign.load(place, made.target)
