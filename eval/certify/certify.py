"""The certificate: evidence that the decoder writes what the target alone would write.

Accept rules by exact enumeration; texts against transformers' own, which shares no code with the
decoder; acceptance counted against acceptance replayed. Every check gives its measured figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Policy
from draftsmith.drafters.policy import StaticTree
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.certify.enumeration import (
    Laws,
    continued,
    emitted,
    emitted_tree,
    error,
    over_rounds,
    points,
    random_laws,
)
from draftsmith.eval.certify.fixture import GREEDY, WARM, CheckResult, Fixture, NamedChecks
from draftsmith.eval.certify.texts import half_precision, text_steps
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder.accept import Accepted, chain
from draftsmith.eval.evaluate import read_decoded, replay_of

EXACT = 1e-12  # of a chance, in float64
WRONG = 1e-3  # a wrong rule must miss by more
V, K = 3, 2
BUSHY = StaticTree(((0,), (1,), (0, 0), (0, 1)), drawn=True)


@dataclass
class Check:
    """One line of the certificate."""

    name: str
    passed: bool
    figure: str
    seconds: float


def certify(fixture: Fixture, begin: Callable[[str], None] = lambda name: None) -> Iterator[Check]:
    """Runs every check, in order; begin(name) is called before each.

    The last one turns `fixture.theirs` into bf16.
    """
    steps = [*rule_steps(), *text_steps(fixture), *parity_steps(fixture)]
    steps.append(("bf16: texts differ only where tokens tie", lambda: half_precision(fixture)))
    for name, step in steps:
        begin(name)
        started = time.perf_counter()
        passed, figure = step()
        yield Check(name, passed, figure, time.perf_counter() - started)


def certificate(checks: Sequence[Check]) -> dict[str, Any]:
    """The content of certificate.json, provenance aside."""
    return {"holds": all(c.passed for c in checks), "checks": [asdict(c) for c in checks]}


def parity_steps(fixture: Fixture) -> NamedChecks:
    """Counted against replayed, for every drafter, rule and temperature it can have."""
    for name, drafter in fixture.drafters.items():
        for policy in fixture.policies(drafter):
            for sampler in (GREEDY, WARM):
                drawn = policy.sampled and not (sampler.greedy or drafter.deterministic)
                for rule in (False, True) if policy.is_chain and drawn else (False,):
                    tried = Policy(policy.k, block=True) if rule else policy
                    label = f"parity, {tried}, T={sampler.temperature:g}, {name}"
                    yield label, partial(_parity, fixture, name, tried, sampler, not drawn)


def _parity(
    fixture: Fixture, name: str, policy: Policy, sampler: Sampler, deterministic: bool
) -> CheckResult:
    drafter = fixture.drafters[name]
    texts = fixture.decode(drafter, policy, sampler, fixture.all, name)
    batches = read_decoded(fixture.target, drafter, texts, sampler)
    found = replay_of(drafter, batches, texts, policy, deterministic)
    assert found is not None  # `policies` holds no drawn tree
    parity = found.parity
    accepted = "/".join(map(str, parity.counted[1:]))
    figure = f"{parity.counted[0]} passes, accepted per depth {accepted}, "
    if deterministic:
        figure += f"{len(parity.splits)} splits, {len(parity.ties)} ties"
    else:
        shown = ["-" if z is None else f"{z:.2f}" for z in [*parity.z, parity.z_local]]
        figure += "z " + " ".join(shown)
    return parity.holds, figure


# ---------------------------------------------------------------- accept rules, and wrong ones


def rule_steps() -> NamedChecks:
    """Enumeration runs as the generators are drawn from, one check at a time."""

    def bounded(found: Iterator[tuple[str, float]], exact: bool) -> CheckResult:
        errors = dict(found)
        worst = max(errors.values()) if exact else min(errors.values())
        listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        return worst < EXACT if exact else worst > WRONG, f"largest error of a chance: {listed}"

    yield "accept rules are exact, by enumeration", lambda: bounded(rule_errors(), True)
    yield "wrong rules are caught", lambda: bounded(wrong_rule_errors(), False)


def match(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
    """accept.match as the decoder calls it: the target draws its own token at every node."""
    return accept.match(drafts, length, draws.pick(p))


def match_tree(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
    """accept.match_tree as the decoder calls it."""
    length = torch.full_like(tokens[:, 0], tokens.shape[1])
    choice = draws.pick(p)  # (B, N)
    k = tokens.shape[1] - 1  # no path is longer
    return accept.match_tree(
        tokens, parents, length, k, lambda node: choice.gather(1, node.unsqueeze(1)).squeeze(1)
    )


def corrected_from_p(drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
    """Wrong: after a rejection, draw from p again."""
    coins: Any = SimpleNamespace(accept=draws.accept, pick=lambda weights: drafts[:, 0])
    count = chain(drafts, length, p, q, coins).count
    return Accepted(count, draws.pick(p[torch.arange(len(count)), count]))


def not_renormalised(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, draws: Any) -> Accepted:
    """Wrong: siblings drawn without replacement, each judged by the q of the first. Depth 1."""
    left = p[:, 0]
    path = torch.zeros_like(tokens)
    for i in range(1, tokens.shape[1]):
        x = tokens[:, i : i + 1]
        prob = (left.gather(1, x) / q[:, 0].gather(1, x)).clamp(max=1.0)
        if bool(draws.accept(prob)):
            path[:, 1] = i
            return Accepted(torch.ones_like(x[:, 0]), draws.pick(p[:, i]), path)
        residual = (left - q[:, 0]).clamp(min=0)
        left = residual / residual.sum(1, keepdim=True)
    return Accepted(torch.zeros_like(tokens[:, 0]), draws.pick(left), path)


def rule_errors() -> Iterator[tuple[str, float]]:
    """(rule, largest error of the text's law), over laws with and without zeros."""
    pairs: list[tuple[Laws, Laws]] = [
        (random_laws(V, K + 1, seed, zeros), random_laws(V, K, seed + 50, zeros))
        for seed, zeros in ((1, 0.0), (3, 0.5), (4, 0.4))
    ]
    for name, rule in (("chain", accept.chain), ("block", accept.block)):
        yield name, max(error(emitted(rule, p, q), p) for p, q in pairs)
    p, q = random_laws(2, 9, 5), random_laws(2, 8, 6)
    joint = over_rounds(accept.block, p, q, K=2, tokens=7)  # three rounds at the least
    yield "block, three rounds", (joint - continued(p[:7], ())).abs().max().item()
    yield "match", max(error(emitted(match, p, points(q)), p) for p, q in pairs)
    # At temperature 0 p is a point mass, which match follows as the greedy rule.
    greedy = [(points(p), points(q)) for p, q in pairs]
    yield "greedy", max(error(emitted(match, p, q), p) for p, q in greedy)
    tokens = [0, 2, 0, 1, 2]
    errors = (error(emitted_tree(match_tree, p, q, BUSHY, tokens), p) for p, q in pairs)
    yield "match tree", max(errors)
    drawn = accept.without_replacement
    yield "without replacement", max(error(emitted_tree(drawn, p, q, BUSHY), p) for p, q in pairs)


def wrong_rule_errors() -> Iterator[tuple[str, float]]:
    """(mistake, largest error of the text's law): what the same enumeration makes of it."""
    p, q = random_laws(4, 3, 1), random_laws(4, 2, 2)
    yield "correction drawn from p", error(emitted(corrected_from_p, p, q), p)
    yield "argmax drafts judged by q(x)", error(emitted(accept.chain, p, q, drawn=points(q)), p)
    p, q = random_laws(5, 2, 5), random_laws(5, 1, 6)
    siblings = StaticTree(((0,), (1,), (2,)), drawn=True)
    yield "q not renormalised", error(emitted_tree(not_renormalised, p, q, siblings), p)
