"""`make gpu-check` runs on the CPU at a tiny size, so that it cannot rot between GPUs.

.venv/bin/pytest tests/benchmarks/test_gpu_check.py
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draftsmith.eval.decoder.round import Rounds
from places import BENCHMARKS


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


def check(script: ModuleType, folder: Path, seconds: float = 300.0) -> Any:
    return script.Check(True, folder, time.perf_counter() + seconds, torch.device("cpu"))


@pytest.mark.slow
def test_every_part_passes_at_a_tiny_size(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--output", str(tmp_path)])
    assert script.main() == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    states = {name: part["state"] for name, part in report["parts"].items()}
    assert states.pop("graphs") == states.pop("compiled") == "skipped"
    assert set(states.values()) == {"passed"}, report["parts"]
    timed = report["parts"]["bench 8B shape"]["found"]
    assert len(timed["cells"]) == 3
    assert all(cell["synthetic"] for cell in timed["cells"].values())


def test_a_wrong_text_fails_the_check(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every draft is accepted. The report says failed, and the exit code with it."""
    plain = Rounds._judge

    def lenient(self: Rounds) -> Any:
        out = plain(self)
        if out.path is None:
            out.count = self.proposal.length - 1
        return out

    monkeypatch.setattr(Rounds, "_judge", lenient)
    monkeypatch.setattr(script, "PARTS", {"identity": script.PARTS["identity"]})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--output", str(tmp_path)])
    assert script.main() == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["parts"]["identity"]["state"] == "failed"
    assert "texts differ" in report["parts"]["identity"]["why"]


def test_time_is_kept(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that the time left does not hold are skipped by name; a bench keeps its first cells."""
    spent = script.run(check(script, tmp_path, -1.0))
    assert {part["state"] for part in spent["parts"].values()} == {"skipped"}
    assert set(spent["parts"]) == set(script.PARTS)
    started = check(script, tmp_path)
    monkeypatch.setattr(script, "PARTS", {"bench": script.PARTS["bench 8B shape"]})
    plain = script.bench.measure

    def last(*args: Any) -> Any:
        started.deadline = 0.0
        return plain(*args)

    monkeypatch.setattr(script.bench, "measure", last)
    part = script.run(started)["parts"]["bench"]
    assert part["state"] == "cut" and len(part["found"]["cells"]) == 1
