"""Growing a proposal from a drafter's laws: chains, dynamic trees, trees of fixed shape.

A family supplies one function, `forward`: the laws after some new nodes, given which earlier nodes
each descends from. All that differs between shapes is which nodes are expanded, and how children
are taken: drawn, or ranked. Nothing here reads a tensor on the host, so that a round can be
captured as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.policy import Policy, StaticTree, Tree
from draftsmith.drafters.sampling import Noise, Purpose, Sampler, argmax, pick
from draftsmith.drafters.vocab import VocabMap

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter

# forward(tokens (B, W) target ids, parent (B, W), seen (B, W, F)) -> logits (B, W, Vd), called once
# a depth, from the root's on.
# "Fed" nodes are those that forward was given so far, the root first, then as they came: parent
# numbers them (0 for the root, which has none), and seen[.., f] = fed node f is the new node itself
# or above it. F counts the new ones.
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Proposal:
    """One round's draft. tokens (B, N) target ids, node 0 = root; parents (B, N), -1 at the root.

    q (B, N, Vd): row i is the law that node i's first child was drawn from, in draft ids, after
    the sampler (leaf rows are not read); None when the tokens are a deterministic function of the
    state. length (B,): valid nodes, the root included (1 = nothing proposed). margin (B,): of a
    ranked tree, how far in log likelihood (static: in logits) it was from another choice of nodes.
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None
    length: Tensor
    margin: Tensor | None = None


def grow(
    root: Tensor,
    position: Tensor,
    policy: Policy,
    vocab: VocabMap,
    sampler: Sampler,
    noise: Noise,
    forward: Forward,
) -> Proposal:
    """The proposal of a drafter that has laws. root (B,) and position (B,), where it stands."""
    if isinstance(policy, Tree):
        return _dynamic(root, policy, vocab, sampler, forward)
    if isinstance(policy, StaticTree):
        return _static(root, position, policy, vocab, sampler, noise, forward)
    return _chain(root, position, policy.k, vocab, sampler, noise, forward)


def from_states(drafter: Drafter, states: Tensor) -> Forward:
    """The forward of a family whose states (B, k, H) of every depth are known beforehand."""

    def forward(tokens: Tensor, parent: Tensor, seen: Tensor) -> Tensor:
        depth = seen.sum(2) - 1  # (B, W)
        hidden = states.gather(1, depth.unsqueeze(2).expand(-1, -1, states.shape[2]))
        logits = drafter.logits(hidden.flatten(0, 1), tokens.flatten(), depth.flatten())
        return logits.unflatten(0, depth.shape)

    return forward


def draw(
    logits: Tensor, vocab: VocabMap, sampler: Sampler, noise: Noise, position: Tensor, node: int
) -> tuple[Tensor, Tensor | None]:
    """One draft token (B,) in target ids from logits (B, Vd), and the law (B, Vd) it came from.

    position (B,): where the token will stand. The law is None when greedy (a point mass).
    """
    if sampler.greedy:
        return vocab.to_target(argmax(logits)), None
    q = sampler.probs(logits)
    return vocab.to_target(pick(q, noise.uniform(Purpose.DRAFT, position, node))), q


def _chain(
    root: Tensor,
    position: Tensor,
    k: int,
    vocab: VocabMap,
    sampler: Sampler,
    noise: Noise,
    forward: Forward,
) -> Proposal:
    B = root.shape[0]
    tokens, laws = [root], []
    for j in range(k):
        seen = torch.ones(B, 1, j + 1, dtype=torch.bool, device=root.device)
        parent = torch.full((B, 1), max(j - 1, 0), device=root.device)
        logits = forward(tokens[-1].unsqueeze(1), parent, seen).squeeze(1)  # (B, Vd)
        token, q = draw(logits, vocab, sampler, noise, position + 1 + j, j)
        tokens.append(token)
        if q is not None:
            laws.append(q)
    parents = torch.arange(-1, k, device=root.device).expand(B, -1)
    law = torch.stack([*laws, torch.zeros_like(laws[0])], dim=1) if laws else None
    return Proposal(torch.stack(tokens, dim=1), parents, law, torch.full_like(root, k + 1))


