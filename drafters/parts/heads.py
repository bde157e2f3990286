"""What Medusa and Hydra share: heads on one state of the target, the j-th of which drafts depth j.

Every head reads g_a, the target's last state after its final norm (tap "normed"), of the anchor
alone: nothing of the text is cached but that. A head is residual blocks and an lm_head, and starts
as the target's own next-token law at the anchor (but for what `target_rows` leaves out). What else
its blocks read is each family's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.base import DrafterConfig, DrafterState, Unroll, entry
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.grow import Proposal, grow
from draftsmith.drafters.parts.one_layer import last_state
from draftsmith.drafters.parts.reduced_vocab import DraftVocab, ReducedVocab, draft_size
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.shell import Shell


class HeadsConfig(DrafterConfig):
    heads: int = entry(4, "One for each depth: the longest draft.", ge=1)
    layers: int = entry(1, "Residual blocks in each head.", ge=1)
    draft_vocab: DraftVocab = None
    head: Literal["own", "target"] = entry(
        "own", "own: each trains an lm_head, from the target's; or all share that one."
    )


@dataclass
class HeadsState(DrafterState):
    """g (B, H): the normed state at the anchor; length (B,): committed tokens."""

    g: Tensor
    length: Tensor


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)): the identity until it is trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = zeroed(nn.Linear(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def zeroed(linear: nn.Linear) -> nn.Linear:
    """The layer with all its weights at 0."""
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


class Heads(ReducedVocab[HeadsState]):
    """Base of the families with one head per depth."""

    Config = HeadsConfig
    weights_per_depth = True
    trees = True
    config: HeadsConfig

    def __init__(self, target: Shell, config: HeadsConfig) -> None:
        """Raises UserError for a draft vocabulary larger than the target's."""
        size = draft_size(config.draft_vocab, target)
        super().__init__(target, config.model_copy(update={"draft_vocab": size}))
        self.taps = ["normed"]
        self.longest = config.heads
        H = target.width("normed")
        self.blocks = nn.ModuleList(
            nn.Sequential(self._first_block(j, H), *map(ResidualBlock, [H] * (config.layers - 1)))
            for j in range(config.heads)
        )
        self.lm_heads: nn.ModuleList | None = None
        if config.head == "own":
            own = (nn.Linear(H, size, bias=False) for _ in range(config.heads))
            self.lm_heads = nn.ModuleList(own)
        self.keep(size)

    def own_heads(self) -> Iterable[nn.Module]:
        return self.lm_heads or ()

    @abstractmethod
    def _first_block(self, depth: int, hidden: int) -> nn.Module:
        """The block of head `depth` that reads the inputs."""

    @abstractmethod
    def _state(self, depth: int, g: Tensor, line: Tensor) -> Tensor:
        """What head `depth` makes of g (.., H) and line (.., depth + 1), the tokens x_{a+1} ..
        x_{a+1+depth}: (.., H)."""

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor | int) -> Tensor:
        """Each row through its depth's lm_head.

        depth (n,), whose values the host reads, or one int for rows (.., H) of a single depth.
        """
        if self.lm_heads is None:
            return self.by_target_rows(hidden)
        if isinstance(depth, int):
            return self.lm_heads[depth](hidden)
        order = depth.argsort(stable=True)
        parts = hidden[order].split(depth.bincount(minlength=self.config.heads).tolist())
        pairs = zip(self.lm_heads, parts, strict=True)
        out = torch.cat([head(part) for head, part in pairs])  # (n, Vd)
        return torch.empty_like(out).index_copy_(0, order, out)

    def unroll(self, batch: Batch, alignment: Alignment) -> Unroll:
        """One pass of every head over the anchors' states; nothing exists beyond the heads."""
        K = min(alignment.exists.shape[2], self.config.heads)
        row = torch.arange(batch.tokens.shape[0], device=batch.device).unsqueeze(1)
        g = self._features(batch.features)[row, alignment.anchors.clamp(min=0)]  # (B, A, H)
        line = batch.tokens[row.unsqueeze(2), alignment.compare]  # (B, A, K) x_{a+1} ..
        states = [self._state(j, g, line[:, :, : j + 1]) for j in range(K)]
        return Unroll.of_states(torch.stack(states, dim=2), alignment, batch)

    def _features(self, features: dict[str, Tensor]) -> Tensor:
        return features["normed"].to(next(self.parameters()).dtype)  # (B, T, H)

    def start(self, rows: int, capacity: int) -> HeadsState:
        weight = next(self.parameters())
        g = weight.new_zeros(rows, self.target.width("normed"))
        return HeadsState(g, torch.zeros(rows, dtype=torch.long, device=weight.device))

    def extend(
        self, state: HeadsState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        state.g.copy_(last_state(self._features(features), counts, state.g))
        state.length += counts

    def propose(
        self, state: HeadsState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        g, depths = state.g.unsqueeze(1), count()
        line = root.view(-1, 1, 1)  # (B, W, j + 1) of the depth that was fed last

        def forward(tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
            nonlocal line
            j, (W, fed) = next(depths), seen.shape[1:]
            if j:
                above = parent - (fed - W - line.shape[1])  # (B, W) within the depth before
                above = above.unsqueeze(2).expand(-1, -1, j)
                line = torch.cat([line.gather(1, above), tokens.unsqueeze(2)], dim=2)
            logits = self.logits(self._state(j, g, line), tokens, j)
            return logits.expand(-1, W, -1)  # one law for all where tokens are not read

        return grow(root, state.length, policy, self.vocab, sampler, noise, forward)
