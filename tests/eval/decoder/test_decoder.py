"""The decoder writes what the target alone would write: greedy texts token for token, sampled ones
in law, whatever the drafter, the batch, and the place where a text ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import tiny
from decodings import (
    LAW_VOCAB,
    PROMPT,
    ROWS,
    VOCAB,
    accepted,
    check_rounds,
    cut,
    end_tokens,
    generated,
    inside_blocks,
    law_after_root,
    law_drafter,
    noisy,
    ragged,
)
from draftsmith.drafters import grow as grow_module
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.grow import draw
from draftsmith.drafters.sampling import Noise, Purpose, Sampler
from draftsmith.drafters.target.attention import Step
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder.accept import Accepted, Draws
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Cutter, Text
from exact import chi_square

DRAFTERS = ("ngram", "small", "eagle")
GREEDY = Sampler(0.0)


@cache
def drafter_for(name: str, family_name: str, vocab: int = VOCAB) -> Drafter:
    return noisy(name, tiny.target(family_name, vocab=vocab))


@pytest.mark.parametrize("family_name", tiny.FAMILIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_equals_generate(
    family_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 the text is transformers' own, alone or in a ragged batch."""
    target = tiny.target(family_name, vocab=VOCAB)
    end_tokens(monkeypatch, target, [])
    decoder = Decoder(target, drafter_for(name, family_name), Policy(3))
    prompts = ragged(5)
    texts = decoder.generate(prompts, GREEDY, 20)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.tokens == generated(family_name, tuple(prompt), 20)
        assert text.finish == "length"
        check_rounds(text, 3)
    assert 0 in accepted(texts) and max(accepted(texts)) > 0
    for prompt, text in zip(prompts[:2], texts[:2], strict=True):
        assert decoder.generate([prompt], GREEDY, 20) == [text]


@pytest.mark.parametrize("family_name", tiny.FAMILIES)
def test_baseline_equals_generate(family_name: str) -> None:
    """The denominator of every speedup is right too, end tokens included."""
    prompts = ragged(5)
    texts = Decoder(tiny.target(family_name, vocab=VOCAB)).generate(prompts, GREEDY, 20)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.tokens == generated(family_name, tuple(prompt), 20, tiny.EOS)
        check_rounds(text, 0)
        assert len(text.rounds) == len(text.tokens) - 1


def test_a_wrong_mask_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity has teeth: drafts that cannot see each other give another text."""
    from draftsmith.eval.decoder import round as round_module

    def blind(slab: Any, width: int) -> Step:
        step = chain_step(slab, width)
        if not slab.length.any():  # the prompt
            return step
        committed = step.key_positions < slab.length.unsqueeze(1)  # (B, S)
        own = step.key_positions.unsqueeze(1) == step.positions.unsqueeze(2)  # (B, W, S)
        step.visible = committed.unsqueeze(1) | own
        return step

    chain_step = round_module.chain_step
    target = tiny.target("Llama", vocab=VOCAB)
    end_tokens(monkeypatch, target, [])
    monkeypatch.setattr(round_module, "chain_step", blind)
    prompts = ragged(5)
    texts = Decoder(target, drafter_for("small", "Llama"), Policy(3)).generate(prompts, GREEDY, 20)
    known = [generated("Llama", tuple(prompt), 20) for prompt in prompts]
    assert [text.tokens for text in texts] != known


@pytest.mark.parametrize("family_name", tiny.FAMILIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_end_token_inside_an_accepted_block(
    family_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end token is kept, nothing after it is, and rounds are counted only up to it."""
    target = tiny.target(family_name, vocab=VOCAB)
    end_tokens(monkeypatch, target, [])
    decoder = Decoder(target, drafter_for(name, family_name), Policy(3))
    prompts = tiny.prompts(60 if name == "ngram" else 16, 3, VOCAB)
    free = decoder.generate(prompts, GREEDY, 14)
    where = [
        (b, i) for b, text in enumerate(free) for i in inside_blocks(text)
        if text.tokens[i] not in text.tokens[:i]
    ]  # fmt: skip
    assert where, "no text has a token that first comes inside a block"
    for b, i in where[:2]:
        eos = free[b].tokens[i]
        end_tokens(monkeypatch, target, [eos])
        texts = decoder.generate(prompts[max(0, b - 1) : b + 1], GREEDY, 14)
        assert texts[-1].tokens == generated(family_name, tuple(prompts[b]), 14, eos)
        assert texts[-1].tokens == free[b].tokens[: i + 1] and texts[-1].finish == "stop"
        assert texts[-1].rounds == cut(free[b].rounds, len(prompts[b]) + i)
        check_rounds(texts[-1], 3)


