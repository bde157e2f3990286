"""`draftsmith bench`: loads what is asked for, refuses what cannot run, times it, prints it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval import bench_table, synthetic
from draftsmith.eval.bench import (
    WARM_UP,
    Asked,
    Cell,
    Store,
    check_memory,
    device_of,
    grid,
    run,
)
from draftsmith.eval.provenance import provenance
from draftsmith.recipes.once import digest
from draftsmith.recipes.subjects import asked, check_room, ngram
from draftsmith.train import checkpoint

_SYNTHETIC_PROMPTS = 8


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `draftsmith bench --help`."""

    target: str
    drafters: Sequence[str]
    ks: Sequence[int]
    budgets: Sequence[int]
    batches: Sequence[int]
    temperatures: Sequence[float]
    max_new_tokens: int
    prompts: str | None
    limit: int
    shape: str | None
    alpha: float
    output: Path
    seed: int

    def policies(self) -> list[Policy]:
        """Chains of every k, and trees of every budget, as deep as the longest k."""
        depth = max(self.ks, default=4)
        trees = [Tree(k=min(depth, budget), budget=budget) for budget in self.budgets]
        return [*map(Policy, self.ks), *trees]


def bench(request: Request) -> None:
    """Runs a request. Raises UserError, before anything is timed."""
    policies = request.policies()
    for option, given in (
        ("--k, --tree", policies),
        ("--batch", request.batches),
        ("--temperature", request.temperatures),
    ):
        if not given:
            raise UserError(f"{option}: nothing is left to time; give at least one number")
    for temperature in request.temperatures:
        Sampler(temperature)
    target, drafters, prompts = _synthetic(request) if request.shape else _real(request)
    cells = grid(drafters, policies, request.batches, request.temperatures)
    longest = max(len(prompt.ids) for prompt in prompts)
    check_room(longest, request.max_new_tokens, target)
    check_memory(target, cells, longest + request.max_new_tokens)
    here = device_of(target) | provenance()
    hashed = hashlib.sha256(json.dumps([prompt.ids for prompt in prompts]).encode())
    settings = {
        "target": target.source.spec,
        "revision": target.source.revision,
        "alpha": request.alpha if request.shape else None,
        "max_new_tokens": request.max_new_tokens,
        "prompts": len(prompts),
        "prompts_hash": hashed.hexdigest()[:16],
        "warm_up": WARM_UP,
        "seed": request.seed,
        "drafters": {name: _weights(name) for name in request.drafters},
        **{key: here[key] for key in ("device", "dtype", "machine", "versions")},
    }
    store = Store(request.output, settings, here)
    with _CellProgress(len(cells)) as progress:
        run(
            target, drafters, cells, prompts, request.max_new_tokens, store,
            alpha=request.alpha if request.shape else None, seed=request.seed,
            progress=progress.done,
        )  # fmt: skip
    console = Console()
    _print(store, console)
    checkpoint.write(request.output / "bench.md", bench_table.markdown(store.content))
    console.print(f"written: {store.path} and bench.md")


def _weights(name: str) -> str:
    """What a drafter of this name is now: a path may hold another one tomorrow."""
    return name if name == "ngram" else digest(Path(name) / "model.safetensors")


def _real(request: Request) -> tuple[Target, dict[str, Drafter], list[Asked]]:
    from draftsmith.train.template import encode

    names = request.drafters or ["ngram"]
    for name in names:
        if name != "ngram":
            base.read_config(Path(name))
    chosen = asked(request.prompts, request.limit)
    target = Target.load(request.target)
    drafters = {
        name: ngram(target) if name == "ngram" else base.load(Path(name), target) for name in names
    }
    ids = encode(chosen, target)
    return target, drafters, [Asked(i, p.domain) for i, p in zip(ids, chosen, strict=True)]


def _synthetic(request: Request) -> tuple[Target, dict[str, Drafter], list[Asked]]:
    assert request.shape is not None
    if request.drafters or request.prompts:
        raise UserError("--shape: takes no drafters and no --prompts; its text is meaningless")
    if not 0.0 <= request.alpha <= 1.0:
        raise UserError(f"--alpha: {request.alpha} is no chance; use a number from 0 to 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = synthetic.random_target(request.shape, device, dtype)
    ids = synthetic.random_prompts(target, min(request.limit, _SYNTHETIC_PROMPTS))
    drafter = synthetic.random_eagle(target)
    return target, {"eagle-shaped": drafter}, [Asked(row, "random tokens") for row in ids]


class _CellProgress(Progress):
    """Cells done, what is being timed, and how long the rest will take."""

    def __init__(self, cells: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task = self.add_task("bench", total=cells)

    def done(self, cell: Cell) -> None:
        self.update(self.task, advance=1, description=cell.key)


def _print(store: Store, console: Console) -> None:
    table = Table(title=bench_table.title(store.content), title_justify="left")
    for name in bench_table.HEAD:
        table.add_column(name, no_wrap=True)
    for row in bench_table.rows(store.content):
        table.add_row(*row)
    Console(width=max(console.width, 150)).print(table)  # columns cut short say nothing
    for line in bench_table.verdicts(store.content):
        console.print(line)
