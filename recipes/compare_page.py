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
COLOURS = 8  # series that the page can tell apart


def ordered(report: Report, at: str) -> list[tuple[str, Report]]:
    """Drafters by tau at a sampler, the highest first."""
    return sorted(
        report["drafters"].items(), key=lambda item: -(item[1]["at"][at]["replay"]["tau"] or 0.0)
    )


def samplers(report: Report) -> list[str]:
    return list(next(iter(report["drafters"].values()))["at"])


def clock(report: Report, name: str, at: str) -> Report:
    """Whether a drafter's speed is a measurement: its own clock's JSON, or where that was steady
    the one of the baselines of all drafters."""
    own = report["drafters"][name]["at"][at]["clock"]
    return own if own["busy"] else own | {k: report["baselines"][at][k] for k in ("busy", "note")}


def verdict(report: Report, name: str, at: str) -> str:
    """Whether drafting pays, as far as the clock lets that be said."""
    return clock(report, name, at)["note"] or report["drafters"][name]["at"][at]["verdict"]


def figures(report: Report, name: str, at: str) -> list[str]:
    """A drafter's row under COLUMNS."""
    found, told = report["drafters"][name], clock(report, name, at)
    here = found["at"][at]
    replay, k = here["replay"], here["best_k"]
    learned = found["tokens_learned"]
    return [
        f"{found['parameters']:,}",
        "-" if learned is None else f"{learned:,}",
        fixed(replay["tau"]),
        pages.interval(replay["tau_ci"]),
        " ".join(fixed(a, 2) for a in replay["alpha"]),
        str(k),
        fixed(here["costs_ms"]["draft"][str(k)], 1),
        clocks.result(fixed(here["break_even_tau"], 2), told),
        pages.times(here["predicted_speedup"], told),
        pages.times(here["decode"]["speedup"], told),
        "holds" if here["parity"]["holds"] else "BROKEN",
    ]


def diagnosis(report: Report, name: str, at: str) -> list[str]:
    """A drafter's row under DIAGNOSIS; recall is that of depth 0."""
    found = report["drafters"][name]
    here, curve = found["at"][at], found["curve"]
    recall, oracle = here["diagnosis"]["recall"], here["diagnosis"]["oracle_tau"]
    wanted = curve and curve["tokens_for_10_percent"]
    return [
        *(fixed(of[0], 2) for of in recall.values()),
        *(fixed(tau, 2) for tau in oracle.values()),
        f"{100 * here['draft_share']:.0f}%",
        f"{curve['per_doubling']:+.3f}" if curve else "-",
        f"{wanted:,}" if wanted else "-",
    ]


def show(report: Report) -> None:
    """Tables and verdicts on the terminal."""
    for table in tables(report):
        Console().print(table)
    for at in samplers(report):
        for name, _ in ordered(report, at):
            print(f"{name} at {at}: {verdict(report, name, at)}")


def broken(report: Report) -> list[str]:
    """Drafters whose parity is broken at some sampler."""
    return [
        name
        for name, found in report["drafters"].items()
        if not all(here["parity"]["holds"] for here in found["at"].values())
    ]


def tables(report: Report) -> list[Table]:
    """For the terminal: figures and diagnosis at each sampler."""
    out = []
    for at in samplers(report):
        title = f"Drafters for {report['target']['spec']}, {at}, k = {report['k']}"
        columns = [COLUMNS[i] for i in NARROW]
        rows = [(name, figures(report, name, at)) for name, _ in ordered(report, at)]
        out.append(_table(title, columns, [(n, [row[i] for i in NARROW]) for n, row in rows]))
        rows = [(name, diagnosis(report, name, at)) for name, _ in ordered(report, at)]
        out.append(_table(f"Candidates or choice? {at}", DIAGNOSIS, rows))
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
    lines = [f"# Drafters for {report['target']['spec']}", ""]
    for note in (*report["notes"], about(report)):
        lines += [note, ""]
    if said := pages.adapted(report["target"]):
        lines += [said, ""]
    for at in samplers(report):
        for title, columns, row in (("", COLUMNS, figures), (DIAGNOSED, DIAGNOSIS, diagnosis)):
            lines += [title, ""] if title else [f"## {at}", ""]
            lines += ["| " + " | ".join(["drafter", *columns]) + " |"]
            lines += ["| --- |" + " ---: |" * len(columns)]
            for name, _ in ordered(report, at):
                lines.append("| " + " | ".join([name, *row(report, name, at)]) + " |")
            lines.append("")
        lines += [f"- {name}: {verdict(report, name, at)}" for name, _ in ordered(report, at)]
        lines.append("")
    return "\n".join(lines)


DIAGNOSED = (
    "Recall: how often the target's own token is among a drafter's best 1, 4, 16 at depth 0, "
    "where rounds really start. Oracle tau: if every such token were accepted. A high recall@4 "
    "beside a low tau asks for a tree or a better trained choice; a low one for data or "
    "parameters. Draft share: of a round's time. The last two: a line through the run's own "
    "learning curve, tau gained per doubling of tokens, and tokens for a tau 10% higher."
)


def about(report: Report) -> str:
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
    rows = {at: ordered(report, at) for at in samplers(report)}
    charts = {}
    for at in rows:
        replays = {name: found["at"][at]["replay"] for name, found in report["drafters"].items()}
        charts[f"alpha {at}"] = plots.alpha_per_depth(replays, report["k"], COLOURS)
    charts |= {f"round {at}": rounds(report, at) for at in rows}
    shown = report | {
        "rows": {
            at: [
                (name, *(make(report, name, at) for make in (figures, diagnosis, verdict)))
                for name, _ in items
            ]
            for at, items in rows.items()
        },
        "columns": COLUMNS,
        "diagnosis": DIAGNOSIS,
        "diagnosed": DIAGNOSED,
        "about": about(report),
        "names": list(report["drafters"]),
        "colours": COLOURS,
    }
    return pages.render("compare.html.j2", shown, charts)


def rounds(report: Report, at: str) -> str:
    """A round's time at each drafter's best k."""
    rows: list[tuple[str, dict[str, float], float]] = []
    for name, found in ordered(report, at):
        here = found["at"][at]
        costs, k = here["costs_ms"], here["best_k"]
        parts = {"draft": costs["draft"][str(k)], "verify": costs["verify"][str(k + 1)]}
        parts |= {"host": costs["host"]}
        rows.append((name, parts, costs["round"][str(k)]))
    first, found = ordered(report, at)[0]
    step = found["at"][at]["costs_ms"]["step"]
    rows.append(("no drafts", {"step": step}, step))
    told = [clock(report, name, at) for name in [*(name for name, *_ in rows[:-1]), first]]
    return plots.stacks(f"a round's time, {at}", rows, told)
