"""An HF causal LM seen the way draftsmith reads it: features, pre-norm state, head.

Layer id k means the residual stream after k decoder layers (0 = embedding output). For k < L it
equals HF's hidden_states[k]; k = L is the last layer's output before the final norm, which HF does
not return. "normed" is the final norm's output.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import attention
from draftsmith.drafters.target.attention import Step

Tap = int | str


@dataclass
class TargetOutput:
    """final (B, T, H): the state before the final norm; features {tap: (B, T, H)}."""

    final: Tensor
    features: dict[str, Tensor] = field(default_factory=dict)


class Ends(nn.Module):
    """What stands before and after an HF model's decoder layers, of which it may have none: its
    embedding, final norm and head. Its attention is replaced by ours, its weights are untouched.

    Raises UserError for a model whose decoder layers or final norm cannot be found.
    """

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        self.config = hf.config.get_text_config()
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        # Not registered as modules a second time.
        decoder, layers = self._find_layers()
        object.__setattr__(self, "_decoder", decoder)
        object.__setattr__(self, "_layers", layers)
        attention.attend_by(hf, attention.NAME)
        object.__setattr__(self, "norm", self._find_final_norm())

    norm: nn.Module  # the final one
    _decoder: nn.Module
    _layers: nn.ModuleList

    @property
    def embedding(self) -> nn.Embedding:
        return self.hf.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        return self.hf.get_output_embeddings()

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def logit_scale(self) -> float:
        """What the lm_head's products are multiplied by: Cohere's scale, Granite's divisor."""
        scale = getattr(self.config, "logit_scale", None) or 1.0
        return scale / (getattr(self.config, "logits_scaling", None) or 1.0)

    @property
    def max_positions(self) -> int:
        """The longest text that the model's positions allow.

        With longrope and dynamic rope only up to their original length: beyond it all frequencies
        change, in every row of a batch at once, and a block across it is not what decoding one by
        one computes. YaRN goes to its original length times its factor, whichever of the two
        max_position_embeddings holds (vLLM: the same). Other scalings (linear, llama3) are fixed,
        and max_position_embeddings is taken at its word; windows forget, and limit nothing.
        """
        longest = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        rope = getattr(self.config, "rope_parameters", None) or {}
        # One for the model, or one for each type of layer.
        ropes = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
        for rope in ropes:
            original = rope.get("original_max_position_embeddings") or longest
            if rope.get("rope_type") in ("longrope", "dynamic"):
                longest = min(longest, original)
            elif rope.get("rope_type") == "yarn" and rope.get("factor"):
                longest = int(original * rope["factor"])
        return longest

    @property
    def windows(self) -> list[int]:
        """Lengths from which on some layer no longer sees a text's start: its sliding window, or
        chunk."""
        config = self.config
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        found = {getattr(config, name, None) for kind, name in sizes.items() if kind in kinds}
        return sorted(size for size in found if size)

    def width(self, tap: Tap) -> int:
        """The size of a tap's state. Raises UserError as `check_taps` does."""
        self.check_taps([tap])
        return self.hidden_size

    def widths(self, taps: Sequence[Tap]) -> list[int]:
        """The size of each tap's state. Raises UserError as `check_taps` does, and for a layer that
        stands there twice."""
        found = [self.width(tap) for tap in taps]
        if len(set(taps)) != len(taps):
            raise UserError(f"taps: {list(taps)} names a layer twice")
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def _find_layers(self) -> tuple[nn.Module, nn.ModuleList]:
        """The module that runs the decoder layers, and their list, which may be empty."""
        depth = self.num_layers
        # Llama-4's text model names itself as its decoder: what runs the layers is then a child.
        for decoder in (self.hf.get_decoder(), *self.hf.children()):
            lists = [m for m in decoder.children() if isinstance(m, nn.ModuleList)]
            lists = [m for m in lists if len(m) == depth] or [m for m in lists if not len(m)]
            if len(lists) == 1:
                return decoder, lists[0]
        raise UserError(
            f"{type(self.hf).__name__}: no single list of {depth} decoder layers was found; "
            "this model family is not supported"
        )

    def _find_final_norm(self) -> nn.Module:
        """The module that ran last in the decoder, after its layers: seen on two probe tokens."""
        ran: list[nn.Module] = []
        layers = self._layers
        children = [m for m in self._decoder.children() if m is not layers]
        hooks = [m.register_forward_hook(lambda m, i, o: ran.append(m)) for m in children]
        for last in layers[-1:]:
            hooks.append(last.register_forward_hook(lambda m, i, o: ran.clear()))
        position = torch.arange(2, device=self.device).unsqueeze(0)
        step = attention.packed_step(position, torch.zeros_like(position))
        with torch.no_grad():
            self._run(torch.zeros_like(position), step)
        for hook in hooks:
            hook.remove()
        if not len(layers):  # their place among the children is unknown
            ran = ran[-1:]
        if len(ran) != 1:
            raise UserError(
                f"{type(self.hf).__name__}: {len(ran)} modules follow the decoder layers where one "
                "final norm was expected; this model family is not supported"
            )
        return ran[0]

    def _run(self, tokens: Tensor, step: Step) -> None:
        # A 2D mask of ones switches HF's packed-sequence guess off; ours ignores it otherwise.
        with attention.active(step):
            self._decoder(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                # Drafts may stand past the end, where none is kept: longrope would switch over, a
                # table of positions would be outrun.
                position_ids=step.positions.clamp(max=self.max_positions - 1),
                use_cache=False,
            )

    def head(self, final: Tensor) -> Tensor:
        """Logits (.., V) of pre-norm states (.., H): final norm, lm_head, scale and softcap."""
        return self.unembed(self.norm(final).to(final.device))

    def unembed(self, normed: Tensor) -> Tensor:
        """Logits (.., V) of normed states (.., H)."""
        # A frozen bf16 lm_head may follow trained fp32 layers.
        logits = self.lm_head(normed.to(self.lm_head.weight.dtype))
        # The forms that HF's causal LMs use; the target's self-test catches any other.
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma-2
            logits = cap * torch.tanh(logits / cap)
        return logits.to(normed.device)  # the head may lie on another

    def check_taps(self, taps: Sequence[Tap], field_name: str = "taps") -> None:
        """Raises UserError for a tap that is neither "normed" nor a layer id in 0..L."""
        for tap in taps:
            if tap != "normed" and not (isinstance(tap, int) and 0 <= tap <= self.num_layers):
                raise UserError(
                    f"{field_name}: layer {tap!r} is not in 0..{self.num_layers} (0 = embeddings, "
                    f"{self.num_layers} = last layer before the final norm) nor 'normed'"
                )


