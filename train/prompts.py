"""The questions put to a target: the project's own, or a user's file; and their token ids."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import Target

log = logging.getLogger(__name__)

HELDOUT_EVERY = 8


@dataclass(frozen=True)
class Prompt:
    """One question: a conversation that the chat template turns into ids, or the ids themselves."""

    messages: tuple[dict[str, str], ...] | None
    ids: tuple[int, ...] | None
    domain: str

    @cached_property
    def key(self) -> str:
        """A hash of the content: an id that row order, domain and file cannot change."""
        content = self.ids if self.messages is None else self.messages
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def asked(text: str, domain: str) -> Prompt:
    """A single user turn."""
    return Prompt(({"role": "user", "content": text},), None, domain)


def product_prompts(split: Literal["train", "heldout"]) -> list[Prompt]:
    """draftsmith's own prompts; every eighth of a domain is held out."""
    import yaml

    text = (files("draftsmith.train") / "prompts.yaml").read_text(encoding="utf-8")
    out = []
    for domain, questions in yaml.safe_load(text).items():
        for i, question in enumerate(questions):
            if (i % HELDOUT_EVERY == HELDOUT_EVERY - 1) == (split == "heldout"):
                out.append(asked(question, domain))
    return out


# ---------------------------------------------------------------- files


FIELDS = ("messages", "turns", "prompt", "prompt_ids")  # texts before ids: those fit one tokenizer


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON array or of JSONL rows: `messages`, `turns`, `prompt` or `prompt_ids`.

    See `prompts_of`; the default domain is the file's name. Raises UserError.
    """
    return prompts_of(json_rows(path), str(path), path.stem)


def prompts_of(
    rows: Iterable[tuple[str, dict[str, Any]]], source: str, domain: str
) -> list[Prompt]:
    """Prompts of (where, row) pairs.

    The first of FIELDS that a row has counts, and is the same for all rows. `prompt` may be a
    list, which is then read as `turns`. Of turns only the first is used for now; `messages` are
    used up to the last that is not the assistant's. `category` or `source` becomes the domain.
    Raises UserError naming the row.
    """
    out = []
    cut = 0
    kind = ""
    for where, row in rows:
        found = next((name for name in FIELDS if row.get(name) is not None), "")
        kind = kind or found
        if found and found != kind:
            raise UserError(
                f"{where}: asks by {found} where the rows before it ask by {kind}; give all rows "
                "of a file the same fields"
            )
        prompt, more = _prompt(where, row, domain)
        cut += more
        out.append(prompt)
    if cut:
        log.warning("%s: %d of %d rows have later turns, which are not used", source, cut, len(out))
    return out


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) for each object of a JSON array or JSONL file: `where` names file and place.

    A byte order mark, CRLF and blank lines are tolerated. JSONL is read line by line. Raises
    UserError: no such file, not UTF-8, not JSON, a row that is no object, no rows at all.
    """
    count = 0
    try:
        # newline="\n": only these end a row. Some writers leave U+2028 and the like in strings.
        with open(path, encoding="utf-8-sig", newline="\n") as stream:
            start = stream.read(1)
            while start.isspace():
                start = stream.read(1)
            stream.seek(0)
            for where, row in _array(path, stream.read()) if start == "[" else _lines(path, stream):
                if not isinstance(row, dict):
                    raise UserError(
                        f"{where}: {type(row).__name__} where an object was expected; write one "
                        'like {"prompt": "..."}'
                    )
                count += 1
                yield where, row
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); check the path") from None
    if not count:
        raise UserError(f"{path}: holds no rows; expected a JSON array or one JSON object a line")


