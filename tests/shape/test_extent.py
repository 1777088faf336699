"""`Extent`: labelled sizes and the row-major numbering of their points."""

from __future__ import annotations

import itertools
import pickle
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh.errors import ShapeError
from trimesh.shape.extent import Extent

SIZES = st.dictionaries(st.sampled_from(["hosts", "gpus", "dp", "tp", "größe"]), st.integers(1, 5), max_size=4)


def test_extent_equals_plain_mappings_in_any_order():
    """M5."""
    extent = Extent(hosts=2, gpus=4)

    assert extent == {"gpus": 4, "hosts": 2}
    assert {"gpus": 4, "hosts": 2} == extent  # noqa: SIM300 - the reflected comparison
    assert extent == types.MappingProxyType({"hosts": 2, "gpus": 4})
    assert extent != {"hosts": 2}
    assert extent != 8


def test_extent_differs_from_one_of_other_order():
    assert Extent(hosts=2, gpus=4) != Extent(gpus=4, hosts=2)
    assert len({Extent(hosts=2, gpus=4), Extent({"hosts": 2, "gpus": 4}), Extent(gpus=4, hosts=2)}) == 2


def test_extent_reads_as_a_mapping():
    extent = Extent({"hosts": 2}, gpus=4)

    assert list(extent) == ["hosts", "gpus"]
    assert list(extent.items()) == [("hosts", 2), ("gpus", 4)]
    assert (extent["gpus"], extent.get("tp"), "tp" in extent, len(extent)) == (4, None, False, 2)
    with pytest.raises(KeyError, match="tp"):
        extent["tp"]


def test_extent_cannot_be_changed():
    with pytest.raises(AttributeError):
        Extent(gpus=4).sizes = (5,)  # type: ignore[misc]


def test_extent_without_dimension_has_one_point():
    assert Extent().nelements == 1
    assert [dict(point) for point in Extent().points()] == [{}]
    assert Extent().rank({}) == 0
    assert Extent() == {}
    assert repr(Extent()) == "Extent()"


@rows("size", [0, -1, 1.0, "4", True, None, [2]])
def test_extent_refuses_a_size_that_is_no_whole_number_of_at_least_one(size):
    """M6."""
    with pytest.raises(ShapeError, match="the size of 'gpus' must be a whole number of at least 1, got ") as caught:
        Extent({"gpus": size})
    assert str(caught.value).endswith(repr(size))


@rows("label", ["", "2x", "a-b", "a b", "lambda", 3, None, b"gpus"])
def test_extent_refuses_a_label_that_is_no_identifier(label):
    with pytest.raises(ShapeError, match="a label must be an identifier") as caught:
        Extent({label: 2})
    assert str(caught.value).endswith(repr(label))


def test_extent_refuses_what_is_no_mapping():
    with pytest.raises(ShapeError, match=r"an extent is a mapping of label to size .*, got \[4\]"):
        Extent([4])  # type: ignore[arg-type]


def test_extent_refuses_a_label_given_twice():
    with pytest.raises(ShapeError, match="'gpus' comes twice, with sizes 4 and 2"):
        Extent({"gpus": 4}, gpus=2)


class Whole:
    """A whole number as numpy has them."""

    def __init__(self, value: int | None) -> None:
        self.value = value

    def __index__(self) -> int:
        if self.value is None:
            raise TypeError("only integer scalar arrays can be converted to a scalar index")
        return self.value


def test_extent_takes_whole_numbers_of_other_libraries():
    extent = Extent(gpus=Whole(4))

    assert extent == {"gpus": 4}
    assert type(extent.size("gpus")) is int
    assert extent.index("gpus", Whole(-1)) == 3
    with pytest.raises(ShapeError, match="whole number"):
        Extent(gpus=Whole(None))


def test_extent_concatenates_in_order():
    assert list((Extent(hosts=2) + {"gpus": 4}).items()) == [("hosts", 2), ("gpus", 4)]
    assert Extent() + Extent(gpus=4) == {"gpus": 4}


def test_extent_refuses_to_concatenate_a_label_twice():
    with pytest.raises(ShapeError, match=r"'gpus' \(size 2\) comes again with size 4"):
        Extent(gpus=2) + {"gpus": 4}


def test_extent_names_the_label_it_does_not_have():
    text = r"Extent\(hosts=2, gpus=4\) has no dimension 'gpu' \(is it gpus\?\); its labels are: 'hosts', 'gpus'"
    with pytest.raises(ShapeError, match=text):
        Extent(hosts=2, gpus=4).size("gpu")
    with pytest.raises(ShapeError, match=r"Extent\(\) has no dimension 'gpu'; its labels are: none"):
        Extent().size("gpu")


def test_extent_index_counts_from_the_end_when_negative():
    extent = Extent(gpus=4)

    assert [extent.index("gpus", i) for i in (0, 3, -1, -4)] == [0, 3, 3, 0]


@pytest.mark.parametrize("index", [4, -5])
def test_extent_index_outside_names_label_size_and_index(index):
    with pytest.raises(ShapeError, match=f"'gpus' has size 4, so gpus={index} is outside of it"):
        Extent(gpus=4).index("gpus", index)


@pytest.mark.parametrize("index", [1.5, "1", None, True])
def test_extent_index_must_be_a_whole_number(index):
    with pytest.raises(ShapeError, match=r"an index of 'gpus' \(size 4\) must be a whole number, got "):
        Extent(gpus=4).index("gpus", index)


def test_extent_rank_needs_every_label_and_no_other():
    extent = Extent(hosts=2, gpus=4)

    assert extent.rank({"gpus": 1, "hosts": -1}) == 5
    with pytest.raises(ShapeError, match=r"needs an index of 'gpus' \(size 4\), got \{'hosts': 1\}"):
        extent.rank({"hosts": 1})
    with pytest.raises(ShapeError, match="has no dimension 'tp'"):
        extent.rank({"hosts": 1, "gpus": 0, "tp": 0})


@pytest.mark.parametrize("rank", [-1, 8])
def test_extent_point_refuses_a_rank_outside(rank):
    with pytest.raises(ShapeError, match=rf"Extent\(hosts=2, gpus=4\) has 8 points, ranks start at 0; got rank {rank}"):
        Extent(hosts=2, gpus=4).point(rank)


def test_extent_point_refuses_what_is_no_rank():
    with pytest.raises(ShapeError, match=r"a rank must be a whole number, got 1\.5"):
        Extent(gpus=4).point(1.5)  # type: ignore[arg-type]


def test_extent_survives_pickling():
    for extent in (Extent(hosts=2, gpus=4), Extent(), Extent.of_view(("gpus",), (0,))):
        copy = pickle.loads(pickle.dumps(extent))
        assert copy == extent
        assert hash(copy) == hash(extent)


@given(SIZES)
def test_extent_rank_and_point_are_inverse(sizes):
    extent = Extent(sizes)

    for rank in range(extent.nelements):
        assert extent.rank(extent.point(rank)) == rank


@given(SIZES)
def test_extent_points_are_the_product_of_the_indices(sizes):
    expected = [dict(zip(sizes, index, strict=True)) for index in itertools.product(*map(range, sizes.values()))]

    assert [dict(point) for point in Extent(sizes).points()] == expected


@given(SIZES, SIZES)
def test_extent_concatenation_nests_the_right_in_the_left(left, right):
    right = {label: size for label, size in right.items() if label not in left}

    both = Extent(left) + Extent(right)

    assert both.labels == (*left, *right)
    for a, b in itertools.product(Extent(left).points(), Extent(right).points()):
        assert both.rank({**a, **b}) == a.rank * Extent(right).nelements + b.rank
