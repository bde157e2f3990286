"""Which tokens a target tends to say, where its answers alone are too few to tell.

A draft vocabulary keeps the tokens that stood most often in the training answers. Where fewer
distinct tokens stood there than it shall hold, the places left over go to those that the target
came nearest to saying: its own law, averaged over the positions it made. The tokens that a
tokenizer happens to number lowest, which is what a sort of zeros would take, are a worse guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.drafters.target.shell import Shell
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Samples
from draftsmith.train.states.states import States

TEXTS = 64  # conversations that the law is averaged over
_ROWS = 256  # positions whose logits are alive at a time


def token_counts(
    target: Shell, states: States, samples: Samples, indices: Sequence[int], wanted: int | None
) -> Tensor:
    """(V,): how often each token stands in the answers; below 1, what the prior adds.

    wanted: tokens that a draft vocabulary shall hold, None = all. The counts are whole numbers
    (long) unless fewer than that were seen.
    """
    counts = samples.token_counts(indices)
    if wanted is None or int((counts > 0).sum()) >= wanted:
        return counts
    return counts + unigram(target, states, samples, indices[:TEXTS]).to(counts.device)


@torch.no_grad()
def unigram(target: Shell, states: States, samples: Samples, indices: Sequence[int]) -> Tensor:
    """(V,): the target's law at temperature 1, averaged over the positions it made; sums to 1."""
    total = torch.zeros(target.vocab_size, device=target.device)
    count = 0
    for index in indices:
        batch = states.fill(collate(samples, [[index]], target.max_positions), [[index]])
        assert batch.final is not None
        made = batch.made[0].clone()
        made[0] = False  # a text's first token has no law before it
        for where in made.nonzero().squeeze(1).split(_ROWS):
            logits = target.head(batch.final[0, where - 1]).float()  # (n, V)
            total += torch.softmax(logits, dim=-1).sum(0)
            count += len(where)
    return total / max(count, 1)
