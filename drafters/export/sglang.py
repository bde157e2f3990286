"""SGLang: EAGLE-3 in its original layout, EAGLE-1/2, and draft models (STANDALONE).

Read in SGLang 0.5: srt/models/llama_eagle3.py, srt/models/llama_eagle.py,
srt/speculative/eagle_worker.py; not run here. Layer ids are read from eagle_config alone and count
layers' outputs from 0: our ids less one. norm_before_residual is known nowhere. Unknown and
missing names are passed over in silence. This folder suits vLLM and llama.cpp's converter as well,
which read the ids at the top level.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle1 import Eagle1
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving, drafting, hf_model, layouts
from draftsmith.drafters.small import Small

NAME = "SGLang"
VERSION = "0.5.23"
RUN = False
LIMIT = None
FAMILIES = ("eagle", "eagle1", "small")


def draws(drafter: Drafter) -> bool:
    """Rejection sampling is for EAGLE chains, and for q over the target's whole vocabulary: with a
    reduced one it ends at start (srt/speculative/eagle_worker_v2.py). q has the request's
    temperature, but never its top-p."""
    return isinstance(drafter, Eagle | Eagle1) and drafter.vocab.ids is None


def check(drafter: Drafter, serving: Serving) -> None:
    if isinstance(drafter, Small):
        hf_model.check(drafter, "SGLang")
        return
    layouts.check_embeddings(drafter.target, "SGLang", "export it --to vllm, as EAGLE-3")
    if isinstance(drafter, Eagle):
        layouts.check_eagle3(drafter, "SGLang", lowest=1)
        check_residual(drafter, "SGLang")
    elif isinstance(drafter, Eagle1):
        layouts.check_block(layouts.block_of(drafter), "SGLang")


def check_residual(drafter: Eagle, server: str) -> None:
    if drafter.config.norm_before_residual:
        raise UserError(
            f"norm_before_residual: {server} has no such setting and takes the raw state for the "
            "residual; export it --to vllm or gguf, or train with norm_before_residual: false"
        )


def write(drafter: Drafter, folder: Path, serving: Serving) -> None:
    if isinstance(drafter, Small):
        hf_model.write(drafter, folder, serving)
    elif isinstance(drafter, Eagle):
        tensors = layouts.eagle3_tensors(drafter, "midlayer")
        layouts.save(folder, eagle3_config(drafter, serving), layouts.cast(tensors, serving.dtype))
    elif isinstance(drafter, Eagle1):
        config = {
            "architectures": ["LlamaForCausalLMEagle"],
            **layouts.llama_body(layouts.block_of(drafter), drafter.target, serving.length),
            "torch_dtype": layouts.named(serving.dtype),
        }
        tensors = layouts.eagle1_tensors(drafter)
        tensors["fc.bias"] = torch.zeros_like(drafter.fc.weight[:, 0])  # its fc always has one
        layouts.save(folder, config, layouts.cast(tensors, serving.dtype))


def eagle3_config(drafter: Eagle, serving: Serving) -> dict[str, Any]:
    """What SGLang and TensorRT-LLM read, and vLLM and llama.cpp too."""
    ids = layouts.layer_ids(drafter)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layouts.llama_body(layouts.block_of(drafter), drafter.target, serving.length),
        **layouts.eagle3_flags(drafter),
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids],
            "use_aux_hidden_state": True,
            "norm_before_fc": drafter.config.norm_before_fc,
        },
        "torch_dtype": layouts.named(serving.dtype),
    }


def command(drafter: Drafter, folder: Path, serving: Serving) -> str:
    """topk 1 is a chain: k steps give k drafts, verified beside the root."""
    algorithm = {"eagle": "EAGLE3", "eagle1": "EAGLE", "small": "STANDALONE"}[drafter.family]
    sampled = drafting("sglang", drafter, serving) == "sampled"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(serving.target)} "
        f"--context-length {serving.length} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(folder))} "
        f"--speculative-num-steps {serving.k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {serving.k + 1}"
        + (" --speculative-use-rejection-sampling" if sampled else "")
    )