class CausalLM(Ends):
    """A model with its layers."""

    trees = True  # it is read through our attention and the slab (a `Target` finds out)

    @property
    def layers(self) -> nn.ModuleList:
        return self._layers

    def forward(self, tokens: Tensor, step: Step, taps: Sequence[Tap] = ()) -> TargetOutput:
        """Runs tokens (B, T) as `step` says and returns the pre-norm state and the taps."""
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                seen[name] = args[0] if args else kwargs["hidden_states"]

            return hook

        hooks = [self.norm.register_forward_pre_hook(keep("final"), with_kwargs=True)]
        for tap in taps:
            if tap == "normed":
                hooks.append(self.norm.register_forward_hook(lambda m, i, o: seen.update(normed=o)))
            elif tap != self.num_layers:  # id k is what layer k reads
                layer = self.layers[int(tap)]
                hooks.append(layer.register_forward_pre_hook(keep(str(tap)), with_kwargs=True))
        try:
            self._run(tokens, step)
        finally:
            for hook in hooks:
                hook.remove()
        if self.num_layers in taps:
            seen[str(self.num_layers)] = seen["final"]
        # Layers may be spread over devices (accelerate's device_map).
        seen = {name: state.to(self.device) for name, state in seen.items()}
        return TargetOutput(seen.pop("final"), seen)


def cut(config: Any, layers: Sequence[int]) -> Any:
    """A model's config with only some of its decoder layers, in that order."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    depth = text.num_hidden_layers
    for name, value in vars(text).items():  # layer_types and the like: one entry a layer
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, [value[i] for i in layers])
    text.num_hidden_layers = len(layers)
    return config
