"""What a comparison found: tables on the terminal, compare.md, compare.html, compare.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftsmith.eval.report import plots
from draftsmith.eval.report import report as pages
from draftsmith.eval.report.report import fixed
from draftsmith.eval.speed import clocks
from draftsmith.train import disk

Report = dict[str, Any]

COLUMNS = ("parameters", "tokens learned", "tau", "95% CI", "alpha per depth", "best k", "draft ms",
           "break-even", "predicted", "measured", "parity")  # fmt: skip
NARROW = (0, 1, 2, 5, 7, 8, 9, 10)  # what fits a terminal
DIAGNOSIS = ("recall@1", "@4", "@16", "oracle tau@1", "@4", "@16", "draft share",
             "per doubling", "for +10%")  # fmt: skip
DIAGNOSED = (
    "Recall: how often the target's own token is among a drafter's best 1, 4, 16 at depth 0, "
    "where rounds really start. Oracle tau: if every such token were accepted. A high recall@4 "
    "beside a low tau asks for a tree or a better trained choice; a low one for data or "
    "parameters. Draft share: of a round's time. The last two: a line through the run's own "
    "learning curve, tau gained per doubling of tokens, and tokens for a tau 10% higher."
)
COLOURS = 8  # of the page's series


def samplers(report: Report) -> list[str]:
    """The samplers' labels."""
    return list(next(iter(report["drafters"].values()))["at"])


def cell(report: Report, name: str, sampler: str) -> Report:
    """A drafter's figures at a sampler."""
    return report["drafters"][name]["at"][sampler]


def ordered(report: Report, sampler: str) -> list[str]:
    """Drafters by tau at a sampler, the highest first."""
    return sorted(
        report["drafters"], key=lambda name: -(cell(report, name, sampler)["replay"]["tau"] or 0.0)
    )


def clock(report: Report, name: str, sampler: str) -> Report:
    """Whether a drafter's speed is a measurement: its own clock's JSON, or where that was steady
    the one of the baselines of all drafters."""
    own = cell(report, name, sampler)["clock"]
    every = report["baselines"][sampler]
    return own if own["busy"] else own | {key: every[key] for key in ("busy", "note")}


def verdict(report: Report, name: str, sampler: str) -> str:
    """Whether drafting pays, or that the clock was too unsteady to judge."""
    return clock(report, name, sampler)["note"] or cell(report, name, sampler)["verdict"]


def figures(report: Report, name: str, sampler: str) -> list[str]:
    """A drafter's row under COLUMNS."""
    drafter, found = report["drafters"][name], cell(report, name, sampler)
    replay, k, steady = found["replay"], found["best_k"], clock(report, name, sampler)
    learned = drafter["tokens_learned"]
    return [
        f"{drafter['parameters']:,}",
        "-" if learned is None else f"{learned:,}",
        fixed(replay["tau"]),
        pages.interval(replay["tau_ci"]),
        " ".join(fixed(a, 2) for a in replay["alpha"]),
        str(k),
        fixed(found["costs_ms"]["draft"][str(k)], 1),
        clocks.result(fixed(found["break_even_tau"], 2), steady),
        pages.times(found["predicted_speedup"], steady),
        pages.times(found["decode"]["speedup"], steady),
        "holds" if found["parity"]["holds"] else "BROKEN",
    ]


def diagnosis(report: Report, name: str, sampler: str) -> list[str]:
    """A drafter's row under DIAGNOSIS; recall is that of depth 0."""
    found, curve = cell(report, name, sampler), report["drafters"][name]["curve"]
    recall, oracle = found["diagnosis"]["recall"], found["diagnosis"]["oracle_tau"]
    wanted = curve and curve["tokens_for_10_percent"]
    return [
        *(fixed(depths[0], 2) for depths in recall.values()),
        *(fixed(tau, 2) for tau in oracle.values()),
        f"{100 * found['draft_share']:.0f}%",
        f"{curve['per_doubling']:+.3f}" if curve else "-",
        f"{wanted:,}" if wanted else "-",
    ]


def show(report: Report) -> None:
    """Tables and verdicts on the terminal."""
    for table in tables(report):
        Console().print(table)
    for sampler in samplers(report):
        for name in ordered(report, sampler):
            print(f"{name} at {sampler}: {verdict(report, name, sampler)}")


