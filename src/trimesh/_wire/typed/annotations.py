"""Wire types from annotations of a function: one `Field` for each parameter and the result.

AN-1 A value that does not fit is a `TypeError` at the sender, which decodes it before sending; and a `ProtocolError` at
the receiver, whose own annotations count. AN-2 With `Any`, `object`, no annotation, or a container without item types,
the value travels by its own type (`Writer.plain`), and only the class of the container is checked.

Item types of channels without pickle: the T of `open_channel(T)`, which travels with each port.

    T      = any | none | rest | class, module, name | of, T, T ... | or, T, T ...          each a tuple of its parts

IT-1 It names classes as all values do (TY-1), and builds only containers, unions and ports of them.
IT-2 It is rebuilt when the first item is sent, so a port can pass through a process that lacks the class.
"""

from __future__ import annotations

import collections
import collections.abc
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

import msgspec

from trimesh import limits
from trimesh._wire.typed.codec import ADVICE, DecodeSource, Reader, Writer, kind_meant, stand_in
from trimesh._wire.typed.known_kinds import name_of, thing_named
from trimesh.errors import PayloadError, ProtocolError

_LOOSE: Final = (Any, object, inspect.Parameter.empty)
CONTAINERS: Final[frozenset[Any]] = frozenset((list, dict, tuple, set, frozenset))
ABSTRACT: Final[frozenset[Any]] = frozenset(
    (
        collections.abc.Sequence,
        collections.abc.MutableSequence,
        collections.abc.Mapping,
        collections.abc.MutableMapping,
        collections.abc.Set,
        collections.abc.MutableSet,
        collections.abc.Collection,
        collections.abc.Iterable,
    )
)
_STREAMS: Final[frozenset[Any]] = frozenset(
    (collections.abc.AsyncIterator, collections.abc.AsyncGenerator, collections.abc.AsyncIterable)
)


class Field(msgspec.Struct, frozen=True):
    """One value.

    Attributes:
        name: Its name in errors.
        wire_type: Type for msgspec, or None if the value travels by its own type.
        classes: Classes of which the value must be an instance; empty for any.
        is_record: Whether it must be exactly of the class of the annotation: of a subclass only a part would arrive.
    """

    name: str
    annotation: Any
    wire_type: Any
    classes: tuple[type, ...] = ()
    is_record: bool = False

    def write(self, writer: Writer, value: object, what: str) -> bytes:
        """Encode a value and check that it fits.

        Raises:
            TypeError: It does not fit, or cannot be encoded; the text begins with `what`.
        """
        try:
            if self.classes and not isinstance(value, self.classes):
                raise TypeError(f"expected {_shown(self.annotation)}, got {type(value).__qualname__}")
            if self.is_record and type(value) is not self.annotation:
                raise TypeError(f"expected exactly {_shown(self.annotation)}, got {type(value).__qualname__}")
            if self.wire_type is None:
                return writer.plain(value)
            raw = writer.typed(value)
        except Exception as error:
            raise TypeError(f"{what} cannot be sent: {error}") from error
        try:
            Reader(raw, checking=True).value(self.wire_type)
        except (ProtocolError, PayloadError) as error:
            cause = error if isinstance(error, PayloadError) else None  # the text already quotes msgspec
            raise TypeError(f"{what} does not fit its annotation {_shown(self.annotation)}: {error}") from cause
        return raw

    def read(self, reader: Reader, raw: msgspec.Raw | None = None) -> Any:
        """Decode a value encoded by `write`.

        Raises:
            ProtocolError: It does not fit.
        """
        value = reader.value(Any if self.wire_type is None else self.wire_type, raw)
        if self.classes and not isinstance(value, self.classes):
            raise ProtocolError(f"{self.name} must be {_shown(self.annotation)}, got {type(value).__qualname__}")
        return value


def field_of(name: str, annotation: Any) -> Field:
    """Return the field of an annotation that has been resolved.

    Raises:
        TypeError: Nothing with this annotation can travel; the text says why.
    """
    loose = _loose_classes(annotation)
    if loose is not None:
        return Field(name, annotation, None, loose)
    wire_type = _wire_type(annotation)
    try:
        msgspec.msgpack.Decoder(wire_type)
    except Exception as error:
        raise TypeError(f"the annotation {_shown(annotation)} of {name} cannot be used: {error}; {ADVICE}") from error
    return Field(name, annotation, wire_type, is_record=wire_type is annotation and _is_record(annotation))


def _is_record(annotation: Any) -> bool:
    return isinstance(annotation, type) and any(
        hasattr(annotation, mark) for mark in ("__dataclass_fields__", "__attrs_attrs__", "__struct_fields__")
    )


def _loose_classes(annotation: Any) -> tuple[type, ...] | None:
    """Return the classes that a value must be an instance of, () for any; None if the annotation demands more."""
    if any(annotation is one for one in _LOOSE) or isinstance(annotation, typing.TypeVar):
        return ()
    if isinstance(annotation, type) and annotation in CONTAINERS:
        return (annotation,)
    origin: Any = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin in CONTAINERS | ABSTRACT and any(part is one for part in parts for one in _LOOSE):
        return (origin,)
    if origin in (typing.Union, types.UnionType):
        found = [(type(None),) if part is type(None) else _loose_classes(part) for part in parts]
        if any(one == () for one in found):
            return ()
        if len(found) > sum(part is type(None) for part in parts) and all(one is not None for one in found):
            return tuple(cls for one in found if one is not None for cls in one)
    return None


