"""draftsmith compare RUN RUN ..: drafters of one target in one table, on one page.

OUTPUT/heldout/..          the target's answers to the held-out prompts, one folder a sampler
OUTPUT/NAME.json           replay, diagnosis, costs and decoding of one drafter; made once
OUTPUT/compare.{json,md,html}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.intervals import expected_tau
from draftsmith.eval.acceptance.recall import diagnose
from draftsmith.eval.acceptance.replay import replay, replay_report
from draftsmith.eval.evaluate import count_parameters, evaluate, read_decoded
from draftsmith.eval.report.provenance import provenance
from draftsmith.eval.report.report import drafting_of, label
from draftsmith.eval.speed import speed_model
from draftsmith.eval.speed.clocks import Steadiness, spread, worst
from draftsmith.recipes import compare_page
from draftsmith.recipes.options import Compile, Prompts, Seed, judge, settle
from draftsmith.recipes.shared import digest, make_folder, ngram, once, read_run, take_prompts
from draftsmith.train import journal
from draftsmith.train.progress import CountLine
from draftsmith.train.samples.heldout import HeldOut, answered

commands = typer.Typer()

SAMPLERS = (Sampler(0.0), Sampler(1.0))
DECODED = ("tau", "tokens", "passes", "speedup", "tokens_per_s", "baseline_tokens_per_s")


@commands.command(
    "compare", epilog="Example: draftsmith compare runs/smol-eagle3 runs/smol-small ngram"
)
@dataclass(frozen=True)
class Compare:
    """Compares drafters of one target: acceptance, cost, speed, what each one lacks."""

    drafters: Annotated[list[str], typer.Argument(help="Runs' folders, checkpoints, or ngram.")]
    target: Annotated[str | None, typer.Option(help="Default: the drafters' own.")] = None
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 8
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96
    k: Annotated[int, typer.Option(min=1, help="Longest draft.")] = 4
    output: Annotated[Path, typer.Option(help="Folder for the comparison.")] = Path("compare")
    seed: Seed = 0
    compiling: Compile = "auto"

    def __call__(self) -> None:
        """Makes the comparison and prints its tables."""
        found = compare(self)
        compare_page.show(found)
        print(f"written: {self.output}/compare.html, compare.md, compare.json")
        judge(not compare_page.broken(found))


@dataclass(frozen=True)
class Entry:
    """One drafter to compare. place: its checkpoint, None for n-gram; run: where it was trained."""

    name: str
    place: Path | None
    run: Path | None


def compare(
    settings: Compare,
    target: Target | None = None,
    samplers: Sequence[Sampler] = SAMPLERS,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Writes the comparison and returns compare.json's content.

    target: the settings' own where the caller has it loaded; notes: printed on top of the page.
    Raises UserError before anything is loaded: no drafter there, one made for another target.
    """
    entries = [_entry(text) for text in settings.drafters]
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name}: given twice; give each drafter once, in folders of own names")
    configs = {e.name: storage.read_config(e.place) for e in entries if e.place}
    spec = settings.target or next((c["target"]["spec"] for c in configs.values()), "smollm2")
    prompts, output = take_prompts(settings.prompts, settings.limit), settings.output
    make_folder(output)
    target = target or Target.load(spec, dtype=torch.float32)  # parity is defined in fp32
    for entry in entries:
        if entry.place:
            storage.check_target(entry.place, configs[entry.name]["target"], target)
    texts = 2 * len(entries) * settings.decode_limit
    settle(settings.compiling, target, texts * settings.max_new_tokens)
    sets = {
        label(sampler): answered(
            output / "heldout", target, prompts, sampler, settings.max_new_tokens, settings.seed
        )
        for sampler in samplers
    }
    decides = asdict(settings)
    del decides["drafters"], decides["output"]
    line = CountLine("compare", len(entries))
    found = {}
    for entry in entries:
        key = {
            "weights": digest(entry.place / "model.safetensors") if entry.place else "ngram",
            "heldout": {name: held.content_hash for name, held in sets.items()},
            "revision": target.identity()["revision"],
            "device": str(target.device),
            **decides,
        }
        found[entry.name], made = once(
            output / f"{entry.name}.json",
            key,
            lambda e=entry: _measured(e, target, sets, settings),  # type: ignore[misc]
        )
        line.count(made)
    out = {
        "notes": list(notes),
        "baselines": {name: _baselines(found, name) for name in sets},
        "target": target.identity(),
        "k": settings.k,
        "prompts": len(prompts),
        "max_new_tokens": settings.max_new_tokens,
        "decoded_prompts": min(settings.decode_limit, len(prompts)),
        "timed_in": speed_model.timed_in(target),
        "drafters": found,
        **provenance(),
    }
    compare_page.write(out, output)
    return out


