"""llama.cpp: EAGLE-3 and draft models as one GGUF file, written with the `gguf` package alone.

Keys, tensor names and row order follow llama.cpp b11434: conversion/llama.py, conversion/qwen.py,
gguf-py/gguf/constants.py, src/models/eagle3.cpp (`gguf` itself may be older and not know eagle3).
Llama and EAGLE-3 rotate neighbouring pairs there, so their q and k rows are interleaved; d2t holds
absolute ids. The tokenizer's keys are copied from the GGUF of the target that is served: which
pre-tokenizer a model has stands in no other file.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.errors import UserError, reason
from draftsmith.drafters.export import layouts
from draftsmith.drafters.export.server import D, Draft, Method, Server, Serving
from draftsmith.drafters.small import Small

NAME, VERSION = "llama.cpp", "b11434"
FILE = "draft.gguf"
_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
# model_type in transformers -> (architecture, whether its q and k rows are interleaved)
_DRAFT_MODELS = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
}


def _check_eagle3(drafter: Eagle, serving: Serving) -> None:
    layouts.check_eagle3(drafter, NAME)
    if len(drafter.taps) != 3:
        raise UserError(
            f"taps: {NAME} takes exactly 3 layers, this head reads {len(drafter.taps)}; "
            "export it --to vllm, or train on three"
        )
    for key in ("fc_norm", "norm_output"):
        if getattr(drafter.config, key):
            raise UserError(
                f"{key}: {NAME} {VERSION} has it not; export it --to vllm, or train with "
                f"{key}: false"
            )
    _check_tokenizer(drafter, serving)


def _check_draft_model(drafter: Small, serving: Serving) -> None:
    layouts.check_draft_model(drafter, NAME)
    config = drafter.lm.config
    rope = getattr(config, "rope_parameters", None) or {}
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor") or 1.0
    act = getattr(config, "hidden_act", "silu")
    facts = {
        f"model type {config.model_type}": config.model_type not in _DRAFT_MODELS,
        f"rope type {kind}": kind != "default",
        f"partial_rotary_factor {share:g}": share != 1,
        f"hidden_act {act}": act != "silu",
        # llama.cpp's Qwen-3 has no place for them.
        "attention_bias true": config.model_type == "qwen3" and config.attention_bias,
    }
    for unknown in (fact for fact, true in facts.items() if true):
        raise UserError(
            f"small: no GGUF of {unknown} is written here; export it --to transformers, and "
            "convert that folder with llama.cpp's convert_hf_to_gguf.py"
        )
    for window in drafter.lm.windows[:1]:
        if window < serving.length:
            raise UserError(
                f"sliding_window: {window}, and a GGUF of {config.model_type} holds none: serve "
                f"texts of at most that (--length {window}), or export it --to transformers"
            )
    _check_tokenizer(drafter, serving)


def _check_tokenizer(drafter: Drafter, serving: Serving) -> None:
    """Raises UserError unless target_gguf holds this target's tokens, id by id."""
    if serving.target_gguf is None:
        raise UserError(
            "--target-gguf: llama.cpp reads the tokenizer from the draft's file; give the GGUF of "
            "the target that you serve (made by llama.cpp's convert_hf_to_gguf.py)"
        )
    path = serving.target_gguf
    try:
        fields = gguf.GGUFReader(str(path)).fields
    except (OSError, ValueError, IndexError, KeyError) as error:
        text = f"{path}: cannot be read as GGUF ({reason(error)}); give another"
        raise UserError(text) from None
    names = [f"tokenizer.ggml.{key}" for key in ("tokens", "token_type")]
    if any(name not in fields for name in names):
        raise UserError(f"{path}: holds no tokenizer; give the GGUF of the target itself")
    tokens, types = (fields[name].contents() for name in names)
    target = drafter.target
    if len(tokens) != target.vocab_size:
        raise UserError(
            f"{path}: has {len(tokens)} tokens, the target {target.source.spec} has "
            f"{target.vocab_size}; give the GGUF of that target"
        )
    # Other kinds (control, user-defined, unused) are respelt by the converter.
    for token, index in target.tokenizer.get_vocab().items():
        if index >= len(types):
            raise UserError(
                f"{path}: has no token {index}, which the tokenizer of {target.source.spec} has "
                f"({token!r}); export it --to another server"
            )
        if types[index] == gguf.TokenType.NORMAL and tokens[index] != token:
            raise UserError(
                f"{path}: token {index} is {tokens[index]!r}, the target {target.source.spec} "
                f"has {token!r}; give the GGUF of that target"
            )


