"""What users write of how a tensor lies, and what ranks are told."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is an extra")

from trimesh import ShapeError
from trimesh.tensor.protocol.placement import Placements, cuts_by_label, placements_of

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


@pytest.mark.parametrize("placements", [[None, None], ["dp", None], ["tp", "dp"], [None, ("dp", "tp")]])
def test_placements_are_what_was_written(placements: Any) -> None:
    again = placements_of(cuts_by_label(placements, 2, EXTENT), ["", ""], 2, list(EXTENT))

    assert again == placements
    assert cuts_by_label(again, 2, EXTENT) == cuts_by_label(placements, 2, EXTENT)


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        (["dp"], r"here 2 of them.*got \['dp'\]"),
        ("dp", "got 'dp'"),
        (["pp", None], r"labels of its mesh, \['dp', 'tp'\], got 'pp'"),
        (["dp", "dp"], "a label cuts one dimension, got 'dp' for 0 and 1"),
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
