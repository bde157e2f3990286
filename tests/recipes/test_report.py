"""`draftsmith report` on a tiny run of four checkpoints: right figures, right pages, made once.

    .venv/bin/pytest tests/recipes/test_report.py

Each check is a function that also meets the faults it is there for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

import tiny
from draftsmith.drafters import base, storage
from draftsmith.drafters.batch import batch_of
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance import intervals
from draftsmith.eval.acceptance.replay import TextRatios, moments, summarise, text_ratios
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.report import plots
from draftsmith.eval.report import report as pages
from draftsmith.eval.report.report import sample_text
from draftsmith.eval.speed.clocks import Steadiness
from draftsmith.recipes import report as recipe_report
from draftsmith.train.samples.samples import Samples
from reports import reported_run
from walker import NUMBER, Visible, strangers

K = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reported_run(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def report(run: Path) -> dict[str, Any]:
    return json.loads((run / "report" / "report.json").read_text())


# ---------------------------------------------------------------- figures


def stored(run: Path, label: str, target: Target) -> Samples:
    (folder,) = (run.parent / "heldout").glob(f"*{label}*")
    return Samples.open(folder, target)


def check_figures(run: Path, report: dict[str, Any]) -> None:
    """Every checkpoint's tau, alpha and domains, from tables of one text at a time."""
    target = Target.load(str(run.parents[1] / "target"))
    assert [row["step"] for row in report["by_checkpoint"]] == [4, 8, 12, 16]
    for row in report["by_checkpoint"]:
        drafter = storage.load(run / f"checkpoint-{row['step']}", target)
        for label, sampler in (("T=0", Sampler(0.0)), ("T=1", Sampler(1.0))):
            groups: dict[str, list[tuple[int, Any]]] = {}
            samples = stored(run, label, target)
            for sample in (samples[i] for i in range(len(samples))):
                read = target.read(batch_of([(sample.ids, sample.made)], sampler), drafter.taps)
                (table,) = text_ratios(drafter, read, K)
                found = (table.tokens, moments(table, K))
                groups.setdefault(sample.domain, []).append(found)
                groups.setdefault("all", []).append(found)
            assert sorted(groups) == ["all", "hill", "sea", "wood"]
            assert [len(groups[name]) for name in ("sea", "hill", "wood")] == [3, 5, 4]
            for name, parts in groups.items():
                told = row["replay"][label]
                told = told if name == "all" else told["by_domain"][name]
                tau = sum(n for n, _ in parts) / sum(m.mean[0] for _, m in parts)
                tried, taken = (sum(m.reached for _, m in parts), sum(m.survived for _, m in parts))
                alpha = [s / r if r > 0 else None for s, r in zip(taken, tried, strict=True)]
                assert told["tau"] == pytest.approx(tau, abs=1e-5), (name, label)
                assert told["alpha"] == pytest.approx(alpha, abs=1e-5)
                assert told["texts"] == len(parts) and told["tokens"] == sum(n for n, _ in parts)


def test_every_checkpoint_and_domain(run: Path, report: dict[str, Any]) -> None:
    check_figures(run, report)


def test_domains_mixed_up_show(run: Path, report: dict[str, Any]) -> None:
    """The fault: domains in the order of the file, where prompts were asked in turns."""
    mixed = json.loads(json.dumps(report))
    for row in mixed["by_checkpoint"]:
        names = row["replay"]["T=1"]["by_domain"]
        names["hill"], names["wood"] = names["wood"], names["hill"]
    with pytest.raises(AssertionError):
        check_figures(run, mixed)


def test_the_best_is_trainings_own(run: Path, report: dict[str, Any]) -> None:
    """Marked once; tau rises; what stands on top is the best checkpoint's."""
    (best,) = [row for row in report["by_checkpoint"] if row["best"]]
    assert (run / "best").resolve().name == f"checkpoint-{best['step']}"
    assert report["best_chosen_by"] == "training" and report["served"] == "T=1"
    taus = [row["replay"]["T=1"]["tau"] for row in report["by_checkpoint"]]
    assert taus[-1] > taus[0] + 0.02
    learned = [row["tokens_learned"] for row in report["by_checkpoint"]]
    assert learned == sorted(learned) and learned[0] > 0
    assert report["replay"] == best["replay"]
    assert report["by_domain"]["T=0"] == best["replay"]["T=0"]["by_domain"]


def test_decode_belongs_to_replay(report: dict[str, Any]) -> None:
    for label, found in report["decode"].items():
        assert found["parity"]["holds"], (label, found["parity"])
        assert found["prompts"] == 6
        gain = found["replay"]["tau"] / found["break_even_tau"]
        assert found["predicted_speedup"] == pytest.approx(gain)
        passes = report["histogram"][label]["passes"]
        assert sum(passes) == found["decode"]["passes"]
        accepted = [sum(passes[j + 1 :]) for j in range(K)]
        assert accepted == found["parity"]["accepted_per_depth"]
    for label, rows in report["by_k"].items():
        costs = report["speed"][label]["costs_ms"]
        for k, row in rows.items():
            whole = costs["draft"][k] + costs["verify"][str(int(k) + 1)] + costs["host"]
            assert row["break_even_tau"] == pytest.approx(whole / costs["step"])
            assert row["predicted_speedup"] == pytest.approx(row["tau"] * costs["step"] / whole)
            assert row["burstiness"] == pytest.approx(row["tau"] - row["tau_iid"])
        best = max(rows, key=lambda k: rows[k]["predicted_speedup"])
        assert report["speed"][label]["best_k"] == int(best)


