"""The report's six charts, each drawn from report.json alone; one serves compare too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.eval.acceptance.intervals import FEW
from draftsmith.eval.report.charts import Chart, span, ticks

Report = dict[str, Any]


def plots(report: Report) -> dict[str, str]:
    """SVG by name."""
    return {
        "alpha": alpha_per_depth(report["replay"], report["k"]),
        "tau": tau_by_k(report),
        "learning": learning_curve(report),
        "speedup": speedup_by_k(report),
        "round": round_time(report),
        "histogram": accepted_lengths(report),
    }


def alpha_per_depth(found: Mapping[str, Report], k: int, colours: int = 8) -> str:
    """alpha_j with intervals, where enough rounds tried a depth; a series for each replay."""
    known = [
        [(j, a) for j, a in enumerate(r["alpha"]) if a is not None and r["reached"][j] >= FEW]
        for r in found.values()
    ]
    replays = list(found.items())
    tops = [
        r["alpha_ci"][j][1] for (_, r), some in zip(replays, known, strict=True) for j, _ in some
    ]
    chart = Chart("alpha per depth", (-0.4, k - 0.6), span(tops or [1.0], floor=0.0))
    chart.y_axis()
    chart.x_axis("depth j", [(j, str(j)) for j in range(k)])
    for i, (label, replay) in enumerate(replays):
        shift, style = _shift(i, len(replays), 0.12), f"s{i % colours}"
        chart.line([(j + shift, a) for j, a in known[i]], style)
        for j, a in known[i]:
            low, high = replay["alpha_ci"][j]
            chart.whisker(j + shift, low, high, style)
            tooltip = f"{label}, depth {j}: {a:.3f} [{low:.3f}, {high:.3f}]"
            chart.dot(j + shift, a, style, tooltip)
    return chart.svg()


def tau_by_k(report: Report) -> str:
    """Replay's tau with its band, the independent formula dashed, decode as a ring."""
    rows = report["by_k"]
    values = [v for r in rows.values() for f in r.values() for v in [*f["tau_ci"], f["tau_iid"]]]
    values += [d["decode"]["tau"] for d in report["decode"].values() if d["decode"]["tau"]]
    ks = range(1, report["k"] + 1)
    chart = Chart("tau against k", (0.7, report["k"] + 0.3), span([*values, 1.0]))
    chart.y_axis()
    chart.x_axis("draft length k", [(k, str(k)) for k in ks])
    for i, (label, found) in enumerate(rows.items()):
        points = [(k, found[str(k)]) for k in ks]
        chart.band(
            [(k, f["tau_ci"][0]) for k, f in points],
            [(k, f["tau_ci"][1]) for k, f in points],
            f"s{i}",
        )
        chart.line([(k, f["tau_iid"]) for k, f in points], f"s{i} dashed")
        chart.line([(k, f["tau"]) for k, f in points], f"s{i}")
        for k, f in points:
            chart.dot(k, f["tau"], f"s{i}", f"{label}, k = {k}: replay tau {f['tau']:.3f}")
        decoded = report["decode"][label]
        if decoded["decode"]["tau"]:
            tooltip = f"{label}, k = {decoded['k']}: decode tau {decoded['decode']['tau']:.3f}"
            chart.dot(decoded["k"], decoded["decode"]["tau"], f"s{i} ring", tooltip, 6.5)
    return chart.svg()


def learning_curve(report: Report) -> str:
    """tau of every checkpoint against the tokens it has learned from; the best one marked."""
    rows = report["by_checkpoint"]
    known = [r for r in rows if all(f["tau"] is not None for f in r["replay"].values())]
    values = [v for r in known for f in r["replay"].values() for v in f["tau_ci"]]
    last = max(r["tokens_learned"] for r in rows) or 1
    chart = Chart("learning curve", (0, 1.06 * last), span([*values, 1.0]))
    chart.y_axis()
    marks = [r["tokens_learned"] for r in rows] if len(rows) < 8 else ticks(0, last)
    chart.x_axis("tokens learned from", [(tokens, _short(tokens)) for tokens in marks])
    for i, label in enumerate(report["replay"]):
        shift = _shift(i, len(report["replay"]), 0.012 * last)
        points = [(r["tokens_learned"] + shift, r["replay"][label]) for r in known]
        chart.line([(x, f["tau"]) for x, f in points], f"s{i}")
        for (x, f), row in zip(points, known, strict=True):
            low, high = f["tau_ci"]
            chart.whisker(x, low, high, f"s{i}")
            tooltip = f"checkpoint-{row['step']}, {label}: {f['tau']:.3f} [{low:.3f}, {high:.3f}]"
            chart.dot(x, f["tau"], f"s{i}", tooltip)
            if row["best"]:
                chart.dot(x, f["tau"], f"s{i} ring", tooltip, 7)
    best = next((r for r in known if r["best"]), None)
    if best:
        top = max(f["tau_ci"][1] for f in best["replay"].values())
        chart.label(best["tokens_learned"], top, "best", "middle strong", 7)
    return chart.svg()


