"""A quickstart small enough for a tiny target, and processes that run one and are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

import training
from draftsmith.eval.speed import speed_model
from draftsmith.recipes.quickstart import Demo, run_demo

STEPS = 4
TINY = ("steps=4", "save_every=2", "heldout=4", "length=256", "lr=1e-2")


def demo(target: Path) -> Demo:
    return Demo(
        target=str(target),
        prompts=16,
        max_new_tokens=12,
        batch_size=4,
        small=(*TINY, "layers=[0, 3]"),
        eagle=(*TINY, "taps=[1, 2, 4]", "draft_vocab=32"),
        heldout_prompts=4,
        decode_prompts=3,
        decode_tokens=12,
    )


def decode_longest(patch: pytest.MonkeyPatch) -> None:
    """Drafts of the longest k, whatever the clock says: counts must repeat."""
    patch.setattr(speed_model, "best_k", lambda costs, tau: max(tau))


def _run(folder: str, target: str, slow: bool) -> None:
    torch.set_num_threads(1)
    decode_longest(pytest.MonkeyPatch())
    if slow:
        training.slowed()
    sys.exit(run_demo(Path(folder), demo(Path(target))))


def fork(folder: Path, target: Path, slow: bool) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.recipes.quickstart", "datasets", "pytest"])
    process = context.Process(target=_run, args=(str(folder), str(target), slow))
    process.start()
    return process


def killed(folder: Path, target: Path, pattern: str, delay: float) -> None:
    """Starts a quickstart and kills it `delay` seconds after a file appears."""
    process = fork(folder, target, slow=True)
    deadline = time.monotonic() + 120
    while not any(folder.glob(pattern)):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(1e-3)
    time.sleep(delay)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
