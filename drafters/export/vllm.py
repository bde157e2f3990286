"""vLLM: EAGLE-3 in the layout of the speculators library, or the original one; draft models.

Read in vLLM 0.32: transformers_utils/configs/speculators/base.py, model_executor/models/
llama_eagle3.py, config/speculative.py. It reports no missing tensor and drops unknown ones, so
what is written is complete. Layer ids at the top level are DESIGN.md's own; those in eagle_config
it would read the same way, though every other server adds 1 to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.export import Serving, hf_model, layouts
from draftsmith.drafters.small import Small

VERSION = "0.32.0"
RUN = True
LIMIT = 128  # MAX_SPEC_LEN, v1/sample/rejection_sampler.py
FAMILIES = ("eagle", "small")


def check(drafter: Drafter, serving: Serving) -> None:
    if isinstance(drafter, Eagle):
        layouts.check_eagle3(drafter, "vLLM")
    elif isinstance(drafter, Small):
        hf_model.check(drafter, "vLLM")


def write(drafter: Drafter, folder: Path, serving: Serving) -> None:
    if isinstance(drafter, Small):
        hf_model.write(drafter, folder, serving)
    elif isinstance(drafter, Eagle):
        layer = "midlayer" if serving.plain else "layers.0"
        tensors = layouts.cast(layouts.eagle3_tensors(drafter, layer), serving.dtype)
        config = _plain(drafter, serving) if serving.plain else _speculators(drafter, serving)
        layouts.save(folder, config, tensors)


def _plain(drafter: Eagle, serving: Serving) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layouts.llama_body(layouts.block_of(drafter), drafter.target, serving.length),
        **layouts.eagle3_flags(drafter),
        "eagle_aux_hidden_state_layer_ids": layouts.layer_ids(drafter),
        "torch_dtype": layouts.named(serving.dtype),
    }


def _speculators(drafter: Eagle, serving: Serving) -> dict[str, Any]:
    """num_aux_hidden_states goes into the layer's config, where vLLM looks for it."""
    flags = layouts.eagle3_flags(drafter)
    body = layouts.llama_body(layouts.block_of(drafter), drafter.target, serving.length)
    body["num_aux_hidden_states"] = flags.pop("num_aux_hidden_states")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": serving.k,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **flags,
        "eagle_aux_hidden_state_layer_ids": layouts.layer_ids(drafter),
        "tie_word_embeddings": False,
        "torch_dtype": layouts.named(serving.dtype),
        "transformer_layer_config": body,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": serving.target,
                "architectures": drafter.target.hf.config.architectures
                or [type(drafter.target.hf).__name__],
            },
        },
    }


def command(drafter: Drafter, folder: Path, serving: Serving) -> str:
    """The method is always named: without it vLLM takes a head for a draft model."""
    method = {"eagle": "eagle3", "small": "draft_model"}[drafter.family]
    how = {"method": method, "model": str(folder), "num_speculative_tokens": serving.k}
    return (
        f"python -m vllm.entrypoints.openai.api_server --model {serving.target} "
        f"--max-model-len {serving.length} --speculative-config '{json.dumps(how)}'"
    )
