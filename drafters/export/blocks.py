"""What block drafters and P-EAGLE are made of in the layout of the speculators library.

Read in vLLM 0.32 (transformers_utils/configs/speculators/{base,algos}.py) and speculators 0.9
(models/{dflash,dspark,peagle}). Layer ids are our own there; vLLM makes outputs of them, one less.
Which slot drafts depth 0 is sample_from_anchor, which vLLM takes for false where it is missing.
vLLM lets slots see one another both ways where sliding_window_non_causal is true or missing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dspark import DSpark
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import layouts
from draftsmith.drafters.export.server import Serving
from draftsmith.drafters.peagle import PEagle


def check_blocks(drafter: DFlash, serving: Serving, server: str) -> None:
    """Raises UserError for taps, layers and draft lengths that a server's blocks have not."""
    if drafter.longest != serving.k:
        raise UserError(
            f"--k: {server} fills whole blocks, of {drafter.longest} drafts for this drafter; give "
            f"--k {drafter.longest}"
        )
    layouts.check_taps(drafter.taps, drafter.target, server, lowest=1)
    layouts.check_embeddings(drafter.target, server, "decode it with draftsmith")
    layouts.check_block(layouts.block_of(drafter), server, "Qwen3", qk_norm=True)


def check_peagle(drafter: PEagle, serving: Serving, server: str) -> None:
    layouts.check_eagle3(drafter, server)
    if drafter.config.fc_norm:
        raise UserError(f"fc_norm: {server} passes it over in P-EAGLE; train with fc_norm: false")


def speculators(drafter: Any, serving: Serving, kind: str, architecture: str) -> dict[str, Any]:
    """The keys of config.json that all algorithms have, without their own and the layers' shape."""
    hf = drafter.target.hf
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": serving.k,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": serving.target,
        "architectures": hf.config.architectures or [type(hf).__name__],
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def blocks(drafter: DFlash, serving: Serving) -> layouts.Form:
    """DFlash and DSpark."""
    spark = drafter if isinstance(drafter, DSpark) else None
    body = layouts.llama_body(drafter, serving.length, drafter.config.layers)
    body |= {"model_type": "qwen3", "layer_types": ["full_attention"] * drafter.config.layers}
    config = speculators(drafter, serving, drafter.family, f"{type(drafter).__name__}DraftModel")
    config |= {
        "aux_hidden_state_layer_ids": layouts.layer_ids(drafter),
        "block_size": drafter.config.block_size,
        "draft_vocab_size": drafter.vocab.draft_size,
        "mask_token_id": drafter.config.mask_token,
        "sample_from_anchor": drafter.first == 0,
        "sliding_window_non_causal": True,
        "transformer_layer_config": body,
    }
    tensors: dict[str, Tensor] = {
        "fc.weight": layouts.by_layer(drafter.taps, drafter.fc.weight),
        "hidden_norm.weight": drafter.hidden_norm.weight,
        "norm.weight": drafter.norm.weight,
        **{f"layers.{name}": weight for name, weight in drafter.layers.named_parameters()},
        **layouts.head_tensors(drafter),
    }
    if spark is not None:
        config |= {
            "markov_rank": spark.config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        for name in ("markov_head", "confidence_head"):
            part = spark.get_submodule(name).named_parameters()
            tensors |= {f"{name}.{inner}": weight for inner, weight in part}
    return config, tensors


def peagle(drafter: PEagle, serving: Serving) -> layouts.Form:
    """EAGLE-3's layout, further layers after it; the masks' state in the order of fc's columns."""
    flags = layouts.eagle3_flags(drafter)
    body = layouts.llama_body(drafter, serving.length, drafter.config.layers)
    body["num_aux_hidden_states"] = flags.pop("num_aux_hidden_states")
    config = speculators(drafter, serving, "peagle", "PEagleDraftModel") | flags
    config |= {
        "eagle_aux_hidden_state_layer_ids": layouts.layer_ids(drafter),
        "mask_token_id": drafter.config.mask_token,
        "transformer_layer_config": body,
    }
    tensors = layouts.eagle3_tensors(drafter, "layers.0")
    for name, weight in drafter.more.named_parameters():
        number, _, rest = name.partition(".")
        tensors[f"layers.{int(number) + 1}.{rest}"] = weight
    tensors["mask_hidden"] = layouts.by_layer(drafter.taps, drafter.mask_hidden).view(1, 1, -1)
    return config, tensors
