"""vLLM: how it is found, started, asked and counted (V1 engine; run here in the CPU build 0.32.0).

It drafts k tokens in every round, those past the answer's limit too, and throws away what exceeds
it: a request's last round may be cut. Drafts are greedy at any temperature, judged as point masses,
or where the speculation says so drawn from q at the request's temperature, judged by min(1, p/q)
(v1/sample/rejection_sampler.py).
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.export import vllm
from draftsmith.drafters.export.server import Draft
from draftsmith.drafters.target.source import Source
from draftsmith.eval.servers import process
from draftsmith.eval.servers.client import Kind

# What a comparison with replay needs of a server: fp32, one request at a time, no compiled graphs,
# no prefix that another request left.
EXACT = [
    "--dtype", "float32", "--max-num-seqs", "1", "--enforce-eager", "--no-enable-prefix-caching",
]  # fmt: skip
SHARE = ["--gpu-memory-utilization", "0.45"]  # two stand side by side, with drafts and without
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def find_program() -> Path:
    """The Python that has vLLM. Raises UserError where it is not set up."""
    return process.installed("vllm", "vllm/bin/python")


def patched() -> bool:
    """Whether the vLLM here has the fix that tests/support/servers.sh appends: a second definition
    of the kernel that gives each draft its request's temperature."""
    kernels = "vllm/lib/python3*/site-packages/vllm/utils/cpu_triton_utils.py"
    return any(
        file.read_text().count("def _expand_kernel_impl(") > 1
        for file in process.servers_folder().glob(kernels)
    )


def command(
    program: Path, target: Source, draft: Draft | None, length: int, port: int
) -> list[str]:
    """The command that serves a target in fp32."""
    flags = ["--host", "127.0.0.1", "--port", str(port), *EXACT, *SHARE]
    return vllm.words(target.path, draft, length, str(program), flags)


VLLM = Kind(
    server=vllm.SERVER,
    program=find_program,
    command=command,
    environment=lambda program: ENVIRONMENT,
    version_path="/version",
    version=lambda reply: reply.get("version"),
    prefix="vllm:",
    tokens="generation_tokens_total",
    path="/v1/completions",
    limit="max_tokens",
    body={
        "top_k": -1, "repetition_penalty": 1.0, "return_token_ids": True,
        "add_special_tokens": False,
    },
    ids=lambda reply: reply["choices"][0]["token_ids"],
    shortens=False,
    exact=" ".join([*EXACT, "--generation-config", "vllm"]),
    patched=patched,
)  # fmt: skip
