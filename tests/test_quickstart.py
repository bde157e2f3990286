"""The quickstart on a tiny target: it finishes, goes on after SIGKILL, and skips what is made.

.venv/bin/pytest tests/test_quickstart.py
"""

from __future__ import annotations

import json
import random
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import quick
import training
from draftsmith.eval import report as eval_report
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.recipes import quickstart as house
from draftsmith.recipes import quickstart_report as pages
from draftsmith.recipes.quickstart import STAGES, quickstart
from draftsmith.recipes.quickstart_report import COLUMNS, NAMES
from draftsmith.train import checkpoint
from draftsmith.train.loop import Trainer
from walker import NUMBER, Visible, strangers

ABOUT = ("target", "temperature", "k", "samples", "positions_learned")


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


def check_numbers(found: dict[str, Any]) -> None:
    """The page's figures are roundings of report.json's, and the table's are all there."""
    words = " ".join(Visible(pages.page(found)).words)
    assert len(NUMBER.findall(words)) > 80
    assert strangers(words, found) == []
    for row in found["table"].values():
        assert all(cell in words for cell in cells(row))


def test_every_number_is_in_the_json(whole: Path) -> None:
    check_numbers(report(whole))


def test_a_number_from_elsewhere_shows(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = eval_report.fixed

    def off(value: float | None, digits: int = 3) -> str:
        return right(None if value is None else value + 0.0137, digits)

    monkeypatch.setattr(eval_report, "fixed", off)
    with pytest.raises(AssertionError):
        check_numbers(report(whole))


def test_the_page(whole: Path) -> None:
    """It stands alone, says that it is a demo, names the drafters and where to go next."""
    found, page = report(whole), (whole / "report.html").read_text(encoding="utf-8")
    assert page == pages.page(found)
    assert Visible(page).loads == []
    assert "url(" not in page and "@import" not in page and "http" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    words = unescape(page)
    assert found["about"] in words and all(line in words for line in found["next"])
    assert "for 3 of 3 drafters" in page and "BROKEN" not in page
    assert page.count("Equal as integers") == 1 and page.count("draft by draft z") == 2
    drawn = page[page.index("<svg") :]
    k, drafters = found["k"], len(NAMES)
    assert drawn.count("<rect") == 4 * drafters + (k + 1) * drafters


def test_figures_of_the_page(whole: Path) -> None:
    """Sums and choices that the page adds to the evaluations, against the evaluations."""
    found = report(whole)
    for name, evaluated in found["decoded"].items():
        decode, told = evaluated["decode"], found["round_ms"][name]
        assert told["whole"] / told["step"] == pytest.approx(evaluated["break_even_tau"])
        assert found["histogram"][NAMES[name]]["passes"] == decode["histogram"]
    taus = {name: row["tau_replay"] for name, row in found["table"].items()}
    assert taus[found["best"]] == max(taus.values())
    speedups = [row["speedup"] for row in found["table"].values()]
    assert found["table"][found["fastest"]]["speedup"] == max(speedups)


def test_the_page_tells_broken_parity(whole: Path) -> None:
    """Of a sampled drafter and of one without chance; a target's name is no markup."""
    before = report(whole)
    for name in ("small", "ngram"):
        decoded = json.loads(json.dumps(before["decoded"]))
        decoded[name]["parity"] |= {"holds": False, "equal": False}
        about = {key: before[key] for key in ABOUT} | {"target": "<b>x</b>"}
        page = pages.page(pages.assemble(about, decoded))
        assert ">BROKEN<" in page and "for 2 of 3 drafters" in page
        assert page.count("broken.") == 1 and "<b>x" not in page
        assert ("Not equal" in page) == (name == "ngram")


def test_nothing_was_drafted(whole: Path) -> None:
    """Texts of one token: no pass, no figure; the page shows dashes."""
    before = report(whole)
    decoded = json.loads(json.dumps(before["decoded"]))
    decoded["ngram"]["replay"] |= {"tau": None, "tau_ci": [None, None], "alpha": [None, None]}
    decoded["ngram"]["decode"] |= {"tau": None, "speedup": None, "tokens_per_s": None}
    decoded["ngram"] |= {"predicted_speedup": None, "break_even_tau": None}
    found = pages.assemble({key: before[key] for key in ABOUT}, decoded)
    assert found["best"] != "ngram" and "–" in pages.page(found)


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

    def broken(*args: Any, **kwargs: Any) -> Any:
        found = evaluate(*args, **kwargs)
        assert found.parity is not None
        found.parity.equal &= found.family != "eagle"
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
