"""Drafters that propose some of the target's tokens only, and know which by a stored buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from draftsmith.drafters.base import Drafter, State
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.vocab import VocabMap, most_frequent

DraftVocab = Annotated[
    int | None,
    Field(ge=1, description="Tokens it can draft, the most frequent in answers; default: all."),
]


class ReducedVocab(Drafter[State]):
    """Base of the families whose draft vocabulary may be smaller than the target's."""

    def keep(self, size: int) -> None:
        """Makes room for `size` target ids; until they are set, the lowest stand there."""
        if size < self.target.vocab_size:
            self.register_buffer("draft_ids", torch.arange(size))

    def choose(self, size: int | None, counts: Tensor | None) -> None:
        """Keeps the tokens counted most often in counts (V,), unless all are kept.

        Raises UserError where there are no counts.
        """
        if size is not None and size < self.target.vocab_size:
            if counts is None:
                raise UserError("draft_vocab: needs training answers to count tokens in")
            self.set_vocab(most_frequent(counts, size))

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
