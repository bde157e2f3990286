"""One drafter, one set of prompts: decode, baseline, replay of the decoded text, parity.

The prompts are decoded one at a time (batch 1), which is what the speed figures are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch, batch_of
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.acceptance import Part, acceptance, by_domain, known, parts_of, repetitive
from draftsmith.eval.decoder.loop import Clock, Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.parity import Parity, compare, compare_trees, counts
from draftsmith.eval.provenance import provenance
from draftsmith.eval.replay import replay
from draftsmith.eval.speed import Costs, break_even, speedup
from draftsmith.eval.walk import walk

Progress = Callable[[str, int, int], None]


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
) -> dict[str, Any]:
    """The report (report.json's content) of a drafter on prompts given as token ids.

    Drawn trees have no replay, so that `replay` and `parity` are None: their expectation given the
    text is not known in closed form.
    domains: the prompts' categories, one each, for `by_domain`; none: it is left out.
    progress(what, prompts done, new tokens) is called as decoding goes on.
    """

    def decode(decoder: Decoder, what: str) -> list[Text]:
        # Warm-up; graphs are captured as texts grow, each in its own view of the caches.
        for row, prompt in enumerate(prompts if decoder.graphs else prompts[:1]):
            tokens = max_new_tokens if decoder.graphs else min(8, max_new_tokens)
            decoder.generate([prompt], sampler, tokens, rows=[row], seed=seed)
        decoder.clock = Clock()
        texts: list[Text] = []

        def report(new: int) -> None:
            progress(what, len(texts), new)

        for row, prompt in enumerate(prompts):
            texts += decoder.generate(
                [prompt], sampler, max_new_tokens, rows=[row], seed=seed, stop=stop, progress=report
            )
            report(0)
        return texts

    speculative, baseline = Decoder(target, drafter, policy), Decoder(target)
    texts = decode(speculative, "speculative")
    plain = decode(baseline, "baseline")

    k = policy.k
    deterministic = sampler.greedy or drafter.deterministic or not policy.sampled
    batches = read_texts(target, drafter, texts, sampler)
    found = replay_of(drafter, batches, texts, policy, deterministic, seed)
    answers = [text.tokens for text in texts]
    clock, base = speculative.clock, baseline.clock
    counted = counts(texts, k)
    reached = [
        sum(r.proposed > j and r.accepted >= j for t in texts for r in t.rounds) for j in range(k)
    ]
    emitted = sum(len(t.tokens) - 1 for t in texts)
    draft, verify, host = (
        part / max(clock.rounds, 1) for part in (clock.draft, clock.verify, clock.host)
    )
    costs = Costs(base.total / max(base.rounds, 1), {k: draft}, {k + 1: verify}, host)
    tau = emitted / counted[0] if counted[0] else None
    same = sum(a.tokens == b.tokens for a, b in zip(texts, plain, strict=True))
    return {
        "target": target.identity(),
        "drafter": {"family": drafter.family, "parameters": count_parameters(drafter)},
        "sampler": vars(sampler),
        "k": k,
        "policy": str(policy),
        "max_new_tokens": max_new_tokens,
        "prompts": len(prompts),
        "replay": found
        and {
            "tau": found.pooled["tau"],
            "tau_ci": found.pooled["tau_ci"] or [None, None],
            "alpha": found.pooled["alpha"],
            "tau_by_k": found.tau_by_k,
        },
        "by_domain": by_domain(found.parts, domains, k, seed) if found and domains else None,
        "repetitive": found and repetitive(found.parts, answers, k, seed),
        "decode": {
            "tau": tau,
            "alpha": [a / r if r else None for a, r in zip(counted[1:], reached, strict=True)],
            "tokens": emitted,
            "passes": counted[0],
            "histogram": histogram(texts, k),
            "by_prompt": [{"tokens": len(t.tokens), "passes": len(t.rounds)} for t in texts],
            "tokens_per_s": clock.tokens / clock.total if clock.total else None,
            "baseline_tokens_per_s": base.tokens / base.total if base.total else None,
            "speedup": _ratio(clock.tokens, clock.total, base.tokens, base.total),
            "draft_ms": 1e3 * draft,
            "verify_ms": 1e3 * verify,
            "host_ms": 1e3 * host,
            "baseline_step_ms": 1e3 * costs.step,
            "prefill_ms": 1e3 * clock.prefill / max(len(prompts), 1),
            # Equal texts are owed only where both draw alike: greedy, or the match rule.
            "texts_equal_to_baseline": same if deterministic else None,
        },
        "parity": found and found.parity.report(),
        "break_even_tau": break_even(costs, k) if costs.step else None,
        "predicted_speedup": (
            speedup(costs, found.pooled["tau"], k) if found and clock.rounds else None
        ),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "seed": seed,
        **provenance(),
    }


@dataclass
class Replayed:
    """Replay of decoded texts under a policy, and its parity with what was decoded."""

    parts: list[Part]
    pooled: dict[str, Any]
    tau_by_k: dict[str, float | None]
    parity: Parity


def replay_of(
    drafter: Drafter,
    batches: Sequence[Batch],
    texts: Sequence[Text],
    policy: Policy,
    deterministic: bool,
    seed: int = 0,
) -> Replayed | None:
    """Replay of decoded texts, read into batches in their order, and its parity with them.

    None for a drawn tree: given its text, what it accepts is no expectation we can take.
    """
    k = policy.k
    tau_by_k: dict[str, float | None] = {}
    if policy.is_chain:
        by_k = replay(drafter, batches, k, seed, policy.block)
        parts = parts_of(by_k[k].tables, k, policy.block)
        parity = compare(texts, by_k[k].tables, k, deterministic, policy.block)
        tau_by_k = {str(j): known(r.tau) for j, r in by_k.items()}
    elif policy.sampled:
        return None
    else:
        walks = [found for batch in batches for found in walk(drafter, batch, policy)]
        parts = [Part(i, found.tokens, found.counts(k)) for i, found in enumerate(walks)]
        parity = compare_trees(texts, walks, k)
    return Replayed(parts, acceptance(parts, k, seed), tau_by_k, parity)


def read_texts(
    target: Target, drafter: Drafter, texts: Sequence[Text], sampler: Sampler, rows: int = 8
) -> list[Batch]:
    """Batches of at most `rows` decoded texts, in order, read by the target."""
    out = []
    for i in range(0, len(texts), rows):
        pairs = [
            (t.prompt + t.tokens, [False] * len(t.prompt) + [True] * len(t.tokens))
            for t in texts[i : i + rows]
        ]
        batch = batch_of(pairs, sampler).to(target.device)
        out.append(target.read(batch, drafter.taps))
    return out


def histogram(texts: Sequence[Text], k: int) -> list[int]:
    """(k + 1,): verify passes that accepted 0, 1, .. k drafts."""
    accepted = [r.accepted for text in texts for r in text.rounds]
    return [accepted.count(m) for m in range(k + 1)]


def count_parameters(drafter: Drafter) -> int:
    """The drafter's own parameters: those that its checkpoint holds."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def _ratio(tokens: int, seconds: float, base_tokens: int, base_seconds: float) -> float | None:
    if not (tokens and seconds and base_tokens and base_seconds):
        return None
    return (tokens / seconds) / (base_tokens / base_seconds)
