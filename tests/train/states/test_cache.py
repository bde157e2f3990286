"""The target's states kept on disk: the same training, no stale state, nothing half written.

.venv/bin/pytest tests/train/states/test_cache.py
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file

pytest.importorskip("datasets")

import tiny
import training
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.target import Target
from draftsmith.train import recipe
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.run import main
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.packing import Cursor, Stream, collate
from draftsmith.train.samples.samples import Samples
from draftsmith.train.states import cache as cache_module
from draftsmith.train.states.cache import FeatureCache, stored_taps
from training import World, differences, metrics

LENGTH = 40
TAPS = [0, 2, tiny.LAYERS, "normed"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", params=["Llama", "Gemma3"])
def samples(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Target, Samples]:
    """Texts of up to 54 tokens, some of them cut at LENGTH, two without an answer before it."""
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for i in range(20):
        ids = torch.randint(2, tiny.VOCAB, (3 + i * 7 % 40,), generator=generator).tolist()
        prompts.append(Prompt(None, tuple(ids), "d"))
    target = tiny.target(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "s"
    return target, generate(target, prompts, Sampler(1.0), 12, folder)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_module, "SHARD", 70_000)
    yield


def asked(**changes: Any) -> recipe.Recipe:
    keys = {"name": "n", "drafter": "eagle", "steps": 1, "rows": 2, "length": LENGTH}
    return recipe.parse(keys | {"feature_cache": "1GB"} | changes, "recipe")


def made(target: Target, samples: Samples, taps: Sequence[Any] = TAPS, **keys: Any) -> FeatureCache:
    cache = FeatureCache(asked(**keys), target, samples, taps, "no")
    cache.prepare(Accelerator())
    return cache


# ---------------------------------------------------------------- the same states, the same losses


def check_states(target: Target, samples: Samples, cache: FeatureCache, apart: float) -> None:
    """Packed rows of another order, filled from disk, hold what the target computes for them."""
    stream = Stream(samples, range(len(samples)), LENGTH, seed=1)
    rows, _ = stream.take(Cursor(2), 6)
    online = target.read(collate(samples, rows, LENGTH), TAPS)
    cached = cache.fill(collate(samples, rows, LENGTH), rows)
    assert online.features.keys() == cached.features.keys()
    real = online.segment >= 0
    assert not real.all(), "padding, too"
    assert online.final is not None and cached.final is not None
    pairs = [(online.features[t], cached.features[t]) for t in online.features]
    for ours, theirs in [*pairs, (online.final, cached.final)]:
        gap = (ours - theirs)[real].norm(dim=1) / ours[real].norm(dim=1)
        assert gap.max() < apart


def test_states_are_the_targets(samples: tuple[Target, Samples]) -> None:
    target, texts = samples
    cache = made(target, texts)
    assert len(cache.shards) > 2 and cache.stored == [0, 2]
    check_states(target, texts, cache, 1e-5)


def test_bfloat16_states_are_rounded_ones(samples: tuple[Target, Samples]) -> None:
    """Half the disk; 8 bits of a number are kept."""
    target, texts = samples
    cache = made(target, texts, feature_dtype="bfloat16")
    files = sum(f.stat().st_size for f in cache.folder.glob("*.safetensors"))
    assert cache.size <= files < 1.05 * cache.size
    assert 2 * cache.size == made(target, texts).size
    check_states(target, texts, cache, 2**-8)
    with pytest.raises(AssertionError):
        check_states(target, texts, cache, 1e-5)


@pytest.mark.parametrize(("fault", "dim"), [("the token before", 0), ("another layer", 1)])
def test_states_planted(samples: tuple[Target, Samples], fault: str, dim: int) -> None:
    """Planted faults: the states of another token or layer."""
    target, texts = samples
    cache = made(target, texts)
    text = cache.text
    cache.text = lambda index: text(index).roll(1, dim)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        check_states(target, texts, cache, 1e-5)


def losses(world: World, name: str, drafter: str, **changes: Any) -> list[float]:
    folder = world.folder(name)
    if not folder.exists():
        assert main([str(world.recipe(name, drafter, **changes))]) == 0
    lines = [m for m in metrics(folder) if m["kind"] in ("train", "replay")]
    return [m.get("loss", m.get("tau")) for m in lines]


@pytest.mark.parametrize("drafter", ["eagle", "medusa", "small"])
def test_training_is_the_same(world: World, drafter: str) -> None:
    """Losses and replay of 9 steps in several epochs, online and cached, equal to fp32 rounding."""
    online = losses(world, f"online-{drafter}", drafter)
    cached = losses(world, f"cached-{drafter}", drafter, feature_cache="1GB")
    assert cached == pytest.approx(online, rel=2e-5)


def test_bfloat16_trains_within_a_percent(world: World) -> None:
    online = losses(world, "online-eagle", "eagle")
    rounded = losses(
        world, "rounded-eagle", "eagle", feature_cache="1GB", feature_dtype="bfloat16"
    )  # fmt: skip
    assert rounded == pytest.approx(online, rel=0.01) and rounded != pytest.approx(online, rel=2e-5)


def test_runs_share_a_cache_and_the_target_rests(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another loss and seed compute nothing anew: the target reads held-out texts and the proof."""
    losses(world, "cached-eagle", "eagle", feature_cache="1GB")
    read, seen = Target.read, []

    def counted(self: Target, batch: Any, taps: Any) -> Any:
        seen.append(batch.tokens.shape[0])
        return read(self, batch, taps)

    monkeypatch.setattr(Target, "read", counted)
    changes = {"steps": 4, "loss": "tv", "seed": 5, "feature_cache": "1GB"}
    assert main([str(world.recipe("shares", **changes))]) == 0
    audit_and_replay = 1 + 2 * 2  # 16 texts at most; at steps 0 and 4, 5 texts in two batches
    assert len(seen) == audit_and_replay + cache_module.RECOMPUTED