def _dynamic(
    root: Tensor, tree: Tree, vocab: VocabMap, sampler: Sampler, forward: Forward
) -> Proposal:
    """Expands by cumulative likelihood, then keeps the likeliest nodes of all (EAGLE-2)."""
    B, device = root.shape[0], root.device
    tokens = [root.unsqueeze(1)]  # candidates of every depth, in node order
    parents = [torch.full((B, 1), -1, device=device)]
    values: list[Tensor] = []  # of all candidates but the root
    front = tokens[0]  # (B, W) tokens of the nodes to expand
    node = torch.zeros(B, 1, dtype=torch.long, device=device)  # their candidate numbers
    value = torch.zeros(B, 1, device=device)
    parent = torch.zeros_like(node)  # of each, among the nodes fed so far
    seen = torch.ones(B, 1, 1, dtype=torch.bool, device=device)
    margin = torch.full((B,), math.inf, device=device)
    count = 1
    for j in range(tree.k):
        logits = forward(front, parent, seen).float()  # (B, W, Vd)
        W = front.shape[1]
        # The sampler's cuts are left out: cut tokens would all tie at minus infinity.
        law = torch.log_softmax(logits / (sampler.temperature or 1.0), dim=-1)
        c = min(tree.branch, law.shape[-1])
        best = law.topk(min(c + 1, law.shape[-1]), dim=-1)  # (B, W, c or c + 1)
        close = -best.values[:, :, c - 1 :].diff(dim=-1)  # to the first child that is passed over
        margin = torch.minimum(margin, F.pad(close, (0, 1), value=math.inf).flatten(1).amin(1))
        reached = (value.unsqueeze(2) + best.values[:, :, :c]).flatten(1)  # (B, W * c)
        drafts = vocab.to_target(best.indices[:, :, :c]).flatten(1)
        tokens.append(drafts)
        parents.append(node.repeat_interleave(c, dim=1))
        values.append(reached)
        if j + 1 < tree.k:
            chosen, gap = _likeliest(reached, tree.branch)  # (B, W')
            margin = torch.minimum(margin, gap)
            front, value = drafts.gather(1, chosen), reached.gather(1, chosen)
            node = count + chosen
            above = chosen // c  # (B, W') which node of this depth each descends from
            parent = seen.shape[2] - W + above  # this depth's nodes were the last to be fed
            new = chosen.shape[1]
            own = torch.eye(new, dtype=torch.bool, device=device).expand(B, -1, -1)
            line = seen.gather(1, above.unsqueeze(2).expand(-1, -1, seen.shape[2]))
            seen = torch.cat([line, own], dim=2)
        count += W * c
    kept, gap = _likeliest(torch.cat(values, dim=1), tree.budget)
    kept = torch.cat([torch.zeros_like(kept[:, :1]), kept + 1], dim=1)  # (B, N), ascending
    old = torch.cat(parents, dim=1).gather(1, kept)  # parents in candidate numbers
    number = torch.zeros(B, count, dtype=torch.long, device=device)
    number.scatter_(1, kept, torch.arange(kept.shape[1], device=device).expand(B, -1))
    renamed = number.gather(1, old.clamp(min=0))
    return Proposal(
        torch.cat(tokens, dim=1).gather(1, kept),
        torch.where(old < 0, -1, renamed),
        None,
        torch.full_like(root, kept.shape[1]),
        torch.minimum(margin, gap),
    )


def _likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of values (B, M): their places, ascending, and the gap (B,) to the next.

    Ties go to the lowest place, so that a node that is certain never displaces its parent.
    """
    order = values.sort(dim=1, descending=True, stable=True)
    chosen = order.indices[:, :count].sort(dim=1).values
    if values.shape[1] <= count:
        return chosen, torch.full_like(values[:, 0], math.inf)
    return chosen, order.values[:, count - 1] - order.values[:, count]


@dataclass
class _Layer:
    """One depth of a static tree: which nodes are expanded, and their children."""

    nodes: list[int]  # W
    parent: Tensor  # (W,) among fed nodes
    seen: Tensor  # (W, F)
    children: list[list[tuple[int, int]]]  # per expanded node: (node, rank)


@cache
def _layers(tree: StaticTree, device: torch.device) -> tuple[list[_Layer], Tensor]:
    """The depths of a tree, and its parents (N,). Kept for good: a captured round copies no
    host data, and its graph goes on reading what it read."""
    paths = ((), *tree.paths)
    children: list[list[tuple[int, int]]] = [[] for _ in paths]
    for i, path in enumerate(tree.paths, start=1):
        children[tree.parents[i]].append((i, path[-1]))
    fed: list[int] = []
    out = []
    for j in range(tree.k):
        nodes = [i for i, path in enumerate(paths) if len(path) == j and children[i]]
        parents = [fed.index(tree.parents[i]) if j else 0 for i in nodes]
        fed += nodes
        above = [[paths[i][: len(paths[f])] == paths[f] for f in fed] for i in nodes]
        parent, seen = torch.tensor(parents, device=device), torch.tensor(above, device=device)
        out.append(_Layer(nodes, parent, seen, [children[i] for i in nodes]))
    return out, torch.tensor(tree.parents, device=device)


def _static(
    root: Tensor,
    position: Tensor,
    tree: StaticTree,
    vocab: VocabMap,
    sampler: Sampler,
    noise: Noise,
    forward: Forward,
) -> Proposal:
    B = root.shape[0]
    tokens = [root] * tree.nodes
    laws: list[Tensor] = []
    margin = torch.full((B,), math.inf, device=root.device)
    layers, parents = _layers(tree, root.device)
    for j, layer in enumerate(layers):
        front = torch.stack([tokens[i] for i in layer.nodes], dim=1)  # (B, W)
        logits = forward(front, layer.parent.expand(B, -1), layer.seen.expand(B, -1, -1))
        if not tree.drawn:
            most = 1 + max(rank for below in layer.children for _, rank in below)
            top = logits.float().topk(min(most + 1, logits.shape[-1]), dim=-1)
            close = -top.values.diff(dim=-1)  # a rank and the next
            margin = torch.minimum(margin, F.pad(close, (0, 1), value=math.inf).flatten(1).amin(1))
            best = vocab.to_target(top.indices)  # (B, W, most or most + 1)
            for w, children in enumerate(layer.children):
                for child, rank in children:
                    tokens[child] = best[:, w, rank]
            continue
        law = sampler.probs(logits)  # (B, W, Vd)
        laws = laws or [torch.zeros_like(law[:, 0])] * tree.nodes
        for w, children in enumerate(layer.children):
            laws[layer.nodes[w]] = left = law[:, w]
            for child, _ in children:
                uniform = noise.uniform(Purpose.DRAFT, position + 1 + j, child)
                # Where the law has run out of tokens the accept rule refuses the child.
                token = pick(left, uniform).clamp(max=left.shape[1] - 1)  # (B,)
                left = left.scatter(1, token.unsqueeze(1), 0.0)
                tokens[child] = vocab.to_target(token)
    q = torch.stack(laws, dim=1) if laws else None
    length = torch.full_like(root, tree.nodes)
    ranked = None if tree.drawn else margin
    return Proposal(torch.stack(tokens, dim=1), parents.expand(B, -1), q, length, ranked)
