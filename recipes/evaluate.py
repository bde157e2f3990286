"""draftsmith eval CHECKPOINT: one drafter decoded, replayed, timed; a table, and report.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from draftsmith.drafters import foreign
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import Policy, Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.static_tree import Calibrated, calibrate
from draftsmith.eval.evaluate import evaluate as measure
from draftsmith.eval.evaluation_table import show
from draftsmith.recipes.options import OwnTarget, Prompts, Seed, Temperature, TopK, TopP, judge
from draftsmith.recipes.shared import (
    check_room,
    make_folder,
    ngram,
    read_run,
    samples_of,
    take_prompts,
)
from draftsmith.train import disk
from draftsmith.train.data.chat_template import encode
from draftsmith.train.progress import CountLine
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples.packing import alone, collate
from draftsmith.train.samples.samples import Samples

commands = typer.Typer()

READ = 4  # conversations read at a time


@commands.command(
    "eval", epilog="Example: draftsmith eval runs/smol-eagle3/best --k 4 --output reports/eagle3"
)
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder, an exported or published drafter, or ngram.")
    ],
    target: OwnTarget = None,
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 16,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    k: Annotated[int, typer.Option(help="Draft length; of a tree its depth.")] = 4,
    tree: Annotated[
        int | None, typer.Option(help="Draft a dynamic tree of at most this many tokens.")
    ] = None,
    branch: Annotated[int, typer.Option(help="With --tree: nodes expanded at each depth.")] = 10,
    static: Annotated[
        bool,
        typer.Option("--static", help="With --tree: one shape, the best on the run's held-out."),
    ] = False,
    block: Annotated[
        bool, typer.Option("--block", help="Judge sampled chains by block verification.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a text.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json.")] = None,
    seed: Seed = 0,
) -> None:
    """Decodes prompts with a drafter: acceptance by replay and decode, parity, speed."""
    sampler = Sampler(temperature, top_k, top_p)
    if tree is None and static:
        raise UserError("--static: gives a tree its shape; say how many tokens: --tree 16")
    if tree is not None and block:
        raise UserError("--block: judges chains; leave --tree out")
    policy = Policy(k, block) if tree is None else Tree(k, budget=tree, branch=branch)
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: {max_new_tokens} leaves nothing to write; use >= 1")
    chosen = take_prompts(prompts, limit)
    folder, untrained = Path(checkpoint), checkpoint == "ngram"
    spec = target or ("smollm2" if untrained else foreign.made_for(folder))
    if spec is None:
        raise UserError(f"{folder}: names no target that it was made for; give --target")
    if static and untrained:
        raise UserError("--static: ngram drafts chains only; give a checkpoint")
    run = folder.resolve().parent
    recipe = read_run(run)[0] if static else None
    record: dict[str, Any] = {
        "checkpoint": checkpoint,
        "target": spec,
        "sampler": vars(sampler),
        "policy": str(policy),
        "max_new_tokens": max_new_tokens,
        "stop": stop or [],
        "seed": seed,
        "prompts_hash": hashlib.sha256(" ".join(p.key for p in chosen).encode()).hexdigest()[:16],
    }
    if static:
        record["static"] = True
    if output is not None:
        _claim(output, record)
    loaded = Target.load(spec, dtype=torch.float32)  # parity is defined in fp32
    drafter = ngram(loaded) if untrained else foreign.load(folder, loaded)
    drafter.check(policy)
    ids = encode(chosen, loaded)
    check_room(max(map(len, ids)), max_new_tokens, loaded)
    shape = None
    if recipe is not None:
        shape = _calibrated(run, recipe, loaded, drafter, policy)
        print(_said(shape, recipe))
    found = measure(
        loaded, drafter, ids, sampler, shape.tree if shape else policy, max_new_tokens, seed=seed,
        stop=stop or [], domains=[p.domain for p in chosen],
        progress=CountLine("decode", 2 * len(ids)).after_prompt,
    )  # fmt: skip
    show(found)
    report = found.report() | {"settings": record}
    if shape is not None:
        report["tree"] = {
            "paths": shape.tree.paths,
            "expected_tau": shape.expected_tau,
            "walked_tau": shape.tau,
            "hit_rates": shape.rates.tolist(),
        }
    if output is not None:
        disk.write(output / "report.json", json.dumps(report, indent=1) + "\n")
        print(f"written: {output / 'report.json'}")
    judge(found.parity is None or found.parity.holds)


def _claim(output: Path, settings: dict[str, Any]) -> None:
    """Makes the report's folder. Raises UserError if it holds another run, or is unwritable."""
    path = output / "report.json"
    if path.is_file():
        try:
            before = json.loads(path.read_text()).get("settings")
        except (json.JSONDecodeError, AttributeError):
            before = None
        if before != settings:
            raise UserError(f"{output}: holds the report of another run; give another --output")
        return
    make_folder(output)
    scratch = {".report.json"}  # left by a run that was killed
    if {file.name for file in output.iterdir()} - scratch:
        raise UserError(f"{output}: not empty, and no report of ours; give another --output")


def _calibrated(
    run: Path, recipe: Recipe, target: Target, drafter: Drafter, policy: Policy
) -> Calibrated:
    """The best static tree of the policy's depth and nodes. Raises UserError as samples do."""
    samples = Samples.open(samples_of(run, recipe), target, audit=0)
    _, heldout = samples.split(recipe.heldout, recipe.seed)
    batches = []
    for rows in alone(samples, heldout, READ):
        batch = collate(samples, rows, target.max_positions).to(target.device)
        batches.append(target.read(batch, drafter.taps))
    return calibrate(drafter, batches, policy.k, policy.nodes - 1)


def _said(found: Calibrated, recipe: Recipe) -> str:
    """The tree in two lines: what it promises, and its paths as ranks from the root on."""
    paths = "  ".join(".".join(map(str, path)) for path in found.tree.paths)
    return (
        f"{found.tree}, chosen on {recipe.heldout} held-out conversations at {recipe.sampler}: "
        f"tau {found.expected_tau:.3f} by the ranks' hit rates, {found.tau:.3f} walked\n"
        f"its paths  {paths}"
    )
