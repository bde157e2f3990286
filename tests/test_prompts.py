"""Prompts: the project's own split, users' files with all their quirks, token ids.

.venv/bin/pytest tests/test_prompts.py
"""

import json
from pathlib import Path

import pytest

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import Target
from draftsmith.train.prompts import Prompt, asked, encode, product_prompts, read_prompts


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "mine.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(prompts: list[Prompt]) -> list[str]:
    return [p.messages[-1]["content"] for p in prompts]


def test_product_prompts_split_every_eighth() -> None:
    train, heldout = product_prompts("train"), product_prompts("heldout")
    assert not {p.key for p in train} & {p.key for p in heldout}
    for domain in {p.domain for p in train}:
        n = sum(p.domain == domain for p in train)
        held = sum(p.domain == domain for p in heldout)
        assert held == (n + held) // 8 > 0
    assert [p.key for p in product_prompts("train")] == [p.key for p in train]


def test_key_is_the_content() -> None:
    assert asked("a", "x").key == asked("a", "y").key != asked("b", "x").key
    system = ({"role": "system", "content": "a"}, {"role": "user", "content": "a"})
    assert Prompt(system, None, "").key != asked("a", "").key
    swapped = ({"content": "a", "role": "user"},)
    assert Prompt(swapped, None, "").key == asked("a", "").key
    assert Prompt(None, (1, 2), "").key != Prompt(None, (12,), "").key


def test_every_kind_of_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "answer"},
    ]
    rows = [
        {"prompt": "a", "category": "math"},
        {"turns": ["b", "later"], "source": "set"},
        {"messages": chat},
        {"prompt_ids": [3, 4], "category": None},
        {"prompt": "text wins", "prompt_ids": [3]},
    ]
    for wrap in (json.dumps, lambda row: json.dumps([row], indent=2)):
        caplog.clear()
        got = [read_prompts(write(tmp_path, wrap(row)))[0] for row in rows]
        assert [p.domain for p in got] == ["math", "set", "mine", "mine", "mine"]
        assert [p.ids for p in got] == [None, None, None, (3, 4), None]
        assert texts(got[:3] + got[4:]) == ["a", "b", "c", "text wins"]
        assert got[2].messages == ({"role": "system", "content": "s"}, chat[1])
        assert caplog.text.count("1 of 1 rows have later turns") == 2


@pytest.mark.parametrize("array", [False, True])
def test_bom_crlf_blank_lines_and_line_separators(tmp_path: Path, array: bool) -> None:
    """U+2028 and U+0085 may stand bare in a JSON string; str.splitlines would cut there."""
    odd = "one\u2028two\u0085three"
    rows = [json.dumps({"prompt": p}, ensure_ascii=False) for p in ("a", odd, "b")]
    lines = ["[", rows[0], ",", rows[1], ",", rows[2], "]"] if array else ["", *rows, " ", ""]
    content = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()
    assert texts(read_prompts(write(tmp_path, content))) == ["a", odd, "b"]


FAULTS = {
    "empty": ("", "holds no rows"),
    "blank": (" \r\n\n", "holds no rows"),
    "no row": ("[]", "holds no rows"),
    "cut": ('{"prompt": "a"}\n\n{"prompt": "b', "mine.jsonl line 3: not JSON"),
    "cut array": ('[\n{"prompt": "a"},\n{"prompt": ', "mine.jsonl line 3: not JSON"),
    "text": ("What is this?", "line 1: not JSON"),
    "pretty": ('{\n "prompt": "a"\n}', "line 1: not JSON"),
    "string": ('"a"', "line 1: str where an object"),
    "number": ("[1]", "row 1: int where an object"),
    "no text": ('{"prompt": "a"}\n{"question": "b"}', "line 2: has no text (fields: question)"),
    "no fields": ("{}", "has no text (fields: none)"),
    "blank text": ('{"prompt": " "}', "line 1: prompt holds no text"),
    "number text": ('{"prompt": 3}', "prompt holds no text"),
    "no turns": ('{"turns": []}', "turns is no list"),
    "null turn": ('{"turns": [null]}', "turns[0] holds no text"),
    "assistant only": (
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        "messages is no list",
    ),
    "parts": ('{"messages": [{"role": "user", "content": [1]}]}', "messages is no list"),
    "ids": ('{"prompt_ids": [1, true]}', "prompt_ids is no list of token ids"),
    "no ids": ('{"prompt_ids": []}', "prompt_ids is no list of token ids"),
    "half": ('{"prompt": "a \\ud83d"}', "prompt holds half a character"),
    "latin-1": (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), "is not UTF-8"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_file(tmp_path: Path, name: str) -> None:
    content, message = FAULTS[name]
    path = write(tmp_path, content)
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_prompts(path)


def test_encode_is_the_template(tmp_path: Path) -> None:
    target = tiny.target()
    got = encode([asked("a b", ""), Prompt(None, (5, 6), "")], target)
    assert got == [[2, 3, 27], [5, 6]]  # the template ends each message with a z


def other(template: str | None) -> Target:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return Target(tiny.hf_model(), tokenizer, tiny.source("other"))


@pytest.mark.parametrize(
    ("template", "prompt", "message"),
    [
        (None, asked("a", ""), "target other: its tokenizer has no chat template; use"),
        ("{{ '' }}", asked("a", ""), "prompt 0 ('a'): yields no tokens"),
        (
            "{{ raise_exception('no\nway') }}",
            asked("a", ""),
            "the chat template refuses it (no way",
        ),
        (None, Prompt(None, (tiny.VOCAB,), ""), f"token {tiny.VOCAB} is outside the vocabulary"),
    ],
)
def test_encode_faults(template: str | None, prompt: Prompt, message: str) -> None:
    with pytest.raises(UserError) as error:
        encode([prompt], other(template))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_ids_need_no_template() -> None:
    assert encode([Prompt(None, (5,), "")], other(None)) == [[5]]


@pytest.mark.real
def test_smollm2_template() -> None:
    """The template's default system prompt stands as it is."""
    target = Target.load("smollm2")
    (ids,) = encode([asked("Hi", "")], target)
    text = target.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3
