"""What every drafter is held to: checks that tests and planted faults share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
import reference_blocks
import reference_eagle
import reference_heads
import reference_mtp
import tiny
import toys  # noqa: F401  (registers the toy families)
from draftsmith.drafters import base
from draftsmith.drafters import batch as batches
from draftsmith.drafters.base import Drafter, Guesses, Policy
from draftsmith.drafters.batch import Batch, batch_of
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.drafters.target.target import Target

# "mtp" is the recursive module, "mtp chain" one for each depth.
HEADS = ("eagle", "eagle1", "mtp", "mtp chain", "medusa", "hydra", "dflash", "dspark", "peagle")
DRAFTERS = (*HEADS, "small", "ngram", "toy-block")
LAWFUL = tuple(name for name in DRAFTERS if name != "ngram")
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": {"taps": [1, 4, "normed"], "draft_vocab": 40},
    "small": {"layers": [0, 2, 3]},
    "medusa": {"heads": 3, "draft_vocab": 30},
    "hydra": {"heads": 3, "layers": 2},
    "mtp chain": {"modules": 3},
    "peagle": {"taps": [1, 4], "layers": 2, "draft_vocab": 40},
    "dflash": {"taps": [1, 3], "layers": 2, "block_size": 6, "draft_vocab": 40},
    "dspark": {"taps": [1, 4], "layers": 2, "block_size": 5, "draft_vocab": 40, "markov_rank": 6},
}
SCALES = {"hydra": 0.2, "eagle1": 0.12}  # of weights; no norm holds EAGLE-1's states at one size
REFERENCES = {
    "peagle": reference_blocks.peagle_logits,
    "eagle": reference_eagle.eagle_logits,
    "eagle1": reference_mtp.eagle1_logits,
    "mtp": reference_mtp.mtp_logits,
    "medusa": reference_heads.head_logits,
    "hydra": reference_heads.head_logits,
    "dflash": reference_blocks.dflash_logits,
    "dspark": reference_blocks.dspark_logits,
}
K = 4
PLAIN = Sampler()
every = pytest.mark.parametrize("family", tiny.FAMILIES)


def drafter(name: str, family: str = "Llama", **config: Any) -> Drafter:
    """A drafter whose laws are peaked and depend on all that it reads."""
    cls, of = base.family(name.split()[0]), tiny.target(family)
    counts = torch.arange(of.vocab_size) * 5 % 7  # kept ids are scattered
    made = cls.create(of, cls.Config(**{**CONFIGS.get(name, {}), **config}), counts).eval()
    return made if name == "small" else fill(made)


@torch.no_grad()
def fill(made: Drafter, seed: int = 0) -> Drafter:
    """Large random weights; fresh heads are so flat that nothing would show."""
    generator = torch.Generator().manual_seed(seed)
    scale = SCALES.get(made.family, 0.35)
    for name, parameter in made.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        of_norm = parameter.dim() == 1 and not name.endswith("bias")
        parameter.copy_(1 + 0.2 * noise if of_norm else scale * noise)
    return made


def prompts(count: int = 5) -> list[list[int]]:
    """Ragged, longer than Gemma's window of 8 but for one, and some tokens come again."""
    generator = torch.Generator().manual_seed(3)
    lengths = (13, 4, 21, 10, 17, 12, 9)[:count]
    return [(2 + torch.randint(0, 20, (n,), generator=generator)).tolist() for n in lengths]


def read(of: Target, texts: list[list[int]], taps: Any) -> Batch:
    """The texts, all target-made but for the first token, read by the target."""
    flags = [(text, [False] + [True] * (len(text) - 1)) for text in texts]
    return of.read(batch_of(flags, PLAIN), taps)


def feed(made: Drafter, state: Any, texts: list[list[int]], first: list[int]) -> None:
    """Extends row b by texts[b][first[b]:]; what pads is garbage that must not matter."""
    batch = read(made.target, texts, made.taps)
    start = torch.tensor(first)
    counts = torch.tensor([len(text) for text in texts]) - start
    offset = torch.arange(max(int(counts.max()), 1))
    at = (start.unsqueeze(1) + offset).clamp(max=batch.tokens.shape[1] - 1)
    row = torch.arange(len(texts)).unsqueeze(1)
    real = offset < counts.unsqueeze(1)
    tokens = torch.where(real, batch.tokens[row, at], 7)
    features = {
        n: torch.where(real.unsqueeze(2), f[row, at], 9.0) for n, f in batch.features.items()
    }
    made.extend(state, tokens, features, counts)


@dataclass
class Moment:
    """One proposal: the tokens known to it, root included, its drafts, and their laws (k, Vd)."""

    known: list[int]
    drafts: list[int]
    law: Tensor | None


