"""The speed model: what a round costs on this device, and what a tau is worth at that cost.

    speedup(k) = tau_k * t(1) / (t_draft(k) + t_verify(k + 1) + t_host)

Every term is measured: t(1) a step of the baseline loop, t_verify(w) a target pass over w tokens.
On text whose tokens are accepted independently with chance a, tau_k would be 1 + a + .. + a^k
(Leviathan et al. 2211.17192, eq. 1). Real text is bursty, and that shows twice. With the same share
of wrong drafts per token, mistakes in clumps cost tau: each of a clump's mistakes takes a pass of
its own, while a scattered one may fall on the bonus token and cost nothing. And since rounds start
more often inside clumps, alpha_0 is lower than that share says, so that the formula at the
measured alpha_0 promises less than the true tau: the difference is named burstiness. (A drafter
that is weaker at depth lowers it, below 0 where that outweighs the clumps.)
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder import graphs
from draftsmith.eval.decoder.loop import Clock, Decoder
from draftsmith.eval.decoder.text import end_token
from draftsmith.eval.speed.clocks import Steadiness, spread_of_rounds, take_turn, worst

ASSUMED = Steadiness(0, 0.0)  # of costs that nobody measured
WARM_UP = 2  # first rounds of a generation that are not counted


@dataclass(frozen=True)
class Costs:
    """Seconds on one device.

    step: t(1), one step of the baseline loop, its host part included. draft[k]: drafting k tokens
    and reading the features of those accepted. verify[w]: a target pass over w tokens, the root
    included. host: accept rule and bookkeeping. clock: whether they are a measurement.
    """

    step: float
    draft: Mapping[int, float]
    verify: Mapping[int, float]
    host: float
    clock: Steadiness = ASSUMED

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Costs:
        """Costs from what json makes of `asdict(costs)`: its keys are texts."""
        draft, verify = (
            {int(n): seconds for n, seconds in stored[part].items()} for part in ("draft", "verify")
        )
        return cls(stored["step"], draft, verify, stored["host"], Steadiness(**stored["clock"]))

    @property
    def ks(self) -> list[int]:
        """Draft lengths whose costs are known, ascending."""
        return sorted(k for k in self.draft if k + 1 in self.verify)

    def round(self, k: int) -> float:
        """Seconds of a round at draft length k."""
        return self.draft[k] + self.verify[k + 1] + self.host

    def milliseconds(self) -> dict[str, Any]:
        """The costs as reports hold them, rounds included; keys are texts, as in JSON."""
        return {
            "step": 1e3 * self.step,
            "draft": {str(k): 1e3 * self.draft[k] for k in self.ks},
            "verify": {str(w): 1e3 * seconds for w, seconds in sorted(self.verify.items())},
            "host": 1e3 * self.host,
            "round": {str(k): 1e3 * self.round(k) for k in self.ks},
        }


def speedup(costs: Costs, tau: float, k: int) -> float:
    """Predicted tokens per second over the baseline loop's, where draft length k gives tau."""
    return tau * costs.step / costs.round(k)


def break_even(costs: Costs, k: int) -> float:
    """The tau at which draft length k is as fast as no drafting."""
    return costs.round(k) / costs.step


def best_k(costs: Costs, tau_by_k: Mapping[int, float]) -> int:
    """The draft length of the highest predicted speedup; the shortest on ties.

    Not that of the highest tau, which never falls with k.
    """
    known = [k for k in costs.ks if k in tau_by_k]
    return max(known, key=lambda k: (speedup(costs, tau_by_k[k], k), -k))


def independent_tau(alpha: float, k: int) -> float:
    """tau of a text on which every draft is accepted with chance alpha, whatever came before."""
    return sum(alpha**j for j in range(k + 1))  # (1 - alpha^(k + 1)) / (1 - alpha)


def burstiness(alpha: float, tau: float, k: int) -> float:
    """Tokens per pass beyond the independent formula at alpha, the measured alpha_0."""
    return tau - independent_tau(alpha, k)


# ---------------------------------------------------------------- measuring


