"""vLLM: EAGLE-3 in the layout of the speculators library or the original one, P-EAGLE, DFlash and
DSpark in the former, EAGLE-1, Medusa and draft models.

Read in vLLM 0.32: transformers_utils/configs/speculators/base.py, model_executor/models/
{llama_eagle3,llama_eagle,medusa}.py, config/speculative.py. It reports no missing tensor and drops
unknown ones, so what is written is complete. Layer ids at the top level are our own; those
in eagle_config it would read the same way, though every other server adds 1 to them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle1 import Eagle1
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import blocks, layouts
from draftsmith.drafters.export.server import Draft, Method, Server, Serving
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.peagle import PEagle

NAME, VERSION = "vllm", "0.32.0"
MAX_SPEC_LEN = 128  # v1/sample/rejection_sampler.py


def _check_eagle3(drafter: Eagle, serving: Serving) -> None:
    layouts.check_eagle3(drafter, NAME)


def _eagle3(drafter: Eagle, serving: Serving) -> layouts.Form:
    if serving.plain:
        config = layouts.eagle3_config(drafter, serving.length)
        return config, layouts.eagle3_tensors(drafter, "midlayer")
    return _speculators(drafter, serving), layouts.eagle3_tensors(drafter, "layers.0")


def _speculators(drafter: Eagle, serving: Serving) -> dict[str, Any]:
    """num_aux_hidden_states goes into the layer's config, where vLLM looks for it."""
    flags = layouts.eagle3_flags(drafter)
    body = layouts.llama_body(drafter, serving.length)
    body["num_aux_hidden_states"] = flags.pop("num_aux_hidden_states")
    return {
        **blocks.speculators(drafter, serving, "eagle3", "Eagle3DraftModel"),
        **flags,
        "eagle_aux_hidden_state_layer_ids": layouts.layer_ids(drafter),
        "transformer_layer_config": body,
    }


def _check_blocks(drafter: DFlash, serving: Serving) -> None:
    blocks.check_blocks(drafter, serving, NAME)


def _check_peagle(drafter: PEagle, serving: Serving) -> None:
    blocks.check_peagle(drafter, serving, NAME)


def _check_eagle1(drafter: Eagle1, serving: Serving) -> None:
    layouts.check_block(layouts.block_of(drafter), NAME)
    layouts.check_embeddings(drafter.target, NAME, "train EAGLE-3, which brings its own")


def _eagle1(drafter: Eagle1, serving: Serving) -> layouts.Form:
    body = layouts.llama_body(drafter, serving.length)
    return {"architectures": ["EagleLlamaForCausalLM"], **body}, layouts.eagle1_tensors(drafter)


def _check_medusa(drafter: Medusa, serving: Serving) -> None:
    if drafter.vocab.ids is not None:
        raise UserError(  # its loader cannot take the token map that it has itself made
            f"draft_vocab: {NAME} {VERSION} ends while it loads Medusa heads of a reduced "
            "vocabulary; train without draft_vocab"
        )


def _medusa(drafter: Medusa, serving: Serving) -> layouts.Form:
    """vLLM's own names. One lm_head for all heads, the target's, is written once
    (original_lm_head)."""
    config, target = drafter.config, drafter.target
    stored = {
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
    return stored, tensors


def words(
    target: str,
    draft: Draft | None,
    length: int,
    program: str = "python",
    flags: Sequence[str] = (),
) -> list[str]:
    """The command that serves a target, for texts of `length` tokens, with a drafter or without.

    Without --generation-config vLLM gives requests the checkpoint's own temperature, top-k, top-p
    and repetition penalty where they name none (config/model.py: "auto"). The method is always
    named: without it vLLM takes a head for a draft model. Drafts are greedy by default; drawn ones
    are judged by rejection_sample_method "standard", which is the default.
    """
    out = [program, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    out += ["--max-model-len", str(length), "--generation-config", "vllm", *flags]
    if draft is not None:
        how: dict[str, Any] = {"method": METHODS[draft.family].name}
        how |= {"model": str(draft.folder), "num_speculative_tokens": draft.k}
        if draft.family == "peagle":
            how["parallel_drafting"] = True  # by itself only where the folder is served as a model
        if draft.drafts == "sampled":
            how["draft_sample_method"] = "probabilistic"
        out += ["--speculative-config", json.dumps(how)]
    return out


def start(drafter: Drafter, draft: Draft, serving: Serving) -> str:
    return shlex.join(words(serving.target, draft, serving.length))


# v1/spec_decode: the proposer that EAGLE and draft models share keeps q, with the request's
# temperature, but never its top-k and top-p; Medusa's always takes the argmax.
METHODS: dict[str, Method[Any]] = {
    "eagle": Method("eagle3", _check_eagle3, layouts.head(_eagle3), lambda drafter: True),
    "eagle1": Method("eagle", _check_eagle1, layouts.head(_eagle1), lambda drafter: True),
    "medusa": Method("medusa", _check_medusa, layouts.head(_medusa)),
    "dflash": Method("dflash", _check_blocks, layouts.head(blocks.blocks)),
    "dspark": Method("dspark", _check_blocks, layouts.head(blocks.blocks)),
    "peagle": Method("eagle3", _check_peagle, layouts.head(blocks.peagle)),
    "small": layouts.draft_model("draft_model", NAME, drawn=True),
}
SERVER = Server(NAME, VERSION, METHODS, start, run=True, limit=MAX_SPEC_LEN, cuts=False)
