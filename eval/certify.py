"""The certificate: evidence that the decoder writes what the target alone would write.

Accept rules by exact enumeration; texts against transformers' own, which shares no code with the
decoder; acceptance counted against acceptance replayed. Every check gives its measured figure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafters.attention import chain_step
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.cache import Slab
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.ngram import Ngram, NgramConfig
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Noise, Purpose, Sampler, pick
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.evaluate import read_texts
from draftsmith.eval.parity import TIE, Parity, compare, compare_trees
from draftsmith.eval.rehearsal import Rehearsed
from draftsmith.eval.replay import tables
from draftsmith.eval.rulebook import EXACT, WRONG, rule_errors, wrong_rule_errors
from draftsmith.eval.walk import walk

GREEDY, WARM = Sampler(0.0), Sampler(0.8)
SEED = 3
Outcome = tuple[bool, str]  # passed, and the figure that says so


@dataclass
class Check:
    """One line of the certificate."""

    name: str
    passed: bool
    figure: str
    seconds: float


@dataclass
class Subject:
    """What is certified: a target, drafters by name, and prompts of uneven length (token ids).

    theirs: the target's weights in a transformers model that draftsmith never touched, in fp32 on
    the same device. Texts run to `tokens` tokens: no end token cuts them short but a planted one.
    """

    target: Target
    theirs: Any
    drafters: dict[str, Drafter]
    prompts: list[list[int]]
    tokens: int = 24
    _written: dict[Any, list[Text]] = field(default_factory=dict)
    _generated: dict[int, list[int]] = field(default_factory=dict)

    @torch.no_grad()
    def generate(self, row: int, eos: int | None = None) -> list[int]:
        """The greedy answer to a prompt by transformers' own generate."""
        ids = torch.tensor([self.prompts[row]], device=self.target.device)
        out = self.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            do_sample=False,
            eos_token_id=_ends(self.target, eos),
            pad_token_id=0,
        )
        return out[0, ids.shape[1] :].tolist()

    def generated(self, row: int) -> list[int]:
        """`generate`, kept."""
        if row not in self._generated:
            self._generated[row] = self.generate(row)
        return self._generated[row]

    def decode(
        self,
        drafter: Drafter | None,
        policy: Policy,
        sampler: Sampler,
        rows: Sequence[int],
        name: str = "",
        eos: int | None = None,
    ) -> list[Text]:
        """Texts of some prompts in one batch; under a name they are kept."""
        key = (name, policy, sampler, tuple(rows))
        if key in self._written:
            return self._written[key]
        with _end_token(self.target, eos):
            texts = Decoder(self.target, drafter, policy).generate(
                [self.prompts[i] for i in rows], sampler, self.tokens, rows=rows, seed=SEED
            )
        if name:
            self._written[key] = texts
        return texts

    @property
    def all(self) -> list[int]:
        return list(range(len(self.prompts)))


