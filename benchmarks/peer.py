r"""Our decoder against transformers' assisted generation: same target, drafter, prompts, run.

    OMP_NUM_THREADS=1 python benchmarks/peer.py --small runs/smol-small/best

T=0, fp32, batch 1, one thread, on the CPU. The assistant is the `small` drafter's own HF model, its
draft length fixed at k (no schedule, no confidence cut). Both sides' texts must be equal, and their
target passes are counted, prefill being one: transformers drafts before its first target pass, we
after ours, so that the counts can differ by a few; "per pass" is the ratio with that taken out.
Without drafting: our loop with drafting off against `generate` with its default cache.

Repeats take turns, and the fastest of each counts. `--tiny` leaves SmolLM2 out. Writes
benchmarks/peer/*.json and benchmarks/peer.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import HERE, cell, markdown, plain_hf

from draftsmith.drafters import base, storage
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.speed import synthetic
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

K, TOKENS, PROMPTS, REPEATS = 4, 64, 4, 3


class Passes:
    """Counts a model's forward calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._one)

    def _one(self, *_: Any) -> None:
        self.count += 1


def measure(target: Target, drafter: Drafter | None, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens per second of both sides; with an assistant where there is a drafter."""
    hf = plain_hf(target.hf)
    more: dict[str, Any] = {}
    if drafter is not None:
        more["assistant_model"] = assistant = plain_hf(drafter.lm.hf)
        for config in (assistant.generation_config, hf.generation_config):
            config.num_assistant_tokens = K
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
    passes = Passes(hf)
    decoder = Decoder(target, drafter, Policy(K) if drafter is not None else None)
    rounds = 0

    def theirs(tokens: int) -> list[list[int]]:
        out = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            written = hf.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                pad_token_id=0, **more,
            )  # fmt: skip
            out.append(written[0, len(prompt) :].tolist())
        return out

    def ours(tokens: int) -> list[list[int]]:
        nonlocal rounds
        texts = [decoder.generate([p], Sampler(0.0), tokens)[0] for p in prompts]
        rounds = sum(len(t.rounds) + 1 for t in texts)  # prefill is a pass too
        return [t.tokens for t in texts]

    sides: dict[str, Callable[[int], list[list[int]]]] = {"ours": ours, "theirs": theirs}
    for side in sides.values():
        side(4)  # warm-up
    best = dict.fromkeys(sides, float("inf"))
    texts = {}
    for _ in range(REPEATS):
        for name, side in sides.items():
            passes.count = 0
            began = time.perf_counter()
            texts[name] = side(TOKENS)
            best[name] = min(best[name], time.perf_counter() - began)
    tokens = sum(map(len, texts["ours"]))
    counted = {"ours": rounds, "theirs": passes.count}
    return {
        "equal_texts": sum(a == b for a, b in zip(texts["ours"], texts["theirs"], strict=True)),
        "texts": len(prompts),
        "tokens": tokens,
        "passes": counted,
        "tokens_per_s": {name: tokens / best[name] for name in sides},
        "ratio": best["theirs"] / best["ours"],
        "ratio_per_pass": best["theirs"] / counted["theirs"] * counted["ours"] / best["ours"],
    }


def pruned(target: Target, layers: list[int]) -> Drafter:
    small = base.family("small")
    return small.create(target, small.Config(layers=layers)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", type=Path)
    parser.add_argument("--tiny", action="store_true", help="leave SmolLM2 out")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    if not arguments.tiny and arguments.small is None:
        parser.error("give --small, or --tiny")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    tiny = synthetic.random_target("tiny", device, torch.float32)
    asked = synthetic.random_prompts(tiny, PROMPTS, 16)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "tiny-baseline": lambda: measure(tiny, None, asked),
        "tiny-pruned": lambda: measure(tiny, pruned(tiny, [0, 7]), asked),
        "tiny-itself": lambda: measure(tiny, pruned(tiny, list(range(8))), asked),
    }
    if not arguments.tiny:
        smol = Target.load("smollm2")
        short = encode(product_prompts("heldout"), smol)[:PROMPTS]
        cases["smollm2-baseline"] = lambda: measure(smol, None, short)
        cases["smollm2-small"] = lambda: measure(smol, storage.load(arguments.small, smol), short)
    rows = []
    for name, run in cases.items():
        found = cell(arguments.output / "peer" / f"{name}.json", run)
        speed, counted = found["tokens_per_s"], found["passes"]
        rows.append(
            [name, f"{speed['ours']:.1f}", f"{speed['theirs']:.1f}", f"{found['ratio']:.2f}x",
             f"{found['ratio_per_pass']:.2f}x", f"{counted['ours']} / {counted['theirs']}",
             f"{found['equal_texts']}/{found['texts']}"]
        )  # fmt: skip
    head = ["case", "ours, tokens/s", "transformers", "ratio", "per pass", "passes", "equal texts"]
    text = (
        f"# Against transformers' generate\n\nT=0, fp32, CPU, one thread, batch 1, k={K}, {TOKENS} "
        "tokens, prefill in both figures. tiny: a random 8-layer model (hidden 64), its drafter "
        "itself with layers left out, or whole (itself: every draft right). Made by "
        "`benchmarks/peer.py`.\n\n" + markdown(head, rows)
    )
    (arguments.output / "peer.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
