"""Kinds registered in every process: classes by name, exceptions, extents, points, regions, numpy arrays."""

from __future__ import annotations

import enum
import functools
import importlib
import math
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from trimesh import limits
from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.memory import Buffer, Sink, view_of
from trimesh._wire.pickled.arrays import rebuild_array, reduce_array
from trimesh._wire.pickled.payload import Encoded
from trimesh._wire.typed.codec import DecodeSource, Reader, ValueKind, Writer, register_kind
from trimesh.errors import PayloadError, ProtocolError
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh


class TypedEncoder:
    """Encodes values by their own types, without pickle."""

    def encode(self, value: object, *, what: str) -> Encoded:
        """Encode a value.

        Raises:
            TypeError: It, or something in it, is of no builtin type and no kind; the text begins with `what`.
        """
        writer = Writer()
        try:
            return writer.finish(writer.plain(value))
        except Exception as error:
            raise TypeError(f"{what} cannot be sent: {error}") from error

    def encode_within(self, value: object, bytes_max: int) -> Encoded | None:
        """Encode a value into the payload alone, or return None when it cannot be encoded or is too large."""
        writer = Writer()
        try:
            encoded = writer.finish(writer.plain(value), bodies_max=0)
        except Exception:  # noqa: BLE001 - whatever the user's code raises, the value does not travel
            return None
        return encoded if len(encoded.payload) <= bytes_max else None


class TypedDecoder:
    """Decodes values encoded by a `TypedEncoder`."""

    def __init__(self, source: DecodeSource | None = None) -> None:
        self._source = source

    def decode(self, payload: Buffer, buffers: Sequence[memoryview] = (), *, what: str = "a value") -> Any:
        """Decode a value.

        Raises:
            PayloadError: It cannot be rebuilt in this process.
            ProtocolError: The bytes are not such a value.
        """
        try:
            return Reader.of_message(payload, buffers, self._source).value()
        except ProtocolError as error:
            raise ProtocolError(f"{what} cannot be read: {error}") from error


# ---- classes and functions by name ------------------------------------------------------------------------


def name_of(thing: Any, what: str) -> tuple[str, str]:
    """Return module and qualified name of a class or function, under which another process finds it.

    Raises:
        TypeError: It has none: it is local, or of `__main__`, or its name refers to something else.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        raise TypeError(f"{what} must be importable by name with pickle='off', got {thing!r}")
    if module == "__main__" or "<locals>" in name:
        raise TypeError(
            f"{what} must be importable by name with pickle='off', got {module}.{name}: "
            "define it at the top of a module that both processes can import"
        )
    found = _find(module, name)
    if found is not thing and getattr(found, "spec", None) is None:
        raise TypeError(f"{what} must be importable by name with pickle='off', but {module}.{name} is something else")
    return module, name


def _find_there(module: str, name: str) -> Any:
    """Return the object that a peer names, without `getattr`, which may import a module or run a property."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        tables: list[Mapping[str, Any]] = []
        if isinstance(found, type):
            tables = [base.__dict__ for base in found.__mro__]
        elif isinstance(found, types.ModuleType):
            tables = [found.__dict__]
        found = next((table[part] for table in tables if part in table), None)
    return found


