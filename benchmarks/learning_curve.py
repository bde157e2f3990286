"""The learning curve of a run, against a bigram table and against shuffled features.

    DATA=folder python benchmarks/learning_curve.py runs/smol-eagle3 --samples samples/smol

Plots replay tau of every checkpoint against tokens seen, and measures on the same held-out
conversations what the best checkpoint must beat: a bigram table counted on the same training
answers (with the smoothing that suits it best), and itself with features shuffled between
positions. Writes benchmarks/learning_curve.{json,md,png}.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from common import HERE, cell, markdown, number
from torch import Tensor

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter, DrafterConfig, Unroll
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import replay
from draftsmith.train.journal import read_metrics
from draftsmith.train.recipe import Recipe, load
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Samples

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SMOOTHING = (1.0, 4.0, 16.0)


class Bigram(Drafter):
    """q(x | prev) = (count(prev, x) + m * unigram(x)) / (count(prev) + m), over all of V."""

    family = "bigram"

    def __init__(self, target: Target, pairs: dict[int, Tensor], unigram: Tensor, m: float) -> None:
        super().__init__(target, DrafterConfig())
        self.pairs, self.unigram, self.m = pairs, unigram, m

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        return Unroll.of_states(torch.zeros(*alignment.exists.shape, 1), alignment, batch)

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        rows = (self.m * self.unigram).repeat(len(prev), 1)  # (n, V)
        for row, token in zip(rows, prev.tolist(), strict=True):
            if token in self.pairs:
                row += torch.bincount(self.pairs[token], minlength=len(row))
        return rows.log()

    def start(self, rows: int, capacity: int) -> Any:
        raise NotImplementedError("a yardstick for replay only")

    extend = propose = start  # type: ignore[assignment]


def bigram_counts(samples: Samples, indices: Sequence[int], size: int) -> tuple[dict, Tensor]:
    """Followers of every token, and smoothed unigram frequencies, over target-made tokens."""
    followers: dict[int, list[int]] = {}
    for i in indices:
        sample = samples[i]
        for before, token, made in zip(sample.ids, sample.ids[1:], sample.made[1:], strict=False):
            if made:
                followers.setdefault(before, []).append(token)
    unigram = samples.token_counts(indices).float() + 0.01
    return {t: torch.tensor(f) for t, f in followers.items()}, unigram / unigram.sum()


def shuffled(batch: Batch, seed: int) -> Batch:
    """The batch with each row's features permuted between its real positions."""
    generator = torch.Generator().manual_seed(seed)
    for b in range(batch.tokens.shape[0]):
        real = (batch.segment[b] >= 0).nonzero().squeeze(1)
        order = real[torch.randperm(len(real), generator=generator)]
        for feature in batch.features.values():
            feature[b, real] = feature[b, order].clone()
    return batch


def yardsticks(run: Path, recipe: Recipe, samples_folder: Path) -> dict[str, Any]:
    target = Target.load(recipe.target)
    samples = Samples.open(samples_folder, target, audit=0)
    learn, heldout = samples.split(recipe.heldout, recipe.seed)
    drafter = storage.load(run / "best", target)

    def batches(change: bool = False) -> list[Batch]:
        out = []
        for i in range(0, len(heldout), 4):
            batch = collate(samples, [[j] for j in heldout[i : i + 4]], target.max_positions)
            target.read(batch, drafter.taps)
            out.append(shuffled(batch, recipe.seed) if change else batch)
        return out

    def figures(of: Drafter, on: list[Batch]) -> dict[str, Any]:
        found = replay(of, on, recipe.k, recipe.seed)[recipe.k]
        return {"tau": found.tau, "tau_ci": list(found.tau_ci), "alpha": found.alpha}

    real = batches()
    pairs, unigram = bigram_counts(samples, learn, target.vocab_size)
    tables = {m: figures(Bigram(target, pairs, unigram, m), real) for m in SMOOTHING}
    best = max(tables, key=lambda m: tables[m]["tau"])
    metrics = read_metrics(run)
    return {
        "curve": [m for m in metrics if m["kind"] == "replay"],
        "training": next(m for m in metrics if m["kind"] == "start"),
        "recipe": recipe.flat() | {"samples": str(samples_folder)},
        "best": figures(drafter, real),
        "bigram": tables[best] | {"smoothing": best},
        "shuffled_features": figures(drafter, batches(change=True)),
        "learned_tokens_available": int(samples.token_counts(learn).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=Path, required=True)
    arguments = parser.parse_args()
    recipe = load(arguments.run / "recipe.yaml")
    path = HERE / "learning_curve.json"
    found = cell(path, lambda: yardsticks(arguments.run, recipe, arguments.samples), recipe.seed)
    curve = found["curve"]
    rows = [
        [m["step"], f"{m['tokens']:,}", f"{m['seconds'] / 60:.1f}", number(m["tau"]),
         f"[{m['tau_ci'][0]:.3f}, {m['tau_ci'][1]:.3f}]", *(number(a) for a in m["alpha"])]
        for m in curve
    ]  # fmt: skip
    depths = range(len(curve[0]["alpha"]))
    head = ["step", "tokens seen", "minutes", "tau", "95% CI", *(f"alpha_{j}" for j in depths)]
    against = [
        [name, number(found[key]["tau"]), *(number(a) for a in found[key]["alpha"])]
        for name, key in (("EAGLE-3, best checkpoint", "best"),
                          ("bigram table of the same answers", "bigram"),
                          ("EAGLE-3, features shuffled between positions", "shuffled_features"))
    ]  # fmt: skip
    text = (
        "# Learning curve of `recipes/smol-eagle3.yaml`\n\n"
        "Replay on held-out answers of SmolLM2-135M-Instruct at temperature 1, "
        f"k={recipe.k}; tokens are target-made positions learned from, minutes are wall time with "
        "the evaluations, on two cores that other jobs shared. Made by "
        "`benchmarks/learning_curve.py` from `learning_curve.json`.\n\n"
        + markdown(head, rows)
        + "\n"
        + markdown(["", "tau", *(f"alpha_{j}" for j in depths)], against)
        + "\n![learning curve](learning_curve.png)\n"
    )
    (HERE / "learning_curve.md").write_text(text)
    plot(found)
    print(text)


def plot(found: dict[str, Any]) -> None:
    curve = found["curve"]
    tokens = [m["tokens"] / 1e3 for m in curve]
    figure, axes = plt.subplots(figsize=(6.4, 4))
    axes.fill_between(tokens, *zip(*(m["tau_ci"] for m in curve), strict=True), alpha=0.2)
    axes.plot(tokens, [m["tau"] for m in curve], marker="o", label="EAGLE-3 (95% CI over prompts)")
    axes.axhline(found["bigram"]["tau"], color="gray", linestyle="--", label="bigram table")
    axes.axhline(
        found["shuffled_features"]["tau"], color="firebrick", linestyle=":",
        label="best, features shuffled",
    )  # fmt: skip
    axes.set_xlabel("thousand target-made tokens learned from")
    axes.set_ylabel(f"replay tau at k={found['recipe']['k']}, temperature 1")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "learning_curve.png", dpi=120)


if __name__ == "__main__":
    main()
