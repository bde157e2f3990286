"""A small causal LM as the drafter: pruned from the target, or any checkpoint of its tokenizer.

Token-only: a depth-j query sees the tokens up to x_{a+1+j} and nothing of the target, so rows are
shared between depths. Serving (vLLM `draft_model`, llama.cpp `draft-simple`, transformers'
assistant) does the same on the draft model's own cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterConfig, DrafterState, Unroll, entry, register
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.errors import UserError, loading
from draftsmith.drafters.grow import Proposal, grow
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target import selftest
from draftsmith.drafters.target.attention import chain_step, packed_step
from draftsmith.drafters.target.causal_lm import CausalLM, cut
from draftsmith.drafters.target.shell import Shell, tokenizer_hash
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.source import resolve
from draftsmith.drafters.target.whole import check_quantised, check_whole
from draftsmith.drafters.vocab import VocabMap


class SmallConfig(DrafterConfig):
    """architecture is filled in for a checkpoint: by it a trained one is loaded without the model
    that it started from.
    """

    layers: list[int] | None = entry(None, "Target layers to keep, counted from 0; or:")
    checkpoint: str | None = entry(None, "Any causal LM to start from: hub id, folder, GGUF file.")
    embeddings: Literal["shared", "own"] | None = entry(
        None, "layers: shared (default) with the target, frozen; own: trained copies."
    )
    architecture: dict[str, Any] | None = entry(None, "checkpoint: its config; filled in.")


@dataclass
class SmallState(DrafterState):
    """slab: the draft model's cache; last (B,): the anchor's token.

    drafted: whether the prompt has ended. From then on extend commits the root and accepted drafts,
    whose keys propose has already written, all but the last one, which the next propose rewrites.
    """

    slab: Slab
    last: Tensor
    drafted: bool = False


@register
class Small(Drafter[SmallState]):
    """See the module's docstring."""

    family = "small"
    Config = SmallConfig
    rows_shared = True
    config: SmallConfig

    def __init__(self, target: Shell, config: SmallConfig) -> None:
        """With weights made anew where they are the target's layers': `create` takes those.

        Raises UserError for layers the target lacks, or a checkpoint of another tokenizer.
        """
        if (config.layers is None) == (config.checkpoint is None):
            raise UserError("small: give either layers (to prune the target) or checkpoint")
        if config.checkpoint is not None and config.embeddings is not None:
            raise UserError("embeddings: a checkpoint has its own; leave the key out")
        super().__init__(target, config)
        if config.layers is not None:
            hf = _pruned(target, config.layers, config.embeddings or "shared")
        else:
            hf, self.config = _from_checkpoint(target, config)
        hf.requires_grad_(True)
        target.requires_grad_(False)  # shared embeddings are the target's own
        self.lm = CausalLM(hf)
        size = self.lm.vocab_size
        if size < target.vocab_size:
            self.vocab = VocabMap(target.vocab_size, torch.arange(size)).to(target.device)

    @classmethod
    def create(cls, target: Shell, config: SmallConfig, counts: Tensor | None = None) -> Small:
        """A draft model with the target's own layers, or with a checkpoint's."""
        drafter = cls(target, config)
        if config.layers is not None:
            states = target.layer_states(config.layers)
            for layer, state in zip(drafter.lm.layers, states, strict=True):
                layer.load_state_dict(state)
        return drafter

    def _apply(self, fn: Any, recurse: bool = True) -> Drafter:
        """Leaves shared embeddings as the target has them: of a spread one, its hooks send their
        inputs to where they lie."""
        shared = {id(t) for t in (*self.target.parameters(), *self.target.buffers())}
        return super()._apply(lambda t: t if id(t) in shared else fn(t), recurse)

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        # A draft model's head may be padded further than the target's.
        return self.lm.head(hidden)[..., : self.target.vocab_size]

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        """One causal pass; row a+1+j serves every (a, j) with that sum."""
        final = self.lm(batch.tokens, packed_step(batch.position, batch.segment)).final
        B, T = batch.tokens.shape
        row = torch.arange(B, device=batch.device).view(-1, 1, 1)
        flat = row * T + alignment.compare  # (B, A, K)
        used = torch.zeros(B * T, dtype=torch.bool, device=batch.device)
        used[flat[alignment.exists]] = True
        number = used.cumsum(0) - 1
        index = torch.where(alignment.exists, number[flat], -1)
        prev = batch.tokens.flatten()[used]
        return Unroll(final.flatten(0, 1)[used], index, prev, torch.zeros_like(prev))

    def start(self, rows: int, capacity: int) -> SmallState:
        slab = Slab(rows, capacity, self.lm.device)
        return SmallState(slab, torch.zeros_like(slab.length))

    def extend(
        self, state: SmallState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        if not state.drafted:
            self.lm(tokens, chain_step(state.slab, tokens.shape[1]))
        state.slab.commit(counts)
        last = tokens.gather(1, (counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        state.last.copy_(torch.where(counts > 0, last, state.last))

    def begin(self, state: SmallState) -> None:
        state.drafted = True

    def propose(
        self, state: SmallState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        """The first forward takes the last two tokens, rewriting one slot (as gpt-fast must when
        every draft was accepted), so that no case needs a branch."""
        slab = state.slab
        slab.commit(torch.full_like(slab.length, -1))
        last = state.last.unsqueeze(1)

        def forward(tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
            fed = tokens if seen.shape[2] > 1 else torch.cat([last, tokens], dim=1)
            final = self.lm(fed, chain_step(slab, fed.shape[1])).final[:, -1]
            slab.commit(torch.full_like(slab.length, fed.shape[1]))
            prev = tokens[:, -1]
            return self.logits(final, prev, torch.zeros_like(prev)).unsqueeze(1)

        position = slab.length + 1
        proposal = grow(root, position, policy, self.vocab, sampler, noise, forward)
        slab.commit(torch.full_like(slab.length, -policy.k))
        return proposal


def _pruned(target: Shell, layers: list[int], embeddings: str) -> Any:
    """An HF model of the target's class with the chosen layers, whose weights are yet to come."""
    for layer in layers:
        if not 0 <= layer < target.num_layers:
            raise UserError(f"layers: {layer} is not in 0..{target.num_layers - 1}")
    if not layers:
        raise UserError("layers: keep at least one layer")
    config = cut(target.hf.config, layers)
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    small = CausalLM(hf.to(target.device))
    small.norm.load_state_dict(target.norm.state_dict())
    if embeddings == "shared":
        hf.set_input_embeddings(target.embedding)
        hf.set_output_embeddings(target.lm_head)
    else:
        small.embedding.load_state_dict(target.embedding.state_dict())
        small.lm_head.load_state_dict(target.lm_head.state_dict())
    return hf


def _from_checkpoint(target: Shell, config: SmallConfig) -> tuple[Any, SmallConfig]:
    """The HF model of config.checkpoint, and the config that can build it again."""
    if config.architecture is not None:
        known = transformers.AutoConfig.for_model(**config.architecture)
        return transformers.AutoModelForCausalLM.from_config(known, dtype=torch.float32), config
    assert config.checkpoint is not None
    source = resolve(config.checkpoint)
    with loading(f"checkpoint: {config.checkpoint} (a model and its tokenizer)"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.path)
        named = f"checkpoint: {config.checkpoint}"
        check_quantised(named, source, transformers.AutoConfig.from_pretrained(source.path))
        hf, info = transformers.AutoModelForCausalLM.from_pretrained(
            source.path, dtype=torch.float32, output_loading_info=True
        )
    check_whole(named, hf, info)
    if tokenizer_hash(tokenizer) != target.identity()["tokenizer_hash"]:
        raise UserError(
            f"checkpoint: {config.checkpoint} has another tokenizer than the target "
            f"{target.source.spec}; a draft model must share it"
        )
    if words := selftest.misread(hf):
        raise UserError(
            f"checkpoint: {config.checkpoint} ({type(hf).__name__}) cannot be read through "
            f"draftsmith's attention (logits {words}); use a model of another family"
        )
    return hf, config.model_copy(update={"architecture": hf.config.to_dict()})
