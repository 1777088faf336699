"""Exceptions whose classes break pickle, or every promise of a class."""

from __future__ import annotations

import typing
from typing import Any

import attrs


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class ManyParameters(Exception):
    ran = 0

    def __init__(self, a: int, b: int, c: int) -> None:
        type(self).ran += 1
        super().__init__(f"{a} {b} {c}")
        self.total = a + b + c


class Slotted(Exception):
    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        super().__init__("slotted")
        self.position = position


@typing.final
class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses of this")


class ReadOnlyArgs(Exception):
    @property
    def args(self) -> Any:
        return ("from a property",)


class LyingReduce(Exception):
    def __reduce__(self) -> Any:
        return (ManyParameters, (1,))


class RaisingReduce(Exception):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not me")


class Unsettable(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError("read-only")


class StrangeNew(Exception):
    def __new__(cls, *, code: int) -> typing.Self:
        self = super().__new__(cls, code)
        self.code = code
        return self

    def __init__(self, **_: Any) -> None:
        pass

    code: int


class OtherNew(Exception):
    def __new__(cls, *args: Any) -> Any:
        return ValueError("somebody else") if args == (0,) else super().__new__(cls, *args)


class BadStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Decode(UnicodeDecodeError):
    def __init__(self, data: bytes) -> None:
        super().__init__("utf-8", data, 0, 1, "odd")
        self.data = data


class File(OSError):
    def __init__(self, name: str, *, mode: str) -> None:
        super().__init__(2, "No such file", name)
        self.mode = mode


@attrs.define
class AttrsError(Exception):
    first: int
    second: str


@attrs.frozen(auto_exc=True)
class FrozenAttrsError(Exception):
    first: int


class NoGetattr(Exception):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Hostile(type):
    @property
    def __module__(cls) -> str:
        raise RuntimeError("no module")


class HostileError(Exception, metaclass=Hostile):
    pass


class BadProperties(OSError):
    @property
    def filename(self) -> Any:
        raise RuntimeError("no filename")

    @property
    def __notes__(self) -> Any:
        raise RuntimeError("no notes")


class OwnGroup(ExceptionGroup[Exception]):
    """As PEP 654 shows it: a constructor that wants more."""

    def __new__(cls, message: str, exceptions: Any, code: int) -> typing.Self:
        self = super().__new__(cls, message, exceptions)
        self.code = code
        return self

    def derive(self, exceptions: Any, /) -> OwnGroup:
        return OwnGroup(self.message, exceptions, self.code)

    code: int


class OwnBaseGroup(BaseExceptionGroup[Any]):
    pass
