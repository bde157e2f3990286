"""wandb and TensorBoard, through accelerate: `tracker: wandb`, `tensorboard`, or a list of both.

Both get the keys that recipes/README.md lists, at the run's step; runs/NAME/metrics.jsonl holds the
same values, nested.

wandb writes into runs/NAME/wandb (WANDB_MODE=offline needs no account), TensorBoard into
runs/NAME/draftsmith: `tensorboard --logdir runs`. A run that goes on is one run in wandb: its id
there lies in runs/NAME/.wandb-id.
"""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from draftsmith.drafters.errors import UserError, cannot_write, reason
from draftsmith.train.recipe import Recipe

PROJECT = "draftsmith"
FOLDERS = ("wandb", PROJECT)  # what trackers leave in a run's folder


def check(recipe: Recipe) -> None:
    """Raises UserError unless the recipe's trackers are installed, and wandb lets us in."""
    for name in recipe.tracker:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracker: {name} is not installed; pip install {name}, or leave it")
    if "wandb" in recipe.tracker:
        import wandb  # takes seconds

        try:
            wandb.login()  # does nothing where WANDB_MODE is offline or disabled
        except wandb.Error as error:
            raise UserError(
                f"tracker: wandb cannot log in ({reason(error)}); run `wandb login`, or set "
                "WANDB_MODE=offline"
            ) from None


def start(accelerator: Accelerator, recipe: Recipe) -> None:
    """Opens the recipe's trackers on the main process, the recipe beside them."""
    if not recipe.tracker:
        return
    plain = (bool, int, float, str)  # TensorBoard takes nothing else
    values = {k: v if isinstance(v, plain) else str(v) for k, v in recipe.flat().items()}
    wandb: dict[str, Any] = {"name": recipe.name, "dir": str(recipe.folder)}
    if accelerator.is_main_process:
        wandb |= {"id": _wandb_id(recipe.folder), "resume": "allow"}
    accelerator.init_trackers(PROJECT, values, {"wandb": wandb})


def _wandb_id(folder: Path) -> str:
    """The run's id in wandb. Random: a name may be taken again, an id of wandb's may not. A run
    without a checkpoint begins anew there as well."""
    path = folder / ".wandb-id"
    stored = path.read_text() if path.is_file() else ""
    if not stored or not any(folder.glob("checkpoint-*")):
        stored = secrets.token_hex(4)
        try:
            path.write_text(stored)
        except OSError as error:
            raise cannot_write(path, error, "make room, or change runs") from None
    return stored


def flat(values: dict[str, Any]) -> dict[str, float]:
    """One line of the log as the keys above: lists by index, tables by key, no text, no None."""
    kind = values["kind"]
    out = {}
    for name, value in values.items():
        cells: list[tuple[str, Any]] = [(name, value)]
        if isinstance(value, dict):
            cells = [(f"{name}_{key}", v) for key, v in value.items()]
        elif isinstance(value, (list, tuple)):
            cells = [(f"{name}_{i}", v) for i, v in enumerate(value)]
        out.update({f"{kind}/{k}": v for k, v in cells if isinstance(v, (int, float))})
    return out
