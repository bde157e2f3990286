r"""Parity on SmolLM2: each drafter at T=0 and T=1, replay beside decode, every z printed.

    DATA=folder python benchmarks/parity.py --eagle runs/smol-eagle3/best \
        --small runs/smol-small/best

Eight held-out prompts (first turns of Spec-Bench rows under 256 tokens, spread over its
categories), 64 tokens each. Writes benchmarks/parity/*.json and benchmarks/parity.md; about 12
minutes on 2 CPU cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import HERE, cell, data, markdown, number

from draftsmith.drafters import base, storage
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.evaluate import evaluate
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.sources import read_prompts

K, TOKENS, PROMPTS, SEED = 4, 64, 8, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eagle", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    arguments = parser.parse_args()
    target = Target.load("smollm2")
    short = [
        ids for ids in encode(read_prompts(data("spec_bench.jsonl")), target) if len(ids) < 256
    ]
    prompts = short[:: len(short) // PROMPTS][:PROMPTS]
    rows = []
    for name, folder in (("ngram", None), ("small", arguments.small), ("eagle", arguments.eagle)):
        for temperature in (0.0, 1.0):

            def run(
                folder: Path | None = folder, temperature: float = temperature
            ) -> dict[str, Any]:
                ngram = base.family("ngram")
                drafter = (
                    storage.load(folder, target) if folder else ngram.create(target, ngram.Config())
                )
                return evaluate(
                    target, drafter, prompts, Sampler(temperature), Policy(K), TOKENS, seed=SEED
                ).report()

            report = cell(HERE / "parity" / f"{name}-t{temperature:g}.json", run, SEED)
            rows.append(row(name, temperature, report))
    head = [
        "drafter", "T", "passes", "expected", "z", "z per depth", "z local", "equal", "ties",
        "holds", "tau replay [95% CI]", "tau decode", "alpha_0", "speedup", "predicted",
        "texts = baseline",
    ]  # fmt: skip
    text = (
        "# Parity of replay and decode\n\n"
        f"SmolLM2-135M-Instruct, fp32, {PROMPTS} held-out prompts, {TOKENS} tokens, k={K}. "
        "Deterministic drafts must agree as integers, sampled ones within |z| < 3.5. "
        "One JSON a row in `benchmarks/parity/`; made by `benchmarks/parity.py`.\n\n"
    )
    (HERE / "parity.md").write_text(text + markdown(head, rows))
    print(markdown(head, rows))


def row(name: str, temperature: float, report: dict[str, Any]) -> list[object]:
    parity, replay, decode = report["parity"], report["replay"], report["decode"]
    exact = parity["deterministic"]
    low, high = replay["tau_ci"]
    same = decode["texts_equal_to_baseline"]
    return [
        name,
        f"{temperature:g}",
        parity["passes"],
        number(parity["expected"], 2),
        number(parity["z"], 2),
        " ".join(number(z, 2) for z in parity["z_per_depth"]),
        number(parity["z_local"], 2),
        "yes" if exact and parity["equal"] else "-" if not exact else "NO",
        len(parity["ties"]),
        "yes" if parity["holds"] else "NO",
        f"{replay['tau']:.3f} [{low:.3f}, {high:.3f}]",
        number(decode["tau"]),
        number(replay["alpha"][0]),
        number(decode["speedup"], 2) + "x",
        number(report["predicted_speedup"], 2) + "x",
        "-" if same is None else f"{same}/{report['prompts']}",
    ]


if __name__ == "__main__":
    main()
