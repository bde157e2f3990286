"""The reference checked by itself: by hand, and against HF's own layers.

.venv/bin/pytest tests/support/test_reference.py
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import reference
import reference_eagle
from draftsmith.eval.certify.enumeration import Script, enumerate_rule
from exact import chi_square

VOCAB = 24
HF_NORMS = 1e-5  # HF computes norms and RoPE in fp32 even where the weights are float64


def close(got: Any, want: Any, within: float = 1e-12) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64),
        torch.as_tensor(want, dtype=torch.float64),
        atol=within,
        rtol=0,
    )


# ---------------------------------------------------------------- the sampler


@pytest.mark.parametrize(
    ("probs", "sampler", "kept"),
    [
        ([4, 3, 2, 1], (1.0, 0, 1.0), [4, 3, 2, 1]),
        ([4, 3, 2, 1], (0.5, 0, 1.0), [16, 9, 4, 1]),
        ([1, 4, 3, 2], (1.0, 2, 1.0), [0, 4, 3, 0]),
        ([2, 4, 2, 1], (1.0, 2, 1.0), [2, 4, 2, 0]),  # both that tie at the second are kept
        ([4, 3, 2, 1], (1.0, 3, 1.0), [4, 3, 2, 0]),
        ([4, 3, 2, 1], (1.0, 4, 1.0), [4, 3, 2, 1]),
        ([1, 2, 3, 4], (1.0, 0, 0.65), [0, 0, 3, 4]),  # the token that crosses 0.65 is kept
        ([4, 3, 2, 1], (1.0, 0, 0.75), [4, 3, 2, 0]),
        ([4, 3, 2, 1], (1.0, 0, 0.01), [1, 0, 0, 0]),
        ([4, 3, 2, 1], (1.0, 2, 0.5), [1, 0, 0, 0]),  # 4/7 > 0.5: top-p sees what top-k left
        ([4, 3, 2, 1], (0.5, 0, 0.5), [1, 0, 0, 0]),  # 16/30 > 0.5: top-p sees the temperature
        ([1, 3, 3, 1], (1.0, 0, 0.3), [0, 1, 0, 0]),  # equal tokens: the lower id goes first
        ([1, 3, 3, 1], (0.0, 0, 1.0), [0, 1, 0, 0]),
        ([1, 3, 3, 1], (0.0, 3, 0.5), [0, 1, 0, 0]),
    ],
)
def test_sampler_by_hand(
    probs: list[float], sampler: tuple[float, int, float], kept: list[float]
) -> None:
    law = reference.sampled(torch.tensor(probs).double().log() + 7.0, *sampler)
    close(law, [k / sum(kept) for k in kept])


# ---------------------------------------------------------------- n-grams


@pytest.mark.parametrize(
    ("tokens", "root", "max_n", "min_n", "k", "guess"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 10, 3, 1, 2, [8, 1]),  # the latest, not the first
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 10, 3, 1, 9, [8, 1, 2, 3]),  # up to the root
        ([1, 2, 3, 9, 4, 3, 8, 1, 2, 3], 9, 3, 1, 1, [9]),  # the longest, though it is older
        ([1, 2, 3, 9, 4, 3, 8, 1, 2, 3], 9, 1, 1, 1, [8]),
        ([1, 2, 3, 9, 4, 3, 8, 7, 7, 3], 9, 3, 2, 1, []),  # "3" recurs, "7 3" does not
        ([1, 2, 3, 9, 4, 3, 8, 7, 7, 3], 9, 3, 1, 1, [8]),
        ([1, 2, 1, 5, 1, 2], 2, 3, 1, 4, [2, 1]),  # what lies past the root is not seen
        ([5, 5, 5], 2, 3, 1, 4, [5]),  # an occurrence may overlap the suffix
        ([5, 6], 1, 3, 1, 4, []),
        ([5], 0, 3, 1, 4, []),
    ],
)
def test_ngram_by_hand(
    tokens: list[int], root: int, max_n: int, min_n: int, k: int, guess: list[int]
) -> None:
    assert reference.ngram_guess(tokens, root - 1, max_n, min_n, k) == guess


# ---------------------------------------------------------------- walks


def test_walks_by_hand() -> None:
    """Three tokens, so two to gain. Row 0 accepts with 0.5 and is done then, else row 1 runs."""
    table = [[0.5], [0.25]]
    assert sorted(reference.rounds(table)) == [
        (0.125, [(0, 0), (1, 1)]),
        (0.375, [(0, 0), (1, 0)]),
        (0.5, [(0, 1)]),
    ]
    close(reference.expected_passes(table), 1.5)
    close(reference.moments(table, lambda m: 1), (1.5, 0.25))
    close(reference.moments(table, lambda m: m > 0), (0.625, 0.625 * 0.375))
    close(reference.alpha(table, 0), 0.625 / 1.5)
    # Depth 1 exists in row 0 alone, and half of its rounds reach it.
    close(reference.alpha([[0.5, 0.4], [0.25]], 1), 0.4)


def test_block_rule_by_hand() -> None:
    """Ratios 2 and 0.4: min(1, 2) min(1, 0.4) = 0.4, but min(1, 2, 2 * 0.4) = 0.8."""
    table = [[2.0, 0.4], [0.3], []]
    for rule, both in (("token", 0.4), ("block", 0.8)):
        close(reference.moments(table, lambda m: m > 1, rule), (both, both * (1 - both)))
        close(reference.expected_passes(table, rule), both + (1 - both) * 2)


def test_ratios_by_hand() -> None:
    """Prompt 2 tokens, root at 2: depth 0 of the first anchor (1) is compared at position 3."""
    tokens = [0, 1, 2, 1, 0]
    laws = [torch.tensor([t + 1.0, t + 2.0, t + 3.0]).double() for t in range(5)]
    q = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    table = reference.ratios(laws, tokens, 2, 4, lambda anchor, depth: q * (10 * anchor + depth))
    assert table == [[10 * 2 / 4, 11 * 1 / 4], [20 * 1 / 4]]
    assert reference.ratios(laws, tokens, 2, 1, lambda a, d: 1 if a == 1 else 2) == [[1.0], [0.0]]
    assert reference.ratios(laws, tokens, 2, 4, lambda a, d: None) == [[], []]


# ---------------------------------------------------------------- the process that walks describe


class Story(NamedTuple):
    text: tuple[int, ...]
    accepted: tuple[int, ...]


@cache
def toy_law(who: str, prefix: tuple[int, ...], size: int = 2) -> Tensor:
    """A law that depends on all of prefix."""
    seed = hash((len(prefix), *prefix)) % 10007 + (7 if who == "p" else 0)
    weights = torch.rand(size, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    return weights / weights.sum()


Rule = Callable[[Script, list[Tensor], list[Tensor], list[int]], list[int]]


def one(draws: Script, chance: Tensor) -> bool:
    return bool(draws.accept(chance.clamp(max=1).reshape(1))[0])


def leviathan(draws: Script, p: list[Tensor], q: list[Tensor], drafts: list[int]) -> list[int]:
    """Draft by draft, with min(1, p/q); after a rejection, from the positive part of p - q."""
    for j, x in enumerate(drafts):
        if not one(draws, p[j][x] / q[j][x]):
            return [*drafts[:j], int(draws.pick((p[j] - q[j]).clamp(min=0)))]
    return [*drafts, int(draws.pick(p[-1]))]


def careless(draws: Script, p: list[Tensor], q: list[Tensor], drafts: list[int]) -> list[int]:
    """Wrong: draws from p itself after a rejection."""
    for j, x in enumerate(drafts):
        if not one(draws, p[j][x] / q[j][x]):
            return [*drafts[:j], int(draws.pick(p[j]))]
    return [*drafts, int(draws.pick(p[-1]))]


def block(draws: Script, p: list[Tensor], q: list[Tensor], drafts: list[int]) -> list[int]:
    """Block verification (Sun et al. 2403.10444, algorithm 2)."""
    K, tau, carried = len(drafts), 0, torch.ones((), dtype=torch.float64)
    weights = (p[0] - q[0]).clamp(min=0)
    for i in range(1, K + 1):
        x = drafts[i - 1]
        carried = (carried * p[i - 1][x] / q[i - 1][x]).clamp(max=1)
        if i == K:
            left, chance = p[K], carried
        else:
            left = (carried * p[i] - q[i]).clamp(min=0)
            chance = left.sum() / (left.sum() + 1 - carried)
        if one(draws, chance):
            tau, weights = i, left
    return [*drafts[:tau], int(draws.pick(weights))]


def write(draws: Script, rule: Rule, K: int, tokens: int) -> Story:
    """Speculative decoding as it runs: rounds until `tokens` more than the first are written."""
    text, accepted = [1], []
    while len(text) < tokens + 1:
        drafts: list[int] = []
        for _ in range(K):
            drafts.append(int(draws.pick(toy_law("q", tuple(text + drafts)))))
        p = [toy_law("p", tuple(text + drafts[:j])) for j in range(K + 1)]
        q = [toy_law("q", tuple(text + drafts[:j])) for j in range(K)]
        new = rule(draws, p, q, drafts)
        accepted.append(min(len(new) - 1, tokens + 1 - len(text)))  # drafts past the cut: not told
        text = (text + new)[: tokens + 1]
    return Story(tuple(text), tuple(accepted))


def stories(rule: Rule, K: int, tokens: int) -> dict[tuple[int, ...], list[tuple[float, Story]]]:
    found = defaultdict(list)
    for chance, story in enumerate_rule(lambda draws: write(draws, rule, K, tokens)):
        found[story.text].append((chance, story))
    return found


def law_of_text(text: Sequence[int]) -> float:
    return math.prod(float(toy_law("p", tuple(text[:t]))[text[t]]) for t in range(1, len(text)))


@pytest.mark.parametrize(("name", "rule"), [("token", leviathan), ("block", block)])
def test_walks_are_the_process_given_its_text(name: str, rule: Rule) -> None:
    """All that speculative decoding can do, split by the text it wrote: every text has the
    target's chance, and its passes and accepted drafts have the moments of that text's walks."""
    K, tokens = 2, 3
    found = stories(rule, K, tokens)
    assert len(found) == 2**tokens
    for text, told in found.items():
        total = sum(chance for chance, _ in told)
        close(total, law_of_text(text))

        def draft(anchor: int, depth: int, text: tuple[int, ...] = text) -> Tensor:
            return toy_law("q", text[: anchor + 2 + depth])

        laws = [toy_law("p", text[: t + 1]) for t in range(len(text))]
        table = reference.ratios(laws, text, 0, K, draft)
        assert [len(row) for row in table] == [2, 2, 1]
        counts: list[Callable[[int], float]] = [lambda m: 1, lambda m: m > 0, lambda m: m > 1]
        for count in counts:
            sums = [(chance / total, sum(map(count, story.accepted))) for chance, story in told]
            mean = sum(chance * n for chance, n in sums)
            variance = sum(chance * (n - mean) ** 2 for chance, n in sums)
            close(reference.moments(table, count, name), (mean, variance))


def test_a_wrong_rule_shows_in_the_text() -> None:
    off = [
        abs(sum(chance for chance, _ in told) - law_of_text(text))
        for text, told in stories(careless, 2, 3).items()
    ]
    assert max(off) > 1e-2


# ---------------------------------------------------------------- accept rules


def first_token(rule: Rule, p: Tensor, q: Tensor) -> Tensor:
    law = torch.zeros_like(p)
    for chance, new in enumerate_rule(lambda d: rule(d, [p, p], [q], [int(d.pick(q))])):
        law[new[0]] += chance
    return law


def test_leviathan_gives_exactly_p() -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
    close(first_token(leviathan, p, q), p)
    # By hand: rejected with 0.3 + 0.2; else min(p, q); then p again, not (0.4, 0, 0.1) / 0.5.
    close(first_token(careless, p, q), [0.1 + 0.25, 0.3 + 0.15, 0.1 + 0.1, 0.0])


def test_enumeration_of_batched_draws() -> None:
    """accept over (B, K) is every pattern; pick over (B, V) is one index a row."""
    prob = torch.tensor([[0.5, 1.0], [0.25, 0.0]]).double()
    weights = torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 2.0]]).double()

    def rule(draws: Script) -> tuple[Any, Any]:
        return draws.accept(prob).tolist(), draws.pick(weights).tolist()

    got = sorted(enumerate_rule(rule), key=lambda outcome: outcome[0])
    want = [
        (a * b * w, ([[x, True], [y, False]], [pick, 2]))
        for a, x in ((0.5, True), (0.5, False))
        for b, y in ((0.25, True), (0.75, False))
        for w, pick in ((0.25, 0), (0.75, 1))
    ]
    assert len(got) == 8
    for outcome in want:
        assert outcome in got
    close(sum(chance for chance, _ in got), 1.0)


@pytest.mark.parametrize("bad", [math.nan, -0.1, 1.1])
def test_what_is_no_chance_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not chances"):
        list(enumerate_rule(lambda d: d.accept(torch.tensor([0.5, bad]))))
    if bad != 1.1:
        with pytest.raises(ValueError, match="not weights"):
            list(enumerate_rule(lambda d: d.pick(torch.tensor([[0.5, bad]]))))
    with pytest.raises(ValueError, match="not weights"):
        list(enumerate_rule(lambda d: d.pick(torch.zeros(1, 3))))


# ---------------------------------------------------------------- chi-square


def test_chi_square_by_hand() -> None:
    """(10, 20, 30) of 20 each: 100/20 + 0 + 100/20 = 10 on two degrees, so exp(-10 / 2)."""
    close(chi_square([10, 20, 30], [1 / 3] * 3), math.exp(-5))
    close(chi_square([20, 20, 20], [1 / 3] * 3), 1.0)
    # Cells that expect 2 and 4 are pooled into one that expects 6 and got 12: 36/6 + 36/54 on one.
    pooled = chi_square([48, 4, 8], [0.9, 2 / 60, 4 / 60])
    close(pooled, math.erfc(math.sqrt((36 / 6 + 36 / 54) / 2)))


def test_chi_square_edges() -> None:
    assert chi_square([50, 49, 1], [0.5, 0.5, 0.0]) == 0.0  # what cannot happen happened
    assert chi_square([100, 0], [1.0, 0.0]) == 1.0
    with pytest.raises(ValueError, match="too few"):
        chi_square([3, 3], [0.5, 0.5])
    with pytest.raises(ValueError, match="sum to"):
        chi_square([50, 50], [0.5, 0.4])


# ---------------------------------------------------------------- the target's features


@cache
def llama(layers: int = 3) -> Any:
    """A tiny float64 Llama with peaked laws; treat it as read-only."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    torch.manual_seed(0)
    hf = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.normal_(std=0.4) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return hf.double().eval()


