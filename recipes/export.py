"""draftsmith export CHECKPOINT --to SERVER: a folder that the server loads, read back, with a card.

It is written beside its place and renamed, so that an export which fails or is killed leaves no
folder of its name. The card (card.json for programs, README.md for people) names the target, the
drafter, the command to serve it and what was checked; its figures are the run's own, from its log
and its report, else "not measured".
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from safetensors import SafetensorError

from draftsmith.drafters import export, storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError, cannot_write
from draftsmith.drafters.export import Serving
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import gguf_file
from draftsmith.drafters.target.target import Target
from draftsmith.eval.evaluate import count_parameters
from draftsmith.eval.report import report as pages
from draftsmith.eval.report.provenance import provenance
from draftsmith.recipes.options import OwnTarget
from draftsmith.recipes.read_back import ReadBack, read_back
from draftsmith.train import journal

commands = typer.Typer()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
K = 3  # of a drafter without a run


@commands.command(
    "export",
    epilog="Example: draftsmith export runs/smol-eagle3/best --to vllm --output exports/smol-vllm; "
    "for llama.cpp: draftsmith export runs/smol-eagle3/best --to llama.cpp",
)
@dataclass(frozen=True)
class Export:
    """Writes a drafter as a server loads it, reads it back, prints how to serve it."""

    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")]
    to: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm, llama.cpp or transformers.")]
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; default: exports/RUN-SERVER.")
    ] = None
    target: OwnTarget = None
    k: Annotated[int | None, typer.Option(min=1, help="Draft length; default: the run's.")] = None
    length: Annotated[
        int | None, typer.Option(help="Longest text to serve; default: the target's positions.")
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    target_gguf: Annotated[
        Path | None, typer.Option(help="llama.cpp: the target's GGUF, whose tokenizer is copied.")
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain", help="vllm: EAGLE-3 in its original layout.")
    ] = False

    def __call__(self) -> None:
        """Writes the export and prints how to serve it."""
        folder, command = export_checkpoint(self)
        print(f"written and read back: {folder} (card: README.md, card.json)")
        print(f"serve it with:\n{command}")


def export_checkpoint(asked: Export) -> tuple[Path, str]:
    """Writes the export; returns its folder and the command to serve it.

    k's default is the run's, length's the target's; a target that is a GGUF file is its own
    target_gguf. Raises UserError, before the target is loaded where that is known by then.
    """
    place, config = _checkpoint(asked.checkpoint)
    if asked.dtype not in DTYPES:
        raise UserError(f"--dtype: no {asked.dtype!r}; known are {', '.join(DTYPES)}")
    if asked.plain and (asked.to, config["family"]) != ("vllm", "eagle"):
        raise UserError("--plain: is a layout of EAGLE-3 for vllm; leave it out")
    k = asked.k or _recipe(place).get("k", K)
    export.check_family(asked.to, config["family"], k)
    folder = asked.output or Path("exports") / f"{_name(place)}-{asked.to}"
    if folder.exists():
        raise UserError(f"{folder}: is there already; give another --output, or remove it")
    spec = asked.target or config["target"]["spec"]
    target = Target.load(spec, dtype=torch.float32)  # weights are stored in fp32
    drafter = storage.load(place, target)
    serving = Serving(
        target.source.path,
        k,
        asked.length or target.max_positions,
        DTYPES[asked.dtype],
        asked.target_gguf or gguf_file(spec),
        asked.plain,
        _sampler(place),
    )
    export.check(asked.to, drafter, serving)
    scratch = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # of an export that was killed
        scratch.mkdir(parents=True)
        export.write(asked.to, drafter, scratch, serving)
        found = read_back(target, drafter, scratch, serving)
        card = make_card(asked.to, drafter, place, folder, serving, found)
        write_card(scratch, card)
        os.replace(scratch, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error, "make room, or give another --output") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder, card["serving"]["command"]


def _checkpoint(place: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint's folder and config. Raises UserError for a run's folder, or half of one."""
    if (place / "recipe.yaml").is_file():
        raise UserError(f"{place}: is a run; give one of its checkpoints, e.g. {place / 'best'}")
    config = storage.read_config(place)
    unfinished = place.resolve().name.startswith(".writing")
    if unfinished or not (place / "model.safetensors").is_file():
        raise UserError(f"{place}: is no finished checkpoint; give one that is, e.g. RUN/best")
    return place, config


def _recipe(place: Path) -> dict[str, Any]:
    path = place.resolve().parent / "recipe.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else {}


