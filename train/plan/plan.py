"""What a recipe will take, from configs alone: parameters, memory by part, disk, tokens, time.

No weights are loaded: target and drafter are built on torch's meta device (outline.py). How figures
come about: cost.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from draftsmith.drafters.errors import UserError
from draftsmith.train import checkpoint
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.plan import cost
from draftsmith.train.plan.outline import Outline, recipe_texts
from draftsmith.train.recipe import Recipe
from draftsmith.train.states import cache


@dataclass(frozen=True)
class Plan:
    """memory and disk in bytes, seconds, by part; parts of memory are alive at the same time.

    memory and seconds are of one of the `processes`. features: by where the target's states come
    from (online, or kept on disk in a dtype), the disk that takes in bytes and the tokens that the
    target reads for all of training. passes: how often that goes through the texts it learns from.
    """

    device: str
    processes: int
    target_parameters: int
    drafter_parameters: int  # trained
    memory: dict[str, int]
    disk: dict[str, int]
    features: dict[str, tuple[int, int]]
    tokens: dict[str, int]
    passes: float
    seconds: dict[str, float]


def plan(
    recipe: Recipe, timed: bool = True, prompts: list[Prompt] | None = None, processes: int = 1
) -> Plan:
    """The plan of a recipe on this machine; timed False leaves times out, and measures nothing.

    prompts: the recipe's, where the caller has read them. processes: how many a launch will have,
    each on a device like this one.

    Raises UserError as `Outline` does, and for samples or prompts that cannot be read.
    """
    outline, texts = Outline(recipe), recipe_texts(recipe, prompts)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learned, count = cost.read(recipe, texts, processes), len(texts.lengths)
    once = texts.epoch(recipe.length) * max(count - recipe.heldout, 1) / count
    return Plan(
        torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        processes,
        outline.target_size,
        outline.trained,
        cost.memory(recipe, outline, texts, device),
        cost.disk(recipe, outline, texts, device),
        cost.states(recipe, outline, texts, device, processes),
        {
            "prompts": texts.tokens - texts.made,
            "answers": texts.made,
            "learned": int(learned * cost.taught(recipe, texts)),
        },
        learned / once,
        cost.seconds(recipe, outline, texts, device, processes) if timed else {},
    )


def check(recipe: Recipe, prompts: list[Prompt] | None = None) -> None:
    """Raises UserError where memory or disk cannot hold the plan; what a run has made counts.
    prompts: see `plan`.
    """
    made = plan(recipe, timed=False, prompts=prompts)
    need, free = sum(made.memory.values()), _free_memory(made.device, bool(recipe.device_map))
    if need > free:
        part = max(made.memory, key=lambda name: made.memory[name])
        raise UserError(
            f"recipe {recipe.name}: needs about {_gib(need)} of memory, most for {part} "
            f"({_gib(made.memory[part])}), and {made.device} has {_gib(free)} free; lower rows, "
            "length, chunk or k, or take a smaller drafter"
        )
    folder = recipe.folder
    disk = dict(made.disk)
    states = disk.get("feature cache", 0)
    if recipe.feature_cache and states > recipe.feature_cache:
        raise cache.beyond(recipe.feature_cache, states)
    if recipe.samples is not None:  # it lies beside them, and may be there
        disk.pop("feature cache", None)
    done = len(checkpoint.steps(folder))
    disk["checkpoints"] -= done * disk["checkpoints"] // cost.checkpoints(recipe)
    if (folder / "samples").exists():
        disk.pop("samples", None)
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    need, free = sum(disk.values()), shutil.disk_usage(parent).free
    if need > free:
        raise UserError(
            f"{folder}: needs about {_gib(need)} of disk ({cost.checkpoints(recipe)} checkpoints: "
            f"{_gib(disk['checkpoints'])}), {_gib(free)} are free; raise save_every, or change runs"
        )


def _free_memory(device: str, all_devices: bool = False) -> int:
    """Bytes that this process may come to hold, within its container's limit; or on all devices."""
    if device != "cpu":
        every = range(torch.cuda.device_count()) if all_devices else [torch.cuda.current_device()]
        return sum(torch.cuda.mem_get_info(index)[0] for index in every)
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return free + psutil.Process().memory_info().rss


def table(made: Plan) -> Sequence[tuple[str, str, str]]:
    """The plan as (topic, part, figure) rows, sums included."""
    rows = [
        ("parameters", "target", f"{made.target_parameters:,}"),
        ("parameters", "drafter, trained", f"{made.drafter_parameters:,}"),
    ]
    for topic, parts in (("memory", made.memory), ("disk", made.disk)):
        rows += [(topic, part, f"{size / 2**20:,.0f} MiB") for part, size in parts.items()]
        rows.append((topic, "in all", _gib(sum(parts.values()))))
    rows += [
        ("features", part, f"{size / 2**20:,.0f} MiB, {tokens:,} target tokens")
        for part, (size, tokens) in made.features.items()
    ]
    rows += [("tokens", part, f"{count:,}") for part, count in made.tokens.items()]
    rows.append(("tokens", "passes over the texts learned from", f"{made.passes:.2f}"))
    rows += [("time", part, f"{s / 60:,.1f} min") for part, s in made.seconds.items()]
    rows.append(("time", "in all", f"{sum(made.seconds.values()) / 60:,.1f} min"))
    return rows


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