@torch.no_grad()
def play(
    made: Drafter, texts: list[list[int]], ids: list[int], sampler: Sampler, k: int = K
) -> list[list[Moment]]:
    """k + 2 rounds, in which every row accepts every m in -1..k once; -1 = the row stands still.

    The prompt comes in two pieces. ids key each row's noise, script and roots, so that a row plays
    the same game alone as in a batch. Returns rounds x rows.
    """
    known = [list(text) for text in texts]  # root included
    state = made.start(len(known), max(map(len, known)) + (k + 3) * (k + 1))
    feed(made, state, [text[: min(6, len(text) - 1)] for text in known], [0] * len(known))
    feed(made, state, [text[:-1] for text in known], [min(6, len(text) - 1) for text in known])
    made.begin(state)
    policy = Policy(min(k, made.longest or k))
    made.check(policy)
    out: list[list[Moment]] = []
    for turn in range(k + 2):
        root = torch.tensor([text[-1] for text in known])
        noise = Noise(11, torch.tensor(ids), torch.full((len(ids),), turn))
        proposal = made.propose(state, root, policy, sampler, noise)
        assert proposal.tokens[:, 0].equal(root)
        N = proposal.tokens.shape[1]
        assert proposal.parents.equal(torch.arange(-1, N - 1).expand(len(ids), -1))
        moments, committed = [], []
        for b, text in enumerate(known):
            drafts = proposal.tokens[b, 1 : int(proposal.length[b])].tolist()
            law = None if proposal.q is None else proposal.q[b, : len(drafts)]
            moments.append(Moment(list(text), drafts, law))
            m = min((turn + ids[b]) % (k + 2) - 1, len(drafts))
            committed.append(len(text) - 1)
            if m >= 0:
                text += [*drafts[:m], text[(5 * ids[b] + 3 * turn) % len(text)]]
        feed(made, state, [text[:-1] for text in known], committed)
        out.append(moments)
    return out


def check_views(made: Drafter, sampler: Sampler = PLAIN, k: int = K) -> None:
    """Each proposal equals unroll at its anchor, with all that lies in the future made random."""
    moments = list(chain(*play(made, prompts(), list(range(5)), sampler, k)))
    generator = torch.Generator().manual_seed(5)
    junk = [(2 + torch.randint(0, 40, (k + 3,), generator=generator)).tolist() for _ in moments]
    texts = [m.known + (m.drafts + j)[: k + 3] for m, j in zip(moments, junk, strict=True)]
    batch = read(made.target, texts, made.taps)
    anchors = torch.tensor([[len(m.known) - 2] for m in moments])
    later = (torch.arange(batch.tokens.shape[1]) > anchors).unsqueeze(2)
    for tap, values in batch.features.items():
        batch.features[tap] = torch.where(later, 30 * torch.randn(values.shape), values)
    with torch.no_grad():
        alignment = batches.align(batch, k, anchors)
        unroll = made.unroll(batch, alignment)
    again = vars(batches.align(batch, k, anchors))
    assert all(value.equal(again[key]) for key, value in vars(alignment).items()), "the caller's"
    if isinstance(unroll, Guesses):
        drafts = [m.drafts + [-1] * (k - len(m.drafts)) for m in moments]
        assert unroll.tokens[:, 0].tolist() == drafts
        assert 10 < sum(len(m.drafts) for m in moments) < k * len(moments)
        return
    with torch.no_grad():
        logits = made.logits(unroll.hidden, unroll.prev, unroll.depth)
    for index, moment in zip(unroll.index[:, 0], moments, strict=True):
        assert (index >= 0).sum() == len(moment.drafts) > 0
        here = logits[index[: len(moment.drafts)]]
        if sampler.greedy:
            assert moment.law is None
            top = here.topk(2).values
            assert (top[:, 0] - top[:, 1]).min() > 1e-4, "a tie: take another seed"
            assert made.vocab.to_target(here.argmax(1)).tolist() == moment.drafts
        else:
            assert moment.law is not None
            torch.testing.assert_close(sampler.probs(here), moment.law, atol=1e-4, rtol=0)
    peak = logits.softmax(1).amax(1).mean()
    assert 3 / logits.shape[1] < peak < 0.97, "laws too flat, or too sharp, to tell anything"


