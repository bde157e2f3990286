"""A run's report: report.json from its parts, and the same figures as report.md and report.html.

The pages hold no figure of their own: all they write comes from report.json (a test walks them).
The html needs no network and no script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.grow import Proposal
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance import intervals
from draftsmith.eval.acceptance.intervals import counted_tau
from draftsmith.eval.acceptance.parity import TIE, Z_BOUND
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.report import plots
from draftsmith.eval.speed import clocks, speed_model
from draftsmith.eval.speed.speed_model import Costs, Drafting

Report = dict[str, Any]


def label(sampler: Sampler) -> str:
    """How a report names a sampler: T=1, top-k 20."""
    cuts = [f"T={sampler.temperature:g}"]
    cuts += [f"top-k {sampler.top_k}"] if sampler.top_k else []
    cuts += [f"top-p {sampler.top_p:g}"] if sampler.top_p < 1 else []
    return ", ".join(cuts)


def adapted(target: Mapping[str, Any]) -> str:
    """A page's note on a target that was adapted to its heads, from its identity; else ""."""
    record = target.get("adapted_from")
    if record is None:
        return ""
    return (
        f"Target adapted from {record['spec']} by LoRA: its outputs are not {record['spec']}'s "
        f"(KL {record['kl']:.4f} nats a token); baseline and samples are its own."
    )


def assemble(
    header: Report,
    checkpoints: list[Report],
    decode: Mapping[str, Report],
    costs: Mapping[str, Costs],
    written: Report,
) -> Report:
    """report.json of a run.

    header: what is copied as it is: run, target, drafter {family, parameters}, heldout, k, served
    (the label of the run's sampler), best (a step), timed_in, provenance. checkpoints: {step,
    tokens_learned, replay: {label: replay.replay_report(..)}}, ascending. decode: evaluate's report
    by label, and costs, both of the best checkpoint. written: `sample_text`'s.
    """
    rows = [row | {"best": row["step"] == header["best"]} for row in checkpoints]
    best = next(row for row in rows if row["best"])
    found = best["replay"]
    return header | {
        "method": {
            "interval": intervals.INTERVAL,
            "resamples": intervals.RESAMPLES,
            "few": intervals.FEW,
            "ngram": intervals.NGRAM,
            "repetitive_share": intervals.REPETITIVE,
            "z_bound": Z_BOUND,
            "tie_gap": TIE,
        },
        "replay": found,
        "by_checkpoint": rows,
        "by_domain": {name: r["by_domain"] for name, r in found.items()},
        "by_k": {name: _by_k(r, costs[name]) for name, r in found.items()},
        "repetitive": {name: r["repetitive"] for name, r in found.items()},
        "decode": dict(decode),
        "speed": {
            name: _speed(costs[name], r, header, best["tokens_learned"])
            for name, r in found.items()
        },
        "histogram": {name: histogram(d["decode"]["histogram"]) for name, d in decode.items()},
        "sample_text": written,
    }


def _by_k(found: Report, costs: Costs) -> Report:
    """Per draft length: true tau, the independent formula's, what either is worth."""
    out = {}
    for k in costs.ks:
        tau, alpha = found["tau_by_k"][str(k)], found["alpha_0_by_k"][str(k)]
        out[str(k)] = {
            "tau": tau,
            "tau_ci": found["tau_ci_by_k"][str(k)],
            "tau_iid": speed_model.independent_tau(alpha, k),
            "burstiness": speed_model.burstiness(alpha, tau, k),
            "predicted_speedup": speed_model.speedup(costs, tau, k),
            "break_even_tau": speed_model.break_even(costs, k),
        }
    return out


def _speed(costs: Costs, found: Report, header: Report, learned: int) -> Report:
    drafting = drafting_of(found, header["drafter"]["parameters"], learned)
    tau = drafting.tau_by_k
    best = speed_model.best_k(costs, tau)
    return {
        "costs_ms": costs.milliseconds(),
        "best_k": best,
        "predicted_speedup": speed_model.speedup(costs, tau[best], best),
        "break_even_tau": speed_model.break_even(costs, best),
        "clock": costs.clock.report(),
        "verdict": f"{speed_model.verdict(costs, drafting)} {header['timed_in']}",
    }


