"""What `make servers` sets up, and a target in the form that llama.cpp reads."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.source import Source


def folder() -> Path:
    """Where the servers are: $DRAFTSMITH_SERVERS, as tests/support/servers.sh has it."""
    place = os.environ.get("DRAFTSMITH_SERVERS") or "~/.cache/draftsmith/servers"
    return Path(os.path.expanduser(place))


def vllm_python() -> Path:
    """The Python that has vLLM. Raises UserError where it is not set up."""
    return _found("vllm", "vllm/bin/python")


def vllm_patched() -> bool:
    """Whether the vLLM here has the fix that tests/support/servers.sh appends: a second definition
    of the kernel that gives each draft its request's temperature."""
    kernels = "vllm/lib/python3*/site-packages/vllm/utils/cpu_triton_utils.py"
    return any(
        file.read_text().count("def _expand_kernel_impl(") > 1 for file in folder().glob(kernels)
    )


def llama_server() -> Path:
    """The llama-server program. Raises UserError where it is not set up."""
    return _found("llama.cpp", "llama.cpp/build/bin/llama-server")


def _found(name: str, inside: str) -> Path:
    path = folder() / inside
    if not (folder() / name / ".installed").is_file() or not path.exists():
        raise UserError(
            f"server {name}: not set up in {folder()}; run `make servers`, or name a running "
            "server's URL"
        )
    return path


def target_gguf(source: Source) -> Path:
    """The target's fp32 GGUF, made once by llama.cpp's own converter and kept in the cache.

    Raises UserError where llama.cpp is not set up or does not know the target's family, and for a
    target of unknown revision: by that a GGUF is known again.
    """
    if source.revision == "unknown":
        raise UserError(
            f"target {source.spec}: its revision is unknown, so no GGUF of it can be kept; "
            "download it and name its folder"
        )
    cache = Path(os.path.expanduser(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith"))
    made = cache / f"{Path(source.path).name}-{source.revision[:16]}-f32.gguf"
    if made.is_file():
        return made
    llama_server()
    converter = folder() / "llama.cpp/source/llama.cpp/convert_hf_to_gguf.py"
    path = source.path
    if not os.path.isdir(path):
        from huggingface_hub import snapshot_download

        path = snapshot_download(path, revision=source.revision)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = made.with_suffix(f".{uuid.uuid4().hex}.tmp")
    words = [sys.executable, str(converter), path, "--outtype", "f32", "--outfile", str(scratch)]
    # sentencepiece, which the converter imports for any model, lies beside the server.
    extra = {"PYTHONPATH": str(folder() / "llama.cpp/python")}
    try:
        done = subprocess.run(words, env=os.environ | extra, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise UserError(f"target {source.spec}: llama.cpp cannot convert it ({said[:300]})")
        scratch.rename(made)
    finally:
        scratch.unlink(missing_ok=True)
    return made
