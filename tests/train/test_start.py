"""The draft vocabulary's prior against transformers' own model in float64."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("datasets")

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocab import most_frequent
from draftsmith.train import start
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
