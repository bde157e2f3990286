"""What tau costs: replay against decoding, for a confidence interval of the same width.

    DATA=folder python benchmarks/replay_cost.py --eagle runs/smol-eagle3/best

Decodes 8 held-out prompts (128 tokens, T=1, k=4), then replays the same texts. Intervals are
bootstraps over prompts; a decoder would need (its width / replay's width)^2 times as many prompts
for replay's width. Loading is in neither figure. Texts are needed once a target, and serve the
replay of every later checkpoint; decoding starts anew for each. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE, cell, data, markdown

from draftsmith.drafters import storage
from draftsmith.drafters.base import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import replay
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.evaluate import read_decoded
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.sources import read_prompts

K, TOKENS, PROMPTS, SEED = 4, 128, 8, 0


def measure(folder: Path) -> dict[str, Any]:
    target = Target.load("smollm2")
    drafter = storage.load(folder, target)
    short = [
        ids for ids in encode(read_prompts(data("spec_bench.jsonl")), target) if len(ids) < 256
    ]
    prompts = short[:: len(short) // PROMPTS][:PROMPTS]
    sampler = Sampler(1.0)
    decoder = Decoder(target, drafter, Policy(K))
    decoder.generate(prompts[:1], sampler, 8)  # warm-up
    began = time.perf_counter()
    texts = [
        decoder.generate([p], sampler, TOKENS, rows=[i], seed=SEED)[0]
        for i, p in enumerate(prompts)
    ]
    decoded = time.perf_counter() - began
    began = time.perf_counter()
    found = replay(drafter, read_decoded(target, drafter, texts, sampler, batch_size=1), K)[K]
    replayed = time.perf_counter() - began
    tokens = np.array([len(t.tokens) - 1 for t in texts], dtype=float)
    passes = np.array([len(t.rounds) for t in texts], dtype=float)
    drawn = np.random.default_rng(SEED).integers(0, len(texts), (1000, len(texts)))
    low, high = np.percentile(tokens[drawn].sum(1) / passes[drawn].sum(1), [2.5, 97.5])
    return {
        "decode": {"seconds": decoded, "tau": tokens.sum() / passes.sum(), "ci": [low, high]},
        "replay": {"seconds": replayed, "tau": found.tau, "ci": list(found.tau_ci)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eagle", type=Path, required=True)
    found = cell(HERE / "replay_cost.json", lambda: measure(parser.parse_args().eagle), SEED)
    width = {name: found[name]["ci"][1] - found[name]["ci"][0] for name in ("decode", "replay")}
    more = (width["decode"] / width["replay"]) ** 2
    same = found["decode"]["seconds"] * more
    rows = [
        [name, f"{found[name]['seconds']:.1f}", f"{found[name]['tau']:.3f}", f"{width[name]:.3f}",
         f"{seconds:.1f}"]
        for name, seconds in (("decode", same), ("replay", found["replay"]["seconds"]))
    ]  # fmt: skip
    head = ["", "seconds", "tau", "95% CI width", "seconds for replay's width"]
    text = (
        f"# Replay against decoding\n\n{PROMPTS} prompts, {TOKENS} tokens, T=1, k={K}, EAGLE-3 for "
        "SmolLM2-135M-Instruct on CPU. Made by `benchmarks/replay_cost.py`.\n\n"
        + markdown(head, rows)
        + f"\nFor the same width replay costs {found['replay']['seconds'] / same:.3f} of "
        "decoding.\n"
    )
    (HERE / "replay_cost.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
