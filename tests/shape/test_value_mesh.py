"""`ValueMesh`: one value for each member of a view."""

from __future__ import annotations

import pickle
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimesh import Outcome
from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh


def ranks(region: Region) -> ValueMesh[int]:
    """A value mesh whose values are the base ranks."""
    return ValueMesh(region, region.ranks())


def test_value_mesh_gives_each_member_its_value():
    values = ranks(Region({"hosts": 2, "gpus": 4}, mesh="m"))

    assert values.item(hosts=1, gpus=2) == 6
    assert values.item(gpus=-1, hosts=-1) == 7
    assert values.values() == tuple(range(8))
    assert (len(values), values.extent) == (8, {"hosts": 2, "gpus": 4})


def test_value_mesh_items_have_the_points_of_the_view():
    """M5."""
    view = Region({"hosts": 2, "gpus": 4}, mesh="m").slice(hosts=1, gpus=slice(2, 4))

    items = list(ranks(view).items())

    assert items == [({"gpus": 0}, 6), ({"gpus": 1}, 7)]
    assert [point.base_rank for point, _ in items] == [6, 7]


def test_value_mesh_of_a_mesh_without_dimension_has_one_item():
    assert ValueMesh(Region(Extent()), ["only"]).item() == "only"


def test_value_mesh_of_an_empty_view_has_no_values():
    """M6."""
    values = ranks(Region({"gpus": 4}).slice(gpus=slice(0, 0)))

    assert (len(values), values.values(), list(values.items()), values.extent) == (0, (), [], {"gpus": 0})
    assert values.map(str).values() == ()
    with pytest.raises(ShapeError, match="'gpus' has size 0, so gpus=0 is outside of it"):
        values.item(gpus=0)


def test_value_mesh_item_refuses_wrong_coordinates():
    values = ranks(Region({"hosts": 2, "gpus": 4}))

    with pytest.raises(ShapeError, match=r"needs an index of 'gpus' \(size 4\)"):
        values.item(hosts=0)
    with pytest.raises(ShapeError, match="no dimension 'tp'"):
        values.item(hosts=0, gpus=0, tp=0)
    with pytest.raises(ShapeError, match="'gpus' has size 4, so gpus=4 is outside of it"):
        values.item(hosts=0, gpus=4)


def test_value_mesh_of_a_sparse_view_names_the_missing_member():
    values = ranks(Region({"hosts": 2, "gpus": 2}).exclude([{"hosts": 0, "gpus": 1}]))

    assert [values.item(hosts=h, gpus=g) for h, g in ((0, 0), (1, 0), (1, 1))] == [0, 2, 3]
    assert list(values.items()) == [
        ({"hosts": 0, "gpus": 0}, 0),
        ({"hosts": 1, "gpus": 0}, 2),
        ({"hosts": 1, "gpus": 1}, 3),
    ]
    with pytest.raises(ShapeError, match=r"the member \[hosts=0,gpus=1\] .* is not in this view"):
        values.item(hosts=0, gpus=1)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_value_mesh_needs_one_value_a_member(count):
    with pytest.raises(ShapeError, match=rf"Region\(gpus=4\) has 4 members, got {count} values"):
        ValueMesh(Region({"gpus": 4}), range(count))


def test_value_mesh_maps_over_the_same_view():
    region = Region({"gpus": 3}).exclude_ranks([1])

    mapped = ranks(region).map(lambda rank: rank * 10)

    assert mapped == ValueMesh(region, [0, 20])


def test_value_mesh_cannot_be_changed():
    source = [1, 2]
    values = ValueMesh(Region({"gpus": 2}), source)
    source[0] = 9

    assert values.item(gpus=0) == 1
    with pytest.raises(AttributeError):
        values.region = Region({"gpus": 3})  # type: ignore[misc]


def test_value_mesh_is_a_value():
    assert ranks(Region({"gpus": 2})) == ranks(Region({"gpus": 2}))
    assert ranks(Region({"gpus": 2})) != ranks(Region({"tp": 2}))
    assert hash(ranks(Region({"gpus": 2}))) == hash(ranks(Region({"gpus": 2})))
    assert pickle.loads(pickle.dumps(ranks(Region({"gpus": 2}, mesh=1)))) == ranks(Region({"gpus": 2}, mesh=1))


