"""What a round costs outside module forwards, at batch 1 on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py --eagle runs/smol-eagle3/best \
        --small runs/smol-small/best

Inside are calls of modules (embedding, layers with their attention, norms, lm_head; of the drafter
likewise) and of attention; outside is the rest of a round: softmax, sampling,
masks, accept rule, commit, Python. In CPU seconds of the one thread, so that other processes do
not count. `--tiny` runs an untrained pair that takes seconds, where overhead is most of a round.
Writes benchmarks/overhead/*.json and benchmarks/overhead.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import HERE, cell, markdown
from torch import nn

from draftsmith.drafters import base, storage
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.passes import narrow
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.speed import synthetic
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

TOKENS, ALLOWED = 48, 0.10
POLICIES = (Policy(4), Tree(k=4, budget=16, branch=8))


class Inside:
    """CPU seconds spent inside the outermost of the marked calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._since = 0.0

    def enter(self, *_: Any) -> None:
        if not self._depth:
            self._since = time.thread_time()
        self._depth += 1

    def leave(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.thread_time() - self._since

    @contextmanager
    def marking(self, modules: list[nn.Module]) -> Iterator[None]:
        """Marks the modules' calls, and attention's."""
        hooks = [m.register_forward_pre_hook(self.enter) for m in modules]
        hooks += [m.register_forward_hook(self.leave) for m in modules]

        def marked(plain: Callable) -> Callable:
            def attention(*args: Any, **kwargs: Any) -> Any:
                self.enter()
                try:
                    return plain(*args, **kwargs)
                finally:
                    self.leave()

            return attention

        kept = F.scaled_dot_product_attention, narrow.attend
        F.scaled_dot_product_attention, narrow.attend = marked(kept[0]), marked(kept[1])
        try:
            yield
        finally:
            F.scaled_dot_product_attention, narrow.attend = kept
            for hook in hooks:
                hook.remove()


def marked(target: Target, drafter: Drafter | None) -> list[nn.Module]:
    """The largest modules that hold no masks or sampling: layers, norms, heads, projections."""
    models = [target] + ([drafter.lm] if drafter is not None and hasattr(drafter, "lm") else [])
    out: list[nn.Module] = []
    for model in models:
        decoder = model.hf.get_decoder()
        out += [m for m in decoder.children() if not isinstance(m, nn.ModuleList)]
        out += [*model.layers, model.lm_head]
    if drafter is not None and not hasattr(drafter, "lm"):
        out += [m for m in drafter.modules() if m is not drafter]
    return list(dict.fromkeys(out))


@torch.inference_mode()
def measure(
    target: Target,
    drafter: Drafter | None,
    policy: Policy | None,
    temperature: float,
    prompts: list[list[int]],
) -> dict[str, Any]:
    decoder, inside = Decoder(target, drafter, policy), Inside()
    sampler = Sampler(temperature)
    decoder.generate(prompts[:1], sampler, 8)  # warm-up
    spans: list[tuple[float, float]] = []  # CPU seconds of each round, and those inside
    last: tuple[float, float] | None = None  # the clocks at the last round's end

    def mark(new: int) -> None:
        nonlocal last
        now = time.thread_time(), inside.seconds
        if last is not None:  # a text's first round would hold its prefill
            spans.append((now[0] - last[0], now[1] - last[1]))
        last = now

    with inside.marking(marked(target, drafter)):
        for row, prompt in enumerate(prompts):
            last = None
            decoder.generate([prompt], sampler, TOKENS, rows=[row], progress=mark)
    rounds = len(spans)
    total, within = (sum(part) for part in zip(*spans, strict=True))
    return {
        "rounds": rounds,
        "round_ms": 1e3 * total / rounds,
        "outside_ms": 1e3 * (total - within) / rounds,
        "share": (total - within) / total,
    }


def tiny_pair() -> tuple[Target, dict[str, Drafter | None], list[list[int]]]:
    target = synthetic.random_target("tiny", torch.device("cpu"), torch.float32)
    drafters = {"baseline": None, "eagle": synthetic.random_eagle(target)}
    return target, drafters, synthetic.random_prompts(target, 2, 16)


def real_pairs(
    eagle: Path, small: Path
) -> tuple[Target, dict[str, Drafter | None], list[list[int]]]:
    target = Target.load("smollm2")
    ngram = base.family("ngram")
    drafters = {
        "baseline": None,
        "ngram": ngram.create(target, ngram.Config()),
        "small": storage.load(small, target),
        "eagle": storage.load(eagle, target),
    }
    return target, drafters, encode(product_prompts("heldout"), target)[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eagle", type=Path)
    parser.add_argument("--small", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    if not arguments.tiny and not (arguments.eagle and arguments.small):
        parser.error("give --eagle and --small, or --tiny")
    torch.set_num_threads(1)
    name = "SYNTHETIC tiny" if arguments.tiny else "SmolLM2-135M-Instruct"
    pair = tiny_pair() if arguments.tiny else real_pairs(arguments.eagle, arguments.small)
    target, drafters, prompts = pair
    rows = []
    for family, drafter in drafters.items():
        for policy in POLICIES:
            if drafter is None and policy is not POLICIES[0]:
                continue
            if drafter is not None and not policy.is_chain and not drafter.trees:
                continue
            for temperature in (0.0, 1.0):
                how = "-" if drafter is None else str(policy)
                kind = "chain" if policy.is_chain else "tree"
                found = cell(
                    arguments.output
                    / ("overhead-tiny" if arguments.tiny else "overhead")
                    / f"{family}-{kind}-t{temperature:g}.json",
                    lambda d=drafter, p=policy, t=temperature: measure(target, d, p, t, prompts),
                )
                share = f"{100 * found['share']:.1f}%"
                rows.append(
                    [family, how, f"{temperature:g}", found["rounds"], f"{found['round_ms']:.1f}",
                     f"{found['outside_ms']:.2f}", share,
                     "yes" if found["share"] <= ALLOWED else "NO"]
                )  # fmt: skip
    head = ["drafter", "draft", "T", "rounds", "CPU ms a round", "outside ms", "share", "<= 10%"]
    text = (
        f"# A round outside module forwards\n\n{name}, fp32, batch 1, one thread, CPU seconds. "
        "Made by `benchmarks/overhead.py`.\n\n" + markdown(head, rows)
    )
    out = arguments.output / ("overhead-tiny.md" if arguments.tiny else "overhead.md")
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
