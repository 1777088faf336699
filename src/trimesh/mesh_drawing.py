"""Drawing of a mesh as SVG: dimensions are rows and columns, each member is a cell in the colour of its state; PURE.

MD-1 The last dimension runs to the right, the one before it down. Each place of the others is a grid of its own; grids
     stand side by side.
MD-2 A last dimension that is too long for one row is broken at multiples of 8, and many rows go on in a strip beside
     them. Indices stand beside rows and columns.
MD-3 States differ by shape, too. Text has the colour of the text around the drawing, and cells stand out on white and
     on black, so that the drawing follows the theme of a page without a style sheet.
MD-4 At most `CELLS_MAX` cells are drawn; the counts of a card include the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

CELLS_MAX: Final = 4_096
"""Maximum cells of a drawing: with their titles they are 400 kB, which a notebook stores in its file."""

_WIDTH: Final = 1_000
"""Pixels for grids side by side: the output of a notebook on a laptop; a narrower page scales the drawing."""

_SIDES: Final = ((64, 22), (256, 16), (1_024, 12), (CELLS_MAX, 9))
"""Pixels from cell to cell, for up to so many cells."""

_LINE: Final = 14
_CHAR: Final = 6.7
"""Pixels: height of a line of text, and width of a character."""

_TEXT: Final = 'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="11" fill="currentColor"'
_HEAD: Final = "display:flex;flex-wrap:wrap;gap:2px 14px;align-items:center;margin:2px 0 6px"

_Lines = tuple[tuple[float, float, float, float], ...]


class _Look(NamedTuple):
    """Appearance of a state.

    Attributes:
        fill, frame: Colours of the cell and of its outline.
        lines: Lines over it, in a square of side 1.
        ink: Colour of the lines.
        thick: Width of the lines.
        dash: Whether the outline is dashed.
    """

    fill: str
    frame: str = "none"
    lines: _Lines = ()
    ink: str = "#14181d"
    thick: float = 0.14
    dash: bool = False


_BLUE, _GREY, _RED, _ORANGE, _HOLLOW = "#4f8fc4", "#868e96", "#c2263d", "#f0a020", "transparent"
_CROSS: Final = ((0.22, 0.22, 0.78, 0.78), (0.78, 0.22, 0.22, 0.78))
_SLASH: Final = ((0.0, 1.0, 1.0, 0.0),)
_RING: Final = ((0.25, 0.25, 0.75, 0.25), (0.75, 0.25, 0.75, 0.75), (0.75, 0.75, 0.25, 0.75), (0.25, 0.75, 0.25, 0.25))
_LOOKS: Final = {
    "dead": _Look(_RED, lines=_CROSS, ink="#ffffff"),
    "failed": _Look(_RED, lines=_CROSS, ink="#ffffff"),
    "lost": _Look(_RED, lines=_CROSS, ink="#ffffff"),
    "silent": _Look("#f08494", lines=((0.15, 0.5, 0.85, 0.5),), thick=0.25),
    "stopped": _Look("#e3c42c", lines=((0.33, 0.2, 0.33, 0.8), (0.67, 0.2, 0.67, 0.8))),
    "held": _Look("#e3c42c", lines=((0.5, 0.2, 0.5, 0.8),)),
    "stuck": _Look(_ORANGE, lines=_SLASH),
    "stalled": _Look(_ORANGE, lines=_SLASH),
    "deadlocked": _Look(_ORANGE, lines=_RING, thick=0.12),
    "calls wait": _Look(_BLUE, lines=((0.5, 0.5, 0.5, 0.5),), ink="#ffffff", thick=0.4),
    "busy": _Look(_BLUE),
    "running": _Look(_BLUE),
    "live": _Look(_BLUE),
    "idle": _Look(_HOLLOW, _BLUE),
    "restarting": _Look(_HOLLOW, _ORANGE, dash=True),
    "starting": _Look(_HOLLOW, _BLUE, dash=True),
    "exiting": _Look(_HOLLOW, _BLUE, lines=((0.2, 0.75, 0.8, 0.75),), ink=_BLUE, thick=0.4),
    "ended": _Look(_HOLLOW, _GREY, lines=((0.35, 0.5, 0.65, 0.5),), ink=_GREY),
    "": _Look(_HOLLOW, lines=((0.5, 0.5, 0.5, 0.5),), ink=_GREY),
}
"""Looks by state, in the order of the counts of a card, as on the page; others are filled cells."""

_USUAL: Final = _Look(_BLUE)


def mesh_card(caption: str, extent: Mapping[str, int], states: Sequence[str], titles: Sequence[str]) -> str:
    """Return a drawing of a mesh below its name and the number of members in each state, as HTML.

    Args:
        caption: The name.
        extent: Labels and sizes.
        states: State of each point of the extent, in row-major order; "" for a point without a member.
        titles: Text of each point, shown while the pointer rests on its cell.
    """
    order = {state: number for number, state in enumerate(_LOOKS)}
    counts = sorted(Counter(filter(None, states)).items(), key=lambda one: (order.get(one[0], len(order)), one[0]))
    parts = [f"<code>{_escaped(caption)}</code>"] if caption else []
    parts += [f"<span>{_sample(state)} {count:,} {_escaped(state)}</span>" for state, count in counts]
    if len(states) > CELLS_MAX:
        parts.append(f"<span>the first {CELLS_MAX:,} of {len(states):,} are drawn</span>")
    return f'<div><div style="{_HEAD}">{"".join(parts)}</div>{draw_mesh(extent, states, titles)}</div>'


def draw_mesh(extent: Mapping[str, int], states: Sequence[str], titles: Sequence[str]) -> str:
    """Return a drawing of a mesh as an SVG element; for the arguments see `mesh_card`."""
    side = next((side for most, side in _SIDES if len(states) <= most), _SIDES[-1][1])
    grids = list(_grids(tuple(extent), tuple(extent.values())))
    texts, layers = list[str](), dict[str, tuple[list[str], list[str]]]()
    x, y, right, bottom = 0.0, 0.0, 0.0, 0.0
    for grid in grids:
        wide = max(grid.columns * side, *(len(head) * _CHAR for head in grid.heads), 0)
        if x and x + grid.gutter + wide > _WIDTH:
            x, y = 0.0, bottom + _LINE / 2
        is_first = not x
        left = x + (grid.gutter if is_first or grid.is_strip else 0)
        top = y + _LINE * len(grid.heads)
        texts += _texts(grid, side, left, top, is_first=is_first)
        for cell in range(grid.cells):
            state = states[grid.first + cell]
            shapes, lines = layers.setdefault(state, ([], []))
            at = left + cell % grid.columns * side + 1, top + cell // grid.columns * side + 1
            if state:
                title = f"<title>{_escaped(titles[grid.first + cell])}</title>"
                shapes.append(f'<path d="{_square(state, at, side - 2)}">{title}</path>')
            lines.append(_strokes(state, at, side - 2))
        x = left + wide + side
        right = max(right, left + wide)
        bottom = max(bottom, top + math.ceil(grid.cells / grid.columns) * side)
    drawn = "".join(_layer(state, side - 2, *layers[state]) for state in sorted(layers))
    width, height = math.ceil(right) + 1, math.ceil(bottom) + 1
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="display:block;max-width:100%;height:auto">'
        f"<g {_TEXT}>{''.join(texts)}</g>{drawn}</svg>"
    )


# ---- grids and their labels ------------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """Rows and columns of a part of a mesh.

    Attributes:
        heads: Lines of text above it: its place along the other dimensions, the label of the columns, their indices.
        label: Label of the rows; empty for rows of a broken dimension, and for a single row.
        first, cells: Rank of its first cell, and number of cells.
        columns: Cells of a row.
        row, step: Index of the first row, and from one row to the next.
        is_strip: Whether its rows have other indices than those of the grid beside it.
    """

    heads: tuple[str, ...]
    label: str
    first: int
    cells: int
    columns: int
    row: int = 0
    step: int = 1
    is_strip: bool = False

    @property
    def indices(self) -> range:
        """Indices of the rows; none for a single row that is all of its dimension."""
        rows = math.ceil(self.cells / self.columns)
        return range(self.row, self.row + rows * self.step, self.step) if self.label or rows > 1 else range(0)

    @property
    def gutter(self) -> float:
        """Room for the label and the indices of the rows, in pixels."""
        indices = self.indices
        return max(len(self.label), len(str(indices[-1]))) * _CHAR + 5 if indices else 0.0


def _grids(labels: Sequence[str], sizes: Sequence[int]) -> Iterator[_Grid]:
    """Yield the grids of a mesh (MD-1, MD-2, MD-4)."""
    if not math.prod(sizes):
        return
    columns, rows = sizes[-1] if sizes else 1, sizes[-2] if len(sizes) > 1 else 1
    row = 32 if math.prod(sizes) <= 1_024 else 64  # cells of a broken row, or rows of a strip
    is_broken = columns > (32 if len(sizes) == 1 else 64)
    outer = sizes[:-1] if is_broken else sizes[:-2]
    inside = columns if is_broken else rows * columns
    label = "" if is_broken or len(sizes) < 2 else labels[-2]
    for number, place in enumerate(product(*map(range, outer))):
        caption = ",".join(f"{name}={index}" for name, index in zip(labels, place, strict=False))
        heads = ((caption,) if caption else ()) + ((labels[-1], "") if labels else ())
        end = min((number + 1) * inside, CELLS_MAX)
        for first in range(number * inside, end, inside if is_broken else row * columns):
            cells = min(end - first, inside if is_broken else row * columns)
            if is_broken:
                yield _Grid(heads, label, first, cells, row, step=row)
            else:
                top = first // columns % rows
                yield _Grid(heads, label, first, cells, columns, top, is_strip=rows > row)


def _texts(grid: _Grid, side: int, left: float, top: float, *, is_first: bool) -> Iterator[str]:
    """Yield the texts of a grid; labels stand at the first grid of a line only."""
    if not grid.heads:
        return
    *captions, label, _ = grid.heads
    caption = captions[0] if captions else ""
    if caption:
        yield _text(left, top - 2 * _LINE - 4, caption)
    if is_first:
        yield _text(left, top - _LINE - 4, label)
    wide = len(str(grid.columns - 1)) * _CHAR + 3
    step = next(step for step in (1, 2, 4, 8, 16) if step * side >= wide) if grid.step == 1 else 8
    for column in range(0, grid.columns, step):
        yield _text(left + (column + 0.5) * side, top - 4, column, "middle")
    if grid.indices and (is_first or grid.is_strip):
        if is_first and grid.label:
            yield _text(left - 5, top - 4, grid.label, "end")
        every = 1 if side >= 12 else 4
        for number, index in enumerate(grid.indices):
            if number % every == 0:
                yield _text(left - 5, top + (number + 0.5) * side + 4, index, "end")


def _text(x: float, y: float, text: object, anchor: str = "start") -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}">{_escaped(text)}</text>'


# ---- cells -----------------------------------------------------------------------------------------------------------


def _look(state: str) -> _Look:
    return _LOOKS.get(state, _USUAL)


def _square(state: str, at: tuple[float, float], wide: float) -> str:
    inset = 0.75 * (_look(state).frame != "none")  # half of its outline
    wide -= 2 * inset
    return f"M{at[0] + inset:.6g} {at[1] + inset:.6g}h{wide:g}v{wide:g}h-{wide:g}z"


def _strokes(state: str, at: tuple[float, float], wide: float) -> str:
    x, y = at
    return "".join(
        f"M{x + a * wide:.4g} {y + b * wide:.4g}L{x + c * wide:.4g} {y + d * wide:.4g}"
        for a, b, c, d in _look(state).lines
    )


def _layer(state: str, wide: float, shapes: Sequence[str], lines: Sequence[str]) -> str:
    """Return all cells of one state."""
    look, drawn = _look(state), "".join(lines)
    dash = ' stroke-dasharray="2 2"' * look.dash
    frame = f' stroke="{look.frame}" stroke-width="1.5"{dash}' if look.frame != "none" else ""
    over = (
        f'<path d="{drawn}" stroke="{look.ink}" stroke-width="{max(1.2, look.thick * wide):.3g}" '
        'stroke-linecap="round" pointer-events="none"/>'
        if drawn
        else ""
    )
    return f'<g data-state="{_escaped(state)}" fill="{look.fill}"{frame}>{"".join(shapes)}</g>{over}'


def _sample(state: str) -> str:
    cell = _layer(state, 10, [f'<path d="{_square(state, (1, 1), 10)}"/>'], [_strokes(state, (1, 1), 10)])
    style = "display:inline-block;vertical-align:-1px"
    return f'<svg width="12" height="12" viewBox="0 0 12 12" style="{style}" aria-hidden="true">{cell}</svg>'


def _escaped(text: object) -> str:
    import html  # noqa: PLC0415 - only notebooks draw, and it is two modules

    return html.escape(str(text))