def _file(
    architecture: Callable[[D], str], fill: Callable[[gguf.GGUFWriter, D, Serving], None]
) -> Callable[[D, Path, Serving], None]:
    """A writer of one GGUF: what `fill` puts in it, and the target's tokenizer."""

    def write(drafter: D, folder: Path, serving: Serving) -> None:
        writer = gguf.GGUFWriter(folder / FILE, architecture(drafter))
        fill(writer, drafter, serving)
        for key, found in gguf.GGUFReader(str(serving.target_gguf)).fields.items():
            if key.startswith("tokenizer.") and len(found.data):
                kind, *inner = found.types
                writer.add_key_value(key, found.contents(), kind, *inner[-1:])
        with closing(writer):  # the first of these opens the file
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()

    return write


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any], dtype: torch.dtype) -> None:
    """The keys that every architecture has, from a config as transformers writes it."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(_TYPES[dtype][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _fill_eagle3(writer: gguf.GGUFWriter, drafter: Eagle, serving: Serving) -> None:
    block = layouts.block_of(drafter)
    _write_shape(writer, layouts.llama_body(drafter, serving.length), serving.dtype)
    writer.add_array("eagle3.target_layers", layouts.layer_ids(drafter))
    writer.add_uint32("eagle3.target_hidden_size", drafter.target.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", drafter.config.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", drafter.config.norm_before_fc)
    own = {
        "fc.weight": "fc.weight",
        "input_norm.weight": "enc.output_norm.weight",
        "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    }
    tensors = layouts.eagle3_tensors(drafter, "layers.0")
    tensors.pop("t2d", None)  # not read
    if tensors.pop("d2t", None) is not None:
        assert drafter.vocab.ids is not None
        writer.add_tensor("d2t", drafter.vocab.ids.cpu().numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, block.head_dim)
        llama = name if name == "lm_head.weight" else f"model.{name}"
        stored = own.get(name) or names.get_name(llama, (".weight",))
        _add(writer, stored, tensor, serving.dtype)


def _architecture(drafter: Small) -> str:
    return gguf.MODEL_ARCH_NAMES[_DRAFT_MODELS[drafter.lm.config.model_type][0]]


def _fill_draft_model(writer: gguf.GGUFWriter, drafter: Small, serving: Serving) -> None:
    arch, interleaved = _DRAFT_MODELS[drafter.lm.config.model_type]
    hf = layouts.plain_copy(drafter, torch.float32)
    config = hf.config.to_dict() | {"max_position_embeddings": serving.length}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    config["head_dim"] = config.get("head_dim") or hidden // heads
    _write_shape(writer, config, serving.dtype)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in hf.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue  # llama.cpp takes the embedding's
        if interleaved and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):  # biases too
            tensor = _interleaved(tensor, config["head_dim"])
        _add(writer, names.get_name(name, (".weight", ".bias")), tensor, serving.dtype)


def _interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows (heads * D, ..) for rotation of neighbours, from rows for rotation of halves."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))  # (heads, 2, D/2, ..)
    return halves.transpose(1, 2).flatten(0, 2)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Vectors stay fp32: llama.cpp multiplies by norms in no other type."""
    data = tensor.detach().float().cpu().contiguous().numpy()
    kind = _TYPES[dtype][0] if data.ndim > 1 else gguf.GGMLQuantizationType.F32
    packed: Any = gguf.quants.quantize(data, kind)
    writer.add_tensor(name, np.ascontiguousarray(packed), raw_dtype=kind)


def words(
    target: str,
    draft: Draft | None,
    length: int,
    program: str = "llama-server",
    flags: Sequence[str] = (),
) -> list[str]:
    """The command that serves a GGUF, for texts of `length` tokens, with a drafter or without. No
    draft is held back for being unlikely (--spec-draft-p-min)."""
    out = [program, "-m", target]
    if draft is not None:
        out += ["-md", str(draft.folder / FILE), "--spec-type", METHODS[draft.family].name]
        out += ["--spec-draft-n-max", str(draft.k), "--spec-draft-p-min", "0"]
    return [*out, "-c", str(length), *flags]


def start(drafter: Drafter, draft: Draft, serving: Serving) -> str:
    return shlex.join(words(str(serving.target_gguf), draft, serving.length))


# Drafts are q's argmax, accepted where the target draws the same token. Draft models (never
# EAGLE-3) can be drawn with --spec-draft-sampling probabilistic, but from q's ten likeliest tokens
# (common/speculative.cpp): no overlap that was trained or measured here.
METHODS: dict[str, Method[Any]] = {
    "eagle": Method("draft-eagle3", _check_eagle3, _file(lambda drafter: "eagle3", _fill_eagle3)),
    "small": Method("draft-simple", _check_draft_model, _file(_architecture, _fill_draft_model)),
}
SERVER = Server(NAME, VERSION, METHODS, start, run=True)