def untrained(target: Target) -> dict[str, Drafter]:
    """Drafters that need no training: an EAGLE head as it starts out, and prompt lookup."""
    L = target.num_layers
    taps: list[Any] | None = None if L >= 7 else sorted({1, (L + 1) // 2, L})
    eagle = Eagle.create(target, EagleConfig(taps=taps, head="target"))
    return {
        "untrained eagle": eagle.to(target.device, target.dtype).eval(),
        "ngram": Ngram.create(target, NgramConfig()),
    }


def untouched(target: Target) -> Any:
    """The target's weights in a transformers model of their own, in fp32."""
    hf = AutoModelForCausalLM.from_pretrained(target.source.path, dtype=torch.float32)
    return hf.eval().to(target.device)


def certify(subject: Subject, begin: Callable[[str], None] = lambda name: None) -> Iterator[Check]:
    """Runs every check, in order; begin(name) is called before each.

    The last one turns `subject.theirs` into bf16.
    """
    steps = [*rule_steps(), *text_steps(subject), *parity_steps(subject)]
    steps.append(("bf16: texts differ only where tokens tie", lambda: _half_precision(subject)))
    for name, step in steps:
        begin(name)
        started = time.perf_counter()
        passed, figure = step()
        yield Check(name, passed, figure, time.perf_counter() - started)


def certificate(checks: Sequence[Check]) -> dict[str, Any]:
    """The content of certificate.json, provenance aside."""
    return {"holds": all(c.passed for c in checks), "checks": [asdict(c) for c in checks]}


Steps = Iterator[tuple[str, Callable[[], Outcome]]]


def rule_steps() -> Steps:
    """Enumeration runs as the generators are drawn from, one check at a time."""

    def bounded(found: Iterator[tuple[str, float]], exact: bool) -> Outcome:
        errors = dict(found)
        worst = max(errors.values()) if exact else min(errors.values())
        listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        return worst < EXACT if exact else worst > WRONG, f"largest error of a chance: {listed}"

    yield "accept rules are exact, by enumeration", lambda: bounded(rule_errors(), True)
    yield "wrong rules are caught", lambda: bounded(wrong_rule_errors(), False)


def text_steps(subject: Subject) -> Steps:
    """Texts against transformers' own: no drafting, chains and trees, batch 1 and all prompts."""
    rehearsed: dict[Sampler, Drafter] = {}
    shapes: list[Policy] = [Policy(4)]
    if subject.target.trees:
        shapes += [Tree(3, budget=8, branch=4), StaticTree.of_widths((3, 2, 1))]

    def knowing(sampler: Sampler) -> Drafter:
        """The drafter that has rehearsed the target's own texts, which transformers wrote at
        temperature 0 and the baseline loop, checked on its own, above."""
        if sampler not in rehearsed:
            prompts = subject.prompts
            if sampler.greedy:
                answers = [subject.generated(i) for i in subject.all]
            else:
                texts = subject.decode(None, Policy(1), sampler, subject.all, "baseline")
                answers = [text.tokens for text in texts]
            whole = {i: prompts[i] + answer for i, answer in enumerate(answers)}
            rehearsed[sampler] = Rehearsed(subject.target, whole)
        return rehearsed[sampler]

    def plain(sampler: Sampler) -> Callable[[], Outcome]:
        def step() -> Outcome:
            texts = subject.decode(None, Policy(1), sampler, subject.all, "baseline")
            return _own_text(subject, texts, subject.all, sampler)

        return step

    def drafted(
        of: Callable[[], Drafter], name: str, policy: Policy, sampler: Sampler, rows: list[int]
    ) -> Callable[[], Outcome]:
        def step() -> Outcome:
            texts = subject.decode(of(), policy, sampler, rows, name)
            return _own_text(subject, texts, rows, sampler)

        return step

    for sampler in (GREEDY, WARM):
        yield f"baseline, T={sampler.temperature:g}: transformers' text", plain(sampler)
        for rows in ([1], subject.all):
            for policy in shapes:
                name = f"{policy}, T={sampler.temperature:g}, batch {len(rows)}, rehearsed"

                def of(sampler: Sampler = sampler) -> Drafter:
                    return knowing(sampler)

                yield f"{name}: transformers' text", drafted(of, "rehearsed", policy, sampler, rows)
        for name, drafter in subject.drafters.items():
            for policy in policies(drafter):
                if policy.sampled and not (sampler.greedy or drafter.deterministic):
                    continue  # its drafts are drawn: the law is the target's, the tokens are not
                label = f"{policy}, T={sampler.temperature:g}, batch {len(subject.prompts)}, {name}"
                step = drafted(lambda d=drafter: d, name, policy, sampler, subject.all)  # type: ignore[misc]
                yield f"{label}: transformers' text", step
    yield "a text that ends inside a block", lambda: _ends_inside(subject, knowing)


def policies(drafter: Drafter) -> list[Policy]:
    """The chain and the tree that a drafter is tried with."""
    k = min(4, drafter.longest or 4)
    able = drafter.trees and drafter.target.trees
    trees = [Tree(min(k, 3), budget=8, branch=4)] if able else []
    return [Policy(k), *trees]


def _own_text(
    subject: Subject, texts: Sequence[Text], rows: Sequence[int], sampler: Sampler
) -> Outcome:
    """Whether texts are those that transformers' laws give, up to fp32 ties.

    At temperature 0 against `generate`. Above, against plain sampling with the same noise: token by
    token each must be what its place's own noise picks from transformers' law after all before it.
    """
    ties: list[str] = []
    wrong: list[str] = []
    for row, text in zip(rows, texts, strict=True):
        if sampler.greedy:
            at = divergence(text.tokens, subject.generated(row))
            gap = top_gap(subject.theirs, text.prompt + text.tokens[:at]) if at is not None else 0.0
        else:
            at, gap = _unlike_keyed(subject, text, row, sampler)
        if at is not None:
            bound = TIE if sampler.greedy else TIE / 10
            (ties if gap < bound else wrong).append(f"text {row} token {at} (gap {gap:.1e})")
    tokens = sum(len(text.tokens) for text in texts)
    passes = sum(len(text.rounds) for text in texts)
    taken = sum(r.accepted for text in texts for r in text.rounds)
    figure = f"{tokens} tokens in {passes} passes, {taken} drafts accepted"
    figure += "".join(f"; fp32 tie: {t}" for t in ties) + "".join(f"; DIFFERS: {w}" for w in wrong)
    return not wrong and len(ties) <= math.ceil(len(texts) / 50), figure


def divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place where two texts differ, their ends included; None where they are equal."""
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


@torch.no_grad()
def top_gap(hf: Any, prefix: Sequence[int]) -> float:
    """How far a transformers model's two largest logits after a prefix are apart."""
    logits = hf(torch.tensor([prefix], device=hf.device), use_cache=False).logits[0, -1]
    first, second = logits.float().topk(2).values.tolist()
    return first - second


@torch.no_grad()
def _unlike_keyed(
    subject: Subject, text: Text, row: int, sampler: Sampler
) -> tuple[int | None, float]:
    """The first token that plain sampling would not have drawn, and by how much of u it missed."""
    device = subject.target.device
    ids = torch.tensor([text.prompt + text.tokens], device=device)
    first = len(text.prompt)
    law = sampler.probs(subject.theirs(ids, use_cache=False).logits[0, first - 1 : -1])  # (n, V)
    position = torch.arange(first, ids.shape[1], device=device).unsqueeze(0)
    key = torch.tensor([row], device=device)
    uniform = Noise(SEED, key, torch.zeros_like(key)).uniform(Purpose.TARGET, position, 0)[0]
    at = divergence(text.tokens, pick(law, uniform).tolist())
    if at is None:
        return None, 0.0
    mass = law[at].double().cumsum(0)
    u, token = float(uniform[at] * mass[-1]), text.tokens[at]
    low = float(mass[token - 1]) if token else 0.0
    return at, max(low - u, u - float(mass[token]), 0.0)


def _ends(target: Target, eos: int | None) -> list[int]:
    """End tokens: eos, or for None one that never comes."""
    return [target.vocab_size if eos is None else eos]


@contextmanager
def _end_token(target: Target, eos: int | None) -> Iterator[None]:
    """Another token ends a text for a while."""
    config = target.hf.generation_config
    before, config.eos_token_id = config.eos_token_id, _ends(target, eos)
    try:
        yield
    finally:
        config.eos_token_id = before


def _inside(text: Text) -> list[int]:
    """Places in text.tokens of accepted drafts, which more of their own round follows."""
    first = len(text.prompt)
    places = [r.anchor + 2 + j - first for r in text.rounds for j in range(r.accepted)]
    return [i for i in places if i + 1 < len(text.tokens)]


def _ends_inside(subject: Subject, knowing: Callable[[Sampler], Drafter]) -> Outcome:
    """An accepted draft becomes an end token: nothing after it may be kept."""
    tried = []
    for policy in policies(knowing(GREEDY)):
        found = _first_inside(subject, knowing, policy)
        if found is None:
            return False, f"{policy}: no text has a token that first comes inside a block"
        sampler, row, whole, i = found
        eos = whole[i]
        text = subject.decode(knowing(sampler), policy, sampler, subject.all, eos=eos)[row]
        known = subject.generate(row, eos) if sampler.greedy else whole[: i + 1]
        if text.tokens != known or len(known) != i + 1 or text.finish != "stop":
            return (
                False,
                f"{policy}: text {row} should end after {i + 1} tokens, kept {text.tokens}",
            )
        tried.append(f"{policy}, T={sampler.temperature:g}, after {i + 1} tokens")
    return True, "; ".join(tried)


def _first_inside(
    subject: Subject, knowing: Callable[[Sampler], Drafter], policy: Policy
) -> tuple[Sampler, int, list[int], int] | None:
    """A text's sampler, row and tokens, and a place inside a block whose token is new there.

    Greedy texts of a target that repeats itself may have none; sampled ones do.
    """
    for sampler in (GREEDY, WARM):
        texts = subject.decode(knowing(sampler), policy, sampler, subject.all, "rehearsed")
        for row, text in enumerate(texts):
            for i in _inside(text):
                if text.tokens[i] not in text.tokens[:i]:
                    return sampler, row, text.tokens, i
    return None


def parity_steps(subject: Subject) -> Steps:
    """Counted against replayed, for every drafter, rule and temperature it can have."""
    for name, drafter in subject.drafters.items():
        for policy in policies(drafter):
            for sampler in (GREEDY, WARM):
                drawn = policy.sampled and not (sampler.greedy or drafter.deterministic)
                for rule in (False, True) if policy.is_chain and drawn else (False,):
                    tried = Policy(policy.k, block=True) if rule else policy
                    label = f"parity, {tried}, T={sampler.temperature:g}, {name}"
                    yield label, _parity_step(subject, name, drafter, tried, sampler, not drawn)


def _parity_step(
    subject: Subject,
    name: str,
    drafter: Drafter,
    policy: Policy,
    sampler: Sampler,
    deterministic: bool,
) -> Callable[[], Outcome]:
    def step() -> Outcome:
        texts = subject.decode(drafter, policy, sampler, subject.all, name)
        batches = read_texts(subject.target, drafter, texts, sampler)
        parity: Parity
        if policy.is_chain:
            found = [table for batch in batches for table in tables(drafter, batch, policy.k)]
            parity = compare(texts, found, policy.k, deterministic, policy.block)
        else:
            walks = [one for batch in batches for one in walk(drafter, batch, policy)]
            parity = compare_trees(texts, walks, policy.k)
        accepted = "/".join(map(str, parity.counted[1:]))
        figure = f"{parity.counted[0]} passes, accepted per depth {accepted}, "
        if deterministic:
            figure += f"{len(parity.splits)} splits, {len(parity.ties)} ties"
        else:
            shown = ["-" if z is None else f"{z:.2f}" for z in [*parity.z, parity.z_local]]
            figure += "z " + " ".join(shown)
        return parity.holds, figure

    return step


def _half_precision(subject: Subject) -> Outcome:
    """Where a bf16 text leaves the baseline's, the two best tokens are as good as tied: in bf16
    logits depend on how many tokens a pass reads.
    """
    half = Target(
        subject.theirs.to(torch.bfloat16), subject.target.tokenizer, subject.target.source
    )
    row, prompt = 1, subject.prompts[1]
    with _end_token(half, None):
        baseline = Decoder(half).generate([prompt], GREEDY, subject.tokens, rows=[row])[0]
        whole = {row: prompt + baseline.tokens}
        decoder = Decoder(half, Rehearsed(half, whole), Policy(4))
        fast = decoder.generate([prompt], GREEDY, subject.tokens, rows=[row])[0]
    narrow, wide = _logits(half, whole[row], 1), _logits(half, whole[row], len(whole[row]))
    moved = (narrow - wide).abs().max().item()
    figure = f"max |d logit| between widths {moved:.3g}; "
    at = divergence(fast.tokens, baseline.tokens)
    if at is None:
        return True, figure + f"{len(fast.tokens)} tokens are the baseline's"
    first, second = narrow[len(prompt) - 1 + at].topk(2).values.tolist()
    gap = first - second
    figure += f"first divergence at token {at}, top-2 gap there {gap:.3g}"
    return gap <= 2 * moved, figure


@torch.no_grad()
def _logits(target: Target, tokens: list[int], width: int) -> torch.Tensor:
    """Logits (T, V) in fp32 of a text that is read `width` tokens at a time."""
    ids = torch.tensor([tokens], device=target.device)
    slab = Slab(1, len(tokens), target.device)
    out = []
    for piece in ids.split(width, dim=1):
        out.append(target.head(target(piece, chain_step(slab, piece.shape[1])).final)[0])
        slab.commit(torch.full_like(slab.length, piece.shape[1]))
    return torch.cat(out).float()
