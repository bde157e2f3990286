"""TensorRT-LLM's PyTorch backend: EAGLE-3 in its original layout, and draft models.

Read in tensorrt_llm/_torch/models/modeling_speculative.py and docs of 1.2; not run here. It knows
an EAGLE-3 head by draft_vocab_size. Which layers it taps is an argument of the LLM, not the
checkpoint's: outputs counted from 0, our ids less one. norm_before_residual is not known.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving, hf_model, layouts
from draftsmith.drafters.export.sglang import check_residual, eagle3_config
from draftsmith.drafters.small import Small

NAME = "TensorRT-LLM"
VERSION = "1.2"
RUN = False
LIMIT = None
FAMILIES = ("eagle", "small")


def draws(drafter: Drafter) -> bool:
    """Drafts are q's argmax, accepted where the target draws the same token."""
    return False


def check(drafter: Drafter, serving: Serving) -> None:
    if isinstance(drafter, Small):
        hf_model.check(drafter, "TensorRT-LLM")
    elif isinstance(drafter, Eagle):
        layouts.check_embeddings(drafter.target, "TensorRT-LLM", "export it --to vllm")
        layouts.check_eagle3(drafter, "TensorRT-LLM", lowest=1)
        check_residual(drafter, "TensorRT-LLM")
        if drafter.config.fc_norm and drafter.config.norm_before_fc:
            raise UserError(
                "norm_before_fc: TensorRT-LLM passes it over where fc_norm is set; train with one "
                "of them, or export it --to vllm"
            )


def write(drafter: Drafter, folder: Path, serving: Serving) -> None:
    if isinstance(drafter, Small):
        hf_model.write(drafter, folder, serving)
    elif isinstance(drafter, Eagle):
        config = eagle3_config(drafter, serving)
        config["eagle_config"]["return_hidden_post_norm"] = drafter.config.norm_output
        tensors = layouts.eagle3_tensors(drafter, "midlayer")
        layouts.save(folder, config, layouts.cast(tensors, serving.dtype))


def command(drafter: Drafter, folder: Path, serving: Serving) -> str:
    how = f"max_draft_len={serving.k}, speculative_model={str(folder)!r}"
    if isinstance(drafter, Eagle):
        outputs = ", ".join(str(i - 1) for i in layouts.layer_ids(drafter))
        how = f"Eagle3DecodingConfig({how}, eagle3_layers_to_capture={{{outputs}}})"
    else:
        how = f"DraftTargetDecodingConfig({how})"
    return f"LLM({serving.target!r}, max_seq_len={serving.length}, speculative_config={how})"
