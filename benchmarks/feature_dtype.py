"""What storing the target's states in fewer bits costs: a trained drafter's replay on them.

    OMP_NUM_THREADS=1 python benchmarks/feature_dtype.py --run runs/smol-eagle3

The run's own held-out texts are read once in fp32; then the drafter is replayed on the same states
as a cache would give them back: what it reads (taps), what p is made of (the pre-norm state), or
both. float8 is e4m3 with one scale a token and layer. Writes benchmarks/feature_dtype.{json,md}.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import HERE, cell, markdown
from torch import Tensor

from draftsmith.drafters import storage
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import replay
from draftsmith.train import recipe
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Samples

Store = Callable[[Tensor], Tensor]


def exact(states: Tensor) -> Tensor:
    return states


def bfloat16(states: Tensor) -> Tensor:
    return states.bfloat16().to(states.dtype)


def float8(states: Tensor) -> Tensor:
    scale = states.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (states / scale).to(torch.float8_e4m3fn).to(states.dtype) * scale


# Name -> (the taps, the pre-norm state, bytes of a number on average over 3 taps and that state).
STORES: dict[str, tuple[Store, Store, float]] = {
    "float32": (exact, exact, 4),
    "bfloat16": (bfloat16, bfloat16, 2),
    "float8, final in bfloat16": (float8, bfloat16, 1.25),
    "float8": (float8, float8, 1),
}


def stored(batch: Batch, taps: Store, final: Store) -> Batch:
    assert batch.final is not None
    features = {name: taps(values) for name, values in batch.features.items()}
    return replace(batch, features=features, final=final(batch.final))


def measure(run: Path) -> dict[str, Any]:
    chosen = recipe.load(run / "recipe.yaml")
    target = Target.load(chosen.target)
    drafter = storage.load(run / "best", target)
    samples = Samples.open(Path(str(chosen.samples)), target, audit=0)
    _, held = samples.split(chosen.heldout, chosen.seed)
    read = [target.read(collate(samples, [[i]], 2048), drafter.taps) for i in held]
    found: dict[str, Any] = {}
    for name, (taps, final, _) in STORES.items():
        batches = [stored(batch, taps, final) for batch in read]
        result = replay(drafter, batches, chosen.k, chosen.seed)[chosen.k]
        found[name] = {"tau": result.tau, "tau_ci": result.tau_ci, "alpha": result.alpha}
    return {"k": chosen.k, "texts": len(held), "stores": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/smol-eagle3"))
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    found = cell(arguments.output / "feature_dtype.json", lambda: measure(arguments.run))
    rows, first = [], found["stores"]["float32"]
    for name, (_, _, size) in STORES.items():
        here = found["stores"][name]
        shift = [f"{a - b:+.4f}" for a, b in zip(here["alpha"], first["alpha"], strict=True)]
        rows.append([name, f"{size:g}", f"{here['tau']:.4f}", " ".join(shift)])
    text = (
        "# States in fewer bits\n\n"
        + markdown(["stored as", "bytes a number", "tau", "alpha_j less that in float32"], rows)
        + f"\nReplay of a trained EAGLE-3 at k={found['k']} on {found['texts']} held-out texts of "
        "SmolLM2, T=1, the same states rounded. Made by `benchmarks/feature_dtype.py`.\n"
    )
    (arguments.output / "feature_dtype.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
