"""The speed model against hand-worked cases, and the clock that feeds it.

.venv/bin/pytest tests/eval/speed/test_speed_model.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from draftsmith.drafters.base import Policy, family
from draftsmith.drafters.ngram import Ngram
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import TextRatios, summarise
from draftsmith.eval.decoder import loop
from draftsmith.eval.decoder.round import Rounds
from draftsmith.eval.decoder.text import end_token
from draftsmith.eval.speed import speed_model
from draftsmith.eval.speed.speed_model import Costs, Drafting, burstiness, independent_tau

KS = range(1, 11)
TAUS = {k: independent_tau(0.8, k) for k in KS}


def costs(draft: float, ks: range = KS, wide: float = 1.0, step: float = 1.0) -> Costs:
    """A drafter of cost `draft` steps a token; a verify pass of `wide` steps at any width."""
    return Costs(
        step, {k: draft * k * step for k in ks}, {1: step} | {k + 1: wide * step for k in ks}, 0.0
    )


def test_worked_case() -> None:
    """alpha 0.8, k 4, c 0.05: tau = (1 - 0.8^5) / 0.2 = 3.3616, a round costs 1.2 steps: 2.80x."""
    assert independent_tau(0.8, 4) == pytest.approx(3.3616)
    assert independent_tau(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert independent_tau(1.0, 4) == 5.0  # where the closed form divides by 0
    assert speed_model.speedup(costs(0.05), TAUS[4], 4) == pytest.approx(2.8013, abs=1e-4)
    assert speed_model.break_even(costs(0.05), 4) == pytest.approx(1.2)
    whole = Costs(2.0, {1: 0.5}, {2: 2.5}, 1.0)  # a round of 4 s is worth 2 steps
    assert speed_model.break_even(whole, 1) == 2.0 and speed_model.speedup(whole, 1.5, 1) == 0.75


def check_best_k() -> None:
    """By hand: 1 + 0.05 k against TAUS is best at 8 (4.329 / 1.4), 1 + 0.3 k at 3 (2.952 / 1.9)."""
    assert speed_model.best_k(costs(0.05), TAUS) == 8
    assert speed_model.best_k(costs(0.3), TAUS) == 3
    assert speed_model.best_k(costs(2.0), TAUS) == 1
    steep = costs(0.05)
    steep = Costs(1.0, steep.draft, {w: 1.0 if w < 4 else 3.0 for w in steep.verify}, 0.0)
    assert speed_model.best_k(steep, TAUS) == 2  # a pass over four tokens costs three


def test_dear_drafts_move_the_best_k_down() -> None:
    check_best_k()
    assert speed_model.best_k(costs(0.05, range(1, 4)), TAUS) == 3  # only where costs are known


def by_tau(costs: Costs, tau_by_k: Mapping[int, float]) -> int:
    return max(costs.ks, key=lambda k: tau_by_k[k])


def without_drafting(costs: Costs, tau: float, k: int) -> float:
    return tau * costs.step / costs.verify[k + 1]


@pytest.mark.parametrize(("name", "fault"), [("best_k", by_tau), ("speedup", without_drafting)])
def test_planted_faults_move_the_best_k(
    name: str, fault: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_model, name, fault)
    with pytest.raises(AssertionError):
        check_best_k()


# ---------------------------------------------------------------- bursty text


def text_of(right: np.ndarray, k: int, prompt: int = 0) -> TextRatios:
    """A greedy drafter's table: right[i] says whether token i + 1 is guessed, from any anchor."""
    L = len(right) + 1
    ratio, limit = np.zeros((L, k)), np.zeros(L, dtype=np.int64)
    for i in range(L):
        limit[i] = min(k, L - 1 - i)
        ratio[i, : limit[i]] = right[i : i + limit[i]]
    return TextRatios(ratio, limit, np.full((L, k), np.inf), prompt)


def walked(right: np.ndarray, k: int) -> int:
    """Passes of a decoder: it takes right drafts, at most k, then one token of the target's."""
    at = passes = 0
    while at < len(right):
        taken = 0
        while taken < k and at + taken < len(right) and right[at + taken]:
            taken += 1
        at += taken + 1
        passes += 1
    return passes


