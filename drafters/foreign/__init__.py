"""Drafters in other toolkits' and servers' formats, read as draftsmith drafters.

    config.json has                                          read by
    family and target                                        storage.load (our own)
    speculators_model_type eagle3                            eagle (vLLM, speculators)
    speculators_model_type dflash, dspark or peagle          blocks (the same)
    dflash_config, or an architecture of DFlash or DSpark    blocks (z-lab, DeepSpec, SGLang, vLLM)
    draft_vocab_size, or an architecture of EAGLE-3          eagle (EAGLE, SGLang, TensorRT-LLM)
    medusa_num_heads, or model_type medusa                   medusa (Medusa, vLLM)
    another architecture of EAGLE, or a Llama with an fc     eagle (EAGLE, SGLang, vLLM)
    a GGUF, alone in a folder or named itself                gguf (llama.cpp)
    any other causal LM                                      _small (transformers)

A reader takes every tensor of the file or fails: a missing or a left-over one is an error, as are
settings whose meaning draftsmith does not have. The writers (drafters/export) are not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.foreign import blocks, eagle, files, gguf, medusa
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target.shell import Shell


def load(path: Path, target: Shell) -> Drafter:
    """What `read` gives, as it is served: on the target's device, in its dtype."""
    return read(path, target).to(target.device, target.dtype).eval()


def read(path: Path, target: Shell) -> Drafter:
    """The drafter in a folder or GGUF of any known format, its own weights in fp32.

    Raises UserError for a format or setting that draftsmith does not have, for tensors that are
    missing, left over or of another shape, and for another target's drafter.
    """
    settings = files.config(path)
    if ours(settings):
        return storage.read(path, target)
    reader = _reader(path, settings)
    if (card := _card(path)) is not None:
        storage.check_target(path, card, target)
    try:
        return reader(path, settings, target)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {first['loc'][0]}: {first['msg']}; correct its config") from None


def ours(settings: dict[str, Any]) -> bool:
    return "family" in settings and isinstance(settings.get("target"), dict)


Reader = Callable[[Path, dict[str, Any], Shell], Drafter]


def _reader(path: Path, settings: dict[str, Any]) -> Reader:
    """What reads this format. Raises UserError for one that none does."""
    if files.gguf_in(path) is not None:
        return gguf.read
    kind = settings.get("speculators_model_type")
    architectures = settings.get("architectures") or ["?"]
    if kind == "peagle":
        return blocks.read_peagle
    if kind in ("dflash", "dspark") or "dflash_config" in settings:
        return blocks.read
    if kind not in (None, "eagle3"):
        raise UserError(
            f"{path}: speculators' {kind} is not read here; known are eagle3, peagle, dflash and "
            "dspark"
        )
    if "DFlash" in architectures[0] or "DSpark" in architectures[0]:
        return blocks.read
    if kind or "draft_vocab_size" in settings or "Eagle3" in architectures[0]:
        return eagle.read_eagle3
    if "medusa_num_heads" in settings or settings.get("model_type") == "medusa":
        return medusa.read
    if "Eagle" in architectures[0]:
        return eagle.read_eagle1
    if "model_type" in settings:
        return eagle.read_eagle1 if "fc.weight" in files.names(path) else _small
    raise UserError(
        f"{path}: no format that is known here ({architectures[0]}); give EAGLE or Medusa heads, "
        "DFlash or DSpark, as EAGLE, SGLang, TensorRT-LLM, vLLM or speculators store them, a GGUF, "
        "or a causal LM"
    )


def _small(path: Path, settings: dict[str, Any], target: Shell) -> Small:
    return Small(target, SmallConfig(checkpoint=str(path)))


def made_for(path: Path) -> str | None:
    """The target that a folder names as its own, where it names one.

    Raises UserError where `load` could not read the folder whatever the target.
    """
    settings = files.config(path)
    if not ours(settings):
        _reader(path, settings)
    if (card := _card(path)) is not None:
        return card.get("spec")
    verifier = settings.get("speculators_config", {}).get("verifier", {})
    named = settings.get("base_model_name_or_path") or verifier.get("name_or_path")
    return settings["target"].get("spec") if ours(settings) else named


def _card(path: Path) -> dict[str, Any] | None:
    """The target that an export's card names; None where there is no card of ours."""
    card = (path if path.is_dir() else path.parent) / "card.json"
    return files.json_of(card).get("target") if card.is_file() else None
