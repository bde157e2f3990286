"""draftsmith bench: drafters timed over k, trees, batch sizes and temperatures."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.passes import layers
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.report.provenance import provenance
from draftsmith.eval.speed import bench_table, synthetic
from draftsmith.eval.speed.bench import BenchPrompt, Store, check_memory, device_of, grid
from draftsmith.eval.speed.bench import run as measure
from draftsmith.eval.speed.clocks import WARM_UP
from draftsmith.recipes.options import Compile, Prompts, Seed, settle
from draftsmith.recipes.shared import check_room, digest, ngram, take_prompts
from draftsmith.train import disk
from draftsmith.train.data.chat_template import encode
from draftsmith.train.progress import CountLine

commands = typer.Typer()

_SYNTHETIC_PROMPTS = 8


@commands.command(
    "bench",
    epilog="Example: draftsmith bench smollm2 ngram runs/smol-small/best --k 2,4; "
    "without weights: draftsmith bench --shape llama-8b --alpha 0.7 --batch 1,4,16",
)
@dataclass(frozen=True)
class Bench:
    """Times speculation against the loop without it; goes on where it was stopped."""

    target: Annotated[str, typer.Argument(help="Hub id, folder, GGUF file or smollm2.")] = "smollm2"
    drafters: Annotated[
        list[str] | None, typer.Argument(help="Checkpoint folders, or ngram (the default).")
    ] = None
    k: Annotated[str, typer.Option(help="Draft lengths of chains; empty for none.")] = "2,4"
    tree: Annotated[str, typer.Option(help="Node budgets of trees, as deep as the longest k.")] = ""
    batch: Annotated[str, typer.Option(help="Rows decoded at once.")] = "1"
    temperature: Annotated[str, typer.Option(help="0 is greedy.")] = "0"
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 16
    shape: Annotated[
        str | None, typer.Option(help="SYNTHETIC: a random target of this shape, e.g. llama-8b.")
    ] = None
    alpha: Annotated[float, typer.Option(help="With --shape: the chance of acceptance.")] = 0.7
    output: Annotated[Path, typer.Option(help="Folder for bench.json and .md.")] = Path("bench")
    seed: Seed = 0
    compiling: Compile = "auto"

    def __call__(self) -> None:
        """Runs what is asked. Raises UserError, before anything is timed."""
        ks, budgets = _numbers("--k", self.k, int), _numbers("--tree", self.tree, int)
        batches = _numbers("--batch", self.batch, int)
        temperatures = _numbers("--temperature", self.temperature, float)
        depth = max(ks, default=4)
        trees = [Tree(k=min(depth, budget), budget=budget) for budget in budgets]
        policies = [*map(Policy, ks), *trees]
        for option, given in (
            ("--k, --tree", policies),
            ("--batch", batches),
            ("--temperature", temperatures),
        ):
            if not given:
                raise UserError(f"{option}: nothing is left to time; give at least one number")
        for temperature in temperatures:
            Sampler(temperature)
        target, drafters, prompts = _synthetic(self) if self.shape else _real(self)
        cells = grid(drafters, policies, batches, temperatures)
        longest = max(len(prompt.ids) for prompt in prompts)
        check_room(longest, self.max_new_tokens, target)
        check_memory(target, cells, longest + self.max_new_tokens)
        settle(self.compiling, target, 2 * len(cells) * len(prompts) * self.max_new_tokens)
        origin = device_of(target) | provenance()
        hashed = hashlib.sha256(json.dumps([prompt.ids for prompt in prompts]).encode())
        settings = {
            "target": target.source.spec,
            "revision": target.source.revision,
            "alpha": self.alpha if self.shape else None,
            "max_new_tokens": self.max_new_tokens,
            "prompts": len(prompts),
            "prompts_hash": hashed.hexdigest()[:16],
            "warm_up": WARM_UP,
            "seed": self.seed,
            "compiled": layers.chosen(),
            "drafters": {name: _weights(name) for name in self.drafters or []},
            **{key: origin[key] for key in ("device", "dtype", "machine", "versions")},
        }
        store = Store(self.output, settings, origin)
        line = CountLine("bench", len(cells))
        measure(
            target, drafters, cells, prompts, self.max_new_tokens, store,
            alpha=self.alpha if self.shape else None, seed=self.seed,
            progress=lambda cell: line.count(figures=cell.key),
        )  # fmt: skip
        console = Console()
        _print(store, console)
        disk.write(self.output / "bench.md", bench_table.markdown(store.content))
        console.print(f"written: {store.path} and bench.md")


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    """The numbers of "1,4,16", each once."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise UserError(f"{option}: {text!r} is no list of numbers; write e.g. 1,4") from None


def _weights(name: str) -> str:
    """What a drafter of this name is now: a path may hold another one tomorrow."""
    return name if name == "ngram" else digest(Path(name) / "model.safetensors")


def _real(request: Bench) -> tuple[Target, dict[str, Drafter], list[BenchPrompt]]:
    names = request.drafters or ["ngram"]
    for name in names:
        if name != "ngram":
            storage.read_config(Path(name))
    chosen = take_prompts(request.prompts, request.limit)
    target = Target.load(request.target)
    drafters = {
        name: ngram(target) if name == "ngram" else storage.load(Path(name), target)
        for name in names
    }
    ids = encode(chosen, target)
    return target, drafters, [BenchPrompt(i, p.domain) for i, p in zip(ids, chosen, strict=True)]


def _synthetic(request: Bench) -> tuple[Target, dict[str, Drafter], list[BenchPrompt]]:
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
    return target, {"eagle-shaped": drafter}, [BenchPrompt(row, "random tokens") for row in ids]


def _print(store: Store, console: Console) -> None:
    table = Table(title=bench_table.title(store.content), title_justify="left")
    for name in bench_table.HEAD:
        table.add_column(name, no_wrap=True)
    for row in bench_table.rows(store.content):
        table.add_row(*row)
    Console(width=max(console.width, 150)).print(table)  # columns cut short say nothing
    for line in bench_table.verdicts(store.content):
        console.print(line)
