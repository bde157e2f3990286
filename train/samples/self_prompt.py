"""Prompts that the target writes itself, where a user has none (Magpie, arXiv 2406.08464).

An instruct model, given its chat template up to where the user's words would begin, goes on with a
question of the kind it was tuned on. What it writes is kept where it is a whole question: it ended
by itself, is not too short, does not repeat itself, holds none of the template's marks, is in a
language asked for (by `py3langid`: 139 languages, 5 MB), and is not nearly the same as one kept
before (MinHash over word shingles, by `datasketch`).
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.train import disk
from draftsmith.train.data.chat_template import check_template, control_tokens, encoded, rendered
from draftsmith.train.data.prompts import Messages, Prompt
from draftsmith.train.samples.generate import generate

SHORTEST = 12  # characters of a question
DISTINCT = 0.7  # share of word trigrams that must differ
NEAR = 0.7  # Jaccard similarity of shingles from which two questions are the same
SHINGLE = 3  # words; of texts without spaces: characters
PERMUTATIONS = 128  # of a MinHash: similarity to about 0.09
WORDS = 2000  # that the diversity figure is taken over
_MARK = "QUESTION"
# Of the probability. Questions in a language get 0.3 and more, code and formulas less than 0.1.
SURE = 0.2
_NONE = ("und", "zxx")  # undecided; no language


@dataclass
class Written:
    """What was kept of the questions written, and how many were dropped for which reason."""

    kept: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.kept) + sum(self.dropped.values())
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        return (
            f"{len(self.kept)} of {total} questions kept ({why or 'none dropped'}); distinct "
            f"bigrams in {WORDS} words: {diversity(self.kept):.2f}"
        )


def write_prompts(
    file: Path,
    target: Target,
    count: int,
    sampler: Sampler,
    *,
    max_new_tokens: int = 128,
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch_size: int = 16,
    languages: Sequence[str] = (),
) -> Written:
    """Lets the target write `count` questions and those kept into a JSONL file of `prompt`s.

    languages: ISO 639 codes of those kept; none given keeps all. Code and formulas are in none.
    What it wrote lies beside the file (FILE.samples), so that a killed run goes on. Raises
    UserError: no chat template, or one that has no place where a question begins; none is kept.
    """
    if file.exists():
        raise UserError(f"{file}: exists already; name another file, or remove it")
    check(languages)
    prefix, stop = user_turn(target, system, template or {})
    raw = generate(
        target, [Prompt(None, tuple(prefix), "self")] * count, sampler, max_new_tokens,
        file.with_name(file.name + ".samples"), seed, batch_size, stop=stop,
    )  # fmt: skip
    texts = []
    for sample in (raw[i] for i in range(len(raw))):
        tokens = sample.ids[len(prefix) :]
        tokens = tokens[:-1] if tokens[-1] in target.eos_ids else tokens
        text = str(target.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        for mark in stop:
            text = text.partition(mark)[0]
        texts.append((text.strip(), sample.finish))
    found = chosen(texts, control_tokens(target.tokenizer), languages)
    if not found.kept:
        raise UserError(f"{file}: no question is kept ({found}); raise --count or --max-new-tokens")
    lines = (
        json.dumps({"prompt": text, "source": "self"}, ensure_ascii=False) for text in found.kept
    )
    disk.write(file, "".join(line + "\n" for line in lines))
    return found


def user_turn(
    target: Target, system: str | None, template: Mapping[str, Any]
) -> tuple[list[int], tuple[str, ...]]:
    """Token ids up to where the user's words begin, and the string that ends them, unless an end
    token does."""
    messages: Messages = ({"role": "user", "content": _MARK},)
    if system:
        messages = ({"role": "system", "content": system}, *messages)
    prompt = Prompt(messages, None, "self", template=template)
    check_template([prompt], target)
    before, mark, after = rendered(target, prompt, messages, ask=False).partition(_MARK)
    if not mark or _MARK in after:
        raise UserError(
            f"target {target.source.spec}: its chat template does not write a question as it "
            "stands; give prompts"
        )
    ids, closing = encoded(target, before), encoded(target, after)
    if not ids:
        raise UserError(
            f"target {target.source.spec}: its chat template has nothing before a question; give "
            "prompts, or --system"
        )
    if closing and closing[0] in target.eos_ids:
        return ids, ()
    first = str(target.tokenizer.decode(closing[:1])).strip() if closing else ""
    end = first if control_tokens(target.tokenizer).fullmatch(first) else after.strip()
    if not end:
        raise UserError(
            f"target {target.source.spec}: its chat template does not mark where a question ends; "
            "give prompts"
        )
    return ids, (end,)


# ---------------------------------------------------------------- what is kept


def chosen(
    texts: Iterable[tuple[str, str]], control: re.Pattern[str], languages: Sequence[str] = ()
) -> Written:
    """The questions kept of (text, finish) pairs, in their order."""
    datasketch, out = _library("datasketch"), Written()
    known = datasketch.MinHashLSH(threshold=NEAR, num_perm=PERMUTATIONS)
    for number, (text, finish) in enumerate(texts):
        reason = fault(text, finish, control, languages)
        if not reason:
            print_ = datasketch.MinHash(num_perm=PERMUTATIONS)
            print_.update_batch([piece.encode() for piece in shingles(text)])
            if known.query(print_):
                reason = "like one before"
            else:
                known.insert(number, print_)
        if reason:
            out.dropped[reason] = out.dropped.get(reason, 0) + 1
        else:
            out.kept.append(text)
    return out


def fault(text: str, finish: str, control: re.Pattern[str], languages: Sequence[str] = ()) -> str:
    """Why a text is no question to keep; "" where it is one."""
    if finish != "stop":
        return "without an end"
    if control.search(text):
        return "with marks of the template"
    if len(text) < SHORTEST:
        return "too short"
    pieces = _pieces(text.lower(), SHINGLE)
    if len(set(pieces)) < DISTINCT * len(pieces):
        return "repeating themselves"
    found = language(text) if languages else ""
    return f"in {found}" if found and found not in languages else ""


def shingles(text: str) -> set[str]:
    """Runs of SHINGLE words (or characters), without case and punctuation."""
    plain = "".join(c if c.isalnum() else " " for c in text.lower())
    return set(_pieces(plain, SHINGLE))


def _pieces(text: str, size: int) -> list[str]:
    words = text.split()
    # A word of 20 letters on average: a language that writes none apart.
    units = words if len(text) < 20 * len(words) else list(text)
    return [" ".join(units[i : i + size]) for i in range(max(1, len(units) - size + 1))]


def diversity(texts: Sequence[str]) -> float:
    """Share of distinct word bigrams in the first WORDS words: 1 is all different.

    Over so many words, because the share falls with the amount of text.
    """
    pairs: list[str] = []
    for text in texts:
        if len(pairs) >= WORDS:
            break
        pairs += _pieces(text.lower(), 2)
    pairs = pairs[:WORDS]
    return len(set(pairs)) / len(pairs) if pairs else 0.0


# ---------------------------------------------------------------- languages, and the data extra


def language(text: str) -> str:
    """Its ISO 639 code; "" where none can be named: code, formulas, a word or two."""
    found, _ = _identifier().classify(text)
    return "" if found in _NONE else str(found)


def check(languages: Sequence[str]) -> None:
    """Raises UserError for a code that no text gets, or where the data extra is not installed."""
    _library("datasketch")
    known = [] if not languages else [c for c in _identifier().labels if c not in _NONE]
    for code in languages:
        if code not in known:
            near = difflib.get_close_matches(code, known, n=3, cutoff=0.3)
            hint = f"did you mean {' or '.join(near)}?" if near else "write e.g. en,de"
            raise UserError(f"--languages: {code!r} is no ISO 639 code that is known; {hint}")


@cache
def _identifier() -> Any:
    module = _library("py3langid.langid")
    return module.LanguageIdentifier.from_model_file(
        module.MODEL_FILE, norm_probs=True, min_confidence=SURE
    )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"self-prompt: {name.partition('.')[0]} is missing; pip install draftsmith[data]"
        ) from None
