"""How much of what is read is padding, before and after batching by length, on a real mix.

    DATA=folder python benchmarks/padding.py --samples samples/smol

Counted, not timed: prompts of Spec-Bench, GSM8K, HumanEval and MBPP, shuffled, as the sampler
prefills them (with second turns after answers as long as SmolLM2's); its answers as the held-out
replay reads them, and as training packs them. Writes benchmarks/padding.{json,md}.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import HERE, cell, data, markdown

from draftsmith.drafters.target.target import Target
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.sources import read_prompts
from draftsmith.train.samples.packing import Cursor, Stream, buckets
from draftsmith.train.samples.samples import Samples

SETS = ("spec_bench.jsonl", "gsm8k.jsonl", "humaneval.jsonl", "mbpp.jsonl")
WINDOW = 8  # batches of conversations under way, as in train/samples/answers.py


def padding(batches: Sequence[Sequence[int]]) -> float:
    """Share of padding in batches of these lengths."""
    return 1 - sum(map(sum, batches)) / sum(max(batch) * len(batch) for batch in batches)


def cut(lengths: Sequence[int], size: int) -> list[Sequence[int]]:
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]


def by_length(lengths: Sequence[int], size: int, window: int = 1 << 60) -> list[list[int]]:
    """Batches by length within windows of so many."""
    return [[part[i] for i in g] for part in cut(lengths, window) for g in buckets(part, size)]


def second_turns(target: Target, prompts: list[Prompt], answers: Sequence[int]) -> list[int]:
    """Lengths of the conversations when the second turn is asked, longest first turns first."""
    draw = random.Random(0)
    asked = [p for p in prompts if p.later]
    later = [Prompt(p.later[0], None, p.domain) for p in asked]
    first, more = encode(asked, target), encode(later, target)
    order = sorted(range(len(asked)), key=lambda i: -len(first[i]))
    return [len(first[i]) + draw.choice(answers) + len(more[i]) for i in order]


def measure(folder: Path) -> dict[str, Any]:
    target = Target.load("smollm2")
    samples = Samples.open(folder, target, audit=0)
    prompts = [prompt for name in SETS for prompt in read_prompts(data(name))]
    random.Random(0).shuffle(prompts)
    first = [len(ids) for ids in encode(prompts, target)]
    texts = samples.lengths.tolist()
    answers = (samples.lengths - samples.first_made).tolist()
    second = second_turns(target, prompts, answers)
    random.Random(0).shuffle(texts)
    found: dict[str, list[float]] = {}
    for size in (16, 128):
        found[f"first turns, {size} rows"] = [padding(cut(first, size)),
                                              padding(by_length(first, size))]  # fmt: skip
    found["second turns, 16 rows"] = [padding(cut(second, 16)),
                                      padding(by_length(second, 16, 16 * WINDOW))]  # fmt: skip
    found["held-out replay, 4 rows"] = [padding(cut(texts, 4)), padding(by_length(texts, 4))]
    for length in (512, 2048):
        stream = Stream(samples, range(len(samples)), length, seed=0)
        rows, _ = stream.take(Cursor(), stream.rows_per_epoch(0))
        packed = [stream.tokens(row) for row in rows]
        found[f"packed rows of {length}, 8 a micro-batch, 4 a step"] = [
            padding(cut(packed, 8)), padding(by_length(packed, 8, 32))
        ]  # fmt: skip
    return {"prompts": len(prompts), "samples": len(samples), "shares": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    found = cell(arguments.output / "padding.json", lambda: measure(arguments.samples))
    rows = [[name, f"{a:.1%}", f"{b:.1%}"] for name, (a, b) in found["shares"].items()]
    text = (
        "# Padding\n\n"
        + markdown(["what is read", "padding, in the order given", "by length"], rows)
        + f"\n{found['prompts']} prompts, {found['samples']} answers of SmolLM2. First turns were "
        "batched by length before, too. Made by `benchmarks/padding.py`.\n"
    )
    (arguments.output / "padding.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
