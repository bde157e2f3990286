"""SYNTHETIC speed runs: a named model's shape with random weights, and drafts accepted by a coin.

Speed depends on shapes, not on what the weights say, so a decoder can be timed without any
checkpoint: a random target, a real EAGLE-3-shaped head, and a stated chance alpha that the draft at
each depth is accepted, where a trained drafter would have earned its own. The text is meaningless,
and every figure of such a run is labelled synthetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Purpose
from draftsmith.drafters.target.source import Source
from draftsmith.drafters.target.target import Target, free_bytes
from draftsmith.eval.decoder.accept import Accepted, leading
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.round import Rounds
from draftsmith.eval.speed.speed_model import independent_tau

LABEL = "SYNTHETIC"
_COIN = 1 << 20  # a node number of its own: the coins share no draw with the accept rules
_DRAFT_VOCAB = 32_000  # what published EAGLE-3 heads keep

# family, hidden, intermediate, layers, heads, key-value heads, head_dim, vocabulary, tied: from the
# config.json of Llama-3.2-1B, Llama-3.1-8B, Qwen3-4B, Qwen3-32B and SmolLM2-135M.
_SHAPES = {
    "llama-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128_256, True),
    "llama-8b": ("llama", 4096, 14_336, 32, 32, 8, 128, 128_256, False),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, True),
    "qwen3-32b": ("qwen3", 5120, 25_600, 64, 64, 8, 128, 151_936, False),
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 64, 49_152, True),
    "tiny": ("llama", 64, 128, 8, 4, 2, 16, 512, True),
}


def shape_config(name: str) -> Any:
    """The HF config of a named shape. Raises UserError naming the known ones."""
    if name not in _SHAPES:
        raise UserError(f"--shape: no shape {name!r}; known are {', '.join(_SHAPES)}")
    family, hidden, inner, layers, heads, kv_heads, dim, vocab, tied = _SHAPES[name]
    return transformers.AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a text before its limit
    )


def random_target(name: str, device: torch.device, dtype: torch.dtype) -> Target:
    """A target of a named shape with random weights, made on the device.

    Raises UserError for an unknown shape and for weights that exceed the device's free memory.
    """
    config = shape_config(name)
    with torch.device("meta"):
        weights = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).parameters()
        need = sum(p.numel() * p.element_size() for p in weights)
    free = free_bytes(device)
    if need > free:
        raise UserError(
            f"--shape {name}: its weights take {need / 2**30:.1f} GiB in {dtype}, {device} has "
            f"{free / 2**30:.1f} GiB free; use a smaller shape"
        )
    with torch.device(device):
        torch.manual_seed(0)
        hf = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    hf.generation_config.eos_token_id = None
    raw = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    return Target(hf, words, Source(f"{LABEL} {name}", name, "random", "folder"))


def random_eagle(target: Target) -> Drafter:
    """An EAGLE-3 head of the target's shape with random weights: drafting at its real cost."""
    size = min(_DRAFT_VOCAB, target.vocab_size)
    config = EagleConfig(draft_vocab=size)
    drafter = Eagle.create(target, config, torch.ones(target.vocab_size, dtype=torch.long))
    assert drafter.lm_head is not None
    with torch.no_grad():  # peaked laws, as trained ones are: flat ones grow wide, shallow trees
        drafter.lm_head.weight.mul_(10)
    return drafter.to(target.device, target.dtype).eval()


def random_prompts(target: Target, count: int, length: int = 128) -> list[list[int]]:
    """Token ids drawn evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (count, length), generator=generator).tolist()


class CoinDecoder(Decoder):
    """A decoder in which a keyed coin of chance alpha decides each depth.

    The accept rule runs as always and its work is timed as always; only its count, and the path of
    a tree, are replaced, which takes about ten small tensor operations more.
    """

    def __init__(self, target: Target, drafter: Drafter, policy: Policy, alpha: float) -> None:
        super().__init__(target, drafter, policy)

        class CoinRounds(Rounds):
            def _judge(self) -> Accepted:
                return _tossed(self, super()._judge(), alpha)

        self.rounds_type = CoinRounds


def _tossed(rounds: Rounds, ruled: Accepted, alpha: float) -> Accepted:
    """What the rule found, with the number of accepted drafts replaced by the coins'."""
    depth = rounds.depth  # (B, N)
    N = depth.shape[1]
    node = torch.arange(N, device=depth.device)
    valid = node < rounds.proposal.length.unsqueeze(1)
    deepest = torch.where(valid, depth, -1).argmax(1)  # (B,) a node that ends a longest path
    longest = depth.gather(1, deepest.unsqueeze(1))  # (B, 1)
    drafts = torch.arange(rounds.policy.k, device=depth.device)
    position = rounds.slab.length.unsqueeze(1) + 1 + drafts  # (B, k)
    coins = rounds.noise.uniform(Purpose.ACCEPT, position, _COIN) < alpha
    count = torch.minimum(leading(coins), longest.squeeze(1))
    if ruled.path is None:
        return Accepted(count, ruled.token)
    line = rounds.ancestors.gather(1, deepest.view(-1, 1, 1).expand(-1, 1, N)).squeeze(1)  # (B, N)
    place = torch.where(line & (depth <= count.unsqueeze(1)), depth, N)
    path = torch.zeros_like(depth[:, :1]).expand(-1, N + 1).contiguous()
    path.scatter_(1, place, node.expand_as(place))
    return Accepted(count, ruled.token, path[:, :-1])


def expected_over(alpha: float, depths: Mapping[str, int]) -> float:
    """Tokens per verify pass over rounds that proposed different depths: {depth: rounds}."""
    taus = [independent_tau(alpha, int(depth)) * count for depth, count in depths.items()]
    return sum(taus) / sum(depths.values())