def _find(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def thing_named(source: DecodeSource, module: Any, name: Any) -> Any:
    """Return the object that a peer names by module and qualified name.

    Raises:
        PayloadError: It does not exist here, or its module is not imported and this peer must not import it.
        ProtocolError: The names are not strings.
    """
    if not (isinstance(module, str) and isinstance(name, str)):
        raise ProtocolError(f"a class must be named by two strings, module and name, got {module!r:.50}, {name!r:.50}")
    if source.may_import and module not in sys.modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise PayloadError(f"{module}.{name} cannot be imported here: {error!r}") from error
    found = _find(module, name) if source.may_import else _find_there(module, name)
    if found is None:
        raise PayloadError(
            f"a class must be imported by the process that receives it, got {module}.{name}: it does not exist, or "
            f"this process has not imported {module}"
        )
    return found


def must_be_imported(source: DecodeSource, module: str, what: str) -> None:
    """Check that the module that values need is imported, or that their sender may let it be imported (TY-1).

    Raises:
        PayloadError: Neither holds.
    """
    if not source.may_import and module not in sys.modules:
        raise PayloadError(f"{what} arrived in a process that has not imported {module}: import it there")


def _class_named(source: DecodeSource, module: Any = None, name: Any = None) -> type:
    found = thing_named(source, module, name)
    if not isinstance(found, type):
        raise ProtocolError(f"{module}.{name} must be a class, got a {type(found).__qualname__}")
    return found


def _function_named(source: DecodeSource, module: Any = None, name: Any = None) -> Callable[..., Any]:
    if not source.may_import:
        raise ProtocolError(f"only the owner of a process may name a function, got {module}.{name}")
    found = thing_named(source, module, name)
    if not isinstance(found, types.FunctionType):
        raise ProtocolError(f"{module}.{name} must be a function, got a {type(found).__qualname__}")
    return found


def _enum_member(source: DecodeSource, module: Any = None, name: Any = None, member: Any = None) -> enum.Enum:
    cls = _class_named(source, module, name)
    if not issubclass(cls, enum.Enum):
        raise ProtocolError(f"{module}.{name} must be a subclass of enum.Enum, got {cls!r}")
    found = cls.__members__.get(member)
    if found is None:
        raise PayloadError(f"{module}.{name} has no member {member!r} here")
    return found


# ---- exceptions -------------------------------------------------------------------------------------------


def _reduce_exception(error: BaseException, _: Sink) -> tuple[bytes]:
    return (encode_exception(error, TypedEncoder()).payload,)


def _rebuild_exception(source: DecodeSource, payload: Any = None) -> Exception:
    if not isinstance(payload, bytes):
        raise ProtocolError(f"an exception must be bytes, got {type(payload).__qualname__}")
    if source.depth >= limits.EXCEPTION_DEPTH_MAX:
        raise ProtocolError(f"exceptions inside of exceptions must be at most {limits.EXCEPTION_DEPTH_MAX} deep")
    return decode_exception(payload, TypedDecoder(msgspec.structs.replace(source, depth=source.depth + 1)))


# ---- shapes -----------------------------------------------------------------------------------------------


def _mesh_key(mesh: Any) -> Any:
    if mesh is not None and type(mesh) not in (int, str):
        raise TypeError(f"the mesh of a point must be named by a number or a text to be sent, got {mesh!r}")
    return mesh


def _rebuild_extent(_: DecodeSource, *dims: Any) -> Extent:
    if len(dims) > limits.DIMENSIONS_MAX:
        raise ProtocolError(f"an extent must have at most {limits.DIMENSIONS_MAX} dimensions, got {len(dims)}")
    return Extent(dict(dims))


def _rebuild_point(_: DecodeSource, rank: Any, extent: Any, mesh: Any, base_rank: Any) -> Point:
    if type(rank) is not int or not isinstance(extent, Extent) or type(base_rank) not in (int, type(None)):
        raise ProtocolError("a point must be a rank in an extent")
    return Point(rank, extent, _mesh_key(mesh), base_rank)


def _reduce_region(region: Region, _: Sink) -> tuple[Any, ...]:
    table = region.table
    where: Any = [table.start, table.stop, table.step] if isinstance(table, range) else tuple(table)
    return region.base, _mesh_key(region.mesh), region.extent, where, sorted(region._excluded)  # noqa: SLF001


def _rebuild_region(_: DecodeSource, base: Any, mesh: Any, extent: Any, where: Any, excluded: Any) -> Region:
    if not (isinstance(base, Extent) and isinstance(extent, Extent)):
        raise ProtocolError("a region must lie in an extent")
    if not all(type(number) is int for number in (*where, *excluded)):
        raise ProtocolError("a region must be made of ranks")
    if extent.nelements > limits.REGION_POINTS_MAX:
        raise ProtocolError(f"a region must have at most {limits.REGION_POINTS_MAX} points, got {extent.nelements}")
    table: Sequence[int] = range(*cast("list[int]", where)) if isinstance(where, list) else where
    if len(table) != extent.nelements:
        raise ProtocolError(f"a region of {extent.nelements} points must have as many ranks, got {len(table)}")
    ranks, left_out = set(table), frozenset(excluded)
    if len(ranks) != len(table) or not left_out <= ranks:
        raise ProtocolError("the ranks of a region must differ, and contain the excluded ones")
    if ranks and not 0 <= min(ranks) <= max(ranks) < base.nelements:
        raise ProtocolError(f"the ranks of a region must lie in {base!r:.100}")
    return Region(base, mesh=_mesh_key(mesh), extent=extent, table=table, excluded=left_out)


def _rebuild_value_mesh(_: DecodeSource, region: Any = None, *values: Any) -> ValueMesh[Any]:
    if not isinstance(region, Region):
        raise ProtocolError("values of a mesh must lie in a region")
    return ValueMesh(region, values)


# ---- numpy ------------------------------------------------------------------------------------------------


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _reduce_array(array: Any, sink: Sink) -> tuple[Any, ...]:
    if type(array) is not _numpy().ndarray or array.dtype.hasobject:
        raise TypeError(
            "an array must be a numpy.ndarray itself, without Python objects, to be sent with pickle='off', got a "
            f"{type(array).__qualname__} of dtype {array.dtype}"
        )
    descr = _numpy().lib.format.dtype_to_descr(array.dtype)
    if array.nbytes == 0:
        return None, descr, array.shape
    _, (token, _, shape, strides, offset, span) = reduce_array(array, sink)
    return token, descr, shape, strides, offset, span


def _dtype(descr: Any) -> Any:
    dtype = _numpy().lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise ProtocolError("an array must not hold Python objects")
    return dtype


def _rebuild_array(source: DecodeSource, data: Any, descr: Any, shape: Any, *layout: Any) -> Any:
    must_be_imported(source, "numpy", "an array")
    dtype = _dtype(descr)
    if data is None:
        empty = _numpy().empty(shape, dtype) if 0 in shape or dtype.itemsize == 0 else None
        if empty is None:
            raise ProtocolError(f"an array of shape {shape!r} must come with its bytes")
        return empty
    strides, offset, span = layout
    nbytes = view_of(data).nbytes  # a peer may send anything; a value that is not memory raises here
    if math.prod(shape) * dtype.itemsize > nbytes:  # elements that share bytes are copied before they are sent
        raise ProtocolError(f"an array of shape {shape!r:.100} must come with all of its bytes, got {nbytes}")
    return rebuild_array(data, dtype, shape, strides, offset, span)


def _reduce_scalar(scalar: Any, _: Sink) -> tuple[Any, ...]:
    if scalar.dtype.hasobject:
        raise TypeError("a numpy scalar must not be a Python object: send the object itself")
    return _numpy().lib.format.dtype_to_descr(scalar.dtype), scalar.tobytes()


def _rebuild_scalar(source: DecodeSource, descr: Any, data: Any) -> Any:
    must_be_imported(source, "numpy", "a number of numpy")
    return _numpy().frombuffer(data, _dtype(descr), 1)[0]


def register() -> None:
    register_kind(ValueKind("class", type, lambda cls, _: name_of(cls, "a class"), _class_named))
    register_kind(
        ValueKind(
            "function",
            types.FunctionType,
            lambda function, _: name_of(function, "a function"),
            _function_named,
            stands_for=lambda cls: cls is Callable,  # type: ignore[comparison-overlap]
        )
    )
    register_kind(ValueKind("exception", BaseException, _reduce_exception, _rebuild_exception))
    register_kind(ValueKind("extent", Extent, lambda extent, _: tuple(extent.items()), _rebuild_extent))
    register_kind(
        ValueKind(
            "enum",
            enum.Enum,
            lambda member, _: (*name_of(type(member), "an enum"), member.name),
            _enum_member,
            is_known=True,
        )
    )
    fields = operator.attrgetter("rank", "extent", "mesh", "base_rank")
    register_kind(ValueKind("point", Point, lambda point, _: fields(point), _rebuild_point))
    register_kind(ValueKind("region", Region, _reduce_region, _rebuild_region))
    register_kind(ValueKind("values", ValueMesh, lambda mesh, _: (mesh.region, *mesh.values()), _rebuild_value_mesh))
    register_kind(ValueKind("array", "numpy.ndarray", _reduce_array, _rebuild_array))
    to_python = operator.methodcaller("item")
    register_kind(ValueKind("scalar", "numpy.generic", _reduce_scalar, _rebuild_scalar, plain=to_python))
