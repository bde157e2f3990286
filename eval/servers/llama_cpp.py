"""llama.cpp: how llama-server is found, started, asked and counted (run here: b11434).

It drafts no more than min(k, tokens left - 1), and with one token left takes a plain step, so that
no round is cut (server-context.cpp, get_n_draft_max). As we start it drafts are greedy at any
temperature: a draft is accepted where the token sampled from the target is the same. `ignore_eos`
bans the end tokens from the target's law. Counters per position came after build 10068.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import llama_cpp
from draftsmith.drafters.export.server import Draft
from draftsmith.drafters.target.source import Source
from draftsmith.eval.servers import process
from draftsmith.eval.servers.client import Kind

FP32 = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]  # the caches are f16 by default
DRAFT_FP32 = ["-ctkd", "f32", "-ctvd", "f32"]


def find_program() -> Path:
    """The llama-server program. Raises UserError where it is not set up."""
    return process.installed("llama.cpp", "llama.cpp/build/bin/llama-server")


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
    find_program()
    converter = process.servers_folder() / "llama.cpp/source/llama.cpp/convert_hf_to_gguf.py"
    path = source.path
    if not os.path.isdir(path):
        from huggingface_hub import snapshot_download

        path = snapshot_download(path, revision=source.revision)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = made.with_suffix(f".{uuid.uuid4().hex}.tmp")
    words = [sys.executable, str(converter), path, "--outtype", "f32", "--outfile", str(scratch)]
    # The converter imports sentencepiece for any model: it is installed with the server.
    extra = {"PYTHONPATH": str(process.servers_folder() / "llama.cpp/python")}
    try:
        done = subprocess.run(words, env=os.environ | extra, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise UserError(f"target {source.spec}: llama.cpp cannot convert it ({said[:300]})")
        scratch.rename(made)
    finally:
        scratch.unlink(missing_ok=True)
    return made


def command(
    program: Path, target: Source, draft: Draft | None, length: int, port: int
) -> list[str]:
    """The command that serves a target in fp32, one slot, one thread.

    Raises UserError where the export holds no GGUF; see also `target_gguf`.
    """
    flags = ["--host", "127.0.0.1", "--port", str(port), "-np", "1", "-t", "1", "-tb", "1"]
    flags += ["--metrics", "--no-webui", *FP32]
    if draft is not None:
        flags += ["-td", "1", "-tbd", "1", *DRAFT_FP32]
        if not (draft.folder / llama_cpp.FILE).is_file():
            raise UserError(
                f"{draft.folder}: holds no {llama_cpp.FILE}; export --to {llama_cpp.NAME} makes one"
            )
    return llama_cpp.words(str(target_gguf(target)), draft, length, str(program), flags)


LLAMA_CPP = Kind(
    server=llama_cpp.SERVER,
    program=find_program,
    command=command,
    environment=lambda program: {"LD_LIBRARY_PATH": str(program.parent)},
    version_path="/props",
    version=lambda reply: reply.get("build_info"),
    prefix="llamacpp:",
    tokens="tokens_predicted_total",
    path="/completion",
    limit="n_predict",
    body={"top_k": 0, "cache_prompt": False, "return_tokens": True},
    ids=lambda reply: reply["tokens"],
    shortens=True,
    exact=" ".join(["-np", "1", *FP32, *DRAFT_FP32, "--spec-draft-p-min", "0"]),
)
