"""A drawing of a mesh, read from its SVG."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple
from xml.etree import ElementTree

from trimesh.errors import place_name
from trimesh.mesh_drawing import draw_mesh

SVG = "{http://www.w3.org/2000/svg}"


class Drawing(NamedTuple):
    """Attributes:
    states: State of each cell by its title.
    places: Left upper corner of each cell by its title.
    texts: Texts with their places, from left to right.
    """

    states: dict[str, str]
    places: dict[str, tuple[float, float]]
    texts: list[tuple[str, float, float]]


def drawn(extent: Mapping[str, int], states: Mapping[int, str] | None = None) -> Drawing:
    points = [dict(zip(extent, place, strict=True)) for place in product(*map(range, extent.values()))]
    words = [(states or {}).get(rank, "live") for rank in range(len(points))]
    image = ElementTree.fromstring(draw_mesh(extent, words, [place_name("procs", point) for point in points]))
    assert image.tag == f"{SVG}svg"
    found = Drawing({}, {}, [])
    for layer in image.iter(f"{SVG}g"):
        for cell in layer.iterfind(f"{SVG}path[{SVG}title]"):
            title = cell.findtext(f"{SVG}title") or ""
            x, _, rest = cell.attrib["d"].removeprefix("M").partition(" ")
            found.states[title] = layer.attrib["data-state"]
            found.places[title] = float(x), float(rest.partition("h")[0])
    for text in image.iter(f"{SVG}text"):
        found.texts.append((text.text or "", float(text.attrib["x"]), float(text.attrib["y"])))
    width, height = float(image.attrib["width"]), float(image.attrib["height"])
    assert all(0 <= x < width and 0 <= y < height for x, y in found.places.values())
    return found


def grid_of(places: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    """Return titles by rows."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for title, (x, y) in places.items():
        lines.setdefault(y, []).append((x, title))
    return [[title for _, title in sorted(lines[y])] for y in sorted(lines)]
