"""Walks a page's numbers: each must be a rounding of a figure in report.json."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any


class Visible(HTMLParser):
    """What a reader sees of a page, axis scales left out; and the addresses it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[bool] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [str(given[name]) for name in ("src", "href") if name in given]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img") else []
        if tag not in ("meta", "br", "line", "polyline", "polygon"):
            scale = "tick" in (given.get("class") or "").split()
            self.open.append(scale or tag in ("style", "sub", "sup"))

    def handle_endtag(self, tag: str) -> None:
        if self.open:
            self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if not any(self.open):
            self.words.append(data)


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?%?")


def known_numbers(value: Any) -> Iterator[Any]:
    """Every number in report.json, those within its texts too."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from known_numbers(name)
            yield from known_numbers(inner)
    elif isinstance(value, list):
        yield len(value)
        for inner in value:
            yield from known_numbers(inner)
    elif isinstance(value, str):
        yield from NUMBER.findall(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def strangers(words: str, report: dict[str, Any]) -> list[str]:
    """Numbers in a text that are no rounding of any figure of report.json."""
    found = list(known_numbers(report))
    spelled = {n for n in found if isinstance(n, str)}
    exact = [abs(n) for n in found if not isinstance(n, str)]
    out = []
    for text in NUMBER.findall(words):
        plain = text.replace(",", "").rstrip("%")
        digits = len(plain.partition(".")[2])
        scale = 100 if text.endswith("%") else 1
        if text in spelled or text.rstrip(",") in spelled:
            continue
        if not any(f"{scale * n:.{digits}f}" == plain for n in exact):
            out.append(text)
    return out
