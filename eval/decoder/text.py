"""What the decoder writes, and where it stops: end tokens, a token limit, stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftsmith.drafters.target.shell import Shell


class Round(NamedTuple):
    """One verify pass: its anchor's position, and drafts proposed and accepted within the text."""

    anchor: int
    proposed: int
    accepted: int


@dataclass
class Text:
    """A prompt and the answer to it. finish: "" while being written, then "stop" or "length"."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    rounds: list[Round] = field(default_factory=list)


class Cutter:
    """Appends tokens to a text until it ends. The token that ends a text is its last."""

    def __init__(self, target: Shell, max_new_tokens: int, stop: Sequence[str] = ()) -> None:
        self.eos = set(target.eos_ids)
        self.limit = max_new_tokens
        self.stop = [s for s in stop if s]
        self.tokenizer = target.tokenizer
        # A character takes at most four tokens in byte-level vocabularies.
        self.tail = 4 * max(map(len, self.stop), default=0) + 8

    def append(self, text: Text, tokens: Sequence[int]) -> int:
        """Appends tokens up to the first that ends the text; returns how many were kept."""
        for count, token in enumerate(tokens, start=1):
            text.tokens.append(token)
            if token in self.eos or self._stopped(text):
                text.finish = "stop"
            elif len(text.tokens) >= self.limit:
                text.finish = "length"
            if text.finish:
                return count
        return len(tokens)

    def _stopped(self, text: Text) -> bool:
        """Whether the newest token completed a stop string (it may end inside the token)."""
        if not self.stop:
            return False
        written = self.tokenizer.decode(text.tokens[-self.tail :])
        before = self.tokenizer.decode(text.tokens[-self.tail : -1])
        return any(written.count(s) > before.count(s) for s in self.stop)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """The first place where two sequences differ, their ends included; None: they are equal."""
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


@contextmanager
def end_token(target: Shell, eos: int | None) -> Iterator[None]:
    """Another token ends a text for a while; None: one that never comes."""
    config = target.hf.generation_config
    before, config.eos_token_id = config.eos_token_id, [target.vocab_size if eos is None else eos]
    try:
        yield
    finally:
        config.eos_token_id = before
