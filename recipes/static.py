"""draftsmith eval --static: a tree of one shape, chosen on conversations that the run held out."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.target import Target
from draftsmith.eval.static_tree import Calibrated, calibrate
from draftsmith.recipes.report import read_run, samples_of
from draftsmith.train.packing import alone, collate
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import Samples

READ = 4  # conversations read at a time


def run_of(checkpoint: Path) -> tuple[Path, Recipe]:
    """The run that a checkpoint lies in. Raises UserError where it lies in none."""
    run = checkpoint.resolve().parent
    recipe, _ = read_run(run)
    return run, recipe


def calibrated(
    run: Path, recipe: Recipe, target: Target, drafter: Drafter, policy: Policy
) -> Calibrated:
    """The best static tree of the policy's depth and nodes. Raises UserError as samples do."""
    samples = Samples.open(samples_of(run, recipe), target, audit=0)
    _, heldout = samples.split(recipe.heldout, recipe.seed)
    batches = []
    for rows in alone(samples, heldout, READ):
        batch = collate(samples, rows, target.max_positions).to(target.device)
        batches.append(target.read(batch, drafter.taps))
    return calibrate(drafter, batches, policy.k, policy.nodes - 1)


def told(found: Calibrated, recipe: Recipe) -> str:
    """The tree in two lines: what it promises, and its paths as ranks from the root on."""
    paths = "  ".join(".".join(map(str, path)) for path in found.tree.paths)
    return (
        f"{found.tree}, chosen on {recipe.heldout} held-out conversations at {recipe.sampler}: "
        f"tau {found.expected_tau:.3f} by the ranks' hit rates, {found.tau:.3f} walked\n"
        f"its paths  {paths}"
    )
