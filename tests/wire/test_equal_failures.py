"""Equal failures of several members are one where a group is read, and all of them where programs ask (rule X1)."""

from __future__ import annotations

import pickle
import traceback

import attrs
import pytest
from tests.wire.sent_exceptions import HERE, raised, round_trip

from trimesh.errors import MeshErrorGroup, coords, leaves, origin, set_origin
from trimesh.shape.extent import Extent

EIGHT = Extent(gpus=8)


def failure(rank: int, error: Exception, extent: Extent = EIGHT) -> Exception:
    """Return an error as it comes from a rank of `procs`."""
    where = attrs.evolve(HERE, mesh="procs", point=extent.point(rank))
    return round_trip(raised(error), where=where)


def ranks(group: BaseException) -> list[int]:
    return [point.rank for point in coords(group)]


def test_equal_failures_are_one() -> None:
    group = MeshErrorGroup("step failed", [failure(rank, ValueError("x")) for rank in range(8)])

    assert [type(error) for error in group.exceptions] == [ValueError]
    assert len(group.failures) == len(list(leaves(group))) == 8
    assert ranks(group) == list(range(8))
    assert all(leaf.__cause__ is not None for leaf in leaves(group))
    printed = "".join(traceback.format_exception(group))
    assert printed.count("ValueError: x\n") == 1
    assert "the same at procs[gpus=1..7]" in printed


def test_failures_differ_by_type_text_and_place() -> None:
    elsewhere = MeshErrorGroup("step failed", [failure(0, ValueError("x"))])
    one, *others = [
        failure(0, ValueError("x")),
        failure(1, KeyError("x")),
        failure(2, ValueError("y")),
        *elsewhere.failures,
    ]
    other = ValueError("x")
    set_origin(other, attrs.evolve(HERE, mesh="procs", point=EIGHT.point(3)))  # it has no remote traceback

    group = MeshErrorGroup("step failed", [one, *others[:2], other, ValueError("x")])

    assert len(group.exceptions) == 5


def test_text_has_the_first_failure_and_its_place() -> None:
    many = [failure(rank, ValueError("x")) for rank in range(3)]

    assert str(MeshErrorGroup("step failed", many[:1])) == "step failed: ValueError: x (procs[gpus=0])"
    assert str(MeshErrorGroup("step failed", many)) == "step failed: ValueError: x (procs[gpus=0] and 2 more)"
    assert str(MeshErrorGroup("left", [MeshErrorGroup("in", many)])) == "left: ValueError: x (procs[gpus=0] and 2 more)"
    assert str(MeshErrorGroup("procs", [OSError("procs[gpus=0] is gone"), *many])).endswith("is gone (and 3 more)")
    assert str(MeshErrorGroup("left", [ValueError()])) == "left: ValueError"


def test_text_is_one_short_line() -> None:
    text = str(MeshErrorGroup("step failed", [ValueError("x" * 1000 + "\nmore")]))

    assert len(text) < 400
    assert "\n" not in text


def test_text_of_an_error_without_one_is_its_type() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert str(MeshErrorGroup("step failed", [Mute()])) == "step failed: Mute"


def test_predicate_is_asked_of_every_failure() -> None:
    group = MeshErrorGroup("step failed", [failure(rank, ValueError("x")) for rank in range(4)], mesh="procs")

    matched, rest = group.split(lambda error: origin(error) is not None and ranks(error)[0] == 2)

    assert isinstance(matched, MeshErrorGroup)
    assert isinstance(rest, MeshErrorGroup)
    assert (ranks(matched), ranks(rest), rest.mesh) == ([2], [0, 1, 3], "procs")
    part = group.subgroup(lambda error: ranks(error)[0] > 1 if origin(error) else False)
    assert ranks(part) == [2, 3]


@pytest.mark.parametrize("is_inside", [False, True])
def test_no_failure_is_lost_by_except_star(*, is_inside: bool) -> None:
    group: ExceptionGroup[Exception] = MeshErrorGroup(
        "step failed", [failure(rank, (ValueError if rank % 2 else KeyError)("x")) for rank in range(6)]
    )
    if is_inside:
        group = ExceptionGroup("of a nursery", [group])
    found: list[int] = []
    with pytest.raises(ExceptionGroup) as caught:
        try:
            raise group
        except* ValueError as matched:
            found = ranks(matched)

    assert found == [1, 3, 5]
    assert ranks(caught.value) == [0, 2, 4]


def test_group_that_is_raised_again_in_part_keeps_all() -> None:
    group = MeshErrorGroup("step failed", [failure(rank, (ValueError if rank else OSError)("x")) for rank in range(3)])
    with pytest.raises(ExceptionGroup) as caught:
        try:
            raise group
        except* ValueError:
            raise

    assert ranks(caught.value) == [0, 1, 2]


def test_group_travels_and_is_pickled_with_all() -> None:
    group = MeshErrorGroup("step failed", [failure(rank, ValueError("x")) for rank in range(3)])

    for copy in (pickle.loads(pickle.dumps(group)), round_trip(raised(group), where=HERE)):
        assert isinstance(copy, MeshErrorGroup)
        assert ranks(copy) == [0, 1, 2]
        assert len(copy.exceptions) == 1


def test_places_that_make_no_row_are_listed() -> None:
    grid = Extent(hosts=2, gpus=4)
    places = (0, 1, 6)
    group = MeshErrorGroup("step failed", [failure(rank, ValueError("x"), grid) for rank in places])

    [first] = group.exceptions
    assert first.__notes__[-1] == "the same at procs[hosts=0,gpus=1], procs[hosts=1,gpus=2]"
    row = MeshErrorGroup("step failed", [failure(rank, ValueError("y"), grid) for rank in range(4, 8)])
    assert row.exceptions[0].__notes__[-1] == "the same at procs[hosts=1,gpus=1..3]"


def test_note_is_of_the_last_group_that_a_failure_is_put_into() -> None:
    failures = [failure(rank, ValueError("x")) for rank in range(4)]
    for count in (2, 4):
        group = MeshErrorGroup("step failed", failures[:count])

    notes = [note for note in group.exceptions[0].__notes__ if note.startswith("the same")]
    assert notes == ["the same at procs[gpus=1..3]"]


def test_equal_failures_that_refuse_attributes_are_one() -> None:
    class Refuses(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    failures: list[Exception] = []
    for rank in range(2):
        error = Refuses("x")
        vars(error)["__trimesh_origin__"] = attrs.evolve(HERE, mesh="procs", point=EIGHT.point(rank))
        failures.append(error)

    group = MeshErrorGroup("step failed", failures)

    assert len(group.exceptions) == 1
    assert "the same at procs[gpus=1]" in "".join(traceback.format_exception(group))
