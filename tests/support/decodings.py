"""Decoded texts: prompts, laws and the checks that chains and trees share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
import tiny
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.text import Round, Text

VOCAB = 12  # few tokens: bad drafters are right now and then, and prompt lookup finds something
SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "small": {"layers": [0, 1, 2, 3]},
    "eagle": {"taps": [1, 2, 4]},
}


def noisy(name: str, target: Target, noise: float | None = None, **settings: Any) -> Drafter:
    """A drafter with noise on its weights, so that it is right at times and wrong at times."""
    cls = family(name)
    counts = torch.arange(target.vocab_size) % 3 != 2  # a reduced vocabulary: 0, 1, 3, 4, ..
    with torch.random.fork_rng():
        torch.manual_seed(0)  # what is fresh in it must not depend on the tests before
        drafter = cls.create(target, cls.Config(**{**SETTINGS[name], **settings}), counts.long())
    noise = noise or {"ngram": 0.0, "small": 0.04, "eagle": 0.2}[name]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.requires_grad:
                weight += noise * torch.randn(weight.shape, generator=generator)
    return drafter.eval()


@cache
def independent(family_name: str, vocab: int) -> Any:
    """The same weights in a model that draftsmith never touched."""
    return tiny.hf_model(family_name, vocab=vocab)


@cache
def generated(
    family_name: str, prompt: tuple[int, ...], tokens: int, eos: int = -1, vocab: int = VOCAB
) -> list[int]:
    """The greedy answer by transformers; eos -1 never comes."""
    ids = torch.tensor([prompt])
    out = independent(family_name, vocab).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=[eos],
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def end_tokens(patch: pytest.MonkeyPatch, target: Target, ids: list[int]) -> None:
    patch.setattr(target.hf.generation_config, "eos_token_id", ids)


def ragged(count: int, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of uneven length, the first of a single token."""
    return [[5], *tiny.prompts(count - 1, 0, vocab)]


def accepted(texts: Sequence[Text]) -> list[int]:
    return [r.accepted for text in texts for r in text.rounds]


def check_rounds(text: Text, k: int) -> None:
    """Rounds tile the text: each starts where the one before it ended, and the last ends it."""
    at = len(text.prompt) - 1
    end = at + len(text.tokens)
    for round in text.rounds:
        assert round.anchor == at and 0 <= round.accepted <= round.proposed <= k
        assert at + 1 + round.proposed <= end, "drafts past the end are not counted"
        at += 1 + round.accepted
    assert end - at in (0, 1)


def cut(rounds: Sequence[Round], end: int) -> list[Round]:
    """Rounds of a text that goes on, cut to one whose last token stands at `end`."""
    return [Round(a, min(p, end - a - 1), min(m, end - a - 1)) for a, p, m in rounds if a + 1 < end]


def inside_blocks(text: Text) -> list[int]:
    """Places in text.tokens of accepted drafts that are followed by more of their own round."""
    first = len(text.prompt)
    return [
        r.anchor + 2 + j - first for r in text.rounds for j in range(r.accepted)
    ]  # fmt: skip


ROWS = 2500
LAW_VOCAB = 6
PROMPT = [2, 4, 3, 5]


@cache
def law_after_root(sampler: Sampler) -> tuple[int, Tensor]:
    """The likeliest root, and the exact joint law (V,) * 4 after it: an untouched float64 model."""
    hf = tiny.hf_model("Llama", vocab=LAW_VOCAB).double()
    cuts = (sampler.temperature, sampler.top_k, sampler.top_p)
    root = int(reference.target_laws(hf, PROMPT, cuts)[-1].argmax())
    paths = list(itertools.product(range(LAW_VOCAB), repeat=3))
    with torch.no_grad():
        logits = hf(torch.tensor([[*PROMPT, root, *path] for path in paths])).logits
    joint = torch.ones((LAW_VOCAB,) * 4, dtype=torch.float64)
    for j in range(4):
        prefixes = {path[:j]: z for path, z in zip(paths, logits[:, len(PROMPT) + j], strict=True)}
        for prefix, z in prefixes.items():
            joint[prefix] *= reference.sampled(z, *cuts).view(-1, *(1,) * (3 - j))
    return root, joint


def law_drafter(name: str) -> Drafter:
    target = tiny.target("Llama", vocab=LAW_VOCAB)
    settings = {"eagle": {"draft_vocab": 4}, "small": {"layers": [0, 3]}}.get(name, {})
    return noisy(name, target, **settings)
