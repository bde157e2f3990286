"""The certificate's texts: what is decoded, against what transformers writes and draws.

An untrained head is hardly ever right, so nothing that happens after an acceptance would be tried:
accepted paths, their commit, texts that end inside a block. So texts are also decoded with
`Rehearsed`, a drafter that knows the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, DrafterState, Guesses, Policy, Proposal
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.grow import from_states, grow
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Noise, Purpose, Sampler, pick
from draftsmith.drafters.target.attention import chain_step
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.parity import TIE
from draftsmith.eval.certify.fixture import (
    GREEDY,
    SEED,
    WARM,
    CheckResult,
    Fixture,
    NamedChecks,
    top_gap,
)
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text, end_token, first_difference

_RANKS = (0, 0, 1, 0, 2, 0, 3, 1)  # of the right token in `Rehearsed`, by the hash of its place


def text_steps(fixture: Fixture) -> NamedChecks:
    """Texts against transformers' own: no drafting, chains and trees, batch 1 and all prompts."""
    rehearsed: dict[Sampler, Drafter] = {}
    shapes: list[Policy] = [Policy(4)]
    if fixture.target.trees:
        shapes += [Tree(3, budget=8, branch=4), StaticTree.of_widths((3, 2, 1))]

    def rehearsed_for(sampler: Sampler) -> Drafter:
        """The drafter that has rehearsed the target's own texts, which transformers wrote at
        temperature 0 and the baseline loop, checked on its own, above."""
        if sampler not in rehearsed:
            if sampler.greedy:
                answers = [fixture.generate(i) for i in fixture.all]
            else:
                texts = fixture.decode(None, Policy(1), sampler, fixture.all, "baseline")
                answers = [text.tokens for text in texts]
            whole = {i: fixture.prompts[i] + answer for i, answer in enumerate(answers)}
            rehearsed[sampler] = Rehearsed(fixture.target, whole)
        return rehearsed[sampler]

    def check(
        drafter: Callable[[], Drafter | None],
        name: str,
        policy: Policy,
        sampler: Sampler,
        rows: list[int],
    ) -> CheckResult:
        texts = fixture.decode(drafter(), policy, sampler, rows, name)
        return own_text(fixture, texts, rows, sampler)

    for sampler in (GREEDY, WARM):
        step = partial(check, lambda: None, "baseline", Policy(1), sampler, fixture.all)
        yield f"baseline, T={sampler.temperature:g}: transformers' text", step
        for rows in ([1], fixture.all):
            for policy in shapes:
                name = f"{policy}, T={sampler.temperature:g}, batch {len(rows)}, rehearsed"
                known = partial(rehearsed_for, sampler)
                step = partial(check, known, "rehearsed", policy, sampler, rows)
                yield f"{name}: transformers' text", step
        for name, drafter in fixture.drafters.items():
            for policy in fixture.policies(drafter):
                if policy.sampled and not (sampler.greedy or drafter.deterministic):
                    continue  # its drafts are drawn: the law is the target's, the tokens are not
                label = f"{policy}, T={sampler.temperature:g}, batch {len(fixture.prompts)}, {name}"
                drafts = partial(fixture.drafters.get, name)
                step = partial(check, drafts, name, policy, sampler, fixture.all)
                yield f"{label}: transformers' text", step
    yield "a text that ends inside a block", lambda: _ends_inside(fixture, rehearsed_for)


