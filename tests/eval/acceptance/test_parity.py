"""Parity: what the decoder counts is what replay expects on the very text it wrote.

Deterministic drafts agree as integers, prompt by prompt; sampled ones by z. Each planted fault
breaks it: a check that nothing can fail proves nothing. The pooled z sees what changes
the average; `local_z` also sees a decoder that accepts as often as it should, but elsewhere. What
these z are worth as statistics: test_tails.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import reference
import tiny
import toys  # noqa: F401  (registers the toy families)
from draftsmith.drafters import grow
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.acceptance import replay as replay_module
from draftsmith.eval.acceptance.parity import Parity, compare
from draftsmith.eval.acceptance.replay import moments, summarise
from draftsmith.eval.decoder import accept, loop
from draftsmith.eval.decoder.accept import Accepted, Draws
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Cutter, Round, Text
from draftsmith.eval.evaluate import evaluate
from parities import GREEDY, PLAIN, VOCAB, drafter_for, replayed

CUT = Sampler(0.8, top_k=8, top_p=0.95)


def decode(drafter: Drafter, sampler: Sampler, k: int, count: int, tokens: int = 20) -> list[Text]:
    prompts = [[5], *tiny.prompts(count - 1, 2, VOCAB)]
    return Decoder(drafter.target, drafter, Policy(k)).generate(prompts, sampler, tokens, seed=7)


def counted(text: Text, k: int) -> list[int]:
    """[passes, accepted at depth 0, 1, ..] of one text."""
    return [len(text.rounds), *(sum(r.accepted > j for r in text.rounds) for j in range(k))]


def sampled_parity(drafter: Drafter, sampler: Sampler, k: int, count: int) -> Parity:
    texts = decode(drafter, sampler, k, count)
    parity = compare(texts, summarise(replayed(drafter, texts, sampler, k), k), deterministic=False)
    assert parity.counted[k] > 10, "too few acceptances to tell"
    return parity


def differing(drafter: Drafter, sampler: Sampler, k: int, count: int) -> tuple[list[int], Parity]:
    """Prompts whose integer counts are not replay's, fp32 ties aside; parity.py's verdict."""
    texts = decode(drafter, sampler, k, count)
    found = replayed(drafter, texts, sampler, k)
    parity = compare(texts, summarise(found, k), deterministic=True)
    tied = {split.prompt for split in parity.ties}
    out = []
    for i, (text, table) in enumerate(zip(texts, found, strict=True)):
        part = moments(table, k)
        assert not part.variance.any()
        if counted(text, k) != part.mean.tolist() and i not in tied:
            out.append(i)
    assert set(out) <= {split.prompt for split in parity.splits}
    assert sum(parity.counted[1:]) > 10, "a decoder that accepts nothing has nothing to compare"
    return out, parity


@pytest.mark.parametrize("family_name", tiny.FAMILIES)
@pytest.mark.parametrize("name", ["eagle", "small", "ngram"])
def test_greedy_counts_are_equal(name: str, family_name: str) -> None:
    """Passes and accepted counts per depth, as integers, prompt by prompt."""
    out, parity = differing(drafter_for(name, family_name), GREEDY, 3, 40)
    assert out == [] and parity.holds, parity.report()


@pytest.mark.parametrize("sampler", [PLAIN, CUT])
@pytest.mark.parametrize("family_name", tiny.FAMILIES)
def test_guesses_are_equal_at_any_temperature(family_name: str, sampler: Sampler) -> None:
    """n-gram drafts are a function of the state: nothing is left to chance given the text."""
    out, parity = differing(drafter_for("ngram", family_name), sampler, 3, 60)
    assert out == [] and parity.holds and not parity.ties, parity.report()


@pytest.mark.parametrize(
    ("name", "k"),
    [
        *product(("toy-block", "dflash", "dspark"), (2, 4)),
        *product(("medusa", "hydra"), (2, 3)),
        ("peagle", 4),
        ("eagle1", 3),
        ("mtp", 3),
        ("mtp chain", 3),
    ],
)
def test_greedy_counts_of_other_shapes(name: str, k: int) -> None:
    """Depths that depend on k; fewer depths than heads; other heads."""
    out, parity = differing(drafter_for(name, "Llama"), GREEDY, k, 40)
    assert out == [] and parity.holds, parity.report()


@pytest.mark.parametrize(
    ("name", "family_name", "sampler", "k"),
    [
        ("eagle", "Llama", PLAIN, 3),
        ("eagle", "Qwen3", CUT, 2),
        ("eagle", "Gemma3", PLAIN, 1),
        ("small", "Llama", CUT, 3),
        ("small", "Qwen3", PLAIN, 1),
        ("small", "Gemma3", PLAIN, 3),
        ("eagle1", "Llama", PLAIN, 3),
        ("mtp", "Qwen3", CUT, 2),
        ("mtp chain", "Llama", PLAIN, 3),
        ("toy-block", "Llama", PLAIN, 3),
        ("dflash", "Llama", PLAIN, 3),
        ("dflash", "Gemma3", CUT, 3),
        ("dspark", "Llama", PLAIN, 3),
        ("peagle", "Llama", PLAIN, 3),
        ("peagle", "Qwen3", CUT, 3),
        ("dspark", "Qwen3", CUT, 3),
        ("medusa", "Llama", PLAIN, 3),
        ("hydra", "Qwen3", CUT, 3),
    ],
)
def test_sampled_counts_agree(name: str, family_name: str, sampler: Sampler, k: int) -> None:
    """|z| < 3.5 for passes, for each depth, and locally."""
    parity = sampled_parity(drafter_for(name, family_name), sampler, k, 200)
    scores = [*parity.z, parity.z_local]
    assert all(z is not None and abs(z) < 3.5 for z in scores) and parity.holds, parity.report()


CHAIN, EXTEND, DRAW = accept.chain, Eagle.extend, grow.draw


def corrected_from_p(
    drafts: Tensor, length: Tensor, p: Tensor, q: Tensor, draws: Draws
) -> Accepted:
    count = CHAIN(drafts, length, p, q, draws).count
    return Accepted(count, draws.pick(p[torch.arange(len(count)), count]))


def drawn_sharper(
    logits: Tensor, vocab: VocabMap, sampler: Sampler, noise: Noise, position: Tensor, node: int
) -> tuple[Tensor, Tensor | None]:
    token, _ = DRAW(logits / 0.6, vocab, sampler, noise, position, node)
    return token, sampler.probs(logits)


def next_layer(
    self: Eagle, state: Any, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
) -> None:
    moved = features | {"1": features["2"], "2": features["3"]}
    EXTEND(self, state, tokens, moved, counts)


def next_token(
    self: Eagle, state: Any, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
) -> None:
    moved = {name: torch.roll(g, 1, dims=1) for name, g in features.items()}
    EXTEND(self, state, tokens, moved, counts)


def uncut_record(text: Text, kept: list[int], token: int, proposed: int, cutter: Cutter) -> int:
    anchor = len(text.prompt) + len(text.tokens) - 2
    text.rounds.append(Round(anchor, proposed, len(kept)))
    return cutter.append(text, [*kept, token])


Plant = tuple[Any, str, Callable]
FAULTS: dict[str, tuple[str, Plant]] = {
    "the correction is drawn from p": ("eagle", (accept, "chain", corrected_from_p)),
    "q is not the sampling law": ("eagle", (grow, "draw", drawn_sharper)),
    "drafts past the end are counted": ("small", (loop, "_record", uncut_record)),
    "taps read the neighbouring layer": ("eagle", (Eagle, "extend", next_layer)),
    "features stand one token late": ("eagle", (Eagle, "extend", next_token)),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planted_faults_show_in_z(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the decoder gets wrong, some |z| says so.

    A decoder that drafts from another q accepts elsewhere, though about as often: for local_z.
    """
    name, plant = FAULTS[fault]
    drafter = drafter_for(name, "Llama")
    monkeypatch.setattr(*plant)
    parity = sampled_parity(drafter, PLAIN, 3, 300)
    if fault in ("the correction is drawn from p", "drafts past the end are counted"):
        assert max(abs(z or 0) for z in parity.z) > 4 and not parity.holds
    else:
        assert parity.z_local is not None and abs(parity.z_local) > 4 and not parity.holds


