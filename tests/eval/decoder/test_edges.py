"""Where a batch is uneven or a text meets its end: ended rows, the last positions; and bf16."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AttentionMaskInterface

import contracts as contract
import tiny
from decodings import end_tokens
from draftsmith.drafters.base import Policy, family
from draftsmith.drafters.ngram import Ngram
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import attention, causal_lm
from draftsmith.drafters.target.target import Target
from draftsmith.eval.certify.texts import Rehearsed
from draftsmith.eval.decoder.loop import Decoder
from targets import LONGROPE, build_as

SAMPLERS = [Sampler(0.0), Sampler(1.0)]


def ngram(target: Target) -> Ngram:
    return Ngram.create(target, Ngram.Config())  # type: ignore[return-value]


def beside_an_ended_row(sampler: Sampler, patch: pytest.MonkeyPatch) -> bool:
    """Whether a short text is the same beside a long one that ended at once, on Gemma-2."""
    target = tiny.target("Gemma2")
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(2, target.vocab_size, (200,), generator=generator).tolist()
    end_tokens(patch, target, [Decoder(target).generate([long], sampler, 2)[0].tokens[0]])
    alone = [Decoder(target).generate([p], sampler, 30, rows=[1])[0] for p in tiny.prompts(5)]
    longest = max(alone, key=lambda text: len(text.tokens))  # some end early as well
    both = [long, longest.prompt]
    ended, beside = Decoder(target, ngram(target), Policy(3)).generate(both, sampler, 30)
    assert len(ended.tokens) == 1 and len(longest.tokens) > 10
    return beside.tokens == longest.tokens


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_row_that_ended_past_the_view(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window holds no key: a softmax over nothing must not reach the batch."""
    assert beside_an_ended_row(sampler, monkeypatch)


def test_nan_of_an_ended_row_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = attention._mask

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        added = mask(*args, **kwargs)  # type: ignore[arg-type]
        return added.masked_fill((added == 0).all(-1, keepdim=True), float("-inf"))

    monkeypatch.setattr(attention, "_mask", empty)
    AttentionMaskInterface.register(attention.NAME, empty)
    try:
        with pytest.raises(IndexError):
            beside_an_ended_row(Sampler(0.0), monkeypatch)
    finally:
        AttentionMaskInterface.register(attention.NAME, mask)


def up_to(last: int, target: Target) -> list[bool]:
    """Whether texts that fill `last` positions are the baseline's, with drafts past the end."""
    out = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(2, target.vocab_size, (8,), generator=generator).tolist() * 2
        room = last - len(prompt)
        (plain,) = Decoder(target).generate([prompt], Sampler(0.0), room)
        knows = Rehearsed(target, {0: prompt + plain.tokens + [3] * 9})
        (fast,) = Decoder(target, knows, Policy(8)).generate([prompt], Sampler(0.0), room)
        out.append(fast.tokens == plain.tokens)
    return out


def longrope() -> Target:
    return build_as("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)


def learned_positions() -> Target:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tiny.VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return Target(GPT2LMHeadModel(config).eval(), tiny.tokenizer(), tiny.source())


def test_drafts_past_the_end() -> None:
    """longrope would switch its frequencies for the whole batch, a table would be outrun."""
    for target in (longrope(), learned_positions()):
        assert all(up_to(target.max_positions, target))


def test_positions_past_the_end_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = longrope(), learned_positions()
    monkeypatch.setattr(causal_lm.CausalLM, "max_positions", 1 << 30)
    assert not all(up_to(64, targets[0]))
    with pytest.raises(IndexError):
        up_to(32, targets[1])


def test_bf16_keeps_rotary_frequencies() -> None:
    """Rounded to bf16 they turn by whole circles at far positions, which no server does."""
    made = contract.drafter("eagle")
    exact = made.self_attn.rope.frequency.clone()
    made.to(torch.bfloat16)
    assert made.fc.weight.dtype == torch.bfloat16
    assert made.self_attn.rope.frequency.equal(exact)
    own = Target(tiny.hf_model(), tiny.tokenizer(), tiny.source())  # its embeddings are shared
    small = family("small").create(own, family("small").Config(layers=[0, 1])).to(torch.bfloat16)
    assert own.dtype == torch.float32  # it is no part of what was cast
    kept = {name: b.dtype for name, b in small.named_buffers() if b.is_floating_point()}
    assert kept and set(kept.values()) == {torch.float32}


def test_each_thread_reads_its_own_step() -> None:
    """The fault: two targets that run at once, in one process, each with the other's cache."""
    met = threading.Barrier(2, timeout=60)

    def own(width: int) -> bool:
        positions = torch.arange(width).unsqueeze(0)
        step = attention.packed_step(positions, positions * 0)
        with attention.active(step):
            met.wait()  # both are inside
            return attention.current() is step

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(own, (3, 5)))
