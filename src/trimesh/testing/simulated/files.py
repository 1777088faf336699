"""Descriptors of simulated processes: they end with their process, as the system ends those of a real one.

All simulated processes share the descriptors of one process of the machine. What an actor opens is remembered as its
process's. When that is killed, each becomes a descriptor of nothing at once: locks are free, and what a file object
has in its buffer is written nowhere. The file object is closed then; a number without one is closed when the run ends,
as an object that is freed until then may close it.
"""

from __future__ import annotations

import builtins
import io
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import attrs

from trimesh._runtime.life.current import find_proc_anywhere
from trimesh.ids import ProcId
from trimesh.testing.simulated.guards import is_in_actor
from trimesh.testing.simulated.own_modules import Change

_NUMBERS: Final = ("open", "dup", "pipe", "pipe2", "memfd_create", "eventfd", "openpty", "pidfd_open")
"""Functions of `os` that return one or two new descriptors."""

Identity = tuple[int, int]
"""What a descriptor is of: device and number of the file."""


@attrs.define(eq=False)
class _Opened:
    """A descriptor.

    Attributes:
        owner: The process that has opened it.
        identity: Of what; another one says that it was closed, and the number is another's now.
        file: The file object that closes it; None where there is none.
    """

    owner: ProcId
    identity: Identity
    file: weakref.ref[Any] | None


@attrs.define(eq=False)
class SimFiles:
    """The descriptors that the actors of one run have opened."""

    _opened: dict[int, _Opened] = attrs.field(factory=dict[int, _Opened])
    _nothing: int | None = None

    def ended(self, owner: ProcId, *, is_killed: bool) -> None:
        """Take the descriptors from a process that has ended.

        Args:
            owner: The process.
            is_killed: Whether it has ended otherwise than by itself; if not, its file objects close themselves.
        """
        for number, opened in list(self._opened.items()):
            if opened.owner != owner or (opened.file is not None and not is_killed):
                continue
            if _identity(number) == opened.identity:
                nothing = self._of_nothing()
                os.dup2(nothing, number, inheritable=False)
                opened.identity = _identity(nothing) or opened.identity
                file = None if opened.file is None else opened.file()
                if file is not None:
                    with suppress(OSError, ValueError):  # of what it was in the midst of
                        file.close()
            else:
                del self._opened[number]

    def _of_nothing(self) -> int:
        if self._nothing is None:
            self._nothing = os.memfd_create("ended", os.MFD_CLOEXEC)
        return self._nothing

    def _note(self, number: int, file: Any = None) -> None:
        identity = _identity(number)
        proc = find_proc_anywhere() if is_in_actor() else None
        if proc is None or identity is None:
            self._opened.pop(number, None)  # the number of one that was closed
        else:
            self._opened[number] = _Opened(proc.proc_id, identity, None if file is None else weakref.ref(file))

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `open` that notes the descriptor of each file object."""

        def open_noted(*args: Any, **kwargs: Any) -> Any:
            made = real(*args, **kwargs)
            with suppress(OSError):
                self._note(made.fileno(), made if kwargs.get("closefd", True) else None)
            return made

        return open_noted

    def _numbering(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `os` that notes the descriptors which it returns."""

        def open_noted(*args: Any, **kwargs: Any) -> Any:
            made: Any = real(*args, **kwargs)
            numbers: tuple[int, ...] = (made,) if isinstance(made, int) else made
            for number in numbers:
                self._note(number)
            return made

        return open_noted

    def changes(self) -> list[Change]:
        """Return what notes the descriptors that actors open."""
        names = [name for name in _NUMBERS if hasattr(os, name)]
        opening = self._opening(io.open)
        changes: list[Change] = [(os, name, self._numbering(getattr(os, name))) for name in names]
        return [*changes, (builtins, "open", opening), (io, "open", opening)]

    def close(self) -> None:
        """Close what is left when the run ends."""
        nothing = None if self._nothing is None else _identity(self._nothing)
        for number, opened in self._opened.items():
            if opened.file is None and opened.identity == nothing == _identity(number):
                os.close(number)
        if self._nothing is not None:
            os.close(self._nothing)


def _identity(number: int) -> Identity | None:
    """Return what a descriptor is of, or None when it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
