"""What servers count, against replay: parsing, differences, cut rounds, ties, a whole check.

The references here share no code with eval/servers: a simulated server that knows which of its
drafts are right, past the answer's limit too; and our own decoder behind a fake HTTP server.

.venv/bin/pytest tests/eval/servers/test_counts.py
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import reference_replay
import tiny
from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.parity import TIE
from draftsmith.eval.acceptance.replay import TextRatios
from draftsmith.eval.servers import agreement, sampled
from draftsmith.eval.servers.agreement import compare, expected_rounds, replayed
from draftsmith.eval.servers.client import Answer, Counters, parse_counters
from fake_server import argmax_drafts, served

VLLM = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 36.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 38.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="2"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} 11.0
vllm:generation_tokens_total{engine="0",model_name="a b"} 78.0
"""
LLAMA = """
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 48
llamacpp:spec_decode_num_draft_tokens_total 60
llamacpp:spec_decode_num_accepted_tokens_total 1.2e+01
llamacpp:spec_decode_num_drafts_total 22
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 3
"""
K = 3


def test_counters_are_read_from_both_pages() -> None:
    found = parse_counters(VLLM, "vllm:", "generation_tokens_total", True, "here")
    assert found == Counters(40, 120, (20, 11, 7), 78)
    found = parse_counters(LLAMA, "llamacpp:", "tokens_predicted_total", True, "here")
    assert found == Counters(22, 60, (9, 3), 48)


def test_counters_that_are_missing_or_do_not_add_up_are_named() -> None:
    other = VLLM.replace("num_drafts_total", "drafts_total")
    with pytest.raises(UserError, match="here: its metrics have no vllm:spec_decode_num_drafts"):
        parse_counters(other, "vllm:", "generation_tokens_total", True, "here")
    assert parse_counters(other, "vllm:", "generation_tokens_total", False, "here").tokens == 78
    with pytest.raises(UserError, match="count 38 accepted tokens, but 18"):
        parse_counters(
            VLLM.replace("} 20.0", "} 0.0"), "vllm:", "generation_tokens_total", True, "here"
        )
    lost = VLLM.replace("num_accepted_tokens_total", "accepted_total")
    with pytest.raises(UserError, match="count 0 accepted tokens, but 38"):
        parse_counters(lost, "vllm:", "generation_tokens_total", False, "here")


def test_differences_keep_their_positions() -> None:
    before, after = Counters(3, 9, (2,), 5), Counters(5, 15, (3, 1, 1), 12)
    assert after - before == Counters(2, 6, (1, 1, 1), 7)
    assert before + (after - before) == Counters(5, 15, (3, 1, 1), 12)


def simulated(
    right: list[list[bool]], tokens: int, shortens: bool
) -> tuple[Counters, int, list[int]]:
    """A server's own counters of an answer of `tokens` tokens, its verify passes, and what it
    accepted past the end. right[i][j]: the draft at depth j of root i is the text's token, which
    a server knows past the limit too."""
    accepted, past = [0] * K, [0] * K
    drafts = drafted = passes = 0
    written = 1  # prefill's token
    while written < tokens:
        length = min(K, tokens - written - 1) if shortens else K
        m = 0
        while m < length and right[written - 1][m]:
            accepted[m] += 1
            past[m] += written + m >= tokens
            m += 1
        drafts, drafted, passes = drafts + (length > 0), drafted + length, passes + 1
        written += m + 1
    return Counters(drafts, drafted, tuple(accepted), tokens), passes, past


def table(right: list[list[bool]], tokens: int) -> TextRatios:
    """Replay's table of the same answer, which ends at the limit."""
    limit = np.minimum(K, tokens - 1 - np.arange(tokens))
    weight = np.array(right[:tokens], dtype=float) * (np.arange(K) < limit[:, None])
    return TextRatios(weight, limit, np.full((tokens, K), np.inf), 0)


