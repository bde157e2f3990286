"""Small charts as inline SVG. Colours and type come from the page: one chart serves light and dark.

Axis labels carry class "tick": they are a scale, not measurements. Everything else that is written
into a chart is a figure of report.json. Hovering over a mark shows its value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 14, 40

Point = tuple[float, float]


@dataclass
class Chart:
    """A plot area with x and y ranges; marks are drawn in the order they are added.

    style of a mark: a CSS class of the page, s0, s1, .. for the series.
    """

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    height: int = HEIGHT
    left: int = LEFT
    parts: list[str] = field(default_factory=list)

    def pixels(self, x: float, y: float) -> Point:
        """A point in the picture."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        plot = self.height - TOP - BOTTOM
        return self.left + across * (WIDTH - self.left - RIGHT), TOP + (1 - up) * plot

    def y_axis(self, label: str = "") -> None:
        """Grid lines at round values, labelled."""
        for value in ticks(*self.y):
            (x0, y), (x1, _) = self.pixels(self.x[0], value), self.pixels(self.x[1], value)
            self.parts.append(f'<line class="grid" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" '
                              f'y2="{y:.1f}"/>')  # fmt: skip
            self.text(x0 - 7, y + 4, f"{value:g}", "tick end")
        if label:
            self.text(4, 8, label, "tick")

    def x_axis(self, label: str, marks: Sequence[tuple[float, str]]) -> None:
        """Labels below the plot area, and what they count."""
        for value, name in marks:
            x, y = self.pixels(value, self.y[0])
            self.text(x, y + 17, name, "tick middle")
        middle = (self.left + WIDTH - RIGHT) / 2
        self.text(middle, self.height - 5, label, "tick middle")

    def line(self, points: Sequence[Point], style: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.pixels(*p) for p in points))
        self.parts.append(f'<polyline class="line {style}" points="{path}"/>')

    def band(self, low: Sequence[Point], high: Sequence[Point], style: str) -> None:
        """The area between two lines."""
        path = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in (self.pixels(*p) for p in [*low, *high[::-1]])
        )
        self.parts.append(f'<polygon class="band {style}" points="{path}"/>')

    def whisker(self, x: float, low: float, high: float, style: str) -> None:
        """A vertical interval."""
        (px, y0), (_, y1) = self.pixels(x, low), self.pixels(x, high)
        self.parts.append(
            f'<line class="whisker {style}" x1="{px:.1f}" x2="{px:.1f}" y1="{y0:.1f}" '
            f'y2="{y1:.1f}"/>'
        )

    def dot(self, x: float, y: float, style: str, tooltip: str, radius: float = 3.5) -> None:
        """A mark; `tooltip` shows when hovered over."""
        px, py = self.pixels(x, y)
        self.parts.append(
            f'<circle class="dot {style}" cx="{px:.1f}" cy="{py:.1f}" r="{radius}">'
            f"<title>{escape(tooltip)}</title></circle>"
        )

    def bar(self, x0: float, x1: float, y0: float, y1: float, style: str, tooltip: str) -> None:
        """A rectangle between two corners."""
        (a, b), (c, d) = self.pixels(x0, y1), self.pixels(x1, y0)
        self.parts.append(
            f'<rect class="bar {style}" x="{a:.1f}" y="{b:.1f}" width="{max(c - a, 0):.1f}" '
            f'height="{max(d - b, 0):.1f}"><title>{escape(tooltip)}</title></rect>'
        )

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        self.parts.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>')

    def label(self, x: float, y: float, words: str, style: str = "middle", up: float = 10) -> None:
        """Words `up` pixels above a point, kept inside the picture."""
        px, py = self.pixels(x, y)
        half = 3.2 * len(words)
        if "middle" in style.split():
            px = min(max(px, self.left + half), WIDTH - 2 - half)
        self.text(px, py - up, words, style)

    def svg(self) -> str:
        """The chart; it scales to the width that the page gives it."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}">' + "".join(self.parts) + "</svg>"
        )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values between low and high, roughly `count` of them."""
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(s * scale for s in (1, 2, 2.5, 5, 10) if s * scale >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def span(values: Sequence[float], *, floor: float | None = None) -> tuple[float, float]:
    """A range that holds the values with a little room; it starts at `floor` where given."""
    low = min(values) if floor is None else floor
    high = max([*values, low])
    room = 0.12 * (high - low) or 0.5
    return (low - room if floor is None else low), high + room
