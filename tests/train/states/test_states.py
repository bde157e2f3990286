"""Wherever the target's states come from, a drafter learns the same.

.venv/bin/pytest tests/train/states/test_states.py
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("datasets")

import tiny
import training
from draftsmith.drafters.batch import Batch, align
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint, recipe
from draftsmith.train.learner import Learner
from draftsmith.train.loop import Run
from draftsmith.train.samples.audit import audit
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Samples
from draftsmith.train.states.cache import FeatureCache
from draftsmith.train.states.computed import Computed, States
from places import BENCHMARKS
from training import World

TAPS = [1, 2, tiny.LAYERS]


class Plain:
    """Reference: what transformers computes text by text, without anything of ours."""

    def __init__(self, folder: Path, samples: Samples) -> None:
        self.hf, self.samples = AutoModelForCausalLM.from_pretrained(folder), samples

    def states(self, ids: list[int]) -> dict[str, Tensor]:
        """(T, H) of each tap, the last of which is the pre-norm state."""
        kept: list[Tensor] = []
        hook = self.hf.model.norm.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
        with torch.no_grad():
            hidden = self.hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
        hook.remove()
        return {str(k): (kept[0] if k == tiny.LAYERS else hidden[k])[0] for k in TAPS}

    def fill(self, batch: Batch, rows: list[list[int]]) -> Batch:
        empty = torch.zeros(*batch.tokens.shape, self.hf.config.hidden_size)
        batch.features = {str(k): empty.clone() for k in TAPS}
        for b, row in enumerate(rows):
            for s, index in enumerate(row):
                here = batch.segment[b] == s
                for tap, states in self.states(self.samples[index].ids[: int(here.sum())]).items():
                    batch.features[tap][b, here] = states
        batch.final = batch.features[str(tiny.LAYERS)]
        return batch


class Recorded:
    """What another source gave, by rows and width: a stream of states, without whoever made it."""

    def __init__(self, source: States | None) -> None:
        self.source = source
        self.kept: dict[Any, Batch] = {}

    def fill(self, batch: Batch, rows: list[list[int]]) -> Batch:
        key = str(rows), batch.tokens.shape[1]
        if self.source:
            self.kept[key] = self.source.fill(batch, rows)
        return self.kept[key]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def begun(
    world: World, name: str, target: Target, states: States | None = None, **changes: Any
) -> Learner:
    keys: dict[str, Any] = {"steps": 3, "save_every": 3, "feature_cache": "1GB"} | changes
    samples = Samples.open(world.samples, target, audit=0)
    chosen = recipe.load(world.recipe(name, **keys))
    return Learner(chosen, target, samples, Accelerator(cpu=True), states)


Source = Callable[[World, Learner], States]


def computed(world: World, made: Learner) -> States:
    return Computed(made.target, TAPS)


def cached(world: World, made: Learner) -> States:
    cache = FeatureCache(made.recipe, made.target, made.samples, TAPS, "no")
    cache.prepare(made.accelerator)
    return cache


def remembered(world: World, made: Learner) -> States:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        out = importlib.import_module("common").Remembering(made.target)
    out.computed.taps = TAPS  # SmolLM2's are not there
    return out


def other_rows(world: World, made: Learner) -> States:
    """Planted: the states of the rows in another order."""
    source = cached(world, made)
    fill = source.fill
    source.fill = lambda batch, rows: fill(batch, rows[::-1])  # type: ignore[method-assign]
    return source


def stale(world: World, made: Learner) -> States:
    """Planted: kept from before the target was another one."""
    return Computed(Target(tiny.hf_model(seed=1), tiny.tokenizer(), tiny.source()), TAPS)


def gradients(world: World, source: Source) -> list[Tensor]:
    """Of two micro-batches, the first of them filled twice."""
    made = begun(world, "gradients", Target.load(str(world.target)))
    states, learn = source(world, made), made.learn
    for rows in ([learn[:2], learn[2:3]], [learn[3:4], learn[4:6]], [learn[:2], learn[2:3]]):
        batch = collate(made.samples, rows, 64)
        alignment, noise = align(batch, made.depths), made._noise([0, 1])
        made._micro(states.fill(batch, rows), alignment, noise, 10.0)
    return [p.grad for p in made.trained if p.grad is not None]


def apart(world: World, source: Source) -> float:
    """The largest gap to the reference's gradients, of a parameter's largest gradient."""
    wanted = gradients(world, lambda world, made: Plain(world.target, made.samples))
    found = gradients(world, source)
    assert len(wanted) == len(found) > 5
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("source", [computed, cached, remembered])
def test_gradients_are_the_same(world: World, source: Source) -> None:
    assert apart(world, source) < 1e-3


@pytest.mark.parametrize("fault", [other_rows, stale])
def test_gradients_planted(world: World, fault: Source) -> None:
    assert apart(world, fault) > 1e-2


def trained(world: World, name: str, target: Target, states: States) -> Path:
    """A run to its end, its samples audited."""
    made = begun(world, name, target, states, feature_cache=None, draft_vocab=tiny.VOCAB - 1)
    texts = [(i, made.samples[i].ids, made.samples[i].made) for i in made.heldout]
    assert not audit(target, texts, states, made.samples.sampler, 1e-4).fault()
    with checkpoint.claimed(made.recipe):
        assert Run(made).run() == 0
    return made.recipe.folder


def test_a_target_without_a_body_trains(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a run reads, it asks of the states that it is given: draft vocabulary, steps, replay
    and audit. With those of an earlier run it ends with the same weights, bit for bit."""
    target = Target.load(str(world.target))
    record = Recorded(Computed(target, TAPS))
    whole = trained(world, "whole", target, record)
    monkeypatch.setattr(CausalLM, "_run", lambda *given: pytest.fail("the body ran"))
    record.source = None
    alone = trained(world, "alone", target, record)
    assert training.differences(whole, alone, 3) == []
