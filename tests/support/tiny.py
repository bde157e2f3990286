"""Tiny random targets of several families, and the text they write: what fast tests run on.

Weights are scaled up so that next-token laws are peaked and depend on the whole prefix: with
default initialisation every law is nearly uniform and a wrong mask or feature hardly shows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import Source
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text

VOCAB = 48
EOS = 1
FAMILIES = ("Llama", "Qwen3", "Gemma3")  # the ones that every test runs on
LAYERS = 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
# Family -> (transformers' config class, its settings beyond `hf_model`'s). Windows and chunks are
# shorter than the texts that tests read.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Mistral": ("Mistral", {"sliding_window": 8}),
    "Gemma2": ("Gemma2", {"sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "Gemma3": (
        "Gemma3Text",
        {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 20.0},
    ),
    "Gemma3 mixed": (
        "Gemma3Text",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "final_logit_softcapping": 3.0,
        },
    ),
    "Phi3": ("Phi3", {}),
    "Olmo2": ("Olmo2", {}),
    "GptOss": ("GptOss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": ("Qwen3Moe", EXPERTS),
    "DeepseekV3": (
        "DeepseekV3",
        {
            **MLA,
            "head_dim": 4,  # rope's
            "v_head_dim": 6,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "Llama4": (
        "Llama4Text",
        {
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
        },
    ),
    "GPTNeoX": ("GPTNeoX", {}),
    "Granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.5}),
    "Cohere": ("Cohere", {"logit_scale": 0.25}),
}
# Those that no slab can hold: ALiBi by slot, convolutions, recurrent states.
STATES = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 4}
LINEAR = {f"linear_{name}": size for name, size in [("num_value_heads", 4), ("num_key_heads", 2)]}
CHAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bloom": ("Bloom", {}),
    "Falcon": ("Falcon", {"alibi": True, "head_dim": None}),
    "Mpt": ("Mpt", {}),
    "Lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}),
    "Mamba2": ("Mamba2", STATES),
    "Qwen3Next": (
        "Qwen3Next",
        {**EXPERTS, **LINEAR, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "FalconH1": (
        "FalconH1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
    ),
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} z {% endfor %}"


def tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words w2, w3, .. and letters; ids 0 and 1 are padding and end."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<pad>", "<eos>", *letters] + [f"w{i}" for i in range(28, vocab)]
    model = models.WordLevel({w: i for i, w in enumerate(words[:vocab])}, unk_token="<pad>")
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    out = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    out.chat_template = TEMPLATE
    return out


def hf_model(
    family: str = "Llama", seed: int = 0, layers: int = LAYERS, vocab: int = VOCAB, **more: Any
) -> Any:
    """An HF causal LM with random, scaled-up fp32 weights. more: further settings."""
    name, settings = (SETTINGS | CHAINS)[family]
    shape = (
        {
            "vocab_size": vocab,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        }
        | settings
        | more
    )
    if shape["head_dim"] is None:  # Falcon's is no setting
        del shape["head_dim"]
    config = getattr(transformers, f"{name}Config")(**shape)
    return random_model(config, seed)


def random_model(config: Any, seed: int = 0) -> Any:
    """The HF causal LM of a config, its weights so large that any change shows in the logits."""
    torch.manual_seed(seed)
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.35)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    hf.generation_config.eos_token_id = EOS
    return hf.eval()


CHAT = (
    "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else ' z ' }}"
    "{% endfor %}"
)


def ender(seed: int = 0) -> Any:
    """An HF model that draws the end token every few tokens, as chat models end their turns."""
    hf = hf_model("Qwen3", seed)
    with torch.no_grad():
        hf.lm_head.weight[EOS] *= 2
    return hf


def talker(template: str = CHAT, seed: int = 0) -> Target:
    """A target that ends its turns, with a chat template that closes them by the end token."""
    words = tokenizer()
    words.chat_template = template
    return Target(ender(seed), words, source(f"talker-{seed}"))


def source(spec: str = "tiny") -> Source:
    return Source(spec=spec, path=spec, revision="none", kind="folder")


@cache
def target(
    family: str = "Llama", seed: int = 0, layers: int = LAYERS, vocab: int = VOCAB
) -> Target:
    """A tiny target; cached, so treat it as read-only."""
    hf = hf_model(family, seed, layers, vocab)
    return Target(hf, tokenizer(vocab), source(f"tiny-{family}-{seed}"))


def prompts(count: int = 4, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of 3 to 9 tokens, without the end token."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        length = int(torch.randint(3, 10, (1,), generator=generator))
        out.append(torch.randint(2, vocab, (length,), generator=generator).tolist())
    return out


def texts(
    of: Target, sampler: Sampler, count: int = 4, tokens: int = 24, seed: int = 0
) -> list[Text]:
    """Texts that the target itself wrote, by the baseline loop."""
    return Decoder(of).generate(prompts(count, seed, of.vocab_size), sampler, tokens, seed=seed)