def _sampler(place: Path) -> Sampler | None:
    """The sampler that the run's drafter was trained for; None without a run."""
    recipe = _recipe(place)
    if "temperature" not in recipe:
        return None
    return Sampler(recipe["temperature"], recipe.get("top_k", 0), recipe.get("top_p", 1.0))


def _name(place: Path) -> str:
    """The run's name, else the folder's own."""
    real = place.resolve()
    return real.parent.name if (real.parent / "recipe.yaml").is_file() else real.name


# ---------------------------------------------------------------- the card


def make_card(
    name: str, drafter: Drafter, place: Path, folder: Path, serving: Serving, found: ReadBack
) -> dict[str, Any]:
    """card.json. place: the checkpoint; folder: the export's, once renamed."""
    chosen, recipe = export.server(name), _recipe(place)
    return {
        "format": 1,
        "server": {"name": name, "version": chosen.version},
        "target": drafter.target.identity(),
        "drafter": {
            "family": drafter.family,
            "parameters": count_parameters(drafter),
            "config": drafter.config.stored(),
            "checkpoint": str(place),
        },
        "sampler": {key: recipe[key] for key in ("temperature", "top_k", "top_p") if key in recipe},
        "measured": _measured(place.resolve().parent, place.resolve().name),
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
            "read_back": vars(found),
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
            found |= {key: line[key] for key in keys if key in line}  # older runs lack the last
    path = run / "report" / "report.json"
    if path.is_file():
        report = json.loads(path.read_text())
        if report.get("best") == int(step):
            found["speedup"] = {
                label: {key: speed[key] for key in ("best_k", "predicted_speedup")}
                for label, speed in report["speed"].items()
                if not speed.get("clock", {}).get("busy")  # older reports have no clock
            }
    return found


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """card.json, and the same as README.md."""
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "README.md").write_text(_page(card))


def _page(card: dict[str, Any]) -> str:
    target, drafter, serving = card["target"], card["drafter"], card["serving"]
    checked, name = card["verified"], card["server"]["name"]
    back, sampler = checked["read_back"], card["sampler"]
    served = ", ".join(f"{key} {value}" for key, value in sampler.items()) or "not known"
    adapted = f"{said}\n\n" if (said := pages.adapted(target)) else ""
    return f"""# {drafter["family"]} drafter for {target["spec"]}, as {name} loads it

{adapted}| | |
|---|---|
| target | {target["spec"]}, revision {target["revision"]} |
| tokenizer | sha256 {target["tokenizer_hash"]} |
| drafter | {drafter["family"]}, {drafter["parameters"]:,} parameters, {serving["dtype"]} |
| trained for | {served} |
{_figures(card["measured"], sampler.get("temperature", 0.0))}
{_drafts(card)}Serve it with {name} {card["server"]["version"]}:

    {serving["command"]}

What was checked:

- Read back: draft logits of these files differ by at most {back["difference"]:.2g} from the
  checkpoint's (their standard deviation is {back["spread"]:.3g}; {back["rows"]} rows of real text).
- {name} {card["server"]["version"]}: {checked["layout"]}.
- Served: {checked["served"]}.

Made by draftsmith; card.json holds the same for programs.
"""


def _figures(measured: dict[str, Any], temperature: float) -> str:
    """Rows of the table; tau counts the bonus token. At temperature 0 both drafts are one."""
    if not measured:
        return "| acceptance | not measured |\n| predicted speedup | not measured |\n"
    tokens = measured.get("tokens_trained")  # only the run's log holds it
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


def _drafts(card: dict[str, Any]) -> str:
    """Which of the two taus the command yields: a paragraph, or nothing where they are one."""
    sampler, server = card["sampler"], card["server"]
    temperature = sampler.get("temperature", 0.0)
    if temperature == 0 or "tau" not in card["measured"]:
        return ""
    name = f"{server['name']} {server['version']}"
    if card["serving"]["drafts"] == "greedy":
        which = f"the second tau: by it {name} drafts greedily, at any temperature"
    else:
        which = f"the first tau: by it {name} draws drafts from q, accepted with chance min(1, p/q)"
        cut = sampler.get("top_k", 0) > 0 or sampler.get("top_p", 1.0) < 1
        if cut and not export.server(server["name"]).cuts:
            which += " (q without top-k and top-p, which it leaves out: not exactly that tau)"
    return f"At temperature {temperature:g} the command below yields {which}.\n\n"