def check_draws(made: Drafter) -> None:
    """Drafts stand in a large batch as often as the proposal's own q says."""
    rows, sampler = 2000, Sampler(0.8, 20, 0.95)
    state = made.start(rows, 16)
    text = prompts(1)[0][:6]
    with torch.no_grad():
        feed(made, state, [text[:-1]] * rows, [0] * rows)
        made.begin(state)
        noise = Noise(0, torch.arange(rows), torch.zeros(rows, dtype=torch.long))
        root = torch.full((rows,), text[-1])
        proposal = made.propose(state, root, Policy(2), sampler, noise)
    assert proposal.q is not None
    common = proposal.tokens[:, 1].mode().values
    for depth, of in ((0, slice(None)), (1, proposal.tokens[:, 1] == common)):
        law = made.vocab.scatter(proposal.q[of, depth])
        drawn = proposal.tokens[of, depth + 1]
        assert (law - law[0]).abs().max() < 1e-5
        shares = torch.bincount(drawn, minlength=made.vocab.size) / len(drawn)
        spread = (law[0] * (1 - law[0]) / len(drawn)).sqrt().sum()  # the distance to expect
        assert (shares - law[0]).abs().sum() < 2 * spread < 0.5


def check_reference(made: Drafter, family: str) -> None:
    """Proposals equal the independent reference, which reads the paper, not this code."""
    hf = tiny.hf_model(family).double()
    weights = made.weights()
    config = made.config.model_dump()
    if made.family == "small":
        hf = kept_layers(hf, config["layers"])
    for (moment,) in play(made, prompts(1), [1], PLAIN, 3)[3:]:  # after 2, then all were accepted
        text, anchor = moment.known + moment.drafts, len(moment.known) - 2
        config["drafted"] = len(moment.drafts)
        if made.family == "ngram":
            assert moment.drafts
            guess = reference.ngram_guess(text, anchor, config["max_n"], config["min_n"], 3)
            assert guess == moment.drafts
        for depth in range(len(moment.drafts) if moment.law is not None else 0):
            if made.family == "small":
                law = reference.small_law(hf, text, anchor, depth)
            else:
                where = weights, config, hf, text, anchor, depth
                law = reference.head_law(REFERENCES[made.family], *where)
            ours = made.vocab.scatter(moment.law[depth]).double()
            torch.testing.assert_close(ours, law, atol=1e-4, rtol=0)


def kept_layers(hf: Any, layers: list[int]) -> Any:
    """The HF model without its other layers."""
    stack = hf.get_decoder().layers
    hf.get_decoder().layers = torch.nn.ModuleList([stack[i] for i in layers])
    hf.config.num_hidden_layers = len(layers)
    if getattr(hf.config, "layer_types", None):
        hf.config.layer_types = [hf.config.layer_types[i] for i in layers]
    return hf


Cells = dict[tuple[int, int, int], Tensor]


@torch.no_grad()
def cells(made: Drafter, batch: Batch, k: int = K, anchors: Tensor | None = None) -> Cells:
    """(row, anchor, depth) -> q at temperature 1; of a drafter without q the guessed token."""
    alignment = batches.align(batch, k, anchors)
    unroll = made.unroll(batch, alignment)
    if isinstance(unroll, Guesses):
        values, index = unroll.tokens.flatten().float(), torch.arange(unroll.tokens.numel())
        index = index.view_as(unroll.tokens)
    else:
        values = made.logits(unroll.hidden, unroll.prev, unroll.depth).softmax(-1)
        index = unroll.index
    out: Cells = {}
    for b, row in enumerate(alignment.anchors.tolist()):
        for i, a in enumerate(row):
            where = index[b, i].tolist()
            assert a >= 0 or isinstance(unroll, Guesses) or set(where) == {-1}
            out.update({(b, a, j): values[w] for j, w in enumerate(where) if min(a, w) >= 0})
    return out


def distance(ours: Cells, theirs: Cells) -> float:
    """The largest difference between laws of the same cells."""
    assert ours.keys() == theirs.keys() and ours
    return max(float((ours[cell] - theirs[cell]).abs().max()) for cell in ours)


def check_future(made: Drafter, what: str) -> None:
    """Rows are blind to features after a and tokens after x_{a+1+j}, and to nothing before."""
    batch = read(made.target, prompts(3), made.taps)
    before = cells(made, batch)
    start = 7
    generator = torch.Generator().manual_seed(1)
    if what == "tokens":
        shift = torch.randint(1, 40, batch.tokens[:, start:].shape, generator=generator)
        batch.tokens[:, start:] = (batch.tokens[:, start:] + shift) % made.target.vocab_size
    else:
        for values in batch.features.values():
            values[:, start:] = 30 * torch.randn(values[:, start:].shape, generator=generator)
    after = cells(made, batch)
    blind, moved = [], []
    for cell, law in before.items():
        _, a, j = cell
        last = a if what == "features" else a + 1 if made.family == "ngram" else a + 1 + j
        (blind if last < start else moved).append(float((law - after[cell]).abs().max()))
    assert len(blind) > 10 and max(blind) < 1e-5
    reads = made.family != "medusa" if what == "tokens" else made.taps
    assert (max(moved) > 0.05) == bool(reads)
