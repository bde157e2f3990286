"""vLLM: how it is started, asked and counted (V1 engine; run here in the CPU build 0.32.0).

It drafts k tokens in every round, those past the answer's limit too, and throws away what exceeds
it: a request's last round may be cut. Drafts are greedy at any temperature, judged as point
masses (v1/sample/rejection_sampler.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval.servers.client import Kind

MODULE = "vllm.entrypoints.openai.api_server"  # `vllm serve` looks for a distribution called vllm
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def command(
    python: Path, target: str, draft: Path | None, method: str, k: int, length: int, port: int
) -> list[str]:
    """The command that serves a target in fp32, with a drafter or (draft None) without.

    target: a folder or hub id; method: one of METHODS of drafters/export/vllm.py; length: of prompt
    and answer.
    Prefixes are not cached, so that requests do not depend on each other.
    """
    words = [
        str(python), "-m", MODULE, "--model", target,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--max-model-len", str(length), "--max-num-seqs", "1", "--enforce-eager",
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if draft is not None:
        speculative = {"method": method, "model": str(draft), "num_speculative_tokens": k}
        words += ["--speculative-config", json.dumps(speculative)]
    return words


def _body(prompt: Sequence[int], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "add_special_tokens": False,
    }


VLLM = Kind(
    name="vllm",
    tested="0.32.0",
    about="/version",
    version=lambda reply: reply.get("version"),
    prefix="vllm:",
    tokens="generation_tokens_total",
    path="/v1/completions",
    body=_body,
    ids=lambda reply: reply["choices"][0]["token_ids"],
    shortens=False,
)
