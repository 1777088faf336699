"""What users write of how a tensor lies, and what ranks are told."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is an extra")

from torch.distributed.tensor import Replicate, Shard

from trimesh import ShapeError
from trimesh.tensor.protocol.placement import Placements, cuts_by_label, placements_by_name, placements_of

pytestmark = pytest.mark.torch

EXTENT = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("placements", "cuts"),
    [
        (None, (-1, -1)),
        ([None, None], (-1, -1)),
        (["dp", None], (0, -1)),
        (["tp", "dp"], (1, 0)),
        ([None, ("dp", "tp")], (1, 1)),
        (((), ("tp",)), (-1, 1)),
    ],
)
def test_cuts_are_by_label(placements: Any, cuts: tuple[int, ...]) -> None:
    assert cuts_by_label(placements, 2, EXTENT) == cuts


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        (None, None),
        (("dp", None), ("dp", None)),
        ({}, [None, None]),
        ({"tp": 1}, [None, "tp"]),
        ({"tp": -2, "dp": 0}, [("dp", "tp"), None]),
        ({"dp": Shard(1), "tp": Replicate()}, [None, "dp"]),
    ],
)
def test_placements_are_written_by_dimension_of_the_mesh(spec: Any, placements: Any) -> None:
    assert placements_by_name(spec, 2, EXTENT) == placements


@pytest.mark.parametrize("spec", [{"pp": 0}, {"dp": 2}, {"dp": True}, {"dp": "tp"}])
def test_dimensions_that_do_not_fit_are_refused(spec: Any) -> None:
    with pytest.raises(ShapeError):
        placements_by_name(spec, 2, EXTENT)


@pytest.mark.parametrize("placements", [[None, None], ["dp", None], ["tp", "dp"], [None, ("dp", "tp")]])
def test_placements_are_what_was_written(placements: Any) -> None:
    again = placements_of(cuts_by_label(placements, 2, EXTENT), ["", ""], 2, list(EXTENT))

    assert again == placements
    assert cuts_by_label(again, 2, EXTENT) == cuts_by_label(placements, 2, EXTENT)


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        (["dp"], r"each of the 2 dimensions.*got \['dp'\]"),
        ("dp", "got 'dp'"),
        (["pp", None], r"labels of its mesh, \['dp', 'tp'\], got 'pp'"),
        (["dp", "dp"], "a label must cut one dimension only, got 'dp' for 0 and 1"),
        ([("tp", "dp"), None], "in the order of the mesh"),
    ],
)
def test_placements_that_do_not_fit_are_refused(placements: Any, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        cuts_by_label(placements, 2, EXTENT)


def test_partial_placements_differ_from_whole_ones() -> None:
    partial = Placements([None], {"dp": "sum"})

    assert partial != [None]
    assert partial != Placements([None], {"dp": "avg"})
    assert partial == Placements([None], {"dp": "sum"})
    assert repr(partial) == "Placements([None], partial={'dp': 'sum'})"
    assert repr(Placements(["dp"])) == "Placements(['dp'])"
