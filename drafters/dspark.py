"""DSpark: DFlash's blocks, a Markov head over them and a confidence (arXiv 2607.05147).

Layers, context and mask tokens are drafters/dflash.py's; the slot rule is not. Slot s stands at
RoPE position a+1+s and predicts the token after it, so that depth j is slot j and the root's own
slot drafts depth 0 (`first` = 0): k tokens are a block of k slots. Speculators and vLLM call this
sample_from_anchor: true.

Hidden states come from one pass, drafts one after another: a head of rank r adds W2 W1[x_{a+1+j}]
to the logits of depth j. W1's rows begin at about unit length and W2 at 0, so that a fresh head is
the backbone alone and learns at the backbone's learning rate. A linear layer on the normed state
and W1's row predicts the chance that depth j is accepted (`extras["confidence"]`, a logit); nothing
that it learns from reaches the backbone or W1, which costs acceptance where it does (speculators
issue 757).

What a depth-j query of anchor a sees: c_t of t <= a and all slots of its own block; of tokens the
root, and in the head x_{a+1+j}. SGLang 0.5 and llama.cpp serve it at k = block_size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.base import Unroll, entry, register
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.dflash import BlockState, DFlash, DFlashConfig
from draftsmith.drafters.grow import Proposal, from_states, grow
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.shell import Shell


class DSparkConfig(DFlashConfig):
    training: ClassVar[frozenset[str]] = frozenset({"confidence_weight"})
    block_size: int = entry(8, "Slots of the longest block: the longest draft.", ge=1)
    markov_rank: int = entry(256, "Inner width of the head that reads the last token.", ge=1)
    confidence_weight: float = entry(
        1.0, "Weight of the confidence's cross-entropy beside the loss.", gt=0
    )


class MarkovHead(nn.Module):
    """Logits (n, Vd) that the last token (n,), a target id, adds. Names are those of servers."""

    def __init__(self, vocab: int, rank: int, draft_vocab: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, prev: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(prev))


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        for parameter in self.proj.parameters():
            nn.init.zeros_(parameter)


@register
class DSpark(DFlash):
    """See the module's docstring."""

    family = "dspark"
    Config = DSparkConfig
    first = 0
    confident = True
    config: DSparkConfig

    def __init__(self, target: Shell, config: DSparkConfig) -> None:
        super().__init__(target, config)
        rank, size = config.markov_rank, self.config.draft_vocab or target.vocab_size
        self.markov_head = MarkovHead(target.vocab_size, rank, size)
        self.confidence_head = ConfidenceHead(target.hidden_size + rank)

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        return super().logits(hidden, prev, depth) + self.markov_head(prev)

    def confidence(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """Logits (..) of the chance that what follows prev (..) is accepted; hidden (.., H)."""
        row = self.markov_head.markov_w1(prev)
        read = torch.cat([self.norm(hidden), row], dim=-1).detach()
        return self.confidence_head.proj(read).squeeze(-1).float()

    def propose(
        self, state: BlockState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        hidden = self.states(state, root, policy.k)  # (B, k, H)
        forward = from_states(self, hidden)
        out = grow(root, state.slab.length, policy, self.vocab, sampler, noise, forward)
        if policy.confidence is not None:
            survival = self.confidence(hidden, out.tokens[:, :-1]).sigmoid().cumprod(1)  # (B, k)
            out.length = 1 + (survival >= policy.confidence).long().sum(1)  # it never rises
        return out

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        out = super().unroll(batch, alignment)
        out.extras["confidence"] = self.confidence(out.hidden, out.prev)
        return out

    @property
    def own_weight(self) -> float:
        return self.config.confidence_weight

    def own_loss(
        self, batch: Batch, unroll: Unroll, rows: Tensor, place: Tensor, alpha: Tensor
    ) -> Tensor:
        """Cross-entropy of the confidence with the overlap that there was."""
        said = unroll.extras["confidence"][rows]
        return F.binary_cross_entropy_with_logits(said, alpha, reduction="none")
