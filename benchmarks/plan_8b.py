"""What Llama-3.1-8B takes from prompts to a served EAGLE-3, on GPUs whose rates are assumed.

    python benchmarks/plan_8b.py

`draftsmith plan` measures the machine it runs on; no GPU was at hand. So the shipped recipe is
planned on the target's own shape with the rates below, which lie at about 40% of an H100's peak in
matrix products and 60% of its memory bandwidth: memory and disk are counts, hours are estimates
that scale with the rates. On a GPU machine `draftsmith plan llama31-8b-eagle3` takes their place.
Needs neither weights nor network. Writes benchmarks/plan_8b.md and plan_8b.json.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from common import HERE, cell, markdown

from draftsmith.train import recipe
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.plan import cost, outline

GPU = torch.device("cuda")  # named for its dtypes alone: nothing is computed on it
FLOPS = 4e14  # bf16 operations a second in matrix products
BANDWIDTH = 2e12  # bytes a second
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 100_000, 100, 1024
SERVED = 256  # requests that the server answers at a time
STEPS = 12_000  # of the recipe, for one GPU
SHAPE = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip
LEARNING = ("gradients", "optimizer states")  # parts of memory that replay does without
GIB, HOUR = 1 << 30, 3600


@dataclass
class Assumed:
    """Rates as `cost.Pace` has them, by a roofline: few rows wait for weights."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    vocab: int
    rowwise: float = BANDWIDTH / 16  # numbers a second through log_softmax: 4 walks of fp32

    def matmul(self, rows: int) -> float:
        return min(FLOPS, 2 * rows * BANDWIDTH / self.dtype.itemsize)


def planned(folder: str, gpus: int) -> dict[str, Any]:
    """Memory of training and of replay (bytes a GPU), disk (bytes) and seconds, by part."""
    steps = STEPS // gpus
    words = [f"target={folder}", f"max_new_tokens={ANSWER_TOKENS}", f"steps={steps}"]
    chosen = recipe.load("llama31-8b-eagle3", words)
    outlined = outline.Outline(chosen)
    question = Prompt(messages=None, ids=(0,) * PROMPT_TOKENS, domain="")
    texts = outline.recipe_texts(chosen, [question] * PROMPTS)
    short = chosen.model_copy(update={"rows": 1, "length": 8})  # replay decides then
    replayed = cost.memory(short, outlined, texts, GPU)
    return {
        "steps": steps,
        "replay": {part: replayed[part] for part in replayed if part not in LEARNING},
        "target": outlined.target_size * 2,
        "drafter": outlined.stored,
        "memory": cost.memory(chosen, outlined, texts, GPU),
        "disk": cost.disk(chosen, outlined, texts, GPU),
        "seconds": seconds(chosen, outlined, texts, gpus),
    }


def seconds(
    chosen: recipe.Recipe, outlined: outline.Outline, texts: outline.Texts, gpus: int
) -> dict[str, float]:
    """At the assumed rates, the server's batch in the place of this process's own."""
    with patch.object(cost, "Pace", Assumed), patch.object(cost, "BATCH", SERVED):
        return cost.seconds(chosen, outlined, texts, GPU, gpus)


def run() -> dict[str, Any]:
    rates = {"flops": FLOPS, "bytes_a_second": BANDWIDTH, "served_at_a_time": SERVED}
    asked = {"prompts": PROMPTS, "prompt": PROMPT_TOKENS, "answer": ANSWER_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaConfig(**SHAPE).save_pretrained(Path(folder))
        plans = {str(gpus): planned(folder, gpus) for gpus in (1, 8)}
    return {"assumed": rates, "tokens": asked, "gpus": plans}


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for gpus, made in found["gpus"].items():
        memory, seconds = sum(made["memory"].values()) / GIB, made["seconds"]
        rows += [
            [gpus, "sample, by a server", f"{made['target'] / GIB:.0f} and its cache",
             f"{seconds['sampling'] / HOUR:.1f}"],
            [gpus, f"train, {made['steps']:,} steps", f"{memory:.0f}",
             f"{seconds['training'] / HOUR:.1f}"],
            [gpus, "report: replay of every checkpoint",
             f"{sum(made['replay'].values()) / GIB:.0f}", f"{seconds['replays'] / HOUR:.2f}"],
        ]  # fmt: skip
    return rows


def main() -> None:
    found = cell(HERE / "plan_8b.json", run)
    disk = {name: size / GIB for name, size in found["gpus"]["1"]["disk"].items()}
    text = (
        "# Llama-3.1-8B, planned\n\n"
        f"`llama31-8b-eagle3` on {PROMPTS:,} prompts of {PROMPT_TOKENS} tokens, answered with "
        f"{ANSWER_TOKENS} each. Never run. Memory and disk are counts; hours assume "
        f"{FLOPS / 1e12:.0f} bf16 TFLOP/s and {BANDWIDTH / 1e12:.0f} TB/s a GPU (an H100 at 40% "
        f"and 60% of its peaks) and a server that answers {SERVED} requests at a time (what "
        "its cache takes to read is left out: a lower bound), and scale with them. "
        "`draftsmith plan llama31-8b-eagle3` measures your own. Made by "
        "`benchmarks/plan_8b.py`; JSON beside it.\n\n"
        + markdown(["GPUs", "step", "GiB a GPU", "hours"], rows_of(found))
        + f"\nDisk: {disk['checkpoints']:.1f} GiB for 12 checkpoints, {disk['samples']:.1f} GiB "
        "for the samples. The target's weights are "
        f"{found['gpus']['1']['target'] / GIB:.1f} GiB, the drafter's "
        f"{found['gpus']['1']['drafter'] / GIB:.1f} GiB.\n"
    )
    (HERE / "plan_8b.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
