"""DFlash's own settings: which layers it taps, which token masks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from draftsmith.drafters.dflash import even_taps
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.parts.mask_token import mask_token


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, [2, 10, 18, 26, 34]),  # Qwen3-8B-DFlash's outputs 1, 9, 17, 25, 33
        (30, 5, [2, 9, 15, 21, 28]),
        (8, 5, [2, 3, 4, 5, 6]),
        (30, 3, [2, 15, 28]),
        (4, 1, [3]),
    ],
)
def test_default_taps(layers: int, count: int, taps: list[int]) -> None:
    """The outputs that z-lab's rule names, counted from 0, one later."""
    assert even_taps(layers, count) == taps


def shell(rows: int = 48, words: int = 48, **roles: Any) -> Any:
    """What names a mask: an embedding of so many rows, a tokenizer of so many words, its roles."""
    named = {"mask_token_id": None, "pad_token_id": None} | roles
    ends = named.pop("eos", [])
    tokenizer = type("Words", (SimpleNamespace,), {"__len__": lambda self: words})(**named)
    embedding = torch.nn.Embedding(rows, 4)
    return SimpleNamespace(embedding=embedding, tokenizer=tokenizer, eos_ids=ends)


def test_default_mask() -> None:
    """The tokenizer's, else an unused row, else padding, else the end; any id of a bare shape."""
    everything: dict[str, Any] = {"mask_token_id": 7, "pad_token_id": 0, "eos": [5, 6]}
    assert mask_token(None, shell(rows=64, **everything)) == 7
    assert mask_token(3, shell(**everything)) == 3
    assert mask_token(None, shell(rows=64, pad_token_id=0)) == 48
    assert mask_token(None, shell(pad_token_id=0, eos=[5, 6])) == 0
    assert mask_token(None, shell(eos=[5, 6])) == 5
    with pytest.raises(UserError, match="mask_token: the tokenizer names none .* give an id"):
        mask_token(None, shell())
    assert mask_token(None, tiny.target()) == 0
