"""Which loss gives the highest tau: every objective branched from one KL checkpoint.

    DATA=folder python benchmarks/ablation.py --samples samples/smol

Each cell (objective, seed) trains SmolLM2's EAGLE-3 head for the same steps on the same rows in the
same order, from the best checkpoint of runs/smol-eagle3 (trained first where it is missing), and is
replayed on answers that the target gave to prompts no run has seen, at T=1 and T=0. Objectives are
chosen on the validation prompts; the test prompts are looked at once, for all. With --family small,
KL and the winner on a pruned draft model. Writes benchmarks/ablation/*.json, one a cell, and
benchmarks/ablation.{md,png}; a seed's first cell takes about 10 minutes on one core, the others,
which need the target's features no more, about 4.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from accelerate import Accelerator
from common import HERE, Remembering, cell, data, markdown, number

from draftsmith.drafters import base, storage
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import moments, replay
from draftsmith.train import checkpoint, journal, recipe
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.sources import read_prompts
from draftsmith.train.learner import Learner
from draftsmith.train.loop import Run
from draftsmith.train.run import main as train
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Samples

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

K, NEW_TOKENS, LONGEST = 4, 96, 300
SIZES = {"validation": 40, "test": 64}  # prompts
FILES = ("spec_bench", "gsm8k", "humaneval", "mbpp")
TEMPERATURES = (1.0, 0.0)
LR = 5e-4

# What a cell changes in the recipe. A depth's factor is already in products over depths.
CONSTANT = {"depth_weights": "constant"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "kl": {},
    "replay_alpha": {},
    "expected": CONSTANT,
    "lk": {},
    "log_alpha": {},
    "ce": {},
    "replay": {},
    "tv": {},
    "kl_scratch": {"loss": "kl", "start": None},
    "tv_scratch": {"loss": "tv", "start": None},
}
FAMILIES = {"eagle": ("smol-eagle3", 200), "small": ("smol-small", 50)}  # recipe, steps
SEEDS = (0, 1)


@cache
def target() -> Target:
    return Target.load("smollm2")


@cache
def states() -> Remembering:
    return Remembering(target())


def questions(split: str) -> list[Prompt]:
    """Prompts of a split: as many of each file, below LONGEST tokens, validation and test apart."""
    out = []
    for name in FILES:
        found = read_prompts(data(f"{name}.jsonl"))
        sizes = [len(ids) for ids in encode(found, target())]
        short = [p.first_turn for p, size in zip(found, sizes, strict=True) if size < LONGEST]
        random.Random(name).shuffle(short)
        each = [size // len(FILES) for size in SIZES.values()]
        first = 0 if split == "validation" else each[0]
        out += short[first : first + SIZES[split] // len(FILES)]
    return out


@cache
def answers(split: str, temperature: float, folder: Path) -> list[Batch]:
    """The target's own answers, read with every tap that the drafters here need."""
    place = folder / f"ablation-{split}-t{temperature:g}"
    found = generate(target(), questions(split), Sampler(temperature), NEW_TOKENS, place)
    order = range(len(found))
    rows = [collate(found, [[i] for i in order[at : at + 8]], 1 << 20) for at in order[::8]]
    L = target().num_layers
    return [target().read(batch, [2, L // 2, L - 3]) for batch in rows]


def score(drafter: base.Drafter, batches: Sequence[Batch]) -> dict[str, Any]:
    """Replay at every k up to K, and tokens and expected passes of each prompt at K."""
    found = replay(drafter, batches, K)
    tables = [t for t in found[K].texts if t.tokens > 0]
    return {
        "tau": found[K].tau,
        "tau_ci": list(found[K].tau_ci),
        "alpha": found[K].alpha,
        "tau_by_k": {str(k): r.tau for k, r in found.items()},
        "prompts": [[t.tokens, float(moments(t, K).mean[0])] for t in tables],
    }


def run(family: str, name: str, seed: int, steps: int, samples: Path, runs: Path) -> dict[str, Any]:
    """Trains one cell and replays its last checkpoint."""
    of, _ = FAMILIES[family]
    start = runs / of / "best"
    keys = {
        "name": f"ablation-{family}-{name}-{seed}", "runs": str(runs), "samples": str(samples),
        "loss": name, "switch_alpha": [], "depth_weights": "geometric", "start": str(start),
        "steps": steps, "save_every": steps, "lr": LR, "seed": seed, **OBJECTIVES[name],
    }  # fmt: skip
    chosen = recipe.load(of, [f"{k}={'null' if v is None else v}" for k, v in keys.items()])
    with checkpoint.claimed(chosen):
        began = time.perf_counter()
        texts = Samples.open(samples, target(), audit=0)
        learner = Learner(chosen, target(), texts, Accelerator(), states())
        if code := Run(learner).run():  # told to stop: the same command goes on from the checkpoint
            sys.exit(code)
        seconds = time.perf_counter() - began
    drafter = storage.load(chosen.folder / f"checkpoint-{steps}", target())
    log = [m for m in journal.read_metrics(chosen.folder) if m["kind"] == "train"]
    return {
        "objective": name,
        "family": family,
        "recipe": chosen.flat(),
        "train_seconds": seconds,
        "learned_tokens": log[-1]["tokens"],
        "log": [{k: m[k] for k in ("step", "loss", "alpha", "grad_norm")} for m in log],
        "score": {
            f"{split} T={t:g}": score(drafter, answers(split, t, samples.parent))
            for split in SIZES
            for t in TEMPERATURES
        },
    }


# ---------------------------------------------------------------- the table


def pooled(cells: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """Tokens and passes (2, prompts) of one set, summed over seeds."""
    return np.sum([np.array(c["score"][key]["prompts"]).T for c in cells], axis=0)


def ratio(ours: np.ndarray, theirs: np.ndarray, resamples: int = 10_000) -> tuple[float, ...]:
    """tau / their tau on the same prompts, and a 95% interval, resampling whole prompts."""
    drawn = np.random.default_rng(0).integers(0, ours.shape[1], (resamples, ours.shape[1]))

    def of(at: Any) -> Any:
        a, b = ours[:, at].sum(-1), theirs[:, at].sum(-1)
        return (a[0] / a[1]) / (b[0] / b[1])

    low, high = np.percentile(of(drawn), [2.5, 97.5])
    return float(of(np.arange(ours.shape[1]))), float(low), float(high)


def report(found: dict[str, list[dict[str, Any]]], folder: Path, family: str) -> None:
    """Table and plot of the finished cells. found: cells (one a seed) of each objective."""
    keys = [f"{split} T={t:g}" for split in SIZES for t in TEMPERATURES]
    # Pairs need the same seeds on both sides.
    seeds = {name: {c["seed"] for c in cells} for name, cells in found.items()}
    figures: dict[str, dict[str, Any]] = {}
    for name, cells in found.items():
        kl = [c for c in found["kl"] if c["seed"] in seeds[name]]
        mine = [c for c in cells if c["seed"] in seeds["kl"]]
        if not mine:
            continue
        figures[name] = {"seeds": len(mine)}
        for key in keys:
            ours, theirs = pooled(mine, key), pooled(kl, key)
            tau = ours[0].sum() / ours[1].sum()
            figures[name][key] = (tau, *ratio(ours, theirs))
    choice = [name for name in figures if not name.endswith("scratch")]
    winner = max(choice, key=lambda name: figures[name]["validation T=1"][0])
    rows = [
        [f"**{name}**" if name == winner else name, f["seeds"], number(f["validation T=1"][0]),
         *(cell for key in keys[2:] for cell in (
             number(f[key][0]), f"{f[key][1]:.3f} [{f[key][2]:.3f}, {f[key][3]:.3f}]"))]
        for name, f in sorted(figures.items(), key=lambda item: -item[1]["validation T=1"][0])
    ]  # fmt: skip
    head = ["objective", "seeds", "validation tau, T=1", "test tau, T=1", "ratio to KL [95% CI]",
            "test tau, T=0", "ratio to KL [95% CI]"]  # fmt: skip
    first = found["kl"][0]
    text = (
        f"# Objectives, {family}\n\n"
        f"{first['recipe']['steps']} steps ({first['learned_tokens']:,} target-made tokens) from "
        f"one KL checkpoint of `recipes/{FAMILIES[family][0]}.yaml`, but for those from scratch; "
        f"replay at k={K} on SmolLM2's own answers to {SIZES['validation']} validation and "
        f"{SIZES['test']} test prompts of Spec-Bench, GSM8K, HumanEval and MBPP. tau pools the "
        "seeds; ratios pair prompts and seeds with KL's. The winner (bold) is chosen by the "
        "validation column alone. Trained at T=1. Made by `benchmarks/ablation.py`; one JSON a "
        "cell.\n\n" + markdown(head, rows) + f"\n![ratios]({family_file(family)}.png)\n"
    )
    (folder / f"{family_file(family)}.md").write_text(text)
    plot(figures, folder / f"{family_file(family)}.png")
    print(text)


def family_file(family: str) -> str:
    return "ablation" if family == "eagle" else f"ablation_{family}"


def plot(figures: dict[str, dict[str, Any]], path: Path) -> None:
    names = sorted(figures, key=lambda name: figures[name]["test T=1"][1])
    figure, axes = plt.subplots(figsize=(6.4, 4))
    for shift, (key, colour) in enumerate((("test T=1", "tab:blue"), ("test T=0", "tab:orange"))):
        values = np.array([figures[name][key][1:] for name in names])
        errors = np.abs(values[:, 1:] - values[:, :1]).T
        at = np.arange(len(names)) + 0.2 * shift
        axes.errorbar(values[:, 0], at, xerr=errors, fmt="o", color=colour, label=key)
    axes.axvline(1.0, color="gray", linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"tau / KL's tau at k={K} (95% CI over prompts)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--family", choices=FAMILIES, default="eagle")
    parser.add_argument("--only", help="objectives, separated by commas; default: all")
    parser.add_argument("--steps", type=int, help="default: what takes about 8 minutes")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    of, steps = FAMILIES[arguments.family]
    steps = arguments.steps or steps
    if not (arguments.runs / of / "best").exists():
        train([of, f"samples={arguments.samples}", f"runs={arguments.runs}"])
    names = arguments.only.split(",") if arguments.only else list(OBJECTIVES)
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in SEEDS:
        for name in names:
            values = cell(
                arguments.output / "ablation" / f"{arguments.family}-{name}-{seed}.json",
                lambda name=name, seed=seed: run(
                    arguments.family, name, seed, steps, arguments.samples, arguments.runs
                ),
                seed,
            )
            found.setdefault(name, []).append(values)
            report(found, arguments.output, arguments.family)


if __name__ == "__main__":
    main()
