"""Several processes: they meet, answer and learn as one would, and stop when one of them dies.

    .venv/bin/pytest tests/train/test_processes.py

Runs are compared with those of one process: samples as bytes, weights to rounding.
"""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from filelock import FileLock
from torch.distributed import HashStore

pytest.importorskip("datasets")

import training
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint, learner, loop, processes
from draftsmith.train.processes import Processes
from draftsmith.train.run import main
from draftsmith.train.samples import store
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.writing import Parts
from draftsmith.train.states import cache
from training import World, metrics

STEPS = 9


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


# ---------------------------------------------------------------- meeting


@pytest.fixture
def key_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """Where threads meet as processes do; 0 and 1 give signs of life, others do not."""
    monkeypatch.setattr(processes, "BEAT", 0.05)
    monkeypatch.setattr(processes, "LOST", 0.5)
    out, over = HashStore(), threading.Event()
    beating = [
        threading.Thread(target=Processes(index, 2, index, out).beat, args=(over,))
        for index in (0, 1)
    ]
    for thread in beating:
        thread.start()
    yield out
    over.set()
    for thread in beating:
        thread.join()


def test_nobody_leaves_before_all_have_come(key_store: HashStore) -> None:
    """However often they meet, and however long one works: thrice what a dead one is given."""
    seen: list[int] = []

    def work(index: int) -> None:
        each = Processes(index, 2, index, key_store)
        for meeting in range(3):
            time.sleep(1.5 if (meeting, index) == (1, 1) else 0)
            seen.append(meeting)
            each.meet()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0, 0, 1, 1, 2, 2]


def test_a_dead_process_is_told(key_store: HashStore) -> None:
    """Of two that do not come, the one that gives no sign of life."""
    with pytest.raises(UserError, match="process 0: process 2 of this launch has ended"):
        Processes(0, 3, 0, key_store).meet()


