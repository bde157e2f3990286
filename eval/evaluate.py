"""One drafter, one set of prompts: decode, baseline, replay of the decoded text, parity.

The prompts are decoded one at a time (speeds are for batch 1), by the drafter, then without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch, batch_of
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.intervals import (
    Acceptance,
    Part,
    acceptance,
    by_domain,
    counted_tau,
    repetitive,
)
from draftsmith.eval.acceptance.parity import Parity, compare, compare_trees, counts
from draftsmith.eval.acceptance.replay import replay
from draftsmith.eval.acceptance.walk import walk_tree
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.report.provenance import provenance
from draftsmith.eval.speed.clocks import Steadiness, Turn, in_turns, spread_of_rounds
from draftsmith.eval.speed.speed_model import Costs, break_even, speedup

Progress = Callable[[str, int, int], None]
SIDES = ("speculative", "baseline")


@dataclass(frozen=True)
class Decoded:
    """What the decoder counted, and its speed against the loop with drafting off.

    alpha (k,): of the rounds that tried a depth, the share that accepted it. tokens: that verify
    passes emitted. histogram (k + 1,): passes that accepted 0, 1, .. k drafts. by_prompt: tokens
    and passes of each text. *_ms: means of a round, of a baseline step, and of a prompt's prefill.
    texts_equal_to_baseline: None where texts need not be (see `evaluate`). Speeds are None where no
    round ran; clock says whether they are a measurement.
    """

    tau: float | None
    alpha: list[float | None]
    tokens: int
    passes: int
    histogram: list[int]
    by_prompt: list[dict[str, int]]
    tokens_per_s: float | None
    baseline_tokens_per_s: float | None
    speedup: float | None
    draft_ms: float
    verify_ms: float
    host_ms: float
    baseline_step_ms: float
    prefill_ms: float
    texts_equal_to_baseline: int | None
    clock: Steadiness


@dataclass(frozen=True)
class Evaluation:
    """A drafter on some prompts. `replay` and what rests on it are None for drawn trees: given the
    text, what they accept is no expectation we can take. by_domain: None where no domains were
    given. device and dtype are the target's, in words; target: its identity."""

    target: dict[str, Any]
    family: str
    parameters: int
    sampler: Sampler
    policy: Policy
    max_new_tokens: int
    prompts: int
    replay: ReplayedTexts | None
    by_domain: dict[str, Acceptance] | None
    repetitive: dict[str, Acceptance] | None
    decode: Decoded
    break_even_tau: float | None
    predicted_speedup: float | None
    device: str
    dtype: str
    seed: int

    @property
    def parity(self) -> Parity | None:
        return self.replay.parity if self.replay else None

    def report(self) -> dict[str, Any]:
        """report.json's content."""
        found = asdict(replace(self, replay=None))
        if self.replay:
            pooled = self.replay.pooled
            found["replay"] = {"tau": pooled.tau, "tau_ci": pooled.ends, "alpha": pooled.alpha}
            found["replay"]["tau_by_k"] = self.replay.tau_by_k
        found["decode"]["clock"] = self.decode.clock.report()
        drafter = {name: found.pop(name) for name in ("family", "parameters")}
        return found | {
            "drafter": drafter,
            "k": self.policy.k,
            "policy": str(self.policy),
            "parity": self.parity and self.parity.report(),
            **provenance(),
        }


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    policy: Policy,
    max_new_tokens: int,
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    domains: Sequence[str] = (),
    progress: Progress = lambda what, done, tokens: None,
) -> Evaluation:
    """Evaluates a drafter on prompts given as token ids.

    domains: the prompts' categories, one each, for `by_domain`; none: it is left out.
    progress(what, prompts done, new tokens) is called as decoding goes on.
    """
    decoders = [Decoder(target, drafter, policy), Decoder(target)]
    drafted, plain = in_turns(
        decoders, [[prompt] for prompt in prompts], sampler, max_new_tokens, seed=seed, stop=stop,
        progress=lambda side, done, new: progress(SIDES[side], done, new),
    )  # fmt: skip
    texts = [text for turn in drafted for text in turn.texts]

    k = policy.k
    deterministic = sampler.greedy or drafter.deterministic or not policy.sampled
    batches = read_decoded(target, drafter, texts, sampler)
    found = replay_of(drafter, batches, texts, policy, deterministic, seed)
    same = sum(a.texts[0].tokens == b.texts[0].tokens for a, b in zip(drafted, plain, strict=True))
    # Texts must be equal only where both draw the same noise: greedy, or the match rule.
    equal = same if deterministic else None
    costs = mean_costs(drafted, plain, k)
    passes = sum(len(turn.rounds) for turn in drafted)
    return Evaluation(
        target=target.identity(),
        family=drafter.family,
        parameters=count_parameters(drafter),
        sampler=sampler,
        policy=policy,
        max_new_tokens=max_new_tokens,
        prompts=len(prompts),
        replay=found,
        by_domain=by_domain(found.parts, domains, k, seed) if found and domains else None,
        repetitive=repetitive(found.parts, [t.tokens for t in texts], k, seed) if found else None,
        decode=_decoded(drafted, plain, k, costs, equal),
        break_even_tau=break_even(costs, k) if costs.step else None,
        predicted_speedup=(
            speedup(costs, found.pooled.tau, k) if found and found.pooled.tau and passes else None
        ),
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        seed=seed,
    )


