"""The quickstart on a tiny target: it finishes, goes on after SIGKILL, and skips what is made.

.venv/bin/pytest tests/recipes/test_quickstart.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import quick
import training
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.report import report as eval_report
from draftsmith.recipes import compare as house
from draftsmith.recipes import compare_page as pages
from draftsmith.recipes.quickstart import NEXT, RECIPES, STAGES, run_demo
from draftsmith.train import journal
from draftsmith.train.learner import Learner
from walker import NUMBER, Visible, strangers

NAMES = [*RECIPES, "ngram"]
AT = "T=1"


@pytest.fixture(scope="module", autouse=True)
def _same_length() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quick.decode_longest(patch)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.save_target(tmp_path_factory.mktemp("world") / "target")


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quickstart that was left alone."""
    folder = tmp_path_factory.mktemp("whole") / "quickstart"
    assert run_demo(folder, quick.demo(target)) == 0
    return folder


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "compare.json").read_text())


def test_report(whole: Path) -> None:
    """One table of all drafters, and what the demo is."""
    found = report(whole)
    assert list(found["drafters"]) == NAMES
    for drafter in found["drafters"].values():
        assert list(drafter["at"]) == [AT]
        here = drafter["at"][AT]
        decode, costs, k = here["decode"], here["costs_ms"], str(here["best_k"])
        assert decode["tau"] == decode["tokens"] / decode["passes"]
        assert here["break_even_tau"] == pytest.approx(costs["round"][k] / costs["step"])
        assert here["parity"]["holds"]
    demo = found["notes"][0]
    assert "16 answers" in demo and "demo" in demo and "500,000" in demo
    for name in RECIPES:
        lines = [m for m in journal.read_metrics(whole / name) if m["kind"] == "replay"]
        best = max(lines[1:], key=lambda m: m["tau"])
        assert found["drafters"][name]["tokens_learned"] == best["tokens"] > 0
    page = (whole / "compare.md").read_text()
    assert demo in page
    for name in found["drafters"]:
        assert f"| {name} | {' | '.join(pages.figures(found, name, AT))} |" in page
    assert not any((whole / f"{name}.json").exists() for name in NAMES)


def told(found: dict[str, Any]) -> dict[str, Any]:
    """The report and what the page says of it in its own words: widths and percents."""
    words = ["0", "1", "4", "10", "10%", "16", *pages.COLUMNS, *pages.DIAGNOSIS]
    return found | {"words": words}


def check_numbers(found: dict[str, Any]) -> None:
    """The page's figures are roundings of compare.json's, and the table's are all there."""
    words = " ".join(Visible(pages.page(found)).words)
    assert len(NUMBER.findall(words)) > 80
    assert strangers(words, told(found)) == []
    for name in found["drafters"]:
        assert all(cell in words for cell in pages.figures(found, name, AT))


def test_every_number_is_in_the_json(whole: Path) -> None:
    check_numbers(report(whole))


def test_a_number_from_elsewhere_shows(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = eval_report.fixed

    def off(value: float | None, digits: int = 3) -> str:
        return right(None if value is None else value + 0.0137, digits)

    monkeypatch.setattr(pages, "fixed", off)
    with pytest.raises(AssertionError):
        check_numbers(report(whole))


def test_the_page(whole: Path) -> None:
    """It stands alone, says that it is a demo, names the drafters and where to go next."""
    found, page = report(whole), (whole / "compare.html").read_text(encoding="utf-8")
    assert page == pages.page(found)
    assert Visible(page).loads == []
    assert "url(" not in page and "@import" not in page and "http" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    words = unescape(page)
    assert all(note in words for note in found["notes"])
    assert found["notes"][1:] == list(NEXT)
    assert page.count(">holds<") == len(NAMES) and "BROKEN" not in page
    drawn = page[page.index("<svg") :]
    assert drawn.count("<rect") == 3 * len(NAMES) + 1


def test_the_page_tells_broken_parity(whole: Path) -> None:
    """Of a sampled drafter and of one without chance; a target's name is no markup."""
    for name in ("small", "ngram"):
        found = report(whole)
        found["drafters"][name]["at"][AT]["parity"] |= {"holds": False, "equal": False}
        found["target"]["spec"] = "<b>x</b>"
        page = pages.page(found)
        assert page.count(">BROKEN<") == 1 and page.count(">holds<") == 2
        assert "<b>x" not in page and pages.broken(found) == [name]


def test_nothing_was_drafted(whole: Path) -> None:
    """Texts of one token: no pass, no figure; the page shows dashes."""
    found = report(whole)
    here = found["drafters"]["ngram"]["at"][AT]
    here["replay"] |= {"tau": None, "tau_ci": None, "alpha": [None, None]}
    here["decode"] |= {"tau": None, "speedup": None, "tokens_per_s": None}
    here |= {"predicted_speedup": None}
    assert pages.ordered(found, AT)[-1] == "ngram" and "–" in pages.page(found)


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

    monkeypatch.setattr(Learner, "advance", never)
    monkeypatch.setattr(Decoder, "generate", counted)
    assert run_demo(whole, quick.demo(target)) == 0
    assert set(sizes) == {1} and len(sizes) >= 2 * 3 * len(NAMES), "nothing was sampled in batches"
    assert counts(report(whole)) == counts(before)
    out, said = capfd.readouterr()
    for number in range(1, len(STAGES) + 1):
        assert f"stage {number} of {len(STAGES)}: {STAGES[number - 1]}" in said
    assert said.count("is finished") == 2 and "prompts decoded" in said
    assert "eagle" in out and "break-even" in out and before["notes"][0] in out
    found = report(whole)
    for name in found["drafters"]:
        cells = pages.figures(found, name, AT)
        assert all(cells[i] in out for i in pages.NARROW), "a figure is cut"


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
    assert run_demo(whole, quick.demo(target)) == 1
    assert "error: eagle: decoder and replay disagree" in capsys.readouterr().err


def counts(found: dict[str, Any]) -> dict[str, Any]:
    """What must repeat: what was decoded, and how it is judged, without what the clock says."""
    at = {name: drafter["at"][AT] for name, drafter in found["drafters"].items()}
    return {
        "samples": found["notes"][0],
        "learned": {name: d["tokens_learned"] for name, d in found["drafters"].items()},
        "decode": {n: [d["decode"][k] for k in ("tau", "passes", "tokens")] for n, d in at.items()},
        "replay": {n: d["replay"] for n, d in at.items()},
        "z": {n: d["parity"]["z_per_depth"] for n, d in at.items()},
    }


# ---------------------------------------------------------------- killed


# What is there when a stage is under way.
MOMENTS = {
    "samples": "samples/parts/000000-*",
    "small": "small/checkpoint-2",
    "between": "small/checkpoint-4",
    "eagle": "eagle/checkpoint-2",
    "decoding": "small.json",
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
        assert not (folder / "compare.json").exists(), "killed too late to show anything"
    process = quick.fork(folder, target, slow=False)
    process.join()
    assert process.exitcode == 0
    for name in RECIPES:
        assert training.differences(whole / name, folder / name, quick.STEPS) == []
        replays = [m["step"] for m in journal.read_metrics(folder / name) if m["kind"] == "replay"]
        assert replays == [0, 2, 4]
    ours, theirs = counts(report(folder)), counts(report(whole))
    assert ours == theirs
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in whole.iterdir())
    assert not (folder / "samples" / "parts").exists()