def drafting_of(found: Report, parameters: int, learned: int | None) -> Drafting:
    """What is known of a drafter by one replay (`replay.replay_report`)."""
    tau = {int(k): value for k, value in found["tau_by_k"].items()}
    interval = {int(k): (low, high) for k, (low, high) in found["tau_ci_by_k"].items()}
    return Drafting(tau, interval, found["alpha"][0] or 0.0, parameters, learned)


def histogram(passes: list[int]) -> Report:
    """passes: how many accepted 0, 1, .. k drafts, and their shares."""
    return {"passes": passes, "share": [n / max(sum(passes), 1) for n in passes]}


# ---------------------------------------------------------------- one text, piece by piece


class _Watched:
    """A drafter whose chains are kept: the decoder keeps only what it accepts of them."""

    capturable = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.chains: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *arguments: Any) -> Proposal:
        proposal = self.drafter.propose(*arguments)
        self.chains.append(proposal.tokens[0, 1 : int(proposal.length[0])].tolist())
        return proposal


def sample_text(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    sampler: Sampler,
    k: int,
    max_new_tokens: int,
    *,
    row: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Decodes one prompt (row keys its noise) and marks which tokens the drafter wrote.

    pieces: {text, by} in order, by "drafter" (drafted and accepted), "rejected" (the draft that was
    refused, no part of the text; `drafts` has those after it too) or "target" (its correction or
    bonus; the first token is prefill's).
    """
    watched = _Watched(drafter)
    decoder = Decoder(target, cast(Drafter, watched), Policy(k))
    text = decoder.generate([prompt], sampler, max_new_tokens, rows=[row], seed=seed)[0]
    spans: list[tuple[str, list[int]]] = [("target", text.tokens[:1])]
    done = 1
    for (_, _, accepted), chain in zip(text.rounds, watched.chains, strict=True):
        spans.append(("drafter", text.tokens[done : done + accepted]))
        done += accepted
        # An accepted draft may end the text: then the target adds nothing.
        own = text.tokens[done : done + 1]
        if own and accepted < len(chain):
            spans.append(("rejected", chain[accepted:]))
        spans.append(("target", own))
        done += 1
    pieces: list[dict[str, str]] = []
    written: list[int] = []
    shown = ""

    def after(ids: list[int]) -> str:
        """What tokens add to the text shown; half a character waits for its other half."""
        return target.tokenizer.decode(written + ids).rstrip("\ufffd")[len(shown) :]

    for by, ids in spans:
        if by == "rejected":
            first, drafts = (after(ids[:n]) for n in (1, len(ids)))
            pieces += [{"text": first, "drafts": drafts, "by": by}] if first else []
            continue
        piece = after(ids)
        written, shown = written + ids, shown + piece
        if piece and pieces and pieces[-1]["by"] == by:
            pieces[-1]["text"] += piece
        elif piece:
            pieces.append({"text": piece, "by": by})
    drafted = sum(r.accepted for r in text.rounds)
    return {
        "prompt": target.tokenizer.decode(list(prompt)),
        "pieces": pieces,
        "tokens": len(text.tokens),
        "accepted": drafted,
        "passes": len(text.rounds),
        "tau": counted_tau([text]),
    }


# ---------------------------------------------------------------- pages


def write(report: Report, folder: Path) -> None:
    """report.json, report.md and report.html in an existing folder."""
    pages = {
        "report.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
        "report.md": page(report, "report.md.j2"),
        "report.html": page(report, "report.html.j2"),
    }
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


def page(report: Report, template: str) -> str:
    """report.json as a page."""
    return render(template, report, plots.plots(report))


def render(template: str, report: Report, charts: Mapping[str, str]) -> str:
    """A template of this folder, filled from a report; charts: SVG by name."""
    env = Environment(
        loader=PackageLoader("draftsmith.eval.report", "."),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"fixed": fixed, "interval": interval, "adapted": adapted, "times": times}
    drawn = {name: Markup(svg) for name, svg in charts.items()}
    return env.get_template(template).render(report, plots=drawn)


def fixed(value: float | None, digits: int = 3) -> str:
    """A figure as written, or a dash where there is none."""
    if value is None:
        return "–"
    text = f"{value:.{digits}f}"
    return text if float(text) else text.lstrip("-")  # no -0.00


def times(value: float | None, clock: Mapping[str, Any]) -> str:
    """A speedup, where it is a measurement by its clock."""
    return clocks.result(fixed(value, 2) + "x", clock)


def interval(ends: list[float] | None, digits: int = 2) -> str:
    """[low, high], or nothing."""
    return "" if ends is None else f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"
