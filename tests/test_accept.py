"""Accept rules, enumerated exactly: the serving code itself is driven through a scripted `draws`.

The draft's own randomness is enumerated too, so what is compared is the law of the text that comes
out, over K + 1 tokens, with the target's own law; the target finishes what a round leaves short.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.sampling import Noise
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder.accept import Accepted, KeyedDraws
from exact import enumerate_rule

Laws = list[Tensor]  # entry j (V,) * j + (V,): the law of token j after each prefix
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Any], Accepted]
Length = Callable[[tuple[int, ...]], int]
EXACT = 1e-12


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


def normed(laws: Laws) -> Laws:
    return [law / law.sum(-1, keepdim=True) for law in laws]


def every_other(laws: Laws, first: int) -> Laws:
    """The laws kept to the tokens first, first + 2, .."""
    return normed([law * (torch.arange(len(law)) % 2 == first) for law in laws])


def points(laws: Laws) -> Laws:
    return [torch.zeros_like(law).scatter_(-1, law.argmax(-1, True), 1.0) for law in laws]


def pair(kind: str, V: int, K: int) -> tuple[Laws, Laws]:
    """p (K + 1 laws) and q (K laws)."""
    p, q = random_laws(V, K + 1, 1), random_laws(V, K, 2)
    if kind == "q has zeros":
        q = random_laws(V, K, 2, zeros=0.5)
    elif kind == "p has zeros":
        p = random_laws(V, K + 1, 1, zeros=0.5)
    elif kind == "both have zeros":
        p, q = random_laws(V, K + 1, 3, zeros=0.5), random_laws(V, K, 4, zeros=0.5)
    elif kind == "equal":
        q = p[:K]
    elif kind == "equal, then disjoint":
        q = p[:1] + every_other(q, 0)[1:]
        p = p[:1] + every_other(p, 1)[1:]
    elif kind == "disjoint":
        p, q = every_other(p, 1), every_other(q, 0)
    elif kind == "point masses":
        q = points(q)
    return p, q


KINDS = ["plain", "q has zeros", "p has zeros", "both have zeros", "equal", "equal, then disjoint",
         "disjoint", "point masses"]  # fmt: skip
SIZES = [(3, 3), (4, 2), (5, 1)]


def continued(p: Laws, prefix: tuple[int, ...]) -> Tensor:
    """The target's joint law of everything after a prefix."""
    out = torch.ones((), dtype=torch.float64)
    for law in p[len(prefix) :]:
        out = out.unsqueeze(-1) * law[prefix]
    return out


def emitted(
    rule: Rule, p: Laws, q: Laws, length: Length | None = None, drawn: Laws | None = None
) -> Tensor:
    """Joint law (K + 1, V, .., V) of accepted drafts and of the next K + 1 tokens.

    length(path): valid nodes; drawn: what drafts are drawn from, q itself unless given.
    """
    V, K, drawn = len(p[0]), len(q), drawn or q
    out = torch.zeros(K + 1, *(V,) * (K + 1), dtype=torch.float64)
    for path in product(range(V), repeat=K):
        nodes = length(path) if length else K + 1
        if any(path[nodes - 1 :]):
            continue  # tokens past the valid ones are filler: token 0 stands for all
        chance = 1.0
        for j in range(nodes - 1):
            chance *= drawn[j][path[:j]][path[j]].item()
        if chance == 0.0:
            continue
        rows = [law[path[:j]] for j, law in enumerate(p)]
        junk = torch.eye(V)[0]  # filler looks like a sure draft
        beside = [law[path[:j]] if j < nodes - 1 else junk for j, law in enumerate(q)]
        inputs = (
            torch.tensor([path]),
            torch.tensor([nodes]),
            torch.stack(rows).unsqueeze(0),
            torch.stack([b.double() for b in beside]).unsqueeze(0),
        )
        for part, result in enumerate_rule(lambda draws, inputs=inputs: rule(*inputs, draws)):
            m = int(result.count)
            text = (*path[:m], int(result.token))
            out[(m, *text)] += chance * part * continued(p, text)
    return out


def error(joint: Tensor, p: Laws) -> float:
    return (joint.sum(0) - continued(p, ())).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("V", "K"), SIZES)
def test_chain_keeps_the_target_law(kind: str, V: int, K: int) -> None:
    """The first token, and all tokens together, follow the target exactly."""
    p, q = pair(kind, V, K)
    joint = emitted(accept.chain, p, q)
    first = joint.sum(0).flatten(1).sum(1)
    torch.testing.assert_close(first, p[0], atol=EXACT, rtol=0)
    assert error(joint, p) < EXACT


@pytest.mark.parametrize("kind", ["plain", "both have zeros", "disjoint"])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_chain_stops_at_the_valid_length(kind: str, nodes: int) -> None:
    """Filler past the valid nodes is neither accepted nor subtracted."""
    p, q = pair(kind, 3, 3)
    joint = emitted(accept.chain, p, q, length=lambda path: nodes)
    assert error(joint, p) < EXACT
    assert joint[nodes:].sum() == 0


def test_chain_with_a_length_that_looks_back() -> None:
    """Adaptive length may look at drafts before the one it drops."""
    p, q = pair("plain", 3, 3)
    joint = emitted(accept.chain, p, q, length=lambda path: 2 if path[0] == 1 else 4)
    assert error(joint, p) < EXACT
    peeks = emitted(accept.chain, p, q, length=lambda path: 1 if path[0] == 1 else 4)
    assert error(peeks, p) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_chain_acceptance_given_the_text(kind: str) -> None:
    """What replay rests on: given the text x, depth j survives with min(1, q_j(x) / p_j(x))."""
    p, q = pair(kind, 3, 3)
    joint = emitted(accept.chain, p, q)
    text = joint.sum(0)
    survival = torch.ones_like(text)
    for j in range(3):
        ratio = (q[j] / p[j]).clamp(max=1).nan_to_num(0.0)
        survival = survival * ratio.reshape(*ratio.shape, *(1,) * (3 - j))
        reached = joint[j + 1 :].sum(0)
        torch.testing.assert_close(reached, survival * text, atol=EXACT, rtol=0)