def test_a_share_is_each_ones_own() -> None:
    shares = [Processes(index, 3).share(range(10)) for index in range(3)]
    assert sorted(sum(shares, [])) == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP is not supported"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED is not supported"),
        ({"LOCAL_WORLD_SIZE": "2"}, "device_map: spreads the target over a node's devices"),
    ],
)
def test_launches_that_are_refused(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: dict[str, str],
    words: str,
) -> None:
    """In one line, before a model is loaded or a folder made; never trained some other way."""
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    path = world.recipe("refused", device_map="auto")
    assert main([str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said and not world.folder("refused").exists()


@pytest.mark.parametrize(("name", "nodes", "count"), [("8-gpus", 1, 8), ("2-nodes", 2, 16)])
def test_accelerate_configs(name: str, nodes: int, count: int) -> None:
    """Those that are shipped are read by accelerate, unknown keys being errors there."""
    folder = files("draftsmith.recipes") / "accelerate"
    config = load_config_from_file(str(folder / f"{name}.yaml"))
    assert (config.num_machines, config.num_processes) == (nodes, count)
    assert config.distributed_type == "MULTI_GPU"


# ---------------------------------------------------------------- answering


def content(world: World, folder: Path) -> list[tuple[Any, ...]]:
    samples = Samples.open(folder, Target.load(str(world.target)), audit=0)
    return [(s.ids, s.made, s.finish, s.domain, s.key) for s in samples]


def ended(processes: list[BaseProcess], seconds: float = 90) -> list[int | None]:
    """Exit codes; all within a time."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_answers_go_on_with_another_count(world: World, tmp_path: Path, seed: int) -> None:
    """Two processes, one of them (0 the main one, 1 the other) killed at a seeded moment; then
    three: the bytes of one process that was left alone."""
    draw = random.Random(seed)
    folder, log = tmp_path / "samples", tmp_path / "log"
    about = (str(world.target), str(world.prompts), str(folder))
    begun = training.launch(training.answer_together, 2, log, *about, True)
    parts = folder / store.PARTS
    stored = draw.randint(1, 5)
    training.kill(
        begun[seed], lambda: parts.is_dir() and len(list(parts.glob("*-*-*[!p]"))) >= stored
    )
    codes = ended(begun)
    assert codes[seed] == -signal.SIGKILL and codes[1 - seed] == 1
    words = (tmp_path / f"log.{1 - seed}").read_text()
    assert "of this launch has ended" in words and "Traceback" not in words
    assert store.read_manifest(folder)["state"] == "writing"
    kept = {p.name for p in parts.iterdir() if p.suffix != ".tmp"}
    assert ended(training.launch(training.answer_together, 3, log, *about, False, 3)) == [0, 0, 0]
    assert kept and not parts.exists()
    assert content(world, folder) == content(world, world.samples)
    one, other = (store.read_manifest(f) for f in (folder, world.samples))
    assert one == other


def test_a_prompt_that_is_answered_twice_is_noticed(tmp_path: Path) -> None:
    """As two launches without a common lock would store it: no share is answered by two."""
    row = {
        "ids": [5, 6], "made": [False, True], "finish": "stop", "domain": "d", "key": "k",
        "index": 3,
    }  # fmt: skip
    Parts(tmp_path).add([row])
    Parts(tmp_path).add([row | {"ids": [5, 7]}])
    with pytest.raises(UserError, match="answers prompt 3 a second time"):
        Parts(tmp_path)


# ---------------------------------------------------------------- learning


@pytest.fixture(scope="module")
def whole(world: World) -> Callable[[str], Path]:
    """The run of one process, by family."""

    def run(drafter: str) -> Path:
        folder = world.folder(f"one-{drafter}")
        if not folder.exists():
            assert main([str(world.recipe(f"one-{drafter}", drafter))]) == 0
        return folder

    return run


def apart(one: Path, two: Path) -> float:
    """The largest distance of two runs' final weights."""
    a, b = training.weights(one, STEPS), training.weights(two, STEPS)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def same(one: Path, two: Path) -> None:
    """Weights and log to rounding; rows, in their order, exactly. AdamW divides out what scales all
    gradients, so their norm is compared too."""
    assert apart(one, two) < 1e-3
    assert training.state(one, STEPS)["cursor"] == training.state(two, STEPS)["cursor"]
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert (a["kind"], a["step"], a["tokens"]) == (b["kind"], b["step"], b["tokens"])
        for key in {"loss", "tau", "alpha", "grad_norm"} & a.keys():
            if not isinstance(a[key], str):  # a switch names its loss
                assert b[key] == pytest.approx(a[key], rel=1e-3), key


def test_gradients_twice_too_large_are_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault, which leaves the weights where they were: all gradients are clipped."""
    one, two = (world.folder(name) for name in ("clipped", "doubled"))
    assert main([str(world.recipe("clipped", clip=0.01))]) == 0
    monkeypatch.setattr(learner, "summed", lambda _, t: t if t.shape == (2,) else 2 * t)
    assert main([str(world.recipe("doubled", clip=0.01))]) == 0
    assert apart(one, two) < 1e-3
    with pytest.raises(AssertionError, match="grad_norm"):
        same(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle", "small"])
def test_two_processes_train_like_one(
    world: World, whole: Callable[[str], Path], tmp_path: Path, drafter: str
) -> None:
    """At the same global batch: gradients are sums over one denominator, whatever rows they hold.

    Planted fault: each process divides by its own.
    """
    for name, before in (("pair", None), ("means", training.local_denominators)):
        path = str(world.recipe(f"{name}-{drafter}", drafter, rows=1))
        pair = training.launch(training.train_together, 2, tmp_path / name, [path], before)
        assert ended(pair) == [0, 0], (tmp_path / f"{name}.0").read_text()
    same(whole(drafter), world.folder(f"pair-{drafter}"))
    assert apart(whole(drafter), world.folder(f"means-{drafter}")) > 1e-2


MOVING: dict[str, Any] = {
    "loss": ["kl", "lk"], "switch_alpha": [0.22], "depth_weights": "reach", "feature_noise": 0.1,
    "rows": 1, "warmup": 0,
}  # fmt: skip


@pytest.mark.slow
def test_processes_without_rows_measure_and_draw_as_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun by one process and ended by three, the third of which gets no row of a step's two: with
    noise on features, a curriculum, LK, and weights that follow what the run measures.

    Planted faults: each goes by its own measurements; noise by the row's place in its process.
    """
    assert main([str(world.recipe("moving", **MOVING))]) == 0
    switched = [m["step"] for m in metrics(world.folder("moving")) if m["kind"] == "switch"]
    assert 2 < switched[0] < STEPS
    faults = {"alone": training.measures_alone, "numbers": training.numbers_its_own_rows}
    for name, before in ({"together": None} | faults).items():
        path = str(world.recipe(name, **MOVING))
        with monkeypatch.context() as patch:
            training.stop_after(patch, 2)
            assert main([path]) == loop.STOPPED
        three = training.launch(training.train_together, 3, tmp_path / name, [path], before)
        assert ended(three) == [0, 0, 0], (tmp_path / f"{name}.0").read_text()
    same(world.folder("moving"), world.folder("together"))
    for name in faults:
        with pytest.raises(AssertionError):
            same(world.folder("moving"), world.folder(name))


@pytest.mark.slow
def test_a_cache_that_another_run_fills_is_told_by_all(world: World, tmp_path: Path) -> None:
    """In one line each: the others wait where the main process gave up."""
    path = str(world.recipe("cached", steps=1, feature_cache="1GB"))
    assert main([path]) == 0
    (shard,) = (world.samples / cache.FOLDER).glob("*/*.safetensors")
    shard.unlink()
    shutil.rmtree(world.folder("cached"))
    with FileLock(shard.with_name(".lock")):
        impatient = training.impatient
        pair = training.launch(training.train_together, 2, tmp_path / "log", [path], impatient)
        assert ended(pair) == [2, 2]
    words = [(tmp_path / f"log.{index}").read_text() for index in (0, 1)]
    assert "another run is filling" in words[0] and "of this launch has ended" in words[1]
    assert not any("Traceback" in said for said in words)


class Broken:
    """A process whose collectives fail."""

    num_processes, process_index = 2, 0

    def __init__(self, error: Exception) -> None:
        self.error = error

    def reduce(self, tensor: Any, reduction: str) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes differ")]
)
def test_an_error_of_its_own_is_not_blamed_on_others(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        processes.summed(Broken(error), torch.ones(1))  # type: ignore[arg-type]
    lost = torch.distributed.DistBackendError("NCCL: remote process exited")
    with pytest.raises(UserError, match="another process of this launch has ended"):
        processes.summed(Broken(lost), torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.slow
def test_killed_training_goes_on_with_another_count(
    world: World, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """One of two is killed between two checkpoints; the other says so within seconds; three go on
    with the same rows in the same order. Planted fault: three rows' worth of a step each."""
    path = str(world.recipe("killed", rows=1))
    run = world.folder("killed")
    pair = training.launch(training.train_together, 2, tmp_path / "log", [path], training.slowed)
    training.kill(pair[1], lambda: (run / "checkpoint-4").exists())
    killed = time.monotonic()
    assert ended(pair) == [2, -signal.SIGKILL]
    assert time.monotonic() - killed < 30
    words = (tmp_path / "log.0").read_text()
    assert "another process of this launch has ended" in words and "Traceback" not in words
    assert checkpoint.steps(run) == [4]
    forgetful = tmp_path / "runs" / "killed"
    shutil.copytree(run, forgetful, symlinks=True)
    other = tmp_path / "killed.yaml"
    other.write_text(Path(path).read_text().replace(str(run.parent), str(forgetful.parent)))
    for recipe, before in ((path, None), (str(other), training.forgets_the_batch)):
        three = training.launch(training.train_together, 3, tmp_path / "log", [recipe], before)
        assert ended(three) == [0, 0, 0], (tmp_path / "log.0").read_text()
    assert "resuming" in (tmp_path / "log.0").read_text()
    same(whole("eagle"), run)
    assert training.state(forgetful, STEPS)["cursor"] != training.state(run, STEPS)["cursor"]


@pytest.mark.slow
def test_processes_that_begin_apart_are_refused(world: World, tmp_path: Path) -> None:
    """As on nodes whose folders are not the same: all of them say so, before the first step."""
    paths = [str(world.recipe("apart")), str(world.recipe("aside", seed=1))]
    pair = training.launch(training.train_together, 2, tmp_path / "log", paths, None)
    assert ended(pair) == [2, 2]
    for index in (0, 1):
        words = (tmp_path / f"log.{index}").read_text()
        assert "processes begin with different steps, samples or weights" in words
    assert not checkpoint.steps(world.folder("apart"))
