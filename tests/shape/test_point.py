"""`Point`: coordinates that know where they lie."""

from __future__ import annotations

import pickle
import types
from unittest import mock

import pytest

from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region


def test_point_equals_the_plain_mapping_of_its_coordinates():
    """M5: whatever mesh it is a member of."""
    for point in (Extent(hosts=2, gpus=4).point(6), Region(Extent(hosts=2, gpus=4), mesh="m").point(6)):
        assert point == {"hosts": 1, "gpus": 2}
        assert [{"gpus": 2, "hosts": 1}] == [point]  # noqa: SIM300 - the reflected comparison
        assert point == types.MappingProxyType({"hosts": 1, "gpus": 2})
        assert point != {"hosts": 1, "gpus": 3}
        assert point != 6


def test_point_reads_as_a_mapping():
    point = Extent(hosts=2, gpus=4).point(6)

    assert dict(point) == {"hosts": 1, "gpus": 2}
    assert list(point) == ["hosts", "gpus"]
    assert (point["hosts"], point["gpus"], len(point), "tp" in point) == (1, 2, 2, False)
    with pytest.raises(KeyError, match="tp"):
        point["tp"]


def test_point_knows_its_rank_extent_and_sizes():
    point = Extent(hosts=2, gpus=4).point(6)

    assert (point.rank, point.extent, point.size("gpus")) == (6, {"hosts": 2, "gpus": 4}, 4)
    assert (point.mesh, point.base_rank) == (None, None)
    with pytest.raises(ShapeError, match="no dimension 'tp'"):
        point.size("tp")


def test_point_repr_shows_index_and_size():
    assert repr(Extent(hosts=2, gpus=4).point(6)) == "{'hosts': 1/2, 'gpus': 2/4}"
    assert repr(Extent().point(0)) == "{}"


def test_point_cannot_be_changed():
    with pytest.raises(AttributeError):
        Extent(gpus=4).point(0).rank = 1  # type: ignore[misc]


@pytest.mark.parametrize("rank", [-1, 4])
def test_point_refuses_a_rank_outside_its_extent(rank):
    with pytest.raises(ShapeError, match=rf"Extent\(gpus=4\) has 4 points, ranks start at 0; got rank {rank}"):
        Point(rank, Extent(gpus=4))


def test_points_of_different_members_differ():
    """The same coordinates seen through two views, or in two meshes, are different members."""
    whole = Region(Extent(gpus=4), mesh="m")
    view = whole.slice(gpus=slice(2, 4))
    other = Region(Extent(gpus=4), mesh="n")

    different = [
        whole.point(0),
        view.point(0),
        other.point(0),
        whole.point(1),
        Extent(gpus=4).point(0),
        Extent(gpus=2).point(0),
    ]

    assert len(set(different)) == len(different)
    assert view.point(0) == {"gpus": 0} == whole.point(0)


def test_points_of_the_same_member_and_view_are_equal():
    whole = Region(Extent(gpus=4), mesh="m")

    assert whole.point(2) == Region(Extent(gpus=4), mesh="m").point_of(2)
    assert hash(whole.point(2)) == hash(Region(Extent(gpus=4), mesh="m").point(2))


def test_point_leaves_the_comparison_to_what_is_no_mapping():
    assert (Extent(gpus=4).point(2) == 2) is False
    assert Extent(gpus=4).point(2) == mock.ANY


def test_point_survives_pickling():
    point = Region(Extent(gpus=4), mesh=7).slice(gpus=slice(2, 4)).point(1)

    copy = pickle.loads(pickle.dumps(point))

    assert copy == point
    assert (copy.rank, copy.base_rank, copy.mesh, copy.extent) == (1, 3, 7, {"gpus": 2})
