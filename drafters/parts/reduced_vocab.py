"""Drafters that propose some of the target's tokens only, and know which by a stored buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter, State
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.vocab import VocabMap, most_frequent

DraftVocab = Annotated[
    int | None,
    Field(ge=1, description="Tokens it can draft, the most frequent in answers; default: all."),
]


def draft_size(asked: int | None, target: Shell) -> int:
    """Vd of a config's `draft_vocab`. Raises UserError for more tokens than the target has."""
    if asked is not None and asked > target.vocab_size:
        raise UserError(
            f"draft_vocab: {asked} is more than the target's {target.vocab_size} tokens"
        )
    return asked or target.vocab_size


class ReducedVocab(Drafter[State]):
    """Base of the families whose draft vocabulary may be smaller than the target's."""

    @classmethod
    def create(cls, target: Shell, config: Any, counts: Tensor | None = None) -> Self:
        """A fresh drafter: it can draft the tokens counted most often in counts (V,), unless that
        is all; its own heads start as the target's. Raises UserError where there are no counts."""
        drafter = cls(target, config)
        size = drafter.config.draft_vocab
        if size < target.vocab_size:
            if counts is None:
                raise UserError("draft_vocab: needs training answers to count tokens in")
            drafter.set_vocab(most_frequent(counts, size))
        with torch.no_grad():
            for head in drafter.own_heads():
                head.get_parameter("weight").copy_(drafter.target_rows())
        return drafter

    @abstractmethod
    def own_heads(self) -> Iterable[nn.Module]:
        """The lm_heads that it trains."""

    def keep(self, size: int) -> None:
        """Makes room for `size` target ids; until they are set, the lowest stand there."""
        if size < self.target.vocab_size:
            self.register_buffer("draft_ids", torch.arange(size))

    def set_vocab(self, vocab: VocabMap) -> None:
        self.vocab = vocab.to(next(self.parameters()).device)
        if vocab.ids is not None:
            self.draft_ids = vocab.ids.clone()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        result = super().load_state_dict(state_dict, strict, assign)
        if "draft_ids" in state_dict:
            self.set_vocab(VocabMap(self.target.vocab_size, state_dict["draft_ids"]))
        return result

    def target_rows(self) -> Tensor:
        """Rows (Vd, H) of the target's lm_head, times its logit scale.

        They give the target's own law, but for a softcap or a bias: servers' heads have neither.
        """
        return self._stored_rows() * self.target.logit_scale

    def by_target_rows(self, normed: Tensor) -> Tensor:
        """Logits (.., Vd) of states (.., H) by `target_rows`, which may lie on another device."""
        rows = self._stored_rows()
        # States are converted, not the table, which is far larger.
        return F.linear(normed.to(rows) * self.target.logit_scale, rows).to(normed.device)

    def _stored_rows(self) -> Tensor:
        rows, ids = self.target.lm_head.weight, self.vocab.ids
        return rows if ids is None else rows[ids.to(rows.device)]


class OneHead(ReducedVocab[State]):
    """Base of those whose every depth has one lm_head: its own, or the target's."""

    lm_head: nn.Linear | None

    def add_head(self, whose: str, width: int, size: int) -> None:
        """whose: "own" or "target". Over `size` tokens, of states (.., width)."""
        self.lm_head = nn.Linear(width, size, bias=False) if whose == "own" else None
        self.keep(size)

    def own_heads(self) -> Iterable[nn.Module]:
        return () if self.lm_head is None else (self.lm_head,)

    def unembed(self, normed: Tensor) -> Tensor:
        """Logits (.., Vd) of normed states (.., H)."""
        return self.by_target_rows(normed) if self.lm_head is None else self.lm_head(normed)
