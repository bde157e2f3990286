"""Whether a checkpoint and the model that was made of it are each other's: every tensor that stands
there is read, every one that the model has is filled. What is missing would be drawn at random, and
a quantised weight without its scales is another weight.

Sizes are transformers' own to compare. What may stand in a checkpoint unread is known by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.source import Source, model_files

# Tensors that a causal LM does without: tables that are computed, heads that predict further
# tokens, towers of other modalities.
_EXTRAS = re.compile(
    r"rotary(_pos)?_emb\.inv_freq$|\brope\.freqs$"
    r"|\b(attn|attention)\.(masked_bias|bias|rotary_emb\.\w+)$|\bposition_ids$"
    r"|\b(mtp|mtp_\w+|nextn)\."
    r"|^(model\.|language_model\.)?(vision|visual|audio|image|speech|multi_modal|mm_|embed_vision"
    r"|embed_audio|talker|token2wav)"
)
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PACKED = ("F8_", "F4", "F6_", "I8", "U8", "I16", "U16", "I32", "U32")


def check_whole(what: str, hf: Any, info: dict[str, Any]) -> None:
    """Raises UserError for the first tensor that is missing, that nothing reads, or that is not
    finite.

    what: names the model. info: from_pretrained's loading info.
    """
    for name in sorted(info["missing_keys"]):
        raise UserError(f"{what}: {name} is missing in its checkpoint; name one that is whole")
    depth = hf.config.get_text_config().num_hidden_layers
    for name in unread(info["unexpected_keys"], depth):
        raise UserError(
            f"{what}: nothing reads {name} of its checkpoint ({type(hf).__name__} has no such "
            "tensor): scales of quantised weights, an adapter or another model's config.json; name "
            "a checkpoint that transformers reads whole"
        )
    check_tied(what, hf)
    check_finite(what, hf.state_dict(), "name one that is whole")


def check_finite(what: str, tensors: Mapping[str, Any], remedy: str) -> None:
    """Raises UserError for the first tensor that holds a NaN or an infinity: a file that was
    damaged, or stored by a run that had gone wrong."""
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            continue
        if tensor.dtype in _FLOATS and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{what}: tensor {name} holds NaN or infinities; {remedy}")


def check_tied(what: str, hf: Any) -> None:
    """Raises UserError where the config ties a head to the embeddings and the file holds two."""
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    if not getattr(hf.config.get_text_config(), "tie_word_embeddings", False) or head is None:
        return
    one, two = head.weight, embedding.weight
    if one is two or one.is_meta or two.is_meta or one.data_ptr() == two.data_ptr():
        return
    if one.shape != two.shape or not torch.equal(one.to(two.device), two):
        raise UserError(
            f"{what}: config.json ties lm_head to the embeddings (tie_word_embeddings), and the "
            "checkpoint holds two that differ; servers read one of them: set it to false"
        )


def unread(names: Iterable[str], depth: int) -> list[str]:
    """Of tensors that a model of `depth` layers left unread, those that belong to it, sorted."""
    found = [name for name in names if not _EXTRAS.search(name)]
    # DeepSeek and GLM number their layers that predict further tokens behind the last.
    past = {n for n in found if any(int(i) >= depth for i in LAYER.findall(f".{n}"))}
    return sorted(set(found) - past)


def check_quantised(what: str, source: Source, config: Any, body: bool = True) -> None:
    """Raises UserError for a checkpoint that is quantised by what transformers does not know, or
    whose config says nothing of it. Reads headers alone; body False: not those of layers."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known

    folder, remedy = Path(source.path), "name the model as it was before"
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        given = stored if isinstance(stored, dict) else stored.to_dict()
        method = given.get("quant_method")
        bits = given.get("load_in_4bit") or given.get("load_in_8bit")
        if method not in known and not (method is None and bits):
            raise UserError(
                f"{what}: is stored quantised by {method}, which transformers does not read; "
                f"{remedy}"
            )
        return
    if not folder.is_dir():
        return
    beside = folder / "hf_quant_config.json"
    if beside.is_file() and _quantises(beside):
        raise UserError(
            f"{what}: is stored quantised (hf_quant_config.json), which transformers does not "
            f"read; {remedy}"
        )
    for path in model_files(folder):
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if _EXTRAS.search(name) or (not body and LAYER.search(f".{name}")):
                    continue
                kind = file.get_slice(name).get_dtype()
                if kind.startswith(_PACKED):
                    raise UserError(
                        f"{what}: {name} is stored as {kind}, and config.json has no "
                        f"quantization_config that says how to read it; {remedy}"
                    )


def _quantises(path: Path) -> bool:
    """Whether hf_quant_config.json names a way; where it cannot be read, it may."""
    try:
        content = json.loads(path.read_text())
        return bool(content["quantization"]["quant_algo"])
    except (ValueError, KeyError, TypeError):
        return True
