"""Exports in tests: written, read back, and what the rules make of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

import tiny
from draftsmith.drafters import base, export
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.export import Serving
from draftsmith.drafters.parts.layers import BlockConfig
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocab import VocabMap

TEXT = [5, 9, 31, 7, 22, 40, 3, 17, 28, 11]
K = 3


def drafter(name: str, family: str = "Llama", deep: int = 4, **config: Any) -> Drafter:
    """A drafter with large random weights and, where it is reduced, an unsorted vocabulary."""
    target, cls = tiny.target(family, layers=deep), base.family(name)
    with torch.no_grad():
        made = cls.create(target, cls.Config(**config), torch.ones(target.vocab_size)).eval()
        generator = torch.Generator().manual_seed(0)
        size = 0.12 if name == "eagle1" else 0.35
        for parameter in made.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                norm = parameter.dim() == 1
                parameter.copy_(1 + 0.2 * noise if norm else size * noise)
    if made.vocab.ids is not None:
        ids = torch.randperm(target.vocab_size, generator=generator)[: made.vocab.draft_size]
        made.set_vocab(VocabMap(target.vocab_size, ids))  # type: ignore[attr-defined]
    return made


@cache
def plain(family: str = "Llama", deep: int = 4) -> Any:
    """The target as transformers alone has it, for the reference."""
    return tiny.hf_model(family, layers=deep).double()


def target_gguf(target: Target, path: Path) -> Path:
    """A GGUF with the target's tokenizer, as llama.cpp's converter leaves it."""
    names = {i: word for word, i in target.tokenizer.get_vocab().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([names[i] for i in range(target.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * target.vocab_size)
    writer.add_eos_token_id(tiny.EOS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(server: str, made: Drafter, folder: Path, **more: Any) -> Path:
    """The export's folder, within `folder`."""
    place = folder / "out"
    place.mkdir()
    if server == "llama.cpp":
        more["target_gguf"] = target_gguf(made.target, folder / "target.gguf")
    export.write(server, made, place, Serving("TARGET", K, 128, **more))
    return place


def read(target: Target, taps: Any) -> Batch:
    return target.read(batch_of([(TEXT, [True] * len(TEXT))], Sampler()), taps)


@torch.no_grad()
def logits(made: Drafter) -> dict[tuple[int, int], Tensor]:
    """Draft logits over target ids, -inf where there is none, by anchor and depth."""
    batch = read(made.target, made.taps)
    alignment = align(batch, K)
    unrolled = made.unroll(batch, alignment)
    assert isinstance(unrolled, base.Unroll)
    rows = made.logits(unrolled.hidden, unrolled.prev, unrolled.depth)
    out = {}
    for at, anchor in enumerate(alignment.anchors[0].tolist()):
        for depth, row in enumerate(unrolled.index[0, at].tolist()):
            if row >= 0:
                full = torch.full((made.target.vocab_size,), -torch.inf)
                ids = torch.arange(made.vocab.draft_size)
                out[anchor, depth] = full.index_copy(0, made.vocab.to_target(ids), rows[row])
    return out


BLOCK = BlockConfig(
    hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=4, head_dim=8,
    rms_norm_eps=1e-5, rope_theta=500.0,
)  # fmt: skip
EAGLE = {"taps": [3, 1, 2], "draft_vocab": 20, "block": BLOCK}
