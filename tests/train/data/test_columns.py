"""Files as people publish them: each row is asked rightly, or skipped for a counted reason.

.venv/bin/pytest tests/train/data/test_columns.py
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.errors import UserError
from draftsmith.train.data import columns
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.sources import Reading, prompts_of, read_prompts, read_source


def chat(*contents: Any, first: str = "user") -> list[dict[str, Any]]:
    """Messages in turn from the user and the assistant."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "c1", "function": {"name": "f", "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@dataclass
class Shape:
    """A file's bytes, the questions that its rows ask (a list of turns each, every message that
    stands before an answer joined by "|"), and what is counted as skipped."""

    content: bytes
    asks: list[list[str]]
    skipped: dict[str, int] = field(default_factory=dict)
    name: str = "f.jsonl"


SHAPES = {
    "messages, several turns": Shape(
        lines({"messages": [{"role": "system", "content": "s"}, *chat("a", "b", "c", "d")]}),
        [["s|a", "c"]],
    ),
    "ShareGPT": Shape(
        lines({"id": "x_0", "conversations": [
            {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
            {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}),
        [["a", "c"]],
    ),
    "ShareGPT that begins with the assistant": Shape(
        lines({"conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "a"},
                                 {"from": "gpt", "value": "b"}]}),
        [["hello|a"]],
    ),
    "ShareGPT with a system column": Shape(
        lines({"system": "s", "conversations": [{"from": "human", "value": "a"}]}), [["s|a"]]
    ),
    "ShareGPT with roles of its own": Shape(
        lines({"conversations": [{"from": "human", "value": "a"}]},
              {"conversations": [{"from": "narrator", "value": "b"}]}),
        [["a"]], {"a message of no known role": 1},
    ),
    "Alpaca": Shape(
        lines({"instruction": "a", "input": "x", "output": "y"},
              {"instruction": "b", "input": "", "output": "y"},
              {"instruction": "c", "input": None, "history": [["q", "r"]]}),
        [["a\n\nx"], ["b"], ["q", "c"]],
    ),
    "turns, and a prompt that is a list": Shape(
        lines({"turns": ["a", "b"], "category": "math"}), [["a", "b"]]
    ),
    "prompt as messages": Shape(lines({"prompt": chat("a"), "chosen": chat("b")}), [["a"]]),
    "a column that nobody knows": Shape(lines({"id": 1, "Frage": "a"}), [["a"]]),
    "empty turns": Shape(
        lines({"messages": chat("a", "", "c", "d")}, {"messages": chat("a", "b", " ", "d")},
              {"messages": chat("", "b")}),
        [["a", "c"]], {"messages holds no text": 2},
    ),
    "null content": Shape(
        lines({"messages": chat("a", None)}, {"messages": chat(None, "b")}, {"messages": None}),
        [["a"]], {"messages holds no text": 1, "has no messages": 1},
    ),
    "system only, assistant only, nobody": Shape(
        lines({"messages": [{"role": "system", "content": "s"}]}, {"messages": []},
              {"messages": chat("a", first="assistant")}, {"messages": chat("ok")}),
        [["ok"]], {"messages has no user turn": 2, "messages holds no text, nor a list of texts or "
                   "messages": 1},
    ),
    "an empty system message": Shape(
        lines({"messages": [{"role": "system", "content": ""}, *chat("a")]}), [["a"]]
    ),
    "two user turns in a row": Shape(
        lines({"messages": [*chat("a"), *chat("b", "c", "d")]}), [["a|b", "d"]]
    ),
    "ends with the user, ends with the assistant": Shape(
        lines({"messages": chat("a", "b", "c")}, {"messages": chat("a", "b")}), [["a", "c"], ["a"]]
    ),
    "tool calls and results": Shape(
        lines({"tools": TOOLS, "messages": [
            *chat("a"), {"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}')]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            *chat("b", "c", first="assistant")]}),
        [["a||42", "c"]],
    ),
    "tools as JSON text": Shape(
        lines({"tools": json.dumps(TOOLS), "messages": chat("a")},
              {"tools": "none", "messages": chat("b")}),
        [["a"]], {"tools that are no list of objects": 1},
    ),
    "content in parts": Shape(
        lines({"messages": chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])},
              {"messages": chat([{"type": "image_url", "image_url": {"url": "u"}}])}),
        [["ab"]], {"content that is not text": 1},
    ),
    "messages as an object of lists": Shape(
        lines({"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}), [["a"]]
    ),
    "messages as JSON text": Shape(lines({"messages": json.dumps(chat("a", "b", "c"))}),
                                   [["a", "c"]]),
    "unicode": Shape(
        lines({"prompt": "one\u2028two\u0085three"},
              {"prompt": "e\u0301 \U0001f9d1\u200d\U0001f680"})
        + b'{"prompt": "half \\ud83d"}\n{"prompt": "caf\xe9"}\n{"prompt": "nul \\u0000"}\n',
        [["one\u2028two\u0085three"], ["e\u0301 \U0001f9d1\u200d\U0001f680"], ["nul \0"]],
        {"half a character, or bytes that are not UTF-8": 1, "not UTF-8 text": 1},
    ),
    "very long": Shape(lines({"prompt": "a" * 3_000_000}), [["a" * 3_000_000]]),
    "ids that repeat": Shape(lines({"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}),
                             [["a"], ["b"]]),
    "BOM, CRLF, blank lines": Shape(
        b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}\r\n', [["a"], ["b"]]
    ),
    "trailing commas": Shape(b'{"prompt": "a"},\n{"prompt": "b"},\n', [["a"], ["b"]]),
    "an array with a trailing comma": Shape(
        b'\xef\xbb\xbf [\r\n{"prompt": "a"},\r\n{"prompt": "b"},\r\n]', [["a"], ["b"]], {}, "f.json"
    ),
    "an array that was cut": Shape(
        b'[{"prompt": "a"}, {"prompt": "b"}, {"pro', [["a"], ["b"]], {"not JSON": 1}, "f.json"
    ),
    "an array that was cut behind a comma": Shape(
        b'[{"prompt": "a"}, ', [["a"]], {"not JSON": 1}, "f.json"
    ),
    "two arrays in one file": Shape(
        b'[{"prompt": "a"}]\n[{"prompt": "b"}, {"prompt": "c"}]', [["a"]],
        {"text behind the end of the array": 1}, "f.json",
    ),
    "lines that were cut": Shape(
        b'{"prompt": "a"}\n{"prompt": "b\n{"prompt": "c"}', [["a"], ["c"]], {"not JSON": 1}
    ),
    "one object around the rows": Shape(
        json.dumps({"data": [{"prompt": "a"}, {"prompt": "b"}]}, indent=1).encode(),
        [["a"], ["b"]], {}, "f.json",
    ),
    "one pretty object": Shape(
        json.dumps({"messages": chat("a")}, indent=1).encode(), [["a"]], {}, "f.json"
    ),
    "rows of other shapes": Shape(
        lines({"prompt": "a"}, {"turns": ["b"]}, "c", {"prompt": 3}, {"prompt": "d"}),
        [["a"], ["d"]],
        {"has no prompt": 1, "str where an object was expected": 1,
         "prompt holds no text, nor a list of texts or messages": 1},
    ),
    "CSV": Shape(
        '\ufeffprompt,n\r\n"a, ""b""\r\nc",1\r\n,2\r\n42,3\r\nx,1,9\r\n'.encode(),
        [['a, "b"\r\nc'], ["42"]],
        {"prompt holds no text": 1, "more fields than the header": 1}, "f.csv",
    ),
    "CSV by semicolons, in Latin-1": Shape(
        b"question;n\na, b;1\ncaf\xe9;2\n", [["a, b"]],
        {"half a character, or bytes that are not UTF-8": 1}, "f.csv",
    ),
    "plain text": Shape(b"a b\r\n\r\n  \nc", [["a b"], ["c"]], {}, "f.txt"),
    "gzip": Shape(gzip.compress(lines({"prompt": "a"})), [["a"]], {}, "f.jsonl.gz"),
}  # fmt: skip


def questions(prompt: Prompt) -> list[str]:
    return ["|".join(m["content"] for m in step) for step in (prompt.messages, *prompt.later)]


def reads(folder: Path, shape: Shape) -> None:
    path = folder / shape.name
    path.write_bytes(shape.content)
    told: list[str] = []
    found = read_prompts(path, say=told.append)
    assert [questions(p) for p in found] == shape.asks
    (line,) = told
    total = len(shape.asks) + sum(shape.skipped.values())
    assert f"{len(shape.asks)} of {total} rows" in line
    for reason, count in shape.skipped.items():
        assert f"{count} {reason} (first: " in line
    assert ("skipped" in line) == bool(shape.skipped)


@pytest.mark.parametrize("name", SHAPES)
def test_shape(tmp_path: Path, name: str) -> None:
    reads(tmp_path, SHAPES[name])


def test_parquet(tmp_path: Path) -> None:
    """Typed columns: every message carries all the keys that any of them has."""
    import pyarrow
    from pyarrow import parquet

    none = {"role": "system", "content": None, "name": None}
    rows = [[none | m for m in chat("a", "b", "c")], [none]]
    parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "f.parquet")
    (prompt,) = read_prompts(tmp_path / "f.parquet")
    assert questions(prompt) == ["a", "c"] and prompt.messages == tuple(chat("a"))
    (tmp_path / "f.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(UserError, match="f.parquet: cannot be read"):
        read_prompts(tmp_path / "f.parquet")


def test_what_templates_are_given(tmp_path: Path) -> None:
    """Arguments become objects, keys that say nothing are dropped, settings stand beside."""
    calls = [call('{"x": 1}'), call({"y": 2})]
    row = {
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [
            {"role": "developer", "content": "s", "name": None, "weight": 1},
            *chat("a"),
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": None, "tool_call_id": "c1"},
        ],
    }
    (prompt,) = prompts_of([("row 1", row)], "x", "d")
    assert prompt.template == {"enable_thinking": False, "tools": TOOLS}
    system, _, said, result = prompt.messages
    assert system == {"role": "system", "content": "s"}
    assert [c["function"]["arguments"] for c in said["tool_calls"]] == [{"x": 1}, {"y": 2}]
    assert said["content"] == result["content"] == ""
    shown = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    user, result = {"from": "human", "value": "a"}, {"from": "observation", "value": "42"}
    (prompt,) = prompts_of([("row 1", {"conversations": [user, shown, result]})], "x", "d")
    assert prompt.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert [m["role"] for m in prompt.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b" \r\n\n", "holds no rows"),
        (b"[]", "holds no rows"),
        (b"What is this?", "none of its 1 rows can be used: 1 not JSON (first: line 1: Expecting"),
        (b"[1, 2]", "2 int where an object was expected (first: row 1)"),
        (b"{}", "has no text to ask (first: line 1: it has nothing)"),
        (b'{"label": 1, "n": 2}', "has no text to ask (first: line 1: it has label, n)"),
        (b'{"prompt": " "}\n{"prompt": ""}', "2 prompt holds no text (first: line 1: an empty"),
        (b'{"prompt_ids": [1, true]}', "1 prompt_ids is no list of token ids (first: line 1)"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8 text"),
        (b'{"messages": []}', "messages holds no text"),
    ],
)  # fmt: skip
def test_a_file_without_a_usable_row(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    for spec in (path, tmp_path):
        with pytest.raises(UserError) as error:
            read_source(str(spec))
        assert message in str(error.value) and str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_the_column_is_told_and_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(lines({"prompt": "a", "question": "b"}, {"prompt": "c"}))
    told: list[str] = []
    assert [questions(p) for p in read_prompts(path, say=told.append)] == [["a"], ["c"]]
    assert f"prompts {path}: column prompt, 2 of 2 rows, 2 turns" in told[0]
    (prompt,) = read_prompts(path, Reading(column="question"), told.append)
    assert questions(prompt) == ["b"]
    assert "column question, 1 of 2 rows" in told[1]
    assert "1 has no question (first: line 2: it has prompt)" in told[1]
    with pytest.raises(UserError, match="2 has no nothing .first: line 1: it has prompt, question"):
        read_prompts(path, Reading(column="nothing"))


# ---------------------------------------------------------------- faults that must be seen


def keeps_answers(messages: list[dict[str, Any]]) -> Any:
    """The classic: what the data set's assistant said goes into the prompt."""
    return (tuple(messages[:-1] or messages),)


@pytest.mark.parametrize(
    ("function", "fault", "shape"),
    [
        ("_steps", keeps_answers, "messages, several turns"),
        ("_steps", lambda messages: (tuple(messages[:1]),), "tool calls and results"),
        ("_check", lambda message, column: None, "empty turns"),
        ("_instruction", lambda row, column, text: text, "Alpaca"),
        ("_unpacked", lambda value: value, "messages as JSON text"),
    ],
)
def test_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, fault: Any, shape: str
) -> None:
    monkeypatch.setattr(columns, function, fault)
    with pytest.raises(AssertionError, match=r"^assert \[\["):  # other questions than are asked
        reads(tmp_path, SHAPES[shape])
