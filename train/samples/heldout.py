"""Held-out sets: the target's own answers to prompts that no drafter learned from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.report.report import label
from draftsmith.train.data.chat_template import opening, plain
from draftsmith.train.data.prompts import Prompt, Unusable
from draftsmith.train.samples import store
from draftsmith.train.samples.generate import generate


@dataclass
class HeldOut:
    """The target's answers to held-out prompts at one sampler; domains[i] is that of texts[i]."""

    sampler: Sampler
    texts: list[Text]
    domains: list[str]
    content_hash: str


def answered(
    folder: Path,
    target: Target,
    prompts: list[Prompt],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
) -> HeldOut:
    """The answers, a samples folder within `folder` that is made once and goes on if stopped.

    Raises UserError where no answer is long enough to take a verify pass.
    """
    prompts = plain(prompts, target)
    asked = [[p.key for p in prompts], target.identity()["revision"], asdict(sampler)]
    digest = store.digest([*asked, max_new_tokens, seed])
    name = slug(f"{Path(target.source.spec).name} {label(sampler)}")
    place = folder / f"{name}-{digest[:8]}"
    samples = generate(target, prompts, sampler, max_new_tokens, place, seed=seed)
    texts, domains = [], []
    for sample in (samples[i] for i in range(len(samples))):
        for start, end in sample.spans:  # each turn is a text, asked by all before it
            finish = sample.finish if end == len(sample.ids) else "stop"
            texts.append(Text(sample.ids[:start], sample.ids[start:end], finish))
            domains.append(sample.domain)
    if all(len(text.tokens) < 2 for text in texts):
        raise UserError(f"{place}: the target ends every answer at once; give other --prompts")
    return HeldOut(sampler, texts, domains, samples.manifest["content_hash"])


def also_trained_on(samples: Path, prompts: Sequence[Prompt], target: Target) -> int | None:
    """How many of the prompts stand in a samples folder too; None where the folder is gone."""
    if not (samples / store.ROWS).is_dir():
        return None
    seen = set(store.load(samples / store.ROWS)["key"])
    return sum(not seen.isdisjoint(_keys(prompt, target)) for prompt in prompts)


def _keys(prompt: Prompt, target: Target) -> set[str]:
    """What samples may know a prompt by: imported ones by its token ids, others perhaps by its
    first turn alone."""
    keys = {prompt.key, prompt.first_turn.key}
    with suppress(Unusable):  # it cannot be asked: no answer here stands for it
        keys.add(Prompt(None, tuple(opening(prompt, target)), "").key)
    return keys


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.=]+", "-", name)
