"""What several servers' forms are made of: weights in a dtype, a Llama body, EAGLE's layouts,
draft models' folders.

EAGLE-3's original layout (github.com/SafeAILab/EAGLE, eagle/model/cnets.py) is what vLLM, SGLang,
TensorRT-LLM and llama.cpp's converter all read; they differ in how they name tapped layers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from draftsmith.drafters import storage
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle1 import Eagle1
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export.server import D, Method, Serving
from draftsmith.drafters.parts.layers import BlockConfig
from draftsmith.drafters.small import Small
from draftsmith.drafters.target.causal_lm import Tap
from draftsmith.drafters.target.shell import Shell

Form = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, and what model.safetensors holds
Head = Eagle | Eagle1 | DFlash


def head(form: Callable[[D, Serving], Form]) -> Callable[[D, Path, Serving], None]:
    """A writer of a head's folder, its weights in the dtype of the export."""

    def write(drafter: D, folder: Path, serving: Serving) -> None:
        config, tensors = form(drafter, serving)
        config["torch_dtype"] = str(serving.dtype).removeprefix("torch.")
        for name, tensor in tensors.items():  # integers and flags keep their types
            if tensor.is_floating_point():
                tensors[name] = tensor.to(serving.dtype)
        storage.write(folder, config, tensors)

    return write


def llama_body(drafter: Head, length: int, layers: int = 1) -> dict[str, Any]:
    """A Llama config of some layers: the block's own rope, and positions up to the longest text.

    rope_theta stands twice, as transformers 4 and 5 name it.
    """
    block, target = block_of(drafter), drafter.target
    ends = target.eos_ids
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": block.rms_norm_eps,
        "max_position_embeddings": length,
        "rope_theta": block.rope_theta,
        "rope_parameters": {"rope_theta": block.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }


def block_of(drafter: Head) -> BlockConfig:
    assert drafter.config.block is not None  # filled in by the constructor
    return drafter.config.block


# EAGLE-3


def layer_ids(drafter: Head) -> list[int]:
    """The tapped layers, ascending: vLLM sorts them. Our ids: 0 is the embedding's output."""
    return sorted(tap for tap in drafter.taps if isinstance(tap, int))


def check_block(block: BlockConfig, server: str, kind: str = "Llama", **differs: Any) -> None:
    """Raises UserError for what servers' heads, plain Llama layers but for what differs, do not
    have."""
    for key, field in BlockConfig.model_fields.items():
        known = differs.get(key, field.default)
        if not field.is_required() and getattr(block, key) != known:
            plain = json.dumps(known)
            raise UserError(
                f"block.{key}: {server}'s {kind}-type heads have {plain} alone; train with "
                f"{key}: {plain}"
            )


def check_eagle3(drafter: Eagle, server: str, lowest: int = 0) -> None:
    """Raises UserError for a layer that is no plain Llama's, and as `check_taps`."""
    check_block(block_of(drafter), server)
    check_taps(drafter.taps, drafter.target, server, lowest)


def check_taps(taps: Sequence[Tap], target: Shell, server: str, lowest: int = 0) -> None:
    """Raises UserError for taps that no server can give: the final norm's output, and the last
    layer's, as servers record what a layer reads. lowest: the first id that the server can name."""
    last = target.num_layers - 1
    if "normed" in taps:
        raise UserError(f"taps: {server} gives no state after the final norm; train on layer ids")
    ids = sorted(tap for tap in taps if isinstance(tap, int))
    if ids[0] < lowest or ids[-1] > last:
        raise UserError(
            f"taps: {server} gives layers {lowest}..{last} of this target, not {ids}; train on "
            "taps among them"
        )


def check_embeddings(target: Shell, server: str, remedy: str) -> None:
    """Raises UserError for a target that scales its embeddings, where the server shares the bare
    table with the head."""
    if scales_embeddings(target):
        raise UserError(
            f"target: {type(target.hf).__name__} scales its embeddings, and {server} gives a head "
            f"the bare table; {remedy}"
        )


def eagle3_flags(drafter: Eagle) -> dict[str, Any]:
    """What decides how an EAGLE-3 layer is computed; servers' defaults for these differ."""
    config = drafter.config
    return {
        "draft_vocab_size": drafter.vocab.draft_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": drafter.target.hidden_size,
        "num_aux_hidden_states": len(drafter.taps),
    }


