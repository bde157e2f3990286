"""Tiny runs on disk: a saved target, prompts, samples and recipes, and processes that train.

A real process is needed for signals and kills, but importing torch takes most of its time: `fork`
starts one from a server that has imported everything already.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from draftsmith.drafters import base, storage
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import export
from draftsmith.train import checkpoint, disk, journal, learner, processes
from draftsmith.train.data.sources import read_prompts
from draftsmith.train.learner import Learner
from draftsmith.train.objective.weights import Sums
from draftsmith.train.run import main
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.writing import Parts
from draftsmith.train.states import cache

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"taps": [1, 2, 4], "draft_vocab": 32},
    "medusa": {"heads": 3, "draft_vocab": 32},
    "hydra": {"heads": 3, "layers": 2, "head": "target"},
    "eagle1": {"regression": 10, "feature_noise": 0.1},
    "mtp": {},
    "dflash": {"taps": [1, 3], "layers": 2, "block_size": 4, "draft_vocab": 32},
    "peagle": {"taps": [1, 4], "layers": 2, "draft_vocab": 32},
    "dspark": {"taps": [1, 3], "layers": 2, "block_size": 3, "markov_rank": 8},
    "small": {"layers": [0, 3]},
}


def save_target(
    folder: Path, seed: int = 0, template: bool = True, family: str = "Llama", **shape: Any
) -> Path:
    """A tiny model as an HF folder with its tokenizer."""
    tiny.hf_model(family, seed, **shape).save_pretrained(folder)
    words = tiny.tokenizer(shape.get("vocab", tiny.VOCAB))
    if not template:
        words.chat_template = None
    words.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int = 24) -> Path:
    """Questions of the tokenizer's words, as JSONL."""
    words = tiny.prompts(count)
    names = {i: w for w, i in tiny.tokenizer().get_vocab().items()}
    rows = [{"prompt": " ".join(names[i] for i in ids)} for ids in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sample(target: Path, prompts: Path, folder: Path, sampler: Sampler | None = None) -> Path:
    """The target's answers to a prompts file, as a samples folder."""
    of = Target.load(str(target))
    generate(of, read_prompts(prompts), sampler or Sampler(), 24, folder)
    return folder


class World:
    """A folder that holds a target, prompts and samples, in which recipes run."""

    def __init__(self, root: Path, with_samples: bool = True) -> None:
        self.root = root
        self.target = save_target(root / "target")
        self.prompts = write_prompts(root / "prompts.jsonl")
        self.samples = root / "samples"
        if with_samples:
            sample(self.target, self.prompts, self.samples)

    def recipe(self, name: str, drafter: str = "eagle", **changes: Any) -> Path:
        """Writes a recipe for runs/NAME. 9 steps of 2 micro-batches, in epochs of about 11 rows."""
        keys = {
            "name": name,
            "runs": str(self.root / "runs"),
            "target": str(self.target),
            "samples": str(self.samples),
            "drafter": drafter,
            **DRAFTERS.get(drafter, {}),
            "heldout": 5,
            "depths": 3,
            "k": 3,
            "steps": 9,
            "rows": 2,
            "accumulation": 2,
            "length": 64,
            "lr": 1e-2,
            "chunk": 64,
            "save_every": 4,
            "log_every": 3,
        } | changes
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(keys, sort_keys=False))
        return path

    def folder(self, name: str) -> Path:
        return self.root / "runs" / name


def command(recipe: Path, *overrides: str) -> list[str]:
    """The training command of a recipe, as a user would type it."""
    return [sys.executable, "-m", "draftsmith.train", str(recipe), *overrides]