def test_value_mesh_repr_shows_a_few_values():
    assert repr(ValueMesh(Region({"gpus": 2}), "ab")) == "ValueMesh([gpus=0]: 'a', [gpus=1]: 'b')"
    assert repr(ranks(Region({"gpus": 8}))).endswith("[gpus=7]: 7)")
    assert repr(ranks(Region({"gpus": 10}))).endswith("[gpus=7]: 7, ... 2 more)")


@given(st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 15)), st.integers(0, 3), st.booleans())
def test_value_mesh_slice_keeps_each_value_with_its_member(hosts, gpus, out, index, by_slice):
    region = Region({"hosts": hosts, "gpus": gpus}, mesh="m").exclude_ranks(out)
    selection = slice(index, None) if by_slice else index % gpus

    part = ranks(region).slice(gpus=selection)

    assert part == ranks(region.slice(gpus=selection))


def test_value_mesh_is_read_by_rank_and_in_order():
    values = ranks(Region({"hosts": 2, "gpus": 2}).slice(hosts=1))

    assert list(values) == [2, 3]
    assert (values[0], values[1]) == (2, 3)
    with pytest.raises(ShapeError):
        values[2]
    with pytest.raises(TypeError, match=r"takes the rank of one member, got 'gpus': write \.item\(gpus=0\)"):
        values["gpus"]  # type: ignore[index]
    with pytest.raises(TypeError, match=r"got 1: write \.item\(gpus=0\), or values\[1\] for a rank"):
        values.item(1)


def test_value_mesh_by_rank_passes_over_missing_members():
    values = ranks(Region({"gpus": 3}).exclude([{"gpus": 1}]))

    assert (values[0], values[2], list(values)) == (0, 2, [0, 2])
    with pytest.raises(ShapeError):
        values[1]


def test_value_mesh_of_one_value_needs_no_coordinates():
    assert ranks(Region({"hosts": 2, "gpus": 1})).slice(hosts=1).item() == 1


def test_value_mesh_is_flattened_and_tabled():
    values = ranks(Region({"hosts": 2, "gpus": 2}))

    assert values.flatten("rank").item(rank=2) == 2
    assert values.to_table() == [
        {"hosts": 0, "gpus": 0, "value": 0},
        {"hosts": 0, "gpus": 1, "value": 1},
        {"hosts": 1, "gpus": 0, "value": 2},
        {"hosts": 1, "gpus": 1, "value": 3},
    ]
    with pytest.raises(ShapeError, match="'gpus' is a dimension: give another name"):
        values.to_table("gpus")


def test_value_mesh_is_a_table_in_notebooks():
    values = ValueMesh(Region({"gpus": 2}), ["<b>", "x" * 300])

    assert rows_of(values) == [["gpus", "value"], ["0", "'<b>'"], ["1", f"'{'x' * 199} ..."]]


def test_table_of_many_values_says_how_many_it_leaves_out():
    assert rows_of(ranks(Region({"gpus": 100})))[-1] == ["... 36 more"]


def test_table_has_errors_in_words():
    outcomes = ValueMesh(Region({"gpus": 3}), [Outcome(value=3), Outcome(error=ValueError("<odd>")), KeyError("k")])

    assert rows_of(outcomes) == [
        ["1 value, 2 errors"],
        ["gpus", "value"],
        ["0", "3"],
        ["1", "✗ ValueError: <odd>"],
        ["2", "✗ KeyError: 'k'"],
    ]


def test_table_that_is_cut_has_errors_first():
    values: list[object] = [*range(99), OSError("last")]

    found = rows_of(ValueMesh(Region({"gpus": 100}), values))

    assert found[0] == ["99 values, 1 error"]
    assert found[2:4] == [["99", "✗ OSError: last"], ["0", "0"]]
    assert found[-1] == ["... 36 more"]


def rows_of(values: ValueMesh[object]) -> list[list[str]]:
    """Return the texts of a table: its caption, then each row."""
    table = ElementTree.fromstring(f"<div>{values._repr_html_()}</div>")
    return [
        ["".join(cell.itertext()) for cell in (row if len(row) and row.tag == "tr" else [row])]
        for row in table.iter()
        if row.tag in ("caption", "tr")
    ]
