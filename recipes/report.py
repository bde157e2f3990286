"""draftsmith report RUN: every checkpoint replayed, the best one decoded, all of it as one page.

runs/heldout/TARGET-T..-HASH/   the target's answers to the held-out prompts, one folder for
                                each sampler, shared by the runs of this folder
RUN/report/checkpoint-N.json    replay of one checkpoint; made once
RUN/report/decode-T...json      decoding and costs of the best one; made once
RUN/report/report.{json,md,html}
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import replay, replay_report
from draftsmith.eval.evaluate import count_parameters, evaluate, read_decoded
from draftsmith.eval.report import report as pages
from draftsmith.eval.report.provenance import provenance
from draftsmith.eval.report.report import sample_text
from draftsmith.eval.speed import speed_model
from draftsmith.eval.speed.speed_model import Costs
from draftsmith.recipes.options import Prompts, Seed, judge
from draftsmith.recipes.shared import digest, once, read_run, samples_of, take_prompts
from draftsmith.train import journal
from draftsmith.train.progress import CountLine
from draftsmith.train.samples.heldout import HeldOut, also_trained_on, answered, slug

commands = typer.Typer()

FOLDER = "report"


@commands.command(
    "report", epilog="Example: draftsmith report runs/smol-eagle3 --limit 32 --max-new-tokens 128"
)
@dataclass(frozen=True)
class Report:
    """Replays every checkpoint of a run, decodes the best one, writes RUN/report."""

    run: Annotated[Path, typer.Argument(help="A run's folder, as `draftsmith train` made it.")]
    target: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 16
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128
    k: Annotated[int | None, typer.Option(min=1, help="Longest draft; default: the run's.")] = None
    seed: Seed = 0

    def __call__(self) -> None:
        """Makes the report and prints whether drafting pays."""
        found = report(self)
        for name, timed in found["speed"].items():
            print(f"{name}: {timed['verdict']}")
        print(f"written: {self.run / FOLDER}/report.html, report.md, report.json")
        judge(all(decoded["parity"]["holds"] for decoded in found["decode"].values()))


def report(settings: Report) -> dict[str, Any]:
    """Makes RUN/report and returns report.json's content.

    Decoding takes many times what replay does on the same prompts, hence fewer of them. Raises
    UserError: no run there, one that is still being trained, or its target is gone.
    """
    run = settings.run
    recipe, steps = read_run(run)
    samplers = {pages.label(s): s for s in (Sampler(0.0), Sampler(1.0), recipe.sampler)}
    prompts = take_prompts(settings.prompts, settings.limit)
    configs = {step: storage.read_config(run / f"checkpoint-{step}") for step in steps}
    weights = {step: digest(run / f"checkpoint-{step}" / "model.safetensors") for step in steps}
    (run / FOLDER).mkdir(exist_ok=True)

    target = _target(run / f"checkpoint-{steps[-1]}", settings.target or recipe.target)
    for step in steps:
        storage.check_target(run / f"checkpoint-{step}", configs[step]["target"], target)
    latest = storage.load(run / f"checkpoint-{steps[-1]}", target)
    k = settings.k or min(recipe.k, latest.longest or recipe.k)
    latest.check(Policy(k))
    del latest  # each checkpoint's has its turn
    sets = {
        name: answered(
            run.parent / "heldout", target, prompts, sampler, settings.max_new_tokens, settings.seed
        )
        for name, sampler in samplers.items()
    }
    replays = _replays(run, weights, target, sets, k, settings.seed)
    rows = [
        {"step": step, "tokens_learned": journal.learned(run, step), "replay": replays[step]}
        for step in steps
    ]
    served = pages.label(recipe.sampler)
    best, chosen_by = best_step(run, rows, served)
    place = run / f"checkpoint-{best}"
    drafter = storage.load(place, target)
    decoded = {
        name: _decoded(place, target, drafter, held, k, settings) for name, held in sets.items()
    }
    out = pages.assemble(
        {
            "run": {
                "name": recipe.name,
                "steps": recipe.steps,
                "step": steps[-1],
                "recipe": recipe.flat(),
            },
            "target": target.identity(),
            "drafter": {"family": drafter.family, "parameters": count_parameters(drafter)},
            "heldout": {
                "prompts": len(prompts),
                "max_new_tokens": settings.max_new_tokens,
                "source": Path(settings.prompts).name if settings.prompts else "draftsmith's own",
                "seed": settings.seed,
                "also_trained_on": also_trained_on(samples_of(run, recipe), prompts, target),
                "content_hash": {name: held.content_hash for name, held in sets.items()},
            },
            "k": k,
            "served": served,
            "best": best,
            "best_chosen_by": chosen_by,
            "device": str(target.device),
            "timed_in": speed_model.timed_in(target),
            **provenance(),
        },
        rows,
        {name: found["decode"] for name, found in decoded.items()},
        {name: Costs.from_json(found["costs"]) for name, found in decoded.items()},
        decoded[served]["sample_text"],
    )
    pages.write(out, run / FOLDER)
    return out


# ---------------------------------------------------------------- the run


def best_step(run: Path, rows: Sequence[dict[str, Any]], served: str) -> tuple[int, str]:
    """The step that `best` points at, else the one of the highest tau in rows; and who chose it."""
    link = run / "best"
    name = os.readlink(link) if link.is_symlink() else ""
    for row in rows:
        if name == f"checkpoint-{row['step']}":
            return row["step"], "training"
    return max(rows, key=lambda r: (r["replay"][served]["tau"], -r["step"]))["step"], "this report"


def _target(place: Path, spec: str) -> Target:
    try:
        return Target.load(spec, dtype=torch.float32)  # parity is defined in fp32
    except UserError as error:
        raise UserError(
            f"{place}: its target cannot be loaded ({error}), or name --target"
        ) from None


# ---------------------------------------------------------------- replay, decode


def _replays(
    run: Path, weights: dict[int, str], target: Target, sets: dict[str, HeldOut], k: int, seed: int
) -> dict[int, dict[str, Any]]:
    """replay.replay_report by label, of every step; the target reads the texts once for all."""
    read: dict[str, list[Batch]] = {}

    def make(place: Path) -> dict[str, Any]:
        drafter, found = storage.load(place, target), {}
        for name, held in sets.items():
            if name not in read:
                read[name] = read_decoded(target, drafter, held.texts, held.sampler)
            answers = [text.tokens for text in held.texts]
            by_k = replay(drafter, read[name], k, seed)
            found[name] = replay_report(by_k, held.domains, answers, seed)
        return found

    out = {}
    line = CountLine("replay", len(weights))
    for step, found in weights.items():
        place = run / f"checkpoint-{step}"
        key = {
            "weights": found,
            "heldout": {name: held.content_hash for name, held in sets.items()},
            "revision": target.identity()["revision"],
            "k": k,
            "seed": seed,
        }
        out[step], made = once(run / FOLDER / f"{place.name}.json", key, partial(make, place))
        line.count(made)
    return out


def _decoded(
    place: Path, target: Target, drafter: Drafter, held: HeldOut, k: int, settings: Report
) -> dict[str, Any]:
    """evaluate's report, costs and one text of the best checkpoint, at one sampler."""
    name = pages.label(held.sampler)
    prompts = [text.prompt for text in held.texts[: settings.decode_limit]]

    def make() -> dict[str, Any]:
        line = CountLine(f"decode {name}", 2 * len(prompts))
        found = evaluate(
            target, drafter, prompts, held.sampler, Policy(k), settings.max_new_tokens,
            seed=settings.seed, progress=line.after_prompt,
        )  # fmt: skip
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        costs = speed_model.measure(target, drafter, range(1, k + 1), middle, held.sampler)
        row = typical(found.decode.by_prompt)
        shown = sample_text(
            target, drafter, prompts[row], held.sampler, k, settings.max_new_tokens,
            row=row, seed=settings.seed,
        )  # fmt: skip
        return {"decode": found.report(), "costs": asdict(costs), "sample_text": shown}

    key = {
        "weights": digest(place / "model.safetensors"),
        "heldout": held.content_hash,
        "revision": target.identity()["revision"],
        "device": str(target.device),
        "prompts": len(prompts),
        "k": k,
        "seed": settings.seed,
        "timed": "in turns",
    }
    return once(place.parent / FOLDER / f"decode-{slug(name)}.json", key, make)[0]


def typical(by_prompt: Sequence[dict[str, int]]) -> int:
    """The prompt of median tokens per pass: neither the most flattering text nor the worst.

    The first where none took a verify pass.
    """
    worked = [i for i, text in enumerate(by_prompt) if text["passes"]]
    order = sorted(worked, key=lambda i: (by_prompt[i]["tokens"] - 1) / by_prompt[i]["passes"])
    return order[len(order) // 2] if order else 0
