"""`draftsmith report` on a tiny run of four checkpoints: right figures, right pages, made once.

    .venv/bin/pytest tests/test_report.py

Each check is a function that also meets the faults it is there for.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

pytest.importorskip("datasets")

import tiny
import training
from draftsmith.drafters import base
from draftsmith.drafters.batch import batch_of
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval import acceptance, plots, speed
from draftsmith.eval import report as pages
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.replay import Table, moments, summarise, tables
from draftsmith.eval.sample_text import sample_text
from draftsmith.recipes import cli
from draftsmith.recipes import report as recipe_report
from draftsmith.recipes.commands import Report
from draftsmith.train import __main__ as train
from draftsmith.train.heldout import also_trained_on
from draftsmith.train.imported import import_answers
from draftsmith.train.prompts import Prompt, asked
from draftsmith.train.samples import Samples
from draftsmith.train.sources import read_prompts
from draftsmith.train.template import encode
from training import World
from walker import NUMBER, Visible, strangers

K = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, its prompts in three domains, and its report."""
    before = signal.getsignal(signal.SIGTERM)
    world = World(tmp_path_factory.mktemp("world"))
    assert train.main([str(world.recipe("one", steps=16, save_every=4))]) == 0
    signal.signal(signal.SIGTERM, before)
    rows = [json.loads(line) for line in world.prompts.read_text().splitlines()]
    domains = ["sea"] * 3 + ["hill"] * 8 + ["wood"] * 4
    asked = [row | {"category": name} for row, name in zip(rows, domains, strict=False)]
    (world.root / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    recipe_report.report(settings(world.folder("one")))
    return world.folder("one")


def settings(run: Path) -> Report:
    return Report(
        run, prompts=run.parents[1] / "asked.jsonl", limit=12, decode_limit=6, max_new_tokens=20
    )


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
        drafter = base.load(run / f"checkpoint-{row['step']}", target)
        for label, sampler in (("T=0", Sampler(0.0)), ("T=1", Sampler(1.0))):
            groups: dict[str, list[tuple[int, Any]]] = {}
            samples = stored(run, label, target)
            for sample in (samples[i] for i in range(len(samples))):
                read = target.read(batch_of([(sample.ids, sample.made)], sampler), drafter.taps)
                (table,) = tables(drafter, read, K)
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


def turns_of(prompts: int, turns: int) -> list[Table]:
    """Texts of 20 tokens, `turns` of each prompt; half the prompts all right, half all wrong."""
    out = []
    for prompt in range(prompts):
        ratio = np.full((21, 1), float(prompt % 2))
        limit = np.array([1] * 20 + [0])
        out += [Table(ratio, limit, np.full((21, 1), np.inf), prompt)] * turns
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
    assert acceptance.acceptance(parts, 1).tau_ci == pytest.approx(summarise(made, 1).tau_ci)


def test_intervals_over_texts_or_tokens_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: each text (or token) as if it were an observation of its own."""
    right = acceptance.ratio_interval

    def narrow(above: Any, below: Any, prompts: Any, *more: Any) -> Any:
        return right(above, below, range(len(prompts)), *more)

    monkeypatch.setattr(acceptance, "ratio_interval", narrow)
    with pytest.raises(AssertionError):
        check_intervals()


def test_evaluate_tells_domains_apart(run: Path, report: dict[str, Any]) -> None:
    """The decoder's own texts by category; none asked for, none told."""
    target = Target.load(str(run.parents[1] / "target"))
    drafter = base.load(run / "best", target)
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
    assert acceptance.repeated_share([*range(8), *fresh, *range(8)]) == 16 / 40
    assert acceptance.repeated_share([*range(7), *fresh, *range(7)]) == 0
    assert acceptance.repeated_share([5] * 30) == 1.0  # overlapping copies
    assert acceptance.repeated_share([1, 2] * 6) == 1.0
    assert acceptance.repeated_share([]) == 0 and acceptance.repeated_share([3]) == 0


def test_repetitive_texts_stand_apart() -> None:
    made = turns_of(4, 1)
    answers = [list(range(21)), [7] * 21, list(range(21)), [1, 2, 3] * 7]
    found = acceptance.repetitive(summarise(made, 1).parts, answers, 1)
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
    assert plots.alpha_per_depth(seldom).count("<circle") == 4


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
    for name in ("evaluate", "replay", "sample_text", "read_texts"):
        monkeypatch.setattr(recipe_report, name, _never)
    monkeypatch.setattr(speed, "measure", _never)
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
    shutil.copy(here / "checkpoint-4" / "model.safetensors", here / "checkpoint-8")
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
    row = {"prompt_ids": list(by_ids[0].ids or ()), "response_ids": [5, 6], "finish_reason": "stop"}
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
    assert train.main([str(world.recipe("heads", "medusa", k=4, steps=2, save_every=2))]) == 0
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