# ---------------------------------------------------------------- never a stale one


def folders(target: Target, texts: Samples) -> dict[str, Path]:
    """Where the cache lies, by what was changed."""
    other = Samples(texts.folder, texts.manifest | {"content_hash": "other"}, texts._rows)
    changed = {
        "nothing": FeatureCache(asked(), target, texts, TAPS, "no"),
        "taps": FeatureCache(asked(), target, texts, [0, 1], "no"),
        "samples": FeatureCache(asked(), target, other, TAPS, "no"),
        "length": FeatureCache(asked(length=39), target, texts, TAPS, "no"),
        "dtype": FeatureCache(asked(feature_dtype="bfloat16"), target, texts, TAPS, "no"),
        "autocast": FeatureCache(asked(), target, texts, TAPS, "bf16"),
    }
    for name in ("revision", "tokenizer_hash", "template_hash"):
        changed[name] = FeatureCache(asked(), renamed(target, name), texts, TAPS, "no")
    return {name: cache.folder for name, cache in changed.items()}


def renamed(target: Target, name: str) -> Any:
    about = target.identity() | {name: "other"}
    names = ("num_layers", "hidden_size", "dtype", "embedding")
    return SimpleNamespace(identity=lambda: dict(about), **{n: getattr(target, n) for n in names})


def check_apart(target: Target, texts: Samples) -> None:
    found = folders(target, texts)
    assert len(set(found.values())) == len(found), "two of them share a cache"


def test_any_change_makes_another_cache(samples: tuple[Target, Samples]) -> None:
    check_apart(*samples)
    target, texts = samples
    same = FeatureCache(asked(steps=7, loss="tv", seed=3, heldout=2), target, texts, TAPS, "no")
    assert same.folder == folders(target, texts)["nothing"]


