"""Tiny random targets of several families, and the text they write: what fast tests run on.

Weights are scaled up so that next-token laws are peaked and depend on the whole prefix: with
default initialisation every law is nearly uniform and a wrong mask or feature hardly shows.
"""

from __future__ import annotations

from functools import cache

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.source import Source
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text

VOCAB = 48
EOS = 1
FAMILIES = ("Llama", "Qwen3", "Gemma3")
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


def hf_model(family: str = "Llama", seed: int = 0, layers: int = 4, vocab: int = VOCAB):
    """An HF causal LM with random, scaled-up fp32 weights."""
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    settings = {
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
        "tie_word_embeddings": family == "Llama",
    }
    if family == "Gemma3":
        settings |= {
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 20.0,
        }
    config = getattr(transformers, f"{name}Config")(**settings)
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


def source(spec: str = "tiny") -> Source:
    return Source(spec=spec, path=spec, revision="none", kind="folder")


@cache
def target(family: str = "Llama", seed: int = 0, layers: int = 4, vocab: int = VOCAB) -> Target:
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