@pytest.mark.parametrize("shortens", [False, True], ids=["vllm", "llama.cpp"])
def test_walks_count_what_a_server_counts(shortens: bool) -> None:
    """For answers of every length, cut rounds included: in those only what replay cannot know."""
    generator = random.Random(0)
    cut = 0
    for case in range(300):
        tokens = 2 + case % 17
        share = generator.choice([0.2, 0.6, 0.95])
        right = [[generator.random() < share for _ in range(K)] for _ in range(tokens + K)]
        counted, passes, past = simulated(right, tokens, shortens)
        found = expected_rounds(table(right, tokens), K, shortens)
        assert found.equals(counted) and found.passes == passes
        assert sum(found.tried) == counted.drafted and found.tried[0] == counted.drafts
        known = [a - b for a, b in zip(counted.accepted, past, strict=True)]
        assert list(found.counted.accepted) == known
        cut += found.hidden > 0
        for j in range(K):  # one acceptance more or less, or a round more, is no agreement
            if j < K - found.hidden:
                more = tuple(a + (i == j) for i, a in enumerate(counted.accepted))
                assert not found.equals(Counters(counted.drafts, counted.drafted, more, tokens))
        assert not found.equals(
            Counters(counted.drafts + 1, counted.drafted + K, counted.accepted, tokens)
        )
    assert (cut > 20) != shortens


def test_a_cut_round_accepts_in_order() -> None:
    """Of two hidden drafts the second cannot be accepted without the first."""
    right = [[True, True, True]] * 5
    found = expected_rounds(table(right, 3), K, False)
    assert found.hidden == 1 and found.counted == Counters(1, 3, (1, 1, 0), 3)
    found = expected_rounds(table(right, 2), K, False)
    assert found.hidden == 2 and found.equals(Counters(1, 3, (1, 1, 0), 2))
    assert not found.equals(Counters(1, 3, (1, 0, 1), 2))


def answer(counted: Counters) -> Answer:
    return Answer([2], [3] * counted.tokens, 1.0, counted)


def test_ties_are_told_from_splits() -> None:
    right = [[True, False, False], *([[False] * K] * 11)]
    other = [[False] * K] * 12
    of = table(right, 9)
    served = answer(simulated(other, 9, False)[0])
    apart = compare([served], [of], K, 0.0, False)
    assert apart.splits == [0] and not apart.holds
    of.gap[0, 0] = TIE / 2
    tied = compare([served], [of], K, 0.0, False)
    assert (tied.ties, tied.splits) == ([0], []) and tied.holds
    of.gap[0, 0] = np.inf
    of.gap[3, 1] = TIE / 2  # a tie elsewhere explains nothing
    assert compare([served], [of], K, 0.0, False).splits == [0]
    of.gap[0, 0] = TIE / 2
    assert not compare([served] * 2, [of] * 2, K, 0.0, False).holds  # two of two are no accident


@cache
def target() -> Target:
    """A tiny target that ends no text."""
    hf = tiny.hf_model("Llama", vocab=12)
    hf.generation_config.eos_token_id = hf.config.eos_token_id = None
    return Target(hf, tiny.tokenizer(12), tiny.source("endless"))


@cache
def drafter(*layers: int) -> Drafter:
    """Some layers of the target itself: about every third draft is right."""
    small = base.family("small")
    return small.create(target(), small.Config(layers=list(layers))).eval()


