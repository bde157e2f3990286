"""accelerate launch -m draftsmith.train RECIPE.yaml key=value ..

RECIPE is a file or the name of a shipped recipe. Example:

    accelerate launch -m draftsmith.train smol-eagle3 samples=samples/smol lr=5e-4
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator

from draftsmith.drafters.base import family
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import Target
from draftsmith.train import checkpoint, recipe
from draftsmith.train.loop import Trainer
from draftsmith.train.prompts import product_prompts, read_prompts
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import Samples, generate


def run(path: str, overrides: Sequence[str]) -> int:
    """Trains a recipe; the process's exit code. Raises UserError before compute is spent."""
    chosen = recipe.load(path, overrides)
    accelerator = _accelerator(chosen)
    target = Target.load(chosen.target, accelerator.device)
    checkpoint.claim(chosen)
    samples = _samples(chosen, target)
    if chosen.tracker != "none":
        accelerator.init_trackers("draftsmith", chosen.flat(), {"wandb": {"name": chosen.name}})
    return Trainer(chosen, target, samples, accelerator).run()


def _accelerator(chosen: Recipe) -> Accelerator:
    if chosen.tracker == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError("tracker: wandb is not installed; pip install wandb, or tracker: none")
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return Accelerator(
        mixed_precision="bf16" if bf16 else "no",
        log_with=None if chosen.tracker == "none" else chosen.tracker,
        project_dir=str(chosen.folder),
    )


def _samples(chosen: Recipe, target: Target) -> Samples:
    """The recipe's samples: a given folder, or the target's answers to prompts, made first."""
    if chosen.samples is not None:
        samples = Samples.open(Path(chosen.samples), target)
        if samples.sampler != chosen.sampler:
            raise UserError(
                f"{chosen.samples}: drawn at {samples.sampler}, the recipe trains for "
                f"{chosen.sampler}; set temperature, top_k and top_p to match, or sample anew"
            )
        return samples
    # Settings the target cannot take are told now, not after an hour of sampling.
    family(chosen.drafter)(target, chosen.drafter_config())
    prompts = read_prompts(Path(chosen.prompts)) if chosen.prompts else product_prompts("train")
    began = time.perf_counter()
    samples = generate(
        target, prompts, chosen.sampler, chosen.max_new_tokens, chosen.folder / "samples",
        seed=chosen.seed,
    )  # fmt: skip
    print(f"samples: ready in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    """The module's command line; a user's mistake is one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        return run(arguments[0], arguments[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
