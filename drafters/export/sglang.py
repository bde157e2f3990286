"""SGLang: EAGLE-3 in its original layout, EAGLE-1/2, and draft models (STANDALONE).

Read in SGLang 0.5: srt/models/llama_eagle3.py, srt/models/llama_eagle.py,
srt/speculative/eagle_worker.py; not run here. Layer ids are read from eagle_config alone and count
layers' outputs from 0: our ids less one. norm_before_residual is known nowhere. Unknown and
missing names are passed over in silence. This folder suits vLLM and llama.cpp's converter as well,
which read the ids at the top level.
"""

from __future__ import annotations

import shlex
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle1 import Eagle1
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import layouts
from draftsmith.drafters.export.server import Draft, Method, Server, Serving

NAME = "sglang"


def _draws(drafter: Eagle | Eagle1) -> bool:
    """Rejection sampling is for EAGLE chains, and for q over the target's whole vocabulary: with a
    reduced one it ends at start (srt/speculative/eagle_worker_v2.py)."""
    return drafter.vocab.ids is None


def check_eagle3(drafter: Eagle, serving: Serving, server: str = NAME) -> None:
    """As SGLang and TensorRT-LLM take it."""
    layouts.check_embeddings(drafter.target, server, "export it --to vllm, as EAGLE-3")
    layouts.check_eagle3(drafter, server, lowest=1)
    if drafter.config.norm_before_residual:
        raise UserError(
            f"norm_before_residual: {server} has no such setting and takes the raw state for the "
            "residual; export it --to vllm or llama.cpp, or train with norm_before_residual: false"
        )


def _eagle3(drafter: Eagle, serving: Serving) -> layouts.Form:
    return eagle3_config(drafter, serving), layouts.eagle3_tensors(drafter, "midlayer")


def eagle3_config(drafter: Eagle, serving: Serving) -> dict[str, Any]:
    """What SGLang and TensorRT-LLM read, and vLLM and llama.cpp too."""
    inner = {
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in layouts.layer_ids(drafter)],
        "use_aux_hidden_state": True,
        "norm_before_fc": drafter.config.norm_before_fc,
    }
    return layouts.eagle3_config(drafter, serving.length) | {"eagle_config": inner}


def _check_eagle1(drafter: Eagle1, serving: Serving) -> None:
    layouts.check_embeddings(drafter.target, NAME, "export it --to vllm, as EAGLE-3")
    layouts.check_block(layouts.block_of(drafter), NAME)


def _eagle1(drafter: Eagle1, serving: Serving) -> layouts.Form:
    body = layouts.llama_body(drafter, serving.length)
    tensors = layouts.eagle1_tensors(drafter)
    tensors["fc.bias"] = torch.zeros_like(drafter.fc.weight[:, 0])  # its fc always has one
    return {"architectures": ["LlamaForCausalLMEagle"], **body}, tensors


def start(drafter: Drafter, draft: Draft, serving: Serving) -> str:
    """topk 1 is a chain: k steps give k drafts, verified beside the root."""
    words = [
        "python", "-m", "sglang.launch_server", "--model-path", serving.target,
        "--context-length", str(serving.length),
        "--speculative-algorithm", METHODS[draft.family].name,
        "--speculative-draft-model-path", str(draft.folder),
        "--speculative-num-steps", str(draft.k), "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(draft.k + 1),
    ]  # fmt: skip
    if draft.drafts == "sampled":
        words.append("--speculative-use-rejection-sampling")
    return shlex.join(words)


# q has the request's temperature, but never its top-p (cuts=False).
METHODS: dict[str, Method[Any]] = {
    "eagle": Method("EAGLE3", check_eagle3, layouts.head(_eagle3), _draws),
    "eagle1": Method("EAGLE", _check_eagle1, layouts.head(_eagle1), _draws),
    "small": layouts.draft_model("STANDALONE", NAME),
}
SERVER = Server(NAME, "0.5.23", METHODS, start, run=False, cuts=False)
