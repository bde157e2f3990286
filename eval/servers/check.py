"""A server asked the same prompts with and without its drafter, and what it all comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import Target
from draftsmith.eval.parity import TIE
from draftsmith.eval.servers import sampled
from draftsmith.eval.servers.agreement import Agreement, compare, differences, replayed
from draftsmith.eval.servers.client import Answer, Running
from draftsmith.eval.servers.sampled import Sampled

TEMPERATURES = (0.0, 1.0)
Answers = dict[float, list[Answer]]  # by temperature, in the prompts' order


def collect(
    server: Running,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seed: int,
    k: int | None,
    progress: Callable[[], None] = lambda: None,
) -> Answers:
    """A server's answers of `tokens` tokens each, at both temperatures, one request at a time.

    k: how many tokens it drafts, None where it does not speculate. progress() is called after each
    answer. Raises UserError where it drafts another number (see `Running.ask` for the rest).
    """
    server.ask(prompts[0], min(tokens, 8), 0.0, seed, k is not None)  # warm-up
    out: Answers = {}
    for temperature in TEMPERATURES:
        out[temperature] = []
        for i, prompt in enumerate(prompts):
            answer = server.ask(prompt, tokens, temperature, seed + i, k is not None)
            drafts, drafted = answer.counted.drafts, answer.counted.drafted
            positions = len(answer.counted.accepted)
            if k is not None and (positions > k or drafted > k * drafts):
                raise UserError(
                    f"server {server}: drafts {max(positions, -(-drafted // max(drafts, 1)))} "
                    f"tokens a round, not k={k}; give --k what it was started with"
                )
            out[temperature].append(answer)
            progress()
    return out


def report(
    target: Target,
    drafter: Drafter,
    k: int,
    shortens: bool,
    drafts: str,
    answers: Answers,
    plain: Answers | None,
) -> dict[str, Any]:
    """One entry per temperature, and `holds`: counters agree, and T=0 texts equal the plain ones.

    drafts: "greedy" or "sampled", how the server makes them at temperatures above 0. plain: the
    answers of the same server without speculation; None: texts are not compared.
    """
    temperatures = []
    holds = True
    for temperature, given in answers.items():
        argmax = replayed(target, drafter, given, k)
        found: Agreement | Sampled
        if temperature > 0 and drafts == "sampled":
            drawn = replayed(target, drafter, given, k, temperature)
            found = sampled.compare(given, drawn, argmax, k, temperature)
        else:
            found = compare(given, argmax, k, temperature, shortens)
        entry = found.report() | {
            "tokens": sum(len(a.tokens) for a in given),
            "tokens_per_s": speed(given),
            "plain_tokens_per_s": None if plain is None else speed(plain[temperature]),
            "texts": None,
        }
        holds &= found.holds
        if temperature == 0 and plain is not None:
            parted = differences(target, given, plain[temperature])
            entry["texts"] = {
                "equal": len(given) - len(parted),
                "ties": [vars(d) for d in parted if d.gap < TIE],
                "splits": [vars(d) for d in parted if d.gap >= TIE],
            }
            holds &= not entry["texts"]["splits"]
        temperatures.append(entry)
    return {"k": k, "temperatures": temperatures, "holds": holds}


def speed(answers: Sequence[Answer]) -> float:
    """Tokens per second as a client sees it, prompts included."""
    return sum(len(a.tokens) for a in answers) / sum(a.seconds for a in answers)
