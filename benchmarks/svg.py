"""Draws small charts as SVG text, without other packages: lines on logarithmic axes, bars, points with
errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#d1495b", "#edae49", "#00798c", "#30638e", "#8d96a3", "#5c4b51")
FONT = 'font-family="system-ui, sans-serif" fill="#333"'


@dataclass
class Picture:
    """An SVG picture with a size in pixels. Charts add their parts to it."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, size: int = 11, anchor: str = "start", turn: int = 0
    ) -> None:
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" {FONT}{turned}>'
            f"{escape(words)}</text>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], color: str, width: float = 2, dash: str = ""
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'
        )

    def dot(self, x: float, y: float, color: str, radius: float = 2.5) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>')

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
        )

    def legend(self, x: float, y: float, names: Sequence[str], colors: Sequence[str], step: float) -> None:
        for i, (name, color) in enumerate(zip(names, colors)):
            self.box(x + i * step, y - 9, 12, 10, color)
            self.text(x + i * step + 17, y, name)

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n<title>{escape(self.title)}</title>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


def ticks(low: float, high: float) -> list[float]:
    """Returns 1, 10, 100, ... and, if these are few, also 2 and 5 times them."""
    powers = [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    found = [p for p in powers if low <= p <= high]
    if len(found) < 3:
        found = sorted(m * p for p in powers for m in (1, 2, 5) if low <= m * p <= high)
    return found


Lines = dict[str, list[tuple[float, float]]]


def loglog(
    picture: Picture,
    place: tuple[float, float, float, float],
    title: str,
    lines: Lines,
    x_name: str,
    y_name: str,
) -> None:
    """Draws lines in a panel at `place` (x, y, width, height). The first line, the bound, is dashed."""
    left, top, width, height = place
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    low, high = min(ys) * 0.8, max(ys) * 1.25

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / min(xs)) / math.log(max(xs) / min(xs))
        return left + width * across, top + height - height * math.log(y / low) / math.log(high / low)

    picture.text(left + width / 2, top - 8, title, 12, "middle")
    for y in ticks(low, high):
        picture.line([at(min(xs), y), at(max(xs), y)], "#dddddd", 1)
        picture.text(left - 5, at(min(xs), y)[1] + 4, f"{y:g}", 10, "end")
    for x in sorted(set(xs)):
        picture.text(at(x, low)[0], top + height + 14, f"{x:g}", 10, "middle")
    picture.text(left + width / 2, top + height + 28, x_name, 10, "middle")
    picture.text(left - 38, top + height / 2, y_name, 10, "middle", -90)
    for i, (line, color) in enumerate(zip(lines.values(), COLORS)):
        places = [at(x, y) for x, y in line]
        picture.line(places, color, 1.5 if i == 0 else 2, "4 3" if i == 0 else "")
        for x, y in places if i else ():
            picture.dot(x, y, color)


def bars(
    picture: Picture,
    place: tuple[float, float, float, float],
    groups: dict[str, list[float | None]],
    unit: str,
) -> None:
    """Draws groups of bars from 0, each with its number above it."""
    left, top, width, height = place
    highest = max(v for values in groups.values() for v in values if v is not None)
    step = width / len(groups)
    picture.line([(left, top + height), (left + width, top + height)], "#888888", 1)
    picture.text(left - 12, top + height / 2, unit, 11, "middle", -90)
    for i, (name, values) in enumerate(groups.items()):
        wide = step * 0.8 / len(values)
        picture.text(left + step * (i + 0.5), top + height + 16, name, 12, "middle")
        for j, (value, color) in enumerate(zip(values, COLORS)):
            x = left + step * (i + 0.1) + wide * j
            if value is None:
                continue
            tall = height * value / highest
            picture.box(x + 2, top + height - tall, wide - 4, tall, color)
            picture.text(x + wide / 2, top + height - tall - 4, f"{value:.0f}", 11, "middle")


Point = tuple[str, float, float]
"""(name, value, standard error)"""


def points(
    picture: Picture, place: tuple[float, float, float, float], groups: dict[str, list[Point]], unit: str
) -> None:
    """Draws a row for each point: a dot at its value, and a line of one standard error to each side."""
    left, top, width, height = place
    found = [p for group in groups.values() for p in group]
    low = min(0.0, *(v - e for _, v, e in found))
    high = max(v + e for _, v, e in found) * 1.05
    row = height / len(found)

    def at(value: float) -> float:
        return left + width * (value - low) / (high - low)

    spread = 10 ** math.floor(math.log10(high - low))
    step = spread / 4 if (high - low) / spread < 2 else spread / 2 if (high - low) / spread < 5 else spread
    for k in range(math.ceil(low / step), math.floor(high / step) + 1):
        picture.line([(at(k * step), top), (at(k * step), top + height)], "#dddddd", 1)
        picture.text(at(k * step), top + height + 15, f"{k * step:g}", 10, "middle")
    picture.text(left + width / 2, top + height + 32, unit, 11, "middle")
    y = top
    for color, (group, of) in zip(COLORS, groups.items()):
        for name, value, error in of:
            y += row
            picture.text(left - 8, y - row / 2 + 4, f"{group} {name}", 11, "end")
            picture.line([(at(value - error), y - row / 2), (at(value + error), y - row / 2)], color)
            picture.dot(at(value), y - row / 2, color, 4)