def _array(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise _not_json(f"{path} line {error.lineno}", error) from None
    for i, row in enumerate(rows, start=1):
        yield f"{path} row {i}", row


def _lines(path: Path, stream: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for i, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{path} line {i}"
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            raise _not_json(where, error) from None


def _not_json(where: str, error: json.JSONDecodeError) -> UserError:
    return UserError(
        f"{where}: not JSON ({error.msg} at column {error.colno}); write one JSON object a line, "
        "or one JSON array"
    )


def _prompt(where: str, row: dict[str, Any], default_domain: str) -> tuple[Prompt, bool]:
    """A row's prompt, and whether it had later turns that are left out."""
    domain = str(row.get("category") or row.get("source") or default_domain)
    if row.get("messages") is not None:
        messages = _messages(where, row["messages"])
        last = max(i for i, m in enumerate(messages, start=1) if m["role"] != "assistant")
        return Prompt(tuple(messages[:last]), None, domain), last < len(messages)
    field = "prompt" if row.get("turns") is None else "turns"
    turns = row.get(field)
    if isinstance(turns, list) or field == "turns":
        if not isinstance(turns, list) or not turns:
            raise UserError(f'{where}: {field} is no list of texts; write ["..."]')
        return asked(_text(where, f"{field}[0]", turns[0]), domain), len(turns) > 1
    if row.get("prompt") is not None:
        return asked(_text(where, "prompt", row["prompt"]), domain), False
    if row.get("prompt_ids") is not None:
        return Prompt(None, token_ids(where, "prompt_ids", row["prompt_ids"]), domain), False
    raise UserError(
        f"{where}: has no text (fields: {', '.join(map(str, row)) or 'none'}); give it prompt, "
        "turns, messages or prompt_ids"
    )


def _messages(where: str, messages: Any) -> list[dict[str, str]]:
    whole = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not whole or not any(m["role"] != "assistant" and m["content"].strip() for m in messages):
        raise UserError(
            f"{where}: messages is no list of {{role, content}} texts with a question in it; "
            'write [{"role": "user", "content": "..."}]'
        )
    for i, m in enumerate(messages):
        _check_text(where, f"messages[{i}]", m["role"] + m["content"])
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {field} holds no text; write a question there, or drop the row")
    _check_text(where, field, value)
    return value


def _check_text(where: str, field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a pair, tokenizers refuse it
        raise UserError(
            f"{where}: {field} holds half a character ({text[error.start]!a} at {error.start}); "
            "remove it"
        ) from None


def token_ids(where: str, field: str, value: Any) -> tuple[int, ...]:
    """`value` as token ids; raises UserError unless it is a list of integers >= 0, not empty."""
    if (
        not isinstance(value, list)
        or not value
        or not all(type(x) is int and x >= 0 for x in value)
    ):
        raise UserError(
            f"{where}: {field} is no list of token ids; write [1, 2, 3] or drop the row"
        )
    return tuple(value)


# ---------------------------------------------------------------- token ids


def encode(prompts: Sequence[Prompt], target: Target) -> list[list[int]]:
    """Each prompt's token ids, by the chat template as it is, with the generation prompt.

    Raises UserError: the tokenizer has no chat template or it refuses the conversation, a prompt
    yields no tokens, or given ids lie outside the target's vocabulary.
    """
    from jinja2 import TemplateError

    tokenizer = target.tokenizer
    if any(p.messages is not None for p in prompts) and not tokenizer.chat_template:
        raise UserError(
            f"target {target.source.spec}: its tokenizer has no chat template; use the instruct "
            "model, or give prompts as prompt_ids"
        )
    out = []
    for i, prompt in enumerate(prompts):
        if prompt.messages is None:
            ids = list(prompt.ids or ())
        else:
            try:
                ids = tokenizer.apply_chat_template(
                    [dict(m) for m in prompt.messages],
                    add_generation_prompt=True,
                    return_dict=False,
                )
            except TemplateError as error:
                raise UserError(
                    f"prompt {i} ({_start(prompt)}): the chat template refuses it "
                    f"({' '.join(str(error).split())}); change its messages"
                ) from None
        if not ids:
            raise UserError(f"prompt {i} ({_start(prompt)}): yields no tokens; drop it")
        if max(ids) >= target.vocab_size:
            raise UserError(
                f"prompt {i} ({_start(prompt)}): token {max(ids)} is outside the vocabulary of "
                f"{target.source.spec} ({target.vocab_size}); its ids are another tokenizer's"
            )
        out.append(list(ids))
    return out


def _start(prompt: Prompt) -> str:
    """The beginning of a prompt, for a message."""
    shown = prompt.messages[-1]["content"] if prompt.messages else str(list(prompt.ids or ()))
    line = " ".join(shown.split())
    return repr(line if len(line) <= 40 else line[:37] + "...")
