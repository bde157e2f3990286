"""The certificate: evidence that the decoder writes what the target alone would write.

Accept rules by exact enumeration; texts against transformers' own, which shares no code with the
decoder; acceptance counted against acceptance replayed. Every check gives its measured figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.certify.rulebook import EXACT, WRONG, rule_errors, wrong_rule_errors
from draftsmith.eval.certify.subject import GREEDY, WARM, Outcome, Steps, Subject
from draftsmith.eval.certify.texts import half_precision, text_steps
from draftsmith.eval.evaluate import read_texts, replay_of


@dataclass
class Check:
    """One line of the certificate."""

    name: str
    passed: bool
    figure: str
    seconds: float


def certify(subject: Subject, begin: Callable[[str], None] = lambda name: None) -> Iterator[Check]:
    """Runs every check, in order; begin(name) is called before each.

    The last one turns `subject.theirs` into bf16.
    """
    steps = [*rule_steps(), *text_steps(subject), *parity_steps(subject)]
    steps.append(("bf16: texts differ only where tokens tie", lambda: half_precision(subject)))
    for name, step in steps:
        begin(name)
        started = time.perf_counter()
        passed, figure = step()
        yield Check(name, passed, figure, time.perf_counter() - started)


def certificate(checks: Sequence[Check]) -> dict[str, Any]:
    """The content of certificate.json, provenance aside."""
    return {"holds": all(c.passed for c in checks), "checks": [asdict(c) for c in checks]}


def rule_steps() -> Steps:
    """Enumeration runs as the generators are drawn from, one check at a time."""

    def bounded(found: Iterator[tuple[str, float]], exact: bool) -> Outcome:
        errors = dict(found)
        worst = max(errors.values()) if exact else min(errors.values())
        listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        return worst < EXACT if exact else worst > WRONG, f"largest error of a chance: {listed}"

    yield "accept rules are exact, by enumeration", lambda: bounded(rule_errors(), True)
    yield "wrong rules are caught", lambda: bounded(wrong_rule_errors(), False)


def parity_steps(subject: Subject) -> Steps:
    """Counted against replayed, for every drafter, rule and temperature it can have."""
    for name, drafter in subject.drafters.items():
        for policy in subject.policies(drafter):
            for sampler in (GREEDY, WARM):
                drawn = policy.sampled and not (sampler.greedy or drafter.deterministic)
                for rule in (False, True) if policy.is_chain and drawn else (False,):
                    tried = Policy(policy.k, block=True) if rule else policy
                    label = f"parity, {tried}, T={sampler.temperature:g}, {name}"
                    yield label, _parity_step(subject, name, drafter, tried, sampler, not drawn)


def _parity_step(
    subject: Subject,
    name: str,
    drafter: Drafter,
    policy: Policy,
    sampler: Sampler,
    deterministic: bool,
) -> Callable[[], Outcome]:
    def step() -> Outcome:
        texts = subject.decode(drafter, policy, sampler, subject.all, name)
        batches = read_texts(subject.target, drafter, texts, sampler)
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

    return step
