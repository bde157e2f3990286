"""Prompt sets: by file, folder and hub name, with one shape a file.

.venv/bin/pytest tests/train/data/test_sources.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.errors import UserError
from draftsmith.train.data import sources
from draftsmith.train.data.prompts import Prompt, asked
from draftsmith.train.data.sources import Reading, balanced, read_source


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
    found = read_source(str(tmp_path))
    assert texts(found) == ["one", "two"]
    assert [p.domain for p in found] == ["a", "math"]
    assert texts(read_source(str(tmp_path / "a.json"))) == ["one"]


def test_a_home_that_no_shell_has_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file, a folder and a mix, as of a source within one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "a.jsonl", [{"prompt": "one"}])
    (tmp_path / "mix.yaml").write_text("- source: ~/set/a.jsonl\n")
    for spec in ("~/set/a.jsonl", "~/set", "~/mix.yaml"):
        assert texts(read_source(spec)) == ["one"], spec


def test_empty_folder_and_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder has no file of .jsonl"):
        read_source(str(tmp_path))
    for spec in (str(tmp_path / "none.jsonl"), "none.jsonl", str(tmp_path / "none")):
        with pytest.raises(UserError, match="cannot be read"):
            read_source(spec)


# ---------------------------------------------------------------- the hub


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", broken)
    with pytest.raises(UserError) as error:
        read_source("somebody/prompts")
    assert "the hub cannot be reached (ConnectionError)" in str(error.value)
    assert str(error.value).startswith("prompts somebody/prompts: ")
    assert "\n" not in str(error.value)


def as_hub(folder: Path, **splits: list[dict[str, Any]]) -> str:
    """A folder laid out as data sets lie on the hub, one Parquet file a split."""
    datasets = pytest.importorskip("datasets")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("# a data set")
    for name, rows in splits.items():
        path = folder / "data" / f"{name}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(folder)


@pytest.mark.parametrize("place", ["hub", "folder", "saved"])
def test_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The split that fits the use; another, and a part, by name."""
    datasets = pytest.importorskip("datasets")
    rows = {
        name: [{"prompt": [f"{name} {i}", "more"], "category": "chat"} for i in range(3)]
        for name in ("train", "test")
    }
    spec = as_hub(tmp_path / "set", **rows)
    if place == "hub":  # the same loading, by the name that stands for the folder
        load = datasets.load_dataset
        monkeypatch.setattr(sources, "_check_reachable", lambda name: None)
        monkeypatch.setattr(datasets, "load_dataset", lambda _, *a, at=spec, **k: load(at, *a, **k))
        spec = "somebody/prompts"
    elif place == "saved":
        spec = str(tmp_path / "saved")
        made = {name: datasets.Dataset.from_list(r) for name, r in rows.items()}
        datasets.DatasetDict(made).save_to_disk(spec)
    told: list[str] = []
    found = read_source(spec, say=told.append)
    assert texts(found) == [f"test {i}" for i in range(3)] and {p.domain for p in found} == {"chat"}
    assert all(len(p.later) == 1 for p in found)
    assert told == [f"prompts {spec}: column prompt, 3 of 3 rows, 6 turns"]
    assert texts(read_source(spec, Reading(use="train"))) == [f"train {i}" for i in range(3)]
    named = Reading(split="train", limit=2)
    assert texts(read_source(spec, named)) == ["train 0", "train 1"]
    with pytest.raises(UserError, match="has no split dev; it has train, test"):
        read_source(spec, Reading(split="dev"))


def test_a_data_set_that_asks_nothing(tmp_path: Path) -> None:
    spec = as_hub(tmp_path, train=[{"label": 1, "n": 2}])
    with pytest.raises(UserError) as error:
        read_source(spec)
    assert "1 has no text to ask (first: train row 1: it has label, n)" in str(error.value)


def test_data_sets_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(sources, "_check_reachable", lambda name: None)

    def scripted(*arguments: Any, **how: Any) -> Any:
        raise ValueError("Config name is missing.\nPlease pick one")

    monkeypatch.setattr(datasets, "load_dataset", scripted)
    with pytest.raises(UserError, match="cannot be read .Config name is missing. Please pick one"):
        read_source("somebody/prompts")


# ---------------------------------------------------------------- mixes


def mix(folder: Path, text: str) -> str:
    path = folder / "mix.yaml"
    path.write_text(text)
    return str(path)


def test_mix(tmp_path: Path) -> None:
    """The smaller source, by weight, sets the size; content, not order, chooses."""
    chats = [{"prompt": f"c{i}"} for i in range(100)]
    write(tmp_path / "chat.jsonl", chats)
    write(tmp_path / "math.jsonl", [{"task": f"m{i}", "prompt": "no"} for i in range(10)])
    spec = mix(
        tmp_path,
        "- {source: chat.jsonl, weight: 3, template: {enable_thinking: false}}\n"
        "- {source: math.jsonl, column: task}\n",
    )
    told: list[str] = []
    found = read_source(spec, say=told.append)
    asked_ = texts(found)
    assert sum(t.startswith("c") for t in asked_) == 30 and len(set(asked_)) == 40
    assert asked_[30:] == [f"m{i}" for i in range(10)]
    assert all(p.template == {"enable_thinking": False} for p in found[:30])
    assert f"mix {spec}: 30 of the 100 prompts of chat.jsonl" in told
    write(tmp_path / "chat.jsonl", chats[::-1])
    assert set(texts(read_source(spec))) == set(asked_)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as a mix"),
        ("source: a", "the file: Input should be a valid list"),
        ("- {source: a, wieght: 2}", "0.wieght: Extra inputs"),
        ("- {source: a, weight: 0}", "0.weight: Input should be greater than 0"),
        ("- {weight: 1}", "0.source: Field required"),
        ("[]", "names no source"),
        ("- {source: none.jsonl}", "none.jsonl: cannot be read"),
    ],
)
def test_faulty_mix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_source(mix(tmp_path, text))
    assert message in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- a part of a set


def test_balanced_takes_from_every_domain() -> None:
    found = [
        asked(f"{d}{i}", d) for d, count in (("a", 5), ("b", 1), ("c", 3)) for i in range(count)
    ]
    assert texts(balanced(found, 3)) == ["a0", "b0", "c0"]
    assert texts(balanced(found, 6)) == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert sorted(texts(balanced(found, 99))) == texts(found)
    same = [asked(str(i), "a") for i in range(4)]
    assert balanced(same, 2) == same[:2]
