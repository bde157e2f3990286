"""What trees are held to: their shape, their law, texts and counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import contracts as contract
import decodings as decoding
import parities as parity
import tiny
from draftsmith.drafters import batch as batches
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.eval.acceptance.parity import Parity, compare_trees
from draftsmith.eval.acceptance.walk import walk_tree
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text

GREEDY, PLAIN, WARM = Sampler(0.0), Sampler(1.0), Sampler(0.8, top_k=8, top_p=0.95)
ABLE = (
    "eagle",
    "medusa",
    "hydra",
    "dflash",
    "dspark",
    "peagle",
    "toy-block",
)  # families that draft trees
UNEVEN = StaticTree(((0,), (1,), (2,), (0, 0), (0, 2), (2, 1), (0, 0, 0), (2, 1, 0), (2, 1, 3)))
DRAWN = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)), drawn=True)
SHAPES = [Tree(3, budget=7, branch=3), Tree(3, budget=12, branch=12), UNEVEN]


# The contract: what is served is what is trained


@dataclass
class Moment:
    """A proposal of one row, and the tokens known to it, root included."""

    known: list[int]
    tokens: list[int]
    parents: list[int]
    q: Tensor | None


@torch.no_grad()
def play(made: Drafter, texts: list[list[int]], ids: list[int], policy: Policy) -> list:
    """Four rounds x rows, each of which goes down another path of the tree."""
    known = [list(text) for text in texts]
    state = made.start(len(known), max(map(len, known)) + 5 * (policy.slots + policy.k))
    contract.feed(made, state, [text[:-1] for text in known], [0] * len(known))
    made.begin(state)
    out = []
    for turn in range(4):
        root = torch.tensor([text[-1] for text in known])
        noise = Noise(11, torch.tensor(ids), torch.full((len(ids),), turn))
        proposal = made.propose(state, root, policy, PLAIN, noise)
        moments, committed = [], []
        for b, text in enumerate(known):
            tokens, parents = proposal.tokens[b].tolist(), proposal.parents[b].tolist()
            q = None if proposal.q is None else proposal.q[b]
            moments.append(Moment(list(text), tokens, parents, q))
            committed.append(len(text) - 1)
            text += [*line(tokens, parents, (5 * turn + 3 * ids[b]) % len(tokens)), 2 + turn]
        contract.feed(made, state, [text[:-1] for text in known], committed)
        out.append(moments)
    return out


def line(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    return [] if node == 0 else [*line(tokens, parents, parents[node]), tokens[node]]


def check_tree(made: Drafter, policy: Policy) -> None:
    """Every inner node's children are the right ranks of (or its q is) unroll's law there."""
    moments = [m for row in play(made, contract.prompts(4), [0, 1, 2, 3], policy) for m in row]
    texts, where = [], []
    for m in moments:
        for node in sorted(set(m.parents) - {-1}):
            path = line(m.tokens, m.parents, node)
            texts.append((m.known + path + [2 + len(texts) % 40] * policy.k)[: len(m.known) + 5])
            where.append((m, node, len(path)))
    batch = contract.read(made.target, texts, made.taps)
    anchors = torch.tensor([[len(m.known) - 2] for m, _, _ in where])
    later = (torch.arange(batch.tokens.shape[1]) > anchors).unsqueeze(2)
    for tap, values in batch.features.items():
        batch.features[tap] = torch.where(later, 30 * torch.randn(values.shape), values)
    with torch.no_grad():
        unroll = made.unroll(batch, batches.align(batch, policy.k, anchors))
        logits = made.logits(unroll.hidden, unroll.prev, unroll.depth)
    deep = 0
    for index, (m, node, depth) in zip(unroll.index[:, 0], where, strict=True):
        z = logits[index[depth]]
        children = [i for i, parent in enumerate(m.parents) if parent == node]
        taken = [m.tokens[i] for i in children]
        order = made.vocab.to_target(z.argsort(descending=True)).tolist()
        if m.q is not None:
            torch.testing.assert_close(m.q[node], z.softmax(-1), atol=1e-4, rtol=0)
            assert len(set(taken)) == len(taken)
        elif isinstance(policy, StaticTree):
            assert taken == [order[policy.paths[i - 1][-1]] for i in children]
        else:
            assert set(taken) == set(order[: len(taken)])
        deep += depth > 0
    assert deep > 15, "few nodes below the first depth were compared"


# Decoding


def check_greedy(made: Drafter, family: str, policy: Policy, count: int = 5) -> int:
    """Decoded texts are transformers' own, end tokens included; returns the accepted drafts."""
    prompts = decoding.ragged(count)
    texts = Decoder(made.target, made, policy).generate(prompts, GREEDY, 20)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.tokens == decoding.generated(family, tuple(prompt), 20, tiny.EOS)
        decoding.check_rounds(text, policy.k)
    return sum(decoding.accepted(texts))


# Parity


def trees_agree(made: Drafter, sampler: Sampler, policy: Policy) -> tuple[list[Text], Parity]:
    """Forty texts decoded with a match tree, against the walk along them."""
    prompts = [[5], *tiny.prompts(39, 2, decoding.VOCAB)]
    texts = Decoder(made.target, made, policy).generate(prompts, sampler, 20, seed=7)
    walks = walk_tree(made, parity.read(made.target, texts, sampler, made), policy)
    return texts, compare_trees(texts, walks, policy.k)