def shell(words: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, away from the checkout."""
    return subprocess.run(
        words, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


def _train(recipe: str, threads: int, before: Callable[[], None] | None) -> None:
    torch.set_num_threads(threads)
    if before:
        before()
    sys.exit(main([recipe]))


def fork(recipe: Path, before: Callable[[], None] | None = None) -> BaseProcess:
    """A process that trains a recipe. before: a module's function that it calls first."""
    return _forked(_train, str(recipe), torch.get_num_threads(), before)


def offline() -> None:
    """wandb writes files alone."""
    os.environ["WANDB_MODE"] = "offline"


def launch(
    work: Callable[..., None], count: int, log: Path, *args: Any, **more: Any
) -> list[BaseProcess]:
    """Processes that do `work` together, as a launcher starts them; each one's words go to
    LOG.INDEX. work: a module's function of its own index and args."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"} | more
    return [
        _forked(
            _launched,
            shared | {"MASTER_PORT": port, "RANK": index, "LOCAL_RANK": index},
            log.with_name(f"{log.name}.{index}"),
            work,
            index,
            *args,
        )
        for index in range(count)
    ]


def _launched(
    environment: dict[str, Any], log: Path, work: Callable[..., None], *args: Any
) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    sys.stderr = log.open("w", buffering=1)
    work(*args)


def train_together(index: int, recipes: list[str], before: Callable[[], None] | None) -> None:
    """Trains recipes[index], or the last there is."""
    if before:
        before()
    sys.exit(main([recipes[min(index, len(recipes) - 1)]]))


def impatient() -> None:
    """A process that is silent for 10 seconds is dead: for a test's patience."""
    processes.LOST = 10.0


def answer_together(
    index: int, target: str, prompts: str, folder: str, slow: bool = False, batch: int = 2
) -> None:
    """A process's part of answering; slow: it takes a while over each batch."""
    add = Parts.add

    def slowly(self: Parts, rows: list[dict[str, Any]]) -> None:
        add(self, rows)
        time.sleep(0.2)

    if slow:
        Parts.add = slowly  # type: ignore[method-assign]
    impatient()  # they are idle in no step for so long
    try:
        with processes.launched() as here:
            generate(
                Target.load(target, here.device), read_prompts(Path(prompts)), Sampler(), 24,
                Path(folder), 0, batch, processes=here,
            )  # fmt: skip
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def fork_export(asked: export.Export) -> BaseProcess:
    """A process that exports, and sleeps when all is written but the card."""
    return _forked(_export, asked)


def _export(asked: export.Export) -> None:
    torch.set_num_threads(1)
    export.write_card = lambda *args: time.sleep(600)  # type: ignore[assignment]
    export.export_checkpoint(asked)


def _forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.train.run", "datasets", "pytest"])
    process = context.Process(target=function, args=args)
    process.start()
    return process


def kill(process: BaseProcess, ready: Callable[[], bool]) -> None:
    """Kills a process as soon as `ready`, looked at a thousand times a second."""
    deadline = time.monotonic() + 120
    while not ready():
        assert process.is_alive(), f"ended by itself, code {process.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


def kill_when(path: Path, ready: Callable[[], bool], before: Callable[[], None]) -> None:
    """Starts a run and kills it as soon as `ready`."""
    process = fork(path, before)
    kill(process, ready)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM reaches this process while a run is in that step."""
    whole = Learner.advance

    def stopped(self: Learner, states: Any) -> Any:
        if self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, states)

    monkeypatch.setattr(Learner, "advance", stopped)


# ---------------------------------------------------------------- what a killed process is like


def slowed() -> None:
    """In the process to be killed: each step and each file of a checkpoint takes a while, so that
    a moment between two of them can be met, on a machine of any speed."""
    step, flush, save = Learner.advance, disk.flush, torch.save

    def slow_step(self: Learner, states: Any) -> Any:
        time.sleep(0.05)
        return step(self, states)

    def slow_flush(file: Path) -> None:
        time.sleep(0.05)
        flush(file)

    def slow_save(state: Any, file: Path) -> None:
        """Half of the file first, as a slow disk would have it."""
        save(state, file)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        time.sleep(0.05)
        file.write_bytes(content)

    Learner.advance = slow_step  # type: ignore[method-assign]
    disk.flush = slow_flush
    torch.save = slow_save


def small_slow_shards() -> None:
    """A feature cache of several files, each of which stays half written for a while."""
    cache.SHARD = 70_000
    save = cache.save_file

    def slow_save(states: Any, file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        time.sleep(0.1)
        save(states, file, metadata)

    cache.save_file = slow_save


def written_in_place() -> None:
    """checkpoint.save as one would write it without a thought."""
    slowed()

    def save(
        folder: Path, step: int, drafter: base.Drafter, weights: Any, state: dict[str, Any]
    ) -> None:
        made = folder / f"checkpoint-{step}"
        made.mkdir()
        storage.save(drafter, made, weights)
        torch.save(state | {"step": step, "rng": checkpoint.rng_state()}, made / "state.pt")

    checkpoint.save = save  # type: ignore[assignment]


# ---------------------------------------------------------------- processes that do it wrong


def local_denominators() -> None:
    """As data parallel training has it: the mean of each process's own mean."""
    summed = learner.summed

    def own(accelerator: Any, tensor: torch.Tensor) -> torch.Tensor:
        whole = summed(accelerator, tensor)
        denominators = tensor.dtype == torch.float32 and tensor.shape == (2,)
        if denominators:
            return torch.stack([tensor[0] * accelerator.num_processes, whole[1]])
        return whole

    learner.summed = own


def measures_alone() -> None:
    """Each process goes by its own acceptance: LK's mix, moving weights, the curriculum."""
    Sums.reduced = lambda self, accelerator: self  # type: ignore[method-assign]


def numbers_its_own_rows() -> None:
    """Noise by a row's place in the process, not in the step."""
    noise = Learner._noise
    Learner._noise = lambda self, places: noise(  # type: ignore[method-assign]
        self, range(len(places))
    )


def forgets_the_batch() -> None:
    """A resumed run that reads as many rows a step as its processes suggest."""
    restore = checkpoint.restore

    def forgetful(folder: Path, step: int) -> dict[str, Any]:
        state = restore(folder, step)
        del state["batch"]
        return state

    checkpoint.restore = forgetful


# ---------------------------------------------------------------- comparing runs


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def state(run: Path, step: int) -> dict[str, Any]:
    path = run / f"checkpoint-{step}" / "state.pt"
    return torch.load(path, map_location="cpu", weights_only=False)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log that must repeat, without what depends on the clock."""
    clocks = ("seconds", "tokens_per_s")
    lines = [m for m in journal.read_metrics(run) if m["kind"] != "start"]
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines]


def differences(a: Path, b: Path, step: int) -> list[str]:
    """Where two runs differ at a step, bit for bit: weights, state, and metrics so far."""
    out = []
    left, right = weights(a, step), weights(b, step)
    if left.keys() != right.keys():
        return [f"tensors {left.keys() ^ right.keys()}"]
    out += [name for name in left if not torch.equal(left[name], right[name])]
    one, two = state(a, step), state(b, step)
    for key in sorted((one.keys() | two.keys()) - {"seconds"}):
        if not same(one.get(key), two.get(key)):
            out.append(f"state {key}")
    for line, other in zip(metrics(a), metrics(b), strict=False):
        if line != other:
            out.append(f"metrics {line} {other}")
    if len(metrics(a)) != len(metrics(b)):
        out.append("length of metrics")
    return out


def same(a: Any, b: Any) -> bool:
    """Equality through nested containers of tensors and arrays."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "tolist"):
        return a.tolist() == b.tolist()
    return a == b
