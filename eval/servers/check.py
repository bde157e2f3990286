"""The same prompts to a server with and without its drafter: answers, counters, speeds compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.parity import TIE
from draftsmith.eval.servers import sampled
from draftsmith.eval.servers.agreement import Agreement, compare, differences, replayed
from draftsmith.eval.servers.client import Answer, Running
from draftsmith.eval.servers.sampled import Sampled
from draftsmith.eval.speed.clocks import Steadiness, spread

TEMPERATURES = (0.0, 1.0)
Answers = dict[float, list[Answer]]  # by temperature, in the prompts' order


def collect(
    sides: Mapping[Running, int | None],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Answers]:
    """Each server's answers of `tokens` tokens each, at both temperatures, one request at a time:
    they answer a prompt in turn, so that a machine that slows down slows all of them.

    sides: how many tokens a server drafts, None where it does not speculate. progress() is called
    after each answer. Raises UserError where it drafts another number, and as `Running.ask` does.
    """
    for server, k in sides.items():
        server.ask(prompts[0], min(tokens, 8), 0.0, seed, k is not None)  # warm-up
    out: list[Answers] = [{temperature: [] for temperature in TEMPERATURES} for _ in sides]
    for temperature in TEMPERATURES:
        for i, prompt in enumerate(prompts):
            for (server, k), answers in zip(sides.items(), out, strict=True):
                answer = server.ask(prompt, tokens, temperature, seed + i, k is not None)
                _check_length(server, answer, k)
                answers[temperature].append(answer)
                progress()
    return out


def _check_length(server: Running, answer: Answer, k: int | None) -> None:
    drafts, drafted = answer.counted.drafts, answer.counted.drafted
    positions = len(answer.counted.accepted)
    if k is not None and (positions > k or drafted > k * drafts):
        raise UserError(
            f"server {server}: drafts {max(positions, -(-drafted // max(drafts, 1)))} "
            f"tokens a round, not k={k}; give --k what it was started with"
        )


def steadiness(plain: Answers) -> Steadiness:
    """Of a server without drafts, by each prompt's answers at both temperatures: of equal length,
    they are the same work. Rounds of drafts do not compare."""
    turns = []
    for pair in zip(*plain.values(), strict=True):
        usual = sum(answer.seconds for answer in pair) / len(pair)
        turns += [(answer.seconds, usual) for answer in pair]
    return Steadiness(len(turns), spread(turns))


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

    drafts: "greedy" or "sampled", how the server makes them at temperatures above 0. plain: answers
    of the server without speculation, taking turns; None: texts and speeds are not compared.
    """
    clock = None if plain is None else steadiness(plain).report()
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
            "clock": clock,
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