@cache
def answers(by: Drafter, temperature: float, count: int = 6) -> list[Answer]:
    """By our own decoder, drafts drawn at temperatures above 0, counted as vLLM counts."""
    prompts = dict(enumerate(tiny.prompts(count, 3, 12)))
    given = served(by, prompts, 24, temperature, K)
    return [Answer(prompts[row], ids, 1.0, counted) for row, (ids, counted) in enumerate(given)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoded_answers_agree_with_replay(temperature: float) -> None:
    """Of argmax drafts, at any temperature; and no longer do, once another layer is served."""
    right = drafter(0, 1, 3)
    given = answers(argmax_drafts(right), temperature)
    found = compare(given, replayed(target(), right, given, K), K, temperature, False)
    assert found.holds and not found.ties and found.passes == found.counted.drafts
    assert sum(found.counted.accepted) > 0
    given = answers(argmax_drafts(drafter(0, 2, 3)), temperature)
    apart = compare(given, replayed(target(), right, given, K), K, temperature, False)
    assert not apart.holds and len(apart.splits) > 3


@pytest.mark.parametrize("fault", ["limit", "position", "root"])
def test_a_faulty_walk_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake in the walk turns the agreement red."""
    right = drafter(0, 1, 3)
    given = answers(right, 0.0)
    tables = replayed(target(), right, given, K)
    true = expected_rounds

    def faulty(
        of: TextRatios, k: int, shortens: bool, flip: int | None = None
    ) -> agreement.ExpectedRounds:
        if fault == "limit":  # drafts shortened where the server does not
            return true(of, k, not shortens, flip)
        weight = np.roll(of.ratio, 1, axis=1 if fault == "position" else 0)
        return true(TextRatios(weight, of.limit, of.gap, of.prompt), k, shortens, flip)

    monkeypatch.setattr(agreement, "expected_rounds", faulty)
    assert not compare(given, tables, K, 0.0, False).holds


# ---------------------------------------------------------------- drawn drafts


def drawn(by: Drafter, given: list[Answer]) -> sampled.Sampled:
    """Answers at temperature 1 compared with replay of a drafter, its drafts drawn."""
    tables = [replayed(target(), by, given, K, temperature) for temperature in (1.0, 0.0)]
    return sampled.compare(given, *tables, K, 1.0)


def test_drawn_drafts_agree_with_replay() -> None:
    """Faults: replay of another drafter, too few tokens, greedy counts offered as drawn ones and
    the other way."""
    right = drafter(0, 1, 3)
    given = answers(right, 1.0, 40)
    found = drawn(right, given)
    assert found.holds and all(z is not None for z in found.z), found
    assert found.past_end > 0, "no answer hides what it accepted"
    assert not drawn(drafter(0, 2, 3), given).holds
    first = given[0].counted
    fewer = Counters(first.drafts, first.drafted, (0,) * K, first.tokens)
    assert drawn(right, [answer(fewer), *given[1:]]).splits == [0]
    greedy = drawn(right, answers(argmax_drafts(right), 1.0))
    assert greedy.greedy and not greedy.holds
    some = given[:6]
    assert not compare(some, replayed(target(), right, some, K), K, 1.0, False).holds


def rehearsed(
    ratios: np.ndarray, tokens: int, generator: np.random.Generator
) -> tuple[TextRatios, Counters]:
    """A text in replay's table, and one server's counts of it: it accepts depth j of root i with
    chance ratios[i, j], past the text's end too."""
    accepted, rounds, written = [0] * K, 0, 1
    while written < tokens:
        m = 0
        while m < K and generator.random() < ratios[written - 1, m]:
            accepted[m] += 1
            m += 1
        rounds, written = rounds + 1, written + m + 1
    limit = np.minimum(K, tokens - 1 - np.arange(tokens))
    of = TextRatios(ratios[:tokens], limit, np.full((tokens, K), np.inf), 0)
    return of, Counters(rounds, K * rounds, tuple(accepted), tokens)


@pytest.mark.parametrize("fault", ["", "past the end", "chance"])
def test_z_of_many_servers(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers, nearly all cut, by servers that draft as the table says: next to none is
    refused. With a fault most are."""
    if fault == "past the end":  # taken for drafts within the text
        monkeypatch.setattr(sampled, "_past_limit", lambda _: 0)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        pairs = [rehearsed(generator.random((9, K)) ** 0.3, 6, generator) for _ in range(60)]
        tables = [of for of, _ in pairs]
        if fault == "chance":
            tables = [replace(of, ratio=of.ratio**2) for of in tables]
        given = [answer(counted) for _, counted in pairs]
        argmax = [replace(of, ratio=np.zeros_like(of.ratio)) for of in tables]
        refused += not sampled.compare(given, tables, argmax, K, 1.0).holds
    assert refused > 20 if fault else refused <= 1


def test_the_chance_of_a_count_is_that_of_its_walks() -> None:
    """Against the reference, which enumerates every walk."""
    generator = random.Random(1)
    tokens = 7
    ratios = [
        [generator.uniform(0.2, 1.3) for _ in range(min(K, tokens - 1 - i))]
        for i in range(tokens - 1)
    ]
    weight = np.array([row + [0.0] * (K - len(row)) for row in [*ratios, []]])
    limit = np.minimum(K, tokens - 1 - np.arange(tokens))
    of = TextRatios(weight, limit, np.full((tokens, K), np.inf), 0)
    for passes in range(tokens):
        walks = [chance for chance, walk in reference_replay.rounds(ratios) if len(walk) == passes]
        assert sampled._chance(of, K, passes) == pytest.approx(sum(walks), abs=1e-12)
