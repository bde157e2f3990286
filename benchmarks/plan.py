"""A plan against its run: peak memory, disk and time of the shipped recipes on SmolLM2.

    python benchmarks/plan.py samples/smol

Each cell is a process that plans a recipe, shortened to 40 steps, and then trains it. memory: the
highest resident size of the process (on CUDA, torch's peak). time: training with its replays, from
the run's own log. Writes benchmarks/plan.md and one JSON a recipe.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import HERE, cell, markdown

RECIPES = ("smol-eagle3", "smol-small")
SHORT = ("steps=40", "save_every=20")
MIB = 1 << 20


def measure(name: str, samples: str, runs: str) -> dict[str, Any]:
    """Plans and trains one recipe in this process."""
    import torch

    from draftsmith.train import recipe
    from draftsmith.train.journal import read_metrics
    from draftsmith.train.plan.plan import plan
    from draftsmith.train.run import run

    chosen = recipe.load(name, [f"samples={samples}", f"runs={runs}", *SHORT])
    made = plan(chosen)
    if code := run(chosen):
        raise SystemExit(code)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    log = read_metrics(chosen.folder)
    files = [f for f in chosen.folder.rglob("*") if f.is_file() and not f.is_symlink()]
    return {
        "plan": asdict(made),
        "run": {
            "memory": peak,
            "disk": sum(f.stat().st_size for f in files),
            "seconds": log[-1]["seconds"],
            "learned": log[-1]["tokens"],
        },
    }


def run(name: str, samples: str) -> dict[str, Any]:
    """The cell in a fresh process: a peak cannot be reset."""
    with tempfile.TemporaryDirectory() as runs:
        words = [sys.executable, __file__, samples, name, runs]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def rows_of(name: str, found: dict[str, Any]) -> list[list[str]]:
    plan, real = found["plan"], found["run"]
    pairs = [
        ("peak memory (MiB)", sum(plan["memory"].values()) / MIB, real["memory"] / MIB),
        ("disk (MiB)", sum(plan["disk"].values()) / MIB, real["disk"] / MIB),
        ("time (s)", sum(plan["seconds"].values()), real["seconds"]),
        ("positions learned", plan["tokens"]["learned"], real["learned"]),
    ]
    return [[name, what, f"{a:,.0f}", f"{b:,.0f}", f"{a / b - 1:+.0%}"] for what, a, b in pairs]


def main(samples: str) -> None:
    rows = []
    for name in RECIPES:
        path = HERE / "plan" / f"{name}.json"
        rows += rows_of(name, cell(path, lambda name=name: run(name, samples)))
    text = (
        f"# Plan against run\n\nThe shipped recipes with {' '.join(SHORT)}, on SmolLM2 and answers "
        "that are there already. A plan knows configs and sample lengths, and rates of matrix "
        "products and softmax that it measures before. Made by `benchmarks/plan.py`; one JSON a "
        "recipe.\n\n" + markdown(["recipe", "", "plan", "run", "off by"], rows)
    )
    (HERE / "plan.md").write_text(text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[2], sys.argv[1], sys.argv[3])))
    else:
        main(Path(sys.argv[1]).as_posix())
