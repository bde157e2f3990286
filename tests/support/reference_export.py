"""What a server computes from the files it is given, in float64, by that server's own rules.

Each function reads the files anew and takes every tensor in them, or fails; what the rules say
stands in the server's source, named beside it. Layers, attention and norms: reference_eagle.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from reference_blocks import dflash_logits, dspark_logits, peagle_logits
from reference_eagle import after_attention, attended, eagle_logits, rms
from reference_heads import head_logits
from reference_mtp import eagle1_logits


def files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def shape(c: dict[str, Any]) -> dict[str, Any]:
    assert c["rope_parameters"] == {"rope_theta": c["rope_theta"], "rope_type": "default"}
    heads = {"num_heads": c["num_attention_heads"], "num_kv_heads": c["num_key_value_heads"]}
    return heads | {key: c[key] for key in ("head_dim", "rms_norm_eps", "rope_theta")}


def eagle3(server: str, folder: Path, taps: list[int] | None, *where: Any) -> tuple[Tensor, Tensor]:
    """EAGLE-3 by vLLM (llama_eagle3.py; ids raw; speculators' residual is normed by default),
    SGLang (llama_eagle3.py; ids in eagle_config count outputs; residual never normed) or
    TensorRT-LLM (modeling_speculative.py; ids, `taps`, are an argument and count outputs)."""
    about, w = files(folder)
    body = about.get("transformer_layer_config", about)
    normed = about.get("norm_before_residual", "speculators_model_type" in about)
    inner = about.get("eagle_config", {})
    if server == "vllm":
        taps = about["eagle_aux_hidden_state_layer_ids"]
        assert taps == sorted(taps) and body["num_aux_hidden_states"] == len(taps)
    elif server == "sglang":
        taps = [i + 1 for i in inner["eagle_aux_hidden_state_layer_ids"]]
    else:
        taps = [i + 1 for i in sorted(taps or [])]
    if server != "vllm":
        assert inner["norm_before_fc"] == about["norm_before_fc"] and not normed
        normed = False
    w = {re.sub(r"^(midlayer|layers\.0)\.", "", name): tensor for name, tensor in w.items()}
    w = with_ids(w, about["draft_vocab_size"])
    config = about | {"taps": taps, "norm_before_residual": normed, "head": "own"}
    return judged(w, eagle_logits, config | {"block": shape(body)}, where)


def blocks(folder: Path, *where: Any) -> tuple[Tensor, Tensor]:
    """DFlash and DSpark by vLLM (transformers_utils/configs/speculators/algos.py and
    model_executor/models/qwen3_{dflash,dspark}.py): outputs of layers id - 1; slots that see all of
    their block unless sliding_window_non_causal is there and false."""
    about, w = files(folder)
    body, kind = about["transformer_layer_config"], about["speculators_model_type"]
    first = about.get("sample_from_anchor", False)
    drafted = about["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert about.get("sliding_window_non_causal", True) and body["model_type"] == "qwen3"
    assert set(body["layer_types"]) == {"full_attention"} and drafted == where[4]
    assert first == (kind == "dspark") and about["block_size"] == drafted + (not first)
    taps = [output + 1 for output in (i - 1 for i in about["aux_hidden_state_layer_ids"])]
    assert taps == sorted(taps) and len(body["layer_types"]) == body["num_hidden_layers"]
    config = {"taps": taps, "head": "own", "layers": body["num_hidden_layers"], "drafted": drafted}
    config |= {"mask_token": about["mask_token_id"], "block": shape(body) | {"qk_norm": True}}
    logits = dflash_logits
    if kind == "dspark":
        assert about["markov_head_type"] == "vanilla" and about["enable_confidence_head"]
        rank = about["markov_rank"] * about["confidence_head_with_markov"]
        assert w.pop("confidence_head.proj.weight").shape == (1, body["hidden_size"] + rank)
        assert w.pop("confidence_head.proj.bias").shape == (1,)
        logits = dspark_logits
    return judged(with_ids(w, about["draft_vocab_size"]), logits, config, where[:4])


def peagle(folder: Path, *where: Any) -> tuple[Tensor, Tensor]:
    """P-EAGLE by vLLM, llama_eagle3.py: mask_hidden goes through fc, layers follow the first."""
    about, w = files(folder)
    body = about["transformer_layer_config"]
    assert about["speculators_model_type"] == "peagle" and not about["norm_output"]
    assert body["num_aux_hidden_states"] == len(about["eagle_aux_hidden_state_layer_ids"])
    w["mask_hidden"] = w["mask_hidden"].flatten()
    w = {re.sub(r"^layers\.0\.", "", name): tensor for name, tensor in w.items()}
    for number in range(1, body["num_hidden_layers"]):
        start = f"layers.{number}."
        w = {re.sub(f"^{re.escape(start)}", f"more.{number - 1}.", n): t for n, t in w.items()}
    config = about | {"taps": about["eagle_aux_hidden_state_layer_ids"], "head": "own"}
    config |= {"layers": body["num_hidden_layers"], "mask_token": about["mask_token_id"]}
    config["block"] = shape(body)
    w = with_ids(w, about["draft_vocab_size"])
    if not where[3]:  # no mask stands at depth 0
        w.pop("mask_hidden")
    return judged(w, peagle_logits, config, where)


def with_ids(w: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The tensors, draft ids as target ids."""
    if "d2t" in w:
        w["draft_ids"] = torch.arange(size) + w.pop("d2t")
        member = w.pop("t2d")
        assert member.nonzero().flatten().tolist() == sorted(w["draft_ids"].tolist())
    assert len(w["lm_head.weight"]) == size
    return w


def llama_cpp(folder: Path, *where: Any) -> tuple[Tensor, Tensor]:
    """EAGLE-3 by llama.cpp, src/models/eagle3.cpp."""
    keys, w = gguf_file(folder)
    names = {
        "enc.output_norm": "input_norm", "output_norm": "norm", "output": "lm_head", "fc": "fc",
        "token_embd": "embed_tokens", "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm",
        "ffn_norm": "post_attention_layernorm", **LAYER,
    }  # fmt: skip
    ids = w.pop("d2t", None)
    w = {f"{names[n.removeprefix('blk.0.').removesuffix('.weight')]}.weight": t
         for n, t in w.items()}  # fmt: skip
    block = gguf_shape(keys, "eagle3", w, "self_attn.{}_proj.weight")
    flags = {n: keys.get(f"eagle3.{n}") for n in ("norm_before_fc", "norm_before_residual")}
    config = flags | {"taps": list(keys["eagle3.target_layers"]), "block": block, "head": "own"}
    assert keys["eagle3.block_count"] == 1 and len(config["taps"]) == 3
    if ids is not None:
        w["draft_ids"] = ids
    return judged(w, eagle_logits, config, where)


LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def gguf_file(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    reader = gguf.GGUFReader(next(folder.glob("*.gguf")))
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {t.name: torch.tensor(t.data) for t in reader.tensors}


def gguf_shape(keys: dict, arch: str, w: dict[str, Tensor], name: str) -> dict[str, Any]:
    """The layer's shape; q and k come from rows 2i, 2i + 1 (LLAMA_ROPE_TYPE_NORM) to i, i + D/2."""
    D = keys[f"{arch}.rope.dimension_count"]
    for part in "qk":
        row = torch.arange(len(w[name.format(part)]))
        pair, second = row % D % (D // 2), row % D // (D // 2)
        for full in {name.format(part), name.format(part).replace("weight", "bias")} & w.keys():
            w[full] = w[full][row // D * D + 2 * pair + second]
    return {
        "num_heads": keys[f"{arch}.attention.head_count"],
        "num_kv_heads": keys[f"{arch}.attention.head_count_kv"],
        "head_dim": D,
        "rms_norm_eps": keys[f"{arch}.attention.layer_norm_rms_epsilon"],
        "rope_theta": keys[f"{arch}.rope.freq_base"],
    }


def eagle1(server: str, folder: Path, *where: Any) -> tuple[Tensor, Tensor]:
    """EAGLE-1 by vLLM and SGLang, llama_eagle.py: embedding first; SGLang's fc has a bias, 0."""
    about, w = files(folder)
    w = {name.removeprefix("layers.0."): tensor for name, tensor in w.items()}
    if server == "sglang":
        assert not w.pop("fc.bias").any()
    w.pop("embed_tokens.weight")  # both share the target's
    return judged(w, eagle1_logits, {"block": shape(about)}, where)


def medusa(folder: Path, *where: Any) -> tuple[Tensor, Tensor]:
    """Medusa by vLLM, medusa.py."""
    about, w = files(folder)
    assert about["medusa_fc_bias"] and about["hidden_size"] == where[0].config.hidden_size
    ours = {re.sub(r"^(blocks\.\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", n): t
            for n, t in w.items()}  # fmt: skip
    if about["original_lm_head"]:
        for h in range(1, about["num_heads"]):
            ours[f"lm_heads.{h}.weight"] = w["lm_heads.0.weight"]
    assert about["truncated_vocab_size"] == about["vocab_size"]  # it loads no token_map
    config = {"layers": about["num_hidden_layers"], "head": "own"}
    heads = range(about["num_heads"])
    known = {f"lm_heads.{h}." for h in heads} | {f"blocks.{h}." for h in heads}
    assert all(any(n.startswith(k) for k in known) for n in ours)
    mine = {n: t for n, t in ours.items() if n.split(".")[1] == str(where[3])}
    return judged(mine, head_logits, config, where)


def small_llama(folder: Path, *where: Any) -> tuple[Tensor, Tensor]:
    """A draft model's logits for x_{anchor+2+depth} by llama.cpp, src/models/llama.cpp."""
    keys, w = gguf_file(folder)
    hf, tokens, anchor, depth = where
    table = w.pop("token_embd.weight").double()
    head, last = w.pop("output.weight", table).double(), w.pop("output_norm.weight").double()
    states = table[torch.tensor(tokens[: anchor + 2 + depth])]
    names = LAYER | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    for i in range(keys["llama.block_count"]):
        layer = {f"{ours}.{kind}": w.pop(f"blk.{i}.{n}.{kind}").double()
                 for n, ours in names.items() for kind in ("weight", "bias")
                 if kind == "weight" or f"blk.{i}.{n}.bias" in w}  # fmt: skip
        c = gguf_shape(keys, "llama", layer, "self_attn.{}_proj.weight")
        kept: tuple[list[Tensor], list[Tensor]] = [], []
        out = []
        for t, x in enumerate(states):
            normed = rms(x, layer["input_layernorm.weight"], c["rms_norm_eps"])
            out.append(after_attention(layer, c, x + attended(layer, c, normed, t, *kept)))
        states = torch.stack(out)
    assert not w, f"not read: {sorted(w)}"
    return head @ rms(states[-1], last, c["rms_norm_eps"]), torch.arange(len(head))


def judged(w: dict[str, Tensor], logits: Any, config: dict, where: Any) -> tuple[Tensor, Tensor]:
    """Logits and ids; fails where the rules would not miss a tensor of the file."""
    hf = where[0]
    table = w.pop("embed_tokens.weight", None)
    if table is not None:  # a head's own embedding is what the target's layers read
        every = hf.get_input_embeddings()(torch.arange(len(table)))
        torch.testing.assert_close(table.double(), every.double())
    for name in w.keys() - {"draft_ids"}:
        try:
            logits({n: t for n, t in w.items() if n != name}, config, *where)
        except KeyError:
            continue
        raise AssertionError(f"{name} is not read")
    return logits(w, config, *where)
