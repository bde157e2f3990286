"""What a plan promises, against models that are really built, runs that really train, and FLOPs
that torch counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("datasets")

from draftsmith.drafters.base import family
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.eval.evaluate import count_parameters
from draftsmith.train import checkpoint, journal, recipe
from draftsmith.train.learner import Learner
from draftsmith.train.lora import Lora
from draftsmith.train.medusa2 import Medusa2
from draftsmith.train.plan import cost, outline, plan
from draftsmith.train.plan.cost import Pace
from draftsmith.train.run import main
from draftsmith.train.samples import packing
from draftsmith.train.samples.packing import Cursor
from draftsmith.train.samples.samples import Samples
from draftsmith.train.states.cache import FeatureCache
from toys import ToyBlock
from training import World

MIB, ALIVE = 1 << 20, "features and activations"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of one operation a second, on which logits cost nothing: seconds are FLOPs."""
    monkeypatch.setattr(Pace, "matmul", lambda self, rows: 1.0)
    monkeypatch.setattr(Pace, "rowwise", float("inf"))
    yield


def planned(world: World, name: str, drafter: str, **changes: Any) -> plan.Plan:
    return plan.plan(recipe.load(world.recipe(name, drafter, **changes)))


SETTINGS = {
    "eagle": ("eagle", {}),
    "whole vocabulary": ("eagle", {"draft_vocab": None}),
    "target's head": ("eagle", {"head": "target"}),
    "medusa": ("medusa", {}),
    "hydra": ("hydra", {}),
    "EAGLE-3.1": ("eagle", {"fc_norm": True, "norm_before_fc": True, "norm_output": True}),
    "eagle1": ("eagle1", {}),
    "mtp": ("mtp", {}),
    "dflash": ("dflash", {}),
    "dflash, own head": ("dflash", {"head": "own"}),
    "dspark": ("dspark", {"draft_vocab": 20}),
    "peagle": ("peagle", {}),
    "mtp chain": ("mtp", {"modules": 3}),
    "small": ("small", {}),
    "own embeddings": ("small", {"embeddings": "own"}),
    "adapters": ("small", {"lora": 2}),
    "checkpoint": ("small", {"layers": None, "checkpoint": True}),
    "adapters of a checkpoint": ("small", {"layers": None, "checkpoint": True, "lora": 2}),
}


