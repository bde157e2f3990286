"""EAGLE heads: EAGLE-3 as EAGLE, SGLang, TensorRT-LLM and vLLM (speculators) store it, EAGLE-1 as
EAGLE publishes it and SGLang and vLLM read it.

EAGLE-3's layer ids: those at config.json's top level are our own (vLLM, llama.cpp); those inside
`eagle_config` count layers' outputs from 0 (SGLang, TensorRT-LLM, ModelOpt), one less. Without any
all four take 2, L//2, L-3. d2t is an offset: target id = draft id + d2t[draft id].

EAGLE-1 is a Llama config of one layer, fc.weight [H, 2H] (embedding first), embed_tokens.weight,
and a decoder layer without input norm. SGLang's fc has a bias, which here must be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.eagle1 import Eagle1, Eagle1Config
from draftsmith.drafters.errors import UserError, naming
from draftsmith.drafters.foreign.files import Tensors
from draftsmith.drafters.parts.layers import BlockConfig
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.vocab import VocabMap

D = TypeVar("D", bound=Drafter)
# What stands in the decoder layer, and not around it.
_LAYER = ("input_layernorm.", "hidden_norm.", "self_attn.", "post_attention_layernorm.", "mlp.")


def read_eagle3(folder: Path, settings: dict[str, Any], target: Shell) -> Eagle:
    """See `foreign.load`."""
    path = folder / "config.json"
    tensors = Tensors(folder)
    known, ids = eagle_config(path, settings, tensors, target)
    with naming(path):
        drafter = Eagle(target, EagleConfig(**known))
    tensors.take_embeddings(target)
    return filled(drafter, tensors, own_tensors(tensors, drafter), ids)


def filled(drafter: D, tensors: Tensors, stored: dict[str, Tensor], ids: Tensor | None) -> D:
    """The drafter with what was stored, its draft ids among it. Raises UserError for tensors that
    are left over."""
    if ids is not None:
        stored["draft_ids"] = ids
    tensors.done()
    storage.fill(drafter, stored, tensors.path)
    return drafter


def eagle_config(
    path: Path, settings: dict[str, Any], tensors: Tensors, target: Shell, layers: int = 1
) -> tuple[dict[str, Any], Tensor | None]:
    """An EagleConfig's keys of a folder of so many layers, and its draft ids, if it has any; names
    of tensors become those of one layout."""
    speculators = "speculators_model_type" in settings
    shape = settings["transformer_layer_config"] if speculators else settings
    block = llama_block(path, shape, layers)
    flags = settings | settings.get("eagle_config", {})
    if flags.get("eh_proj_before_attn") or flags.get("parallel_draft_step", 1) > 1:
        raise UserError(
            f"{path}: eh_proj_before_attn or parallel_draft_step is set; draftsmith's EAGLE-3 has "
            "neither"
        )
    check_vocabulary(path, shape, target)
    tensors.rename("model.", "")
    tensors.rename("midlayer.", "layers.0.")
    size = settings.get("draft_vocab_size") or target.vocab_size
    ids, whose = vocabulary(tensors, size, target.vocab_size)
    normed = bool(flags.get("fc_norm") or flags.get("use_aux_norm"))
    if normed:
        for old, new in zip(("low", "mid", "high"), "012", strict=True):
            tensors.rename(f"aux_norm_{old}.", f"fc_norm.{new}.")  # SGLang's older names
    return {
        "taps": list(_taps(path, settings, shape, target)),
        "draft_vocab": size,
        "head": whose,
        # The two layouts' defaults in vLLM, llama_eagle3.py and configs/speculators/algos.py.
        "norm_before_residual": settings.get("norm_before_residual", speculators),
        "norm_before_fc": bool(flags.get("norm_before_fc")),
        "fc_norm": normed,
        "norm_output": bool(flags.get("norm_output") or flags.get("return_hidden_post_norm")),
        "block": block,
    }, ids


def check_vocabulary(path: Path, shape: dict[str, Any], target: Shell) -> None:
    """Raises UserError for a head of another target's vocabulary."""
    if shape["vocab_size"] != target.vocab_size:
        raise UserError(
            f"{path}: vocab_size is {shape['vocab_size']}, the target {target.source.spec} has "
            f"{target.vocab_size}; give the target that this head was made for"
        )


