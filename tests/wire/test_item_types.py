"""The type of a channel's items: what travels of it, and what is made of that elsewhere (IT-1, IT-2; V2)."""

from __future__ import annotations

import collections.abc
import datetime
import enum
import typing
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh import Actor, Point, Port, limits
from trimesh._wire.typed.annotations import WHAT, ItemType, item_type_described, item_type_of
from trimesh._wire.typed.codec import DecodeSource, Reader, Writer
from trimesh.errors import PayloadError, ProtocolError


class Mood(enum.Enum):
    CALM = "calm"


@attrs.frozen
class Batch:
    number: int
    mood: Mood = Mood.CALM


class Opaque:
    pass


def elsewhere(item_type: ItemType, *, may_import: bool = False) -> ItemType:
    """Return the type as a process has it that a port has come to."""
    writer = Writer()
    message = writer.finish(writer.plain(item_type.described))
    described = Reader.of_message(message.payload, message.buffers, DecodeSource()).value()
    return item_type_described(described, may_import=may_import)


def through(item_type: ItemType, value: object) -> Any:
    """Send an item from one process to another."""
    writer = Writer()
    message = writer.finish(elsewhere(item_type).field.write(writer, value, WHAT))
    return item_type.field.read(Reader.of_message(message.payload, message.buffers, DecodeSource()))


@rows(
    ("annotation", "value"),
    [
        (int, 3),
        (type(None), None),
        (Batch, Batch(1)),
        (Mood, Mood.CALM),
        (datetime.date, datetime.date(2020, 1, 2)),
        (list[Batch], [Batch(1), Batch(2)]),
        (tuple[int, ...], (1, 2, 3)),
        (dict[str, list[Batch]], {"a": [Batch(1)]}),
        (Batch | None, None),
        (typing.Optional[Batch], Batch(7)),  # noqa: UP045 - the other way to write it
        (collections.abc.Sequence[int], [1]),
        (list, [1, (2, "three")]),
        (list[Any], [1, (2, "three")]),
        (object, {"any": (1,)}),
        (Any, frozenset({1})),
        (type, int),
    ],
)
def test_item_arrives_as_what_it_is(annotation: Any, value: object) -> None:
    found = through(item_type_of(annotation), value)

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (int, "3", r"an item of a channel does not fit its annotation int: Expected `int`, got `str`"),
        (Batch, {"number": 1}, "expected exactly Batch, got dict"),
        (list[int], [1, "2"], r"Expected `int`, got `str` - at `\$\[1\]`"),
        (list, (1, 2), "expected list, got tuple"),
        (Any, Batch(1), "a Batch cannot be sent without an annotation"),
        (Opaque, Opaque(), "a Opaque cannot be sent: with pickle='off' make it a dataclass"),
    ],
)
def test_item_that_does_not_fit_is_refused_by_its_sender(annotation: Any, value: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        through(item_type_of(annotation), value)


def test_bytes_that_do_not_fit_are_a_protocol_error() -> None:
    writer = Writer()
    message = writer.finish(writer.plain("no number"))
    with pytest.raises(ProtocolError):
        item_type_of(int).field.read(Reader.of_message(message.payload, message.buffers, DecodeSource()))


@pytest.mark.parametrize("annotation", [Port[Batch], Port, Point, Actor, Exception, list[Port[int]]], ids=str)
def test_kinds_of_values_can_be_named(annotation: Any) -> None:
    """Their items need a process; here it is the type that travels."""
    item_type = item_type_of(annotation)

    assert elsewhere(item_type).field.annotation == annotation


def test_type_without_a_name_is_refused_where_the_channel_is_opened() -> None:
    @attrs.frozen
    class Local:
        number: int

    with pytest.raises(TypeError, match="define it at the top of a module"):
        item_type_of(Local)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (typing.Literal[1, 2], "make a class that holds it"),
        ("Batch", "make a class that holds it"),
        (typing.Annotated[int, "positive"], "make a class that holds it"),
    ],
)
def test_type_that_cannot_travel_is_refused_where_the_channel_is_opened(annotation: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        item_type_of(annotation)


def nested(depth: int) -> Any:
    found: Any = int
    for _ in range(depth):
        found = list[found]
    return found


def test_type_is_nested_so_deep_at_most() -> None:
    assert through(item_type_of(nested(limits.ITEM_TYPE_DEPTH - 1)), []) == []
    with pytest.raises(TypeError, match="16 types deep"):
        item_type_of(nested(limits.ITEM_TYPE_DEPTH))
    described: Any = ("none",)
    for _ in range(limits.ITEM_TYPE_DEPTH):
        described = ("or", described)
    with pytest.raises(ProtocolError):
        item_type_described(described, may_import=False)


@rows(
    "described",
    [
        ("class", "no_such_module_anywhere", "Batch"),
        ("class", __name__, "NoSuchClass"),
        ("class", __name__, "nested"),
        ("of", ("class", "builtins", "int"), ("any",)),
        ("of", ("class", __name__, "Batch"), ("any",)),
        ("of", ("rest",), ("any",)),
        ("of", ("class", "builtins", "list"), ("none",), ("none",)),
        ("of", ("class", "builtins", "dict"), ("rest",)),
        ("or", ("rest",)),
        ("rest",),
    ],
)
def test_type_that_cannot_be_had_is_found_with_the_first_item(described: Any) -> None:
    """IT-2: a port may pass through; a peer makes nothing of what it names but containers (IT-1)."""
    item_type = item_type_described(described, may_import=False)
    with pytest.raises(PayloadError):
        _ = item_type.field


@rows(
    "described",
    [
        (),
        "any",
        ["class", "builtins", "int"],
        ("class", "os"),
        ("class", "os", 1),
        ("of",),
        ("what",),
        (1,),
        ("or", ()),
    ],
)
def test_what_describes_no_type_is_a_protocol_error(described: Any) -> None:
    with pytest.raises(ProtocolError):
        item_type_described(described, may_import=False)


WORDS = st.sampled_from(["any", "none", "rest", "class", "of", "or", "builtins", "list", "int", "dict", "os", "system"])
DESCRIBED = st.recursive(WORDS, lambda parts: st.lists(parts, max_size=4).map(tuple), max_leaves=12)


@given(DESCRIBED)
def test_whatever_a_peer_describes_is_a_type_or_our_error(described: Any) -> None:
    try:
        field = item_type_described(described, may_import=False).field
    except (ProtocolError, PayloadError):
        return
    assert field.name == WHAT