def own_text(
    fixture: Fixture, texts: Sequence[Text], rows: Sequence[int], sampler: Sampler
) -> CheckResult:
    """Whether texts are those that transformers' laws give, up to fp32 ties.

    At temperature 0 against `generate`. Above, against plain sampling with the same noise: token by
    token each must be what its place's own noise picks from transformers' law after all before it.
    """
    ties: list[str] = []
    wrong: list[str] = []
    for row, text in zip(rows, texts, strict=True):
        if sampler.greedy:
            place = first_difference(text.tokens, fixture.generate(row))
            prefix = text.prompt + text.tokens[:place]
            gap = 0.0 if place is None else top_gap(fixture.theirs, prefix)
        else:
            place, gap = _unlike_keyed(fixture, text, row, sampler)
        if place is not None:
            bound = TIE if sampler.greedy else TIE / 10
            (ties if gap < bound else wrong).append(f"text {row} token {place} (gap {gap:.1e})")
    tokens = sum(len(text.tokens) for text in texts)
    passes = sum(len(text.rounds) for text in texts)
    taken = sum(r.accepted for text in texts for r in text.rounds)
    figure = f"{tokens} tokens in {passes} passes, {taken} drafts accepted"
    figure += "".join(f"; fp32 tie: {t}" for t in ties) + "".join(f"; DIFFERS: {w}" for w in wrong)
    return not wrong and len(ties) <= math.ceil(len(texts) / 50), figure


@torch.no_grad()
def _unlike_keyed(
    fixture: Fixture, text: Text, row: int, sampler: Sampler
) -> tuple[int | None, float]:
    """The first token that plain sampling would not have drawn, and by how much of u it missed."""
    device = fixture.target.device
    ids = torch.tensor([text.prompt + text.tokens], device=device)
    first = len(text.prompt)
    law = sampler.probs(fixture.theirs(ids, use_cache=False).logits[0, first - 1 : -1])  # (n, V)
    position = torch.arange(first, ids.shape[1], device=device).unsqueeze(0)
    key = torch.tensor([row], device=device)
    uniform = Noise(SEED, key, torch.zeros_like(key)).uniform(Purpose.TARGET, position, 0)[0]
    place = first_difference(text.tokens, pick(law, uniform).tolist())
    if place is None:
        return None, 0.0
    mass = law[place].double().cumsum(0)
    u, token = float(uniform[place] * mass[-1]), text.tokens[place]
    low = float(mass[token - 1]) if token else 0.0
    return place, max(low - u, u - float(mass[token]), 0.0)


def _ends_inside(fixture: Fixture, rehearsed_for: Callable[[Sampler], Drafter]) -> CheckResult:
    """An accepted draft becomes an end token: nothing after it may be kept."""
    tried = []
    for policy in fixture.policies(rehearsed_for(GREEDY)):
        found = _first_inside(fixture, rehearsed_for, policy)
        if found is None:
            return False, f"{policy}: no text has a token that first comes inside a block"
        sampler, row, whole, i = found
        eos = whole[i]
        text = fixture.decode(rehearsed_for(sampler), policy, sampler, fixture.all, eos=eos)[row]
        known = fixture.generate(row, eos) if sampler.greedy else whole[: i + 1]
        if text.tokens != known or len(known) != i + 1 or text.finish != "stop":
            return (
                False,
                f"{policy}: text {row} should end after {i + 1} tokens, kept {text.tokens}",
            )
        tried.append(f"{policy}, T={sampler.temperature:g}, after {i + 1} tokens")
    return True, "; ".join(tried)


def _first_inside(
    fixture: Fixture, rehearsed_for: Callable[[Sampler], Drafter], policy: Policy
) -> tuple[Sampler, int, list[int], int] | None:
    """A text's sampler, row and tokens, and a place inside a block whose token is new there.

    Greedy texts of a target that repeats itself may have none; sampled ones do.
    """
    for sampler in (GREEDY, WARM):
        texts = fixture.decode(rehearsed_for(sampler), policy, sampler, fixture.all, "rehearsed")
        for row, text in enumerate(texts):
            first = len(text.prompt)
            for i in (r.anchor + 2 + j - first for r in text.rounds for j in range(r.accepted)):
                # More of its own round follows.
                if i + 1 < len(text.tokens) and text.tokens[i] not in text.tokens[:i]:
                    return sampler, row, text.tokens, i
    return None


