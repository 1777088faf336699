"""`Region`: every view is checked against a plain list of (coordinates, base rank) that is made without it."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region

LABELS = ["hosts", "gpus", "dp", "tp"]
SIZES = st.dictionaries(st.sampled_from(LABELS), st.integers(1, 5), max_size=3)


def whole(**sizes: int) -> Region:
    return Region(Extent(sizes), mesh="m")


def reference(sizes: dict[str, int]) -> list[tuple[dict[str, int], int]]:
    """Coordinates and base rank of every member of a whole mesh."""
    product = itertools.product(*map(range, sizes.values()))
    return [(dict(zip(sizes, index, strict=True)), rank) for rank, index in enumerate(product)]


def seen(region: Region) -> list[tuple[dict[str, int], int]]:
    """The same as a view shows it."""
    return [(dict(point), rank) for point, rank in zip(region.points(), region.ranks(), strict=True)]


def bounds(size: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(-size - 2, size + 2)


@st.composite
def selections(draw: Any, extent: Extent) -> dict[str, int | slice]:
    chosen: dict[str, int | slice] = {}
    for label, size in extent.items():
        kind = draw(st.sampled_from(["whole", "index", "slice"]))
        if kind == "index" and size:
            chosen[label] = draw(st.integers(-size, size - 1))
        elif kind == "slice":
            step = draw(st.sampled_from([None, 1, 2, 3, -1, -2]))
            chosen[label] = slice(draw(bounds(size)), draw(bounds(size)), step)
    return chosen


@st.composite
def views(draw: Any) -> Region:
    """Any view that two slices, an exclusion and a flatten can make."""
    region = Region(Extent(draw(SIZES)), mesh="m")
    for _ in range(draw(st.integers(0, 2))):
        region = region.slice(**draw(selections(region.extent)))
    if members := list(region.ranks()):
        region = region.exclude_ranks(draw(st.lists(st.sampled_from(members), max_size=3)))
    return region.flatten("ranks") if draw(st.booleans()) else region


# ---- reading ---------------------------------------------------------------------------------------------------


def test_region_of_a_whole_mesh_has_all_ranks_in_order():
    region = whole(hosts=2, gpus=4)

    assert region.extent == {"hosts": 2, "gpus": 4}
    assert list(region.ranks()) == list(range(8))
    assert len(region) == 8
    assert seen(region) == reference({"hosts": 2, "gpus": 4})


def test_region_takes_a_plain_mapping_as_extent():
    assert Region({"gpus": 4}) == Region(Extent(gpus=4))


def test_region_without_dimension_has_one_member():
    assert (len(whole()), list(whole().ranks()), list(whole().points())) == (1, [0], [{}])


def test_region_points_carry_mesh_and_base_rank():
    """M5: coordinates are those of the view, identity is that of the mesh."""
    point = whole(gpus=4).slice(gpus=slice(2, 4)).point(1)

    assert (dict(point), point.rank, point.base_rank, point.mesh, point.size("gpus")) == ({"gpus": 1}, 1, 3, "m", 2)


def test_region_translates_ranks_both_ways():
    view = whole(hosts=2, gpus=4).slice(gpus=slice(1, 3))

    assert [view.base_rank(rank) for rank in range(4)] == [1, 2, 5, 6]
    assert [view.rank_of(base) for base in (1, 2, 5, 6)] == [0, 1, 2, 3]
    assert view.point_of(6) == view.point(3) == {"hosts": 1, "gpus": 1}
    assert (5 in view, 4 in view) == (True, False)


def test_region_refuses_ranks_that_are_not_in_the_view():
    view = whole(hosts=2, gpus=4).slice(gpus=slice(1, 3)).exclude_ranks([5])

    with pytest.raises(
        ShapeError, match=r"the member of rank 4 of Extent\(hosts=2, gpus=4\) is not in this view of Extent\("
    ):
        view.rank_of(4)
    with pytest.raises(ShapeError, match=r"the member \[hosts=1,gpus=0\] \(rank 5 of .*\) is not in this view"):
        view.base_rank(2)
    with pytest.raises(ShapeError, match="is not in this view"):
        view.point_of(5)
    with pytest.raises(ShapeError, match="has 4 points, ranks start at 0; got rank 4"):
        view.point(4)


def test_region_is_a_value():
    a = whole(hosts=2, gpus=4).slice(hosts=0).slice(gpus=slice(0, 2))
    b = whole(hosts=2, gpus=4).slice(hosts=0, gpus=slice(None, -2))

    assert a == b
    assert hash(a) == hash(b)
    assert a != whole(hosts=2, gpus=4).slice(hosts=1, gpus=slice(0, 2))
    assert a != Region({"hosts": 2, "gpus": 4}, mesh="n").slice(hosts=0, gpus=slice(0, 2))
    with pytest.raises(AttributeError):
        a.extent = Extent()  # type: ignore[misc]


def test_region_repr_shows_sizes_and_what_is_missing():
    assert repr(whole(hosts=2, gpus=4)) == "Region(hosts=2, gpus=4)"
    assert repr(whole(gpus=4).exclude_ranks([1, 2])) == "Region(gpus=4, missing=2)"


@given(views())
def test_region_survives_pickling(region):
    copy = pickle.loads(pickle.dumps(region))

    assert copy == region
    assert hash(copy) == hash(region)
    assert seen(copy) == seen(region)


@given(views())
def test_region_agrees_with_itself(region):
    """RG-1, RG-2: every way of reading a view gives the same members."""
    points = list(region.points())

    assert len(region) == len(points) == len(region.ranks())
    assert len(set(points)) == len(points)
    assert [point.base_rank for point in points] == list(region.ranks())
    assert region.extent.nelements == len(region) + len(region.missing())
    for point in points:
        assert region.point(point.rank) == region.point_of(region.base_rank(point.rank)) == point
        assert region.extent.rank(point) == point.rank


def test_region_of_a_large_mesh_stays_small():
    region = whole(hosts=1000, gpus=1000)

    assert len(pickle.dumps(region.slice(gpus=3))) < 400
    assert len(pickle.dumps(region.flatten("ranks"))) < 400


# ---- slice -----------------------------------------------------------------------------------------------------


def test_region_slice_by_index_removes_the_dimension():
    view = whole(hosts=2, gpus=4).slice(gpus=2)

    assert view.extent == {"hosts": 2}
    assert list(view.ranks()) == [2, 6]


def test_region_slice_by_slice_keeps_the_dimension():
    view = whole(hosts=2, gpus=4).slice(gpus=slice(2, 3))

    assert view.extent == {"hosts": 2, "gpus": 1}
    assert list(view.ranks()) == [2, 6]


def test_region_slice_may_step_and_turn_round():
    assert list(whole(gpus=8).slice(gpus=slice(1, None, 3)).ranks()) == [1, 4, 7]
    assert list(whole(gpus=4).slice(gpus=slice(None, None, -1)).ranks()) == [3, 2, 1, 0]


def test_region_slice_of_nothing_is_the_view_itself():
    assert whole(hosts=2, gpus=4).slice() == whole(hosts=2, gpus=4)


def test_region_slice_that_selects_nothing_keeps_its_labels():
    """M6."""
    empty = whole(hosts=2, gpus=4).slice(gpus=slice(4, None))

    assert empty.extent == {"hosts": 2, "gpus": 0}
    assert (len(empty), list(empty.ranks()), list(empty.points())) == (0, [], [])
    assert empty.slice(hosts=0).extent == {"gpus": 0}
    assert empty.flatten("ranks").extent == {"ranks": 0}
    assert empty.split(gpus=("pp", "tp"), tp=2).extent == {"hosts": 2, "pp": 0, "tp": 2}
    assert empty.exclude([]) == empty
    with pytest.raises(ShapeError, match="'gpus' has size 0, so gpus=0 is outside of it"):
        empty.slice(gpus=0)


@rows(
    ("selection", "text"),
    [
        ({"gpu": 0}, r"Extent\(gpus=4\) has no dimension 'gpu' \(is it gpus\?\); its labels are: 'gpus'"),
        ({"gpus": 4}, "'gpus' has size 4, so gpus=4 is outside of it"),
        ({"gpus": -5}, "'gpus' has size 4, so gpus=-5 is outside of it"),
        ({"gpus": "0"}, r"'gpus' \(size 4\) must be sliced by an index such as gpus=2 or a slice .*, got '0'"),
        ({"gpus": [0, 1]}, r"must be sliced by an index .*, got \[0, 1\]"),
        ({"gpus": True}, "must be sliced by an index .*, got True"),
        (
            {"gpus": slice(0, 4, 0)},
            r"'gpus' \(size 4\) cannot be sliced by slice\(0, 4, 0\): slice step cannot be zero",
        ),
        ({"gpus": slice("a")}, r"'gpus' \(size 4\) cannot be sliced by slice\(None, 'a', None\)"),
    ],
)
def test_region_slice_refuses(selection, text):
    with pytest.raises(ShapeError, match=text):
        whole(gpus=4).slice(**selection)


@given(SIZES.flatmap(lambda sizes: st.tuples(st.just(sizes), selections(Extent(sizes)))))
def test_region_slice_selects_what_python_does(drawn):
    sizes, selection = drawn
    picked = {label: list(range(size))[selection.get(label, slice(None))] for label, size in sizes.items()}
    kept = [label for label in sizes if isinstance(picked[label], list)]
    ranks = {tuple(coords.values()): rank for coords, rank in reference(sizes)}

    view = whole(**sizes).slice(**selection)

    lists = [indices if isinstance(indices, list) else [indices] for indices in picked.values()]
    assert list(view.ranks()) == [ranks[index] for index in itertools.product(*lists)]
    assert view.extent == {label: len(picked[label]) for label in kept}


@given(st.data(), SIZES)
def test_region_slices_compose(data, sizes):
    """Slicing twice along a dimension is slicing by the slice of the slice."""
    region = whole(**sizes)
    first = data.draw(selections(region.extent))
    once = region.slice(**first)
    second = data.draw(selections(once.extent))

    twice = once.slice(**second)

    picked = {label: list(range(size))[first.get(label, slice(None))] for label, size in sizes.items()}
    for label in once.extent:
        picked[label] = picked[label][second.get(label, slice(None))]
    lists = [indices if isinstance(indices, list) else [indices] for indices in picked.values()]
    assert list(twice.ranks()) == [
        region.extent.rank(dict(zip(sizes, i, strict=True))) for i in itertools.product(*lists)
    ]


# ---- flatten, split, rename --------------------------------------------------------------------------------------


@given(views())
def test_region_flatten_keeps_ranks_and_order(region):
    flat = region.flatten("all")

    assert flat.extent == {"all": region.extent.nelements}
    assert list(flat.ranks()) == list(region.ranks())
    assert [point["all"] for point in flat.points()] == [point.rank for point in region.points()]


def test_region_flatten_of_a_slice_with_gaps():
    flat = whole(hosts=2, gpus=4).slice(gpus=slice(0, 3)).flatten("ranks")

    assert list(flat.slice(ranks=slice(2, 5)).ranks()) == [2, 4, 5]


def test_region_flatten_refuses_a_bad_label():
    with pytest.raises(ShapeError, match="a label must be an identifier such as 'gpus', got 'all ranks'"):
        whole(gpus=4).flatten("all ranks")


@given(views(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_region_split_then_flatten_is_the_identity(region, slow, fast, infer_slow):
    flat = whole(ranks=slow * fast)
    given_size = {"b": fast} if infer_slow else {"a": slow}

    apart = flat.split(ranks=("a", "b"), **given_size)

    assert apart.extent == Extent(a=slow, b=fast)
    assert apart.flatten("ranks") == flat
    assert region.flatten("x").split(x=("x",)).flatten("x") == region.flatten("x")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_region_split_numbers_the_parts_in_row_major_order(factors):
    names = [f"d{i}" for i in range(len(factors))]

    apart = whole(ranks=math.prod(factors)).split(ranks=names, **dict(zip(names, factors, strict=True)))

    assert seen(apart) == reference(dict(zip(names, factors, strict=True)))


def test_region_split_keeps_the_place_of_the_dimension():
    view = whole(hosts=4, gpus=6).split(hosts=("dp", "rep"), rep=2, gpus=("pp", "tp"), tp=3)

    assert list(view.extent.items()) == [("dp", 2), ("rep", 2), ("pp", 2), ("tp", 3)]
    assert list(view.ranks()) == list(range(24))


def test_region_split_may_keep_the_old_label():
    assert whole(gpus=8).split(gpus=["gpus", "tp"], tp=2).extent == Extent(gpus=4, tp=2)


@rows(
    ("parts", "text"),
    [
        (
            {"hosts": ("dp", "pp"), "pp": 3},
            r"'hosts' has size 4, which cannot be split into \('dp', 'pp'\) with \{'pp': 3\}",
        ),
        ({"hosts": ("dp", "pp"), "pp": 2, "dp": 1}, "'hosts' has size 4, which cannot be split into"),
        (
            {"hosts": ("dp", "pp")},
            r"'hosts' \(size 4\) .* leaves more than one size open: give all but one of 'dp', 'pp'",
        ),
        (
            {"hosts": ("dp", "gpus"), "dp": 2},
            r"the label 'gpus' would come twice: Extent\(hosts=4, gpus=8\) would become dp, gpus, gpus",
        ),
        ({"hosts": ("dp", "dp"), "dp": 2}, "the label 'dp' would come twice"),
        ({"hosts": (), "dp": 2}, r"'hosts' \(size 4\) cannot be split into no dimension"),
        ({"host": ("dp", "pp"), "pp": 2}, "has no dimension 'host'"),
        ({"hosts": ("dp", "pp"), "tp": 2}, "tp=2 is the size of no new label; new labels are: 'dp', 'pp'"),
        ({"tp": 2}, "tp=2 is the size of no new label; new labels are: none"),
        ({"hosts": ("dp", "pp"), "pp": 0}, "the size of 'pp' must be a whole number of at least 1, got 0"),
        ({"hosts": "dp"}, r"split takes new labels such as hosts=\('dp', 'pp'\) .*, got hosts='dp'"),
        ({"hosts": ("dp", "a b"), "dp": 2}, "a label must be an identifier such as 'gpus', got 'a b'"),
    ],
)
def test_region_split_refuses(parts, text):
    with pytest.raises(ShapeError, match=text):
        whole(hosts=4, gpus=8).split(**parts)


@given(views())
def test_region_rename_keeps_ranks(region):
    renamed = region.rename(**{label: f"new_{label}" for label in region.extent})

    assert renamed.extent.labels == tuple(f"new_{label}" for label in region.extent)
    assert renamed.extent.sizes == region.extent.sizes
    assert list(renamed.ranks()) == list(region.ranks())
    assert renamed.rename(**{f"new_{label}": label for label in region.extent}) == region


def test_region_rename_can_swap_labels():
    swapped = whole(hosts=2, gpus=4).rename(hosts="gpus", gpus="hosts")

    assert list(swapped.extent.items()) == [("gpus", 2), ("hosts", 4)]
    assert list(swapped.slice(gpus=1).ranks()) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ({"gpu": "tp"}, "has no dimension 'gpu'"),
        (
            {"gpus": "hosts"},
            r"the label 'hosts' would come twice: Extent\(hosts=2, gpus=4\) would become hosts, hosts",
        ),
        ({"gpus": "t p"}, "a label must be an identifier"),
        ({"gpus": 3}, "a label must be an identifier such as 'gpus', got 3"),
    ],
)
def test_region_rename_refuses(labels, text):
    with pytest.raises(ShapeError, match=text):
        whole(hosts=2, gpus=4).rename(**labels)


# ---- exclude -----------------------------------------------------------------------------------------------------


def test_region_exclude_takes_a_member_on_any_view():
    """M5: a point seen through one view takes the same member out of another."""
    mesh = whole(hosts=2, gpus=4)
    view = mesh.slice(gpus=slice(2, 4)).flatten("ranks")

    assert list(view.exclude([mesh.point(7)]).ranks()) == [2, 3, 6]
    assert list(mesh.exclude([view.point(3)]).ranks()) == [0, 1, 2, 3, 4, 5, 6]


def test_region_exclude_reads_a_plain_mapping_in_its_own_labels():
    """M5."""
    view = whole(hosts=2, gpus=4).slice(gpus=slice(2, 4)).flatten("ranks")

    assert list(view.exclude([{"ranks": 0}, {"ranks": -1}]).ranks()) == [3, 6]
    with pytest.raises(ShapeError, match="no dimension 'hosts'"):
        view.exclude([{"hosts": 0, "gpus": 0}])


def test_region_exclude_reads_a_point_of_no_mesh_as_its_coordinates():
    view = whole(gpus=4).slice(gpus=slice(2, 4))

    assert list(view.exclude([view.extent.point(0)]).ranks()) == [3]
    assert list(view.exclude([Extent(gpus=4).point(1)]).ranks()) == [2]


def test_region_exclude_refuses_a_point_of_another_mesh():
    with pytest.raises(ShapeError, match=r"the member \[gpus=1\] is of the mesh 'n', this view is of 'm'"):
        whole(gpus=4).exclude([Region({"gpus": 4}, mesh="n").point(1)])


def test_region_exclude_refuses_a_member_outside_the_view():
    mesh = whole(gpus=4)

    with pytest.raises(
        ShapeError, match=r"the member \[gpus=3\] \(rank 3 of Extent\(gpus=4\)\) is not in this view of"
    ):
        mesh.slice(gpus=slice(0, 2)).exclude([mesh.point(3)])
    with pytest.raises(ShapeError, match="'gpus' has size 2, so gpus=3 is outside of it"):
        mesh.slice(gpus=slice(0, 2)).exclude([{"gpus": 3}])


@pytest.mark.parametrize("points", [[3], ["gpus"], [None]])
def test_region_exclude_refuses_what_is_no_point(points):
    with pytest.raises(ShapeError, match="a point is a mapping of label to index"):
        whole(gpus=4).exclude(points)


def test_region_exclude_refuses_a_single_point():
    with pytest.raises(
        ShapeError, match=r"exclude takes a list of points, got one: write exclude\(\[\{'gpus': 1\}\]\)"
    ):
        whole(gpus=4).exclude({"gpus": 1})


def test_region_exclude_twice_is_excluding_once():
    mesh = whole(gpus=4)

    once = mesh.exclude([{"gpus": 1}])

    assert once.exclude([{"gpus": 1}]) == once.exclude([mesh.point(1)]) == once
    assert once.exclude([{"gpus": 2}]) == mesh.exclude([{"gpus": 2}, {"gpus": 1}])


def test_region_exclude_ranks_passes_over_those_outside():
    assert whole(gpus=4).slice(gpus=slice(0, 2)).exclude_ranks([1, 3, 17]).missing() == (1,)


@given(st.data(), views())
def test_region_exclude_keeps_extent_and_ranks(data, region):
    """RG-3."""
    points = list(region.points())
    out = data.draw(st.lists(st.sampled_from(points))) if points else []

    sparse = region.exclude(out)

    assert sparse.extent == region.extent
    assert list(sparse.points()) == [point for point in points if point not in out]
    assert region.exclude([dict(point) for point in out]) == sparse


@given(st.data(), views())
def test_region_views_of_a_sparse_view_keep_what_is_missing(data, region):
    """RG-3: excluding before or after a view is made comes to the same."""
    ranks = list(region.ranks())
    out = data.draw(st.lists(st.sampled_from(ranks))) if ranks else []
    selection = data.draw(selections(region.extent))

    assert region.exclude_ranks(out).slice(**selection) == region.slice(**selection).exclude_ranks(out)
    assert region.exclude_ranks(out).flatten("x") == region.flatten("x").exclude_ranks(out)


def test_region_can_lose_all_its_members():
    """M6."""
    nobody = whole(gpus=2).exclude([{"gpus": 0}, {"gpus": 1}])

    assert (len(nobody), list(nobody.points()), nobody.extent) == (0, [], {"gpus": 2})
    assert len(nobody.slice(gpus=0)) == 0
