"""draftsmith quickstart: the whole job in one process, small enough for 2 CPU cores in 15 minutes.

    FOLDER/samples/          about 20,000 tokens of the target's answers
    FOLDER/small/, eagle/    runs of recipes smol-small and smol-eagle3, shortened
    FOLDER/decoded/          while it decodes: what is measured already, one file a drafter
    FOLDER/report.{json,md}

Every stage leaves nothing half made behind. Interrupted, it goes on where it was; run again, it
keeps samples and drafters and decodes again.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.provenance import provenance
from draftsmith.train import checkpoint, recipe
from draftsmith.train.__main__ import train
from draftsmith.train.progress import CountLine, clock
from draftsmith.train.prompts import encode, product_prompts
from draftsmith.train.samples import generate
from draftsmith.train.suites import spread

STAGES = (
    "the target answers prompts",
    "training a small drafter",
    "training an EAGLE-3 head",
    "decoding with each drafter, replay and parity",
    "report",
)
NAMES = {"ngram": "n-gram", "small": "small", "eagle": "EAGLE-3"}
COLUMNS = {  # title, digits
    "tau_replay": ("tau, replay", 3),
    "tau_decode": ("tau, decode", 3),
    "alpha_0": ("alpha_0", 3),
    "tokens_per_s": ("tokens/s", 1),
    "speedup": ("speedup", 2),
    "predicted_speedup": ("predicted", 2),
    "break_even_tau": ("break-even tau", 2),
}
REAL_RUN = (
    "Published EAGLE-3 heads read some 500,000 of their target's answers two or three times "
    "(vllm-project/speculators, Qwen3-8B: tau 2.8 to 3.0), a thousand times and more of what is "
    "seen here."
)


@dataclass(frozen=True)
class Demo:
    """Sizes. small, eagle: changes to the shipped recipes; decoding takes prompts held out."""

    target: str = "smollm2"
    prompts: int = 176
    max_new_tokens: int = 128
    batch_size: int = 32  # 16 decode 10% slower, 64 no faster
    temperature: float = 1.0
    k: int = 2  # drafters as weak as these waste longer drafts
    small: tuple[str, ...] = ("steps=60", "save_every=30", "heldout=8")
    eagle: tuple[str, ...] = ("steps=120", "save_every=60", "heldout=8")
    decode_prompts: int = 8
    decode_tokens: int = 48


def quickstart(folder: Path, demo: Demo | None = None) -> int:
    """Runs what is not made yet of the demo, decodes, prints the table; the process's exit code.

    1: a drafter broke parity; that of `train` when training was told to stop. Raises UserError.
    """
    demo = demo or Demo()
    _say(f"A demo in {folder}: at most 15 minutes on 2 CPU cores; interrupted, it goes on.")
    target = Target.load(demo.target, dtype=torch.float32)  # parity is defined in fp32
    with _stage(1):
        samples = generate(
            target,
            spread(product_prompts("train"), demo.prompts),
            Sampler(demo.temperature),
            demo.max_new_tokens,
            folder / "samples",
            batch_size=demo.batch_size,
        )
        tokens = int(samples.token_counts().sum())
        _say(f"{len(samples)} answers, {tokens:,} tokens")
    learned = {}
    for number, name in enumerate(("small", "eagle"), start=2):
        with _stage(number):
            if code := train(_recipe(folder, name, demo), target):
                return code
        learned[name] = _learned(folder / name)
    with _stage(4):
        decoded = {name: _decoded(folder, name, target, demo) for name in NAMES}
    with _stage(5):
        report = _report(decoded, demo, len(samples), tokens, learned)
        _write(folder, report)
    Console().print(_table(report))
    print(report["about"])
    print(f"written: {folder / 'report.json'}, report.md")
    broken = [name for name, found in decoded.items() if not found["parity"]["holds"]]
    for name in broken:
        _say(f"error: {name}: decoder and replay disagree; this is a bug in draftsmith")
    return 1 if broken else 0


def _recipe(folder: Path, name: str, demo: Demo) -> recipe.Recipe:
    shipped, changes = {
        "small": ("smol-small", demo.small),
        "eagle": ("smol-eagle3", demo.eagle),
    }[name]
    here = (
        f"name={name}",
        f"runs={folder}",
        f"samples={folder / 'samples'}",
        f"target={demo.target}",
        f"temperature={demo.temperature}",
        f"max_new_tokens={demo.max_new_tokens}",
        f"k={demo.k}",
    )
    return recipe.load(shipped, (*here, *changes))


def _learned(run: Path) -> int:
    """The positions that a run's best checkpoint had learned from, repeats counted."""
    best = int((run / "best").readlink().name.removeprefix("checkpoint-"))
    lines = checkpoint.read_metrics(run)
    return next(m["tokens"] for m in lines if m["kind"] == "replay" and m["step"] == best)


