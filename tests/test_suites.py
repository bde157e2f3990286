"""Prompt sets: by file, folder and hub name, with one shape a file.

.venv/bin/pytest tests/test_suites.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.errors import UserError
from draftsmith.train import prompts, suites
from draftsmith.train.prompts import Prompt, asked, read_prompts
from draftsmith.train.suites import read_suite, spread


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(found: list[Prompt]) -> list[str]:
    return [p.messages[-1]["content"] for p in found if p.messages]


def test_folder(tmp_path: Path) -> None:
    """Files by name, each of its own shape; what is no JSON is left alone."""
    write(tmp_path / "b.jsonl", [{"turns": ["two", "later"], "category": "math"}])
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "one"}]))
    (tmp_path / "README.md").write_text("no prompt")
    found = read_suite(str(tmp_path))
    assert texts(found) == ["one", "two"]
    assert [p.domain for p in found] == ["a", "math"]
    assert texts(read_suite(str(tmp_path / "a.json"))) == ["one"]


def test_prompt_may_be_a_list_of_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As MT-Bench on the hub has it."""
    path = write(tmp_path / "mt.jsonl", [{"prompt": ["first", "then"], "category": "writing"}])
    assert texts(read_prompts(path)) == ["first"]
    assert "1 of 1 rows have later turns" in caplog.text


MIXED = {
    "turns": ({"turns": ["b"]}, "asks by turns where the rows before it ask by prompt"),
    "messages": ({"messages": [{"role": "user", "content": "b"}]}, "asks by messages"),
    "ids": ({"prompt_ids": [3]}, "asks by prompt_ids"),
    "no field": ({"question": "b"}, "has no text (fields: question)"),
    "text": ("b", "str where an object was expected"),
    "turns of dicts": ({"prompt": [{"content": "b"}]}, "prompt[0] holds no text"),
}


def refused(path: Path, row: Any, message: str) -> None:
    """A file whose second row is of another shape: one line that names the row."""
    write(path, [{"prompt": "a"}, row, {"prompt": "c"}])
    for spec in (path, path.parent):
        with pytest.raises(UserError) as error:
            read_suite(str(spec))
        assert f"{path} line 2: {message}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", MIXED)
def test_mixed_shapes(tmp_path: Path, name: str) -> None:
    refused(tmp_path / "mixed.jsonl", *MIXED[name])


def test_mixed_shapes_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a reader that takes each row as it comes turns the check above red."""
    read = prompts.prompts_of

    def row_by_row(rows: Any, source: str, domain: str) -> list[Prompt]:
        return [prompt for row in rows for prompt in read([row], source, domain)]

    monkeypatch.setattr(prompts, "prompts_of", row_by_row)
    with pytest.raises(pytest.fail.Exception):
        refused(tmp_path / "mixed.jsonl", *MIXED["turns"])


def test_empty_folder_and_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder has no .jsonl or .json file"):
        read_suite(str(tmp_path))
    for spec in (str(tmp_path / "none.jsonl"), "none.jsonl", str(tmp_path / "none")):
        with pytest.raises(UserError, match="cannot be read"):
            read_suite(spec)


# ---------------------------------------------------------------- the hub


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", broken)
    with pytest.raises(UserError) as error:
        read_suite("somebody/prompts")
    assert "the hub cannot be reached (ConnectionError)" in str(error.value)
    assert str(error.value).startswith("prompts somebody/prompts: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("splits", "wanted"),
    [(("train", "test"), ["test 0", "test 1"]), (("train",), ["train 0", "train 1"])],
)
def test_hub(monkeypatch: pytest.MonkeyPatch, splits: tuple[str, ...], wanted: list[str]) -> None:
    """Rows of the split that is meant for testing, where there is one."""
    datasets = pytest.importorskip("datasets")
    rows = {
        name: datasets.Dataset.from_list(
            [{"prompt": [f"{name} {i}", "more"], "category": "chat"} for i in range(2)]
        )
        for name in splits
    }
    monkeypatch.setattr(suites, "_check_reachable", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: datasets.DatasetDict(rows))
    found = read_suite("somebody/prompts")
    assert texts(found) == wanted and {p.domain for p in found} == {"chat"}


def test_hub_without_prompts_or_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(suites, "_check_reachable", lambda name: None)
    images = datasets.Dataset.from_list([{"label": 1}])
    for made, message in (
        ({"train": images}, "somebody/prompts train row 1: has no text (fields: label)"),
        ({"odd": images}, "prompts somebody/prompts: has no split"),
    ):
        monkeypatch.setattr(datasets, "load_dataset", lambda name, made=made: made)
        with pytest.raises(UserError) as error:
            read_suite("somebody/prompts")
        assert message in str(error.value)

    def scripted(name: str) -> Any:
        raise ValueError("Config name is missing.\nPlease pick one")

    monkeypatch.setattr(datasets, "load_dataset", scripted)
    with pytest.raises(UserError, match="cannot be read from the hub .Config name is missing. Pl"):
        read_suite("somebody/prompts")


# ---------------------------------------------------------------- a part of a suite


def test_spread_takes_from_every_domain() -> None:
    suite = [
        asked(f"{d}{i}", d) for d, count in (("a", 5), ("b", 1), ("c", 3)) for i in range(count)
    ]
    assert texts(spread(suite, 3)) == ["a0", "b0", "c0"]
    assert texts(spread(suite, 6)) == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert sorted(texts(spread(suite, 99))) == texts(suite)
    same = [asked(str(i), "a") for i in range(4)]
    assert spread(same, 2) == same[:2]
