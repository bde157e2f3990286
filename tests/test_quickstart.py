"""The quickstart on a tiny target: it finishes, goes on after SIGKILL, and skips what is made.

.venv/bin/pytest tests/test_quickstart.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import quick
import training
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.recipes import quickstart as house
from draftsmith.recipes.quickstart import COLUMNS, NAMES, STAGES, quickstart
from draftsmith.train import checkpoint
from draftsmith.train.loop import Trainer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.save_target(tmp_path_factory.mktemp("world") / "target")


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quickstart that was left alone."""
    folder = tmp_path_factory.mktemp("whole") / "quickstart"
    assert quickstart(folder, quick.demo(target)) == 0
    return folder


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def test_report(whole: Path) -> None:
    """One table of all drafters, whose figures stand in the evaluations beside it."""
    found = report(whole)
    assert list(found["table"]) == list(found["decoded"]) == list(NAMES)
    for name, row in found["table"].items():
        decode = found["decoded"][name]["decode"]
        assert row.keys() == COLUMNS.keys()
        assert row["tau_decode"] == decode["tokens"] / decode["passes"]
        # tau over the tau that breaks even is what the prediction promises
        predicted = row["tau_replay"] / row["break_even_tau"]
        assert row["predicted_speedup"] == pytest.approx(predicted)
        assert found["decoded"][name]["parity"]["holds"]
    assert found["samples"]["answers"] == 16 and found["samples"]["tokens"] <= 16 * 12
    for name in ("small", "eagle"):
        lines = [m for m in checkpoint.read_metrics(whole / name) if m["kind"] == "replay"]
        best = max(lines[1:], key=lambda m: m["tau"])
        assert found["positions_learned"][name] == best["tokens"] > 0
    page = (whole / "report.md").read_text()
    assert found["about"] in page and f"{found['samples']['tokens']:,} tokens" in page
    assert "demo" in page and "500,000" in page
    for name, row in found["table"].items():
        assert f"| {NAMES[name]} | {' | '.join(cells(row))} |" in page
    assert not (whole / "decoded").exists()


def cells(row: dict[str, float]) -> list[str]:
    return [f"{row[key]:.{digits}f}" for key, (_, digits) in COLUMNS.items()]


def test_again_decodes_only(
    whole: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Samples and drafters are kept; what is decoded is decoded again, with the same counts."""
    before = report(whole)

    def never(*args: Any) -> Any:
        raise AssertionError("trained again")

    sizes = []
    decode = Decoder.generate

    def counted(self: Decoder, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(prompts))
        return decode(self, prompts, *args, **kwargs)

    monkeypatch.setattr(Trainer, "_step", never)
    monkeypatch.setattr(Decoder, "generate", counted)
    assert quickstart(whole, quick.demo(target)) == 0
    assert set(sizes) == {1} and len(sizes) >= 2 * 3 * len(NAMES), "nothing was sampled in batches"
    assert counts(report(whole)) == counts(before)
    out, said = capfd.readouterr()
    for number in range(1, len(STAGES) + 1):
        assert f"stage {number} of {len(STAGES)}: {STAGES[number - 1]}" in said
    assert said.count("is finished") == 2 and "prompts decoded" in said
    assert "EAGLE-3" in out and "break-even" in out and before["about"] in out
    for row in report(whole)["table"].values():
        assert all(cell in out for cell in cells(row)), "a figure is cut"


def test_broken_parity_is_told(
    whole: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted fault: a decoder that counts one more draft than it accepted."""
    evaluate = house.evaluate

    def broken(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = evaluate(*args, **kwargs)
        found["parity"]["holds"] = found["drafter"]["family"] != "eagle"
        return found

    monkeypatch.setattr(house, "evaluate", broken)
    assert quickstart(whole, quick.demo(target)) == 1
    assert "error: eagle: decoder and replay disagree" in capsys.readouterr().err


def counts(found: dict[str, Any]) -> dict[str, Any]:
    """What must repeat: what was decoded, and how it is judged, without what the clock says."""
    decoded = found["decoded"]
    return {
        "samples": found["samples"],
        "learned": found["positions_learned"],
        "decode": {
            n: [d["decode"][k] for k in ("tau", "passes", "tokens")] for n, d in decoded.items()
        },
        "replay": {n: d["replay"] for n, d in decoded.items()},
        "z": {n: d["parity"]["z_per_depth"] for n, d in decoded.items()},
    }


# ---------------------------------------------------------------- killed


# What is there when a stage is under way.
MOMENTS = {
    "samples": "samples/parts/000000-*",
    "small": "small/checkpoint-2",
    "between": "small/checkpoint-4",
    "eagle": "eagle/checkpoint-2",
    "decoding": "decoded/ngram.json",
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_stage(whole: Path, target: Path, tmp_path: Path, seed: int) -> None:
    """Killed twice, at seeded moments; then every stage is there once, as if left alone."""
    folder = tmp_path / "quickstart"
    draw = random.Random(seed)
    order = list(MOMENTS)
    for moment in sorted(draw.sample(order, 2), key=order.index):
        quick.killed(folder, target, MOMENTS[moment], draw.uniform(0.0, 0.3))
        assert not (folder / "report.json").exists(), "killed too late to show anything"
    process = quick.fork(folder, target, slow=False)
    process.join()
    assert process.exitcode == 0
    for name in ("small", "eagle"):
        assert training.differences(whole / name, folder / name, quick.STEPS) == []
        replays = [
            m["step"] for m in checkpoint.read_metrics(folder / name) if m["kind"] == "replay"
        ]
        assert replays == [0, 2, 4]
    ours, theirs = counts(report(folder)), counts(report(whole))
    assert ours == theirs
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in whole.iterdir())
    assert not (folder / "samples" / "parts").exists()