# ---------------------------------------------------------------- intervals


def turns_of(prompts: int, turns: int) -> list[TextRatios]:
    """Texts of 20 tokens, `turns` of each prompt; half the prompts all right, half all wrong."""
    out = []
    for prompt in range(prompts):
        ratio = np.full((21, 1), float(prompt % 2))
        limit = np.array([1] * 20 + [0])
        out += [TextRatios(ratio, limit, np.full((21, 1), np.inf), prompt)] * turns
    return out


def check_intervals() -> None:
    """Eight prompts, half of them right: alpha is 1/3 here and the interval of a binomial of 8."""
    found = summarise(turns_of(8, 10), 1).pooled
    assert found.tau == pytest.approx(8 * 20 / (4 * 10 + 4 * 20))
    drawn = np.random.default_rng(1).binomial(8, 0.5, 4000)  # prompts that are right
    low, high = np.percentile(8 * 20 / (drawn * 10 + (8 - drawn) * 20), [2.5, 97.5])
    np.testing.assert_allclose(found.tau_ci, [low, high], atol=0.06)
    assert found.alpha_ci[0][1] - found.alpha_ci[0][0] > 0.4


def test_intervals_are_over_prompts() -> None:
    check_intervals()
    made = turns_of(6, 2)
    parts = summarise(made, 1).parts
    assert intervals.acceptance(parts, 1).tau_ci == pytest.approx(summarise(made, 1).tau_ci)


def test_intervals_over_texts_or_tokens_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: each text (or token) as if it were an observation of its own."""
    right = intervals.ratio_interval

    def narrow(above: Any, below: Any, prompts: Any, *more: Any) -> Any:
        return right(above, below, range(len(prompts)), *more)

    monkeypatch.setattr(intervals, "ratio_interval", narrow)
    with pytest.raises(AssertionError):
        check_intervals()


def test_evaluate_tells_domains_apart(run: Path, report: dict[str, Any]) -> None:
    """The decoder's own texts by category; none asked for, none told."""
    target = Target.load(str(run.parents[1] / "target"))
    drafter = storage.load(run / "best", target)
    names = ["b", "a", "b", "b"]
    found = evaluate(target, drafter, tiny.prompts(4), Sampler(0.0), Policy(K), 12, domains=names)
    told = found.by_domain
    assert [(name, row.texts) for name, row in told.items()] == [("a", 1), ("b", 3)]
    pairs = found.decode.by_prompt
    assert told["a"].tau == pytest.approx((pairs[1]["tokens"] - 1) / pairs[1]["passes"])
    assert found.repetitive["others"].texts + found.repetitive["apart"].texts == 4
    assert all(d["by_domain"] is None for d in report["decode"].values())


# ---------------------------------------------------------------- repetitive texts


def test_repeated_share() -> None:
    """Two copies of 8 tokens in 40: 16 of them; 7 tokens that repeat are no 8-gram."""
    fresh = list(range(100, 124))
    assert intervals.repeated_share([*range(8), *fresh, *range(8)]) == 16 / 40
    assert intervals.repeated_share([*range(7), *fresh, *range(7)]) == 0
    assert intervals.repeated_share([5] * 30) == 1.0  # overlapping copies
    assert intervals.repeated_share([1, 2] * 6) == 1.0
    assert intervals.repeated_share([]) == 0 and intervals.repeated_share([3]) == 0


def test_repetitive_texts_stand_apart() -> None:
    made = turns_of(4, 1)
    answers = [list(range(21)), [7] * 21, list(range(21)), [1, 2, 3] * 7]
    found = intervals.repetitive(summarise(made, 1).parts, answers, 1)
    assert found["apart"].texts == 2 and found["apart"].tau == 2.0
    assert found["others"].texts == 2 and found["others"].tau == 1.0


# ---------------------------------------------------------------- pages


def check_numbers(report: dict[str, Any], template: str = "report.html.j2") -> None:
    page = pages.page(report, template)
    words = " ".join(Visible(page).words) if "html" in template else page
    for text in [words]:
        assert len(NUMBER.findall(text)) > 100
        for piece in report["sample_text"]["pieces"]:
            text = text.replace(piece["text"], " ")
        ones = re.sub(r"1 \+ a \+ \.\. \+ a|t\(1\)", "", text)  # the formulas' own
        assert strangers(ones, report) == []


@pytest.mark.parametrize("template", ["report.html.j2", "report.md.j2"])
def test_every_number_is_in_the_json(template: str, report: dict[str, Any]) -> None:
    check_numbers(report, template)