def eagle3_config(drafter: Eagle, length: int) -> dict[str, Any]:
    """The original layout's config.json, tapped layers by our own ids."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_body(drafter, length),
        **eagle3_flags(drafter),
        "eagle_aux_hidden_state_layer_ids": layer_ids(drafter),
    }


def eagle3_tensors(drafter: Eagle, layer: str) -> dict[str, Tensor]:
    """Its tensors, those of the decoder layer under the prefix `layer`; what belongs to one tap in
    the order of the ascending layers.

    lm_head is written even where it is the target's own. Embeddings are the target's and left out,
    unless the target scales them (Gemma): servers share the bare table.
    """
    out: dict[str, Tensor] = {
        "fc.weight": by_layer(drafter.taps, drafter.fc.weight),
        "norm.weight": drafter.norm.weight,
    }
    if drafter.input_norm is not None:
        out["input_norm.weight"] = by_layer(drafter.taps, drafter.input_norm.weight)
    if drafter.config.fc_norm:
        for place, i in enumerate(ascending(drafter.taps)):
            out[f"fc_norm.{place}.weight"] = drafter.fc_norm.get_parameter(f"{i}.weight")
    for name in ("input_layernorm", "hidden_norm"):
        out[f"{layer}.{name}.weight"] = drafter.get_parameter(f"{name}.weight")
    out |= layer_tensors(drafter, layer) | head_tensors(drafter)
    if scales_embeddings(drafter.target):
        out["embed_tokens.weight"] = embedded(drafter.target)
    return out


def ascending(taps: Sequence[Tap]) -> list[int]:
    """Places of taps, from the lowest layer on."""
    return sorted(range(len(taps)), key=lambda i: int(taps[i]))


def by_layer(taps: Sequence[Tap], weight: Tensor) -> Tensor:
    """A weight whose last dimension is all taps side by side, with them in ascending order."""
    parts = weight.chunk(len(taps), dim=-1)
    return torch.cat([parts[i] for i in ascending(taps)], dim=-1)


def head_tensors(drafter: Eagle | DFlash) -> dict[str, Tensor]:
    """lm_head, written even where it is the target's own, and the draft vocabulary."""
    head, vocab = drafter.lm_head, drafter.vocab
    out = {"lm_head.weight": drafter.target_rows() if head is None else head.weight}
    if vocab.ids is not None:
        out["d2t"] = vocab.offsets()
        out["t2d"] = torch.zeros(vocab.size, dtype=torch.bool)
        out["t2d"][vocab.ids] = True
    return out


def layer_tensors(drafter: Eagle | Eagle1, layer: str) -> dict[str, Tensor]:
    """What all decoder layers have, under the prefix `layer`."""
    names = ["post_attention_layernorm"]
    names += [f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
    names += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    return {f"{layer}.{n}.weight": drafter.get_parameter(f"{n}.weight") for n in names}


# EAGLE-1 (github.com/SafeAILab/EAGLE, eagle/model/cnets1.py)


def eagle1_tensors(drafter: Eagle1) -> dict[str, Tensor]:
    """No input norm, no final norm, no lm_head; the embedding is written, as published heads have
    it, though servers take the target's."""
    out: dict[str, Tensor] = {
        "fc.weight": drafter.fc.weight,
        "embed_tokens.weight": embedded(drafter.target),
    }
    return out | layer_tensors(drafter, "layers.0")


def scales_embeddings(target: Shell) -> bool:
    """Whether what the layers read is not simply a row of the embedding's table."""
    some = torch.arange(min(8, target.vocab_size), device=target.device)
    return not torch.equal(target.embedding(some), target.embedding.weight[some])


def embedded(target: Shell) -> Tensor:
    """What the target's layers read for every token (V, H)."""
    return target.embedding(torch.arange(target.vocab_size, device=target.device))


# Draft models: ordinary folders of config, weights and the target's tokenizer


def draft_model(method: str, server: str, drawn: bool = False) -> Method[Small]:
    """How a server takes draft models as ordinary folders."""

    def check(drafter: Small, serving: Serving) -> None:
        check_draft_model(drafter, server)

    return Method(method, check, write_draft_model, lambda drafter: drawn)


def check_draft_model(drafter: Small, server: str) -> None:
    """Raises UserError where the two vocabularies differ: servers share token ids unseen."""
    own, theirs = drafter.lm.vocab_size, drafter.target.vocab_size
    if own != theirs:
        raise UserError(
            f"small: {server} takes a draft model of the target's {theirs} tokens only, this one "
            f"has {own}; prune the target itself (layers: ..), or decode with draftsmith"
        )


def write_draft_model(drafter: Small, folder: Path, serving: Serving) -> None:
    """Writes the folder that `from_pretrained` reads.

    Positions are the model's own, not `serving.length`, which the command gives: some types of
    rope compute frequencies from them, and a table of positions has that many rows.
    """
    plain_copy(drafter, serving.dtype).save_pretrained(folder)
    drafter.target.tokenizer.save_pretrained(folder)


def plain_copy(drafter: Small, dtype: torch.dtype) -> Any:
    """The draft model on the CPU: a copy, without our attention."""
    config = copy.deepcopy(drafter.lm.hf.config)
    config._attn_implementation = "sdpa"
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    hf.load_state_dict(drafter.lm.hf.state_dict())
    hf.generation_config = copy.deepcopy(drafter.target.hf.generation_config)
    return hf.eval()
