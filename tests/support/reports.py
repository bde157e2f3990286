"""Reports of a tiny run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from draftsmith.recipes import report as recipe_report
from draftsmith.recipes.report import Report
from draftsmith.train.run import main
from training import World


def settings(run: Path) -> Report:
    return Report(
        run, prompts=run.parents[1] / "asked.jsonl", limit=12, decode_limit=6, max_new_tokens=20
    )


def reported_run(root: Path) -> Path:
    """A trained run, its prompts in three domains, and its report."""
    before = signal.getsignal(signal.SIGTERM)
    world = World(root)
    assert main([str(world.recipe("one", steps=16, save_every=4))]) == 0
    signal.signal(signal.SIGTERM, before)
    rows = [json.loads(line) for line in world.prompts.read_text().splitlines()]
    domains = ["sea"] * 3 + ["hill"] * 8 + ["wood"] * 4
    asked = [row | {"category": name} for row, name in zip(rows, domains, strict=False)]
    (world.root / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    recipe_report.report(settings(world.folder("one")))
    return world.folder("one")
