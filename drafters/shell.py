"""A target without its body: what drafters, losses, replay and exports read of it.

    embedding, final norm, lm_head with its scale and softcap; config, tokenizer, identity

Loaded alone it costs what its embeddings cost: the HF model is built without decoder layers, and
only tensors that stand outside of them are read from the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith.drafters import selftest, stored
from draftsmith.drafters.attention import quiet
from draftsmith.drafters.causal_lm import CausalLM, Ends, cut
from draftsmith.drafters.errors import LOAD_ERRORS, UserError, model_error, reason
from draftsmith.drafters.source import Source, resolve
from draftsmith.drafters.tokenizer_hash import template_hash, tokenizer_hash

_NUMBER = re.compile(r"\.(\d+)\.")
_QUANTISED = re.compile(r"(scales?|scale_inv|qweight|qzeros|packed|absmax)$")


class Shell(Ends):
    """A frozen target's ends, with its tokenizer and name.

    hf: a model that may have no decoder layers; its config tells of all that the target has.
    """

    tokenizer: Any
    source: Source
    _identity: dict[str, Any]

    def __init__(self, hf: Any, tokenizer: Any, source: Source) -> None:
        """tokenizer: None where only shapes are wanted; such a shell has no identity."""
        super().__init__(hf)
        self.tokenizer, self.source = tokenizer, source
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def load(
        cls,
        spec: str,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Shell:
        """Loads a hub id, a folder, a GGUF file or an alias as `Target.load` does, less the body.

        Raises UserError as that does, and for ends that are stored quantised.
        """
        source = resolve(spec, body=False)
        place, kind = defaults(device, dtype)
        try:
            config = AutoConfig.from_pretrained(source.path)
            tokenizer = AutoTokenizer.from_pretrained(source.path)
            hf = _with_layers([], source, config, place, kind)
        except LOAD_ERRORS as error:
            raise unloadable(spec, error) from None
        hf.config = config
        with suppress(OSError):  # it stays the config's where there is no such file
            hf.generation_config = GenerationConfig.from_pretrained(source.path)
        out = Shell(hf, tokenizer, source)
        out.become(source)
        return out

    def become(self, source: Source) -> None:
        """Goes by the name of `source`, which holds the weights as they are now."""
        self.source = source
        self._identity = {
            "spec": source.spec,
            "revision": source.revision,
            "tokenizer_hash": tokenizer_hash(self.tokenizer),
            "template_hash": template_hash(self.tokenizer),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
        }
        if record := getattr(self.hf.config, "adapted_from", None):
            self._identity["adapted_from"] = record

    def identity(self) -> dict[str, Any]:
        """What names this target in manifests and checkpoints.

        With "adapted_from" where `train/adapt.py` made it: see there.
        """
        return dict(self._identity)

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a text, from the generation config."""
        ids = self.hf.generation_config.eos_token_id
        if ids is None:
            ids = self.config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    def layer_states(self, layers: Sequence[int]) -> list[dict[str, Tensor]]:
        """The weights of some decoder layers, in the target's dtype: read from its checkpoint.

        Raises UserError for layers that cannot be read, or not through our attention.
        """
        source, kept = resolve(self.source.spec), sorted(set(layers))
        try:
            hf = _with_layers(kept, source, self.hf.config, self.device, self.dtype)
        except LOAD_ERRORS as error:
            raise unloadable(source.spec, error) from None
        if selftest.misread(hf):
            raise needs_own_attention(hf)
        read = CausalLM(hf).layers
        return [read[kept.index(layer)].state_dict() for layer in layers]


def defaults(
    device: str | torch.device | None, dtype: torch.dtype | None
) -> tuple[torch.device, Any]:
    """(device, dtype) of a load: the GPU where there is one; fp32 on the CPU, the checkpoint's own
    elsewhere."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return place, dtype or (torch.float32 if place.type == "cpu" else "auto")


def needs_own_attention(hf: Any) -> UserError:
    return UserError(
        f"layers: those of {type(hf).__name__} need their own attention and cannot be a draft "
        "model here; use another family, or checkpoint"
    )


def unloadable(spec: str, error: BaseException) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(f"target {spec}: transformers cannot load it ({reason(error)})")


def _with_layers(
    layers: Sequence[int], source: Source, config: Any, device: torch.device, dtype: Any
) -> Any:
    """The HF model of a source with some of its decoder layers, ascending: nothing else is read.

    Raises UserError for tensors that are missing or stored quantised, and what transformers raises.
    """
    config = cut(config, layers)
    if hasattr(config, "quantization_config"):  # of the layers: what is read here must not be
        del config.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    files = stored.files_by_name(source)
    chosen = _outside(files, empty) + [n for n in files if _layer(n) in layers]
    tensors = stored.read(source, {name: files[name] for name in chosen})
    _check_unquantised(source, files, tensors)
    with quiet():
        hf, info = type(empty).from_pretrained(
            None,
            config=config,
            state_dict={_renumbered(name, layers): t for name, t in tensors.items()},
            dtype=dtype,
            device_map={"": device},
            output_loading_info=True,
        )
    for name in sorted(info["missing_keys"]):
        if layers or _layer(name) is None:  # other layers may be of a part that reads no text
            raise model_error(source.spec, f"its checkpoint lacks {name}; copy the model again")
    return hf.eval()


def _outside(names: Iterable[str], empty: Any) -> list[str]:
    """The names that stand outside of all layers and in the empty model."""
    outside = [name for name in names if _layer(name) is None]
    wanted = {_ending(name) for name in empty.state_dict()}
    found = [name for name in outside if _ending(name) in wanted]
    own = {_ending(name) for name, _ in empty.named_parameters() if _layer(name) is None}
    # transformers renames some families' ends as it loads them: what they are called is not known.
    return outside if own - {_ending(name) for name in found} else found


def _check_unquantised(source: Source, names: Iterable[str], read: Mapping[str, Tensor]) -> None:
    """Raises UserError for a weight of a dtype that only means something beside its scales, and for
    scales beside a module of which something was read."""
    modules = {name.rpartition(".")[0] for name in read}
    marks = [n for n in names if n.rpartition(".")[0] in modules and _QUANTISED.search(n)]
    marks += [
        name
        for name, t in read.items()
        if name.endswith("weight") and not (t.is_floating_point() and t.itemsize > 1)
    ]
    for name in marks:
        raise model_error(
            source.spec, f"{name} is stored quantised and is not read here; name a checkpoint "
            "whose embeddings, final norm and lm_head are not"
        )  # fmt: skip


def _layer(name: str) -> int | None:
    """The number of the layer that a stored tensor belongs to: the first number in its name."""
    found = _NUMBER.search(name)
    return int(found[1]) if found else None


def _renumbered(name: str, layers: Sequence[int]) -> str:
    layer = _layer(name)
    return name if layer is None else _NUMBER.sub(f".{layers.index(layer)}.", name, count=1)


def _ending(name: str) -> str:
    """The module's own name and the parameter's: prefixes differ between checkpoints."""
    return ".".join(name.split(".")[-2:])
