"""Every drafter family on SmolLM2 at one budget in tokens: one table.

    OMP_NUM_THREADS=1 python benchmarks/families.py --samples samples/smol --train
    OMP_NUM_THREADS=1 python benchmarks/families.py --samples samples/smol

The first line trains: each family's recipe for the same steps on the same rows in the same order,
the target's features being computed once for all. The second, on an idle machine, replays, decodes
and times all of them by `draftsmith compare` on the product's held-out prompts, and writes
benchmarks/families.{json,md}. Both go on where they were stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from common import HERE, Remembering

from draftsmith.drafters.target.target import Target
from draftsmith.recipes.compare import Compare, compare
from draftsmith.recipes.compare_page import markdown
from draftsmith.train import checkpoint, recipe
from draftsmith.train.learner import Learner
from draftsmith.train.loop import Run
from draftsmith.train.samples.samples import Samples

STEPS = 300
# Name -> (recipe, what is changed in it).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("smol-medusa", {}),
    "hydra": ("smol-hydra", {}),
    "eagle1": ("smol-eagle1", {}),
    "eagle3": ("smol-eagle3", {}),
    "eagle31": ("smol-eagle31", {}),
    "mtp": ("smol-mtp", {}),
    "small-2": ("smol-small", {"layers": [0, 29]}),
    "small-4": ("smol-small", {"layers": [0, 1, 28, 29]}),
    "small-8": ("smol-small", {"layers": [0, 1, 2, 3, 26, 27, 28, 29]}),
}
SETTINGS: dict[str, Any] = {"limit": 24, "decode_limit": 4, "max_new_tokens": 64, "k": 4, "seed": 0}
COMMENT = """
Published order, Vicuna-13B on Spec-Bench (arXiv 2401.07851, speedups): Medusa 1.80, EAGLE-1 2.16,
Hydra 2.20, EAGLE-2 2.46, EAGLE-3 3.02. Those heads saw tens to hundreds of
thousands of conversations, trees included in the figures.
"""


def trained(samples: Path, runs: Path, steps: int, only: list[str]) -> None:
    target = Target.load("smollm2")
    states = Remembering(target)
    for name in only:
        of, changes = FAMILIES[name]
        keys = {
            "name": f"family-{name}", "runs": str(runs), "samples": str(samples), "steps": steps,
            "save_every": steps // 3, **changes,
        }  # fmt: skip
        chosen = recipe.load(of, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
        with checkpoint.claimed(chosen):
            of_target = Samples.open(samples, target, audit=0)
            if code := Run(Learner(chosen, target, of_target, Accelerator(), states)).run():
                sys.exit(code)  # told to stop: the same command goes on from the checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default=",".join(FAMILIES), help="names, separated by commas")
    parser.add_argument("--train", action="store_true", help="train only: other jobs may run")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    trained(arguments.samples, arguments.runs, arguments.steps, only)
    if arguments.train:
        return
    runs = [str(arguments.runs / f"family-{name}") for name in only]
    scratch = arguments.runs / "families"  # the target's answers lie there too
    began = time.perf_counter()
    found = compare(Compare([*runs, "ngram"], output=scratch, **SETTINGS))
    found |= {"seed": SETTINGS["seed"], "wall_seconds": time.perf_counter() - began}
    (arguments.output / "families.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found).replace("# Drafters for", "# Families on", 1)
    text += (
        f"\nEach was trained for {arguments.steps} steps of 512 packed tokens from its shipped "
        f"recipe, on the same rows. Settings of the comparison: {SETTINGS}. Made by "
        f"`benchmarks/families.py`.\n{COMMENT}"
    )
    (arguments.output / "families.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
