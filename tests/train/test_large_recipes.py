"""Recipes for targets that no machine here can hold, trained for two steps on tiny stand-ins.

test_plan.py plans them on the real shapes. Here each runs on a model of the same architecture:
faults are settings that a step, a replay or a checkpoint of such a target cannot take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.train.journal import read_metrics
from draftsmith.train.run import main
from places import RECIPES
from training import sample, save_target, write_prompts

LARGE = sorted(path.stem for path in RECIPES.glob("*8b*.yaml"))
SIZES = ["steps=2", "rows=1", "accumulation=1", "length=64", "heldout=4", "save_every=2"]
FITTING = {  # what only the real vocabulary or models can hold
    "draft_vocab": "draft_vocab=32",
    "mask_token": "mask_token=0",
    "checkpoint": "checkpoint={small}",
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder with a tiny target of an architecture, its samples and a smaller model."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            save_target(root / "target", family=name, layers=8)
            save_target(root / "small", seed=1)
            sample(root / "target", write_prompts(root / "prompts.jsonl"), root / "samples")
            made[name] = root
        return made[name]

    return make


@pytest.mark.parametrize("name", LARGE)
def test_trains_on_a_stand_in(name: str, stand_in: Callable[[str], Path]) -> None:
    root = stand_in("Qwen3" if name.startswith("qwen3") else "Llama")
    text = (RECIPES / f"{name}.yaml").read_text()
    fitting = [
        word.format(small=root / "small") for key, word in FITTING.items() if f"\n{key}:" in text
    ]
    where = [f"target={root / 'target'}", f"samples={root / 'samples'}", f"runs={root / 'runs'}"]
    assert main([name, *where, *SIZES, *fitting]) == 0
    replays = [m for m in read_metrics(root / "runs" / name) if m["kind"] == "replay"]
    assert replays[-1]["step"] == 2 and replays[-1]["tau"] >= 1
    assert (root / "runs" / name / "best" / "model.safetensors").is_file()


def test_there_are_large_recipes() -> None:
    """Each family has one; the parametrised test above passes on an empty folder."""
    drafted = {name.split("-")[-1] for name in LARGE}
    known = {"eagle3", "eagle31", "eagle1", "medusa", "medusa2", "hydra", "mtp", "small"}
    known |= {"dflash", "dspark", "peagle"}
    assert drafted >= known
