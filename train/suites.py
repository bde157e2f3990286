"""Prompt sets by name: a file, a folder of files, or a data set on the hub.

    mine.jsonl, mine.json     one file
    spec_bench/               every .jsonl and .json file of a folder, by name; subfolders are not
                              looked into
    org/name                  a data set on the hub, through `datasets`: its test split, else its
                              validation split, else train

Rows are read as `prompts.read_prompts` says: `turns` (Spec-Bench, MT-Bench), `prompt`, `messages`
or `prompt_ids`, one of them throughout a file; `category` becomes the domain.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.source import HUB_ID, HUB_TIMEOUT
from draftsmith.train.prompts import Prompt, prompts_of, read_prompts
from draftsmith.train.storage import library

log = logging.getLogger(__name__)

SPLITS = ("test", "validation", "train")  # the first that a data set has


def read_suite(spec: str) -> list[Prompt]:
    """The prompts that `spec` names (forms: see the top), in order.

    A path wins over a hub name. Raises UserError: no such path or data set, a folder without
    files, a hub that cannot be reached, and what `read_prompts` raises.
    """
    path = Path(os.path.abspath(os.path.expanduser(spec)))
    if path.is_dir():
        return _folder(path)
    if path.exists() or path.suffix in (".json", ".jsonl") or not HUB_ID.fullmatch(spec):
        return read_prompts(Path(spec))
    return list(prompts_of(_hub_rows(spec), spec, spec.rpartition("/")[2]))


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, in turn from each domain as long as it lasts.

    A suite lies sorted by category: its first prompts would stand for one of them.
    """
    place: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        place[prompt.domain] = place.get(prompt.domain, -1) + 1
        ranked.append((place[prompt.domain], i))
    return [prompts[i] for _, i in sorted(ranked)[:limit]]


def _folder(folder: Path) -> list[Prompt]:
    files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jsonl"))
    if not files:
        raise UserError(f"prompts {folder}: the folder has no .jsonl or .json file; name another")
    return [prompt for file in files for prompt in read_prompts(file)]


def _hub_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) for each row of a data set on the hub, of the split that SPLITS chooses."""
    _check_reachable(name)
    datasets = library()
    try:
        splits = datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(
            f"prompts {name}: cannot be read from the hub ({line}); download it, and name a file"
        ) from None
    split = next((s for s in SPLITS if s in splits), None)
    if split is None:
        raise UserError(f"prompts {name}: has no split {' or '.join(SPLITS)}; name a file of it")
    log.info("prompts %s: %d rows of its split %s", name, len(splits[split]), split)
    for i, row in enumerate(splits[split], start=1):
        yield f"{name} {split} row {i}", row


def _check_reachable(name: str) -> None:
    """One short request: without a network `datasets` retries for minutes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    problem = "neither a file nor a folder here, nor a data set on the hub; check the name"
    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT)
        return
    except RepositoryNotFoundError:
        pass
    except Exception as error:  # the transport's own classes, which changed with hub 2.0
        problem = (
            f"neither a file nor a folder here, and the hub cannot be reached "
            f"({type(error).__name__}); check the name and the connection, or name a file"
        )
    raise UserError(f"prompts {name}: {problem}")
