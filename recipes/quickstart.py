"""draftsmith quickstart: sample, train, compare; small enough for 2 CPU cores in 15 minutes.

    FOLDER/samples/          about 20,000 tokens of the target's answers
    FOLDER/small/, eagle/    runs of recipes smol-small and smol-eagle3, shortened
    FOLDER/heldout/          the target's answers to prompts held out
    FOLDER/NAME.json         while drafters are compared: what is measured already
    FOLDER/compare.{json,md,html}

Every stage leaves nothing half made behind. Interrupted, it goes on where it was; run again, it
keeps samples, drafters and held-out answers, and decodes again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import compare_page
from draftsmith.recipes.compare import Compare, compare
from draftsmith.train import recipe
from draftsmith.train.data.prompts import product_prompts
from draftsmith.train.data.sources import balanced
from draftsmith.train.progress import clock
from draftsmith.train.run import run
from draftsmith.train.samples.generate import generate

commands = typer.Typer()

STAGES = (
    "the target answers prompts",
    "training a small drafter",
    "training an EAGLE-3 head",
    "comparing them, and n-gram: replay, decoding, parity",
)
RECIPES = {"small": "smol-small", "eagle": "smol-eagle3"}
REAL_RUN = (
    "Published EAGLE-3 heads read some 500,000 of their target's answers two or three times "
    "(vllm-project/speculators, Qwen3-8B: tau 2.8 to 3.0), a thousand times and more of what is "
    "seen here."
)
NEXT = (
    "A real run, on your target's answers to your prompts: draftsmith train smol-eagle3 name=mine "
    "target=TARGET prompts=PROMPTS.jsonl steps=20000 (draftsmith plan with the same words says "
    "beforehand what it takes)",
    "Its best checkpoint, acceptance, parity and speed: draftsmith eval runs/mine/best",
    "A page of all its checkpoints, learning curve, draft lengths, domains: draftsmith report "
    "runs/mine",
)


@dataclass(frozen=True)
class Demo:
    """Sizes. small, eagle: changes to the shipped recipes; comparing takes prompts held out, and
    decodes fewer of them than it replays."""

    target: str = "smollm2"
    prompts: int = 196
    max_new_tokens: int = 128
    batch_size: int = 32  # 16 decode 10% slower, 64 no faster
    temperature: float = 1.0
    k: int = 2  # drafters as weak as these waste longer drafts
    small: tuple[str, ...] = ("steps=46", "save_every=23", "heldout=8")
    eagle: tuple[str, ...] = ("steps=100", "save_every=50", "heldout=8")
    heldout_prompts: int = 12
    decode_prompts: int = 6
    decode_tokens: int = 32


@commands.command(
    epilog="Example: draftsmith quickstart runs/demo; run again, it goes on, or decodes again"
)
def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")] = Path(
        "runs/quickstart"
    ),
) -> None:
    """The whole job small: samples, two drafters, one page; 15 minutes on 2 cores."""
    raise typer.Exit(run_demo(folder))


def run_demo(folder: Path, demo: Demo | None = None) -> int:
    """Runs what is not made yet of the demo, decodes, prints the tables; the process's exit code.

    1: a drafter broke parity; that of `train` when training was stopped. Raises UserError.
    """
    demo = demo or Demo()
    _say(f"A demo in {folder}: at most 15 minutes on 2 CPU cores; interrupted, it goes on.")
    target = Target.load(demo.target, dtype=torch.float32)  # parity is defined in fp32
    with _stage(1):
        samples = generate(
            target,
            balanced(product_prompts("train"), demo.prompts),
            Sampler(demo.temperature),
            demo.max_new_tokens,
            folder / "samples",
            batch_size=demo.batch_size,
        )
        tokens = int(samples.token_counts().sum())
        _say(f"{len(samples)} answers, {tokens:,} tokens")
    for number, name in enumerate(RECIPES, start=2):
        with _stage(number):
            if code := run(_recipe(folder, name, demo), target):
                return code
    with _stage(4):
        scale = (
            f"This is a demo: {len(samples)} answers, {tokens:,} tokens at temperature "
            f"{demo.temperature:g}. {REAL_RUN}"
        )
        settings = Compare(
            [*(str(folder / name) for name in RECIPES), "ngram"],
            target=demo.target,
            limit=demo.heldout_prompts,
            decode_limit=demo.decode_prompts,
            max_new_tokens=demo.decode_tokens,
            k=demo.k,
            output=folder,
        )
        found = compare(settings, target, [Sampler(demo.temperature)], (scale, *NEXT))
        for name in found["drafters"]:  # the comparison holds them now
            (folder / f"{name}.json").unlink(missing_ok=True)
    compare_page.show(found)
    print(scale)
    print(f"written: {folder / 'compare.html'}, compare.md, compare.json")
    broken = compare_page.broken(found)
    for name in broken:
        _say(f"error: {name}: decoder and replay disagree; this is a bug in draftsmith")
    return 1 if broken else 0


def _recipe(folder: Path, name: str, demo: Demo) -> recipe.Recipe:
    changes = {"small": demo.small, "eagle": demo.eagle}[name]
    shared = (
        f"name={name}",
        f"runs={folder}",
        f"samples={folder / 'samples'}",
        f"target={demo.target}",
        f"temperature={demo.temperature}",
        f"max_new_tokens={demo.max_new_tokens}",
        f"k={demo.k}",
    )
    return recipe.load(RECIPES[name], (*shared, *changes))


@contextmanager
def _stage(number: int) -> Iterator[None]:
    began = time.perf_counter()
    name = STAGES[number - 1]
    _say(f"stage {number} of {len(STAGES)}: {name}")
    yield
    _say(f"stage {number} of {len(STAGES)} took {clock(time.perf_counter() - began)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
