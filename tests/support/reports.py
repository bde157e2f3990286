"""Reports of a tiny run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("datasets")

from draftsmith.recipes.report import Report


def settings(run: Path) -> Report:
    return Report(
        run, prompts=run.parents[1] / "asked.jsonl", limit=12, decode_limit=6, max_new_tokens=20
    )