def text(length: int = 12) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(3)).tolist()


def test_small_reads_up_to_the_token_before() -> None:
    hf, tokens = llama(), text()
    laws = reference.target_laws(hf, tokens)
    for anchor, depth in ((0, 0), (3, 0), (3, 2)):
        close(reference.small_law(hf, tokens, anchor, depth), laws[anchor + 1 + depth], HF_NORMS)
    top = reference.target_laws(hf, tokens, (0.0, 0, 1.0))
    assert [int(law.argmax()) for law in top] == [int(law.argmax()) for law in laws]
    assert all(sorted(law.tolist())[-2:] == [0.0, 1.0] for law in top)


@torch.no_grad()
def test_taps_are_layer_ids() -> None:
    """0 is the embeddings; the last id needs the final norm to give the logits, "normed" not."""
    hf, tokens = llama(), text()
    logits = hf(torch.tensor([tokens])).logits[0]
    raw = reference_eagle.tapped(hf, tokens, [3])
    close(reference_eagle.tapped(hf, tokens, [0]), hf.model.embed_tokens(torch.tensor(tokens)))
    close(hf.lm_head(hf.model.norm(raw)), logits, HF_NORMS)
    close(hf.lm_head(reference_eagle.tapped(hf, tokens, ["normed"])), logits, HF_NORMS)
    assert (hf.lm_head(raw) - logits).abs().max() > 0.1
    pair = reference_eagle.tapped(hf, tokens, [1, 3])
    assert pair.shape == (12, 32)
    close(pair[:, 16:], raw)
    third = copy.deepcopy(hf.model.layers[:1])
    shallow = copy.deepcopy(hf)
    shallow.model.layers = third
    close(pair[:, :16], reference_eagle.tapped(shallow, tokens, [1]), HF_NORMS)


