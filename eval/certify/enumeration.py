"""Exact chances of everything an accept rule can do: nothing is sampled, so nothing is noise.

A rule is driven through its own `draws`, so that the serving code itself is what is certified. The
draft's randomness is enumerated too, and the target finishes what a round leaves short: what comes
out is the joint law of the next K + 1 tokens, to be compared with the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.drafters.policy import StaticTree
from draftsmith.eval.decoder.accept import Accepted

Result = TypeVar("Result")
Laws = list[Tensor]  # entry j (V,) * j + (V,): the law of token j after each prefix
ChainRule = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Accepted]  # as accept.chain
# As accept.without_replacement: (tokens, parents, p, q, draws).
TreeRule = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Accepted]


class Script:
    """A `draws` that takes the scripted outcomes, then the first possible ones, noting the rest."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.calls, self.chance = script, 0, 1.0
        self.unexplored: list[list[int]] = []

    def _take(self, chances: list[float]) -> int:
        """The outcome scripted for this call; an outcome of chance 0 never happens."""
        if self.calls == len(self.script):
            first, *others = [i for i, chance in enumerate(chances) if chance > 0]
            self.unexplored += [[*self.script, i] for i in others]
            self.script = [*self.script, first]
        taken = self.script[self.calls]
        self.calls += 1
        self.chance *= chances[taken]
        return taken

    def accept(self, prob: Tensor) -> Tensor:
        """Independent coins of any shape: an outcome is one pattern of all of them."""
        flat = prob.double().flatten().tolist()
        if not all(0 <= p <= 1 for p in flat):
            raise ValueError(f"accept: {flat} are not chances")
        patterns = list(product((True, False), repeat=len(flat)))
        pairs = (zip(flat, pattern, strict=True) for pattern in patterns)
        taken = self._take([math.prod(p if coin else 1 - p for p, coin in pair) for pair in pairs])
        return torch.tensor(patterns[taken], dtype=torch.bool).reshape(prob.shape)

    def pick(self, weights: Tensor) -> Tensor:
        """weights (.., V): an outcome is one index for each row."""
        rows = weights.double().reshape(-1, weights.shape[-1]).tolist()
        if not all(min(row) >= 0 and 0 < sum(row) < math.inf for row in rows):
            raise ValueError(f"pick: {rows} are not weights")
        choices = list(product(range(weights.shape[-1]), repeat=len(rows)))
        pairs = (zip(rows, choice, strict=True) for choice in choices)
        taken = self._take([math.prod(row[x] / sum(row) for row, x in pair) for pair in pairs])
        return torch.tensor(choices[taken]).reshape(weights.shape[:-1])


def enumerate_rule(rule: Callable[[Script], Result]) -> Iterator[tuple[float, Result]]:
    """Every outcome of rule(draws) with its exact chance. Inputs must be float64 to be exact."""
    scripts: list[list[int]] = [[]]
    while scripts:
        draws = Script(scripts.pop())
        result = rule(draws)
        scripts += draws.unexplored
        yield draws.chance, result


def random_laws(V: int, K: int, seed: int, zeros: float = 0.0) -> Laws:
    """Independent float64 laws for each prefix; a share of the entries is 0."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for j in range(K):
        z = 1.5 * torch.randn((V,) * (j + 1), generator=generator, dtype=torch.float64)
        cut = torch.rand(z.shape, generator=generator) < zeros
        cut.scatter_(-1, z.argmax(-1, keepdim=True), False)
        out.append(z.masked_fill(cut, float("-inf")).softmax(-1))
    return out


def points(laws: Laws) -> Laws:
    """Each law's likeliest token, as a point mass."""
    return [torch.zeros_like(law).scatter_(-1, law.argmax(-1, True), 1.0) for law in laws]


def continued(p: Laws, prefix: tuple[int, ...]) -> Tensor:
    """The target's joint law of everything after a prefix."""
    out = torch.ones((), dtype=torch.float64)
    for law in p[len(prefix) :]:
        out = out.unsqueeze(-1) * law[prefix]
    return out


def error(joint: Tensor, p: Laws) -> float:
    """Largest error of the text's law; joint is what `emitted` or `emitted_tree` returned."""
    return (joint.sum(0) - continued(p, ())).abs().max().item()


def emitted(rule: ChainRule, p: Laws, q: Laws, **how: Any) -> Tensor:
    """Joint law (K + 1, V, .., V) of accepted drafts and of the next K + 1 tokens, for a chain.

    how: length and drawn, see `written`.
    """
    V, K = len(p[0]), len(q)
    out = torch.zeros(K + 1, *(V,) * (K + 1), dtype=torch.float64)
    for chance, text in written(rule, p, q, **how):
        out[(len(text) - 1, *text)] += chance * continued(p, text)
    return out


