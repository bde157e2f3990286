"""The batches of samples that are finished while a run still writes (FOLDER/parts/)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.train.samples import store


def _sizes(dataset: Any) -> list[int]:
    """Tokens of each row."""
    return [size for lengths, _ in store.chunks(dataset, "ids") for size in lengths.tolist()]


def _answers(part: Any) -> tuple[list[int], dict[int, str]]:
    """The indices of rows that hold a text; and of those that do not, why."""
    rows = list(zip(part["index"], part["finish"], _sizes(part), strict=True))
    return [i for i, _, size in rows if size], {i: why for i, why, size in rows if not size}


class Parts:
    """The finished batches of a run that is still writing, each a small dataset of its own.

    A row carries the `index` of its prompt; a conversation may take several rows, which then lie in
    one part. A row without ids stands for a prompt that was given up, `finish` saying why; it is
    asked again where a call goes on. A part's name holds its lowest index, so that several
    processes may add parts at once, its row count and the start of its content hash, so that one
    cut short is told apart. Raises UserError for parts that are broken, or answer a prompt twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / store.PARTS
        self.folder.mkdir(exist_ok=True)
        self.indices: list[int] = []  # of the stored rows that hold a text, in no order
        self.given_up: dict[int, str] = {}  # prompts, and why; a later part may answer them
        seen: set[int] = set()
        for part in self._paths():
            rows, given_up = _answers(self._read(part))
            self.given_up |= given_up
            if twice := seen.intersection(rows):
                raise UserError(
                    f"{part}: answers prompt {min(twice)} a second time; delete it and run again"
                )
            seen.update(rows)
            self.indices += rows

    def _paths(self) -> list[Path]:
        return sorted(p for p in self.folder.iterdir() if p.suffix != ".tmp")

    def _read(self, part: Path) -> Any:
        # In memory: thousands of mapped files would exceed a process's limit of open files.
        dataset = store.load(part, in_memory=True)
        try:
            _, rows, digest = part.name.split("-")
            count = int(rows)
        except ValueError:
            raise UserError(f"{part}: is no part of these samples; move it away") from None
        store.check(dataset, count, digest, part)
        return dataset

    def add(self, rows: dict[str, list[Any]]) -> None:
        """Stores rows, {column: values} with `index` among the columns."""
        datasets = store.library()
        value = datasets.Value
        features = datasets.Features(
            {
                "ids": datasets.Sequence(value("int32")),
                "made": datasets.Sequence(value("bool")),
                "finish": value("string"),
                "domain": value("string"),
                "key": value("string"),
                "index": value("int64"),
            }
        )
        dataset = datasets.Dataset.from_dict(rows, features=features)
        digest = store.content_hash(dataset)[:16]
        store.save(dataset, self.folder / f"{min(rows['index']):06d}-{len(dataset)}-{digest}")
        answered, given_up = _answers(dataset)
        self.indices += answered
        self.given_up |= given_up

    def merge(self) -> tuple[Any, dict[str, int]]:
        """Writes all rows that hold a text, in the order of their index, beside the parts.

        Returns the dataset, and how many prompts were given up for which reason.
        """
        final = self.folder.parent / store.ROWS
        whole = store.library().concatenate_datasets([self._read(part) for part in self._paths()])
        answered, given_up = _answers(whole)
        left = [given_up[i] for i in sorted(given_up.keys() - set(answered))]
        lost = {reason: left.count(reason) for reason in sorted(set(left))}
        if not answered:
            why = ", ".join(f"{count} {reason}" for reason, count in lost.items())
            problem = f"no prompt could be answered: {why}; see the server's log and run again"
            raise UserError(f"samples {final.parent}: {problem}")
        sizes, index = _sizes(whole), list(whole["index"])
        order = [i for i in sorted(range(len(index)), key=index.__getitem__) if sizes[i]]
        store.save(whole.select(order).remove_columns("index"), final)
        return store.load(final), lost

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