# ---------------------------------------------------------------- EAGLE-3 against HF's own layers


def test_rope_is_rotate_half() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    cos, sin = llama().model.rotary_emb(x, torch.tensor([[5]]))
    want, _ = apply_rotary_pos_emb(x[None, :, None], x[None, :, None], cos, sin)
    close(reference_eagle.rotate(x, 5, 100.0), want[0, :, 0], HF_NORMS)


def eagle(hf: Any, taps: list[int | str], layer: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An EAGLE-3 head made of the target's own layer, final norm and head.

    It looks at the features alone: the weights on the token's half of its input are 0."""
    weights = {name: w.clone() for name, w in hf.model.layers[layer].state_dict().items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        w = weights[f"self_attn.{name}.weight"]
        weights[f"self_attn.{name}.weight"] = torch.cat([torch.zeros_like(w), w], dim=1)
    weights["hidden_norm.weight"] = weights["input_layernorm.weight"].clone()
    weights["fc.weight"] = torch.eye(16).double()
    weights["norm.weight"] = hf.model.norm.weight.detach()
    block = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-6}
    config = {"taps": taps, "head": "target", "norm_before_residual": False}
    return weights, config | {"block": block | {"rope_theta": 100.0}}


@torch.no_grad()
def test_eagle_made_of_the_targets_last_layer_is_the_target() -> None:
    """Fed with the last layer's input, that layer predicts what the target does: depth 0 is p
    after the anchor. At depth j its own outputs, before the norm, follow the features: what a
    one-layer HF model makes of the same rows."""
    hf, tokens = llama(), text()
    weights, config = eagle(hf, [2], layer=2)
    laws = reference.target_laws(hf, tokens)
    single = copy.deepcopy(hf)
    single.model.layers = single.model.layers[2:]
    single.model.layers[0].self_attn.layer_idx = 0
    single.model.norm = nn.Identity()
    for anchor in (0, 4, 9):
        rows = reference_eagle.tapped(hf, tokens[: anchor + 1], [2])
        for depth in range(min(3, 11 - anchor)):
            q = reference.eagle_law(weights, config, hf, tokens, anchor, depth)
            out = single.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0, -1:]
            close(q, hf.lm_head(hf.model.norm(out[0])).softmax(-1), HF_NORMS)
            if depth == 0:
                close(q, laws[anchor], HF_NORMS)
            rows = torch.cat([rows, out])


