"""llama.cpp's GGUF files of drafters: EAGLE-3 heads and draft models.

Keys and names: llama.cpp b11434, src/models/eagle3.cpp and src/llama-arch.cpp. Its EAGLE-3 and
Llama rotate neighbours (LLAMA_ROPE_TYPE_NORM), so q and k rows come back to halves here; d2t holds
absolute target ids. Draft models are read by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.errors import UserError, loading, naming, reason
from draftsmith.drafters.foreign.files import StoredConfig, gguf_in, same_embeddings
from draftsmith.drafters.parts.layers import BlockConfig
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target import gguf_keys
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.whole import check_finite

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read(path: Path, settings: dict[str, Any], target: Shell) -> Drafter:
    """See `foreign.load`."""
    file = gguf_in(path)
    assert file is not None
    try:
        reader = GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{file}: cut short or broken ({reason(error)}); copy it again") from None
    fields = {name: field.contents() for name, field in reader.fields.items() if "." in name}
    keys = StoredConfig(file, fields)
    if len(keys["tokenizer.ggml.tokens"]) != target.vocab_size:
        raise UserError(
            f"{file}: has {len(keys['tokenizer.ggml.tokens'])} tokens, the target "
            f"{target.vocab_size}; give the target that this drafter was made for"
        )
    arch = keys["general.architecture"]
    if arch != "eagle3":
        return _draft_model(file, reader, target)
    return _eagle3(file, keys, _tensors(reader), target)


def _tensors(reader: GGUFReader) -> dict[str, Tensor]:
    """Names and values; d2t whole, all else in fp32."""
    return {
        t.name: torch.tensor(t.data if t.name == "d2t" else dequantize(t.data, t.tensor_type))
        for t in reader.tensors
    }


def _eagle3(file: Path, keys: StoredConfig, tensors: dict[str, Tensor], target: Shell) -> Eagle:
    def key(name: str) -> Any:
        return keys[f"eagle3.{name}"]

    block = BlockConfig(
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_heads=key("attention.head_count"),
        num_kv_heads=key("attention.head_count_kv"),
        head_dim=key("attention.key_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=key("rope.freq_base"),
    )
    ids = tensors.pop("d2t", None)
    config = EagleConfig(
        taps=list(key("target_layers")),
        draft_vocab=target.vocab_size if ids is None else len(ids),
        head="own" if "output.weight" in tensors else "target",
        norm_before_residual=bool(keys.get("eagle3.norm_before_residual")),
        norm_before_fc=bool(keys.get("eagle3.norm_before_fc")),
        block=block,
    )
    stored = {} if ids is None else {"draft_ids": ids}
    rest = {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight"}
    rest |= {"output.weight": "lm_head.weight", "enc.output_norm.weight": "input_norm.weight"}
    embeddings = tensors.pop("token_embd.weight", None)
    if embeddings is not None and not same_embeddings(embeddings, target):
        raise UserError(f"{file}: token_embd.weight is not the target's; not read here")
    for name, tensor in tensors.items():
        parts = name.split(".")
        if name in rest:
            stored[rest[name]] = tensor
        elif parts[:2] == ["blk", "0"] and parts[2] in _BLOCK:
            if parts[2] in ("attn_q", "attn_k"):
                tensor = _halves(tensor, block.head_dim)
            stored[f"{_BLOCK[parts[2]]}.weight"] = tensor
        else:
            raise UserError(f"{file}: tensor {name} is unexpected; draftsmith would not use it")
    with naming(file):
        drafter = Eagle(target, config)
    storage.fill(drafter, stored, file)
    return drafter


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows for rotation of halves, from rows (heads * D, ..) for rotation of neighbours."""
    out = torch.empty_like(weight)
    for head in range(0, len(weight), head_dim):
        rows = weight[head : head + head_dim]
        out[head : head + head_dim] = torch.cat([rows[0::2], rows[1::2]])
    return out


def _draft_model(file: Path, reader: GGUFReader, target: Shell) -> Small:
    """A draft model as llama.cpp stores it. transformers dequantises it and settles the names; the
    rest of what the header says is ours to read."""
    with loading(str(file)):
        config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        gguf_keys.settle(file, reader, config)
        hf, info = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32,
            output_loading_info=True,
        )  # fmt: skip
    for kind in ("missing_keys", "unexpected_keys"):
        for name in sorted(info[kind]):
            raise UserError(f"{file}: tensor {name} is {kind.removesuffix('_keys')}")
    gguf_keys.check_read(file, reader, hf)
    check_finite(str(file), hf.state_dict(), "copy it again")
    drafter = Small(target, SmallConfig(checkpoint=str(file), architecture=hf.config.to_dict()))
    drafter.lm.hf.load_state_dict(hf.state_dict())
    return drafter