def test_clumps_cost_tokens_per_pass() -> None:
    """20 of 100 drafts wrong, k 4. In one clump: 20 passes there, 80 / 5 elsewhere: 100 / 36."""
    n, k = 100, 4
    clumped = np.arange(n) >= 20
    draws = [np.random.default_rng(s).permutation(clumped) for s in range(60)]
    assert walked(clumped, k) == 36
    clump = summarise([text_of(clumped, k)], k).pooled
    tables = [text_of(right, k, i) for i, right in enumerate(draws)]
    scattered = summarise(tables, k).pooled
    assert clump.tau == pytest.approx(100 / 36)
    assert scattered.tau == pytest.approx(60 * n / sum(walked(r, k) for r in draws))
    # Scattered mistakes are what the formula assumes; clumps at the same rate cost tau.
    assert scattered.tau == pytest.approx(independent_tau(0.8, k), rel=0.02)
    assert clump.tau < 0.85 * scattered.tau
    # Rounds start more often inside the clump: alpha_0 is 16 / 36, and the formula there too low.
    assert clump.alpha[0] == pytest.approx(16 / 36)
    assert burstiness(clump.alpha[0], clump.tau, k) == pytest.approx(2.778 - 1.769, abs=1e-2)
    # (a text's end cuts its last round, which costs scattered text a little)
    assert abs(burstiness(scattered.alpha[0], scattered.tau, k)) < 0.12


# ---------------------------------------------------------------- the clock


def measured(target: Target) -> Costs:
    drafter = family("ngram").create(target, Ngram.Config())
    return speed_model.measure(target, drafter, [1, 3], tiny.prompts(1)[0], Sampler(1.0), 6, 2)


class Clock:
    """Time that passes only where a test says so: a busy machine changes no figure."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def slow(self, method: Any, seconds: Callable[..., float]) -> Any:
        """The method, taking so long; seconds(*its arguments)."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds(*args)
            return method(*args, **kwargs)

        return wrapped


def test_costs_fall_to_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter of 20 ms a token costs drafting, a target of 30 ms a pass both step and verify."""
    clock, target = Clock(), tiny.target("Llama")
    monkeypatch.setattr(loop, "time", clock)
    propose = clock.slow(Ngram.propose, lambda *args: 0.02 * args[3].k)
    monkeypatch.setattr(Ngram, "propose", propose)
    monkeypatch.setattr(Target, "head", clock.slow(Target.head, lambda *args: 0.03))
    monkeypatch.setattr(Rounds, "commit", clock.slow(Rounds.commit, lambda *args: 0.001))
    found = measured(target)
    assert found.ks == [1, 3]
    assert found.draft == pytest.approx({1: 0.02, 3: 0.06})
    assert found.step == pytest.approx(0.031) and found.host == pytest.approx(0.001)
    assert found.verify == pytest.approx({1: 0.03, 2: 0.03, 4: 0.03})
    assert speed_model.break_even(found, 1) == pytest.approx(51 / 31)


def test_rounds_of_several_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three rounds propose nothing, and a pass costs by its width: what is predicted is what
    passed, though the median round is a cheap one. A stall in one round costs nothing."""
    clock, target = Clock(), tiny.target("Llama")
    monkeypatch.setattr(loop, "time", clock)
    turn, propose = iter(range(10**6)), Ngram.propose

    def sparse(self: Any, *args: Any) -> Any:
        found = propose(self, *args)
        found.length = torch.full_like(found.length, 1 if next(turn) % 3 else found.tokens.shape[1])
        return found

    monkeypatch.setattr(Ngram, "propose", sparse)
    wide = clock.slow(Rounds.verify, lambda *args: 0.03 * args[0].proposal.tokens.shape[1])
    monkeypatch.setattr(Rounds, "verify", wide)
    found = measured(target)
    assert found.verify == pytest.approx({1: 0.03, 2: 0.04, 4: 0.06})
    stall = [loop.Clock(verify=v, width=w) for v, w in ((1, 1), (1, 1), (9, 1), (4, 3))]
    assert speed_model.typical(stall, "verify") == pytest.approx((3 * 1 + 4) / 4)


class Walker:
    """A decoder whose i-th round of a generation takes i seconds."""

    def __init__(self, target: Target, on_graphs: bool, rounds: int) -> None:
        self.target, self.graphs, self.rounds = target, on_graphs, rounds
        self.policy, self.clock = Policy(3), loop.Clock()

    def generate(self, *args: Any, progress: Callable[[int], None], **kwargs: Any) -> None:
        for i in range(self.rounds):
            self.clock.verify = i + 1.0
            progress(1)


