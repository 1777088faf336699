"""The drawing of a mesh: its cells, their titles and the indices beside them, parsed from the SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.rows import rows
from tests.shape.drawings import SVG, drawn, grid_of

from trimesh.mesh_drawing import CELLS_MAX, draw_mesh, mesh_card

BYTES_MAX = 450_000
"""Of a drawing with `CELLS_MAX` cells, so that a notebook can store it."""


def test_rows_and_columns_are_the_dimensions() -> None:
    """MD-1: eight hosts of eight GPUs are eight rows of eight, with labels and indices."""
    found = drawn({"hosts": 8, "gpus": 8})

    assert grid_of(found.places) == [[f"procs[hosts={row},gpus={column}]" for column in range(8)] for row in range(8)]
    names = [text for text, _, _ in found.texts]
    assert names.count("hosts") == names.count("gpus") == 1
    assert [names.count(str(index)) for index in range(9)] == [2] * 8 + [0]


def test_index_stands_at_its_row_and_column() -> None:
    """MD-2: the index of a row is left of its cells, that of a column above them."""
    found = drawn({"hosts": 2, "gpus": 4})

    (left, top), (last, below) = found.places["procs[hosts=0,gpus=0]"], found.places["procs[hosts=1,gpus=3]"]
    columns = [(x, text) for text, x, y in found.texts if text.isdigit() and y < top]
    rows_ = [(y, text) for text, x, y in found.texts if text.isdigit() and x < left]
    assert [text for _, text in sorted(columns)] == ["0", "1", "2", "3"]
    assert [text for _, text in sorted(rows_)] == ["0", "1"]
    assert max(columns)[0] > last
    assert max(rows_)[0] > below


def test_three_dimensions_are_a_row_of_grids() -> None:
    """MD-1: each place of the first dimension is a grid beside the one before it, with its coordinate above."""
    found = drawn({"replica": 3, "hosts": 2, "gpus": 4})

    assert len(grid_of(found.places)) == 2
    lefts = [found.places[f"procs[replica={replica},hosts=0,gpus=0]"][0] for replica in range(3)]
    ends = [found.places[f"procs[replica={replica},hosts=0,gpus=3]"][0] for replica in range(3)]
    assert all(end < left for end, left in zip(ends, lefts[1:], strict=False))
    captions = [(text, x) for text, x, _ in found.texts if "=" in text]
    assert [text for text, _ in captions] == ["replica=0", "replica=1", "replica=2"]
    assert all(abs(x - left) < 3 for (_, x), left in zip(captions, lefts, strict=True))


def test_long_dimension_is_broken_at_multiples_of_eight() -> None:
    """MD-2: rows have the index of their first cell."""
    found = drawn({"ranks": 100})

    assert [len(row) for row in grid_of(found.places)] == [32, 32, 32, 4]
    assert [row[0] for row in grid_of(found.places)] == [f"procs[ranks={first}]" for first in (0, 32, 64, 96)]
    left = found.places["procs[ranks=0]"][0]
    assert [text for text, x, _ in found.texts if x < left and text.isdigit()] == ["0", "32", "64", "96"]
    assert len(grid_of(drawn({"ranks": 32}).places)) == 1


def test_many_rows_go_on_beside_themselves() -> None:
    """MD-2: a strip of rows ends at a multiple of 8, and its indices go on."""
    found = drawn({"hosts": 64, "gpus": 8})

    first, later = found.places["procs[hosts=0,gpus=0]"], found.places["procs[hosts=32,gpus=0]"]
    assert later[1] == first[1]
    assert later[0] > found.places["procs[hosts=31,gpus=7]"][0]
    assert {"31", "32", "63"} <= {text for text, _, _ in found.texts}


def test_states_are_layers_with_shapes() -> None:
    """MD-3: each state has its own colours, and all but the usual one have lines or an outline."""
    words = ("live", "dead", "stuck", "silent", "stopped", "held", "restarting", "starting", "exiting", "ended", "idle")
    found = drawn({"gpus": len(words)}, dict(enumerate(words)))

    assert [found.states[f"procs[gpus={rank}]"] for rank in range(len(words))] == list(words)
    looks = set()
    for word in words:
        image = ElementTree.fromstring(draw_mesh({}, [word], ["one"]))
        layer = image.find(f"{SVG}g[@data-state='{word}']")
        assert layer is not None
        looks.add((layer.attrib["fill"], layer.get("stroke"), layer.get("stroke-dasharray"), len(image)))
        assert word == "live" or layer.get("stroke") or len(image) > 2
    assert len(looks) >= len(words) - 2  # held and stopped have one colour, as have dead and failed


def test_point_without_member_has_no_cell() -> None:
    found = drawn({"gpus": 4}, {2: ""})

    assert list(found.states) == [f"procs[gpus={rank}]" for rank in (0, 1, 3)]


@rows("extent", [{"hosts": 512, "gpus": 8}, {"ranks": 4_096}, {"pods": 4, "hosts": 128, "gpus": 8}, {"ranks": 9_000}])
def test_large_mesh_is_bounded(extent: dict[str, int]) -> None:
    """MD-4: as many cells as are drawn have a title, and the whole has a bound."""
    size = 1
    for one in extent.values():
        size *= one
    titles = [f"procs[hosts={rank},gpus=0]: live" for rank in range(size)]
    shown = mesh_card("procs", extent, ["live"] * size, titles)

    assert shown.count("<title>") == min(size, CELLS_MAX)
    assert len(shown) < BYTES_MAX
    assert f"{size:,} live" in shown
    assert ("of 9,000 are drawn" in shown) == (size > CELLS_MAX)


@rows("extent", [{"a": 3, "b": 2, "c": 5, "d": 3}, {"a": 70, "b": 3}, {"a": 3, "b": 90}, {"a": 40, "b": 3, "c": 3}])
def test_cells_do_not_overlap(extent: dict[str, int]) -> None:
    """MD-2: also where grids, strips and lines of grids stand beside each other."""
    corners = sorted(drawn(extent).places.values())
    wide = 12 - 2  # of a cell of the largest of them

    for number, (x, y) in enumerate(corners):
        assert not [one for one in corners[number + 1 :] if one[0] - x < wide and abs(one[1] - y) < wide]


def test_names_are_escaped() -> None:
    shown = mesh_card("<b>", {"gpus": 1}, ["<i>"], ["<u>"])

    card = ElementTree.fromstring(shown)
    assert "<b>" in "".join(card.itertext())
    assert shown.count("&lt;i&gt;") == 3
    assert "&lt;u&gt;" in shown
