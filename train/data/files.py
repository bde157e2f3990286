"""Rows of a file, whatever its format: each with its place, and those that cannot be read too.

    .jsonl .ndjson .json    an object a line, or an array of objects, or one object around an array
    .csv .tsv               a header, then rows; every value stays text
    .txt                    a text a line, as column `text`
    .parquet, and folders that `datasets` saved

Any but Parquet may be gzipped (.jsonl.gz). Other suffixes are read as JSON.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from draftsmith.drafters.errors import UserError, said
from draftsmith.train.data.prompts import NOT_JSON

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet")
BROKEN = (OSError, ValueError, KeyError, TypeError)  # what datasets and pyarrow raise on bad files
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Fault:
    """A row that cannot be read, and why."""

    problem: str


Row = tuple[str, dict[str, Any] | Fault]  # the place within the file, and what stands there


def library() -> Any:
    """The datasets library, quiet. Imported late: it takes seconds."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()  # whose files would lie among a user's samples
    datasets.utils.logging.set_verbosity_error()
    return datasets


def suffix(path: Path) -> str:
    """What a file holds, by its name: `.csv` of a.csv and of a.csv.gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def read_rows(path: Path) -> Iterator[Row]:
    """(place, row) of each row, blank lines left out; a row that cannot be read is a Fault.

    A byte order mark, CRLF and commas after the last element are tolerated. Only arrays are held
    in memory. Raises UserError: no such file, or it holds no rows at all.
    """
    readers = {".csv": _csv, ".tsv": _csv, ".txt": _text, ".parquet": _parquet}
    read = readers.get(suffix(path), _json)
    count = 0
    try:
        for count, row in enumerate(read(path), start=1):  # noqa: B007
            yield row
    except OSError as error:  # gzip's errors are among them
        reason = error.strerror or str(error) or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); check the path") from None
    if not count:
        raise UserError(f"{path}: holds no rows; expected a JSON array or one JSON object a line")


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


# ---------------------------------------------------------------- JSON


def _json(path: Path) -> Iterator[Row]:
    with _open(path) as stream:
        first = stream.readline().removeprefix(_BOM)
        while first.isspace():
            first = stream.readline()
        start = first.lstrip()[:1]
        if start == b"[" or (start == b"{" and suffix(path) == ".json" and not _is_json(first)):
            yield from _array(first + stream.read())
            return
    with _open(path) as stream:
        # Split at \n alone: some writers leave U+2028 and the like bare in strings.
        for i, line in enumerate(stream, start=1):
            line = line.removeprefix(_BOM) if i == 1 else line
            if line.strip():
                yield f"line {i}", _object(line)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except NOT_JSON:
        return False
    return True


def _object(line: bytes) -> dict[str, Any] | Fault:
    try:
        text = line.decode().strip()
        return _row(json.loads(text.removesuffix(",")))
    except UnicodeDecodeError:
        return Fault("not UTF-8 text")
    except json.JSONDecodeError as error:
        return Fault(f"not JSON ({error.msg} at column {error.colno})")
    except NOT_JSON as error:
        return Fault(f"not JSON that can be read ({error})")


def _row(value: Any) -> dict[str, Any] | Fault:
    if isinstance(value, dict):
        return value
    return Fault(f"{type(value).__name__} where an object was expected")


def _array(content: bytes) -> Iterator[Row]:
    """Objects of an array, one after the other, so that those before a fault are read."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        yield "file", Fault("not UTF-8 text")
        return
    decode = json.JSONDecoder().raw_decode
    pos = _skip(text, 0) + 1
    if text[pos - 1] == "{":
        yield from _around(text)
        return
    count = 0
    while (pos := _skip(text, pos)) < len(text) and text[pos] != "]":
        count += 1
        try:
            value, pos = decode(text, pos)
        except json.JSONDecodeError as error:
            yield f"row {count}", Fault(f"not JSON ({error.msg} at line {error.lineno})")
            return
        except NOT_JSON as error:
            yield f"row {count}", Fault(f"not JSON that can be read ({error})")
            return
        yield f"row {count}", _row(value)
        pos = _skip(text, pos)
        if text[pos : pos + 1] != ",":
            break
        pos += 1
    if text[pos : pos + 1] != "]":
        yield f"row {count + 1}", Fault("not JSON (the array is not closed)")
    elif _skip(text, pos + 1) < len(text):
        # Two files joined: what follows is not read, and may be most of it.
        yield f"row {count + 1}", Fault("text behind the end of the array (write one array)")


def _skip(text: str, pos: int) -> int:
    while pos < len(text) and text[pos].isspace():
        pos += 1
    return pos


def _around(text: str) -> Iterator[Row]:
    """Rows of {"data": [..]}; an object that holds no list of rows is a row itself."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        yield f"line {error.lineno}", Fault(f"not JSON ({error.msg})")
        return
    except NOT_JSON as error:
        yield "file", Fault(f"not JSON that can be read ({error})")
        return
    lists = [v for v in whole.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
    messages = lists and {"role", "from"} & lists[0][0].keys()
    if len(whole) != 1 or not lists or messages:
        yield "row 1", whole
        return
    for i, value in enumerate(lists[0], start=1):
        yield f"row {i}", _row(value)


# ---------------------------------------------------------------- other formats


def _csv(path: Path) -> Iterator[Row]:
    """By Python's own reader: pandas, which `datasets` uses, makes numbers and indices of text."""
    csv.field_size_limit(2**31 - 1)  # a document is one field; the default is 128 KiB
    with _open(path) as raw:
        # What is no UTF-8 becomes half characters, which the check of texts finds row by row.
        stream = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        head = stream.readline()
        mark = "\t" if suffix(path) == ".tsv" else ";" if head.count(";") > head.count(",") else ","
        try:
            for i, row in enumerate(csv.DictReader(chain([head], stream), delimiter=mark), 1):
                wide = None in row
                yield f"row {i}", Fault("more fields than the header") if wide else dict(row)
        except csv.Error as error:
            yield "file", Fault(f"not CSV ({error})")


def _text(path: Path) -> Iterator[Row]:
    with _open(path) as stream:
        for i, line in enumerate(stream, start=1):
            line = line.removeprefix(_BOM) if i == 1 else line
            try:
                text = line.decode().strip("\r\n")
            except UnicodeDecodeError:
                yield f"line {i}", Fault("not UTF-8 text")
                continue
            if text.strip():
                yield f"line {i}", {"text": text}


def _parquet(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory")
    datasets = library()
    try:
        whole = datasets.load_dataset(
            "parquet", data_files=[str(path)], split="train", streaming=True
        )
        for i, row in enumerate(whole, start=1):
            yield f"row {i}", row
    except (*BROKEN, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{path}: cannot be read ({said(error)}); copy it again") from None
