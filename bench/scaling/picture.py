"""Curves and dots over two logarithmic axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 250, 44, 56

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """What the picture shows.

    Attributes:
        name: In the legend.
        points: Of the axes' units.
        colour: Of SVG.
        style: "line", "dashes", "dots" or "rings".
    """

    name: str
    points: Points
    colour: str
    style: str


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        title: Along it.
        least, most: Its ends.
        marks: Where a line and a text are.
    """

    title: str
    least: float
    most: float
    marks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """Return how far along the axis a value lies."""
        return math.log(value / self.least) / math.log(self.most / self.least)


def draw(title: str, across: Axis, up: Axis, curves: Sequence[Curve]) -> str:
    """Return the picture."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>',
        *_grid(across, up),
    ]
    for index, curve in enumerate(curves):
        lines += _shape(curve, [_place(across, up, point) for point in curve.points])
        lines += _legend(curve, index)
    return "\n".join([*lines, "</svg>", ""])


def _place(across: Axis, up: Axis, point: tuple[float, float]) -> tuple[float, float]:
    x = LEFT + across.share(point[0]) * (WIDTH - LEFT - RIGHT)
    y = HEIGHT - BOTTOM - up.share(point[1]) * (HEIGHT - TOP - BOTTOM)
    return round(x, 1), round(y, 1)


def _grid(across: Axis, up: Axis) -> list[str]:
    lines: list[str] = []
    for value, text in across.marks:
        x, _ = _place(across, up, (value, up.least))
        lines.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        lines.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>')
    for value, text in up.marks:
        _, y = _place(across, up, (across.least, value))
        lines.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(text)}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(across.title)}</text>')
    lines.append(f'<text x="{LEFT}" y="{TOP - 6}" text-anchor="end">{escape(up.title)}</text>')
    return lines


def _shape(curve: Curve, places: list[tuple[float, float]]) -> list[str]:
    if curve.style in ("line", "dashes"):
        path = "M" + "L".join(f"{x} {y}" for x, y in places)
        dashes = ' stroke-dasharray="6 5"' if curve.style == "dashes" else ""
        return [f'<path d="{path}" fill="none" stroke="{curve.colour}" stroke-width="2"{dashes}/>']
    paint = f'fill="{curve.colour if curve.style == "dots" else "none"}" stroke="{curve.colour}" stroke-width="2"'
    return [f'<circle cx="{x}" cy="{y}" r="4.5" {paint}/>' for x, y in places]


def _legend(curve: Curve, index: int) -> list[str]:
    x, y = WIDTH - RIGHT + 14.0, TOP + 12.0 + 22 * index
    places = [(x, y), (x + 24, y)] if curve.style in ("line", "dashes") else [(x + 12, y)]
    return [*_shape(curve, places), f'<text x="{x + 32}" y="{y + 4}">{escape(curve.name)}</text>']
