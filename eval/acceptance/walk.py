"""Replay of match trees: the tree is walked along the text, proposing at the anchors reached.

A tree that is a deterministic function of the state accepts exactly as far as the text itself is
a path in it, so nothing is left to expectation: given the text, every round is known. The drafter
proposes from its own cache, fed with the features of one teacher-forced pass; no verify pass runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.batch import Batch, all_anchors, span_ends
from draftsmith.drafters.sampling import Noise
from draftsmith.drafters.target.attention import tree_shape
from draftsmith.eval.acceptance.intervals import Moments
from draftsmith.eval.decoder.text import Round


@dataclass
class TreeWalk:
    """The rounds of one text, and for each how near its tree was to another choice of nodes."""

    rounds: list[Round]
    margins: list[float]
    tokens: int  # that verify passes emit

    def counts(self, k: int) -> Moments:
        """Replay's moments where nothing is random."""
        m = np.array([r.accepted for r in self.rounds], dtype=int).reshape(-1, 1)  # (rounds, 1)
        tried = np.array([r.proposed for r in self.rounds], dtype=int).reshape(-1, 1)
        depth = np.arange(k)
        survived = (m > depth).sum(0).astype(float)
        reached = ((m >= depth) & (tried > depth)).sum(0).astype(float)
        mean = np.concatenate([[float(len(self.rounds))], survived])
        return Moments(mean, np.zeros(k + 1), reached, survived)


def _spans(batch: Batch) -> Tensor:
    """(4, n): every target-made span that has an anchor, by the row of the batch that it is in and
    positions in that row: of its segment's first token, its first anchor and its last token."""
    ends = span_ends(batch)
    found = []
    for b, row in enumerate(all_anchors(batch).tolist()):
        last = -1
        for a in row:
            end = int(ends[b, a + 1]) if a >= 0 else last
            if end != last:
                found.append((b, a - int(batch.position[b, a]), a, end))
                last = end
    return torch.tensor(found, device=batch.device).reshape(-1, 4).T


@torch.no_grad()
def walk_tree(drafter: Drafter, batch: Batch, policy: Policy) -> list[TreeWalk]:
    """The rounds that decoding under `policy` takes for each text of a batch the target has read.

    Its drafts are a deterministic function of the state. Texts are in `text_ratios`' order.
    """
    row, first, anchor, end = _spans(batch)
    walks = [TreeWalk([], [], tokens) for tokens in (end - anchor - 1).tolist()]
    if not walks:
        return walks
    rows = row.unsqueeze(1)
    widest = int((end - first).max()) + 1
    state = drafter.start(len(walks), widest + 2 * policy.slots)

    def feed(start: Tensor, counts: Tensor) -> None:
        """The next counts (n,) tokens of each text from position start (n,) on."""
        offset = torch.arange(max(int(counts.max()), 1), device=batch.device)
        places = (start.unsqueeze(1) + offset).clamp(max=batch.tokens.shape[1] - 1)
        features = {name: feature[rows, places] for name, feature in batch.features.items()}
        drafter.extend(state, batch.tokens[rows, places], features, counts)

    feed(first, anchor - first + 1)
    drafter.begin(state)
    none = Noise(0, torch.zeros_like(anchor), torch.zeros_like(anchor))
    while bool((anchor + 1 < end).any()):
        going = anchor + 1 < end
        root = batch.tokens[row, (anchor + 1).clamp(max=batch.tokens.shape[1] - 1)]
        proposal = drafter.propose(state, root, policy, batch.sampler, none)
        depth, ancestors = tree_shape(proposal.parents)  # (n, N), (n, N, N)
        node = torch.arange(depth.shape[1], device=batch.device)
        valid = node < proposal.length.unsqueeze(1)
        position = anchor.unsqueeze(1) + 1 + depth  # of each node in the text
        within = position <= end.unsqueeze(1)
        text = batch.tokens[rows, position.clamp(max=batch.tokens.shape[1] - 1)]
        right = valid & within & (proposal.tokens == text)
        whole = right & ~(ancestors & ~right.unsqueeze(1)).any(2)
        accepted = torch.where(whole, depth, 0).amax(1)
        proposed = torch.where(valid & within, depth, 0).amax(1)
        margin = proposal.margin
        for b in going.nonzero().flatten().tolist():
            # Positions within the text, as the decoder numbers them.
            start = int(anchor[b] - first[b])
            walks[b].rounds.append(Round(start, int(proposed[b]), int(accepted[b])))
            walks[b].margins.append(float("inf") if margin is None else float(margin[b]))
        counts = torch.where(going, accepted + 1, 0)
        feed(anchor + 1, counts)
        anchor = anchor + counts
    return walks
