"""Pictures of the documents: each docs/pictures/*.txt, drawn as the SVG beside it.

`python -m website.pictures` draws all of them. Each line of a text is one shape. Lengths are in units of 10 pixels, and
the picture is as large as its shapes need:

    title WORDS                       the name that screen readers read
    box NAME X Y W H [STYLE]: LINES   lines are separated by ` / `, all but the first are small; `code` is monospaced
    arrow FROM TO [STYLE]: LABEL      from and to a side of a box (`a.top`, `a.left+2`: two units on) or a point (`4,7`)
    text X Y [STYLE]: WORDS

Styles, of which several go: `accent`, `bad` and `good` colour a shape. `frame` is a box around others, with its words
at the top. Arrows are `dashed`, `both` (two heads) or `line` (none), texts `small`.
"""

from __future__ import annotations

import math
import re
from html import escape
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

UNIT = 10
MARGIN = 10.0
HEAD = 8.0
"""Length of the head of an arrow, in pixels."""

LINE_HEIGHT = 19.0
SIDES = {"left": (0.0, 0.5), "right": (1.0, 0.5), "top": (0.5, 0.0), "bottom": (0.5, 1.0)}

INK = {  # name: light, dark
    "page": ("#ffffff", "#14171c"),
    "ink": ("#1f2328", "#e6edf3"),
    "small": ("#59636e", "#a3adb8"),
    "edge": ("#818b98", "#727c88"),
    "fill": ("#f4f6f8", "#232830"),
    "accent": ("#3f51b5", "#a5b0f0"),
    "accent-fill": ("#eceefa", "#282e4a"),
    "bad": ("#c62828", "#ff8f87"),
    "bad-fill": ("#fdeceb", "#452322"),
    "good": ("#2a7a32", "#8bd192"),
    "good-fill": ("#e9f5ea", "#1f3a26"),
}

Point = tuple[float, float]


def rules(theme: int) -> str:
    """Return the colours of a theme, 0 for light and 1 for dark, as rules of CSS."""
    ink = {name: colours[theme] for name, colours in INK.items()}
    found = [f".page{{fill:{ink['page']}}}text{{fill:{ink['ink']};stroke:{ink['page']}}}.small{{fill:{ink['small']}}}"]
    found += [f"rect,path{{stroke:{ink['edge']}}}.box{{fill:{ink['fill']}}}.head{{fill:{ink['edge']}}}"]
    for name in ("accent", "bad", "good"):
        found += [f".{name}{{stroke:{ink[name]}}}.box.{name}{{fill:{ink[name + '-fill']}}}"]
        found += [f".head.{name}{{fill:{ink[name]}}}text.{name}{{fill:{ink[name]};stroke:{ink['page']}}}"]
    return "".join(found)


STYLE = (
    "text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;stroke-width:4;"
    "paint-order:stroke;stroke-linejoin:round}"
    ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:.92em}"
    ".small{font-size:12.5px}.middle{text-anchor:middle}.in{stroke:none}path{fill:none}"
    "rect,path{stroke-width:1.4}.dashed{stroke-dasharray:5 4}"
    f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"
    ".page,.head,.in{stroke:none}.frame{fill:none}"
)