class Coins:
    """A `draws` whose picks count for nothing: the wrong rules below draw their own token."""

    def __init__(self, draws: Any) -> None:
        self.accept = draws.accept

    def pick(self, weights: Tensor) -> Tensor:
        return torch.zeros(weights.shape[:-1], dtype=torch.long)


def corrected_from_p(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
    """The wrong rule that looks right: after a rejection, draw from p again."""
    count = accept.chain(drafts, length, p, q, Coins(draws)).count
    return Accepted(count, draws.pick(p[torch.arange(len(count)), count]))


def sharpened(laws: Laws) -> Laws:
    return normed([law**1.3 for law in laws])


@pytest.mark.parametrize(("V", "K"), SIZES)
def test_wrong_rules_are_caught(V: int, K: int) -> None:
    """Three tempting mistakes bend the text's law, and the check above sees each of them."""
    p, q = pair("plain", V, K)
    assert error(emitted(corrected_from_p, p, q), p) > 1e-3
    # Judged by a q that is not the law the draft was drawn from (say, before the sampler).
    assert error(emitted(accept.chain, p, q, drawn=sharpened(q)), p) > 1e-3
    # An argmax draft judged by q(x), as if it had been sampled.
    assert error(emitted(accept.chain, p, q, drawn=points(q)), p) > 1e-3
    assert error(emitted(accept.chain, p, points(q)), p) < EXACT


def match(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
    """accept.match as the decoder calls it: the target draws its own token at every node."""
    return accept.match(drafts, length, draws.pick(p))


@pytest.mark.parametrize("kind", ["plain", "p has zeros"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("guess", [[0, 0, 0], [2, 1, 2], [1, 1, 0]])
def test_match_keeps_the_target_law(kind: str, nodes: int, guess: list[int]) -> None:
    """A deterministic draft changes how many passes there are, never the text."""
    p = pair(kind, 3, 3)[0]
    proposed = [torch.zeros_like(law) for law in p[:3]]
    for law, token in zip(proposed, guess, strict=True):
        law[..., token] = 1.0
    joint = emitted(match, p, proposed, length=lambda path: nodes)
    assert error(joint, p) < EXACT
    assert joint[nodes:].sum() == 0
    for j in range(nodes - 1):  # accepted is exactly where the text goes along the guess
        along = joint.sum(0)[tuple(guess[: j + 1])].sum()
        torch.testing.assert_close(joint[j + 1 :].sum(), along, atol=EXACT, rtol=0)


def test_match_that_takes_the_token_one_row_late_is_caught() -> None:
    """The token after m accepted drafts stands in row m, not m + 1."""
    p, q = pair("point masses", 3, 2)

    def late(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
        choice = draws.pick(p)
        right = accept.match(drafts, length, choice)
        at = (right.count + 1).clamp(max=choice.shape[1] - 1)
        return Accepted(right.count, choice.gather(1, at.unsqueeze(1)).squeeze(1))

    assert error(emitted(late, p, q), p) > 1e-3


def test_rows_are_judged_alone() -> None:
    """Ragged rows in one batch give what each gives alone."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(6, 4, 5, generator=generator).softmax(-1)
    q = torch.rand(6, 3, 5, generator=generator).mul(3).softmax(-1)
    drafts = torch.randint(0, 5, (6, 3), generator=generator)
    length = torch.tensor([1, 2, 3, 4, 4, 2])
    rows, rounds = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([1, 2, 3, 4, 5, 6])
    position = torch.tensor([7, 8, 9, 3, 2, 1])

    def run(some: slice) -> Accepted:
        draws = KeyedDraws(Noise(0, rows[some], rounds[some]), position[some])
        return accept.chain(drafts[some], length[some], p[some], q[some], draws)

    whole = run(slice(None))
    assert whole.count.unique().numel() > 1
    for b in range(6):
        alone = run(slice(b, b + 1))
        assert (alone.count, alone.token) == (whole.count[b : b + 1], whole.token[b : b + 1])


def keyed(rows: int, position: int = 5) -> KeyedDraws:
    ids = torch.arange(rows)
    return KeyedDraws(Noise(0, ids, torch.ones_like(ids)), torch.full_like(ids, position))


def test_keyed_coins() -> None:
    """Chance 0 never happens, chance 1 always does, and coins of one round are independent."""
    n = 40_000
    coins = keyed(n).accept(torch.tensor([0.0, 1.0, 0.3, 0.3]).expand(n, -1))
    assert not coins[:, 0].any() and coins[:, 1].all()
    both = torch.stack([coins[:, 2], coins[:, 3], coins[:, 2] & coins[:, 3]]).double().mean(1)
    assert (both - torch.tensor([0.3, 0.3, 0.09])).abs().max() < 4 * 0.5 / n**0.5


def test_keyed_coin_and_correction_are_independent() -> None:
    """A correction that reuses the coin's number leans towards what the coin rejected."""
    n = 40_000
    draws = keyed(n)
    coin = draws.accept(torch.full((n, 1), 0.5))[:, 0]
    token = draws.pick(torch.full((n, 2), 0.5))
    assert abs((coin & (token == 1)).double().mean().item() - 0.25) < 4 * 0.5 / n**0.5
