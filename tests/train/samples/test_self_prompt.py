"""Prompts that the target writes itself: from where its template lets the user speak, and filtered.

.venv/bin/pytest tests/train/samples/test_self_prompt.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import self_prompt as command
from draftsmith.train.data.sources import read_prompts
from draftsmith.train.samples import self_prompt
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.self_prompt import chosen, diversity, fault, user_turn, write_prompts

MARK = re.compile("<eos>")
ENDS = "{% for m in messages %}b {{ m.content }}{{ '<eos>' }}{% endfor %}"
MARKS = "{% for m in messages %}b {{ m.content }} w30 w31 {% endfor %}"


@pytest.mark.parametrize(
    ("template", "system", "ids", "stop"),
    [(ENDS, None, [3], ()), (ENDS, "q", [3, 18, 1, 3], ()), (MARKS, None, [3], ("w30 w31",))],
)
def test_user_turn(
    template: str, system: str | None, ids: list[int], stop: tuple[str, ...]
) -> None:
    assert user_turn(tiny.talker(template), system, {}) == (ids, stop)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}<eos>{% endfor %}", "nothing before a question"),
        ("{% for m in messages %}b {{ m.content }}{% endfor %}", "where a question ends"),
        ("{% for m in messages %}b {{ m.content | lower }}<eos>{% endfor %}", "as it stands"),
        (None, "no chat template"),
    ],
)
def test_templates_that_give_no_turn(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        user_turn(tiny.talker(template or ""), None, {})


def test_what_is_kept() -> None:
    texts = [
        ("What is the capital of France?", "stop"),
        ("what is the capital of france", "stop"),  # like the first
        ("Write a poem about the sea and its many storms.", "stop"),
        ("Hi", "stop"),
        ("no no no no no no no no no no no no", "stop"),
        ("Explain how a transformer model works and", "length"),
        ("Tell me <eos> about rivers in Asia", "stop"),
        ("\u8bf7\u5199\u4e00\u9996\u5173\u4e8e\u5927\u6d77\u7684\u8bd7\u548c\u5c71", "stop"),
    ]  # fmt: skip
    found = chosen(texts, MARK)
    assert found.kept == [texts[0][0], texts[2][0], texts[7][0]]
    assert found.dropped == {
        "like one before": 1, "too short": 1, "repeating themselves": 1, "without an end": 1,
        "with marks of the template": 1,
    }  # fmt: skip
    assert "3 of 8 questions kept" in str(found)


# Real questions, and what is in no language: that is kept whichever is asked for.
SPOKEN = {
    "en": "What is the capital of France?",
    "de": "Schreibe ein kurzes Gedicht über das Meer.",
    "fr": "Quelle est la capitale de la France ?",
    "es": "¿Cómo puedo aprender a programar?",
    "zh": "请写一首关于大海的诗和山",
    "code": "for i in range(10): print(i)",
    "formula": "12 + 30 * 4 = ?",
}


@pytest.mark.parametrize("languages", [(), ("en",), ("de", "zh")])
def test_languages(languages: tuple[str, ...]) -> None:
    """Those asked for are kept, others counted by what they are in; none asked for keeps all."""
    found = chosen([(text, "stop") for text in SPOKEN.values()], MARK, languages)
    others = [code for code in ("en", "de", "fr", "es", "zh") if code not in languages]
    dropped = others if languages else []
    assert found.kept == [text for name, text in SPOKEN.items() if name not in dropped]
    assert found.dropped == {f"in {code}": 1 for code in dropped}


def test_languages_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: whatever is likeliest is taken for told, and code is lost."""
    monkeypatch.setattr(self_prompt, "SURE", 0.0)
    self_prompt._identifier.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_languages(("en",))
    finally:
        monkeypatch.undo()
        self_prompt._identifier.cache_clear()


@pytest.mark.parametrize("code", ["english", "EN", "xx", "zxx"])
def test_no_such_language(code: str, tmp_path: Path) -> None:
    """Told before anything is written."""
    with pytest.raises(UserError, match=f"--languages: '{code}' is no ISO 639 code") as error:
        write_prompts(tmp_path / "p", tiny.talker(ENDS), 2, Sampler(), languages=["de", code])
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_diversity_counts_bigrams() -> None:
    assert diversity(["a b c", "d e f"]) == 1.0
    assert diversity(["a b c", "a b c"]) == 0.5
    assert diversity([]) == 0.0


def test_near_duplicates_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_prompt, "shingles", lambda text: {text})
    texts = [("What is the capital of France?", "stop"), ("what is the capital of France", "stop")]
    assert len(chosen(texts, MARK).kept) == 2


@pytest.mark.parametrize("template", [ENDS, MARKS])
def test_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """The target's own draws after its user turn; what ended, without its end."""
    monkeypatch.setattr(self_prompt, "DISTINCT", 0.0)  # tiny targets babble
    monkeypatch.setattr(self_prompt, "NEAR", 0.9)
    monkeypatch.setattr(self_prompt, "SHORTEST", 4)
    of, file = tiny.talker(template), tmp_path / "own.jsonl"
    found = write_prompts(file, of, 24, Sampler(), max_new_tokens=40, batch_size=24)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == found.kept and len(found.kept) >= 2
    assert {p.domain for p in read_prompts(file)} == {"self"}
    raw = Samples.open(tmp_path / "own.jsonl.samples", of, audit=24)
    texts = [of.tokenizer.decode(s.ids[1:]) for s in raw if s.finish == "stop"]
    for text in found.kept:
        assert any(whole.startswith(text) for whole in texts)
        assert "<eos>" not in text and "w30 w31" not in text
        assert not fault(text, "stop", MARK)
    with pytest.raises(UserError, match="exists already"):
        write_prompts(file, of, 24, Sampler())


@pytest.mark.parametrize("missing", ["datasketch", "py3langid"])
def test_without_the_data_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocked as where it is not installed; told before a target is loaded."""
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "py3langid.langid", raising=False)
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("a target is loaded"))
    self_prompt._identifier.cache_clear()
    with pytest.raises(UserError) as error:
        command.self_prompt(tmp_path / "p", languages="en")
    assert str(error.value) == f"self-prompt: {missing} is missing; pip install draftsmith[data]"
