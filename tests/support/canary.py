"""Canaries: tiny drafters that know three texts, and fall silent where a server reads them wrongly.

An untrained drafter proves nothing about a server: it is hardly ever accepted, and the output is
right all the same. One that merely knows its texts by heart still says them with features of the
next layer. So a canary learns two things: the target's own greedy texts, token by token, served as
it was trained; and a token that the target never writes, served with any of its faults (swapped
heads need no teaching: each says what it said, one token late). A right export is then accepted in
full, and a wrong one next to never.

The target is a random Llama of 8 layers with SmolLM2's tokenizer, which both servers load in no
time; a canary takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer

import tiny
from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter, Unroll
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import resolve
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text

VOCAB = 49152
TOKENS, K = 28, 3
NEVER = 0  # <|endoftext|>
GREEDY = Sampler(0.0)
SIGNS = torch.tensor([1.0, -1.0])  # the best logit's lead over the next


@dataclass(frozen=True)
class Canary:
    """A family, its settings, and the faults that a server's reading of it may have."""

    family: str
    config: dict[str, Any]
    faults: tuple[str, ...]
    lr: float = 2e-3


CANARIES = {
    "eagle": Canary("eagle", {"taps": [2, 4, 6], "draft_vocab": 160}, ("taps + 1", "norm flag")),
    "eagle1": Canary("eagle1", {}, ("swapped inputs",)),
    "dflash": Canary(
        "dflash",
        {"taps": [2, 4, 6], "layers": 2, "block_size": K + 1, "draft_vocab": 160},
        ("taps + 1", "another mask"),
    ),
    "peagle": Canary(
        "peagle",
        {"taps": [2, 4, 6], "layers": 2, "draft_vocab": 160},
        ("taps + 1", "norm flag"),
        5e-4,
    ),
    "medusa": Canary("medusa", {"heads": K}, ("swapped heads",)),
    "medusa-shared": Canary("medusa", {"heads": K, "head": "target"}, ("swapped heads",)),
    "small": Canary("small", {"layers": [0, 7], "embeddings": "own"}, ("rope",)),
}


def target(folder: Path) -> Target:
    """The canaries' target, saved as a folder that servers load."""
    hf = tiny.hf_model(
        seed=5, layers=8, vocab=VOCAB, hidden_size=128, intermediate_size=256,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    hf.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("smollm2").path).save_pretrained(folder)
    return Target.load(str(folder), device="cpu")


def texts(of: Target) -> list[Text]:
    """Three greedy texts without an end token (llama.cpp bans those), longer than is served."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(1000, VOCAB, (3, 6), generator=generator).tolist()
    written = Decoder(of).generate(prompts, GREEDY, TOKENS + K + 1)
    assert all(len(t.tokens) == TOKENS + K + 1 and min(t.tokens) > 2 for t in written)
    return written


@contextmanager
def fault(drafter: Drafter, name: str) -> Iterator[None]:
    """While it lasts, the drafter reads, and is exported, with a fault ("" for none)."""
    if not name:
        yield
    elif name == "taps + 1":
        taps = drafter.taps
        drafter.taps = [int(tap) + 1 for tap in taps]
        yield
        drafter.taps = taps
    elif name == "another mask":
        config, mask = drafter.config, drafter.mask
        drafter.config, drafter.mask = config.model_copy(update={"mask_token": 7}), 7
        yield
        drafter.config, drafter.mask = config, mask
    elif name == "norm flag":
        config = drafter.config
        flipped = not config.norm_before_residual
        drafter.config = config.model_copy(update={"norm_before_residual": flipped})
        yield
        drafter.config = config
    elif name == "swapped inputs":
        weight = drafter.fc.weight
        del drafter.fc.weight  # a parameter; what takes its place is computed from it
        drafter.fc.weight = weight.roll(weight.shape[0], 1)
        yield
        del drafter.fc.weight
        drafter.fc.weight = weight
    elif name == "swapped heads":
        blocks = drafter.blocks
        drafter.blocks = nn.ModuleList([*blocks[1:], blocks[0]])
        yield
        drafter.blocks = blocks
    else:
        hf = drafter.lm.hf  # type: ignore[union-attr]
        rotary, rope = hf.model.rotary_emb, dict(hf.config.rope_parameters)
        frequencies = rotary.inv_freq
        hf.config.rope_parameters = rope | {"rope_theta": 50.0}
        rotary.inv_freq = 50.0 ** -(torch.arange(0, 64, 2).float() / 64)
        yield
        hf.config.rope_parameters, rotary.inv_freq = rope, frequencies


def _read(of: Target, drafter: Drafter, written: list[Text]) -> Batch:
    made = [
        (t.prompt + t.tokens, [False] * len(t.prompt) + [True] * len(t.tokens)) for t in written
    ]
    return of.read(batch_of(made, GREEDY), drafter.taps)


def _said(drafter: Drafter, batch: Batch) -> tuple[Tensor, Tensor]:
    """Draft logits (n, Vd) of every anchor and depth (one where depths share rows), and the texts'
    tokens (n,) there."""
    depths = 1 if drafter.rows_shared else K
    alignment = align(batch, depths)
    unroll = drafter.unroll(batch, alignment)
    assert isinstance(unroll, Unroll)
    logits = drafter.logits(unroll.hidden, unroll.prev, unroll.depth)
    exists = unroll.index >= 0
    label = drafter.vocab.to_draft(alignment.label[exists])
    return logits[unroll.index[exists]], label


def train(of: Target, name: str, written: list[Text], steps: int = 400) -> Drafter:
    """A canary. Stops as soon as every token is said by a clear margin."""
    canary = CANARIES[name]
    torch.manual_seed(0)
    counts = torch.bincount(torch.tensor(sum((t.tokens for t in written), [])), minlength=VOCAB)
    counts[NEVER] = 1
    cls = base.family(canary.family)
    drafter = cls.create(of, cls.Config(**canary.config), counts)
    ways: list[tuple[str, Batch]] = [("", _read(of, drafter, written))]
    for wrong in (f for f in canary.faults if f != "swapped heads"):
        with fault(drafter, wrong):
            ways.append((wrong, _read(of, drafter, written)))
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=canary.lr)
    never = int(drafter.vocab.to_draft(torch.tensor(NEVER)))
    margins: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        margins.clear()
        for wrong, batch in ways:
            with fault(drafter, wrong):
                logits, label = _said(drafter, batch)
            wanted = torch.full_like(label, never) if wrong else label
            F.cross_entropy(logits, wanted).backward()
            if step % 10 == 9:
                best = logits.detach().topk(2)
                right = best.indices[:, 0] == wanted
                margins.append(float(torch.where(right, best.values @ SIGNS, -1.0).min()))
        if margins and min(margins) > 0.5:
            return drafter.eval()
        optimizer.step()
    raise AssertionError(f"the {name} canary has not learned its texts in {steps} steps")
