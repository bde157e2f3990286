"""An export read back: draft logits of the written files against the drafter's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters import foreign
from draftsmith.drafters.base import Drafter, Unroll
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.small import Small
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

# Largest difference of draft logits that rounding the weights may make, in standard deviations of
# them. A wrong layer, norm or order of rows makes one of the size of the logits themselves.
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.2}
DEPTHS, ROWS = 3, 64  # of the draft, and tokens of text, that are read back


@dataclass(frozen=True)
class ReadBack:
    """Draft logits of the written files against the drafter's: largest difference and the logits'
    standard deviation, over rows of real text."""

    difference: float
    spread: float
    rows: int


@torch.no_grad()
def read_back(target: Target, drafter: Drafter, folder: Path, serving: Serving) -> ReadBack:
    """Loads what was written and compares draft logits on held-out prompts, at the start of a text
    and beyond every window of the drafter's layers that a text served can outgrow.

    Raises UserError where they differ by more than rounding the weights explains.
    """
    back = foreign.load(folder, target)
    length = text_length(drafter, serving.length)
    ids = held_out(target, length)
    batch = batch_of([(ids, [True] * len(ids))], Sampler()).to(target.device)
    taps = list(dict.fromkeys([*drafter.taps, *back.taps]))
    batch = target.read(batch, taps) if taps else batch
    ours, theirs = _logits(drafter, batch), _logits(back, batch)
    if ours.shape != theirs.shape:
        raise UserError(f"{folder}: read back as another drafter; this is a bug in draftsmith")
    found = ReadBack(float((ours - theirs).abs().max()), float(ours.std()), len(ours))
    if not found.difference <= ROUNDING[serving.dtype] * found.spread:
        kind = str(serving.dtype).removeprefix("torch.")
        raise UserError(
            f"{folder}: draft logits read back differ by {found.difference:.3g} (they spread by "
            f"{found.spread:.3g}); this is a bug in draftsmith, or {kind} is too coarse: export "
            "as float32"
        )
    return found


def text_length(drafter: Drafter, longest: int) -> int:
    """Tokens to read: ROWS beyond the last window that texts of up to `longest` outgrow."""
    windows = drafter.lm.windows if isinstance(drafter, Small) else []
    passed = max((window for window in windows if window < longest), default=0)
    return min(passed + ROWS, longest)


def held_out(target: Target, length: int) -> list[int]:
    """A text of about that many tokens: the longest of some prompts, or all of them, repeated."""
    texts = encode(product_prompts("heldout")[:8], target)
    longest = max(texts, key=len)
    if len(longest) >= length or length <= ROWS:
        return longest[:length]
    every = [token for text in texts for token in text]
    return (every * (length // len(every) + 1))[:length]


def _logits(drafter: Drafter, batch: Batch) -> Tensor:
    """Draft logits (n, V) over target ids: of the first rows, and of the last ones."""
    unrolled = drafter.unroll(batch, align(batch, min(DEPTHS, drafter.longest or DEPTHS)))
    assert isinstance(unrolled, Unroll)
    parts: tuple[Tensor, ...] = (unrolled.hidden, unrolled.prev, unrolled.depth)
    if len(unrolled.hidden) > 2 * ROWS * DEPTHS:
        ends = slice(None, ROWS * DEPTHS), slice(-ROWS * DEPTHS, None)
        parts = tuple(torch.cat([part[end] for end in ends]) for part in parts)
    return drafter.vocab.scatter(drafter.logits(*parts)).float()
