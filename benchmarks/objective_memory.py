"""Peak memory of the objective: it grows with the chunk, not with B*T*V.

    python benchmarks/objective_memory.py

Each cell is a process of its own that runs one backward pass of an EAGLE-3 head (K=3) for a
one-layer random target with a vocabulary of 49,152 and all of it drafted; the figure is how far
the process's peak resident size rose above what it held before the pass.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from common import HERE, cell, markdown

V, K = 49152, 3
CELLS = [(256, 64), (256, 256), (256, 768), (1024, 64), (1024, 256), (2048, 64), (2048, 256)]


def measure(T: int, chunk: int) -> float:
    """MiB by which the peak rose, for T positions and `chunk` rows alive at a time."""
    import torch
    import transformers

    from draftsmith.drafters.attention import packed_step
    from draftsmith.drafters.batch import batch_of
    from draftsmith.drafters.causal_lm import CausalLM
    from draftsmith.drafters.eagle import Eagle, EagleConfig
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.train.objective import Objective, backward, denominator

    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    target: Any = CausalLM(transformers.AutoModelForCausalLM.from_config(config))
    target.requires_grad_(False)
    head = Eagle(target, EagleConfig(taps=[0, 1, "normed"], head="target"))
    ids = torch.randint(0, V, (T,)).tolist()
    batch = batch_of([(ids, [False] + [True] * (T - 1))], Sampler(1.0))
    with torch.no_grad():
        out = target(batch.tokens, packed_step(batch.position, batch.segment), head.taps)
    batch.features, batch.final = out.features, out.final
    objective = Objective()
    total = denominator(batch, K, objective)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backward(head, batch, K, objective, total, chunk)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def run(T: int, chunk: int) -> dict[str, Any]:
    """The cell in a fresh process: a peak cannot be reset."""
    words = [sys.executable, __file__, str(T), str(chunk)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    full = 4 * T * K * V / 2**20
    return {"T": T, "chunk": chunk, "peak_mib": json.loads(done.stdout), "full_tensor_mib": full}


def main() -> None:
    found = [
        cell(HERE / "objective_memory" / f"T{T}-chunk{c}.json", lambda T=T, c=c: run(T, c), None)
        for T, c in CELLS
    ]
    rows = [
        [f["T"], f["chunk"], f"{f['peak_mib']:.0f}", f"{f['full_tensor_mib']:.0f}"] for f in found
    ]
    head = ["T", "chunk (rows alive)", "peak above start (MiB)", "one T*K*V fp32 tensor (MiB)"]
    text = (
        f"# Peak memory of the objective\n\nOne backward pass, K={K}, V={V:,}, full draft "
        "vocabulary. Made by `benchmarks/objective_memory.py`; one JSON a row.\n\n"
        + markdown(head, rows)
    )
    (HERE / "objective_memory.md").write_text(text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        main()