def _baselines(found: Mapping[str, Any], sampler: str) -> dict[str, Any]:
    """The loop without drafting, timed beside each drafter: whether it was one and the same.

    JSON of a Steadiness whose turns are drafters; of one drafter alone there is nothing to compare.
    """
    speeds = [d["at"][sampler]["decode"]["baseline_tokens_per_s"] for d in found.values()]
    known = [(1 / tokens, 1.0) for tokens in speeds if tokens]
    return Steadiness(len(known), spread(known) if len(known) > 1 else 0.0).report()


def _entry(text: str) -> Entry:
    """A run's folder (its best checkpoint), a checkpoint's, or ngram."""
    if text == "ngram":
        return Entry("ngram", None, None)
    place = Path(text)
    if (place / "recipe.yaml").is_file():
        best, last = place / "best", place / f"checkpoint-{read_run(place)[1][-1]}"
        return Entry(place.name, best if best.exists() else last, place)
    run = place.parent if (place.parent / "recipe.yaml").is_file() else None
    name = f"{run.name}-{place.resolve().name}" if run else place.name
    return Entry(name, place, run)


def _measured(
    entry: Entry, target: Target, sets: dict[str, HeldOut], settings: Compare
) -> dict[str, Any]:
    drafter = storage.load(entry.place, target) if entry.place else ngram(target)
    k = min(settings.k, drafter.longest or settings.k)
    return {
        "family": drafter.family,
        "parameters": count_parameters(drafter),
        "tokens_learned": _learned(entry),
        "k": k,
        "curve": _curve(entry),
        "at": {n: _at_sampler(entry, drafter, target, h, k, settings) for n, h in sets.items()},
    }


def _at_sampler(
    entry: Entry, drafter: Drafter, target: Target, held: HeldOut, k: int, settings: Compare
) -> dict[str, Any]:
    """Acceptance, diagnosis and speed at one sampler."""
    read: list[Batch] = read_decoded(target, drafter, held.texts, held.sampler)
    answers = [text.tokens for text in held.texts]
    by_k = replay(drafter, read, k, settings.seed)
    accepted = replay_report(by_k, held.domains, answers)
    prompts = [text.prompt for text in held.texts[: settings.decode_limit]]
    middle = sorted(prompts, key=len)[len(prompts) // 2]
    costs = speed_model.measure(target, drafter, range(1, k + 1), middle, held.sampler)
    drafting = drafting_of(accepted, count_parameters(drafter), _learned(entry))
    best = speed_model.best_k(costs, drafting.tau_by_k)
    # Few texts may lie far from the mean of all: a prediction is compared with its own.
    tau = expected_tau([part for part in by_k[best].parts if part.prompt < len(prompts)])
    line = CountLine(f"{entry.name} at {label(held.sampler)}: prompts decoded", 2 * len(prompts))
    decoded = evaluate(
        target, drafter, prompts, held.sampler, Policy(best), settings.max_new_tokens,
        seed=settings.seed, progress=line.after_prompt,
    )  # fmt: skip
    steady = worst(costs.clock, decoded.decode.clock)
    return {
        "replay": accepted,
        "diagnosis": diagnose(drafter, read, k, settings.seed),
        "best_k": best,
        "predicted_speedup": None if tau is None else speed_model.speedup(costs, tau, best),
        "break_even_tau": speed_model.break_even(costs, best),
        "verdict": speed_model.verdict(replace(costs, clock=steady), drafting),
        "clock": steady.report(),
        "costs_ms": costs.milliseconds(),
        "draft_share": costs.draft[best] / costs.round(best),
        "decode": {part: getattr(decoded.decode, part) for part in DECODED},
        "parity": decoded.parity and decoded.parity.report(),
    }


def _learned(entry: Entry) -> int | None:
    """Target-made tokens that the drafter had learned from, where it is a run's."""
    if entry.run is None or entry.place is None:
        return None
    step = entry.place.resolve().name.removeprefix("checkpoint-")
    return journal.learned(entry.run, int(step)) if step.isdigit() else None  # a copy, renamed


def _curve(entry: Entry) -> dict[str, Any] | None:
    """tau = a + b log2(tokens) through a run's own replays; None for fewer than three.

    Its slope is the gain per doubling of data, and so gives the tokens for a tau 10% higher. An
    extrapolation: it holds for the next doubling or two, with the same recipe.
    """
    if entry.run is None:
        return None
    points = [
        (m["tokens"], m["tau"])
        for m in journal.read_metrics(entry.run)
        if m["kind"] == "replay" and m.get("tokens") and not m.get("biased")
    ]
    if len(points) < 3:
        return None
    tokens, tau = np.array(points, dtype=float).T
    slope, _ = np.polyfit(np.log2(tokens), tau, 1)
    doublings = 0.1 * tau[-1] / slope if slope > 0 else math.inf
    # Ten doublings away the line predicts nothing.
    wanted = int(tokens[-1] * 2**doublings) if doublings < 10 else None
    return {"points": points, "per_doubling": float(slope), "tokens_for_10_percent": wanted}