@torch.no_grad()
def test_eagle_reads_the_token_after_each_feature() -> None:
    """With the token's half alone, no MLP and fc = 0, the layer adds up HF's layer 0 attention
    over x_1, x_2, ..: row t has read x_{t+1}."""
    hf, tokens = llama(), text()
    weights, config = eagle(hf, [2], layer=0)
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"self_attn.{name}.weight"] = weights[f"self_attn.{name}.weight"].roll(16, dims=1)
    weights["fc.weight"] = torch.zeros(16, 16).double()
    weights["mlp.down_proj.weight"].zero_()
    added: list[Tensor] = []
    hook = hf.model.layers[0].self_attn.register_forward_hook(lambda m, a, o: added.append(o[0][0]))
    hf(torch.tensor([tokens[1:]]))
    hook.remove()
    for anchor, depth in ((0, 0), (4, 0), (4, 1), (4, 2)):
        out = added[0][anchor : anchor + depth + 1].sum(0)
        q = reference.eagle_law(weights, config, hf, tokens, anchor, depth)
        close(q, hf.lm_head(hf.model.norm(out)).softmax(-1), HF_NORMS)


@torch.no_grad()
def test_eagle_residual_fusion_and_vocabulary() -> None:
    """With attention and MLP off the state passes through: raw, or normed if the flag says so.
    Three taps in their order, the drafter's own head, 9 of 24 tokens, and the sampler on those."""
    hf, tokens = llama(), text()
    weights, config = eagle(hf, [3, "normed", 0], layer=1)
    generator = torch.Generator().manual_seed(1)
    weights["fc.weight"] = torch.randn(16, 48, generator=generator).double()
    weights["lm_head.weight"] = torch.randn(9, 16, generator=generator).double()
    weights["draft_ids"] = torch.tensor([20, 3, 4, 23, 11, 0, 1, 7, 9])
    weights["self_attn.o_proj.weight"].zero_()
    weights["mlp.down_proj.weight"].zero_()
    tapped = [reference_eagle.tapped(hf, tokens[:6], [tap])[-1] for tap in config["taps"]]
    state = weights["fc.weight"] @ torch.cat(tapped)
    weights["hidden_norm.weight"] = torch.linspace(0.5, 2, 16).double()
    normed = nn.functional.rms_norm(state, (16,), weights["hidden_norm.weight"], 1e-6)
    for own in (True, False):
        config["head"] = "own" if own else "target"
        rows = weights["lm_head.weight"] if own else hf.lm_head.weight[weights["draft_ids"]]
        for config["norm_before_residual"], kept in ((False, state), (True, normed)):
            final = nn.functional.rms_norm(kept, (16,), weights["norm.weight"], 1e-6)
            for sampler in ((1.0, 0, 1.0), (0.7, 5, 0.9), (0.0, 0, 1.0)):
                q = reference.eagle_law(weights, config, hf, tokens, 5, 0, sampler)
                want = torch.zeros(VOCAB).double()
                want[weights["draft_ids"]] = reference.sampled(rows @ final, *sampler)
                close(q, want, 1e-9)


def test_eagle_sees_nothing_later() -> None:
    hf, tokens = llama(), text()
    weights, config = eagle(hf, [1], layer=1)
    for name in ("q_proj", "k_proj", "v_proj"):  # now it looks at tokens too
        w = weights[f"self_attn.{name}.weight"]
        weights[f"self_attn.{name}.weight"] = w + w.roll(16, dims=1)
    q = reference.eagle_law(weights, config, hf, tokens, 3, 2)
    for at in range(12):
        other = [(t + 1) % VOCAB if i == at else t for i, t in enumerate(tokens)]
        moved = (reference.eagle_law(weights, config, hf, other, 3, 2) - q).abs().max()
        assert (moved > 1e-4) == (at <= 3 + 1 + 2), at