def _decoded(folder: Path, name: str, target: Target, demo: Demo) -> dict[str, Any]:
    """evaluate's report of one drafter, kept in FOLDER/decoded until all are there."""
    path = folder / "decoded" / f"{name}.json"
    if path.is_file():
        return json.loads(path.read_text())
    prompts = encode(spread(product_prompts("heldout"), demo.decode_prompts), target)
    line = CountLine(f"{NAMES[name]}: prompts decoded, with the drafter and without",
                     2 * len(prompts))  # fmt: skip

    def progress(what: str, done: int, new: int) -> None:
        if not new:  # a prompt is done
            line.count()

    found = evaluate(
        target, _drafter(folder, name, target), prompts, Sampler(demo.temperature),
        Policy(demo.k), demo.decode_tokens, progress=progress,
    )  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    checkpoint.write(path, json.dumps(found, indent=1) + "\n")
    return found


def _drafter(folder: Path, name: str, target: Target) -> Drafter:
    if name != "ngram":
        return base.load(folder / name / "best", target)
    ngram = base.family("ngram")
    return ngram.create(target, ngram.Config())


def _report(
    decoded: dict[str, dict[str, Any]],
    demo: Demo,
    answers: int,
    tokens: int,
    learned: dict[str, int],
) -> dict[str, Any]:
    """report.json: the table, what the demo saw, and each drafter's whole evaluation."""
    seen = " and ".join(f"{NAMES[name]} learned from {n:,}" for name, n in learned.items())
    about = (
        f"This is a demo: {answers} answers, {tokens:,} tokens at temperature "
        f"{demo.temperature:g}; {seen} positions (repeats counted). {REAL_RUN}"
    )
    return {
        "about": about,
        "target": demo.target,
        "temperature": demo.temperature,
        "k": demo.k,
        "samples": {"answers": answers, "tokens": tokens},
        "positions_learned": learned,
        "table": {name: _row(found) for name, found in decoded.items()},
        "decoded": decoded,
        **provenance(),
    }


def _row(found: dict[str, Any]) -> dict[str, float | None]:
    """One drafter's figures."""
    decode, replay = found["decode"], found["replay"]
    return {
        "tau_replay": replay["tau"],
        "tau_decode": decode["tau"],
        "alpha_0": replay["alpha"][0],
        "tokens_per_s": decode["tokens_per_s"],
        "speedup": decode["speedup"],
        "predicted_speedup": found["predicted_speedup"],
        "break_even_tau": found["break_even_tau"],
    }


def _cells(report: dict[str, Any]) -> Iterator[list[str]]:
    """The table's rows as text; "-" where nothing was drafted."""
    for name, row in report["table"].items():
        values = [(row[key], digits) for key, (_, digits) in COLUMNS.items()]
        yield [NAMES[name], *("-" if v is None else f"{v:.{digits}f}" for v, digits in values)]


def _table(report: dict[str, Any]) -> Table:
    title = f"Drafters for {report['target']}, temperature {report['temperature']:g}, "
    title += f"k={report['k']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("")
    for column, _ in COLUMNS.values():
        table.add_column(column, justify="right")
    for row in _cells(report):
        table.add_row(*row)
    return table


def _write(folder: Path, report: dict[str, Any]) -> None:
    """The report's files; what is decoded counts as said from then on."""
    lines = ["| " + " | ".join(["drafter", *(title for title, _ in COLUMNS.values())]) + " |"]
    lines += ["| --- |" + " ---: |" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in _cells(report)]
    title = f"# Quickstart: drafters for {report['target']}, k={report['k']}\n\n"
    text = title + "\n".join(lines) + f"\n\n{report['about']}\n"
    checkpoint.write(folder / "report.md", text)
    checkpoint.write(folder / "report.json", json.dumps(report, indent=1) + "\n")
    shutil.rmtree(folder / "decoded")


@contextmanager
def _stage(number: int) -> Iterator[None]:
    began = time.perf_counter()
    name = STAGES[number - 1]
    _say(f"stage {number} of {len(STAGES)}: {name}")
    yield
    _say(f"stage {number} of {len(STAGES)} took {clock(time.perf_counter() - began)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
