"""What the quickstart found: report.json from its evaluations, and the same figures as a table on
the terminal, report.md and report.html. The pages hold no figure that is not in report.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftsmith.eval import acceptance, plots
from draftsmith.eval import report as pages
from draftsmith.eval.parity import Z_BOUND
from draftsmith.eval.provenance import provenance
from draftsmith.train import checkpoint

Report = dict[str, Any]

NAMES = {"ngram": "n-gram", "small": "small", "eagle": "EAGLE-3"}
COLUMNS = {  # title, digits
    "tau_replay": ("tau, replay", 3),
    "tau_decode": ("tau, decode", 3),
    "alpha_0": ("alpha_0", 3),
    "tokens_per_s": ("tokens/s", 1),
    "speedup": ("speedup", 2),
    "predicted_speedup": ("predicted", 2),
    "break_even_tau": ("break-even tau", 2),
}
REAL_RUN = (
    "Published EAGLE-3 heads read some 500,000 of their target's answers two or three times "
    "(vllm-project/speculators, Qwen3-8B: tau 2.8 to 3.0), a thousand times and more of what is "
    "seen here."
)
NEXT = {
    "draftsmith train smol-eagle3 name=mine target=TARGET prompts=PROMPTS.jsonl steps=20000": (
        "A real run, on your target's answers to your prompts; draftsmith plan with the same "
        "words says beforehand what it takes."
    ),
    "draftsmith eval runs/mine/best": (
        "Its best checkpoint: acceptance by replay and decode, parity, speed."
    ),
    "draftsmith report runs/mine": (
        "A page like this one for all its checkpoints: learning curve, best draft length, domains."
    ),
}


def assemble(about: Report, decoded: dict[str, Report]) -> Report:
    """report.json: the table, what the demo saw, and each drafter's whole evaluation.

    about: target, temperature, k, samples {answers, tokens}, positions_learned by drafter.
    decoded: evaluate's report by drafter.
    """
    samples, learned = about["samples"], about["positions_learned"]
    seen = " and ".join(f"{NAMES[name]} learned from {n:,}" for name, n in learned.items())
    demo = (
        f"This is a demo: {samples['answers']} answers, {samples['tokens']:,} tokens at "
        f"temperature {about['temperature']:g}; {seen} positions (repeats counted). {REAL_RUN}"
    )
    table = {name: _row(found) for name, found in decoded.items()}
    return {
        "about": demo,
        **about,
        "table": table,
        "best": max(table, key=lambda name: table[name]["tau_replay"] or 0.0),
        "fastest": max(table, key=lambda name: table[name]["speedup"] or 0.0),
        "parity": {
            "holds": sum(found["parity"]["holds"] for found in decoded.values()),
            "of": len(decoded),
            "z_bound": Z_BOUND,
        },
        "method": {"interval": acceptance.INTERVAL, "resamples": acceptance.RESAMPLES},
        "round_ms": {name: _round(found["decode"]) for name, found in decoded.items()},
        "histogram": {
            NAMES[name]: pages.histogram(found["decode"]["histogram"])
            for name, found in decoded.items()
        },
        "next": NEXT,
        "decoded": decoded,
        **provenance(),
    }


def _row(found: Report) -> dict[str, float | None]:
    """One drafter's figures."""
    decode, replay = found["decode"], found["replay"]
    return {
        "tau_replay": replay["tau"],
        "tau_decode": decode["tau"],
        "alpha_0": replay["alpha"][0],
        "tokens_per_s": decode["tokens_per_s"],
        "speedup": decode["speedup"],
        "predicted_speedup": found["predicted_speedup"],
        "break_even_tau": found["break_even_tau"],
    }


def _round(decode: Report) -> dict[str, float]:
    """A round's parts, their sum, and the step of the same loop without drafting, in ms."""
    parts = {part: decode[f"{part}_ms"] for part in ("draft", "verify", "host")}
    return parts | {"whole": sum(parts.values()), "step": decode["baseline_step_ms"]}


# ---------------------------------------------------------------- table and pages


def cells(report: Report) -> Iterator[list[str]]:
    """The table's rows as text; "-" where nothing was drafted."""
    for name, row in report["table"].items():
        values = [(row[key], digits) for key, (_, digits) in COLUMNS.items()]
        yield [NAMES[name], *("-" if v is None else f"{v:.{digits}f}" for v, digits in values)]


def table(report: Report) -> Table:
    """The table for the terminal."""
    title = f"Drafters for {report['target']}, temperature {report['temperature']:g}, "
    title += f"k={report['k']}"
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    out.add_column("")
    for column, _ in COLUMNS.values():
        out.add_column(column, justify="right")
    for row in cells(report):
        out.add_row(*row)
    return out


def write(folder: Path, report: Report) -> None:
    """report.md, report.html and report.json, the last of them last."""
    checkpoint.write(folder / "report.md", markdown(report))
    checkpoint.write(folder / "report.html", page(report))
    checkpoint.write(folder / "report.json", json.dumps(report, indent=1) + "\n")


def markdown(report: Report) -> str:
    """report.md: the table and what it is."""
    lines = ["| " + " | ".join(["drafter", *(title for title, _ in COLUMNS.values())]) + " |"]
    lines += ["| --- |" + " ---: |" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in cells(report)]
    title = f"# Quickstart: drafters for {report['target']}, k={report['k']}\n\n"
    return title + "\n".join(lines) + f"\n\n{report['about']}\n"


def page(report: Report) -> str:
    """report.html, in the look of `draftsmith report`'s page."""
    rows = []
    for name, found in report["round_ms"].items():
        parts = {part: found[part] for part in ("draft", "verify", "host")}
        rows.append((NAMES[name], parts, found["whole"]))
        rows.append(("no drafts", {"step": found["step"]}, found["step"]))
    charts = {
        "round": plots.stacks("a round's time", rows),
        "histogram": plots.accepted_lengths(report),
    }
    shown = report | {"names": NAMES, "columns": COLUMNS}
    return pages.render("quickstart.html.j2", shown, charts)
