"""accelerate launch -m draftsmith.train RECIPE.yaml key=value ..

RECIPE is a file or the name of a shipped recipe. Example:

    accelerate launch -m draftsmith.train smol-eagle3 samples=samples/smol lr=5e-4

Several processes learn from rows of their own and answer prompts of their own; `runs` must lie on
a disk that all of them share. A run goes on with any number of processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env

from draftsmith.drafters.base import family
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint, lora, recipe, trackers
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.sources import prompts_to_learn
from draftsmith.train.learner import Learner
from draftsmith.train.loop import Run
from draftsmith.train.medusa2 import Medusa2
from draftsmith.train.plan import plan
from draftsmith.train.processes import check_device_map, launched
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import store
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.samples import Samples


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains RECIPE; the process's exit code. A user's mistake is one line and code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        return run(recipe.load(arguments[0], arguments[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(chosen: Recipe, target: Target | None = None) -> int:
    """Trains a recipe that was read: its samples first where it names none, then the drafter.

    target: the recipe's own where the caller has it loaded. Returns the process's exit code. Raises
    UserError before compute is spent.
    """
    trackers.check(chosen)
    _check_launch(chosen)
    sources: list[str] = []  # a line about each
    prompts = _prompts(chosen, sources.append)
    with launched() as processes:
        if processes.count > 1 and processes.device.type != "cpu":
            torch.accelerator.set_device_index(processes.local)
        plan.check(chosen, prompts)
        with checkpoint.claimed(chosen) if processes.main else nullcontext():
            processes.meet()  # the folder is this launch's own
            target = target or Target.load(
                chosen.target, processes.device, device_map=chosen.device_map
            )
            # What configs alone do not show (another tokenizer), before anything is sampled.
            family(chosen.drafter)(target, chosen.drafter_config())
            if chosen.adapt:
                lora.check_target(target, chosen.adapt)
            if prompts is None:
                samples = Samples.open(Path(str(chosen.samples)), target)
            else:
                began = time.perf_counter()
                samples = generate(
                    target, prompts, chosen.sampler, chosen.max_new_tokens,
                    chosen.folder / "samples", seed=chosen.seed, notes=sources,
                    processes=processes,
                )  # fmt: skip
                if processes.main:
                    seconds = time.perf_counter() - began
                    print(f"samples: ready in {seconds:.0f} s", file=sys.stderr)
            processes.meet()  # the data is ready: from here on no process waits for long
            accelerator = _accelerator(chosen)
            trackers.start(accelerator, chosen)
            step = Medusa2 if chosen.adapt else Learner
            code = Run(step(chosen, target, samples, accelerator)).run(processes)
            accelerator.end_training()  # of a run that SIGTERM stopped too
            return code


def _check_launch(chosen: Recipe) -> None:
    """Raises UserError for what a launcher asks and the loop does not do."""
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise UserError(
                f"accelerate config: {name} is not supported: every process holds the whole "
                "drafter. Launch with --multi_gpu; a target that one device cannot hold is spread "
                "by device_map: auto"
            )
    # "no" is what accelerate launch sets by default.
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", "bf16"):
        raise UserError(
            f"accelerate launch: --mixed_precision {asked} is not done here: it is bf16 where the "
            "GPU has it, else fp32; leave it out"
        )
    check_device_map(chosen.device_map)


def _accelerator(chosen: Recipe) -> Accelerator:
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return Accelerator(
        # Else accelerate overlooks that torchrun started several processes on a CPU.
        cpu=not torch.accelerator.is_available(),
        mixed_precision="bf16" if bf16 else "no",
        log_with=chosen.tracker or None,
        project_dir=str(chosen.folder),
    )


def _prompts(chosen: Recipe, say: Callable[[str], None]) -> list[Prompt] | None:
    """The prompts that the target is to answer first; None where samples are given and fit."""
    if chosen.samples is None:
        return prompts_to_learn(chosen.prompts, say)
    drawn_at = Sampler(**store.read_manifest(Path(chosen.samples))["sampler"])
    if drawn_at != chosen.sampler:
        raise UserError(
            f"{chosen.samples}: drawn at {drawn_at}, the recipe trains for {chosen.sampler}; "
            "set temperature, top_k and top_p to match, or sample anew"
        )
    return None
