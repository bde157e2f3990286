"""The card of an export: whose drafter it is, what it is worth, how to serve it, what was checked.

card.json for programs, README.md for people, both in the exported folder. Figures are the run's own
(its log, and its report where one was made); what nobody measured is said to be so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.drafters import export
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.export import Serving
from draftsmith.eval.evaluate import count_parameters
from draftsmith.eval.report import report as pages
from draftsmith.eval.report.provenance import provenance
from draftsmith.train import journal


@dataclass(frozen=True)
class ReadBack:
    """Draft logits of the written files against the drafter's: largest difference and the logits'
    standard deviation, over rows of real text."""

    difference: float
    spread: float
    rows: int


def card(
    name: str, drafter: Drafter, place: Path, folder: Path, serving: Serving, read_back: ReadBack
) -> dict[str, Any]:
    """card.json. place: the checkpoint; folder: where the export will lie."""
    chosen, target = export.server(name), drafter.target
    run = place.resolve().parent
    recipe = run / "recipe.yaml"
    told = yaml.safe_load(recipe.read_text()) if recipe.is_file() else {}
    return {
        "format": 1,
        "server": {"name": name, "version": chosen.version},
        "target": target.identity(),
        "drafter": {
            "family": drafter.family,
            "parameters": count_parameters(drafter),
            "config": drafter.config.stored(),
            "checkpoint": str(place),
        },
        "sampler": {key: told[key] for key in ("temperature", "top_k", "top_p") if key in told},
        "measured": _measured(run, place.resolve().name),
        "serving": {
            "target": serving.target,
            "target_gguf": str(serving.target_gguf) if serving.target_gguf else None,
            "k": serving.k,
            "max_positions": serving.length,
            "dtype": str(serving.dtype).removeprefix("torch."),
            "drafts": chosen.drafting(drafter, serving),
            "command": chosen.command(drafter, folder, serving),
        },
        "verified": {
            "read_back": vars(read_back),
            "layout": "files of this form were run with this version; these were not yet"
            if chosen.run
            else "layout checked against its source, not run",
            "served": "not by this command; run `draftsmith serve-check`",
        },
        **provenance(),
    }


def _measured(run: Path, name: str) -> dict[str, Any]:
    """tokens trained, and acceptance on held-out prompts by replay; {} where nobody measured.

    The run's report, if it is of this checkpoint, adds the predicted speedup.
    """
    step = name.removeprefix("checkpoint-")
    if not step.isdigit():
        return {}
    lines = journal.read_metrics(run)
    found: dict[str, Any] = {}
    if lines:
        found["tokens_trained"] = journal.learned(run, int(step))
    for line in lines:
        own = line["kind"] == "replay" and not line.get("biased")  # on text the target wrote
        if own and line["step"] == int(step):
            keys = ("k", "tau", "tau_ci", "alpha", "tau_by_k", "tau_greedy_by_k")
            found |= {key: line[key] for key in keys if key in line}  # runs of old lack the last
    path = run / "report" / "report.json"
    if path.is_file():
        report = json.loads(path.read_text())
        if report.get("best") == int(step):
            found["speedup"] = {
                label: {key: speed[key] for key in ("best_k", "predicted_speedup")}
                for label, speed in report["speed"].items()
                if not speed.get("clock", {}).get("busy")  # reports of old have no clock
            }
    return found


def write(folder: Path, about: dict[str, Any]) -> None:
    (folder / "card.json").write_text(json.dumps(about, indent=1) + "\n")
    (folder / "README.md").write_text(page(about))


def page(about: dict[str, Any]) -> str:
    """README.md of a card."""
    target, drafter, serving = about["target"], about["drafter"], about["serving"]
    checked, name = about["verified"], about["server"]["name"]
    back = checked["read_back"]
    sampler = about["sampler"]
    served = ", ".join(f"{key} {value}" for key, value in sampler.items()) or "not known"
    adapted = f"{said}\n\n" if (said := pages.adapted(target)) else ""
    return f"""# {drafter["family"]} drafter for {target["spec"]}, as {name} loads it

{adapted}| | |
|---|---|
| target | {target["spec"]}, revision {target["revision"]} |
| tokenizer | sha256 {target["tokenizer_hash"]} |
| drafter | {drafter["family"]}, {drafter["parameters"]:,} parameters, {serving["dtype"]} |
| trained for | {served} |
{_figures(about["measured"], sampler.get("temperature", 0.0))}
{_drafts(about)}Serve it with {name} {about["server"]["version"]}:

    {serving["command"]}

What was checked:

- Read back: draft logits of these files differ by at most {back["difference"]:.2g} from the
  checkpoint's (their standard deviation is {back["spread"]:.3g}; {back["rows"]} rows of real text).
- {name} {about["server"]["version"]}: {checked["layout"]}.
- Served: {checked["served"]}.

Made by draftsmith; card.json holds the same for programs.
"""


def _figures(measured: dict[str, Any], temperature: float) -> str:
    """Rows of the table; tau counts the bonus token. At temperature 0 both drafts are one."""
    if not measured:
        return "| acceptance | not measured |\n| predicted speedup | not measured |\n"
    tokens = measured.get("tokens_trained")  # told by the run's log alone
    rows = [("tokens trained", "not known" if tokens is None else f"{tokens:,}")]
    if "tau" in measured:
        drawn, greedy = measured["tau_by_k"], measured.get("tau_greedy_by_k")
        if temperature > 0:
            rows += [("tau, drafts drawn from q (replay, held-out prompts)", _by_k(drawn))]
            rows += [("tau, drafts taken as a point mass (q's argmax)", _by_k(greedy))]
        else:
            rows += [("tau (replay, held-out prompts)", _by_k(drawn))]
        alpha = ", ".join("-" if a is None else f"{a:.3f}" for a in measured["alpha"])
        rows += [("alpha by depth", alpha)]
    else:
        rows += [("acceptance", "not measured on the target's own text")]
    speedup = ", ".join(
        f"{found['predicted_speedup']:.2f}x at k = {found['best_k']} ({label})"
        for label, found in measured.get("speedup", {}).items()
    )
    rows.append(("predicted speedup", speedup or "not measured"))
    return "".join(f"| {name} | {value} |\n" for name, value in rows)


def _by_k(taus: dict[str, float] | None) -> str:
    if taus is None:
        return "not measured"
    return ", ".join(f"{tau:.3f} at k = {k}" for k, tau in taus.items())


def _drafts(about: dict[str, Any]) -> str:
    """Which of the two taus the command yields: a paragraph, or nothing where they are one."""
    sampler, server = about["sampler"], about["server"]
    temperature = sampler.get("temperature", 0.0)
    if temperature == 0 or "tau" not in about["measured"]:
        return ""
    name = f"{server['name']} {server['version']}"
    if about["serving"]["drafts"] == "greedy":
        which = f"the second tau: by it {name} drafts greedily, at any temperature"
    else:
        which = f"the first tau: by it {name} draws drafts from q, accepted with chance min(1, p/q)"
        cut = sampler.get("top_k", 0) > 0 or sampler.get("top_p", 1.0) < 1
        if cut and not export.server(server["name"]).cuts:
            which += " (q without top-k and top-p, which it leaves out: not exactly that tau)"
    return f"At temperature {temperature:g} the command below yields {which}.\n\n"
