"""draftsmith quickstart: the whole job in one process, small enough for 2 CPU cores in 15 minutes.

    FOLDER/samples/          about 20,000 tokens of the target's answers
    FOLDER/small/, eagle/    runs of recipes smol-small and smol-eagle3, shortened
    FOLDER/decoded/          while it decodes: what is measured already, one file a drafter
    FOLDER/report.{json,md,html}

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
from rich.console import Console

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.evaluate import evaluate
from draftsmith.recipes import quickstart_report as pages
from draftsmith.recipes.quickstart_report import NAMES
from draftsmith.recipes.subjects import ngram
from draftsmith.train import checkpoint, recipe
from draftsmith.train.__main__ import train
from draftsmith.train.progress import CountLine, clock
from draftsmith.train.prompts import product_prompts
from draftsmith.train.samples import generate
from draftsmith.train.suites import spread
from draftsmith.train.template import encode

STAGES = (
    "the target answers prompts",
    "training a small drafter",
    "training an EAGLE-3 head",
    "decoding with each drafter, replay and parity",
    "report",
)


@dataclass(frozen=True)
class Demo:
    """Sizes. small, eagle: changes to the shipped recipes; decoding takes prompts held out."""

    target: str = "smollm2"
    prompts: int = 196
    max_new_tokens: int = 128
    batch_size: int = 32  # 16 decode 10% slower, 64 no faster
    temperature: float = 1.0
    k: int = 2  # drafters as weak as these waste longer drafts
    small: tuple[str, ...] = ("steps=46", "save_every=23", "heldout=8")
    eagle: tuple[str, ...] = ("steps=100", "save_every=50", "heldout=8")
    decode_prompts: int = 8
    decode_tokens: int = 40


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
        about = {
            "target": demo.target,
            "temperature": demo.temperature,
            "k": demo.k,
            "samples": {"answers": len(samples), "tokens": tokens},
            "positions_learned": learned,
        }
        report = pages.assemble(about, decoded)
        pages.write(folder, report)
        shutil.rmtree(folder / "decoded")  # it counts as said from now on
    Console().print(pages.table(report))
    print(report["about"])
    print(f"written: {folder / 'report.html'}, report.md, report.json")
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
    ).report()  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    checkpoint.write(path, json.dumps(found, indent=1) + "\n")
    return found


def _drafter(folder: Path, name: str, target: Target) -> Drafter:
    return ngram(target) if name == "ngram" else base.load(folder / name / "best", target)


@contextmanager
def _stage(number: int) -> Iterator[None]:
    began = time.perf_counter()
    name = STAGES[number - 1]
    _say(f"stage {number} of {len(STAGES)}: {name}")
    yield
    _say(f"stage {number} of {len(STAGES)} took {clock(time.perf_counter() - began)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
