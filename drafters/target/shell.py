"""A target without its body: what drafters, losses, replay and exports read of it.

    embedding, final norm, lm_head with its scale and softcap; config, tokenizer, identity

Loaded alone it costs what its embeddings cost: the HF model is built without decoder layers, and
only tensors that stand outside of them are read from the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from draftsmith.drafters.errors import UserError, loading
from draftsmith.drafters.target import selftest
from draftsmith.drafters.target.attention import quiet
from draftsmith.drafters.target.causal_lm import CausalLM, Ends, cut
from draftsmith.drafters.target.ends import settle_ends
from draftsmith.drafters.target.source import Source, resolve
from draftsmith.drafters.target.whole import LAYER, check_quantised, check_whole

# Digits, spaces, case, accents (composed and not), scripts, an emoji, code: where the normalisers
# and pre-tokenisers of two tokenizers with one vocabulary differ, some of these ids differ.
PROBE = (
    "It's 12345.6%  two\n\n\tHE'LL na\u00efve e\u0301 \u2014 \u6771\u4eac \U0001f642 a_b.C(x)[1] "
)


class Shell(Ends):
    """A frozen target's ends, with its tokenizer and name.

    hf: a model that may have no decoder layers; its config describes the whole target.
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
        cls, spec: str, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Shell:
        """Loads a hub id, a folder, a GGUF file or an alias as `Target.load` does, less the body.

        Raises UserError as that does, and for ends that are stored quantised.
        """
        source = resolve(spec, body=False)
        place, kind = defaults(device, dtype)
        with loading(f"target {spec}"):
            config = transformers.AutoConfig.from_pretrained(source.path)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.path)
        check_quantised(f"target {spec}", source, config, body=False)
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, source.path)
        hf = _loaded(load, spec, config, [], place, kind)
        hf.config = config
        settle_ends(f"target {spec}", hf, config, tokenizer)
        out = Shell(hf, tokenizer, source)
        out.become(source)
        return out

    def become(self, source: Source) -> None:
        """Takes the name of `source`, which holds the weights as they are now."""
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

        With "adapted_from" where `train/medusa2.py` made it: see there.
        """
        return dict(self._identity)

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a text: a load puts all of them into the generation config."""
        ids = self.hf.generation_config.eos_token_id
        if ids is None:
            ids = self.config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    def layer_states(self, layers: Sequence[int]) -> list[dict[str, Tensor]]:
        """The weights of some decoder layers, in the target's dtype: read from its checkpoint.

        Raises UserError for layers that cannot be read, or not through our attention.
        """
        source, kept = resolve(self.source.spec), sorted(set(layers))
        group = next(n for n, m in self.hf.named_modules() if m is self._layers)
        number = re.compile(rf"(?<=\.{group.rpartition('.')[2]}\.)\d+(?=\.)")
        tensors = {}
        for name, path in source.tensor_files("layers").items():
            found = number.search(name)
            if found is None or int(found[0]) in kept:
                with safe_open(path, "pt") as file:
                    new = number.sub(lambda n: str(kept.index(int(n[0]))), name, count=1)
                    tensors[new] = file.get_tensor(name)
        load = partial(type(self.hf).from_pretrained, None, state_dict=tensors)
        hf = _loaded(load, source.spec, self.hf.config, kept, self.device, self.dtype)
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


def _loaded(
    load: Callable[..., Any],
    spec: str,
    config: Any,
    layers: Sequence[int],
    device: torch.device,
    dtype: Any,
) -> Any:
    """What a `from_pretrained` makes of a model's checkpoint with some of its decoder layers alone:
    it reads no tensor that has no place there.

    Raises UserError where it cannot be loaded, and as `check_whole` does: for tensors that are
    missing, and for some outside of the layers that nothing reads, as are scales.
    """
    config = cut(config, layers)
    if hasattr(config, "quantization_config"):  # of the layers: what is read here must not be
        del config.quantization_config
    with loading(f"target {spec}"), quiet():
        hf, info = load(
            config=config, dtype=dtype, device_map={"": device}, output_loading_info=True
        )
    own = info["unexpected_keys"]
    if not layers:  # those that were left out have tensors of their own
        own = [name for name in own if not LAYER.search(f".{name}")]
    check_whole(f"target {spec}", hf, info | {"unexpected_keys": own})
    return hf.eval()


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of what decides tokenisation: vocabulary, added tokens, merges, scores, a probe.

    Not of file bytes, which change with every version that saves them, nor of the roles (pad =
    eos is a habit, not another tokenizer). The probe's ids stand for normaliser and pre-tokeniser,
    which libraries also write in several equal ways.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    merges = [m.split(" ") if isinstance(m, str) else list(m) for m in model.get("merges") or []]
    facts = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "added": sorted(
            [index, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized]
            for index, t in tokenizer.added_tokens_decoder.items()
        ),
        "merges": merges,
        "scores": model["vocab"] if isinstance(model.get("vocab"), list) else [],
        "probe": list(tokenizer(PROBE, add_special_tokens=False)["input_ids"]),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template (of all of them, where they have names), or "none"."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