def check_parameters(world: World, name: str, built: Any) -> None:
    """The plan counts what `built` (recipe -> a real drafter) has."""
    drafter, changes = SETTINGS[name]
    if "checkpoint" in changes:
        changes = changes | {"checkpoint": str(world.target)}
    path = world.recipe("parameters", drafter, **changes)
    made = plan.plan(recipe.load(path))
    real = built(recipe.load(path))
    assert made.drafter_parameters == count_parameters(real)
    assert made.target_parameters == sum(p.numel() for p in real.target.parameters())
    weights = sum(p.numel() * p.element_size() for p in real.target.parameters())
    assert made.memory["target weights"] == weights
    trained = [p for p in real.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moments = [
        t for s in optimizer.state.values() for key, t in s.items() if key.startswith("exp_avg")
    ]
    assert made.memory["optimizer states"] == sum(t.numel() * t.element_size() for t in moments)
    assert made.memory["gradients"] == sum(p.numel() * p.element_size() for p in trained)
    # The target's own, which some drafters share, count with it.
    shared = {id(p) for p in real.target.parameters()}
    own = [p for p in [*real.parameters(), *real.buffers()] if id(p) not in shared]
    size = sum(p.numel() * p.element_size() for p in own)
    assert made.memory["drafter weights"] == pytest.approx(size, rel=0.01)


def built(chosen: recipe.Recipe) -> Any:
    target = Target.load(chosen.target)
    drafter = family(chosen.drafter)(target, chosen.drafter_config())
    if chosen.lora:
        Lora(drafter, chosen.lora)
    return drafter


@pytest.mark.parametrize("name", SETTINGS)
def test_parameters(world: World, name: str) -> None:
    check_parameters(world, name, built)


def test_parameters_planted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: frozen parameters counted among those trained."""
    real = outline.outlined_drafter

    def all_of_them(*args: Any) -> Any:
        drafter, _ = real(*args)
        return drafter, sum(p.numel() for p in drafter.parameters())

    monkeypatch.setattr(outline, "outlined_drafter", all_of_them)
    with pytest.raises(AssertionError):
        check_parameters(world, "small", built)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (
        "Llama",
        {"vocab_size": 128256, "intermediate_size": 14336, "num_hidden_layers": 32,
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192}},
    ),
    "Qwen/Qwen3-8B": (
        "Qwen3",
        {"vocab_size": 151936, "intermediate_size": 12288, "num_hidden_layers": 36,
         "head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}  # fmt: skip
COMMON = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
ONE_BILLION = {  # Llama-3.2-1B
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = 4096 * 4097  # a layer of H 4096 with its bias
BOTH_SIDES = 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)  # in + out of each of Llama-3.1-8B's linears


def block_of(inner: int, wide: int, norms: int) -> int:
    """Weights of a layer of H 4096 with 32 heads and 8 groups of 128, its attention wide * H in."""
    H = 4096
    return wide * H * (H + 2 * 1024) + H * H + 3 * H * inner + norms * H


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama31-8b-medusa", 4 * LINEAR),
        ("llama31-8b-medusa2", 4 * LINEAR + 32 * BOTH_SIDES),
        ("qwen3-8b-hydra", 2 * (14 * 4096**2 + 4 * 4096) + 4 * (3 * LINEAR + 32000 * 4096)),
        ("llama31-8b-eagle3", 3 * 4096**2 + block_of(14336, 2, 4) + 32000 * 4096),
        ("llama31-8b-eagle31", 3 * 4096**2 + block_of(14336, 2, 7) + 32000 * 4096),
        ("llama31-8b-small", 1_235_814_400),
        ("qwen3-8b-eagle3", 3 * 4096**2 + block_of(12288, 2, 4) + 32000 * 4096),
        ("llama31-8b-eagle1", 2 * 4096**2 + block_of(14336, 1, 1)),
        ("qwen3-8b-mtp", 2 * 4096**2 + block_of(12288, 1, 5)),
        ("qwen3-8b-dflash", 5 * (4096**2 + block_of(12288, 1, 2) + 2 * 128) + 2 * 4096),
        (
            "qwen3-8b-dspark",
            5 * (4096**2 + block_of(12288, 1, 2) + 2 * 128)
            + 2 * 4096
            + 2 * 256 * 151936
            + 4096
            + 256
            + 1,
        ),
        (
            "llama31-8b-dspark",
            5 * (4096**2 + block_of(14336, 1, 2) + 2 * 128)
            + 2 * 4096
            + 2 * 256 * 128256
            + 4096
            + 256
            + 1,
        ),
        (
            "qwen3-8b-peagle",
            3 * 4096**2
            + block_of(12288, 2, 4)
            + 32000 * 4096
            + 3 * block_of(12288, 1, 2)
            + 3 * 4096,
        ),
        (
            "llama31-8b-peagle",
            3 * 4096**2
            + block_of(14336, 2, 4)
            + 32000 * 4096
            + 3 * block_of(14336, 1, 2)
            + 3 * 4096,
        ),
        ("llama31-8b-dflash", 5 * (4096**2 + block_of(14336, 1, 2) + 2 * 128) + 2 * 4096),
    ],
)
def test_recipes_of_large_targets(name: str, parameters: int, tmp_path: Path) -> None:
    """Shipped recipes that were never run are planned on their target's own shape, without weights.

    Faults: settings that such a target cannot take; a plan that no longer knows a family.
    """
    shipped = recipe.load(name)
    family_name, shape = SHAPES[shipped.target]
    getattr(transformers, f"{family_name}Config")(**COMMON, **shape).save_pretrained(tmp_path)
    words = [f"target={tmp_path}"]
    if getattr(shipped.drafter_config(), "checkpoint", None):
        transformers.LlamaConfig(**ONE_BILLION).save_pretrained(tmp_path / "1b")
        words.append(f"checkpoint={tmp_path / '1b'}")
    made = plan.plan(recipe.load(name, words))
    assert made.drafter_parameters == parameters
    assert 7.5e9 < made.target_parameters < 8.5e9
    logits = made.memory["logits of one chunk"]
    assert logits < 4 << 30, "chunk is too large for a vocabulary of this size"


def test_one_long_text_of_many_is_not_held_out() -> None:
    """Fault: memory for a text of 100,000 tokens, of which a row reads 2,048, refuses the run."""
    lengths = torch.full((1000,), 500)
    lengths[7] = 100_000
    assert cost._longest(lengths, 16) == 500
    assert cost._longest(lengths[:8], 8) > 500


def test_heads_that_training_does_not_reach(world: World) -> None:
    """Fault: the last head stays what it was, which shows when it is served."""
    for depths in (2, 4):
        with pytest.raises(UserError, match=f"depths: {depths} in .* weights for 3: set depths: 3"):
            planned(world, "short", "medusa", depths=depths)


def test_config_is_enough(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are read, and none need be there."""
    whole = planned(world, "whole", "eagle")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(world.target / "config.json", bare)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", _never)
    made = planned(world, "bare", "eagle", target=str(bare))
    assert made.drafter_parameters == whole.drafter_parameters
    assert made.seconds == whole.seconds and made.disk == whole.disk


# ---------------------------------------------------------------- against runs


def flops(world: World, drafter: str, **changes: Any) -> tuple[float, float]:
    """The work of six steps, as planned and as torch counts it."""
    keys: dict[str, Any] = {"accumulation": 1, "rows": 2, "chunk": 4096} | changes
    chosen = recipe.load(world.recipe("flops", drafter, **keys))
    target = Target.load(chosen.target)
    samples = Samples.open(world.samples, target, audit=0)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    kind = Medusa2 if chosen.adapt else Learner
    learner = kind(chosen, target, samples, Accelerator(cpu=True))
    counted = FlopCounterMode(display=False)
    steps = 6
    with counted:
        for _ in range(steps):
            learner.advance(learner.states)
    made = plan.plan(chosen)
    return made.seconds["training"] * steps / chosen.steps, counted.get_total_flops()


def check_flops(world: World, drafter: str) -> None:
    """A step's work, as torch counts it, is what its planned time rests on."""
    planned, counted = flops(world, drafter)
    assert planned == pytest.approx(counted, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle", "small", "dflash", "peagle"])
def test_flops(world: World, drafter: str) -> None:
    check_flops(world, drafter)


@pytest.mark.slow
def test_flops_of_an_adapted_target(world: World) -> None:
    """It is read twice and passed backwards: that much more work than for heads alone."""
    planned, counted = flops(world, "medusa", adapt=2, adapt_after=0.0)
    planned_alone, counted_alone = flops(world, "medusa")
    assert planned / planned_alone == pytest.approx(counted / counted_alone, rel=0.1)


def test_modules_of_their_own_are_passed_once(world: World) -> None:
    """Three modules for three depths work as much as one that is passed three times."""
    one, three = (planned(world, "modules", "mtp", modules=n, depths=3) for n in (1, 3))
    assert three.drafter_parameters == 3 * one.drafter_parameters
    assert three.memory[ALIVE] == one.memory[ALIVE]
    assert three.seconds["training"] == one.seconds["training"]


def test_a_block_drafter_shares_its_weights(world: World) -> None:
    """Fault: a drafter whose drafts end somewhere is taken for one with weights for each depth."""
    name, cases = ToyBlock.family, ((None, 3), (4, 3), (4, 4))  # block, depths
    made = [planned(world, name, name, block=b, depths=d) for b, d in cases]
    free, short, deep = ([p.memory[ALIVE], p.seconds["training"]] for p in made)
    assert free == short and short[0] < deep[0] and short[1] < 0.9 * deep[1]
    with pytest.raises(UserError, match="depths: 5 .* drafts at most 4: set depths: 4"):
        planned(world, name, name, block=4, depths=5)


def test_blocks_are_replayed_at_every_length(world: World) -> None:
    """Their depths depend on k. Fault: the work of the longest alone."""
    whole = planned(world, "whole", "dspark", k=3).seconds["replays"]
    longest = planned(world, "whole", "peagle", k=3).seconds["replays"]
    short = [planned(world, "short", name, k=1).seconds["replays"] for name in ("dspark", "peagle")]
    assert whole / short[0] > 1.5 * longest / short[1]


def test_a_narrow_head_is_no_trained_lm_head(world: World) -> None:
    """Fault: a Markov head beside the target's frozen lm_head makes that one trained."""
    ranks = [planned(world, "ranks", "dspark", markov_rank=r).seconds["training"] for r in (1, 8)]
    bare = planned(world, "bare", "dflash", block_size=4, draft_vocab=None).seconds["training"]
    assert ranks[0] == pytest.approx(ranks[1], rel=0.01) and ranks[0] < 1.01 * bare


@pytest.mark.slow
def test_flops_planted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a backward pass that costs nothing."""
    real = cost._pass

    def free(*args: Any, backward: bool, **more: Any) -> float:
        return real(*args, backward=False, **more) if backward else 0.0

    monkeypatch.setattr(cost, "_pass", free)
    with pytest.raises(AssertionError):
        check_flops(world, "small")


@pytest.mark.parametrize(
    ("drafter", "changes"), [("eagle", {}), ("small", {}), ("small", {"lora": 2})]
)
def test_disk_and_tokens(world: World, drafter: str, changes: dict[str, Any]) -> None:
    """Of a run that is made, the files and what was learned from."""
    name = "-".join(["made", drafter, *changes])
    path = world.recipe(name, drafter, **changes)
    made = plan.plan(recipe.load(path))
    assert main([str(path)]) == 0
    run = world.folder(name)
    files = [f for f in run.glob("checkpoint-*/*") if f.suffix in (".safetensors", ".pt")]
    size = sum(f.stat().st_size for f in files)
    other = 40_000 * len(checkpoint.steps(run))  # states of generators, the window, names
    assert made.disk["checkpoints"] <= size <= 1.05 * made.disk["checkpoints"] + other
    learned = journal.read_metrics(run)[-1]["tokens"]
    assert made.tokens["learned"] == pytest.approx(learned, rel=0.15)


@pytest.mark.parametrize(
    ("drafter", "changes"), [("eagle", {}), ("small", {"lora": 2}), ("medusa", {"adapt": 4})]
)
def test_a_run_counts_as_its_plan_does(world: World, drafter: str, changes: dict[str, Any]) -> None:
    """The disk that a run asks for as it starts: three checkpoints."""
    chosen = recipe.load(world.recipe("counts", drafter, **changes))
    target = Target.load(chosen.target)
    kind = Medusa2 if chosen.adapt else Learner
    run = kind(chosen, target, Samples.open(world.samples, target, 0), Accelerator())
    assert 3 * run.checkpoint_size() == plan.plan(chosen).disk["checkpoints"]


def test_processes_add_their_rows(world: World) -> None:
    """Two learn in a step what one does from twice the rows, and answer or read half each."""
    changes = {"samples": None, "prompts": str(world.prompts), "max_new_tokens": 24}
    chosen = recipe.load(world.recipe("both", rows=1, feature_cache="1GB", **changes))
    one, pair = (plan.plan(chosen, processes=count) for count in (1, 2))
    twice = planned(world, "twice", "eagle", rows=2, feature_cache="1GB", **changes)
    assert pair.tokens == twice.tokens and pair.features["online"] == twice.features["online"]
    assert pair.passes == pytest.approx(twice.passes) == pytest.approx(2 * one.passes)
    for part, share in (("training", 1), ("replays", 1), ("sampling", 2), ("features", 2)):
        assert pair.seconds[part] == pytest.approx(one.seconds[part] / share)
    assert pair.memory["optimizer states"] == one.memory["optimizer states"]


def test_passes_are_those_of_the_stream(world: World) -> None:
    made = planned(world, "passes", "eagle", steps=50)
    samples = Samples.open(world.samples, Target.load(str(world.target)), audit=0)
    stream = packing.Stream(samples, samples.split(5, 0)[0], 64, 0)
    cursor = stream.take(Cursor(), 50 * 4)[1]
    part = cursor.row / stream.rows_per_epoch(cursor.epoch)
    assert made.passes == pytest.approx(cursor.epoch + part, rel=0.1)


def test_sampling_is_planned_where_it_is_needed(world: World) -> None:
    """24 prompts of 24 tokens at most, a batch of 16 at a time."""
    changes = {"samples": None, "prompts": str(world.prompts), "max_new_tokens": 24}
    made, drawn = planned(world, "asks", "small", **changes), planned(world, "has", "small")
    assert made.tokens["answers"] == 24 * 24 >= drawn.tokens["answers"]
    assert made.seconds["sampling"] > 0 and "sampling" not in drawn.seconds
    assert made.disk["samples"] > 0 and "samples" not in drawn.disk


def test_feature_cache(world: World) -> None:
    """Both options' disk and the tokens that the target reads, and their times."""
    online = planned(world, "features", "eagle", steps=50)
    chosen = recipe.load(world.recipe("features", steps=50, feature_cache="1GB"))
    cached = plan.plan(chosen)
    target = Target.load(chosen.target)
    real = FeatureCache(chosen, target, Samples.open(world.samples, target, 0), [1, 2, 4], "no")
    tokens = sum(real.tokens)
    assert online.features == cached.features
    assert cached.features["cached, float32"] == (real.size, tokens)
    assert cached.features["cached, bfloat16"] == (real.size // 2, tokens)
    disk, read = online.features["online"]
    assert disk == 0 and read == pytest.approx(
        50 * 4 * tokens / sum(map(len, real.shards)), rel=0.1
    )
    assert cached.disk["feature cache"] == real.size and "feature cache" not in online.disk
    saved = online.seconds["training"] - cached.seconds["training"]
    assert saved / cached.seconds["features"] == pytest.approx(read / tokens, rel=0.1)
    rows = [row for row in plan.table(cached) if row[0] == "features"]
    assert rows[0][1:] == ("online", f"0 MiB, {read:,} target tokens")


def test_packed_rows(world: World) -> None:
    """The tokens of a row are those that the training stream packs."""
    samples = Samples.open(world.samples, Target.load(str(world.target)), audit=0)
    texts = outline.recipe_texts(recipe.load(world.recipe("rows")))
    stream = packing.Stream(samples, range(len(samples)), 64, seed=0)
    rows, _ = stream.take(Cursor(), stream.rows_per_epoch(0))
    tokens = [sum(int(samples.lengths[i]) for i in row) for row in rows]
    assert texts.row(64) == pytest.approx(sum(tokens) / len(tokens))
    assert texts.made == int(samples.token_counts().sum())


# ---------------------------------------------------------------- refused


def refused(
    world: World, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """What `train` says when it refuses to start: one line, before the target is loaded."""
    monkeypatch.setattr(Target, "load", _never)
    assert main([str(world.recipe(name))]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and said.startswith("error: ")
    return said


def test_prompts_are_read_once(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the hub they are streamed; and what was skipped is told once."""
    monkeypatch.setattr(outline, "prompts_to_learn", _never)
    monkeypatch.setattr(plan, "_free_memory", lambda *asked: 0)
    path = world.recipe("once", samples=None, prompts=str(world.prompts))
    assert main([str(path)]) == 2
    assert "recipe once: needs about" in capsys.readouterr().err


def test_too_little_memory(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_free_memory", lambda *asked: 100 * MIB)
    said = refused(world, "large", capsys, monkeypatch)
    assert "recipe large: needs about " in said and "0.10 GiB free; lower rows" in said


def test_too_little_memory_planted(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a check that nobody calls."""
    monkeypatch.setattr(plan, "check", lambda *given: None)
    monkeypatch.setattr(plan, "_free_memory", lambda *asked: 100 * MIB)
    with pytest.raises(AssertionError, match="was loaded"):
        refused(world, "large", capsys, monkeypatch)


def test_too_little_disk(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three checkpoints to write; of a run that has them all, none."""
    usage = SimpleNamespace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    said = refused(world, "wide", capsys, monkeypatch)
    assert "of disk (3 checkpoints: 0.00 GiB), 0.00 GiB are free; raise save_every" in said
    chosen = recipe.load(world.recipe("wide"))
    monkeypatch.setattr(checkpoint, "steps", lambda folder: [4, 8, 9])
    plan.check(chosen)


def test_memory_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit counts where it is lower than the machine's free memory."""
    texts = {"memory.max": f"{500 * MIB}\n", "memory.current": f"{200 * MIB}\n"}
    monkeypatch.setattr(Path, "is_file", lambda self: self.name in texts)
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: texts[self.name])
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=50 * MIB))
    memory = SimpleNamespace(available=4096 * MIB)
    psutil = SimpleNamespace(Process=lambda: process, virtual_memory=lambda: memory)
    monkeypatch.setattr(plan, "psutil", psutil)
    assert plan._free_memory("cpu") == 350 * MIB
    texts["memory.max"] = "max\n"
    assert plan._free_memory("cpu") == 4146 * MIB


# ---------------------------------------------------------------- hub models


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub at an address where nobody listens."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_hub_out_of_reach(world: World, no_hub: Path) -> None:
    with pytest.raises(UserError) as error:
        planned(world, "remote", "eagle", target="org/remote")
    assert "the hub cannot be reached" in str(error.value)
    assert "org/remote" in str(error.value) and "\n" not in str(error.value)


def test_hub_config_in_the_cache(world: World, no_hub: Path) -> None:
    """The config alone is enough; for training it is not."""
    commit = "0" * 40
    repo = no_hub / "models--org--cached"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(world.target / "config.json", repo / "snapshots" / commit)
    made = planned(world, "cached", "eagle", target="org/cached")
    assert made.drafter_parameters == planned(world, "here", "eagle").drafter_parameters
    with pytest.raises(UserError, match="has no weights"):
        Target.load("org/cached")


def test_unknown_architecture(world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(UserError) as error:
        planned(world, "odd", "eagle", target=str(tmp_path))
    assert "transformers cannot read its config" in str(error.value)
    assert "\n" not in str(error.value)


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a model was loaded")