@pytest.mark.parametrize("name", DRAFTERS)
def test_limit_inside_a_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every max_new_tokens gives a prefix of the same text, and its rounds cut to it."""
    target = tiny.target("Qwen3", vocab=VOCAB)
    end_tokens(monkeypatch, target, [])
    decoder = Decoder(target, drafter_for(name, "Qwen3"), Policy(3))
    prompts = ragged(6)
    free = decoder.generate(prompts, GREEDY, 14)
    limits = {1, 6, *[i + 1 for text in free for i in inside_blocks(text)[:2]]}
    assert len(limits) > 2, "no limit falls inside a block"
    for limit in sorted(limits)[:6]:
        for text, whole in zip(decoder.generate(prompts, GREEDY, limit), free, strict=True):
            assert text.tokens == whole.tokens[:limit] and text.finish == "length"
            assert text.rounds == cut(whole.rounds, len(text.prompt) + limit - 1)
            check_rounds(text, 3)


@cache
def written(name: str) -> list[Text]:
    """Greedy texts over the larger vocabulary, whose words have two or three letters."""
    drafter = drafter_for(name, "Llama", tiny.VOCAB)
    return Decoder(drafter.target, drafter, Policy(3)).generate(ragged(6, tiny.VOCAB), GREEDY, 20)


def stopped_at(target: Target, tokens: list[int], stop: str) -> list[int]:
    """The shortest beginning of a text that contains the stop string, or all of it."""
    for count in range(1, len(tokens) + 1):
        if stop in target.tokenizer.decode(tokens[:count]):
            return tokens[:count]
    return tokens


@pytest.mark.parametrize("kind", ["word", "inside a word", "over two", "over parts of two"])
def test_stop_strings(kind: str) -> None:
    """A text ends with the token that completes a stop string, also inside an accepted block."""
    free = written("small")
    drafter = drafter_for("small", "Llama", tiny.VOCAB)
    target = drafter.target
    decoder = Decoder(target, drafter, Policy(3))
    tried = 0
    for b, text in enumerate(free):
        for i in inside_blocks(text):
            before, word = (target.tokenizer.decode(text.tokens[j]) for j in (i - 1, i))
            stop = {
                "word": word,
                "inside a word": word[:2],
                "over two": f"{before} {word}",
                "over parts of two": f"{before[-1]} {word[0]}",
            }[kind]
            known = [stopped_at(target, t.tokens, stop) for t in free]
            if len(known[b]) != i + 1 or tried == 2:
                continue
            texts = decoder.generate([t.prompt for t in free], GREEDY, 20, stop=["", "zz", stop])
            assert [t.tokens for t in texts] == known
            assert texts[b].finish == "stop"
            check_rounds(texts[b], 3)
            tried += 1
    assert tried, "no stop string was first completed in the middle of an accepted block"


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: a character may take four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize(
    "stop", ["\U0001f642", "ï", "e \U0001f642\U0001f642", "\U0001f642" * 40], ids=range(4)
)
def test_stop_strings_over_bytes(stop: str) -> None:
    """A text ends with the last byte of the stop string's last character, not before."""
    tokenizer = bytes_tokenizer()
    tokens = tokenizer("x" * 300 + "naïve " + "\U0001f642" * 41 + " stop")["input_ids"]
    fake = SimpleNamespace(eos_ids=[], tokenizer=tokenizer)
    text = Text([0])
    cutter = Cutter(fake, 1000, [stop])  # type: ignore[arg-type]
    kept = sum(cutter.append(text, [token]) for token in tokens if not text.finish)
    whole = ("x" * 300 + "naïve " + "\U0001f642" * 41).encode()
    assert kept == whole.index(stop.encode()) + len(stop.encode()) and text.finish == "stop"