def written(
    rule: ChainRule,
    p: Laws,
    q: Laws,
    length: Callable[[tuple[int, ...]], int] | None = None,
    drawn: Laws | None = None,
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """What one round of a chain can write, accepted drafts and a token, and with what chances.

    p: K + 1 laws, q: K. length(path): valid nodes; drawn: what drafts are drawn from (None: q).
    """
    V, K, drawn = len(p[0]), len(q), drawn or q
    for path in product(range(V), repeat=K):
        nodes = length(path) if length else K + 1
        if any(path[nodes - 1 :]):
            continue  # tokens past the valid ones are filler: token 0 stands for all
        chance = 1.0
        for j in range(nodes - 1):
            chance *= drawn[j][path[:j]][path[j]].item()
        if chance == 0.0:
            continue
        rows = torch.stack([law[path[:j]] for j, law in enumerate(p)])
        filler = torch.eye(V, dtype=torch.float64)[0]  # looks like a sure draft
        drafts = [law[path[:j]] if j < nodes - 1 else filler for j, law in enumerate(q)]
        inputs = torch.tensor([path]), torch.tensor([nodes]), rows[None], torch.stack(drafts)[None]
        for part, result in enumerate_rule(partial(rule, *inputs)):
            yield chance * part, (*path[: int(result.count)], int(result.token))


def over_rounds(rule: ChainRule, p: Laws, q: Laws, K: int, tokens: int) -> Tensor:
    """Joint law (V,) * tokens of what rounds of K drafts write one after another.

    p, q: a law after each prefix of up to tokens + K - 1 tokens. Rounds meet what a single one
    hides: rejections that are likelier after some texts than after others.
    """
    V = len(p[0])
    out = torch.zeros((V,) * tokens, dtype=torch.float64)

    def after(laws: Laws, prefix: tuple[int, ...], count: int) -> Laws:
        return [laws[len(prefix) + j][prefix] for j in range(count)]

    def go(prefix: tuple[int, ...], chance: float) -> None:
        if len(prefix) >= tokens:
            out[prefix[:tokens]] += chance
            return
        for text, part in once(prefix).items():
            go((*prefix, *text), chance * part)

    @cache
    def once(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        """What one round writes, and with what chance."""
        found: dict[tuple[int, ...], float] = {}
        for chance, text in written(rule, after(p, prefix, K + 1), after(q, prefix, K)):
            found[text] = found.get(text, 0.0) + chance
        return found

    go((), 1.0)
    return out


def emitted_tree(
    rule: TreeRule, p: Laws, q: Laws, tree: StaticTree, ranked: list[int] | None = None
) -> Tensor:
    """`emitted` for a tree whose children are drawn from q without replacement, in rank order.

    ranked: the tokens of a tree in which nothing is drawn, the root's (any) first.
    """
    parents = torch.tensor([tree.parents])
    V, K = len(p[0]), tree.k
    out = torch.zeros(K + 1, *(V,) * (K + 1), dtype=torch.float64)
    fillings = [(1.0, ranked)] if ranked else _drawn(tree.parents, q, [0], [()])
    for chance, tokens in fillings:
        prefixes: list[tuple[int, ...]] = [()]  # of each node, the tokens below the root down to it
        for parent, token in zip(tree.parents[1:], tokens[1:], strict=True):
            prefixes.append((*prefixes[parent], token))
        inner = [prefix if len(prefix) < K else () for prefix in prefixes]  # leaf rows are not read
        inputs = (
            torch.tensor([tokens]),
            parents,
            torch.stack([p[len(prefix)][prefix] for prefix in prefixes]).unsqueeze(0),
            torch.stack([q[len(prefix)][prefix] for prefix in inner]).unsqueeze(0),
        )
        for part, result in enumerate_rule(partial(rule, *inputs)):
            m = int(result.count)
            last = 0 if result.path is None else int(result.path[0, m])
            text = (*prefixes[last], int(result.token))
            out[(m, *text)] += chance * part * continued(p, text)
    return out


def _drawn(
    parents: Sequence[int], q: Laws, tokens: list[int], prefixes: list[tuple[int, ...]]
) -> Iterator[tuple[float, list[int]]]:
    """Every filling of a tree, with its chance, from the nodes drawn so far on."""
    i = len(tokens)
    if i == len(parents):
        yield 1.0, tokens
        return
    prefix = prefixes[parents[i]]
    law = q[len(prefix)][prefix].clone()
    for elder in range(1, i):
        if parents[elder] == parents[i]:
            law[tokens[elder]] = 0.0
    mass = law.sum().item()
    # Where the law has run out of tokens, the last one stands there as filler (grow._static).
    options = (
        [(x, w / mass) for x, w in enumerate(law.tolist()) if w > 0]
        if mass > 0
        else [(len(law) - 1, 1.0)]
    )
    for x, chance in options:
        for rest, filled in _drawn(parents, q, [*tokens, x], [*prefixes, (*prefix, x)]):
            yield chance * rest, filled
