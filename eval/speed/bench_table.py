"""bench.json in words: one row a cell, break-even by domain, and where speculation pays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from draftsmith.eval.speed import clocks

Row = list[str]
HEAD = [
    "drafter", "draft", "batch", "T", "tau", "tokens/s", "spread", "speedup", "predicted",
    "break-even", "end to end", "draft/verify/host", "roofline",
]  # fmt: skip
DOMAIN_HEAD = ["drafter", "draft", "batch", "T", "break-even"]


def title(bench: dict[str, Any]) -> str:
    """Names the target; a synthetic one's name says so."""
    settings = bench["settings"]
    lead = f"Speed of {settings['target']} in {bench['dtype']} on {bench['device']}"
    if settings["alpha"] is not None:
        lead += f": random weights, each depth accepted with chance {settings['alpha']}"
    return lead


def rows(bench: dict[str, Any]) -> list[Row]:
    """A row for each cell, under HEAD."""
    return [_row(cell) for cell in bench["cells"].values()]


def _row(cell: dict[str, Any]) -> Row:
    base = cell["policy"] is None

    def times(name: str, unit: str = "x") -> str:
        return "" if base else clocks.result(f"{cell[name]:.2f}{unit}", cell["clock"])

    return [
        _name(cell),
        cell["policy"] or "-",
        str(cell["batch"]),
        f"{cell['temperature']:g}",
        _number(cell["tau"]),
        f"{cell['tokens_per_s']:.1f}",
        _number(cell["clock"]["baseline_spread"], ".0%"),
        times("measured_speedup"),
        times("predicted_speedup"),
        times("break_even_tau", ""),
        f"{cell['end_to_end_tokens_per_s']:.1f}",
        " / ".join(f"{100 * cell['share'][part]:.0f}%" for part in ("draft", "verify", "host")),
        f"{100 * cell['roofline_share']:.0f}%",
    ]


def domain_rows(bench: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Head and rows: tau by domain and its distance to the break-even of each draft shape."""
    drafted = [cell for cell in bench["cells"].values() if cell["policy"]]
    names = sorted({name for cell in drafted for name in cell["tau_by_domain"]})
    out = []
    for cell in drafted:
        row = [_name(cell), cell["policy"], str(cell["batch"]), f"{cell['temperature']:g}"]
        row.append(clocks.result(_number(cell["break_even_tau"]), cell["clock"]))
        for name in names:
            far, tau = (cell[part].get(name) for part in ("distance_by_domain", "tau_by_domain"))
            row.append(
                "-" if far is None else f"{tau:.2f} ({clocks.result(f'{far:+.2f}', cell['clock'])})"
            )
        out.append(row)
    return DOMAIN_HEAD + names, out


def verdicts(bench: dict[str, Any]) -> list[str]:
    """For each drafter, batch and temperature: the fastest draft shape, and whether it pays."""
    best: dict[tuple[str, int, float], dict[str, Any]] = {}
    for cell in bench["cells"].values():
        if cell["policy"] is None:
            continue
        key = (_name(cell), cell["batch"], cell["temperature"])
        if key not in best or _rank(cell) > _rank(best[key]):
            best[key] = cell
    out = []
    for (name, batch, temperature), cell in best.items():
        lead = f"{name}, batch {batch}, T={temperature:g}: "
        if cell["clock"]["busy"]:  # all of them are
            out.append(f"{lead}at {cell['policy']}: {cell['clock']['note']}")
            continue
        gain = cell["measured_speedup"]
        word = "pays" if gain > 1 else "does not pay"
        domains = [
            n for n, far in cell["distance_by_domain"].items() if far is not None and far > 0
        ]
        text = f"{lead}{word}, {gain:.2f}x at {cell['policy']}"
        if not cell["synthetic"]:
            text += f"; above break-even on {', '.join(domains) or 'no domain'}"
        out.append(text)
    return out


def _rank(cell: dict[str, Any]) -> tuple[bool, float]:
    return not cell["clock"]["busy"], cell["measured_speedup"]


def markdown(bench: dict[str, Any]) -> str:
    """The whole bench as Markdown."""
    settings = bench["settings"]
    head, by_domain = domain_rows(bench)
    return "\n".join(
        [
            f"# {title(bench)}",
            "",
            f"{settings['prompts']} prompts, up to {settings['max_new_tokens']} new tokens. Decode "
            "figures leave prefill out, end-to-end ones (tokens/s) hold it. Spread: how much turns "
            f"of the loop without drafting differ; beyond {clocks.BUSY:.0%}, a drafter's own turns "
            "too, the machine was busy and nothing is a measurement. Warm-up: "
            f"{settings['warm_up']} tokens a cell, not counted. Copy bandwidth "
            f"{bench['copy_bytes_per_s'] / 1e9:.1f} GB/s; roofline: the share of a verify pass "
            "that reading weights and cache takes at that rate. Commit "
            f"{bench['commit']}, `{bench['command']}`.",
            "",
            _table(HEAD, rows(bench)),
            "tau by domain, and in brackets its distance to the break-even:",
            "",
            _table(head, by_domain),
            *(f"- {line}" for line in verdicts(bench)),
            "",
        ]
    )


def _name(cell: dict[str, Any]) -> str:
    return ("SYNTHETIC " if cell["synthetic"] else "") + cell["drafter"]


def _number(value: float | None, how: str = ".2f") -> str:
    return "-" if value is None else f"{value:{how}}"


def _table(head: Row, body: Iterable[Row]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)]) + "\n"
