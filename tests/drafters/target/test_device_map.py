"""A target whose layers lie apart (transformers' device_map) gives what it gives in one piece.

A CPU stands for several devices here: some layers stay on disk and are fetched for each forward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

import tiny
from draftsmith.drafters import base
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.attention import packed_step
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.selftest import capture_problem
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train.run import main
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
    whole, apart = (Target.load(str(world.target), device_map=s) for s in (None, APART))
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
        assert main([str(world.recipe(name, steps=3, device_map=where))]) == 0
    assert differences(world.folder("whole"), world.folder("apart"), 3) == []
    assert main([str(world.recipe("apart", steps=3, device_map="auto"))]) == 0


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
    assert main([str(path)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1]


@pytest.mark.parametrize(("name", "config"), [("eagle", {"taps": [1, 2]}), ("medusa", {})])
def test_a_frozen_head_on_another_device(name: str, config: dict[str, Any]) -> None:
    """Fault: rows of one device times states of another. From "meta", which stands for it, no
    logits can be fetched: to ask for them is what shows that they were made there."""
    cls, some = base.family(name), torch.zeros(5).long()
    of = Target(tiny.hf_model("Cohere"), tiny.tokenizer(), tiny.source())
    made = cls(of, cls.Config(head="target", draft_vocab=20, **config))
    made.set_vocab(VocabMap(tiny.VOCAB, torch.arange(20)))  # type: ignore[attr-defined]
    of.lm_head.to("meta")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
        made.logits(torch.zeros(5, 32), some, some)


def test_a_pruned_model_is_built_where_its_target_lies() -> None:
    """Fault: new layers on the CPU, behind an embedding on a GPU (here "meta")."""
    small = base.family("small")
    with torch.device("meta"):
        of: Any = CausalLM(tiny.hf_model("Qwen3"))
    made = small(of, small.Config(layers=[0, 1]))
    assert all(p.is_meta for p in made.parameters())


def test_shared_embeddings_stay_with_the_target() -> None:
    """Fault: a draft model that is moved takes the target's embedding and lm_head along."""
    of = Target(tiny.hf_model("Qwen3"), tiny.tokenizer(), tiny.source())
    small = base.family("small")
    made = small.create(of, small.Config(layers=[0, 1]))
    made.to("meta")
    own = [p.is_meta for p in made.parameters() if p.requires_grad]
    assert own and all(own)
    assert not (of.embedding.weight.is_meta or of.lm_head.weight.is_meta)


def test_a_map_that_transformers_refuses(world: World) -> None:
    with pytest.raises(UserError, match="transformers cannot load it"):
        Target.load(str(world.target), device_map="everywhere")