def mean_costs(drafted: Sequence[Turn], plain: Sequence[Turn], k: int) -> Costs:
    """A round's costs at draft length k, as means over all rounds."""
    rounds, steps = ([clock for turn in side for clock in turn.rounds] for side in (drafted, plain))
    draft, verify, host = (
        sum(getattr(clock, part) for clock in rounds) / max(len(rounds), 1)
        for part in ("draft", "verify", "host")
    )
    step = sum(clock.total for clock in steps) / max(len(steps), 1)
    return Costs(step, {k: draft}, {k + 1: verify}, host)


def _speed(turns: Sequence[Turn]) -> float | None:
    """Tokens a second, prefill left out."""
    clocks = [clock for turn in turns for clock in turn.rounds]
    seconds = sum(clock.total for clock in clocks)
    return sum(clock.tokens for clock in clocks) / seconds if seconds else None


def _decoded(
    drafted: Sequence[Turn], plain: Sequence[Turn], k: int, costs: Costs, equal: int | None
) -> Decoded:
    texts = [text for turn in drafted for text in turn.texts]
    passes, *accepted = counts(texts, k)
    taken = [r.accepted for text in texts for r in text.rounds]
    tried = [
        sum(r.proposed > j and r.accepted >= j for t in texts for r in t.rounds) for j in range(k)
    ]
    speed, base = _speed(drafted), _speed(plain)
    spreads = (spread_of_rounds([turn.rounds for turn in side]) for side in (plain, drafted))
    return Decoded(
        tau=counted_tau(texts),
        alpha=[a / r if r else None for a, r in zip(accepted, tried, strict=True)],
        tokens=sum(len(t.tokens) - 1 for t in texts),
        passes=passes,
        histogram=[taken.count(m) for m in range(k + 1)],
        by_prompt=[{"tokens": len(t.tokens), "passes": len(t.rounds)} for t in texts],
        tokens_per_s=speed,
        baseline_tokens_per_s=base,
        speedup=speed / base if speed and base else None,
        draft_ms=1e3 * costs.draft[k],
        verify_ms=1e3 * costs.verify[k + 1],
        host_ms=1e3 * costs.host,
        baseline_step_ms=1e3 * costs.step,
        prefill_ms=1e3 * sum(turn.prefill for turn in drafted) / max(len(texts), 1),
        texts_equal_to_baseline=equal,
        clock=Steadiness(len(plain), *spreads),
    )


@dataclass
class ReplayedTexts:
    """Replay of decoded texts under a policy, and its parity with what was decoded."""

    parts: list[Part]
    pooled: Acceptance
    tau_by_k: dict[str, float | None]
    parity: Parity


def replay_of(
    drafter: Drafter,
    batches: Sequence[Batch],
    texts: Sequence[Text],
    policy: Policy,
    deterministic: bool,
    seed: int = 0,
) -> ReplayedTexts | None:
    """Replay of decoded texts, read into batches in their order, and its parity with them.

    None for a drawn tree: given its text, what it accepts is no expectation we can take.
    """
    k = policy.k
    if policy.is_chain:
        by_k = replay(drafter, batches, k, seed, policy.block, policy.confidence)
        parity = compare(texts, by_k[k], deterministic)
        tau_by_k = {str(j): r.pooled.tau for j, r in by_k.items()}
        return ReplayedTexts(by_k[k].parts, by_k[k].pooled, tau_by_k, parity)
    if policy.sampled:
        return None
    walks = [found for batch in batches for found in walk_tree(drafter, batch, policy)]
    parts = [Part(i, found.tokens, found.counts(k)) for i, found in enumerate(walks)]
    parity = compare_trees(texts, walks, k)
    return ReplayedTexts(parts, acceptance(parts, k, seed), {}, parity)


def read_decoded(
    target: Target, drafter: Drafter, texts: Sequence[Text], sampler: Sampler, batch_size: int = 8
) -> list[Batch]:
    """Batches of at most `batch_size` decoded texts, in order, read by the target."""
    out = []
    for i in range(0, len(texts), batch_size):
        pairs = [
            (t.prompt + t.tokens, [False] * len(t.prompt) + [True] * len(t.tokens))
            for t in texts[i : i + batch_size]
        ]
        batch = batch_of(pairs, sampler).to(target.device)
        out.append(target.read(batch, drafter.taps))
    return out


def count_parameters(drafter: Drafter) -> int:
    """The drafter's own parameters: those that its checkpoint holds."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)