class Picture:
    """Shapes of one picture, as far as its text has been read."""

    def __init__(self) -> None:
        self.title = ""
        self.shapes = list[str]()
        self.boxes = dict[str, tuple[float, float, float, float]]()
        self.width = self.height = 0.0

    def extend(self, x: float, y: float) -> None:
        """Make the picture so large that a point lies inside of it."""
        self.width, self.height = max(self.width, x + MARGIN), max(self.height, y + MARGIN)

    def words(self, x: float, y: float, text: str, styles: str, room: float | None = None) -> None:
        """Write a line, which has to fit the room that it has. Letters are as wide as those of DejaVu Sans."""
        is_small, parts = "small" in styles.split(), enumerate(text.split("`"))
        length = sum(len(part) * (6.6 if is_small else 7.9 if index % 2 else 7.4) for index, part in parts)
        if room is not None and length > room:
            raise ValueError(f"{text!r} takes {length:.0f} pixels of {room:.0f}: widen the box, or shorten the text")
        self.extend(x + (length / 2 if "middle" in styles else length), y)
        shown = re.sub(r"`([^`]+)`", r'<tspan class="code">\1</tspan>', escape(text, quote=False))
        self.shapes.append(f'<text x="{x:g}" y="{y:g}"{named(styles)}>{shown}</text>')

    def box(self, place: list[str], styles: str, text: str) -> None:
        """Draw a box."""
        name, *numbers = place
        x, y, width, height = (float(number) * UNIT for number in numbers)
        x, y = x + MARGIN, y + MARGIN
        self.boxes[name] = (x, y, width, height)
        self.extend(x + width, y + height)
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"{named("box " + styles)}/>'
        )
        is_frame = "frame" in styles.split()
        lines = text.split(" / ") if text else []
        first = y + 20 if is_frame else y + height / 2 + 5 - (len(lines) - 1) * LINE_HEIGHT / 2
        for index, line in enumerate(lines):
            kind = " ".join(["in", *["small"] * (index > 0), *["middle"] * (not is_frame)])
            self.words(x + (12 if is_frame else width / 2), first + index * LINE_HEIGHT, line, kind, width - 10)

    def end(self, text: str) -> tuple[Point, str]:
        """Return the point that an arrow's end names, and the side of a box that it is at."""
        if "," in text:
            x, y = (float(number) * UNIT + MARGIN for number in text.split(","))
            return (x, y), ""
        name, side, shift = re.fullmatch(r"(\w+)\.(\w+?)([+-][\d.]+)?", text).groups(default="0")  # type: ignore[union-attr]
        left, top, width, height = self.boxes[name]
        x, y = left + width * SIDES[side][0], top + height * SIDES[side][1]
        moved = float(shift) * UNIT
        return ((x + moved, y) if side in ("top", "bottom") else (x, y + moved)), side

    def arrow(self, place: list[str], styles: str, text: str) -> None:
        """Draw an arrow: straight, or along the axes if its ends do not lie on one."""
        (start, side), (end, other) = map(self.end, place)
        (x, y), (u, v) = start, end
        if x == u or y == v or not side:
            points = [start, end]
        elif (side in ("top", "bottom")) != (other in ("top", "bottom", "")):
            points = [start, (x, v) if side in ("top", "bottom") else (u, y), end]
        elif side in ("top", "bottom"):
            points = [start, (x, (y + v) / 2), (u, (y + v) / 2), end]
        else:
            points = [start, ((x + u) / 2, y), ((x + u) / 2, v), end]
        drawn = "L".join(f"{a:g} {b:g}" for a, b in points)
        self.shapes.append(f'<path d="M{drawn}"{named(styles)}/>')
        heads = [points[:-3:-1]] * ("line" not in styles) + [points[:2]] * ("both" in styles)
        self.shapes += [f'<path d="{head(*ends)}"{named("head " + styles)}/>' for ends in heads]
        for point in points:
            self.extend(*point)
        if text:
            (x, y), (u, v) = max(pairwise(points), key=lambda ends: math.dist(*ends))
            place_of = ((x + u) / 2, y - 7) if y == v else (x + 8, (y + v) / 2 + 4)
            ink = [style for style in styles.split() if style in ("accent", "bad", "good")]
            self.words(*place_of, text, " ".join(["small", *ink, *["middle"] * (y == v)]))

    def svg(self) -> str:
        """Return the whole picture."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">'
        page = '<rect class="page" width="100%" height="100%" rx="8"/>'
        name = f'<title id="title">{escape(self.title, quote=False)}</title>'
        return "\n".join([head, name, f"<style>{STYLE}</style>", page, *self.shapes, "</svg>", ""])


def named(styles: str) -> str:
    """Return the attribute `class`."""
    return f' class="{styles.strip()}"' if styles.strip() else ""


def head(tip: Point, before: Point) -> str:
    """Return the path of the head of an arrow."""
    (x, y), (u, v) = tip, before
    length = math.dist(tip, before)
    a, b = (x - u) / length * HEAD, (y - v) / length * HEAD
    return f"M{x:g} {y:g}L{x - a - b / 2:g} {y - b + a / 2:g}L{x - a + b / 2:g} {y - b - a / 2:g}Z"


def drawn(text: str) -> str:
    """Return the SVG of a text."""
    picture = Picture()
    for line in text.splitlines():
        shape, _, rest = line.partition(" ")
        if shape == "title":
            picture.title = rest
            continue
        place, _, words = rest.partition(": ")
        count = {"box": 5, "arrow": 2, "text": 2}[shape]
        parts = place.rstrip(":").split()
        numbers, styles = parts[:count], " ".join(parts[count:])
        if shape == "text":
            x, y = (float(number) * UNIT + MARGIN for number in numbers)
            picture.words(x, y, words, styles)
        else:
            (picture.box if shape == "box" else picture.arrow)(numbers, styles, words)
    return picture.svg()


def main() -> None:
    """Draw all pictures."""
    for path in sorted(FOLDER.glob("*.txt")):
        path.with_suffix(".svg").write_text(drawn(path.read_text()))


if __name__ == "__main__":
    main()
