"""llama.cpp: how llama-server is started, asked and counted (run here: b11434).

It drafts no more than min(k, tokens left - 1), and with one token left takes a plain step, so that
no round is cut (server-context.cpp, get_n_draft_max). As we start it drafts are greedy at any
temperature: a draft is accepted where the token sampled from the target is the same. `ignore_eos`
bans the end tokens from the target's law. Counters per position came after build 10068.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import llama_cpp
from draftsmith.drafters.export.server import Draft
from draftsmith.drafters.target.source import Source
from draftsmith.eval.servers import tools
from draftsmith.eval.servers.client import Kind

FP32 = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]  # the caches are f16 by default
DRAFT_FP32 = ["-ctkd", "f32", "-ctvd", "f32"]


def command(
    program: Path, target: Source, draft: Draft | None, length: int, port: int
) -> list[str]:
    """The command that serves a target in fp32, one slot, one thread.

    Raises UserError where the export holds no GGUF; see also `tools.target_gguf`.
    """
    flags = ["--host", "127.0.0.1", "--port", str(port), "-np", "1", "-t", "1", "-tb", "1"]
    flags += ["--metrics", "--no-webui", *FP32]
    if draft is not None:
        flags += ["-td", "1", "-tbd", "1", *DRAFT_FP32]
        if not (draft.folder / llama_cpp.FILE).is_file():
            raise UserError(
                f"{draft.folder}: holds no {llama_cpp.FILE}; export --to {llama_cpp.NAME} makes one"
            )
    return llama_cpp.words(str(tools.target_gguf(target)), draft, length, str(program), flags)


LLAMA_CPP = Kind(
    server=llama_cpp.SERVER,
    program=tools.llama_server,
    command=command,
    environment=lambda program: {"LD_LIBRARY_PATH": str(program.parent)},
    about="/props",
    version=lambda reply: reply.get("build_info"),
    prefix="llamacpp:",
    tokens="tokens_predicted_total",
    path="/completion",
    limit="n_predict",
    asks={"top_k": 0, "cache_prompt": False, "return_tokens": True},
    ids=lambda reply: reply["tokens"],
    shortens=True,
    exact=" ".join(["-np", "1", *FP32, *DRAFT_FP32, "--spec-draft-p-min", "0"]),
)
