"""Peak memory of the objective: it grows with the chunk, not with B*T*V.

    python benchmarks/objective_memory.py

Each cell is a process of its own that runs one backward pass of an EAGLE-3 head (K=3) for a
one-layer random target, all of its vocabulary drafted; the figure is how far the process's peak
resident size rose above what it held before the pass. The same with 1,024 tokens shows what is not
the vocabulary's: the head's attention, which still holds T*T scores.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from common import HERE, cell, markdown

V, FEW, K = 49152, 1024, 3
CELLS = [(256, 64), (256, 256), (256, 768), (1024, 64), (1024, 256), (2048, 64), (2048, 256)]


def measure(T: int, chunk: int, size: int) -> float:
    """MiB by which the peak rose, for T positions, `chunk` rows alive and `size` tokens."""
    import torch
    import transformers

    from draftsmith.drafters.batch import align, batch_of
    from draftsmith.drafters.eagle import Eagle, EagleConfig
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.drafters.target.attention import packed_step
    from draftsmith.drafters.target.causal_lm import CausalLM
    from draftsmith.train.objective.losses import Objective, backward, denominator

    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    target: Any = CausalLM(transformers.AutoModelForCausalLM.from_config(config))
    target.requires_grad_(False)
    head = Eagle(target, EagleConfig(taps=[0, 1, "normed"], head="target"))
    ids = torch.randint(0, size, (T,)).tolist()
    batch = batch_of([(ids, [False] + [True] * (T - 1))], Sampler(1.0))
    with torch.no_grad():
        out = target(batch.tokens, packed_step(batch.position, batch.segment), head.taps)
    batch.features, batch.final = out.features, out.final
    objective = Objective()
    alignment = align(batch, K)
    total = denominator(batch, alignment, objective)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backward(head, batch, alignment, objective, total, chunk)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def run(T: int, chunk: int) -> dict[str, Any]:
    """The cell in a fresh process: a peak cannot be reset."""

    def peak(size: int) -> float:
        words = [sys.executable, __file__, str(T), str(chunk), str(size)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    full = 4 * T * K * V / 2**20
    peaks = {"peak_mib": peak(V), "peak_few_tokens_mib": peak(FEW)}
    return {"T": T, "chunk": chunk, "full_tensor_mib": full} | peaks


def main() -> None:
    found = [
        cell(HERE / "objective_memory" / f"T{T}-chunk{c}.json", lambda T=T, c=c: run(T, c), None)
        for T, c in CELLS
    ]
    rows = [
        [f["T"], f["chunk"], f"{f['peak_mib']:.0f}", f"{f['peak_few_tokens_mib']:.0f}",
         f"{f['peak_mib'] - f['peak_few_tokens_mib']:.0f}", f"{f['full_tensor_mib']:.0f}"]
        for f in found
    ]  # fmt: skip
    head = ["T", "chunk (rows alive)", "peak above start (MiB)", f"same with {FEW:,} tokens",
            "due to the vocabulary", "one T*K*V fp32 tensor (MiB)"]  # fmt: skip
    text = (
        f"# Peak memory of the objective\n\nOne backward pass, K={K}, V={V:,}, full draft "
        "vocabulary. What the vocabulary costs grows with the chunk and not with T; "
        "the rest is the head's attention. Made by `benchmarks/objective_memory.py`; one JSON a "
        "row.\n\n" + markdown(head, rows)
    )
    (HERE / "objective_memory.md").write_text(text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(*map(int, sys.argv[1:]))))
    else:
        main()
