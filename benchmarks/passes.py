"""What a pass over few tokens costs on a CPU: by width, before and after our kernels and compiling.

    python benchmarks/passes.py --eagle runs/smol-eagle3/best

SmolLM2, fp32, batch 1, with 1 and 2 threads, each in a process of its own. Four ways take turns,
pass by pass, so that a machine whose memory is slower for a while is so for all of them: torch's
own layers, our kernels, compiled layers, and (one token) transformers' `generate`. Shares of the
memory's speed are against reading the same weights, in the same turns. Medians. Writes
benchmarks/passes/*.json and benchmarks/passes.md; `--compile off` leaves compiled layers out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import HERE, cell, markdown, plain_hf
from torch import nn

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.passes import layers, narrow
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.attention import chain_step
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

WIDTHS, CONTEXT, TURNS, TOKENS = (1, 2, 3, 5, 9, 17), 150, 15, 32
POLICIES = {"k=2": Policy(2), "k=4": Policy(4), "tree of 8": Tree(k=4, budget=8, branch=4)}
WAYS = ("torch", "kernels", "compiled")


def use(target: Target, way: str) -> None:
    """Makes the target's passes go one of the WAYS."""
    narrow.restore(target)
    narrow._on = way != "torch"
    if way != "torch":
        narrow.prepare(target)
    compiled = layers.find(target)
    if compiled is not None:
        compiled.on = way == "compiled"


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def linears(weights: list[torch.Tensor], width: int) -> float:
    """Seconds of all linear layers' kernels, one after the other."""
    x = {size: torch.randn(width, size) for size in {w.shape[1] for w in weights}}
    op = torch.ops.draftsmith.linear.default
    return seconds(lambda: [op(x[w.shape[1]], w, None) for w in weights])


def generated(hf: Any, prompt: list[int], tokens: int) -> float:
    """Seconds of transformers' generate."""
    ids = torch.tensor([prompt])
    more = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    mask = torch.ones_like(ids)
    return seconds(lambda: hf.generate(ids, attention_mask=mask, pad_token_id=0, **more))


@torch.inference_mode()
@narrow.decoding()
def passes(target: Target, ways: tuple[str, ...], prompt: list[int]) -> dict[str, Any]:
    """Milliseconds of a pass with its head, by way and width; GB/s of reading the weights."""
    slab = target.cache(1, 512, max(WIDTHS))
    tokens = torch.tensor([prompt])
    slab.bound = 0
    target(tokens, chain_step(slab, len(prompt)))
    slab.commit(torch.tensor([len(prompt)]))
    slab.bound = len(prompt)
    weights = [m.weight for m in target.modules() if isinstance(m, nn.Linear)]
    size = sum(w.numel() * w.element_size() for w in weights)
    found: dict[str, dict[int, list[float]]] = {way: {w: [] for w in WIDTHS} for way in ways}
    linear: dict[int, list[float]] = {w: [] for w in WIDTHS}
    reading = []
    for _ in range(TURNS):
        for width in WIDTHS:
            for way in ways:
                use(target, way)
                step = chain_step(slab, width)
                run = lambda s=step, w=width: target.head(target(tokens[:, :w], s).final)  # noqa: E731
                found[way][width].append(seconds(run))
            linear[width].append(linears(weights, width))
        reading.append(seconds(lambda: [w.sum() for w in weights]))
    ms = {way: {w: 1e3 * median(times) for w, times in by.items()} for way, by in found.items()}
    rate = size / median(reading) / 1e9
    return {
        "ms": ms,
        "read_gb_per_s": rate,
        "linear_ms": {w: 1e3 * median(times) for w, times in linear.items()},
        "linear_share_of_read": {
            w: size / median(times) / 1e9 / rate for w, times in linear.items()
        },
    }


