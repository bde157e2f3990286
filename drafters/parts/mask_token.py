"""The token whose embedding stands where a parallel drafter knows no token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.shell import Shell

MaskToken = Annotated[
    int | None,
    Field(ge=0, description="Id whose embedding masks; default: a mask, unused or pad token's."),
]


def mask_token(asked: int | None, target: Shell) -> int:
    """The id asked for; else the tokenizer's mask, a row of the embedding that it does not use, its
    padding or an end token. A shell without a tokenizer has shapes alone: any id will do.

    Raises UserError for an id without a row, and where there is no token to take.
    """
    rows, words = target.embedding.weight.shape[0], target.tokenizer
    if asked is not None:
        if asked >= rows:
            raise UserError(f"mask_token: {asked} is not in 0..{rows - 1}, the target's embeddings")
        return asked
    if words is None:
        return 0
    unused = len(words) if len(words) < rows else None
    for found in (words.mask_token_id, unused, words.pad_token_id, *target.eos_ids):
        if found is not None:
            return found
    raise UserError("mask_token: the tokenizer names none that could serve; give an id")