def _wire_type(annotation: Any) -> Any:
    """Return an annotation with every class that msgspec does not know, or knows wrongly, replaced."""
    if isinstance(annotation, typing.NewType):
        return _wire_type(annotation.__supertype__)
    if isinstance(annotation, typing.TypeVar) or any(annotation is one for one in _LOOSE):
        return Any
    origin: Any = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is None:
        kind = kind_meant(annotation) if isinstance(annotation, type) else None
        return annotation if kind is None else stand_in(kind, annotation)
    if origin is typing.Annotated:
        return typing.Annotated[(_wire_type(parts[0]), *parts[1:])]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_wire_type(part) for part in parts)]  # noqa: UP007 - made from a tuple
    if origin in CONTAINERS | ABSTRACT:
        return origin[tuple(part if part is Ellipsis else _wire_type(part) for part in parts)]
    kind = kind_meant(origin) if isinstance(origin, type) else None
    return annotation if kind is None else stand_in(kind, origin)


def _shown(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


class Arguments:
    """The parameters of one function as fields, without `self`."""

    def __init__(self, hints: Mapping[str, Any], signature: inspect.Signature, name: str) -> None:
        """Read resolved annotations.

        Raises:
            TypeError: Nothing with one of them can travel.
        """
        self.signature = signature
        parameters = signature.parameters.values()
        self._rest = next((one.name for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL), None)
        self.fields = {
            parameter.name: field_of(f"argument {parameter.name!r} of {name}()", _whole(parameter, hints))
            for parameter in parameters
        }

    def write(self, writer: Writer, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> bytes:
        """Encode the arguments of a call, which have been bound before.

        Raises:
            TypeError: One does not fit; the text names it.
        """
        bound = self.signature.bind(*args, **kwargs).arguments
        return writer.named(
            {
                name: self.fields[name].write(
                    writer, list(value) if name == self._rest else value, f"argument {name!r} of {what}()"
                )
                for name, value in bound.items()
            }
        )

    def read(self, reader: Reader) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode the arguments of a call.

        Raises:
            ProtocolError: They do not fit.
        """
        values: dict[str, Any] = {}
        for name, raw in reader.fields().items():
            if name not in self.fields:
                raise ProtocolError(f"there is no argument {name!r}")
            values[name] = self.fields[name].read(reader, raw)
        return self.bound(values)

    def bound(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments, given by name, in the form of a call: positional and keyword arguments.

        Raises:
            ProtocolError: One is missing.
        """
        made = inspect.BoundArguments(self.signature, collections.OrderedDict())
        for name, parameter in self.signature.parameters.items():
            if name in values:
                made.arguments[name] = values[name]
            elif parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC:
                raise ProtocolError(f"the argument {name!r} is missing")
            elif parameter.kind not in _VARIADIC:
                made.arguments[name] = parameter.default  # else the following arguments would be passed by name
        return made.args, made.kwargs


_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _whole(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    hint = hints.get(parameter.name, Any)
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return list[hint]  # type: ignore[valid-type]
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return dict[str, hint]  # type: ignore[valid-type]
    return hint


def resolved_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the annotations of a function, its result's as "return".

    Raises:
        TypeError: An annotation names something that does not exist at run time.
    """
    try:
        return typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except Exception as error:
        raise TypeError(
            f"with pickle='off' the annotations of {name}() must be defined at run time, got {error}: "
            "import their names outside of TYPE_CHECKING, and define them in a module"
        ) from error


def constructor_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of the constructor's parameters.

    Raises:
        TypeError: An annotation names something that does not exist at run time.
    """
    if _is_record(cls):
        return resolved_hints(cls, cls.__qualname__)
    init = cls.__init__  # type: ignore[misc]
    return resolved_hints(init, cls.__qualname__) if isinstance(init, types.FunctionType) else {}


def result_of(
    function: Callable[..., Any], name: str, *, is_later: bool = False, bind: Callable[[Any], Any] = lambda hint: hint
) -> Field:
    """Return the field of what a function returns; of the items, when it is an async generator.

    Args:
        function: Function with the annotations.
        name: Its name in errors.
        is_later: Whether its first argument after `self`, a `Reply[T]`, takes the result in place of `return`.
        bind: Replaces the type variables of an annotation.

    Raises:
        TypeError: The annotation cannot be resolved, or nothing with it can travel.
    """
    hints = resolved_hints(function, name)
    hint = hints.get("return", Any)
    if is_later:
        reply = next(itertools.islice(inspect.signature(function).parameters, 1, None), "")
        hint = next(iter(typing.get_args(hints.get(reply))), Any)
    hint = bind(hint)
    if typing.get_origin(hint) in _STREAMS:
        hint = typing.get_args(hint)[0]
    elif isinstance(hint, type) and hint in _STREAMS:
        hint = Any
    return field_of(f"the result of {name}()", hint)


# ---- item types ------------------------------------------------------------------------------------------------------

# Types of the items of channels, where nothing is pickled: the T of `open_channel(T)`, which travels with each port.

WHAT: Final = "an item of a channel"
_ITEMS: Final = "the items of a channel"

_SIMPLE: Final[dict[Any, str]] = {Any: "any", object: "any", types.NoneType: "none", None: "none", ...: "rest"}
_MADE: Final[dict[str, Any]] = {"any": Any, "none": types.NoneType, "rest": ...}


class ItemType:
    """The T of one channel, in one process.

    Attributes:
        described: Its form in messages.
        may_import: Whether its sender may let this process import modules.
    """

    __slots__ = ("_field", "described", "may_import")

    def __init__(self, described: tuple[Any, ...], *, may_import: bool = False, field: Field | None = None) -> None:
        self.described = described
        self.may_import = may_import
        self._field = field

    @property
    def field(self) -> Field:
        """Return the wire type of items.

        Raises:
            PayloadError: The type cannot be imported in this process.
        """
        if self._field is None:
            try:
                self._field = field_of(WHAT, _put_together(self.described, DecodeSource(self.may_import)))
            except (TypeError, ValueError) as error:
                raise PayloadError(f"the type of the items of a channel cannot be rebuilt here: {error}") from error
        return self._field


def item_type_of(annotation: Any) -> ItemType:
    """Return the T of a channel that is opened here.

    Raises:
        TypeError: Nothing of this type can travel, or it has no name elsewhere; the text says why.
    """
    return ItemType(described_type(annotation, _ITEMS), field=field_of(WHAT, annotation))


def item_type_described(described: Any, *, may_import: bool) -> ItemType:
    """Return the T of a channel as described by a peer.

    Raises:
        ProtocolError: The description is invalid.
    """
    _check(described, limits.ITEM_TYPE_DEPTH)
    return ItemType(described, may_import=may_import)


def described_type(annotation: Any, what: str) -> tuple[Any, ...]:
    """Return the form of a type in messages.

    Raises:
        TypeError: It has none; the text begins with `what`.
    """
    return _take_apart(annotation, limits.ITEM_TYPE_DEPTH, what)


def type_described(described: Any, source: DecodeSource) -> Any:
    """Return the type that a peer describes.

    Raises:
        ProtocolError: The description is invalid.
        PayloadError, TypeError: It names something that is not here, or no type.
    """
    _check(described, limits.ITEM_TYPE_DEPTH)
    return _put_together(described, source)


def _take_apart(annotation: Any, depth: int, what: str) -> tuple[Any, ...]:
    if not depth:
        raise TypeError(f"the type of {what} must be at most {limits.ITEM_TYPE_DEPTH} types deep")
    parts = typing.get_args(annotation)
    origin: Any = typing.get_origin(annotation)
    if origin is not None:
        inner = [_take_apart(part, depth - 1, what) for part in parts]
        if origin in (typing.Union, types.UnionType):
            return "or", *inner
        if _is_container(origin):
            return "of", _take_apart(origin, depth - 1, what), *inner
    elif isinstance(annotation, type | types.EllipsisType | None) or annotation is Any:
        simple = _SIMPLE.get(annotation)
        return (simple,) if simple is not None else ("class", *name_of(annotation, f"the type of {what}"))
    raise TypeError(
        f"{what} must be of a class, a union of classes or a container of them with pickle='off', "
        f"got {annotation!r}: make a class that holds it"
    )


def _is_container(origin: Any) -> bool:
    return origin in CONTAINERS | ABSTRACT or (isinstance(origin, type) and kind_meant(origin) is not None)


def _is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _check(described: object, depth: int) -> None:
    if not (depth and _is_tuple(described) and described):
        raise ProtocolError(f"the type of the items of a channel must be described by tuples, got {described!r:.100}")
    head, *parts = described
    if head in ("of", "or") and parts:
        for part in parts:
            _check(part, depth - 1)
    elif not (
        (isinstance(head, str) and head in _MADE and not parts)
        or (head == "class" and len(parts) == 2 and all(isinstance(part, str) for part in parts))
    ):
        raise ProtocolError(f"the type of the items of a channel must be of a known form, got {described!r:.100}")


def _put_together(described: tuple[Any, ...], source: DecodeSource) -> Any:
    head, *parts = described
    if head in _MADE:
        return _MADE[head]
    if head == "class":
        found = thing_named(source, *parts)
        if not isinstance(found, type):
            raise TypeError(f"{parts[0]}.{parts[1]} must be a class, got a {type(found).__qualname__}")
        return found
    made = [_put_together(part, source) for part in parts]
    if head == "or":
        return typing.Union[tuple(made)]  # noqa: UP007 - made from a tuple
    origin, *inner = made
    if not _is_container(origin):
        raise TypeError(f"only a container can have item types, got {origin!r}")
    return origin[tuple(inner)]