@pytest.mark.parametrize(("on_graphs", "first"), [(False, 3.0), (True, 4.0)])
def test_warm_up_rounds_are_never_counted(on_graphs: bool, first: float) -> None:
    """Two of every generation; from graphs the third as well, in which they are captured."""
    decoder: Any = Walker(tiny.target("Llama"), on_graphs, 5)
    found = speed_model._rounds(decoder, [5], Sampler(1.0), 3, 0)
    assert {clock.verify for clock in found} == set(np.arange(first, 6.0)) and len(found) == 3


def test_an_answer_that_ends_at_once_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: rounds of a short answer are its warm-up."""
    target = tiny.target("Llama")
    prompt = tiny.prompts(1)[0]
    decoder = loop.Decoder(target)
    ends = decoder.generate([prompt], Sampler(0.0), 3)[0].tokens[2]
    plain = loop.Decoder._round

    def slow_at_first(self: loop.Decoder, rounds: Rounds) -> Any:
        out = plain(self, rounds)
        self.clock.verify += 100.0 if int(rounds.round[0]) <= speed_model.WARM_UP else 0.0
        return out

    monkeypatch.setattr(loop.Decoder, "_round", slow_at_first)
    with end_token(target, ends):
        found = speed_model._rounds(decoder, prompt, Sampler(0.0), 4, 0)
        assert target.eos_ids == [ends]
    assert len(found) == 4 and max(clock.verify for clock in found) < 100


def test_costs_survive_json() -> None:
    import json
    from dataclasses import asdict

    assert Costs.from_json(json.loads(json.dumps(asdict(costs(0.3))))) == costs(0.3)


# ---------------------------------------------------------------- in words


def drafting(tau: Mapping[int, float], alpha: float = 0.8, **more: Any) -> Drafting:
    near = {k: (t - 0.01, t + 0.01) for k, t in tau.items()}
    settings = {"tau_ci_by_k": near, "parameters": 10, "tokens_learned": 10**6} | more
    return Drafting(tau_by_k=tau, alpha_0=alpha, **settings)


LOW = {k: independent_tau(0.2, k) for k in KS}
CAUSES = {
    "drafter too slow": (costs(1.2), drafting(TAUS)),
    "verification not flat": (costs(0.1, wide=4.7), drafting(TAUS)),
    "alpha too low": (costs(0.3, wide=1.05), drafting(LOW, 0.2)),
    "too little data": (costs(0.3), drafting(LOW, 0.2, tokens_learned=9)),
    "too little held-out text": (
        costs(0.3),
        drafting(LOW, 0.2, tau_ci_by_k={k: (1.0, 3.0) for k in KS}),
    ),
    "always right": (costs(1.2), drafting(TAUS)),
}


@pytest.mark.parametrize("cause", list(CAUSES))
def test_the_verdict_names_the_cause(cause: str) -> None:
    where, what = CAUSES[cause]
    text = speed_model.verdict(where, what)
    assert text.startswith("Speculation does not pay here:") and cause in text.lower()


def test_the_verdict_names_nothing_else() -> None:
    text = speed_model.verdict(*CAUSES["alpha too low"])
    assert "0.98x" not in text and "not flat" not in text and "data" not in text
    assert "alpha_0 is 0.20 and tau 1.20 at k = 1, where it takes 1.35" in text
    text = speed_model.verdict(*CAUSES["verification not flat"])
    assert "too slow" not in text and "4.70 of a step" in text


def test_the_verdict_where_it_pays() -> None:
    text = speed_model.verdict(costs(0.05), drafting(TAUS))
    assert text == (
        "Speculation pays: 3.09x predicted at k = 8, tau 4.33 against a break-even of 1.40."
    )
    wide = {k: (1.0, 5.0) for k in KS}
    unsure = speed_model.verdict(costs(0.05), drafting(TAUS, tau_ci_by_k=wide))
    assert unsure.startswith(text) and "too little held-out text" in unsure


def test_the_dtype_that_was_timed_is_named() -> None:
    target: Any = SimpleNamespace(dtype=torch.float32, own_dtype=torch.bfloat16)
    target.device = torch.device("cpu")  # where `load` takes float32 for any checkpoint
    assert speed_model.timed_in(target) == "Timed in float32."
    target.device = torch.device("cuda")
    told = "as parity needs it; `draftsmith bench` times bfloat16, the checkpoint's own."
    assert speed_model.timed_in(target) == f"Timed in float32, {told}"
    target.own_dtype = torch.float32
    assert speed_model.timed_in(target) == "Timed in float32."
