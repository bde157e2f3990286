"""vLLM: EAGLE-3 in the layout of the speculators library or the original one, EAGLE-1, Medusa and
draft models.

Read in vLLM 0.32: transformers_utils/configs/speculators/base.py, model_executor/models/
{llama_eagle3,llama_eagle,medusa}.py, config/speculative.py. It reports no missing tensor and drops
unknown ones, so what is written is complete. Layer ids at the top level are our own; those
in eagle_config it would read the same way, though every other server adds 1 to them.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle1 import Eagle1
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving, drafting, hf_model, layouts
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.small import Small

NAME = "vLLM"
VERSION = "0.32.0"
RUN = True
LIMIT = 128  # MAX_SPEC_LEN, v1/sample/rejection_sampler.py
FAMILIES = ("eagle", "eagle1", "medusa", "small")


def draws(drafter: Drafter) -> bool:
    """v1/spec_decode: the proposer that EAGLE and draft models share keeps q; Medusa's takes the
    argmax whatever it is told. q has the request's temperature, but never its top-k and top-p."""
    return not isinstance(drafter, Medusa)


def check(drafter: Drafter, serving: Serving) -> None:
    if isinstance(drafter, Eagle):
        layouts.check_eagle3(drafter, "vLLM")
    elif isinstance(drafter, Eagle1):
        layouts.check_block(layouts.block_of(drafter), "vLLM")
        layouts.check_embeddings(drafter.target, "vLLM", "train EAGLE-3, which brings its own")
    elif isinstance(drafter, Medusa):
        if drafter.vocab.ids is not None:
            raise UserError(  # its loader cannot take the token map that it has itself made
                f"draft_vocab: vLLM {VERSION} ends while it loads Medusa heads of a reduced "
                "vocabulary; train without draft_vocab"
            )
    elif isinstance(drafter, Small):
        hf_model.check(drafter, "vLLM")


def write(drafter: Drafter, folder: Path, serving: Serving) -> None:
    if isinstance(drafter, Small):
        hf_model.write(drafter, folder, serving)
        return
    config, tensors = _form(drafter, serving)
    config["torch_dtype"] = layouts.named(serving.dtype)
    layouts.save(folder, config, layouts.cast(tensors, serving.dtype))


def _form(drafter: Drafter, serving: Serving) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if isinstance(drafter, Medusa):
        return _medusa(drafter)
    if isinstance(drafter, Eagle1):
        body = layouts.llama_body(layouts.block_of(drafter), drafter.target, serving.length)
        return {"architectures": ["EagleLlamaForCausalLM"], **body}, layouts.eagle1_tensors(drafter)
    assert isinstance(drafter, Eagle)
    if serving.plain:
        return _plain(drafter, serving), layouts.eagle3_tensors(drafter, "midlayer")
    return _speculators(drafter, serving), layouts.eagle3_tensors(drafter, "layers.0")


def _plain(drafter: Eagle, serving: Serving) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layouts.llama_body(layouts.block_of(drafter), drafter.target, serving.length),
        **layouts.eagle3_flags(drafter),
        "eagle_aux_hidden_state_layer_ids": layouts.layer_ids(drafter),
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


def _medusa(drafter: Medusa) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """vLLM's own names. One lm_head for all heads, the target's, is written once
    (original_lm_head)."""
    config, target = drafter.config, drafter.target
    about = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": target.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "medusa_fc_bias": True,
        "original_lm_head": drafter.lm_heads is None,
    }
    tensors: dict[str, Tensor] = {}
    for head in range(config.heads):
        for layer in range(config.layers):
            for kind in ("weight", "bias"):
                part = drafter.blocks.get_parameter(f"{head}.{layer}.linear.{kind}")
                tensors[f"blocks.{head}.layers.{layer}.{kind}"] = part
        if drafter.lm_heads is not None:
            tensors[f"lm_heads.{head}.weight"] = drafter.lm_heads.get_parameter(f"{head}.weight")
    if drafter.lm_heads is None:
        tensors["lm_heads.0.weight"] = drafter.target_rows()
    return about, tensors


# Drafter family -> vLLM's name of the method.
METHODS = {"eagle": "eagle3", "eagle1": "eagle", "medusa": "medusa", "small": "draft_model"}


def command(drafter: Drafter, folder: Path, serving: Serving) -> str:
    """Without --generation-config vLLM gives requests the checkpoint's own temperature, top-k,
    top-p and repetition penalty where they name none (config/model.py: "auto")."""
    how = speculation(drafter.family, folder, serving.k, drafting("vllm", drafter, serving))
    return (
        f"python -m vllm.entrypoints.openai.api_server --model {shlex.quote(serving.target)} "
        f"--max-model-len {serving.length} --generation-config vllm "
        f"--speculative-config {shlex.quote(json.dumps(how))}"
    )


def speculation(family: str, folder: Path, k: int, drafts: str) -> dict[str, Any]:
    """--speculative-config. The method is always named: without it vLLM takes a head for a draft
    model. Drafts are greedy by default; drawn ones are judged by rejection_sample_method
    "standard", which is the default."""
    how: dict[str, Any] = {"method": METHODS[family], "model": str(folder)}
    how["num_speculative_tokens"] = k
    if drafts == "sampled":
        how["draft_sample_method"] = "probabilistic"
    return how
