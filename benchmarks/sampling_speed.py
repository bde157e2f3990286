r"""Sampling in process against transformers' `generate`: tokens per second by batch size.

    OMP_NUM_THREADS=2 python benchmarks/sampling_speed.py --threads 2

What `draftsmith sample` does (our decoder with drafting off, rows that end leave the batch) against
`generate` on a left-padded batch with its default cache, on draftsmith's own prompts, in fp32 on
the CPU or in the checkpoint's dtype on a GPU. Only tokens up to each answer's end count. At T=0
both sides must write the same tokens; at T=1 they draw other ones. Repeats take turns, and the
fastest of each counts. `--tiny` runs a random model of a few layers instead. Writes
benchmarks/sampling_speed/*.json and benchmarks/sampling_speed.md.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import HERE, cell, markdown, number

from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.speed import synthetic
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

TOKENS, REPEATS = 96, 2
BATCHES = (8, 32, 128)
TEMPERATURES = (1.0, 0.0)


def cut(tokens: list[int], ends: set[int]) -> list[int]:
    """Tokens up to the first end, itself included."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: at + 1]


def ours(decoder: Decoder, prompts: list[list[int]], sampler: Sampler) -> list[list[int]]:
    return [text.tokens for text in decoder.generate(prompts, sampler, TOKENS)]


def theirs(target: Target, hf: Any, prompts: list[list[int]], sampler: Sampler) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device
    )
    how: dict[str, Any] = {"do_sample": False}
    if not sampler.greedy:
        how = {"do_sample": True, "temperature": sampler.temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        out = hf.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, pad_token_id=0, **how)
    ends = set(target.eos_ids)
    return [cut(row, ends) for row in out[:, width:].tolist()]


def measure(target: Target, prompts: list[list[int]], sampler: Sampler) -> dict[str, Any]:
    hf = copy.deepcopy(target.hf)
    hf.set_attn_implementation("sdpa")
    decoder = Decoder(target)
    sides: dict[str, Callable[[], list[list[int]]]] = {
        "ours": lambda: ours(decoder, prompts, sampler),
        "generate": lambda: theirs(target, hf.eval(), prompts, sampler),
    }
    best = dict.fromkeys(sides, 0.0)
    written: dict[str, list[list[int]]] = {}
    for _ in range(REPEATS):
        for name, side in sides.items():
            began = time.perf_counter()
            written[name] = side()
            tokens = sum(map(len, written[name]))
            best[name] = max(best[name], tokens / (time.perf_counter() - began))
    clock = decoder.clock
    passes = (clock.prefill + clock.verify) / (clock.prefill + clock.total)
    same = sum(a == b for a, b in zip(*written.values(), strict=True))
    lengths = sorted(len(tokens) for tokens in written["ours"])
    return {
        "batch": len(prompts),
        "temperature": sampler.temperature,
        "tokens_per_second": best,
        "ratio": best["ours"] / best["generate"],
        "in_target": passes,
        "equal_texts": same if sampler.greedy else None,
        "median_tokens": lengths[len(lengths) // 2],
        "device": str(target.device),
    }


def report(cells: list[dict[str, Any]], folder: Path) -> None:
    rows = [
        [
            c["batch"],
            f"{c['temperature']:g}",
            number(c["tokens_per_second"]["ours"], 0),
            number(c["tokens_per_second"]["generate"], 0),
            f"{c['ratio']:.2f}x",
            f"{c['in_target']:.1%}" if "in_target" in c else "-",  # cells of old lack it
            "-" if c["equal_texts"] is None else f"{c['equal_texts']} of {c['batch']}",
        ]
        for c in cells
    ]
    head = ["batch", "T", "tokens/s, ours", "tokens/s, generate", "ratio", "in the target",
            "equal texts"]  # fmt: skip
    text = (
        f"# Sampling in process\n\nAt most {TOKENS} new tokens, "
        f"{cells[0]['machine']['threads']} threads, {cells[0]['device']}. In the "
        "target: the share of our seconds in its passes, which both sides make. Made by "
        "`benchmarks/sampling_speed.py`; one JSON a cell.\n\n" + markdown(head, rows)
    )
    (folder / "sampling_speed.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.tiny:
        target = synthetic.random_target("tiny", torch.device("cpu"), torch.float32)
        prompts = synthetic.random_prompts(target, max(BATCHES))
    else:
        target = Target.load("smollm2")
        prompts = encode(product_prompts("train"), target)
    cells = []
    for batch in map(int, arguments.batches.split(",")):
        for temperature in TEMPERATURES:
            name = f"{'tiny' if arguments.tiny else 'smollm2'}-{batch}-t{temperature:g}.json"
            values = cell(
                arguments.output / "sampling_speed" / name,
                lambda batch=batch, t=temperature: measure(target, prompts[:batch], Sampler(t)),
            )
            cells.append(values)
            report(cells, arguments.output)


if __name__ == "__main__":
    main()