@pytest.mark.parametrize("family_name", tiny.FAMILIES)
@pytest.mark.parametrize("sampler", [Sampler(0.8), Sampler(1.3, top_k=5, top_p=0.9)])
def test_match_rule_equals_plain_sampling(
    family_name: str, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n-gram drafts change no token of a sampled text: the target draws by position alone."""
    target = tiny.target(family_name, vocab=VOCAB)
    end_tokens(monkeypatch, target, [])
    prompts, rows = ragged(8), [4, 0, 17, 3, 9, 5, 1 << 40, 2]
    plain = Decoder(target).generate(prompts, sampler, 20, rows=rows, seed=3)
    fast = Decoder(target, drafter_for("ngram", family_name), Policy(3))
    texts = fast.generate(prompts, sampler, 20, rows=rows, seed=3)
    assert [t.tokens for t in texts] == [t.tokens for t in plain]
    assert sum(accepted(texts)) > 5
    other = fast.generate(prompts, sampler, 20, rows=rows, seed=4)
    assert sum(a.tokens != b.tokens for a, b in zip(texts, other, strict=True)) > 4


@pytest.mark.parametrize(("name", "family_name"), [("small", "Gemma3"), ("eagle", "Llama")])
def test_batch_composition_does_not_matter(name: str, family_name: str) -> None:
    """A request's text depends on its own id and prompt, not on who shares its batch."""
    target = tiny.target(family_name, vocab=VOCAB)
    decoder = Decoder(target, drafter_for(name, family_name), Policy(3))
    prompts, rows, sampler = ragged(6), [7, 100, 3, 12, 55, 0], Sampler(1.0)
    whole = decoder.generate(prompts, sampler, 16, rows=rows)
    assert sum(accepted(whole)) > 3
    for order in ([2], [5, 1], [4, 3, 0]):
        some = decoder.generate(
            [prompts[i] for i in order], sampler, 16, rows=[rows[i] for i in order]
        )
        assert some == [whole[i] for i in order]
    moved = decoder.generate(prompts, sampler, 16)  # the same slots under other ids
    assert sum(a.tokens != b.tokens for a, b in zip(whole, moved, strict=True)) > 3


def test_texts_that_end_at_their_first_token() -> None:
    """They leave the batch before its first round; the others are written on."""
    decoder, prompts = Decoder(tiny.talker()), tiny.prompts(80)
    first = decoder.generate(prompts, Sampler(), 1)
    ended = [i for i, text in enumerate(first) if text.tokens == [tiny.EOS]]
    rows = [*ended, next(i for i in range(len(prompts)) if i not in ended)]
    assert ended
    texts = decoder.generate([prompts[i] for i in rows], Sampler(), 8, rows=rows)
    assert texts == [decoder.generate([prompts[i]], Sampler(), 8, rows=[i])[0] for i in rows]


def p_value(drafter: Drafter | None, sampler: Sampler, patch: pytest.MonkeyPatch) -> float:
    """Chi-square of the four tokens after the likeliest root, over many rows of one batch."""
    target = tiny.target("Llama", vocab=LAW_VOCAB)
    end_tokens(patch, target, [])
    decoder = Decoder(target, drafter, Policy(2))
    texts = decoder.generate([PROMPT] * ROWS, sampler, 5, seed=1)
    root, law = law_after_root(sampler)
    texts = [text for text in texts if text.tokens[0] == root]
    if drafter is not None and not drafter.deterministic:
        first, second = ([t.rounds[i].accepted for t in texts if len(t.rounds) > i] for i in (0, 1))
        assert set(first) == {0, 1, 2}, "corrections at both depths, and bonus tokens"
        assert set(second) == {0, 1, 2}, "and all of it again in a second round"
    counts = torch.zeros_like(law)
    for text in texts:
        counts[tuple(text.tokens[1:])] += 1
    return chi_square(counts.flatten().tolist(), law.flatten().tolist())


@pytest.mark.parametrize(
    ("name", "cut"),
    [("none", False), ("ngram", True), ("small", False), ("small", True), ("eagle", False),
     ("eagle", True)],
)  # fmt: skip
def test_sampled_law(name: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint law of four tokens, over accepted, corrected, bonus and second-round ones."""
    sampler = Sampler(1.2, top_k=4, top_p=0.9) if cut else Sampler(1.0)
    drafter = None if name == "none" else law_drafter(name)
    assert p_value(drafter, sampler, monkeypatch) > 1e-3


def corrected_from_p(
    drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Draws
) -> Accepted:
    count = CHAIN(drafts, length, p, q, draws).count
    return Accepted(count, draws.pick(p[torch.arange(len(count)), count]))


CHAIN = accept.chain


def drawn_sharper(
    logits: Tensor, vocab: VocabMap, sampler: Sampler, noise: Noise, position: Tensor, node: int
) -> tuple[Tensor, Tensor | None]:
    """A draft drawn at a lower temperature than the law that is handed to the accept rule."""
    token, _ = draw(logits / 0.6, vocab, sampler, noise, position, node)
    return token, sampler.probs(logits)


def shared_noise(self: Noise, purpose: Purpose, position: Tensor, node: int) -> Tensor:
    """A draft and the coin that judges it draw the same number."""
    if purpose is Purpose.DRAFT:
        purpose, node = Purpose.ACCEPT, 1
    return UNIFORM(self, purpose, position, node)


UNIFORM = Noise.uniform
FAULTS: dict[str, tuple[Any, str, Callable]] = {
    "correction drawn from p": (accept, "chain", corrected_from_p),
    "q is not the sampling law": (grow_module, "draw", drawn_sharper),
    "draft and coin share their noise": (Noise, "uniform", shared_noise),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rules_bend_the_law(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above has teeth at the same number of rows."""
    monkeypatch.setattr(*FAULTS[fault])
    assert p_value(law_drafter("small"), Sampler(1.0), monkeypatch) < 1e-6


@pytest.mark.parametrize("name", ["none", *DRAFTERS])
def test_clock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts add up, tokens are those after prefill's, and a second call adds to the first."""
    target = tiny.target("Llama", vocab=VOCAB)
    end_tokens(monkeypatch, target, [3])
    drafter = None if name == "none" else drafter_for(name, "Llama")
    decoder = Decoder(target, drafter, Policy(2))
    seen: list[int] = []
    texts = decoder.generate(ragged(4), Sampler(1.0), 12, progress=seen.append)
    clock = decoder.clock
    assert len({len(t.tokens) for t in texts}) > 1, "some text should end before the others"
    assert clock.tokens == sum(len(t.tokens) - 1 for t in texts) == sum(seen)
    assert clock.rounds == max(len(t.rounds) for t in texts) == len(seen)
    assert min(clock.prefill, clock.draft, clock.verify, clock.host) > 0
    assert clock.total == pytest.approx(clock.draft + clock.verify + clock.host)
    once = (clock.tokens, clock.rounds, clock.total, clock.prefill)
    assert decoder.generate(ragged(4), Sampler(1.0), 12) == texts, "nothing is carried over"
    twice = (clock.tokens, clock.rounds, clock.total, clock.prefill)
    assert twice[:2] == (2 * once[0], 2 * once[1])
    assert twice[2] > once[2] and twice[3] > once[3]


@pytest.mark.parametrize(
    ("prompts", "tokens", "words"),
    [
        ([[3], []], 5, "prompt 1: has no tokens"),
        ([[3]], 0, "max_new_tokens: 0"),
        ([[3]], -2, "max_new_tokens: -2"),
        ([[3], [3] * 500], 13, "prompt 1: 500 tokens .* 512 positions"),
    ],
)
def test_refused_before_any_compute(prompts: list[list[int]], tokens: int, words: str) -> None:
    decoder = Decoder(tiny.target("Llama", vocab=VOCAB))
    with pytest.raises(UserError, match=words):
        decoder.generate(prompts, GREEDY, tokens)
    assert decoder.clock.prefill == 0


@pytest.mark.parametrize("k", [0, -1])
def test_no_draft_length_is_refused(k: int) -> None:
    with pytest.raises(UserError, match="k: "):
        Policy(k)


def test_a_prompt_that_fits_exactly() -> None:
    """512 positions hold 509 tokens and 3 more."""
    prompt = [2 + i % 10 for i in range(509)]
    drafter = drafter_for("eagle", "Llama")
    text = Decoder(drafter.target, drafter, Policy(3)).generate([prompt], GREEDY, 3)[0]
    assert text.tokens == generated("Llama", tuple(prompt), 3, tiny.EOS)