def half_precision(fixture: Fixture) -> CheckResult:
    """Where a bf16 text leaves the baseline's, the two best tokens are as good as tied: in bf16
    logits depend on how many tokens a pass reads.
    """
    half = Target(
        fixture.theirs.to(torch.bfloat16), fixture.target.tokenizer, fixture.target.source
    )
    row, prompt = 1, fixture.prompts[1]
    with end_token(half, None):
        baseline = Decoder(half).generate([prompt], GREEDY, fixture.tokens, rows=[row])[0]
        whole = {row: prompt + baseline.tokens}
        decoder = Decoder(half, Rehearsed(half, whole), Policy(4))
        fast = decoder.generate([prompt], GREEDY, fixture.tokens, rows=[row])[0]
    narrow, wide = _logits(half, whole[row], 1), _logits(half, whole[row], len(whole[row]))
    moved = (narrow - wide).abs().max().item()
    figure = f"max |d logit| between widths {moved:.3g}; "
    place = first_difference(fast.tokens, baseline.tokens)
    if place is None:
        return True, figure + f"{len(fast.tokens)} tokens are the baseline's"
    first, second = narrow[len(prompt) - 1 + place].topk(2).values.tolist()
    gap = first - second
    figure += f"first divergence at token {place}, top-2 gap there {gap:.3g}"
    return gap <= 2 * moved, figure


@torch.no_grad()
def _logits(target: Target, tokens: list[int], width: int) -> Tensor:
    """Logits (T, V) in fp32 of a text that is read `width` tokens at a time."""
    ids = torch.tensor([tokens], device=target.device)
    slab = Slab(1, len(tokens), target.device)
    out = []
    for piece in ids.split(width, dim=1):
        out.append(target.head(target(piece, chain_step(slab, piece.shape[1])).final)[0])
        slab.commit(torch.full_like(slab.length, piece.shape[1]))
    return torch.cat(out).float()


# ---------------------------------------------------------------- a drafter that knows the text


@dataclass
class _RehearsedState(DrafterState):
    """length (B,): committed tokens."""

    length: Tensor


class Rehearsed(Drafter[_RehearsedState]):
    """Ranks a text's own token first, second, third, or not at all, as a hash of its place says,
    among decoys; ranked at every temperature. texts: each row id's whole text, prompt and answer.
    """

    family = "rehearsed"
    deterministic = True
    trees = True
    capturable = False

    def __init__(self, target: Shell, texts: Mapping[int, Sequence[int]]) -> None:
        super().__init__(target, None)
        self.texts = texts

    def unroll(self, batch: Batch, alignment: Alignment) -> Guesses:
        raise NotImplementedError("a rehearsed drafter probes the decoder; it is not replayed")

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        return hidden  # (n, V): the state of a depth is its ranking

    def start(self, rows: int, capacity: int) -> _RehearsedState:
        return _RehearsedState(torch.zeros(rows, dtype=torch.long, device=self.target.device))

    def extend(
        self, state: _RehearsedState, tokens: Tensor, features: dict[str, Tensor], counts: Tensor
    ) -> None:
        state.length += counts

    def propose(
        self, state: _RehearsedState, root: Tensor, policy: Policy, sampler: Sampler, noise: Noise
    ) -> Proposal:
        places = zip(noise.rows.tolist(), state.length.tolist(), strict=True)
        ranked = [
            [self._ranking(row, length + 1 + j) for j in range(policy.k)] for row, length in places
        ]
        states = torch.stack([torch.stack(row) for row in ranked]).to(root.device)  # (B, k, V)
        greedy = Sampler(0.0)  # so that a chain is ranked too
        forward = from_states(self, states)
        return grow(root, state.length, policy, self.vocab, greedy, noise, forward)

    def _ranking(self, row: int, place: int) -> Tensor:
        """Logits (V,) of the token at a place of a row's text."""
        V = self.vocab.size
        code = row * 31 + place * 17
        out = (torch.arange(V) * 7919 + code * 104729) % 65537 / 65537  # decoys, all below 1
        text = self.texts[row]
        if place < len(text):
            rank = _RANKS[code % len(_RANKS)]
            out[[(text[place] + 1 + i) % V for i in range(rank)]] = 3.0
            out[text[place]] = 2.0
        return out
