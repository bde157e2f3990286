"""The draft vocabulary's prior against transformers' own model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("datasets")

import tiny
from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocab import most_frequent
from draftsmith.train import start
from draftsmith.train.recipe import parse
from draftsmith.train.samples.samples import Samples
from draftsmith.train.states.computed import Computed
from training import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("prior"))


def known(world: World, samples: Samples, indices: list[int]) -> torch.Tensor:
    """The average law, text by text, without anything of ours."""
    hf = AutoModelForCausalLM.from_pretrained(world.target, dtype=torch.float64)
    laws = []
    for i in indices:
        sample = samples[i]
        with torch.no_grad():
            logits = hf(torch.tensor([sample.ids])).logits[0]
        laws += [logits[t - 1].softmax(-1) for t, made in enumerate(sample.made) if made and t]
    return torch.stack(laws).mean(0)


def check(world: World) -> None:
    target = Target.load(str(world.target))
    samples = Samples.open(world.samples, target)
    found = start.unigram(target, Computed(target), samples, [0, 3, 5])
    torch.testing.assert_close(
        found.double(), known(world, samples, [0, 3, 5]), atol=1e-5, rtol=1e-3
    )


def test_prior(world: World) -> None:
    check(world)


def test_a_shifted_law_would_show(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the law after the token, not the one that it was drawn from."""
    right = start.collate

    def shifted(*args: object) -> object:
        batch = right(*args)  # type: ignore[arg-type]
        batch.made = batch.made.roll(1, 1)
        return batch

    monkeypatch.setattr(start, "collate", shifted)
    with pytest.raises(AssertionError):
        check(world)


def test_places_left_over_go_to_the_likeliest(world: World) -> None:
    target = Target.load(str(world.target))
    samples = Samples.open(world.samples, target)
    learn = [0, 1, 2]
    hard = samples.token_counts(learn)
    seen = set(hard.nonzero().squeeze(1).tolist())
    size = len(seen) + 4
    counts = start.token_counts(target, Computed(target), samples, learn, size)
    assert torch.equal(counts.floor().long(), hard)
    vocab = most_frequent(counts, size)
    assert vocab.ids is not None
    law = known(world, samples, learn)
    unseen = sorted(set(range(target.vocab_size)) - seen, key=lambda token: -law[token])
    assert set(vocab.ids.tolist()) == seen | set(unseen[:4])


def test_enough_seen_reads_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.load(str(world.target))
    samples = Samples.open(world.samples, target)
    monkeypatch.setattr(start, "unigram", None)
    for wanted in (None, 2):
        counts = start.token_counts(target, Computed(target), samples, [0, 1, 2], wanted)
        assert counts.equal(samples.token_counts([0, 1, 2]))


BASES: dict[str, dict[str, Any]] = {
    "dspark": {"base": "dflash", "taps": [1, 3], "layers": 2, "block_size": 4, "mask_token": 6},
    "peagle": {"base": "eagle", "taps": [1, 2, 4], "norm_before_residual": True},
}


def base_of(name: str, folder: Path) -> Drafter:
    """A stored drafter of the family that `name` builds on, its weights moved."""
    keys = dict(BASES[name])
    cls = family(keys.pop("base"))
    counts = torch.arange(tiny.VOCAB) * 5 % 7
    made = cls.create(tiny.target(), cls.Config(draft_vocab=20, **keys), counts)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    folder.mkdir()
    storage.save(made, folder)
    return made


@pytest.mark.parametrize("name", BASES)
def test_a_run_starts_from_the_family_below(name: str, tmp_path: Path) -> None:
    """Faults: a weight, a tap, the mask or the draft vocabulary that does not come along."""
    before = base_of(name, tmp_path / "base")
    keys = {"name": "more", "drafter": name, "steps": 1, "start": str(tmp_path / "base")}
    own = {"dspark": {"block_size": 3, "markov_rank": 8}, "peagle": {"layers": 3}}[name]
    recipe = parse(keys | own, "more.yaml")
    made = start.new_drafter(recipe, tiny.target(), torch.arange(tiny.VOCAB))
    weights = made.weights()
    assert type(made) is family(name) and made.taps == before.taps
    for part, tensor in before.weights().items():
        assert torch.equal(weights[part], tensor), part
    assert made.vocab.ids is not None and torch.equal(made.vocab.ids, before.vocab.ids)  # type: ignore[arg-type]
    for key, value in own.items():
        assert getattr(made.config, key) == value
    if name == "dspark":
        assert made.longest == 3 and made.config.mask_token == 6
        logits = made.logits(torch.ones(1, 32), torch.tensor([3]), torch.tensor([0]))
        below = before.logits(torch.ones(1, 32), torch.tensor([3]), torch.tensor([0]))
        assert torch.equal(logits, below), "a fresh Markov head adds nothing"


def test_what_has_no_place_in_the_family_above(tmp_path: Path) -> None:
    base_of("dspark", tmp_path / "base")
    keys = {"name": "more", "drafter": "dspark", "steps": 1, "start": str(tmp_path / "base")}
    for more, words in (
        ({"layers": 1}, r"no place for layers\.1\..*take keys that decide its shape"),
        ({"draft_vocab": 10}, "no place for draft_ids"),
        ({"drafter": "eagle"}, "holds a drafter of family dflash, the recipe asks for eagle"),
    ):
        with pytest.raises(UserError, match=words) as error:
            start.new_drafter(parse(keys | more, "more.yaml"), tiny.target(), torch.ones(48))
        assert "\n" not in str(error.value)
