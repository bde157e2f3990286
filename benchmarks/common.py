"""What the benchmark scripts share: cells that are run once, and tables built from their JSON.

A figure without its JSON is no result: each cell's file holds its values beside the command,
commit, versions, machine, seed and wall time. A cell whose file exists is not run again, so a long
script can be taken up where it was stopped; delete the file to measure anew.

Experiment data is not part of the project. Its folder is given as DATA=folder in the environment
and is written as $DATA in every command.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.passes import narrow
from draftsmith.drafters.target.target import Target
from draftsmith.eval.report.provenance import provenance
from draftsmith.train.states.computed import Computed

HERE = Path(__file__).resolve().parent


def data(name: str) -> Path:
    """A file of the experiment data. Raises UserError when DATA does not say where it lies."""
    folder = os.environ.get("DATA")
    if not folder or not (Path(folder) / name).exists():
        raise UserError(f"DATA: set it to the folder that holds {name}")
    return Path(folder) / name


def cell(path: Path, run: Callable[[], dict[str, Any]], seed: int | None = 0) -> dict[str, Any]:
    """The content of a cell's JSON; runs it first where the file does not exist."""
    if path.is_file():
        return json.loads(path.read_text())
    print(f"running {path.name}", file=sys.stderr, flush=True)
    began = time.perf_counter()
    values = run()
    values |= provenance() | {"seed": seed, "wall_seconds": time.perf_counter() - began}
    folder = os.environ.get("DATA")
    text = json.dumps(values, indent=1)
    if folder:
        text = text.replace(str(Path(folder)), "$DATA")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text + "\n")
    os.replace(scratch, path)
    return json.loads(text)


def plain_hf(hf: Any) -> Any:
    """A copy of an HF model with torch's linear layers and transformers' own attention."""
    out: Any = narrow.restore(copy.deepcopy(hf))
    out.set_attn_implementation("sdpa")
    return out.eval()


class Remembering:
    """States of each batch, computed once, with every tap that a family here reads: runs that learn
    from the same rows in the same order share the target's work."""

    def __init__(self, target: Target) -> None:
        L = target.num_layers
        self.computed = Computed(target, [2, L // 2, L - 3, "normed"])
        self.kept: dict[bytes, Batch] = {}

    def fill(self, batch: Batch, rows: list[list[int]]) -> Batch:
        key = batch.tokens.cpu().numpy().tobytes() + batch.segment.cpu().numpy().tobytes()
        if key not in self.kept:
            self.kept[key] = self.computed.fill(batch, rows)
        known = self.kept[key]
        return replace(batch.to(known.device), features=known.features, final=known.final)


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(v) for v in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