def measure(
    target: Target,
    drafter: Drafter,
    ks: Sequence[int],
    prompt: Sequence[int],
    sampler: Sampler,
    rounds: int = 12,
    passes: int = 4,
) -> Costs:
    """Costs of this pair on the target's device: `rounds` typical rounds of the real decoder.

    prompt: token ids, at batch 1. The baseline and every k take turns, `passes` times, so that a
    machine that slows down meanwhile slows all of them. A turn's pace is its median round's.
    """
    decoders = {k: Decoder(target, drafter, Policy(k)) for k in ks} | {0: Decoder(target)}
    turns: dict[int, list[list[Clock]]] = {k: [] for k in decoders}
    share = -(-rounds // passes)
    for turn in range(passes):
        for k, decoder in decoders.items():
            turns[k].append(_rounds(decoder, prompt, sampler, share, turn))
    seen = {k: [clock for turn in found for clock in turn] for k, found in turns.items()}
    apart = {k: spread_of_rounds([_median(turn) for turn in found]) for k, found in turns.items()}
    return Costs(
        step=typical(seen[0], "total"),
        draft={k: typical(seen[k], "draft") for k in ks},
        verify={1: typical(seen[0], "verify")} | {k + 1: typical(seen[k], "verify") for k in ks},
        host=statistics.median(clock.host for k in ks for clock in seen[k]),
        clock=worst(*(Steadiness(passes, apart[0], apart[k]) for k in ks)),
    )


def _median(turn: Sequence[Clock]) -> list[Clock]:
    return [sorted(turn, key=lambda clock: clock.total)[len(turn) // 2]]


def typical(clocks: Sequence[Clock], part: str) -> float:
    """Mean seconds of a part over rounds, each counted as the median of those as wide as it is.

    Medians leave stalls out. But where a drafter often proposes less, or nothing (n-gram), the
    median of all rounds would be that of the commonest width, and slow rounds would not count.
    """
    by_width: dict[int, list[float]] = {}
    for clock in clocks:
        by_width.setdefault(clock.width, []).append(getattr(clock, part))
    total = sum(len(seconds) * statistics.median(seconds) for seconds in by_width.values())
    return total / len(clocks)


def timed_in(target: Target) -> str:
    """Which dtype its speed is measured in; where `load` would choose another, what times that."""
    name, own = (str(dtype).removeprefix("torch.") for dtype in (target.dtype, target.own_dtype))
    text = f"Timed in {name}"
    if target.device.type == "cpu" or target.own_dtype == target.dtype:
        return f"{text}."
    return f"{text}, as parity needs it; `draftsmith bench` times {own}, the checkpoint's own."


def _rounds(
    decoder: Decoder, prompt: Sequence[int], sampler: Sampler, count: int, seed: int
) -> list[Clock]:
    """The clock of each of `count` rounds, the first ones of a generation left out.

    An end token ends nothing here: a short answer would be all warm-up.
    """
    # A graph is captured in the round after its own warm-up.
    skipped = graphs.WARM_UP + 1 if decoder.graphs else WARM_UP
    out: list[Clock] = []
    tries = 0
    while len(out) < count:
        # Where rounds of two tokens turn out too long, as many as are enough at any acceptance.
        tokens = (count + skipped) * (decoder.policy.nodes if tries else 2) + 1
        tokens = min(tokens, decoder.target.max_positions - len(prompt))
        with end_token(decoder.target, None):
            found = take_turn(decoder, [prompt], sampler, tokens, rows=[tries], seed=seed).rounds
        out += found[skipped:]
        if tries and not found[skipped:]:
            raise UserError(
                f"prompt: after its {len(prompt)} tokens the target has no room for rounds to "
                "time; take a shorter one"
            )
        tries += 1
    return out[:count]


# ---------------------------------------------------------------- in words


@dataclass(frozen=True)
class Drafting:
    """What is known of a drafter's acceptance, for a verdict.

    tau_by_k and tau_ci_by_k (95%) by draft length; alpha_0; trained parameters, and the target-made
    tokens they were trained on (None where that is not known).
    """

    tau_by_k: Mapping[int, float]
    tau_ci_by_k: Mapping[int, tuple[float, float]]
    alpha_0: float
    parameters: int
    tokens_learned: int | None = None


def verdict(costs: Costs, drafting: Drafting) -> str:
    """Whether speculation pays on this device; where it does not, why, each cause with its size."""
    if costs.clock.busy:
        return costs.clock.note
    tau = drafting.tau_by_k
    k = best_k(costs, tau)
    gain, even = speedup(costs, tau[k], k), break_even(costs, k)
    low, high = drafting.tau_ci_by_k[k]
    unsure = (
        f"too little held-out text to be sure: the interval of tau, {low:.2f} to {high:.2f}, holds "
        f"the break-even"
    )
    if gain > 1:
        text = f"Speculation pays: {gain:.2f}x predicted at k = {k}, tau {tau[k]:.2f} against a "
        text += f"break-even of {even:.2f}."
        return text + (f" But {unsure}." if low <= even else "")
    step, ks = costs.step, [n for n in costs.ks if n in tau]
    draft, wide = costs.draft[k], costs.verify[k + 1]
    free = {n: step / (costs.round(n) - costs.draft[n]) for n in ks}  # per token of tau
    flat = {n: step / (costs.draft[n] + min(step, costs.verify[n + 1])) for n in ks}
    perfect = max((n + 1) * step / costs.round(n) for n in ks)
    causes = []
    # With a free drafter it would pay, at this tau or (where no tau is enough) at the highest one.
    if max((tau[n] if perfect > 1 else n + 1) * free[n] for n in ks) > 1:
        causes.append(
            f"drafter too slow: drafting takes {draft / step:.2f} of a step at k = {k}; if it took "
            f"nothing, the speedup would be {max(tau[n] * free[n] for n in ks):.2f}x"
        )
    if wide > 1.1 * step:
        causes.append(
            f"verification not flat on this device: a pass over {k + 1} tokens takes "
            f"{wide / step:.2f} of a step; were it as cheap as a step, the speedup would be "
            f"{max(tau[n] * flat[n] for n in ks):.2f}x"
        )
    if perfect > 1:
        causes.append(
            f"alpha too low: alpha_0 is {drafting.alpha_0:.2f} and tau {tau[k]:.2f} at k = {k}, "
            f"where it takes {even:.2f} to break even"
        )
    else:
        causes.append(f"drafts that are always right would give {perfect:.2f}x at most")
    learned = drafting.tokens_learned
    if learned is not None and learned < drafting.parameters:
        causes.append(
            f"too little data: {learned:,} tokens for {drafting.parameters:,} trained parameters"
        )
    if low <= even <= high:
        causes.append(unsure)
    return (
        f"Speculation does not pay here: {gain:.2f}x predicted at the best draft length, k = {k}. "
        + " ".join(f"{cause[0].upper()}{cause[1:]}." for cause in causes)
    )
