"""DFlash, DSpark and P-EAGLE as the speculators library stores them, and DFlash and DSpark in their
authors' own layouts (z-lab, DeepSpec).

Layer ids: speculators' are our own; target_layer_ids, at the top level or in dflash_config, count
layers' outputs from 0, one less. The slot that drafts depth 0 is the block's first (DSpark's rule)
where sample_from_anchor is true, its second one (DFlash's) where that is false; missing, DeepSpec's
layout means true, all others false. Two drafters that differ in it have the same tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.drafters.dflash import DFlash, DFlashConfig
from draftsmith.drafters.dspark import DSpark, DSparkConfig
from draftsmith.drafters.errors import UserError, naming
from draftsmith.drafters.foreign.eagle import (
    check_vocabulary,
    eagle_config,
    filled,
    in_layer,
    llama_block,
    own_tensors,
    vocabulary,
)
from draftsmith.drafters.foreign.files import StoredConfig, Tensors
from draftsmith.drafters.peagle import PEagle, PEagleConfig
from draftsmith.drafters.target.shell import Shell


def read(folder: Path, settings: dict[str, Any], target: Shell) -> DFlash:
    """DFlash or DSpark: see `foreign.load`."""
    path = folder / "config.json"
    inner = settings.get("dflash_config", {}) | settings.get("dspark_config", {})
    flags = StoredConfig(path, {**settings, **inner})
    shape = settings.get("transformer_layer_config", settings)
    spark = bool(flags.get("markov_rank"))
    deepspec = "speculators_model_type" not in settings and spark
    _check_slots(path, bool(flags.get("sample_from_anchor", deepspec)), spark)
    _check_attention(path, shape)
    check_vocabulary(path, shape, target)
    tensors = Tensors(folder)
    tensors.rename("model.", "")
    size = flags.get("draft_vocab_size") or target.vocab_size
    ids, whose = vocabulary(tensors, size, target.vocab_size)
    known: dict[str, Any] = {
        "taps": _layers(flags),
        "layers": shape["num_hidden_layers"],
        "block_size": flags["block_size"],
        "mask_token": flags["mask_token_id"],
        "draft_vocab": size,
        "head": whose,
        "block": llama_block(path, shape, shape["num_hidden_layers"]).model_copy(
            update={"qk_norm": True}
        ),
    }
    drafter: DFlash
    with naming(path):
        if spark:
            drafter = DSpark(target, DSparkConfig(markov_rank=flags["markov_rank"], **known))
        else:
            drafter = DFlash(target, DFlashConfig(**known))
    tensors.take_embeddings(target)
    for name, weight in drafter.weights().items():
        if name.startswith("confidence_head."):  # some are trained without: half, at every depth
            tensors.left.setdefault(name, weight)
    return filled(drafter, tensors, own_tensors(tensors, drafter, str), ids)


def read_peagle(folder: Path, settings: dict[str, Any], target: Shell) -> PEagle:
    """See `foreign.load`."""
    path, shape = folder / "config.json", settings["transformer_layer_config"]
    layers = shape["num_hidden_layers"]
    tensors = Tensors(folder)
    known, ids = eagle_config(path, settings, tensors, target, layers)
    config = PEagleConfig(layers=layers, mask_token=settings["mask_token_id"], **known)
    with naming(path):
        drafter = PEagle(target, config)
    tensors.take_embeddings(target)
    width = drafter.mask_hidden.numel()
    tensors.left["mask_hidden"] = tensors.take("mask_hidden", 1, 1, width).flatten()
    return filled(drafter, tensors, own_tensors(tensors, drafter, _of_peagle), ids)


def _of_peagle(name: str) -> str:
    """Our further layers count from 0, those of a file go on from EAGLE's."""
    stack, _, rest = name.partition(".")
    if stack != "more":
        return in_layer(name)
    number, _, rest = rest.partition(".")
    return f"layers.{int(number) + 1}.{rest}"


def _check_slots(path: Path, first: bool, spark: bool) -> None:
    """Raises UserError for the slot rule of the other family: nothing else shows it."""
    if first != spark:
        rule = "the block's first" if first else "the block's second"
        family = "dspark" if spark else "dflash"
        raise UserError(
            f"{path}: sample_from_anchor is {str(first).lower()}: depth 0 is drafted by {rule} "
            f"slot, and draftsmith's {family} has the other; it cannot be read"
        )


def _check_attention(path: Path, shape: dict[str, Any]) -> None:
    """Raises UserError for windows, which our layers have not."""
    if "sliding_attention" in (shape.get("layer_types") or ()):
        raise UserError(f"{path}: layer_types has sliding_attention; draftsmith's blocks have none")


def _layers(flags: StoredConfig) -> list[int]:
    """Tapped layers as we count them."""
    if "aux_hidden_state_layer_ids" in flags:
        return list(flags["aux_hidden_state_layer_ids"])
    return [output + 1 for output in flags["target_layer_ids"]]