@pytest.mark.parametrize("fault", list(FAULTS)[2:])
def test_planted_faults_show_in_counts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 those that do not lie in the sampling give other integers."""
    name, plant = FAULTS[fault]
    drafter = drafter_for(name, "Llama")
    monkeypatch.setattr(*plant)
    out, parity = differing(drafter, GREEDY, 3, 40)
    assert len(out) > 1 and not parity.holds


def test_replay_at_another_sampler_shows() -> None:
    """The faults may lie in replay too: laws before the sampler are not the served ones."""
    drafter = drafter_for("small", "Llama")
    texts = decode(drafter, CUT, 3, 200)
    assert compare(texts, summarise(replayed(drafter, texts, CUT, 3), 3), False).holds
    assert not compare(texts, summarise(replayed(drafter, texts, PLAIN, 3), 3), False).holds


@pytest.mark.parametrize(("name", "sampler"), [("small", CUT), ("eagle", PLAIN), ("ngram", PLAIN)])
def test_reference_agrees_on_the_decoders_text(name: str, sampler: Sampler) -> None:
    """Expected passes by every walk over float64 laws, on what the decoder wrote."""
    drafter = drafter_for(name, "Qwen3")
    texts = [t for t in decode(drafter, sampler, 3, 20, tokens=11) if len(t.tokens) > 8][:2]
    assert len(texts) == 2
    hf = tiny.hf_model("Qwen3", vocab=VOCAB).double()
    cuts = (sampler.temperature, sampler.top_k, sampler.top_p)
    if name == "small":
        own: Any = drafter.lm.hf  # type: ignore[union-attr]
        config = type(own.config)(**own.config.to_dict())
        hf_small = AutoModelForCausalLM.from_config(config)
        hf_small.load_state_dict(own.state_dict())
        hf_small = hf_small.double().eval()
    for text, table in zip(texts, replayed(drafter, texts, sampler, 3), strict=True):
        tokens, root = text.prompt + text.tokens, len(text.prompt)

        def draft(anchor: int, depth: int, tokens: list[int] = tokens) -> Any:
            if name == "small":
                return reference.small_law(hf_small, tokens, anchor, depth, cuts)
            if name == "eagle":
                weights, config = drafter.weights(), drafter.config.model_dump()
                return reference.eagle_law(weights, config, hf, tokens, anchor, depth, cuts)
            guess = reference.ngram_guess(tokens, anchor, 2, 1, 3)
            return guess[depth] if depth < len(guess) else None

        laws = reference.target_laws(hf, tokens, cuts)
        known = reference.ratios(laws, tokens, root, 3, draft)
        part = moments(table, 3)
        for i in range(4):
            mean, variance = reference.moments(
                known, lambda m, i=i: 1.0 if i == 0 else float(m >= i)
            )
            assert part.mean[i] == pytest.approx(mean, abs=1e-3)
            assert part.variance[i] == pytest.approx(variance, abs=1e-3)
        if name == "ngram":
            assert counted(text, 3) == part.mean.tolist()


def test_moments_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each text and draft length, in all that an evaluation says of them."""
    taken, take = [], replay_module.moments
    monkeypatch.setattr(replay_module, "moments", lambda *a: taken.append(a[1]) or take(*a))
    drafter = drafter_for("small", "Llama")
    prompts = tiny.prompts(4, 3, VOCAB)
    found = evaluate(
        drafter.target, drafter, prompts, PLAIN, Policy(3), 12, domains=["a", "b", "a", "b"]
    )
    assert found.parity is not None and found.by_domain is not None
    assert sorted(taken) == [k for k in (1, 2, 3) for _ in prompts]
