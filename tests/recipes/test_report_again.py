"""A report that is made again, was stopped, or cannot be made.

.venv/bin/pytest tests/recipes/test_report_again.py
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

pytest.importorskip("datasets")

import training
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.speed import speed_model
from draftsmith.recipes import cli
from draftsmith.recipes import report as recipe_report
from draftsmith.recipes.report import Report
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import Prompt, asked
from draftsmith.train.data.sources import read_prompts
from draftsmith.train.run import main
from draftsmith.train.samples.heldout import also_trained_on
from draftsmith.train.samples.importing import import_answers
from reports import reported_run, settings
from training import World


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reported_run(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def report(run: Path) -> dict[str, Any]:
    return json.loads((run / "report" / "report.json").read_text())


# ---------------------------------------------------------------- made once


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("made again")


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what tells which process wrote it."""
    return {k: v for k, v in report.items() if k not in ("command", "commit")}


def copy(run: Path, place: Path) -> Path:
    """The run as it would lie elsewhere, its held-out sets too; decoded, but not yet replayed."""
    shutil.copytree(run.parent, place / "runs", symlinks=True)
    for file in (place / "runs" / run.name / "report").glob("checkpoint-*.json"):
        file.unlink()
    return place / "runs" / run.name


def test_a_second_report_makes_nothing(
    run: Path, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("evaluate", "replay", "sample_text", "read_decoded"):
        monkeypatch.setattr(recipe_report, name, _never)
    monkeypatch.setattr(speed_model, "measure", _never)
    monkeypatch.setattr(Decoder, "generate", _never)
    again = recipe_report.report(settings(run))
    assert figures(json.loads(json.dumps(again))) == figures(report)


def test_a_stopped_report_goes_on(
    run: Path, report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the third checkpoint; only what is missing or has changed is replayed."""
    here = copy(run, tmp_path)
    replay, calls = recipe_report.replay, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return replay(*args)

    monkeypatch.setattr(recipe_report, "replay", counted)
    wanted = replace(settings(run), run=here)
    with pytest.raises(KeyboardInterrupt):
        recipe_report.report(wanted)
    found = recipe_report.report(wanted)
    assert len(calls) == 5 + 4  # two checkpoints at two samplers were left
    assert found["by_checkpoint"] == report["by_checkpoint"]
    for name in ("model.safetensors", "config.json", "state.pt"):
        shutil.copy(here / "checkpoint-4" / name, here / "checkpoint-8")
    found = recipe_report.report(wanted)
    assert len(calls) == 9 + 2
    first, second, *_ = found["by_checkpoint"]
    assert first["replay"] == second["replay"]
    (here / "report" / "checkpoint-12.json").write_text('{"key": ')  # cut short by a full disk
    recipe_report.report(wanted)
    assert len(calls) == 11 + 2


def test_prompts_that_were_trained_on(run: Path, report: dict[str, Any], tmp_path: Path) -> None:
    """Told, whether the samples know their prompts by text or by ids; unknown without samples."""
    assert report["heldout"]["also_trained_on"] == 12  # this file's own: all of them
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert "12 of the 12 prompts are among those the run learned from" in page
    root = run.parents[1]
    target, known = Target.load(str(root / "target")), read_prompts(root / "asked.jsonl")
    by_ids = [Prompt(None, tuple(ids), "x") for ids in encode(known[:3], target)]
    row = {
        "prompt_ids": list(by_ids[0].ids or ()),
        "response_ids": [5, 6],
        "finish_reason": "length",
    }
    (tmp_path / "answers.jsonl").write_text(json.dumps(row) + "\n")
    place = tmp_path / "imported"
    import_answers(tmp_path / "answers.jsonl", target, Sampler(), place, foreign=True)
    assert also_trained_on(place, known[:3], target) == 1
    assert also_trained_on(place, [asked("w30 w31", "x")], target) == 0
    unasked = Prompt(None, (9999,), "x")  # answered() leaves such a one out, with a warning
    assert also_trained_on(place, [unasked, *known[:3]], target) == 1
    assert also_trained_on(tmp_path / "gone", known, target) is None
    with_more = replace(known[0], later=(known[1].messages or (),))
    learned = Path(report["run"]["recipe"]["samples"])
    other = replace(with_more, messages=asked("w30 w31", "x").messages)
    assert also_trained_on(learned, [with_more, other], target) == 1


# ---------------------------------------------------------------- bad input


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any
) -> str:
    """The one line with which `draftsmith report` refuses, before anything is computed."""
    monkeypatch.setattr(Decoder, "generate", _never)
    monkeypatch.setattr(sys, "argv", ["draftsmith", "report", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1, err
    return err


Refuse = Callable[..., str]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    capsys.readouterr()
    return lambda *words: refusal(monkeypatch, capsys, *words)


def test_a_folder_that_is_no_run(refuse: Refuse, run: Path, tmp_path: Path) -> None:
    assert f"{tmp_path}: no run there" in refuse(tmp_path)
    assert "no run there" in refuse(tmp_path / "nowhere")
    assert "no run there" in refuse(run / "checkpoint-4")
    shutil.copy(run / "recipe.yaml", tmp_path)
    assert "no checkpoint" in refuse(tmp_path)


def test_a_run_that_is_still_writing(refuse: Refuse, run: Path) -> None:
    with FileLock(run / ".lock"):
        line = refuse(run)
    assert str(run) in line and "still training" in line


def test_a_target_that_is_gone(refuse: Refuse, run: Path, tmp_path: Path) -> None:
    here = copy(run, tmp_path)
    text = (here / "recipe.yaml").read_text()
    gone = str(tmp_path / "gone")
    (here / "recipe.yaml").write_text(text.replace(str(run.parents[1] / "target"), gone))
    line = refuse(here)
    assert "checkpoint-16" in line and gone in line and "--target" in line


def test_another_target(refuse: Refuse, run: Path, tmp_path: Path) -> None:
    other = training.save_target(tmp_path / "other", vocab=40)
    line = refuse(run, "--target", other)
    assert "made for another" in line and "checkpoint-4" in line


def test_a_damaged_checkpoint(refuse: Refuse, run: Path, tmp_path: Path) -> None:
    here = copy(run, tmp_path)
    (here / "checkpoint-4" / "model.safetensors").unlink()
    assert "checkpoint-4/model.safetensors: cannot be read" in refuse(here)
    (here / "checkpoint-4" / "config.json").unlink()
    assert "checkpoint-4" in refuse(here)


def test_drafts_are_no_longer_than_the_drafter_has_depths(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Heads for three depths, in a recipe whose k is 4: reported at 3, and refused 4 by name."""
    before, world = signal.getsignal(signal.SIGTERM), World(tmp_path)
    assert main([str(world.recipe("heads", "medusa", k=4, steps=2, save_every=2))]) == 0
    signal.signal(signal.SIGTERM, before)
    capsys.readouterr()
    here, prompts = world.folder("heads"), str(world.prompts)
    assert "chain k=4: deeper than this drafter's 3; lower k" in refuse(
        here, "--prompts", prompts, "--k", 4
    )
    told: list[int] = []

    def stop(run: Path, weights: Any, target: Target, sets: Any, k: int, seed: int) -> None:
        told.append(k)
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe_report, "answered", lambda *args: None)
    monkeypatch.setattr(recipe_report, "_replays", stop)
    with pytest.raises(KeyboardInterrupt):
        recipe_report.report(Report(here, prompts=prompts))
    assert told == [3]


def test_help_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["draftsmith", "report", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Example: draftsmith report runs/" in " ".join(capsys.readouterr().out.split())