def broken(report: Report) -> list[str]:
    """Drafters whose parity is broken at some sampler."""
    return [
        name
        for name, found in report["drafters"].items()
        if not all(one["parity"]["holds"] for one in found["at"].values())
    ]


def tables(report: Report) -> list[Table]:
    """For the terminal: figures and diagnosis at each sampler."""
    out = []
    for sampler in samplers(report):
        title = f"Drafters for {report['target']['spec']}, {sampler}, k = {report['k']}"
        names = ordered(report, sampler)
        rows = [(name, figures(report, name, sampler)) for name in names]
        narrow = [(name, [row[i] for i in NARROW]) for name, row in rows]
        out.append(_table(title, [COLUMNS[i] for i in NARROW], narrow))
        rows = [(name, diagnosis(report, name, sampler)) for name in names]
        out.append(_table(f"Candidates or choice? {sampler}", DIAGNOSIS, rows))
    return out


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("", min_width=max(len(name) for name, _ in rows))
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows:
        table.add_row(name, *row)
    return table


def write(report: Report, folder: Path) -> None:
    """compare.md, compare.html and compare.json, the last of them last."""
    disk.write(folder / "compare.md", markdown(report))
    disk.write(folder / "compare.html", page(report))
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    disk.write(folder / "compare.json", text)


def markdown(report: Report) -> str:
    target = report["target"]
    lines: list[str] = []
    head = (f"# Drafters for {target['spec']}", *report["notes"], method(report))
    for text in (*head, pages.adapted(target)):
        lines += [text, ""] if text else []
    for sampler in samplers(report):
        names = ordered(report, sampler)
        parts = ((f"## {sampler}", COLUMNS, figures), (DIAGNOSED, DIAGNOSIS, diagnosis))
        for lead, columns, row in parts:
            lines += [lead, ""]
            lines += ["| " + " | ".join(["drafter", *columns]) + " |"]
            lines += ["| --- |" + " ---: |" * len(columns)]
            lines += ["| " + " | ".join([n, *row(report, n, sampler)]) + " |" for n in names] + [""]
        lines += [f"- {name}: {verdict(report, name, sampler)}" for name in names] + [""]
    return "\n".join(lines)


def method(report: Report) -> str:
    """How the figures were made."""
    return (
        f"Replay of {report['prompts']} held-out answers of the target, at most "
        f"{report['max_new_tokens']} tokens each, k = {report['k']} (a family's longest, where "
        f"that is less). Speed: medians of rounds of the real decoder at batch 1, predicted and "
        f"measured on the first {report['decoded_prompts']} prompts at the best k, each by the "
        "drafter and then without it; busy: the machine was, and it is not a measurement. "
        f"{report['timed_in']}"
    )


def page(report: Report) -> str:
    """compare.html, in the look of `draftsmith report`'s page."""
    rows: dict[str, list[Any]] = {}
    charts: dict[str, str] = {}
    for sampler in samplers(report):
        rows[sampler] = [
            (name, *(make(report, name, sampler) for make in (figures, diagnosis, verdict)))
            for name in ordered(report, sampler)
        ]
        replays = {name: cell(report, name, sampler)["replay"] for name in report["drafters"]}
        charts[f"alpha {sampler}"] = plots.alpha_per_depth(replays, report["k"], COLOURS)
        charts[f"round {sampler}"] = rounds(report, sampler)
    shown = report | {
        "rows": rows,
        "columns": COLUMNS,
        "diagnosis": DIAGNOSIS,
        "diagnosed": DIAGNOSED,
        "method": method(report),
        "names": list(report["drafters"]),
        "colours": COLOURS,
    }
    return pages.render("compare.html.j2", shown, charts)


def rounds(report: Report, sampler: str) -> str:
    """A round's time at each drafter's best k, as an SVG."""
    names = ordered(report, sampler)
    rows: list[tuple[str, dict[str, float], float]] = []
    for name in names:
        costs, k = (cell(report, name, sampler)[key] for key in ("costs_ms", "best_k"))
        parts = {"draft": costs["draft"][str(k)], "verify": costs["verify"][str(k + 1)]}
        rows.append((name, parts | {"host": costs["host"]}, costs["round"][str(k)]))
    step = cell(report, names[0], sampler)["costs_ms"]["step"]
    rows.append(("no drafts", {"step": step}, step))
    steady = [clock(report, name, sampler) for name in [*names, names[0]]]
    return plots.stacks(f"a round's time, {sampler}", rows, steady)