def read_eagle1(folder: Path, settings: dict[str, Any], target: Shell) -> Eagle1:
    """See `foreign.load`."""
    block = llama_block(folder / "config.json", settings)
    with naming(folder / "config.json"):
        drafter = Eagle1(target, Eagle1Config(block=block))
    H = block.hidden_size
    tensors = Tensors(folder)
    stored = own_tensors(tensors, drafter)
    if "fc.bias" in tensors.left and tensors.take("fc.bias", H).any():
        raise UserError(
            f"{tensors.path}: fc.bias is not 0, and draftsmith's EAGLE-1, like vLLM's, has none"
        )
    tensors.take_embeddings(target)
    tensors.done()
    storage.fill(drafter, stored, tensors.path)
    return drafter


def llama_block(path: Path, shape: dict[str, Any], layers: int = 1) -> BlockConfig:
    """The shape of `layers` layers. Raises UserError for settings that our block does not have."""
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    expected = {
        "num_hidden_layers": (shape["num_hidden_layers"], layers),
        "hidden_act": (shape.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(shape.get("attention_bias")), False),
        "rope_type": (kind, "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    for key, (found, wanted) in expected.items():
        if found != wanted:
            raise UserError(f"{path}: {key} is {found}; draftsmith's heads have {wanted}")
    heads = shape["num_attention_heads"]
    return BlockConfig(
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_heads=heads,
        num_kv_heads=shape.get("num_key_value_heads") or heads,
        head_dim=shape.get("head_dim") or shape["hidden_size"] // heads,
        rms_norm_eps=shape["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or shape.get("rope_theta") or 10000.0),
    )


def _taps(path: Path, settings: dict[str, Any], shape: dict[str, Any], target: Shell) -> list[int]:
    """Layer ids as we count them. Raises UserError where the two ways of writing them disagree."""
    outer = settings.get("eagle_aux_hidden_state_layer_ids")
    inner = settings.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if inner is not None:
        inner = [output + 1 for output in inner]
    if outer and inner and outer != inner:
        raise UserError(
            f"{path}: eagle_aux_hidden_state_layer_ids {outer} and eagle_config's (outputs, one "
            f"less) {[i - 1 for i in inner]} name different layers; keep the right one"
        )
    layers = target.num_layers
    taps = outer or inner or [2, layers // 2, layers - 3]
    count = shape.get("num_aux_hidden_states", settings.get("num_aux_hidden_states", len(taps)))
    if count != len(taps):
        raise UserError(f"{path}: num_aux_hidden_states is {count}, it names {len(taps)} layers")
    return taps


def vocabulary(tensors: Tensors, size: int, full: int) -> tuple[Tensor | None, str]:
    """Target ids (Vd,) of the draft ids, None where they are the same; whose lm_head it reads."""
    ids = _draft_ids(tensors, size, full)
    own = "lm_head.weight" in tensors.left
    if not own and size != full:
        tensors.take("lm_head.weight")  # says that it is missing
    return ids, "own" if own else "target"


def _draft_ids(tensors: Tensors, size: int, full: int) -> Tensor | None:
    if size == full:
        for name in ("d2t", "t2d"):  # all zero, all true: some write them nonetheless
            if name in tensors.left and tensors.take(name, full).bool().any() != (name == "t2d"):
                raise UserError(f"{tensors.path}: {name} is no identity, yet all tokens are kept")
        return None
    offsets = tensors.take("d2t", size)
    ids = offsets.long() + torch.arange(size)
    try:
        vocab = VocabMap(full, ids)
    except UserError as error:
        raise UserError(
            f"{tensors.path}: d2t: {error} (it holds offsets: target id minus draft id)"
        ) from None
    if "t2d" in tensors.left:
        member = tensors.take("t2d", full).bool()
        if not torch.equal(member, vocab.to_draft(torch.arange(full)) >= 0):
            raise UserError(f"{tensors.path}: d2t and t2d keep different tokens; copy it again")
    return ids


def in_layer(name: str) -> str:
    """What a head's tensor is called in a file: those of the decoder layer stand in layers.0."""
    return f"layers.0.{name}" if name.startswith(_LAYER) else name


def own_tensors(
    tensors: Tensors, drafter: Drafter, stored: Callable[[str], str] = in_layer
) -> dict[str, Tensor]:
    """What a drafter trains, under our names, taken by stored(name) and in the shapes of its
    own."""
    own = drafter.weights()
    return {n: tensors.take(stored(n), *own[n].shape) for n in own if n != "draft_ids"}
