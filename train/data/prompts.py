"""The questions put to a target: a conversation's turns, or token ids; and the project's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal

HELDOUT_EVERY = 8

Messages = tuple[dict[str, Any], ...]

# What json.loads raises, for numbers of too many digits and for nesting too deep as well.
NOT_JSON = (ValueError, RecursionError)


class Unusable(Exception):
    """A row or prompt that cannot be asked. reason is what is counted; detail is the first's."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


class Skips:
    """What was skipped, counted by its reason; where the first of each stood."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str, place: str, detail: str = "") -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self._first.setdefault(reason, place + (f": {detail}" if detail else ""))

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """The commonest reasons first, e.g. "3 not JSON (first: line 7)"."""
        order = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return ", ".join(f"{self.counts[r]} {r} (first: {self._first[r]})" for r in order)


@dataclass(frozen=True)
class Prompt:
    """What a target is asked: a conversation, token ids, or a text that it continues.

    messages: what stands before the target's first answer, for the chat template. later: the
    messages before each further answer; what the target itself said stands between them. template:
    what the template is given besides (`tools`, `enable_thinking`, ..). text: continued from its
    first `prefix` tokens on.
    """

    messages: Messages | None
    ids: tuple[int, ...] | None
    domain: str
    later: tuple[Messages, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    prefix: int = 0

    @cached_property
    def key(self) -> str:
        """A hash of the content: an id that row order, domain and file cannot change."""
        content: Any = self.ids if self.messages is None else self.messages
        if self.text is not None:
            content = {"text": self.text, "prefix": self.prefix}
        if self.later or self.template:
            content = {"turns": [content, *self.later], "template": dict(self.template)}
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def first_turn(self) -> Prompt:
        """The same without its later turns."""
        return replace(self, later=())

    @property
    def shown(self) -> str:
        """The beginning of the question, for a message."""
        text = self.text or str(list(self.ids or ()))
        if self.messages:
            text = self.messages[-1]["content"]
        line = " ".join(text.split())
        return repr(line if len(line) <= 40 else line[:37] + "...")


def plain_yaml(text: str) -> Any:
    """YAML in which a date stays the text that it was written as: templates write it so."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [(tag, form) for tag, form in known if not tag.endswith(":timestamp")]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return yaml.load(text, Loader=Loader)


def asked(text: str, domain: str) -> Prompt:
    """A single user turn."""
    return Prompt(({"role": "user", "content": text},), None, domain)


def product_prompts(split: Literal["train", "heldout"]) -> list[Prompt]:
    """draftsmith's own prompts; every eighth of a domain is held out."""
    import yaml

    text = (files("draftsmith.train.data") / "prompts.yaml").read_text(encoding="utf-8")
    out = []
    for domain, questions in yaml.safe_load(text).items():
        for i, question in enumerate(questions):
            if (i % HELDOUT_EVERY == HELDOUT_EVERY - 1) == (split == "heldout"):
                out.append(asked(question, domain))
    return out
