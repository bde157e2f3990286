"""A plan of a GGUF target reads its header. .venv/bin/pytest tests/train/plan/test_plan_gguf.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ggufs
from draftsmith.drafters.target.target import Target
from draftsmith.train.plan import cost, outline
from draftsmith.train.recipe import load


def test_a_plan_writes_no_copy_and_counts_the_one_that_a_load_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: minutes and gigabytes for a plan "from configs alone", of which it says nothing."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(cache))
    file = ggufs.write_gguf(tmp_path / "tiny.gguf", ggufs.tiny_model())
    chosen = load("smol-medusa", [f"target={file}", "draft_vocab=100"])
    texts = outline.recipe_texts(chosen)

    def disk() -> dict[str, int]:
        return cost.disk(chosen, outline.Outline(chosen), texts, torch.device("cpu"))

    planned, size = disk(), outline.Outline(chosen).target_size
    assert not cache.exists()
    weights = sum(p.numel() for p in ggufs.tiny_model().parameters())
    assert size == weights and planned["fp32 copy of the GGUF"] == 4 * weights
    Target.load(str(file))
    assert "fp32 copy of the GGUF" not in disk()
