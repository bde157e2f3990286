"""Where speculation pays on the CPU: break-even tau by k and node budget, and the distance to it.

    OMP_NUM_THREADS=1 python benchmarks/break_even.py --eagle runs/smol-eagle3/best \\
        --small runs/smol-small/best

SmolLM2, batch 1, T=0 and 1, on the product's held-out code, math and chat prompts. Chains of every
drafter, trees of EAGLE-3. Goes on where it was stopped: benchmarks/break_even/bench.json holds each
finished cell. Writes benchmarks/break_even.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import HERE

from draftsmith.drafters import base, storage
from draftsmith.drafters.base import Policy
from draftsmith.drafters.passes import layers
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.target.target import Target
from draftsmith.eval.report.provenance import provenance
from draftsmith.eval.speed import bench, bench_table, clocks
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

DOMAINS, EACH, TOKENS = ("code", "math", "chat"), 2, 40
CHAINS = [Policy(k) for k in (2, 4)]
TREES = [Tree(k=4, budget=budget, branch=4) for budget in (8, 16)]
TEMPERATURES = [0.0, 1.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eagle", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    target = Target.load("smollm2")
    layers.choose(layers.able(target))
    ngram = base.family("ngram")
    drafters = {
        "ngram": ngram.create(target, ngram.Config()),
        "small": storage.load(arguments.small, target),
        "eagle": storage.load(arguments.eagle, target),
    }
    held_out = product_prompts("heldout")
    chosen = [p for name in DOMAINS for p in [q for q in held_out if q.domain == name][:EACH]]
    prompts = [
        bench.BenchPrompt(ids, p.domain)
        for ids, p in zip(encode(chosen, target), chosen, strict=True)
    ]
    cells = bench.grid(drafters, CHAINS, [1], TEMPERATURES)
    cells += bench.grid({"eagle": drafters["eagle"]}, TREES, [1], TEMPERATURES)
    settings = {
        "target": target.source.spec,
        "alpha": None,
        "prompts": len(prompts),
        "max_new_tokens": TOKENS,
        "warm_up": clocks.WARM_UP,
    }
    about = bench.device_of(target) | provenance()
    store = bench.Store(arguments.output / "break_even", settings, about)
    bench.run(
        target, drafters, cells, prompts, TOKENS, store,
        progress=lambda cell: print(f"{len(store.cells)} cells, {cell.key}", flush=True),
    )  # fmt: skip
    text = bench_table.markdown(store.content)
    (arguments.output / "break_even.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
