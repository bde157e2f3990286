"""Drafters and texts to replay, and their ratios against float64 laws."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import reference
import tiny
import toys  # noqa: F401  (registers the toy families)
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.batch import Batch, batch_of
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance.replay import TextRatios, summarise, text_ratios

SETTINGS: dict[str, dict[str, Any]] = {
    "small": {"layers": [0, 1, 3]},
    "eagle": {"taps": [1, 4, "normed"], "draft_vocab": 9},
    "ngram": {"max_n": 2},
    "medusa": {"heads": 3, "draft_vocab": 8},
    "hydra": {"heads": 3},
    "mtp chain": {"modules": 3},
    "dflash": {"taps": [1, 3], "layers": 2, "block_size": 5, "draft_vocab": 10},
    "peagle": {"taps": [1, 4], "layers": 2, "draft_vocab": 10},
    "dspark": {"taps": [1, 3], "layers": 2, "block_size": 4, "markov_rank": 4},
}


@cache
def drafter(name: str, family_name: str = "Llama") -> Drafter:
    """Random weights, scaled up so that laws are peaked."""
    cls, target = family(name.split()[0]), tiny.target(family_name, vocab=VOCAB)
    counts = torch.arange(target.vocab_size) * 7 % 11
    torch.manual_seed(3)
    made = cls.create(target, cls.Config(**SETTINGS.get(name, {})), counts)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight += (0.03 if name == "small" else 0.2) * torch.randn_like(weight)
    return made.eval()


VOCAB = 12  # few tokens: random drafters are right at times
SAMPLERS = {"plain": Sampler(1.0), "cut": Sampler(0.7, top_k=8, top_p=0.97), "greedy": Sampler(0.0)}


@cache
def own_text(family_name: str, sampler: Sampler, tokens: int = 11) -> tuple[list[int], int]:
    """A text of the target itself, after a prompt that repeats itself, and the prompt's length."""
    prompts = [prompt * 2 for prompt in tiny.prompts(30, 4, VOCAB)]
    decoder = tiny.Decoder(tiny.target(family_name, vocab=VOCAB))
    texts = decoder.generate(prompts, sampler, tokens, seed=2)
    text = max(texts, key=lambda t: (len(t.tokens), len(set(t.tokens))))  # the most varied one
    return text.prompt + text.tokens, len(text.prompt)


def flags(of: list[int], start: int) -> list[bool]:
    return [i >= start for i in range(len(of))]


def read(name: str, family_name: str, batch: Batch) -> tuple[Drafter, Batch]:
    made = drafter(name, family_name)
    return made, made.target.read(batch, made.taps)


def plain_small(made: Drafter) -> Any:
    """The draft model's weights in a float64 model with transformers' own attention."""
    own: Any = made.lm.hf  # type: ignore[union-attr]
    hf = AutoModelForCausalLM.from_config(type(own.config)(**own.config.to_dict()))
    hf.load_state_dict(own.state_dict())
    return hf.double().eval()


def check_ratios(name: str, family_name: str, sampler_name: str) -> None:
    """min(1, q/p) at the text's own tokens, for every anchor and depth; 1[argmax q = x] at 0."""
    sampler, depths = SAMPLERS[sampler_name], 3
    tokens, root = own_text(family_name, sampler)
    cuts = (sampler.temperature, sampler.top_k, sampler.top_p)
    made, batch = read(name, family_name, batch_of([(tokens, flags(tokens, root))], sampler))
    hf = tiny.hf_model(family_name, vocab=VOCAB).double()
    if name == "small":
        hf_small = plain_small(made)

    def draft(anchor: int, depth: int) -> Any:
        if name == "small":
            return reference.small_law(hf_small, tokens, anchor, depth, cuts)
        if name == "eagle":
            config = made.config.model_dump()
            return reference.eagle_law(made.weights(), config, hf, tokens, anchor, depth, cuts)
        guess = reference.ngram_guess(tokens, anchor, 2, 1, depths)
        return guess[depth] if depth < len(guess) else None

    known = reference.ratios(reference.target_laws(hf, tokens, cuts), tokens, root, depths, draft)
    (table,) = text_ratios(made, batch, depths)
    assert len(table.limit) == len(tokens) - root and table.prompt == 0
    assert table.limit.tolist() == [len(row) for row in known] + [0]
    for found, row in zip(table.chance, known, strict=False):
        np.testing.assert_allclose(found[: len(row)], np.minimum(row, 1.0), atol=2e-4)
    values = {round(min(r, 1.0), 3) for row in known for r in row}
    assert max(values) > 0.3 and min(values) < 0.3, "a table that says nothing"
    assert values == {0, 1} or (name != "ngram" and not sampler.greedy and len(values) > 2)
    passes = reference.expected_passes(known)
    assert summarise([table], depths).pooled.passes == pytest.approx(passes, abs=1e-3)


def same(found: TextRatios, known: TextRatios, atol: float = 2e-5) -> None:
    """Equal tables, but for the prompt's number."""
    np.testing.assert_array_equal(found.limit, known.limit)
    exists = np.arange(found.chance.shape[1]) < found.limit[:, None]
    np.testing.assert_allclose(found.chance[exists], known.chance[exists], atol=atol)
    np.testing.assert_allclose(found.gap[exists], known.gap[exists], atol=1e-3, rtol=1e-4)


CHAT = [False] * 4 + [True] * 6 + [False] + [True] * 5 + [False] * 3 + [True] + [False, True, True]


def pack(rows: list[list[tuple[list[int], list[bool]]]]) -> Batch:
    """Several samples in each row, positions starting anew, padding at the end."""
    width = 2 + max(sum(len(ids) for ids, _ in row) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    position, segment = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    made = torch.zeros_like(tokens, dtype=torch.bool)
    for b, row in enumerate(rows):
        at = 0
        for s, (ids, own) in enumerate(row):
            here = slice(at, at := at + len(ids))
            tokens[b, here], made[b, here] = torch.tensor(ids), torch.tensor(own)
            position[b, here], segment[b, here] = torch.arange(len(ids)), s
    return Batch(tokens, position, segment, made)
