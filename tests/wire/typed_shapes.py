"""Classes and functions whose annotations the tests of typed values read."""

from __future__ import annotations

import datetime
import enum
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import msgspec
import numpy

from trimesh import Port
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]


class Color(enum.Enum):
    RED = "red"


@attrs.define
class Inner:
    x: int
    when: datetime.datetime


@attrs.define
class Sub(Inner):
    more: int = 0


class Packed(msgspec.Struct):
    words: list[str]
    inner: Inner | None = None


@attrs.define(eq=False)
class Rich:
    """A record with fields that msgspec does not know."""

    array: numpy.ndarray  # type: ignore[type-arg]
    arrays: list[numpy.ndarray] = attrs.field(factory=list)  # type: ignore[type-arg]
    maybe: numpy.ndarray | None = None  # type: ignore[type-arg]
    port: Port[int] | None = None


class Opaque:
    """Nothing knows how to take it apart."""


async def everything(
    number: int,
    ratio: float = 0.5,
    *rest: int,
    names: list[str] | None = None,
    color: Color = Color.RED,
    packed: Packed | None = None,
    mode: Literal["a", "b"] = "a",
    anything: Any = None,
    bare: tuple = (),  # type: ignore[type-arg]
    loose: Mapping[str, Any] | None = None,
    point: Point | None = None,
    points: Sequence[Point] = (),
    error: Exception | None = None,
    cls: type | None = None,
    **options: bytes,
) -> dict[str, Inner]:
    raise NotImplementedError


async def exactly(inner: Inner) -> None:
    raise NotImplementedError


async def rich(thing: Rich) -> None:
    raise NotImplementedError


async def opaque(thing: Opaque) -> None:
    raise NotImplementedError


async def mixed(thing: int | Point) -> None:
    raise NotImplementedError


async def missing(thing: Missing) -> None:
    raise NotImplementedError


async def callback(function: Callable[[], int]) -> None:
    raise NotImplementedError


async def items(count: int) -> AsyncIterator[Inner]:
    raise NotImplementedError
    yield


def module_function() -> int:
    return 1
