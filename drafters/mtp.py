"""MTP: modules that predict further tokens from the target's last state (DeepSeek-V3,
arXiv 2412.19437, section 2.2).

A module norms an embedding and a state, joins them by `eh_proj`, passes one decoder layer and a
norm of its own; the target's embedding and lm_head are shared. The normed result is what lm_head
reads and what the next step takes for its state. The first state is the target's "normed" one. So
do vLLM 0.32, SGLang 0.5 and transformers 5.24 for every layout that parts/mtp_weights.py reads, but
that vLLM feeds GLM-4.5's state back before the norm.

modules: 1 is one module applied again and again (`SharedMtp`; FastMTP, arXiv 2509.18362). Pairs,
keys and positions: parts/one_layer.py. vLLM and SGLang run a single module so, whatever it was
trained for.

modules: n is a chain of n (`ChainMtp`), and no draft is longer. Pair t of module j is module
j - 1's state of pair t and x_{t+1+j}, at RoPE position t. What a depth-j query of anchor a sees:
module j's keys of pairs t <= a, the last j of which read drafted tokens; every state goes back to
target features. transformers (MTPCandidateGenerator) and vLLM's second runner (multi_module_mtp)
serve the same: both run pairs again whose drafted tokens were refused. In the slab the pair of
module j that holds x_p lies in slot p of layer j; slots up to j hold none.

Modules made from scratch fit dense layouts only: MiMo's, which vLLM and SGLang take with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.base import (
    Drafter,
    DrafterConfig,
    DrafterState,
    State,
    Unroll,
    entry,
    register,
)
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.grow import Proposal, grow
from draftsmith.drafters.parts import mtp_weights
from draftsmith.drafters.parts.layers import (
    MLP,
    Block,
    BlockConfig,
    RMSNorm,
    SelfAttention,
    after_attention,
    init_weights,
)
from draftsmith.drafters.parts.one_layer import OneLayer, OneLayerState, last_state
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.attention import tree_seen
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.slab import Slab


class MtpConfig(DrafterConfig):
    """init "target" takes block and zero_first from the target's checkpoint. Servers count the
    embedding beside position 0 as 0 in MiMo's layout (vLLM, SGLang).
    """

    modules: int = entry(1, "1 recursive, or one for each depth.", ge=1)
    init: Literal["fresh", "target"] = entry(
        "fresh", "target: start from the modules that its checkpoint ships."
    )
    block: Block = None
    zero_first: bool = entry(True, "The embedding beside position 0 counts as 0.")


class MtpModule(nn.Module):
    """One module, under DeepSeek's names; `norm` is its shared_head.norm."""

    def __init__(self, block: BlockConfig) -> None:
        super().__init__()
        H, eps = block.hidden_size, block.rms_norm_eps
        self.enorm = RMSNorm(H, eps)
        self.hnorm = RMSNorm(H, eps)
        self.eh_proj = nn.Linear(2 * H, H, bias=False)
        self.input_layernorm = RMSNorm(H, eps)
        self.self_attn = SelfAttention(block, H)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = MLP(block)
        self.norm = RMSNorm(H, eps)

    def inputs(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual, both (B, T, H)."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], dim=-1))
        return self.input_layernorm(joined), joined

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The normed state (B, T, H)."""
        gated = self.self_attn.g_proj is not None
        read = self.input_layernorm(residual) if gated else None
        return self.norm(after_attention(self, residual, mixed, read))


@register
class Mtp(Drafter[State]):
    """The family: `Mtp(target, config)` makes the class that config.modules asks for."""

    family = "mtp"
    Config = MtpConfig
    trees = True
    config: MtpConfig

    def __new__(cls, target: Shell | None = None, config: MtpConfig | None = None) -> Mtp:
        """copy.deepcopy calls it with a class of ours alone."""
        if cls is not Mtp or config is None:
            return super().__new__(cls)
        return super().__new__(ChainMtp if config.modules > 1 else SharedMtp)

    def __init__(self, target: Shell, config: MtpConfig) -> None:
        """Raises UserError for a block of another width than the target's."""
        block = BlockConfig.fitting(config.block, target, gate=True)
        super().__init__(target, config.model_copy(update={"block": block}))
        self.taps = ["normed"]
        self.layers = nn.ModuleList(MtpModule(block) for _ in range(config.modules))
        init_weights(self)

    @classmethod
    def create(cls, target: Shell, config: MtpConfig, counts: Tensor | None = None) -> Mtp:
        """A fresh drafter, or one with the target's own MTP weights.

        Raises UserError where init names those of a target that has none, or such as no block
        here holds.
        """
        if config.init == "fresh":
            return cls(target, config)
        found = mtp_weights.find(target, config.modules)
        if config.block is None:
            shape = {"block": found.block, "zero_first": found.layout.zero_first}
            config = config.model_copy(update=shape)
        drafter = cls(target, config)
        for module, tensors in zip(drafter.layers, found.load(), strict=True):
            module.load_state_dict(tensors)
        return drafter

    def module(self, j: int) -> MtpModule:
        return cast(MtpModule, self.layers[j])

    def fuse(self, features: dict[str, Tensor]) -> Tensor:
        return features["normed"].to(self.module(0).eh_proj.weight.dtype)

    def inputs(
        self, tokens: Tensor, state: Tensor, position: Tensor, j: int = 0
    ) -> tuple[Tensor, Tensor]:
        embedded = self.target.embedding(tokens).to(state.dtype)
        if self.config.zero_first:
            embedded = torch.where((position == 0).unsqueeze(2), 0.0, embedded)
        return self.module(j).inputs(embedded, state)

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        return self.target.unembed(hidden)


class SharedMtp(Mtp[OneLayerState], OneLayer):
    """One module for all depths."""

    @property
    def attention(self) -> SelfAttention:
        return self.module(0).self_attn

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        return self.module(0).finish(residual, mixed)


@dataclass
class ChainState(DrafterState):
    """slab: keys and values, one layer a module; states (B, n, H): what each module reads beside
    the next token."""

    slab: Slab
    states: Tensor


class ChainMtp(Mtp[ChainState]):
    """One module for each depth."""

    weights_per_depth = True

    def __init__(self, target: Shell, config: MtpConfig) -> None:
        super().__init__(target, config)
        self.longest = config.modules

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        """Modules are one causal pass each, over all positions: the next one reads them."""
        anchor = alignment.anchors.clamp(min=0).unsqueeze(2)  # (B, A, 1)
        seen = batch.segment.unsqueeze(2) == batch.segment.unsqueeze(1)
        seen &= batch.position.unsqueeze(1) <= batch.position.unsqueeze(2)  # (B, T, T)
        state, states = self.fuse(batch.features), []
        for j in range(min(alignment.exists.shape[2], self.config.modules)):
            following = F.pad(batch.tokens[:, 1 + j :], (0, min(1 + j, batch.tokens.shape[1])))
            x, residual = self.inputs(following, state, batch.position, j)
            attend = self.module(j).self_attn
            key, value = (attend.over_groups(kv) for kv in attend.keys(x, batch.position))
            query = attend.queries(x, batch.position)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen.unsqueeze(1))
            state = self.module(j).finish(residual, mixed)  # (B, T, H)
            states.append(state.gather(1, anchor.expand(-1, -1, state.shape[2])))
        return Unroll.of_states(torch.stack(states, dim=2), alignment, batch)

    def start(self, rows: int, capacity: int) -> ChainState:
        weight = self.module(0).eh_proj.weight
        states = weight.new_zeros(rows, self.config.modules, self.target.hidden_size)
        return ChainState(Slab(rows, capacity, weight.device), states)

    def extend(
        self, state: ChainState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        """Every module reads every token."""
        slab = state.slab
        view = slab.view(tokens.shape[1])
        slot = slab.slots(tokens.shape[1])  # (B, W)
        new = self.fuse(features)  # (B, W, H)
        for j in range(self.config.modules):
            before = torch.cat([state.states[:, j : j + 1], new[:, :-1]], dim=1)
            state.states[:, j] = last_state(new, counts, state.states[:, j])
            visible = torch.arange(view, device=tokens.device) <= slot.unsqueeze(2)  # (B, W, S)
            new = self._read(slab, j, tokens, before, slot, slot, visible)
        slab.commit(counts)

    def propose(
        self, state: ChainState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """A node of depth d is read by modules d, d + 1, ..: by the first for its law, by the
        others for the keys that deeper nodes see. Fed nodes lie in the slots from the root's on."""
        slab, k = state.slab, policy.k
        start = slab.length.clone()
        view = slab.view(policy.slots)
        # What module j reads beside the next tokens: of the nodes fed last, which `first` precede.
        states = [state.states[:, j : j + 1] for j in range(k)]
        first = d = 0

        def forward(tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
            nonlocal states, first, d
            W = tokens.shape[1]
            above = (parent - first).unsqueeze(2).expand(-1, -1, states[-1].shape[2])
            stands = (start + d).unsqueeze(1).expand(-1, W)
            slot, (_, visible) = slab.slots(W), tree_seen(start, seen, view)
            out = [
                self._read(slab, j, tokens, states[j].gather(1, above), slot, stands, visible)
                for j in range(d, k)
            ]
            slab.commit(torch.full_like(slab.length, W))
            states = [*states[: d + 1], *out[:-1]]
            depth = torch.full_like(tokens, d).flatten()
            first, d = seen.shape[2] - W, d + 1
            return self.logits(out[0].flatten(0, 1), tokens.flatten(), depth).unflatten(
                0, tokens.shape
            )

        proposal = grow(root, start, policy, self.vocab, sampler, noise, forward)
        slab.length.copy_(start)
        return proposal

    def _read(
        self,
        slab: Slab,
        j: int,
        tokens: Tensor,
        state: Tensor,
        slot: Tensor,
        stands: Tensor,
        visible: Tensor,
    ) -> Tensor:
        """Module j's states (B, W, H) of tokens that stand at `stands` and lie in `slot` (B, W)."""
        position = stands - 1 - j
        x, residual = self.inputs(tokens, state, position, j)
        attend = self.module(j).self_attn
        key, value = slab.write(j, *attend.keys(x, position), visible.shape[2], slot)
        slots = torch.arange(visible.shape[2], device=tokens.device)
        # Slots up to j hold no pair of module j. Their own outputs only ever reach such slots, and
        # see themselves, since a softmax over nothing is NaN.
        visible = (visible & (slots > j)) | (slots == slot.unsqueeze(2))
        query = attend.queries(x, position)
        return self.module(j).finish(residual, attend.attend(query, key, value, visible))