def loops(
    target: Target, eagle: Drafter, ways: tuple[str, ...], prompts: list[list[int]]
) -> dict[str, Any]:
    """Milliseconds a token of `generate` and of our loop; a round of EAGLE-3's by policy."""
    hf = plain_hf(target.hf)
    decoders = {"baseline": Decoder(target)}
    decoders |= {name: Decoder(target, eagle, policy) for name, policy in POLICIES.items()}
    clocks: dict[str, dict[str, list[tuple[float, float]]]] = {}
    theirs = []
    for prompt in prompts:
        times = [generated(hf, prompt, n) for n in (2, 2, 2 + TOKENS)]
        theirs.append((times[2] - times[1]) / TOKENS)
        for way in ways:
            use(target, way)
            for name, decoder in decoders.items():
                clock = decoder.clock
                before = clock.total, clock.draft, clock.rounds
                decoder.generate([prompt], Sampler(0.0), TOKENS)
                rounds = clock.rounds - before[2]
                spent = (clock.total - before[0]) / rounds, (clock.draft - before[1]) / rounds
                clocks.setdefault(way, {}).setdefault(name, []).append(spent)
    out: dict[str, Any] = {"generate_ms": 1e3 * median(theirs), "round_ms": {}, "draft_ms": {}}
    for way, by in clocks.items():
        out["round_ms"][way] = {n: 1e3 * median(t for t, _ in spent) for n, spent in by.items()}
        out["draft_ms"][way] = {n: 1e3 * median(d for _, d in spent) for n, spent in by.items()}
    return out


def measure(eagle: Path, threads: int, compiling: bool) -> dict[str, Any]:
    torch.set_num_threads(threads)
    target = Target.load("smollm2")
    drafter = storage.load(eagle, target)
    prompts = encode(product_prompts("heldout"), target)
    long = [i for prompt in prompts for i in prompt][:CONTEXT]
    layers.choose(compiling)
    Decoder(target, drafter, Policy(4)).generate([prompts[0]], Sampler(0.0), 4)  # makes all of them
    ways = WAYS if compiling and layers.find(target) else WAYS[:2]
    return passes(target, ways, long) | loops(target, drafter, ways, prompts[:3])


def rows(found: dict[str, Any], threads: int) -> tuple[list[list[str]], list[list[str]]]:
    by_width, by_loop = [], []
    for way, ms in found["ms"].items():
        ratios = [f"{ms[str(w)]:.1f} ({ms[str(w)] / ms['1']:.2f})" for w in WIDTHS]
        by_width.append([str(threads), way, *ratios])
        base = found["round_ms"][way]["baseline"]
        rounds = found["round_ms"][way]
        draft = found["draft_ms"][way]["k=4"] / 4
        by_loop.append(
            [str(threads), way, f"{base:.1f}", f"{found['generate_ms'] / base:.2f}x",
             *(f"{rounds[name] / base:.2f}" for name in POLICIES),
             f"{draft:.1f}", f"{100 * draft / ms['1']:.0f}%"]
        )  # fmt: skip
    share = found["linear_share_of_read"]
    read = f"linear alone, of {found['read_gb_per_s']:.0f} GB/s"
    by_width.append([str(threads), read, *(f"{100 * share[str(w)]:.0f}%" for w in WIDTHS)])
    return by_width, by_loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eagle", type=Path, required=True)
    parser.add_argument("--threads", type=int, help="this many alone; default: 1, then 2")
    parser.add_argument("--compile", choices=["on", "off"], default="on")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    file = arguments.output / "passes"
    if arguments.threads:
        count, on = arguments.threads, arguments.compile == "on"
        cell(file / f"threads-{count}.json", lambda: measure(arguments.eagle, count, on))
        return
    by_width: list[list[str]] = []
    by_loop: list[list[str]] = []
    for threads in (1, 2):
        command = [sys.executable, __file__, "--threads", str(threads), "--eagle"]
        command += [str(arguments.eagle), "--compile", arguments.compile]
        command += ["--output", str(arguments.output)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, env=environment)
        found = cell(file / f"threads-{threads}.json", dict)
        for table, more in zip((by_width, by_loop), rows(found, threads), strict=True):
            table += more
    text = (
        "# Passes over few tokens\n\nSmolLM2-135M-Instruct, fp32, CPU, batch 1, "
        f"{CONTEXT} tokens before; all ways in turns. Made by `benchmarks/passes.py`.\n\n"
        "Milliseconds of a pass with its head, and how many times one token's, by tokens:\n\n"
        + markdown(["threads", "way", *map(str, WIDTHS)], by_width)
        + "\nThe loop without drafting, against `generate`; the tau from which on EAGLE-3 pays (a "
        "round's time over a plain token's); a draft step:\n\n"
        + markdown(
            ["threads", "way", "ms a token", "of generate", *POLICIES, "draft step, ms",
             "of one token's pass"], by_loop,
        )
    )  # fmt: skip
    (arguments.output / "passes.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
