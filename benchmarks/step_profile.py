"""Where a training step on SmolLM2 spends its time, before and after it was made lean.

    OMP_NUM_THREADS=1 python benchmarks/step_profile.py --samples samples/smol

Steps of recipes/smol-eagle3.yaml and smol-small.yaml as the training loop takes them, on the
samples' own packed rows, full length, fp32, one thread. Each part's time is its own, without the
parts inside it, in CPU seconds of the one thread, so that shares sum to 100%. Cells are called by
`--name` (default: after); for "before", run this file in a checkout of the commit before:

    git worktree add ../before 36c5bd2 && cp benchmarks/step_profile.py ../before/benchmarks/
    ln -sfn . ../before/draftsmith && PYTHONPATH=../before OMP_NUM_THREADS=1 \
        python ../before/benchmarks/step_profile.py --samples samples/smol --name before \
        --output benchmarks

Writes benchmarks/step_profile/*.json and, from all of them, benchmarks/step_profile.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from common import HERE, cell, markdown

from draftsmith.drafters.target.target import Target
from draftsmith.eval.overlap import row_stats
from draftsmith.train import recipe
from draftsmith.train.learner import Learner
from draftsmith.train.objective import losses
from draftsmith.train.samples.samples import Samples

STEPS = 8
PARTS = [
    "target forward", "target head", "draft layers forward", "draft layers backward",
    "draft head forward", "draft head backward", "divergence", "its gradient", "optimizer",
    "everything else",
]  # fmt: skip
CELLS = {  # loss -> what is changed in the shipped recipe
    ("smol-eagle3", "kl"): {"loss": "kl", "switch_alpha": []},
    ("smol-eagle3", "expected"): {"loss": "expected", "switch_alpha": []},
    ("smol-small", "kl"): {},
}


class Parts:
    """CPU seconds of each part, a part's own: what runs inside another is not the other's."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open = ["everything else"]
        self.since = time.thread_time()

    def turn(self) -> None:
        """Gives the time since the last turn to the part that is open."""
        now = time.thread_time()
        self.seconds[self._open[-1]] += now - self.since
        self.since = now

    def timed(self, part: str | Callable[..., str], function: Callable[..., Any]) -> Any:
        """The function, its calls counted as `part` (or as part(*arguments) says)."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self._open.append(part if isinstance(part, str) else part(*args))
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self._open.pop()

        return call


def _backward(tensor: torch.Tensor, *_: Any) -> str:
    """The loss of a chunk goes back through the head; hidden states (M, H) through the layers."""
    return "draft layers backward" if tensor.dim() else "draft head backward"


def profile(learner: Learner, steps: int) -> dict[str, Any]:
    """Seconds a step by part, over `steps` steps after one to warm up."""
    learner.advance(learner.states)
    parts, drafter, target, tokens = Parts(), learner.drafter, learner.target, learner.tokens
    places: list[tuple[Any, str, str | Callable[..., str]]] = [
        (target, "read", "target forward"),
        (target, "head", "target head"),
        (drafter, "unroll", "draft layers forward"),
        (drafter, "logits", "draft head forward"),
        (losses, "chunk_stats", "divergence"),
        (row_stats._Stats, "backward", "its gradient"),
        (torch.Tensor, "backward", _backward),
        (learner.optimizer, "step", "optimizer"),
        (torch.nn.utils, "get_total_norm", "optimizer"),
        (torch.nn.utils, "clip_grads_with_norm_", "optimizer"),
    ]
    patches = []
    for owner, name, part in places:
        timed = parts.timed(part, getattr(owner, name))
        patches.append(patch.object(owner, name, timed))
    for one in patches:
        one.start()
    parts.since = time.thread_time()
    began = parts.since
    for _ in range(steps):
        learner.advance(learner.states)
    parts.turn()
    total = time.thread_time() - began
    for one in patches:
        one.stop()
    learned = learner.tokens - tokens
    return {
        "seconds": {part: parts.seconds[part] / steps for part in PARTS},
        "step_seconds": total / steps,
        "learned_per_step": learned / steps,
        "tokens_per_cpu_s": learned / total,
        "steps": steps,
    }


def measure(of: str, changes: dict[str, Any], samples: Path, target: Target) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = {"samples": str(samples), "runs": folder, "steps": STEPS + 1, "save_every": STEPS}
        words = [f"{k}={v}" for k, v in (keys | changes).items()]
        chosen = recipe.load(of, words)
        learner = Learner(chosen, target, Samples.open(samples, target, audit=0), Accelerator())
        found = profile(learner, STEPS)
    return found | {"row": chosen.length, "depths": learner.depths}


def table(found: dict[tuple[str, str, str], dict[str, Any]]) -> str:
    """One column a cell: milliseconds and share of each part."""
    rows = []
    for part in PARTS:
        row = [part]
        for f in found.values():
            own = f["seconds"][part]
            row.append(f"{1e3 * own:.0f} ({own / sum(f['seconds'].values()):.1%})")
        rows.append(row)
    rows.append(["a step", *(f"{1e3 * f['step_seconds']:.0f}" for f in found.values())])
    rows.append(["tokens/s", *(f"{f['tokens_per_cpu_s']:.1f}" for f in found.values())])
    head = ["CPU ms a step", *(f"{of.removeprefix('smol-')} {loss}, {name}"
                               for of, loss, name in found)]  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--name", default="after", help="what the cells are called")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = arguments.output / "step_profile"
    target: Target | None = None

    def run(of: str, changes: dict[str, Any]) -> dict[str, Any]:
        nonlocal target
        target = target or Target.load("smollm2")
        return measure(of, changes, arguments.samples, target)

    found = {}
    for (of, loss), changes in CELLS.items():
        for name in dict.fromkeys(("before", arguments.name)):
            path = folder / f"{of}-{loss}-{name}.json"
            if name == arguments.name:
                found[of, loss, name] = cell(path, lambda o=of, c=changes: run(o, c))
            elif path.is_file():
                found[of, loss, name] = cell(path, dict)
    first = next(iter(found.values()))
    text = (
        "# Where a training step spends its time\n\nSmolLM2-135M-Instruct, recipes smol-eagle3 "
        f"(3 depths, 8,192 draft tokens, own head) and smol-small, {first['row']} tokens a step, "
        f"fp32, one thread; CPU milliseconds a step over {first['steps']} steps and their share. "
        "Draft head backward holds the chunks' bookkeeping too. tokens/s counts positions learned "
        "from. Made by `benchmarks/step_profile.py`; JSON beside it.\n\n" + table(found)
    )
    (arguments.output / "step_profile.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
