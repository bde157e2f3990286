"""Rows that ask for what a target of text cannot take, or spell structure in their own way.

.venv/bin/pytest tests/train/data/test_odd_rows.py
"""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.errors import UserError
from draftsmith.recipes.options import key_values
from draftsmith.train.data.columns import given_of, prompt_of
from draftsmith.train.data.prompts import Unusable
from draftsmith.train.data.sources import read_prompts, read_source


def asking(**row: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What is in it?"}], **row}


def calling(calls: Any) -> dict[str, Any]:
    return asking() | {
        "messages": [
            {"role": "user", "content": "Add 1 and 2."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "3"},
        ]
    }


@pytest.mark.parametrize(
    "row",
    [
        asking(images=["x.png"]),
        asking(image={"bytes": None, "path": "x.png"}),
        asking(audio="x.wav"),
        {"conversations": [{"from": "human", "value": "Which?"}], "image": "x.png"},
        {"prompt": "Which?", "videos": ["x.mp4"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "text": "a"}]}]},
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_not_asked_without_it(row: dict[str, Any]) -> None:
    column = next(iter(row))
    with pytest.raises(Unusable, match="pictures, audio or video|content that is not text"):
        prompt_of(row, column, "x")


@pytest.mark.parametrize("empty", [None, [], [None], ""])
def test_an_empty_column_shows_nothing(empty: Any) -> None:
    assert prompt_of(asking(images=empty), "messages", "x").messages


ADD = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "calls",
    [[{"function": ADD}], {"function": ADD}, ADD, json.dumps([{"function": ADD}]), json.dumps(ADD),
     [json.dumps(ADD)], [{"name": "add", "arguments": '{"a": 1}'}]],
    ids=str,
)  # fmt: skip
def test_a_call_is_the_same_however_it_is_spelt(calls: Any) -> None:
    messages = given_messages(calling(calls))
    assert messages[1]["tool_calls"] == [{"type": "function", "function": ADD}]


@pytest.mark.parametrize("nothing", ["", " ", None, "null", {}])
def test_no_arguments_are_an_empty_object(nothing: Any) -> None:
    for call in ({"name": "now", "arguments": nothing}, {"name": "now"}):
        (found,) = given_messages(calling([call]))[1]["tool_calls"]
        assert found["function"] == {"name": "now", "arguments": {}}


def given_messages(row: dict[str, Any]) -> Any:
    answered = row | {"messages": [*row["messages"], {"role": "assistant", "content": "3"}]}
    return given_of(answered, "messages", "x").messages


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (True, "tool_calls that are no list"),
        ("[{", "tool_calls that are no JSON"),
        ([3], "a tool call that is no {name, arguments}"),
        ([{"name": "add", "arguments": "{"}], "arguments of a tool call that are no JSON"),
        ([{"name": "add", "arguments": [1]}], "arguments of a tool call that are no object"),
        ("[" * 20_000, "tool_calls that are no JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_call_that_cannot_be_read_says_why(calls: Any, reason: str) -> None:
    with pytest.raises(Unusable, match=reason.replace("{", "\\{")):
        prompt_of(calling(calls), "messages", "x")


@pytest.mark.parametrize("odd", ["[" * 20_000, '{"prompt": ' + "1" * 5_000 + "}"])
def test_no_line_ends_the_reading(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "one"}\n' + odd + '\n{"prompt": "two"}\n')
    said: list[str] = []
    assert len(read_prompts(path, say=said.append)) == 2
    assert "2 of 3 rows" in said[0] and "1 not JSON that can be read" in said[0]


@pytest.mark.parametrize("odd", ["[" * 20_000, "[" + "1" * 5_000 + "]"])
def test_an_array_that_cannot_be_read_is_refused(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(odd)
    with pytest.raises(UserError, match="not JSON|list where an object|int where an object"):
        read_prompts(path)


def test_dates_and_decimals_are_text_as_written(tmp_path: Path) -> None:
    assert key_values(["date_string=2024-07-26"]) == {"date_string": "2024-07-26"}
    settings = {"date_string": datetime.date(2024, 7, 26), "price": Decimal("1.50")}
    prompt = prompt_of(asking(chat_template_kwargs=settings), "messages", "x")
    assert prompt.template == {"date_string": "2024-07-26", "price": "1.50"}
    assert len(prompt.key) == 32
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n')
    mix = tmp_path / "mix.yaml"
    mix.write_text("- source: a.jsonl\n  template: {date_string: 2024-07-26}\n")
    (found,) = read_source(str(mix))
    assert found.template == {"date_string": "2024-07-26"}
