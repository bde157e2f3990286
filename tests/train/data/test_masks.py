"""Masks for answers that were given: read off the template, or refused; and how they are shown.

.venv/bin/pytest tests/train/data/test_masks.py
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import resolve
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import sample as command
from draftsmith.train.data import masks
from draftsmith.train.data.masks import masked
from draftsmith.train.data.prompts import Prompt, Unusable
from draftsmith.train.data.sources import Reading, read_prompts
from draftsmith.train.samples.importing import import_given
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Sample

HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}"
TAIL = "{% else %}{{ m.content }} z {% endif %}{% endfor %}"
ASKS = "{% if add_generation_prompt %}y {% endif %}"
SAID = "{{ m.content }}<eos>"
# Templates by name; the generation prompt is a "y", a turn's separator an "x".
PLAIN = HEAD + "y " + SAID + " x " + TAIL + ASKS
TAGS = HEAD + "y {% generation %}" + SAID + "{% endgeneration %} x " + TAIL + ASKS
WIDE = HEAD + "y {% generation %}" + SAID + " x {% endgeneration %}" + TAIL + ASKS
DROPS = PLAIN.replace("{{ m.content }}<eos>", "{{ m.content if loop.last else 'w' }}<eos>")
THINKS = HEAD + "y w " + SAID + TAIL + ASKS  # an empty thought before each answer
APART = HEAD + "v " + SAID + TAIL + ASKS  # not what the generation prompt promises
ENDLESS = HEAD + "y {{ m.content }} x " + TAIL + ASKS
MANY = HEAD + "y {% generation %}{{ m.content }}{% endgeneration %} x {% generation %}w" \
    "{% endgeneration %}" + TAIL + ASKS  # fmt: skip
UNTAGGED = HEAD + "y {% if loop.last %}{% generation %}" + SAID + "{% endgeneration %}{% else %}" \
    + SAID + "{% endif %} x " + TAIL + ASKS  # fmt: skip


def target(template: str) -> Target:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return Target(tiny.hf_model(), tokenizer, tiny.source("given"))


def talk(*contents: str) -> Prompt:
    roles = ("user", "assistant")
    return Prompt(
        tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents)), None, "d"
    )


TALK = talk("a", "b c", "d", "e")


def learned(template: str, prompt: Prompt = TALK) -> list[str]:
    """The rows, what is learned from in brackets."""
    of = target(template)
    out = []
    for ids, made in masked(prompt, of):
        words = [of.tokenizer.convert_ids_to_tokens(i) for i in ids]
        text = " ".join(f"[{w}]" if m else w for w, m in zip(words, made, strict=True))
        out.append(text.replace("] [", " "))
    return out


@pytest.mark.parametrize(
    ("template", "rows"),
    [
        (PLAIN, ["a z y [b c <eos>] x d z y [e <eos>]"]),
        (TAGS, ["a z y [b c <eos>] x d z y [e <eos>] x"]),
        (DROPS, ["a z y [b c <eos>]", "a z y w <eos> x d z y [e <eos>]"]),
    ],
)
def test_masks(template: str, rows: list[str]) -> None:
    assert learned(template) == rows


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (THINKS, "answers to which the chat template adds words of its own"),
        (WIDE, "answers to which the chat template adds words of its own"),
        (APART, "answers that the template writes apart from its generation prompt"),
        (ENDLESS, "answers that the template closes with no end token"),
        (MANY, "generation tags that do not mark every answer once"),
        (UNTAGGED, "generation tags that do not mark every answer once"),
    ],
)
def test_never_a_guess(template: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        learned(template)


def test_what_stands_before_the_first_question_is_not_learned() -> None:
    hello = {"role": "assistant", "content": "q"}
    prompt = Prompt((hello, *(TALK.messages or ())), None, "d")
    assert learned(PLAIN, prompt) == ["y q <eos> x a z y [b c <eos>] x d z y [e <eos>]"]


@pytest.mark.parametrize(("name", "template"), [("_same", THINKS), ("_same", WIDE)])
def test_planted(monkeypatch: pytest.MonkeyPatch, name: str, template: str) -> None:
    """Without the comparison with the answer, an empty thought or a separator is taught."""
    monkeypatch.setattr(masks, name, lambda *arguments: None)
    assert any("[w" in row or "x]" in row for row in learned(template))


@pytest.mark.real
def test_a_line_break_after_the_end_token_is_not_learned() -> None:
    """Though the template's tags take it in, as those of many published models do."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2", weights=False).path)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    of: Any = SimpleNamespace(tokenizer=tokenizer, eos_ids=[end], max_positions=2048)
    ((ids, made),) = masked(talk("Hi", "Hello.\n\nYou", "Why?", "So"), of)
    spans = [tokenizer.decode(ids[a:b]) for a, b in Sample(ids, made, "stop", "d", "k").spans]
    assert spans == ["Hello.\n\nYou<|im_end|>", "So<|im_end|>"]


# ---------------------------------------------------------------- stored and shown


def conversations(path: Path) -> list[Prompt]:
    rows = [
        {"messages": list(TALK.messages or ())},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [*(TALK.messages or ())[:1], {"role": "assistant", "content": "b <eos>"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(path, Reading(given=True))


def test_import_given(tmp_path: Path) -> None:
    """Marked foreign, so that replay says that it is biased; what cannot be masked is counted."""
    of, told = target(PLAIN), []
    prompts = conversations(tmp_path / "f.jsonl")
    assert len(prompts) == 2
    samples = import_given(prompts, of, Sampler(), tmp_path / "s", told.append)
    assert samples.foreign and samples.manifest["origin"] == "given" and len(samples) == 1
    assert samples[0].finish == "stop" and len(samples[0].spans) == 2
    assert collate(samples, [[0]], 64).foreign
    (line,) = told
    assert "1 of 2 conversations cannot be masked: 1 text that holds the target's own" in line
    with pytest.raises(UserError, match="none of 2 can be masked") as error:
        import_given(prompts, target(ENDLESS), Sampler(), tmp_path / "t", told.append)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "t" / "manifest.json").exists()


def test_alpaca_answers(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"instruction": "a", "input": "b", "output": "c"}')
    (prompt,) = read_prompts(path, Reading(given=True))
    assert [m["content"] for m in prompt.messages or ()] == ["a\n\nb", "c"]


def printed(thing: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_show_colours_what_is_learned() -> None:
    of = target(PLAIN)
    ((ids, made),) = masked(TALK, of)
    sample = Sample(ids, made, "stop", "d", "k")
    text = command.coloured(sample, of.tokenizer)
    spans = [(text.plain[s.start : s.end].strip(), s.style) for s in text.spans]
    learned_ = [word for word, style in spans if style == command.LEARNED and word]
    ends = [word for word, style in spans if style == command.END]
    assert learned_ == ["b c", "e"] and ends == ["<eos>", "<eos>"]
    table = printed(command.counts([sample, sample]))
    assert "2 end by stop" in table and "10" in table  # of 2 * 12 tokens 2 * 5 are learned from
    planted = Sample(ids, [False] + made[:-1], "stop", "d", "k")  # a mask late by one
    shifted = command.coloured(planted, of.tokenizer)
    assert [(s.start, s.end, s.style) for s in shifted.spans] != [
        (s.start, s.end, s.style) for s in text.spans
    ]