@pytest.mark.parametrize("lost", ["target", "computed", "stored", "layers", "samples"])
def test_any_change_planted(
    samples: tuple[Target, Samples], lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a hash over all but one of what decides a state."""
    monkeypatch.setattr(cache_module, "SHARD", 1 << 30)  # else the shards' layout tells some apart
    digest = cache_module.store.digest

    def forgets(content: Any) -> str:
        return digest({k: v for k, v in content.items() if k != lost})

    monkeypatch.setattr(
        cache_module.store, "digest", lambda c: (forgets if "format" in c else digest)(c)
    )
    with pytest.raises(AssertionError, match="share a cache"):
        check_apart(*samples)


# ---------------------------------------------------------------- broken caches


def refusal(run: Any) -> str:
    with pytest.raises(UserError) as error:
        run()
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.fixture
def copied(samples: tuple[Target, Samples], tmp_path: Path) -> tuple[Target, Samples, FeatureCache]:
    """A whole cache of its own."""
    target, texts = samples
    shutil.copytree(texts.folder, tmp_path / "s")
    mine = Samples(tmp_path / "s", texts.manifest, texts._rows)
    return target, mine, made(target, mine)


Copied = tuple[Target, Samples, FeatureCache]


def test_a_shard_cut_short_is_refused_and_made_anew(copied: Copied) -> None:
    target, texts, cache = copied
    files = sorted(cache.folder.glob("*.safetensors"))
    before = {f: f.read_bytes() for f in files}
    files[1].write_bytes(before[files[1]][:-8])
    line = refusal(lambda: made(target, texts))
    assert f"{files[1]}: cannot be read" in line and "delete it and run again" in line
    files[1].unlink()
    times = {f: f.stat().st_mtime_ns for f in files if f.exists()}
    made(target, texts)
    assert {f: f.read_bytes() for f in files} == before
    assert all(f.stat().st_mtime_ns == t for f, t in times.items()), "the others were left alone"


def test_a_shard_of_another_cache_is_refused(copied: Copied) -> None:
    """Copied under the right name, of the right shape: layer 1 for layer 2."""
    target, texts, cache = copied
    other = made(target, texts, [0, 1, tiny.LAYERS, "normed"])
    shutil.copy(other.folder / "00000.safetensors", cache.folder)
    line = refusal(lambda: made(target, texts))
    assert "00000.safetensors: was made for another target, layers or samples" in line


def neighbouring_layer(cache: FeatureCache, patch: pytest.MonkeyPatch) -> None:
    forward = CausalLM.forward

    def wrong(self: Any, tokens: Any, step: Any, taps: Any = ()) -> Any:
        out = forward(self, tokens, step, [t + 1 for t in taps])
        named = {str(t): out.features[str(t + 1)] for t in taps}
        return replace(out, features=named)

    patch.setattr(CausalLM, "forward", wrong)


def seen_packed_as_one(cache: FeatureCache, patch: pytest.MonkeyPatch) -> None:
    """Texts of a row see each other."""
    read = Target.read

    def wrong(self: Target, batch: Any, taps: Any) -> Any:
        return read(self, replace(batch, segment=batch.segment.clamp(max=0)), taps)

    patch.setattr(Target, "read", wrong)


@pytest.mark.parametrize("fault", [neighbouring_layer, seen_packed_as_one])
def test_states_of_a_wrong_target_are_refused(copied: Copied, fault: Any) -> None:
    """Planted faults while the cache is made; the few texts that are computed anew tell."""
    target, texts, cache = copied
    shutil.rmtree(cache.folder)
    with pytest.MonkeyPatch.context() as patch:
        fault(cache, patch)
        patch.setattr(FeatureCache, "prove", lambda self: None)
        made(target, texts)
    line = refusal(lambda: made(target, texts))
    assert "are not those that the target computes" in line and str(cache.folder) in line


def test_noise_in_one_state_is_refused(copied: Copied) -> None:
    """One layer of every text is off by a hundredth: more than rounding."""
    target, texts, cache = copied
    for path in cache.folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            states, about = file.get_tensor("states"), file.metadata()
        states[:, 1] *= 1.01
        save_file({"states": states}, path, about)
    assert "are not those" in refusal(lambda: made(target, texts))


def test_processes_share_the_work(copied: Copied) -> None:
    """Two processes write every shard once, the same bytes as one does."""
    target, texts, cache = copied
    before = {f.name: f.read_bytes() for f in cache.folder.glob("*.safetensors")}
    shutil.rmtree(cache.folder)
    cache.folder.mkdir()
    written = []
    for index in (1, 0):
        one = SimpleNamespace(
            process_index=index, num_processes=2, is_main_process=not index, autocast=nullcontext
        )
        again = FeatureCache(asked(), target, texts, TAPS, "no")
        again._compute(one)  # type: ignore[arg-type]
        written.append(len(list(cache.folder.glob("*.safetensors"))))
    assert written == [len(before) // 2, len(before)]
    assert {f.name: f.read_bytes() for f in cache.folder.glob("*.safetensors")} == before


def test_states_lie_on_one_device(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is spread has its norm on another device than its states come out on."""
    target, texts, cache = copied
    norm, moved = target.norm, []

    def elsewhere(x: torch.Tensor) -> Any:
        return SimpleNamespace(to=lambda device: moved.append(device) or norm(x))

    monkeypatch.setitem(vars(target), "norm", elsewhere)
    batch = cache.fill(collate(texts, [[0]], LENGTH), [[0]])
    assert moved == [batch.device] and isinstance(batch.features["normed"], torch.Tensor)


def test_another_run_is_filling_it(copied: Copied) -> None:
    target, texts, cache = copied
    (cache.folder / "00001.safetensors").unlink()
    with FileLock(cache.folder / ".lock"):
        assert "another run is filling" in refusal(lambda: made(target, texts))


@pytest.mark.slow
def test_killed_while_it_is_filled(world: World) -> None:
    """SIGKILL, twice, with one shard half written: the same command ends with the same weights."""
    whole = world.folder("cached-eagle")
    losses(world, "cached-eagle", "eagle", feature_cache="1GB")
    shutil.rmtree(world.samples / cache_module.FOLDER)
    path = world.recipe("killed", feature_cache="1GB")
    folder = world.samples / cache_module.FOLDER
    for count in (1, 2):
        process = training.fork(path, training.small_slow_shards)
        while len(list(folder.glob("*/*.safetensors"))) < count or not list(folder.glob("*/*.tmp")):
            assert process.is_alive()
            time.sleep(1e-3)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert list(folder.glob("*/*.tmp")), "killed in the middle of a write"
    process = training.fork(path, training.small_slow_shards)
    process.join()
    assert process.exitcode == 0
    assert differences(whole, world.folder("killed"), 9) == []
    assert not list(folder.glob("*/*.tmp"))


# ---------------------------------------------------------------- size and budget


def test_the_budget_may_be_raised(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """As its refusal says to; but whether states are stored decides their rounding."""
    path = str(world.recipe("budget", steps=1, feature_cache="1GB"))
    assert main([path]) == 0 and main([path, "feature_cache=2GB"]) == 0
    assert main([path, "feature_cache=null"]) == 2
    assert "holds another run (feature_cache: set there, None here)" in capsys.readouterr().err


def test_beyond_the_budget(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Told by the plan, before the target is loaded; in one line, with the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", lambda *a, **k: pytest.fail("a model was loaded"))
        assert main([str(world.recipe("small-budget", feature_cache="100KB"))]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert "feature_cache: 100 KB cannot hold 278 KB of states; raise it, or leave" in said


def test_other_caches_count(copied: Copied) -> None:
    target, texts, cache = copied
    budget = cache.size + 1000
    line = refusal(lambda: made(target, texts, [0, 1], feature_cache=budget))
    assert "of other caches in" in line and "delete those no longer used" in line
    made(target, texts, [0, 1], feature_cache=3 * budget)


def test_too_little_disk(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    target, texts, cache = copied
    made(target, texts)
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    made(target, texts)  # all is there
    shutil.rmtree(cache.folder)
    assert "1 KB are free; free some, or leave the key out" in refusal(lambda: made(target, texts))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"feature_cache": "20"}, None),
        ({"feature_cache": "1.5 gb"}, None),
        ({"feature_cache": "lots"}, "feature_cache"),
        ({"feature_cache": "20GiBi"}, "feature_cache"),
        ({"feature_cache": 0}, "feature_cache"),
        ({"feature_dtype": "float8"}, "feature_dtype"),
    ],
)
def test_keys(keys: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert asked(**keys).feature_cache in (20, 1_500_000_000)
    else:
        assert words in refusal(lambda: asked(**keys))


def test_stored_taps() -> None:
    """What follows from the pre-norm state takes no disk."""
    assert stored_taps(["normed"], 4) == [] and stored_taps([1, 4, "normed"], 4) == [1]
