"""Packed rows against padded ones: what a training step over the same samples costs.

    OMP_NUM_THREADS=1 python benchmarks/packing.py --samples samples/smol

The same samples of SmolLM2, their real lengths, go through the target and an EAGLE-3 head with its
gradients: packed first-fit into rows of --length (as `draftsmith train` does), or one sample a row,
padded to the longest of its batch, in the order of the epoch or sorted by length. Batches hold as
many tokens, padding included, as a packed one. The losses must be equal: packing changes no text's
numbers. The kinds take turns. Writes benchmarks/packing.json and benchmarks/packing.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import HERE, cell, markdown, number

from draftsmith.drafters.base import family
from draftsmith.drafters.batch import Batch, align
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.train.objective.losses import Objective, backward, denominator
from draftsmith.train.objective.weights import DepthWeights
from draftsmith.train.samples.packing import Cursor, Stream, collate
from draftsmith.train.samples.samples import Samples

DEPTHS, ROWS, CHUNK, SEED, REPEATS = 3, 2, 1024, 0, 3
KINDS = ("packed", "padded", "padded, sorted by length")


def batches(samples: Samples, kind: str, count: int, length: int) -> list[list[list[int]]]:
    """Batches of rows of sample indices; all kinds hold the same `count` packed rows' samples."""
    stream = Stream(samples, range(len(samples)), length, SEED)
    packed, _ = stream.take(Cursor(), count)
    if kind == "packed":
        return [packed[i : i + ROWS] for i in range(0, len(packed), ROWS)]
    order = [i for row in packed for i in row]
    sizes = samples.lengths.clamp(max=length).tolist()
    if "sorted" in kind:
        order.sort(key=lambda i: sizes[i])
    out: list[list[list[int]]] = []
    for i in order:
        rows = [*out[-1], [i]] if out else []
        if not rows or len(rows) * max(sizes[j] for (j,) in rows) > ROWS * length:
            out.append([[i]])
        else:
            out[-1] = rows
    return out


class Side:
    """One kind of rows, with a drafter of its own that starts as the others do."""

    def __init__(self, target: Target, samples: Samples, kind: str, count: int, length: int):
        torch.manual_seed(SEED)
        cls = family("eagle")
        self.target = target
        self.drafter = cls.create(target, cls.Config(), torch.arange(target.vocab_size))
        self.found = [
            collate(samples, rows, length) for rows in batches(samples, kind, count, length)
        ]
        self.objective = Objective("kl", DepthWeights("geometric"))
        self.total = sum(
            denominator(batch, align(batch, DEPTHS), self.objective) for batch in self.found
        )
        self.seconds: list[float] = []
        self.loss = 0.0

    def read(self, batch: Batch) -> float:
        """The loss of one batch; its gradients are added to the drafter's."""
        self.target.read(batch, self.drafter.taps)
        cells = align(batch, DEPTHS)
        return backward(self.drafter, batch, cells, self.objective, self.total, CHUNK).loss

    def turn(self) -> None:
        """Reads all batches once, timed."""
        self.drafter.zero_grad(set_to_none=True)
        began = time.perf_counter()
        self.loss = sum(self.read(batch) for batch in self.found) / self.total
        self.seconds.append(time.perf_counter() - began)

    def figures(self) -> dict[str, Any]:
        made = sum(int(batch.made.sum()) for batch in self.found)
        slots = sum(batch.tokens.numel() for batch in self.found)
        return {
            "seconds": self.seconds,
            "batches": len(self.found),
            "made": made,
            "slots": slots,
            "padding": 1 - sum(int((b.segment >= 0).sum()) for b in self.found) / slots,
            "tokens_per_second": made / statistics.median(self.seconds),
            "loss": self.loss,
        }


def measure(target: Target, samples: Samples, count: int, length: int) -> dict[str, Any]:
    """All kinds in turns, REPEATS times, after one batch each to warm up. UserError where their
    losses differ."""
    sides = {kind: Side(target, samples, kind, count, length) for kind in KINDS}
    for side in sides.values():
        side.read(side.found[0])
    for _ in range(REPEATS):
        for side in sides.values():
            side.turn()
    losses = [side.loss for side in sides.values()]
    if max(losses) > min(losses) * (1 + 1e-5):
        raise UserError(f"losses differ: {losses}")
    return {"length": length, "kinds": {kind: side.figures() for kind, side in sides.items()}}


def report(found: dict[str, Any], folder: Path) -> None:
    kinds = found["kinds"]
    first = kinds["packed"]["tokens_per_second"]
    rows = [
        [kind, f"{c['padding']:.1%}", number(c["tokens_per_second"], 1),
         f"{first / c['tokens_per_second']:.2f}x", number(c["loss"], 6)]
        for kind, c in kinds.items()
    ]  # fmt: skip
    head = ["rows", "padding", "target-made tokens/s", "packed is faster by", "loss"]
    text = (
        f"# Packing\n\nEAGLE-3 of SmolLM2, target and head with its gradients, the same "
        f"{kinds['packed']['made']:,} target-made tokens, rows of at most {found['length']}, "
        f"{found['machine']['threads']} thread; median of {REPEATS} turns. Made by "
        "`benchmarks/packing.py`; JSON beside it.\n\n" + markdown(head, rows)
    )
    (folder / "packing.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=24, help="packed rows")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def run() -> dict[str, Any]:
        target = Target.load("smollm2")
        samples = Samples.open(arguments.samples, target, audit=0)
        return measure(target, samples, arguments.rows, arguments.length)

    report(cell(arguments.output / "packing.json", run, SEED), arguments.output)


if __name__ == "__main__":
    main()