def speedup_by_k(report: Report) -> str:
    """Predicted speedup by k, the decoder's own as rings, and the line where drafting pays."""
    rows = report["by_k"]
    values = [f["predicted_speedup"] for r in rows.values() for f in r.values()]
    values += [d["decode"]["speedup"] for d in report["decode"].values() if d["decode"]["speedup"]]
    ks = range(1, report["k"] + 1)
    chart = Chart("speedup against k", (0.7, report["k"] + 0.3), span([*values, 1.0]))
    chart.y_axis()
    chart.x_axis("draft length k", [(k, str(k)) for k in ks])
    chart.line([(chart.x[0], 1.0), (chart.x[1], 1.0)], "even")
    left, even = chart.pixels(chart.x[0], 1.0)
    chart.text(left + 2, even - 5, "break-even", "note")
    for i, (label, found) in enumerate(rows.items()):
        points = [(k, found[str(k)]["predicted_speedup"]) for k in ks]
        style, note = shade(f"s{i}", report["speed"][label]["clock"])
        chart.line(points, style)
        for k, value in points:
            chart.dot(k, value, style, f"{label}, k = {k}: {value:.2f}x predicted{note}")
        decoded = report["decode"][label]
        if decoded["decode"]["speedup"]:
            value = decoded["decode"]["speedup"]
            style, note = shade(f"s{i}", decoded["decode"]["clock"])
            tooltip = f"{label}, k = {decoded['k']}: {value:.2f}x measured{note}"
            chart.dot(decoded["k"], value, f"{style} ring", tooltip, 6.5)
    return chart.svg()


def round_time(report: Report) -> str:
    """A round's parts at each k, and a step without drafting."""
    costs = report["speed"][report["served"]]["costs_ms"]
    rows = [("no drafts", {"step": costs["step"]}, costs["step"])]
    for k, whole in costs["round"].items():
        width = str(int(k) + 1)
        parts = {"draft": costs["draft"][k], "verify": costs["verify"][width]}
        rows.append((f"k = {k}", parts | {"host": costs["host"]}, whole))
    clock = report["speed"][report["served"]]["clock"]
    return stacks("a round's time", rows, [clock] * len(rows))


def shade(style: str, clock: Report) -> tuple[str, str]:
    """A mark's style and a note for its tooltip: grey for what is no measurement."""
    return ("grey", " (machine busy)") if clock["busy"] else (style, "")


def stacks(
    title: str, rows: Sequence[tuple[str, dict[str, float], float]], clocks: Sequence[Report]
) -> str:
    """Rows of (name, parts in ms, all of them in ms), a bar each; a part's name is its style.

    clocks: of each row, whether it is a measurement.
    """
    longest = max(whole for *_, whole in rows)
    room = max(64, 8 + 7 * max(len(name) for name, *_ in rows))  # pixels
    chart = Chart(title, (0, 1.18 * longest), (len(rows), 0), 34 * len(rows) + 58, room)
    for i, (name, parts, whole) in enumerate(rows):
        x, y = chart.pixels(0, i + 0.5)
        chart.text(x - 8, y + 4, name, "tick end")
        start = 0.0
        for part, value in parts.items():
            style, note = shade(part, clocks[i])
            tooltip = f"{name}: {part} {value:.1f} ms{note}"
            chart.bar(start, start + value, i + 0.82, i + 0.18, style, tooltip)
            start += value
        chart.text(chart.pixels(start, 0)[0] + 6, y + 4, f"{whole:.1f} ms", "value")
    return chart.svg()


def accepted_lengths(report: Report) -> str:
    """Share of verify passes that accepted 0, 1, .. k drafts; a series for each name."""
    rows = report["histogram"]
    shares = [f["share"] for f in rows.values()]
    chart = Chart(
        "accepted drafts per pass",
        (-0.5, report["k"] + 0.5),
        span([s for share in shares for s in share], floor=0.0),
    )
    chart.y_axis()
    chart.x_axis("drafts accepted in a pass", [(m, str(m)) for m in range(report["k"] + 1)])
    each = 0.76 / len(rows)
    for i, (label, found) in enumerate(rows.items()):
        for m, share in enumerate(found["share"]):
            x = m - 0.38 + i * each
            tooltip = f"{label}: {found['passes'][m]} passes accepted {m}"
            chart.bar(x, x + each * 0.94, 0.0, share, f"fill s{i}", tooltip)
            chart.label(x + each * 0.47, share, f"{share:.2f}", "middle value", 5)
    return chart.svg()


def _shift(i: int, count: int, step: float) -> float:
    """Moves series i of `count` sideways, so that whiskers do not hide one another."""
    return (i - (count - 1) / 2) * step


def _short(tokens: float) -> str:
    """Tokens as 24k."""
    if tokens >= 10_000_000:
        return f"{tokens / 1e6:.0f}M"
    return f"{tokens / 1000:.0f}k" if tokens >= 10_000 else f"{tokens:.0f}"
