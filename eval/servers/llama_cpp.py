"""llama.cpp: how llama-server is started, asked and counted (run here: b11434).

It drafts no more than min(k, tokens left - 1), and with one token left takes a plain step, so that
no round is cut (server-context.cpp, get_n_draft_max). As we start it drafts are greedy at any
temperature: a draft is accepted where the token sampled from the target is the same. `ignore_eos`
bans the end tokens from the target's law. Counters per position came after build 10068.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval.servers.client import Kind

FP32 = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]  # the caches are f16 by default
DRAFT_FP32 = ["-ctkd", "f32", "-ctvd", "f32"]
ALL_DRAFTS = ["--spec-draft-p-min", "0"]  # none is held back for being unlikely


def command(
    program: Path, target: Path, draft: Path | None, kind: str, k: int, length: int, port: int
) -> list[str]:
    """The command that serves a GGUF in fp32, with a draft GGUF or (draft None) without.

    kind: one of METHODS of drafters/export/gguf.py; length: of prompt and answer. One slot, one
    thread.
    """
    words = [
        str(program), "-m", str(target), "--host", "127.0.0.1", "--port", str(port),
        "-c", str(length), "-np", "1", "-t", "1", "-tb", "1", "--metrics", "--no-webui", *FP32,
    ]  # fmt: skip
    if draft is not None:
        words += ["-md", str(draft), "--spec-type", kind, "--spec-draft-n-max", str(k)]
        words += [*ALL_DRAFTS, "-td", "1", "-tbd", "1", *DRAFT_FP32]
    return words


def _body(prompt: Sequence[int], tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": tokens,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }


LLAMA_CPP = Kind(
    name="llama.cpp",
    tested="b11434",
    about="/props",
    version=lambda reply: reply.get("build_info"),
    prefix="llamacpp:",
    tokens="tokens_predicted_total",
    path="/completion",
    body=_body,
    ids=lambda reply: reply["tokens"],
    shortens=True,
    exact=" ".join(["-np", "1", *FP32, *DRAFT_FP32, *ALL_DRAFTS]),
)
