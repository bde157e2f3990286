"""MTP modules that a target ships in its own checkpoint, under four kinds of names.

    model.mtp_layers.I.*    MiMo: token_layernorm, hidden_layernorm, input_proj (the state's half
                            first), final_layernorm, and the decoder layer beside them
    mtp.*                   Qwen3-Next, Qwen3.5: fc, pre_fc_norm_embedding, pre_fc_norm_hidden,
                            norm, layers.0.*; norms multiply by 1 + weight where the target's do
    model.layers.L+I.*      DeepSeek-V3, GLM-4.5: enorm, hnorm, eh_proj, shared_head.norm, and the
                            decoder layer beside them (L: the target's layers)

Names as vLLM 0.32 reads them (models/mimo_mtp.py, qwen3_next_mtp.py, deepseek_mtp.py,
glm4_moe_mtp.py). transformers leaves these tensors out when it loads the target. What our dense
block cannot hold (experts, MLA, scaled RoPE) is refused: DeepSeek-V3, GLM-4.5 and Qwen3-Next have
experts in their MTP layers. MiMo-7B's and the dense Qwen3.5's fit by name and shape; the tests read
tiny checkpoints of each kind, no real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.parts.layers import BlockConfig
from draftsmith.drafters.target.shell import Shell

_WANTED = {
    f"{part}.weight"
    for part in (
        "enorm", "hnorm", "eh_proj", "norm", "input_layernorm", "post_attention_layernorm",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj",
    )
}  # fmt: skip
_BIASES = {f"self_attn.{part}_proj.bias" for part in "qkv"}
_NORMS = {f"self_attn.{part}_norm.weight" for part in "qk"}
_GATED = ("self_attn.q_proj.weight", "self_attn.g_proj.weight")  # stored as one
_RENAMED = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "eh_proj.",
    "final_layernorm.": "norm.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "layers.0.": "",
    "shared_head.norm.": "norm.",
}
_SHARED = {"embed_tokens.weight", "shared_head.head.weight"}  # the target's own, stored again
_REASONS = {
    "experts": "is a mixture of experts",
    "kv_a_": "has latent attention (MLA)",
    "scale": "is quantised",
}


@dataclass(frozen=True)
class Layout:
    """prefix: of module {i}'s tensors; appended: modules are numbered on from the target's layers.
    state_first: eh_proj takes the state before the embedding; zero_first: as in MtpConfig."""

    prefix: str
    appended: bool = False
    state_first: bool = False
    zero_first: bool = False


_LAYOUTS = (
    Layout("model.mtp_layers.{i}.", state_first=True, zero_first=True),
    Layout("mtp."),
    # vLLM also zeroes these layouts' first embedding; SGLang and transformers do not.
    Layout("model.layers.{i}.", appended=True),
)


@dataclass
class Shipped:
    """What was found. block and zero_first: as in MtpConfig; modules: our name -> the stored one,
    for each; files: stored name -> file; offset: norms multiply by 1 + weight."""

    block: BlockConfig
    layout: Layout
    modules: list[dict[str, str]]
    files: dict[str, Path]
    offset: bool

    def load(self) -> list[dict[str, Tensor]]:
        """Each module's tensors under our names, in fp32."""
        return [{k: self._read(k, name) for k, name in names.items()} for names in self.modules]

    def _read(self, ours: str, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            tensor = file.get_tensor(name).float()
        if ours in _GATED and self.block.gated:  # head by head: queries, then the gate
            parts = tensor.view(self.block.num_heads, 2, self.block.head_dim, -1)
            return parts[:, _GATED.index(ours)].flatten(0, 1)
        if ours == "eh_proj.weight" and self.layout.state_first:
            return torch.cat([*reversed(tensor.chunk(2, dim=1))], dim=1)
        return tensor + 1.0 if self.offset and "norm" in ours else tensor


def find(target: Shell, count: int) -> Shipped:
    """The first `count` MTP modules of the target's checkpoint; only headers are read.

    Raises UserError where it has none or fewer, or such as no dense block here can hold.
    """
    spec, files = target.source.spec, target.source.tensor_files("init")
    for layout in _LAYOUTS:
        first = target.num_layers if layout.appended else 0
        prefixes = [layout.prefix.format(i=first + i) for i in range(count)]
        modules = [_module(files, prefix) for prefix in dict.fromkeys(prefixes)]
        if modules[0]:
            break
    else:
        tried = ", ".join(each.prefix.format(i=target.num_layers) + "*" for each in _LAYOUTS)
        raise UserError(f"init: {spec} ships no MTP weights ({tried}); use init: fresh")
    shipped = sum(map(bool, modules))
    if shipped < count:
        raise UserError(f"modules: {count}, but {spec} ships {shipped} MTP module(s); lower it")
    for names in modules:
        _check_names(spec, names)
    block = _block(target, files, modules[0])
    if block.gated:
        query, gate = _GATED
        modules = [names | {gate: names[query]} for names in modules]
    return Shipped(block, layout, modules, files, _offset(target))


def _module(files: dict[str, Path], prefix: str) -> dict[str, str]:
    """Our names of the tensors under a prefix, and the stored ones."""
    out = {}
    for name in files:
        if name.startswith(prefix):
            ours = name.removeprefix(prefix)
            theirs = next((start for start in _RENAMED if ours.startswith(start)), "")
            ours = _RENAMED.get(theirs, "") + ours.removeprefix(theirs)
            if ours not in _SHARED:
                out[ours] = name
    return out


def _check_names(spec: str, module: dict[str, str]) -> None:
    """Raises UserError unless the module is a dense block."""
    names = set(module)
    wanted = _WANTED | (names & (_BIASES | _NORMS))
    if extra := sorted(names - wanted):
        why = next((why for word, why in _REASONS.items() if word in extra[0]), "is no dense block")
        raise UserError(
            f"init: the MTP layer of {spec} {why} ({module[extra[0]]}), which this drafter's block "
            "cannot hold; use init: fresh"
        )
    if missing := sorted(wanted - names):
        raise UserError(f"init: the MTP layer of {spec} lacks {missing[0]}; use init: fresh")


def _block(target: Shell, files: dict[str, Path], module: dict[str, str]) -> BlockConfig:
    """The block's shape. Raises UserError for heads of another size and for scaled RoPE."""

    def height(ours: str) -> int:
        with safe_open(files[module[ours]], "pt") as file:
            return file.get_slice(module[ours]).get_shape()[0]

    block = BlockConfig.like(target.config)
    rope = getattr(target.config, "rope_parameters", None) or {}
    queries, size = height("self_attn.q_proj.weight"), block.num_heads * block.head_dim
    why = None
    if queries not in (size, 2 * size):
        why = f"has {queries} rows of queries where the target has {size}"
    elif rope.get("rope_type", "default") != "default":
        why = f"has {rope['rope_type']} RoPE"
    if why:
        raise UserError(
            f"init: the MTP layer of {target.source.spec} {why}, which this drafter's block cannot "
            "hold; use init: fresh"
        )
    return block.model_copy(
        update={
            "intermediate_size": height("mlp.gate_proj.weight"),
            "qkv_bias": "self_attn.q_proj.bias" in module,
            "qk_norm": "self_attn.q_norm.weight" in module,
            "rotary_share": rope.get("partial_rotary_factor") or 1.0,
            "gated": queries == 2 * size,
        }
    )


@torch.no_grad()
def _offset(target: Shell) -> bool:
    """Whether the target's norms multiply by 1 + weight (Gemma, Qwen3-Next): its final one."""
    weight = cast(Tensor, target.norm.weight).float()
    x = torch.ones_like(weight)  # its root mean square is 1
    scale = target.norm(x.to(target.dtype)).float()
    return bool((scale - weight - 1.0).abs().sum() < (scale - weight).abs().sum())
