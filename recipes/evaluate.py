"""draftsmith eval CHECKPOINT: one drafter decoded, replayed, timed; a table, and report.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from draftsmith.drafters import foreign
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.passes import layers
from draftsmith.drafters.policy import Policy, Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.parity import Parity
from draftsmith.eval.acceptance.static_tree import Calibrated, calibrate
from draftsmith.eval.evaluate import Evaluation
from draftsmith.eval.evaluate import evaluate as measure
from draftsmith.eval.report.report import adapted, interval
from draftsmith.recipes.options import (
    Compile,
    OwnTarget,
    Prompts,
    Seed,
    Temperature,
    TopK,
    TopP,
    judge,
    settle,
)
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
    confidence: Annotated[
        float | None,
        typer.Option(help="End a draft where its predicted survival falls below this (dspark)."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a text.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json.")] = None,
    seed: Seed = 0,
    compiling: Compile = "auto",
) -> None:
    """Decodes prompts with a drafter: acceptance by replay and decode, parity, speed."""
    sampler = Sampler(temperature, top_k, top_p)
    if tree is None and static:
        raise UserError("--static: gives a tree its shape; say how many tokens: --tree 16")
    if tree is not None and block:
        raise UserError("--block: judges chains; leave --tree out")
    if tree is not None and confidence is not None:
        raise UserError("--confidence: cuts chains; leave --tree out")
    policy = Policy(k, block, confidence) if tree is None else Tree(k, budget=tree, branch=branch)
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
    settle(compiling, loaded, 2 * len(ids) * max_new_tokens)
    shape = None
    if recipe is not None:
        shape = _calibrated(run, recipe, loaded, drafter, policy)
        print(_said(shape, recipe))
    found = measure(
        loaded, drafter, ids, sampler, shape.tree if shape else policy, max_new_tokens, seed=seed,
        stop=stop or [], domains=[p.domain for p in chosen],
        progress=CountLine("decode", 2 * len(ids)).after_prompt,
    )  # fmt: skip
    _show(found)
    report = found.report() | {"settings": record, "compiled": layers.chosen()}
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


# ---------------------------------------------------------------- on the terminal


def _show(found: Evaluation) -> None:
    """Prints an evaluation: tables, speeds, and whether parity holds."""
    console = Console()
    decode = found.decode
    title = (
        f"{found.family} ({found.parameters:,} parameters) for {found.target['spec']}, "
        f"temperature {found.sampler.temperature}, {found.policy}, {found.prompts} prompts, "
        f"{decode.tokens} tokens"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "replay", "decode", "z"):
        table.add_column(name, justify="left" if not name else "right")
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)
    if said := adapted(found.target):
        console.print(said)
    _print_domains(found, console)
    if found.replay and found.replay.tau_by_k:
        by_k = "  ".join(f"{k}: {_number(tau)}" for k, tau in found.replay.tau_by_k.items())
        console.print(f"tau by k (replay)  {by_k}")
    steady = decode.clock
    mark = " (busy)" if steady.busy else ""
    console.print(
        f"speed in {found.dtype}  {_number(decode.tokens_per_s, 2)} tokens/s against "
        f"{_number(decode.baseline_tokens_per_s, 2)}: {_number(decode.speedup, 2)}x "
        f"measured{mark}, {_number(found.predicted_speedup, 2)}x predicted{mark}; tau must "
        f"reach {_number(found.break_even_tau, 2)} to break even{mark}; a round is "
        f"{decode.draft_ms:.1f} ms draft, {decode.verify_ms:.1f} ms verify, "
        f"{decode.host_ms:.1f} ms host; a baseline step {decode.baseline_step_ms:.1f} ms, its "
        f"spread over {steady.turns} turns {_number(steady.baseline_spread, 2)}"
    )
    if steady.note:
        console.print(steady.note)
    if found.parity:
        _print_parity(found.parity, console)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rows(found: Evaluation) -> Iterator[tuple[str, str, str, str]]:
    """tau, verify passes and alpha per depth: by replay, as counted, and the z of the difference.

    Drawn trees have no replay.
    """
    decode, replay, parity = found.decode, found.replay, found.parity
    depths = range(found.policy.k)
    pooled = replay.pooled if replay else None
    low, high = (pooled and pooled.tau_ci) or (None, None)
    tau = _number(pooled.tau if pooled else None)
    yield "tau", f"{tau} [{_number(low)}, {_number(high)}]", _number(decode.tau), ""
    expected = _number(parity.expected[0], 2) if parity else "-"
    zs = parity.z if parity else [None] * (1 + len(depths))
    yield "verify passes", expected, str(decode.passes), _number(zs[0], 2)
    for j in depths:
        alpha = _number(pooled.alpha[j] if pooled else None)
        yield f"alpha_{j}", alpha, _number(decode.alpha[j]), _number(zs[j + 1], 2)


def _print_parity(parity: Parity, console: Console) -> None:
    if parity.z_local is not None:
        console.print(f"z over single tries  {parity.z_local:.2f}")
    verdict = "holds" if parity.holds else "BROKEN"
    how = "integers equal" if parity.deterministic else "|z| < 3.5"
    console.print(f"parity {verdict} ({how}); {len(parity.ties)} fp32 ties")
    for split in parity.ties + parity.splits:
        console.print(f"  prompt {split.prompt}: split at anchor {split.anchor}, depth "
                      f"{split.depth}, top-2 gap {split.gap:.2g}")  # fmt: skip


def _print_domains(found: Evaluation, console: Console) -> None:
    """tau and alpha_0 by category of the prompts, texts that repeat themselves apart."""
    rows = dict(found.by_domain or {})
    if found.repetitive and found.repetitive["apart"].texts:
        rows["(repetitive texts)"] = found.repetitive["apart"]
        rows["(all others)"] = found.repetitive["others"]
    if len(rows) < 2:
        return
    table = Table()
    for name in ("replay by domain", "texts", "tau", "alpha_0"):
        table.add_column(name, justify="left" if name == "replay by domain" else "right")
    for name, row in rows.items():
        ends = f" {interval(row.tau_ci, 3)}" if row.tau_ci else ""
        table.add_row(name, str(row.texts), f"{_number(row.tau)}{ends}", _number(row.alpha[0]))
    console.print(table)
