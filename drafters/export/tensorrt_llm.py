"""TensorRT-LLM's PyTorch backend: EAGLE-3 in its original layout, and draft models.

Read in tensorrt_llm/_torch/models/modeling_speculative.py and docs of 1.2; not run here. It knows
an EAGLE-3 head by draft_vocab_size. Which layers it taps is an argument of the LLM, not the
checkpoint's: outputs counted from 0, our ids less one. norm_before_residual is not known. Drafts
are q's argmax, accepted where the target draws the same token.
"""

from __future__ import annotations

from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import layouts
from draftsmith.drafters.export.server import Draft, Method, Server, Serving
from draftsmith.drafters.export.sglang import check_eagle3, eagle3_config

NAME = "tensorrt-llm"


def _check_eagle3(drafter: Eagle, serving: Serving) -> None:
    check_eagle3(drafter, serving, NAME)
    if drafter.config.fc_norm and drafter.config.norm_before_fc:
        raise UserError(
            f"norm_before_fc: {NAME} passes it over where fc_norm is set; train with one of them, "
            "or export it --to vllm"
        )


def _eagle3(drafter: Eagle, serving: Serving) -> layouts.Form:
    config = eagle3_config(drafter, serving)
    config["eagle_config"]["return_hidden_post_norm"] = drafter.config.norm_output
    return config, layouts.eagle3_tensors(drafter, "midlayer")


def _layers(drafter: Eagle) -> str:
    outputs = ", ".join(str(i - 1) for i in layouts.layer_ids(drafter))
    return f", eagle3_layers_to_capture={{{outputs}}}"


def start(drafter: Drafter, draft: Draft, serving: Serving) -> str:
    method = METHODS[draft.family]
    how = f"max_draft_len={draft.k}, speculative_model={str(draft.folder)!r}"
    how = f"{method.name}({how}{method.arguments(drafter)})"
    return f"LLM({serving.target!r}, max_seq_len={serving.length}, speculative_config={how})"


METHODS: dict[str, Method[Any]] = {
    "eagle": Method(
        "Eagle3DecodingConfig", _check_eagle3, layouts.head(_eagle3), arguments=_layers
    ),
    "small": layouts.draft_model("DraftTargetDecodingConfig", NAME),
}
SERVER = Server(NAME, "1.2", METHODS, start, run=False)
