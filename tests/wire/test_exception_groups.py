"""Groups of exceptions travel with their members (rules E04, X1)."""

from __future__ import annotations

import pickle
import sys
import threading
import types

import attrs
from tests.wire.odd_exceptions import KeywordOnly, OwnBaseGroup, OwnGroup
from tests.wire.sent_exceptions import HERE, POINT, raised, remote_texts, round_trip

from trimesh import limits
from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.pickled.payload import Decoder, Encoder
from trimesh.errors import MeshErrorGroup, RestartLimit, coords, leaves, origin, set_origin


def test_group_arrives_with_its_members() -> None:
    """E04."""
    group = ExceptionGroup("outer", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")]), OSError(2, "c")])

    arrived = round_trip(raised(group), where=HERE, note="on gpus=2")

    assert isinstance(arrived, ExceptionGroup)
    assert (arrived.message, [repr(leaf) for leaf in leaves(arrived)]) == (
        "outer",
        ["ValueError('a')", "KeyError('b')", "FileNotFoundError(2, 'c')"],
    )
    assert [origin(leaf) for leaf in leaves(arrived)] == [HERE] * 3
    assert arrived.__notes__ == ["on gpus=2"]
    assert all(leaf.__notes__ == ["on gpus=2"] for leaf in leaves(arrived))


def test_members_of_a_group_have_their_own_remote_tracebacks() -> None:
    """E04: `except*` hands them out one by one."""

    def one() -> None:
        raise ValueError("a")

    def other() -> None:
        raise KeyError("b")

    found: list[Exception] = []
    for function in (one, other):
        try:
            function()
        except Exception as error:  # noqa: BLE001 - any
            found.append(error)

    arrived = round_trip(ExceptionGroup("g", found))
    texts: list[str] = []
    try:
        raise arrived
    except* ValueError as group:
        texts += [text for leaf in leaves(group) for text in remote_texts(leaf)]
    except* KeyError as group:
        texts += [text for leaf in leaves(group) for text in remote_texts(leaf)]

    assert len(texts) == 2
    assert "in one" in texts[0]
    assert "in other" in texts[1]


def test_own_group_class_arrives_without_its_constructor() -> None:
    """E04."""
    arrived = round_trip(OwnGroup("g", [ValueError("a"), KeyError("b")], 7))

    assert type(arrived) is OwnGroup
    assert arrived.code == 7
    assert arrived.split(ValueError)[0].code == 7  # type: ignore[union-attr]


def test_group_whose_class_cannot_be_had_keeps_its_members() -> None:
    """E05."""
    module = types.ModuleType("only_over_there")
    module.Group = type("Group", (ExceptionGroup,), {"__module__": "only_over_there"})  # type: ignore[attr-defined]
    sys.modules["only_over_there"] = module
    try:
        encoded = encode_exception(module.Group("g", [ValueError("a")]), Encoder())
    finally:
        del sys.modules["only_over_there"]

    arrived = decode_exception(encoded.payload, Decoder())

    assert type(arrived) is ExceptionGroup
    assert arrived.message == "g"
    assert [repr(leaf) for leaf in leaves(arrived)] == ["ValueError('a')"]
    assert "only_over_there.Group" in arrived.__notes__[0]


def test_mesh_error_group_keeps_partial_if_it_travels() -> None:
    """X1."""
    group = MeshErrorGroup("g", [ValueError("a")], partial=[1, None], mesh="m", endpoint="e")

    arrived = round_trip(group)

    assert type(arrived) is MeshErrorGroup
    assert (arrived.partial, arrived.mesh, arrived.endpoint) == ([1, None], "m", "e")


def test_mesh_error_group_drops_partial_that_does_not_travel() -> None:
    """X1."""
    arrived = round_trip(MeshErrorGroup("g", [ValueError("a")], partial=threading.Lock(), mesh="m"))

    assert type(arrived) is MeshErrorGroup
    assert (arrived.partial, arrived.mesh) == (None, "m")


def test_restart_limit_keeps_its_causes() -> None:
    """P4."""
    causes = [KeywordOnly(code=1), ValueError("b")]
    for cause in causes:
        set_origin(cause, HERE)

    arrived = round_trip(RestartLimit("too often", causes=causes))

    assert isinstance(arrived, RestartLimit)
    assert [type(cause) for cause in arrived.causes] == [KeywordOnly, ValueError]
    assert [origin(cause) for cause in arrived.causes] == [HERE, HERE]


def test_wide_group_is_cut() -> None:
    group = ExceptionGroup("g", [ValueError(n) for n in range(1000)])

    arrived = round_trip(group)

    assert len(list(leaves(arrived))) == limits.EXCEPTION_CHAIN_MAX
    assert arrived.__notes__ == [f"({1000 - limits.EXCEPTION_CHAIN_MAX} more exceptions of this group were left out)"]


def test_deep_and_wide_group_is_cut() -> None:
    group: Exception = ValueError("seed")
    for depth in range(900):
        group = ExceptionGroup(str(depth), [group, ValueError(depth)])

    arrived = round_trip(group)

    assert len(list(leaves(arrived.exceptions[1]))) == 1  # type: ignore[attr-defined]
    assert isinstance(arrived, ExceptionGroup)
    assert arrived.message == "899"


def test_same_exception_twice_in_a_group_stays_one() -> None:
    shared = ValueError("a")

    arrived = round_trip(ExceptionGroup("g", [shared, ExceptionGroup("h", [shared])]))

    first, second = leaves(arrived)
    assert first is second


def test_group_as_a_cause_arrives() -> None:
    error = ValueError("x")
    error.__cause__ = ExceptionGroup("g", [KeyError("k"), error])

    arrived = round_trip(error)

    assert isinstance(arrived.__cause__, ExceptionGroup)
    assert arrived.__cause__.exceptions[1] is arrived


def test_own_base_group_of_exceptions_becomes_an_exception_group() -> None:
    """EX-3."""
    arrived = round_trip(OwnBaseGroup("g", [ValueError("a")]))

    assert type(arrived) is ExceptionGroup
    assert "OwnBaseGroup" in arrived.__notes__[0]


def test_coords_of_an_arrived_group_are_its_leaves_points() -> None:
    """E04."""
    errors: list[Exception] = []
    for rank in range(3):
        error = ValueError(rank)
        set_origin(error, attrs.evolve(HERE, point={"gpus": rank}))  # type: ignore[arg-type]
        errors.append(error)

    arrived = round_trip(ExceptionGroup("g", errors))

    assert coords(arrived) == [{"gpus": 0}, {"gpus": 1}, {"gpus": 2}]


def test_origin_notes_and_traceback_survive_split_and_being_sent_on() -> None:
    """E04."""
    arrived = round_trip(raised(ExceptionGroup("g", [ValueError("a"), KeyError("b")])), where=HERE, note="on gpus=2")
    group = MeshErrorGroup("mesh", [arrived], mesh="trainers")

    matched, _ = group.split(ValueError)
    encoded = Encoder().encode([matched], what="the value")
    [sent] = Decoder().decode(encoded.payload)

    assert type(sent) is MeshErrorGroup
    assert sent.mesh == "trainers"
    [leaf] = leaves(sent)
    assert type(leaf) is ValueError
    assert origin(leaf) == HERE
    assert leaf.__notes__ == ["on gpus=2"]
    assert remote_texts(leaf) == remote_texts(next(leaves(arrived)))
    assert coords(sent) == [POINT] == [{"gpus": 2}]


def test_plain_pickle_keeps_origin_and_notes() -> None:
    """E04."""
    arrived = round_trip(ExceptionGroup("g", [ValueError("a")]), where=HERE, note="on gpus=2")

    again = pickle.loads(pickle.dumps(arrived))

    assert coords(again) == [{"gpus": 2}]
    assert again.exceptions[0].__notes__ == ["on gpus=2"]
