"""What a GGUF says of its model beside what transformers reads: rope, windows, biases, head sizes.

transformers maps a dozen keys of the header and passes over the others, and over every tensor that
its model has no place for: Llama 3's rope factors, for one, so that all its positions are read
wrong. Here those keys are put into the config, or refused by name; and a file is read whole.
(Keys: llama.cpp b11434, src/llama-arch.cpp; rope factors: conversion of Llama in its converter.)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.drafters.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader

_FACTORS = "rope_freqs.weight"
_REMEDY = "use the model's safetensors folder or hub id"
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_EXTRAS = ("rope_freqs", "rope_factors", "nextn", "mtp")  # that the config says, or heads of MTP
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def settle(file: Path, reader: GGUFReader, config: Any) -> None:
    """Makes a config, as transformers reads it from a GGUF, what the file says.

    Raises UserError for a key that transformers' model cannot follow.
    """
    text = config.get_text_config()
    arch = reader.fields["general.architecture"].contents()
    start = f"{arch}."
    keys = {
        k.removeprefix(start): f.contents() for k, f in reader.fields.items() if k.startswith(start)
    }
    if not arch.startswith("gemma"):  # theirs differ by the kind of layer, and are mapped
        _settle_heads(file, keys, text)
    for name, end in _BIASES.items():
        if getattr(text, name, None) is False:
            setattr(text, name, any(t.name.endswith(end) for t in reader.tensors))
    _settle_window(file, arch, keys, text)
    if arch != "gpt-oss":  # transformers reads its yarn
        _settle_rope(file, arch, keys, reader, text)


def _settle_heads(file: Path, keys: dict[str, Any], text: Any) -> None:
    heads = keys.get("attention.head_count")
    if not isinstance(heads, int) or not heads:  # none, or one number for each layer
        return
    size = keys.get("attention.key_length") or keys["embedding_length"] // heads
    if getattr(text, "head_dim", None) != size and "attention.key_length_mla" not in keys:
        text.head_dim = size
    rope = getattr(text, "rope_parameters", None) or {}
    rotated = int(size * rope.get("partial_rotary_factor", 1.0))
    if keys.get("rope.dimension_count", rotated) != rotated:
        raise UserError(
            f"{file}: rope.dimension_count {keys['rope.dimension_count']} of {size} is not read "
            f"by transformers; {_REMEDY}"
        )


def _settle_window(file: Path, arch: str, keys: dict[str, Any], text: Any) -> None:
    window = keys.get("attention.sliding_window") or None
    kinds = getattr(text, "layer_types", None)
    if hasattr(text, "sliding_window") and not kinds:  # of all layers
        text.sliding_window = window
    elif window and any(kind != "full_attention" for kind in kinds or ()):
        text.sliding_window = window
    elif window and window < keys.get("context_length", math.inf):
        raise UserError(
            f"{file}: {arch}.attention.sliding_window {window} is not read by transformers; "
            f"{_REMEDY}"
        )


def _settle_rope(
    file: Path, arch: str, keys: dict[str, Any], reader: GGUFReader, text: Any
) -> None:
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kind = keys.get("rope.scaling.type", "linear" if "rope.scale_linear" in keys else "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    found: dict[str, Any] = {}
    if kind == "linear" and factor != 1:
        found = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found = {"rope_type": "yarn", "factor": factor}
        original = keys.get("rope.scaling.original_context_length", keys["context_length"])
        found["original_max_position_embeddings"] = original
        found |= {to: keys[f"rope.scaling.{k}"] for k, to in _YARN.items() if _has(keys, k)}
    factors = next((t.data for t in reader.tensors if t.name == _FACTORS), None)
    if factors is not None and not arch.startswith("gemma"):  # theirs: dimensions not rotated
        found = _llama3(file, keys, factors, rope)
    unknown = [k for k in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor") if _has(keys, k)]
    longrope = any(t.name.startswith("rope_factors") for t in reader.tensors)
    if kind not in ("none", "linear", "yarn") or unknown or longrope or (found and not rope):
        name = "rope_factors_long" if longrope else f"rope.scaling.{(unknown or ['type'])[0]}"
        raise UserError(
            f"{file}: {arch}.{name} (rope of type {'longrope' if longrope else kind}) is not read "
            f"from a GGUF; {_REMEDY}"
        )
    if found and "rope_type" not in rope:  # one for each kind of layer
        text.rope_parameters = rope | {"full_attention": rope["full_attention"] | found}
    elif found:
        text.rope_parameters = rope | found


def _has(keys: dict[str, Any], name: str) -> bool:
    value = keys.get(f"rope.scaling.{name}")
    return value is not None and not (name.endswith("attn_factor") and value == 1)


def _llama3(file: Path, keys: dict[str, Any], factors: Any, rope: Any) -> dict[str, Any]:
    """Llama 3's rope, whose settings its file holds only as what they come to: a divisor for each
    frequency. All published ones have low 1, high 4."""
    theta, count = rope["rope_theta"], len(factors)
    waves = [2 * math.pi * theta ** (i / count) for i in range(count)]
    most, context = float(max(factors)), keys.get("rope.scaling.original_context_length")
    for original in (context, 8192, 4096, 16384, 32768):
        if original is None:
            continue
        wanted = []
        for wave in waves:
            smooth = min(max((original / wave - 1) / 3, 0.0), 1.0)
            wanted.append(1 / ((1 - smooth) / most + smooth))
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(factors.tolist(), wanted, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": most,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise UserError(f"{file}: {_FACTORS} are not those of Llama 3's rope; {_REMEDY}")


def check_read(file: Path, reader: GGUFReader, hf: Any) -> None:
    """Raises UserError unless a model holds as many numbers as the file that it was read from."""
    import gguf

    tied = getattr(hf.config.get_text_config(), "tie_word_embeddings", False)
    skipped = {"output.weight"} if tied else set()
    stored = {
        t.name: int(t.n_elements)
        for t in reader.tensors
        if t.name not in skipped and not any(part in t.name for part in _EXTRAS)
    }
    held = {(t.data_ptr(), t.shape): t.numel() for t in hf.state_dict().values()}
    if sum(stored.values()) == sum(held.values()):
        return
    arch = reader.fields["general.architecture"].contents()
    known = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(known, hf.config.get_text_config().num_hidden_layers)
    read = {names.get_name(n, (".weight", ".bias")) for n in hf.state_dict()}
    first = next(iter(sorted(stored.keys() - read)), "")
    raise UserError(
        f"{file}: holds {sum(stored.values()):,} numbers, and transformers reads "
        f"{sum(held.values()):,} of them as {type(hf).__name__}"
        + (f" ({first} is left over)" if first else "")
        + f"; {_REMEDY}"
    )
