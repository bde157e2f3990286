"""Packed rows against padded ones: what a training step over the same samples costs.

    OMP_NUM_THREADS=1 python benchmarks/packing.py --samples samples/smol

The same samples of SmolLM2, their real lengths, go through the target and an EAGLE-3 head with its
gradients: packed first-fit into rows of --length (as `draftsmith train` does), or one sample a row,
padded to the longest of its batch, in the order of the epoch or sorted by length. Batches hold as
many tokens, padding included, as a packed one. The losses must be equal: packing changes no text's
numbers. Writes benchmarks/packing/*.json and benchmarks/packing.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import HERE, cell, markdown, number

from draftsmith.drafters.base import family
from draftsmith.drafters.target import Target
from draftsmith.train.objective import Objective, backward, denominator
from draftsmith.train.packing import Cursor, Stream, collate
from draftsmith.train.samples import Samples
from draftsmith.train.weights import DepthWeights

DEPTHS, ROWS, CHUNK, SEED = 3, 2, 1024, 0
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


def measure(target: Target, samples: Samples, kind: str, count: int, length: int) -> dict[str, Any]:
    torch.manual_seed(SEED)
    cls = family("eagle")
    drafter = cls.create(target, cls.Config(), torch.arange(target.vocab_size))
    objective = Objective("kl", DepthWeights("geometric"))
    found = [collate(samples, rows, length) for rows in batches(samples, kind, count, length)]
    total = sum(denominator(batch, DEPTHS, objective) for batch in found)
    loss = 0.0
    began = time.perf_counter()
    for batch in found:
        target.read(batch, drafter.taps)
        loss += backward(drafter, batch, DEPTHS, objective, total, CHUNK).loss
    seconds = time.perf_counter() - began
    made = sum(int(batch.made.sum()) for batch in found)
    slots = sum(batch.tokens.numel() for batch in found)
    return {
        "kind": kind,
        "seconds": seconds,
        "batches": len(found),
        "made": made,
        "slots": slots,
        "padding": 1 - sum(int((b.segment >= 0).sum()) for b in found) / slots,
        "tokens_per_second": made / seconds,
        "loss": loss / total,
    }


def report(cells: list[dict[str, Any]], folder: Path, length: int) -> None:
    first = cells[0]["tokens_per_second"]
    rows = [
        [c["kind"], f"{c['padding']:.1%}", number(c["tokens_per_second"], 1),
         f"{first / c['tokens_per_second']:.2f}x", number(c["loss"], 6)]
        for c in cells
    ]  # fmt: skip
    head = ["rows", "padding", "target-made tokens/s", "packed is faster by", "loss"]
    text = (
        f"# Packing\n\nEAGLE-3 of SmolLM2, the same {cells[0]['made']:,} target-made tokens, rows "
        f"of at most {length}. Made by `benchmarks/packing.py`; one JSON a cell.\n\n"
        + markdown(head, rows)
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
    target = Target.load("smollm2")
    samples = Samples.open(arguments.samples, target, audit=0)
    cells = []
    for kind in KINDS:
        name = kind.replace(", ", "-").replace(" ", "-")
        values = cell(
            arguments.output / "packing" / f"{name}.json",
            lambda kind=kind: measure(target, samples, kind, arguments.rows, arguments.length),
            SEED,
        )
        cells.append(values)
        report(cells, arguments.output, arguments.length)


if __name__ == "__main__":
    main()
