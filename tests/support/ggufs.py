"""A tiny Llama with its tokenizer, as a GGUF."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS = 4, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tiny_model(seed: int = 0, **more: Any) -> Any:
    """more: further settings."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = dict(
        vocab_size=len(vocabulary()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(LlamaConfig(**shape | more)).eval()
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith(".bias"):
                bias.normal_(std=0.5)
    return model


def vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return SPECIALS + alphabet + ["".join(pair) for pair in MERGES]


def rotated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order in which llama.cpp keeps q and k."""
    rows = weight.shape[0]
    halves = weight.view(heads, 2, rows // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: Any, tensors: dict[str, torch.Tensor] | None = None, **fields: Any
) -> Path:
    """A fp32 GGUF of `model` with the tiny tokenizer, further tensors and fields."""
    writer = gguf.GGUFWriter(str(path), "llama")
    c = model.config
    writer.add_name("tiny")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIALS) + [1] * (c.vocab_size - len(SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        adders[type(value)](key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        weight = rotated(weight, heads) if heads else weight
        stored = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(stored, weight.contiguous().numpy())
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
