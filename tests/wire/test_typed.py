"""Values without pickle: what the annotations say is what arrives, and nothing else gets in."""

from __future__ import annotations

import datetime
import inspect
import pickle
import random
import sys
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import rows
from tests.wire import typed_shapes as shapes

from trimesh._wire.pickled.payload import Encoded
from trimesh._wire.typed.annotations import Arguments, Field, resolved_hints, result_of
from trimesh._wire.typed.codec import DecodeSource, Reader, Writer
from trimesh._wire.typed.known_kinds import TypedDecoder, TypedEncoder
from trimesh.errors import PayloadError, ProtocolError
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh

WHEN = datetime.datetime(2026, 11, 20, tzinfo=datetime.UTC)


def arguments_of(function: Any) -> Arguments:
    return Arguments(resolved_hints(function, function.__name__), inspect.signature(function), function.__name__)


def copied(encoded: Encoded) -> tuple[bytes, list[memoryview]]:
    return bytes(encoded.payload), [memoryview(bytearray(buffer)) for buffer in encoded.buffers]


def passed(
    function: Any, *args: Any, may_import: bool = False, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Send arguments and return what arrives."""
    writer = Writer()
    encoded = writer.finish(arguments_of(function).write(writer, args, kwargs, "mesh.call"))
    reader = Reader.of_message(*copied(encoded), DecodeSource(may_import=may_import))
    return arguments_of(function).read(reader)


def through(value: Any) -> Any:
    """Send a value by what it is."""
    return TypedDecoder().decode(*copied(TypedEncoder().encode(value, what="a value")))


# ---- by annotations ------------------------------------------------------------------------------------------------


@rows(
    ("name", "value"),
    [
        ("names", ["a", "b"]),
        ("color", shapes.Color.RED),
        ("packed", shapes.Packed(["w"], shapes.Inner(1, WHEN))),
        ("mode", "b"),
        ("anything", (1, {2, 3}, frozenset({4}), bytearray(b"5"), {6: (7,)}, {(8, 9): None})),
        ("bare", (1, "two", (3,))),
        ("loose", {"a": (1, 2)}),
        ("point", Extent(gpus=4).point(2)),
        ("points", [Extent(gpus=4).point(2), Extent(gpus=4).point(3)]),
        ("cls", shapes.Inner),
        ("option", b"bytes"),
    ],
)
def test_argument_arrives_as_its_annotation_says(name: str, value: Any):
    args, kwargs = passed(shapes.everything, 1, **{name: value})

    assert args == (1, 0.5)
    assert kwargs[name] == value
    assert type(kwargs[name]) is type(value)


def test_positional_and_variadic_arguments_keep_their_places():
    args, kwargs = passed(shapes.everything, 1, 2, 3, 4, first=b"1", second=b"2")

    assert args == (1, 2.0, 3, 4)
    assert (kwargs["first"], kwargs["second"]) == (b"1", b"2")


def test_record_may_have_fields_that_are_no_records():
    """Arrays travel beside the message, also those in a list of a record."""
    sent = shapes.Rich(numpy.arange(5), [numpy.zeros(2), numpy.ones(50_000)])
    (found,), _ = passed(shapes.rich, sent)

    assert type(found) is shapes.Rich
    assert found.array.tolist() == [0, 1, 2, 3, 4]
    assert (found.maybe, found.port) == (None, None)
    assert [array.sum() for array in found.arrays] == [0.0, 50_000.0]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("array", [1, 2], "expected ndarray, got list"),
        ("array", int, "expected ndarray, got type"),
        ("maybe", 1.5, "expected ndarray, got float"),
        ("arrays", [numpy.arange(1), 7], "expected ndarray, got int"),
        ("port", 7, "expected Port, got int"),
    ],
)
def test_field_of_a_record_that_does_not_fit_is_refused_at_the_sender(field: str, value: Any, text: str):
    wrong = shapes.Rich(numpy.arange(5))
    setattr(wrong, field, value)
    with pytest.raises(TypeError, match=f"argument 'thing' .* does not fit its annotation Rich: {text}"):
        passed(shapes.rich, wrong)


def test_exception_arrives_as_one():
    _, kwargs = passed(shapes.everything, 1, error=KeyError("lost"))

    assert type(kwargs["error"]) is KeyError
    assert kwargs["error"].args == ("lost",)


@rows(
    ("kwargs", "said"),
    [
        ({"number": "1"}, r"argument 'number' of mesh.call\(\) does not fit its annotation int"),
        ({"number": 1, "names": ["a", 2]}, r"argument 'names' .* at `\$\[1\]`"),
        ({"number": 1, "mode": "c"}, "argument 'mode'"),
        ({"number": 1, "bare": [1]}, "argument 'bare' .* expected tuple, got list"),
        ({"number": 1, "points": [{"gpus": 1}]}, "argument 'points'"),
        ({"number": 1, "point": Extent(gpus=2)}, "argument 'point'"),
        ({"number": 1, "anything": shapes.Inner(1, WHEN)}, "annotate it"),
        ({"number": 1, "anything": shapes.Opaque()}, "a dataclass, an attrs class or a msgspec.Struct"),
        ({"number": 1, "cls": type("Local", (), {})}, "argument 'cls' .* importable by name"),
        ({"number": 2**70}, "argument 'number'"),
    ],
)
def test_argument_that_does_not_fit_is_a_type_error_that_names_it(kwargs: dict[str, Any], said: str):
    with pytest.raises(TypeError, match=said):
        passed(shapes.everything, **kwargs)


def test_object_of_a_subclass_is_refused_because_a_part_of_it_would_arrive():
    with pytest.raises(TypeError, match="expected exactly Inner, got Sub"):
        passed(shapes.exactly, shapes.Sub(1, WHEN, 2))


def test_class_that_cannot_travel_is_refused_by_its_annotation():
    with pytest.raises(TypeError, match="an attrs class or a msgspec"):
        passed(shapes.opaque, shapes.Opaque())


def test_union_of_a_kind_with_others_is_refused_by_its_annotation():
    with pytest.raises(TypeError, match=r"the annotation .* of argument 'thing' of mixed\(\) cannot be used"):
        passed(shapes.mixed, 1)


def test_annotation_that_is_not_there_at_run_time_is_refused():
    with pytest.raises(TypeError, match=r"must be defined at run time.*Missing"):
        passed(shapes.missing, 1)


def test_function_is_taken_from_the_owner_alone():
    (found,), _ = passed(shapes.callback, shapes.module_function, may_import=True)
    assert found is shapes.module_function
    with pytest.raises(ProtocolError, match="only the owner of a process may"):
        passed(shapes.callback, shapes.module_function)


def test_result_of_a_generator_is_the_field_of_its_items():
    field = result_of(shapes.items, "items")
    writer = Writer()

    encoded = writer.finish(field.write(writer, shapes.Inner(1, WHEN), "an item"))

    assert field.read(Reader.of_message(*copied(encoded))) == shapes.Inner(1, WHEN)


def test_bytes_of_another_signature_are_a_protocol_error():
    writer = Writer()
    encoded = writer.finish(writer.named({"number": writer.plain(1), "unknown": writer.plain(2)}))
    with pytest.raises(ProtocolError, match="there is no argument 'unknown'"):
        arguments_of(shapes.everything).read(Reader.of_message(*copied(encoded)))

    with pytest.raises(ProtocolError, match="the argument 'number' is missing"):
        arguments_of(shapes.everything).read(Reader.of_message(*copied(writer.finish(writer.named({})))))


# ---- by what they are ----------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(-100, 100), inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers(-100, 100) | st.text())
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_value_arrives_as_what_it_is(value: Any):
    found = through(value)

    assert found == value
    assert type(found) is type(value)


def test_enum_where_nothing_is_said_goes_by_name():
    assert through(shapes.Color.RED) is shapes.Color.RED


def test_values_of_a_mesh_and_regions_travel():
    region = Region(Extent(hosts=2, gpus=2)).slice(gpus=1)
    mesh = ValueMesh(region, [1, 2])

    found = through(mesh)

    assert found.region == region
    assert tuple(found.values()) == (1, 2)


@rows(
    "array",
    [
        numpy.arange(10),
        numpy.arange(200_000.0),
        numpy.zeros((0, 3), "f4"),
        numpy.arange(12).reshape(3, 4)[:, ::2],
        numpy.array(3.5),
        numpy.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
        numpy.array(["a", "bc"]),
        numpy.arange(3)[::-1],
    ],
)
def test_array_arrives_writable_and_equal(array: Any):
    found = through(array)

    assert found.dtype == array.dtype
    numpy.testing.assert_array_equal(found, array)
    assert found.flags.writeable


def test_memory_that_two_arrays_share_stays_shared():
    whole = numpy.arange(100_000)

    first, second = through((whole, whole[:5]))

    first[0] = 7
    assert second[0] == 7


def test_numpy_number_becomes_the_builtin_that_an_annotation_wants():
    args, _ = passed(shapes.everything, numpy.int64(3), numpy.float64(0.25))

    assert args == (3, 0.25)
    assert (type(args[0]), type(args[1])) == (int, float)
    assert type(through(numpy.float32(1.5))) is numpy.float32


def test_array_of_objects_is_refused():
    with pytest.raises(TypeError, match="cannot be sent"):
        through(numpy.array([object()]))


# ---- what a peer sends ---------------------------------------------------------------------------------------------


def test_name_of_a_module_that_is_not_imported_is_not_imported():
    class Fake:
        __module__ = "antigravity"
        __qualname__ = "Fake"

    writer = Writer()
    payload = writer.finish(writer._encode(writer._ext(2, ["class", "antigravity", "webbrowser"])))
    with pytest.raises(PayloadError, match="has not imported"):
        TypedDecoder().decode(payload.payload)
    assert "antigravity" not in sys.modules


@rows(
    "parts",
    [
        ["class", "os", "system"],
        ["class", "os"],
        ["class", 1, 2],
        ["function", "os", "system"],
        ["enum", "os", "PathLike", "x"],
        ["array", None, "|O", [3]],
        ["array", None, "<f8", [1000000000]],
        ["array", b"x", "<f8", [1], None, 0, 8],
        ["scalar", "|O", b"12345678"],
        ["point", 99, None, None, None],
        ["region", 1, 2, 3, 4, 5],
        ["exception", b"junk"],
        ["nonsense"],
        [],
        [3],
    ],
)
def test_forged_kind_is_a_protocol_error(parts: list[Any]):
    writer = Writer()
    payload = writer.finish(writer._encode(writer._ext(2, parts)))
    with pytest.raises((ProtocolError, PayloadError)):
        TypedDecoder().decode(payload.payload)


@pytest.mark.parametrize("payload", [b"", b".", b"\xc1.", b"\x01", b"junk\x03", b"\x00" * 40 + b"\x03"])
def test_foreign_payload_is_a_protocol_error(payload: bytes):
    with pytest.raises(ProtocolError):
        TypedDecoder().decode(payload)


def test_pickle_is_a_protocol_error_and_is_not_run():
    with pytest.raises(ProtocolError):
        TypedDecoder().decode(pickle.dumps(shapes.Opaque()))


MESSAGES = [
    {"a": (1, [2.5, None]), "b": {"x"}},
    [numpy.arange(5), numpy.arange(3000.0), Extent(gpus=4).point(1)],
    KeyError("k", ValueError(1)),
    ValueMesh(Region(Extent(gpus=2)), [shapes.Color.RED, int]),
]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(MESSAGES) - 1), st.integers(0, 2**32))
def test_mutated_payload_is_a_value_or_an_error_of_ours(which: int, seed: int):
    payload, bodies = copied(TypedEncoder().encode(MESSAGES[which], what="it"))
    source = random.Random(seed)
    broken = bytearray(payload)
    for _ in range(source.randint(1, 8)):
        match source.randrange(3):
            case 0:
                broken[source.randrange(len(broken))] = source.randrange(256)
            case 1:
                del broken[source.randrange(len(broken)) :][:1]
            case _:
                broken.insert(source.randrange(len(broken)), source.randrange(256))
        if not broken:
            break
    try:
        TypedDecoder().decode(bytes(broken), bodies)
    except (ProtocolError, PayloadError):
        pass


def test_field_of_any_takes_any_builtin():
    assert result_of(shapes.module_function, "f").wire_type is int
    assert isinstance(result_of(shapes.module_function, "f"), Field)
