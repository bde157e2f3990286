"""draftsmith eval CHECKPOINT: one drafter decoded, replayed, timed; a table, and report.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftsmith.drafters import foreign
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import Policy, Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.evaluate import Evaluation
from draftsmith.eval.evaluate import evaluate as measure
from draftsmith.eval.parity import Parity
from draftsmith.eval.report import adapted, interval
from draftsmith.eval.static_tree import Calibrated
from draftsmith.recipes.static import calibrated, run_of, told
from draftsmith.recipes.subjects import asked, check_room, make_folder, ngram
from draftsmith.train import checkpoint
from draftsmith.train.template import encode


@dataclass(frozen=True)
class Settings:
    """What decides the figures. checkpoint: a folder of ours or of a format that `foreign` reads,
    or ngram. target None: the drafter's own.

    static: a tree of one shape, of the policy's depth and nodes, takes the policy's place.
    """

    checkpoint: str
    target: str | None
    prompts: str | None
    limit: int
    sampler: Sampler
    policy: Policy
    max_new_tokens: int
    stop: list[str]
    seed: int
    static: bool = False


def policy(k: int, tree: int | None, branch: int, block: bool, static: bool = False) -> Policy:
    """The policy that the command line names. Raises UserError for one that makes no sense."""
    if tree is None:
        if static:
            raise UserError("--static: gives a tree its shape; say how many tokens: --tree 16")
        return Policy(k, block)
    if block:
        raise UserError("--block: judges chains; leave --tree out")
    return Tree(k, budget=tree, branch=branch)


def evaluate(settings: Settings, output: Path | None) -> bool:
    """Prints the report and writes it into `output`; whether parity holds.

    Raises UserError before any model is loaded where that can be told.
    """
    if settings.max_new_tokens < 1:
        raise UserError(
            f"--max-new-tokens: {settings.max_new_tokens} leaves nothing to write; use >= 1"
        )
    prompts = asked(settings.prompts, settings.limit)
    folder = Path(settings.checkpoint)
    untrained = settings.checkpoint == "ngram"
    spec = settings.target or ("smollm2" if untrained else foreign.made_for(folder))
    if spec is None:
        raise UserError(f"{folder}: names no target that it was made for; give --target")
    if settings.static and untrained:
        raise UserError("--static: ngram drafts chains only; give a checkpoint")
    run = run_of(folder) if settings.static else None
    record: dict[str, Any] = {
        "checkpoint": settings.checkpoint,
        "target": spec,
        "sampler": vars(settings.sampler),
        "policy": str(settings.policy),
        "max_new_tokens": settings.max_new_tokens,
        "stop": settings.stop,
        "seed": settings.seed,
        "prompts_hash": hashlib.sha256(" ".join(p.key for p in prompts).encode()).hexdigest()[:16],
    }
    if settings.static:
        record["static"] = True
    if output is not None:
        _claim(output, record)
    target = Target.load(spec, dtype=torch.float32)  # parity is defined in fp32
    drafter = ngram(target) if untrained else foreign.load(folder, target)
    drafter.check(settings.policy)
    drafting: Policy = settings.policy
    tree: Calibrated | None = None
    ids = encode(prompts, target)
    check_room(max(map(len, ids)), settings.max_new_tokens, target)
    if run is not None:
        tree = calibrated(*run, target, drafter, settings.policy)
        drafting = tree.tree
        print(told(tree, run[1]))
    with _DecodeProgress(len(ids)) as progress:
        found = measure(
            target, drafter, ids, settings.sampler, drafting, settings.max_new_tokens,
            seed=settings.seed, stop=settings.stop, domains=[p.domain for p in prompts],
            progress=progress.update,
        )  # fmt: skip
    _print(found, Console())
    report = found.report() | {"settings": record}
    if tree is not None:
        report["tree"] = {
            "paths": tree.tree.paths,
            "expected_tau": tree.expected_tau,
            "walked_tau": tree.tau,
            "hit_rates": tree.rates.tolist(),
        }
    if output is not None:
        checkpoint.write(output / "report.json", json.dumps(report, indent=1) + "\n")
        print(f"written: {output / 'report.json'}")
    return found.parity is None or found.parity.holds


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


class _DecodeProgress(Progress):
    """Prompts done and new tokens, for the speculative and the baseline pass."""

    def __init__(self, prompts: int) -> None:
        super().__init__(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} prompts, {task.fields[written]} tokens"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.prompts = prompts
        self.ids: dict[str, Any] = {}
        self.written: dict[str, int] = {}

    def update(self, what: str, done: int, new: int) -> None:  # type: ignore[override]
        if what not in self.ids:
            self.ids[what] = self.add_task(what, total=self.prompts, written=0)
            self.written[what] = 0
        self.written[what] += new
        super().update(self.ids[what], completed=done, written=self.written[what])


def _print(found: Evaluation, console: Console) -> None:
    """The evaluation as one table."""
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
    console.print(
        f"speed in {found.dtype}  {_number(decode.tokens_per_s, 2)} tokens/s against "
        f"{_number(decode.baseline_tokens_per_s, 2)}: {_number(decode.speedup, 2)}x measured, "
        f"{_number(found.predicted_speedup, 2)}x predicted; tau must reach "
        f"{_number(found.break_even_tau, 2)} to break even; a round is "
        f"{decode.draft_ms:.1f} ms draft, {decode.verify_ms:.1f} ms verify, "
        f"{decode.host_ms:.1f} ms host; a baseline step {decode.baseline_step_ms:.1f} ms"
    )
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