def off(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value + 0.0137:.{digits}f}"


def test_a_number_from_elsewhere_shows(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "fixed", off)
    with pytest.raises(AssertionError):
        check_numbers(report)


def test_the_page_stands_alone(run: Path, report: dict[str, Any]) -> None:
    """No script, no address to load; drawn for narrow screens and for dark ones."""
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert page == pages.page(report, "report.html.j2")
    assert Visible(page).loads == []
    assert "url(" not in page and "@import" not in page and "http" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert all(f">{name}<" in page for name in ("sea", "hill", "wood"))
    for label in ("T=0", "T=1"):
        sentences = report["speed"][label]["verdict"].split(". ", 1)
        assert all(sentence in page for sentence in sentences)


@pytest.mark.parametrize("busy", [False, True])
def test_a_busy_machine_is_no_result(report: dict[str, Any], busy: bool) -> None:
    """Figures, verdict and marks of a speed that was no measurement, on both pages."""
    found = json.loads(json.dumps(report))
    clock = Steadiness(6, 0.4 if busy else 0.02).report()
    for label in ("T=0", "T=1"):
        found["decode"][label]["decode"] |= {"clock": clock, "speedup": 1.37}
        found["speed"][label] |= {"clock": clock, "verdict": clock["note"] or "It pays: 1.29x."}
        for row in found["by_k"][label].values():
            row["predicted_speedup"] = 1.29
    for template in ("report.html.j2", "report.md.j2"):
        page = pages.page(found, template)
        words = " ".join(Visible(page).words) if "html" in template else page
        assert ("Machine busy: not a measurement" in words) == busy
        unmarked = re.sub(r"1\.\d\dx \w+ \(machine busy\)", "", words)  # told by grey marks
        assert ("1.37x" in unmarked) == ("1.29x" in unmarked) == (not busy)
        assert ("It pays" in words) == (not busy)
    assert (" grey" in plots.speedup_by_k(found)) == busy
    check_numbers(found)


def test_target_text_is_no_markup(report: dict[str, Any]) -> None:
    """A target writes what it likes."""
    evil = json.loads(json.dumps(report))
    evil["sample_text"]["pieces"] = [{"text": "<script>x</script>", "by": "drafter"}]
    evil["run"]["name"] = "<b>bold</b>"
    page = pages.page(evil, "report.html.j2")
    assert "<script" not in page and "<b>bold" not in page and "&lt;script&gt;" in page


def test_charts_mark_the_best(report: dict[str, Any]) -> None:
    drawn = plots.plots(report)
    assert ">best<" in drawn["learning"] and drawn["learning"].count(" ring") == 2
    assert drawn["learning"].count("<circle") == 2 * 4 + 2
    assert "break-even" in drawn["speedup"] and drawn["tau"].count("dashed") == 2
    assert drawn["round"].count("<rect") == 1 + 3 * K


def test_a_depth_tried_seldom_is_not_drawn(report: dict[str, Any]) -> None:
    seldom = json.loads(json.dumps(report))
    for found in seldom["replay"].values():
        found["reached"] = [100.0, 100.0, 9.0]
    assert plots.alpha_per_depth(seldom["replay"], K).count("<circle") == 4


# ---------------------------------------------------------------- the sample text


def test_the_sample_text_is_the_decoders() -> None:
    """Its pieces without the refused ones are the text; who wrote what adds up."""
    target = tiny.target("Llama", vocab=12)
    drafter = base.family("ngram").create(target, base.family("ngram").Config())
    seen: set[str] = set()
    for row, prompt in enumerate(tiny.prompts(6, 3, 12)):
        for sampler in (Sampler(0.0), Sampler(1.0)):
            shown = sample_text(target, drafter, prompt, sampler, K, 30, row=row)
            decoder = Decoder(target, drafter, Policy(K))
            (text,) = decoder.generate([prompt], sampler, 30, rows=[row])
            kept = [p for p in shown["pieces"] if p["by"] != "rejected"]
            assert "".join(p["text"] for p in kept) == target.tokenizer.decode(text.tokens)
            words = [p for p in shown["pieces"] if p["by"] == "drafter"]
            taken = sum(len(p["text"].split()) for p in words)
            assert taken == shown["accepted"] == sum(r.accepted for r in text.rounds)
            assert shown["passes"] == len(text.rounds) and shown["tokens"] == len(text.tokens)
            seen |= {p["by"] for p in shown["pieces"]}
    assert seen == {"target", "drafter", "rejected"}


def test_the_typical_text_is_the_median() -> None:
    pairs = [(9, 2), (9, 8), (1, 0), (9, 4), (9, 1), (9, 7)]  # 4, 1, none, 2, 8, 8/7 a pass
    made = [{"tokens": tokens, "passes": passes} for tokens, passes in pairs]
    assert recipe_report.typical(made) == 3
    assert recipe_report.typical([{"tokens": 1, "passes": 0}]) == 0
