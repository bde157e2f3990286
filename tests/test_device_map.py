"""A target whose layers lie apart (transformers' device_map) gives what it gives in one piece.

A CPU stands for several devices here: some layers stay on disk and are fetched for each forward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

import tiny
from draftsmith.drafters.attention import packed_step
from draftsmith.drafters.capture import capture_problem
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train import __main__ as train
from training import World, differences

APART = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu",
    "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
    "model.layers.3": "disk",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_features_head_and_text_are_the_same(world: World) -> None:
    whole, apart = (Target.load(str(world.target), spread=s) for s in (None, APART))
    places = [next(layer.parameters()).device.type for layer in apart.layers]
    assert places == ["cpu", "meta", "cpu", "meta"] and apart.device.type == "cpu"
    assert apart.trees and "device_map" in (capture_problem(apart) or "")
    prompts = tiny.prompts(3)
    one, two = (Decoder(of).generate(prompts, Sampler(0.8), 10) for of in (whole, apart))
    assert [text.tokens for text in one] == [text.tokens for text in two]
    tokens = torch.tensor([one[0].prompt + one[0].tokens])
    position = torch.arange(tokens.shape[1]).unsqueeze(0)
    taps: list[Any] = [0, 2, 4, "normed"]
    with torch.no_grad():
        a, b = (of(tokens, packed_step(position, position * 0), taps) for of in (whole, apart))
        assert torch.equal(whole.head(a.final), apart.head(b.final))
    assert torch.equal(a.final, b.final)
    assert all(torch.equal(a.features[tap], b.features[tap]) for tap in map(str, taps))


def test_training_reads_it(world: World) -> None:
    """The same weights, bit for bit; where the target lies is no part of what a run is."""
    for name, where in (("whole", None), ("apart", APART)):
        assert train.main([str(world.recipe(name, steps=3, device_map=where))]) == 0
    assert differences(world.folder("whole"), world.folder("apart"), 3) == []
    assert train.main([str(world.recipe("apart", steps=3, device_map="auto"))]) == 0


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"lm_head": "disk", "model.embed_tokens": "disk"}, "leaves the embeddings or lm_head"),
        ({}, "layers: device_map leaves the target's layer 3 without a device"),
    ],
)
def test_shared_weights_need_a_device(
    world: World, capsys: pytest.CaptureFixture[str], place: dict[str, str], words: str
) -> None:
    path = world.recipe("small", "small", device_map=APART | place)
    assert train.main([str(path)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1]


def test_a_map_that_transformers_refuses(world: World) -> None:
    with pytest.raises(UserError, match="transformers cannot load it"):
        Target.load(str(world.target), spread="everywhere")
