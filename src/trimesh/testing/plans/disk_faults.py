"""Disk faults: files of actors whose disk is full, slow, fails, or is left in the middle of a write.

`FaultyDisk` replaces what opens files in Python and the functions of `os` that change them. A file that an actor opens
in an armed or simulated process asks its process before each operation. Code of other languages (SQLite, safetensors,
`torch.save` to a path, `numpy.save`) writes past it.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import attrs

from trimesh.testing.plans.fault import (
    ActiveFault,
    Heal,
    MemberFault,
    OfMembers,
    Place,
    checked_amount,
    checked_count,
    checked_one_of,
)

Operation = Literal["open", "read", "write", "sync", "rename"]
"""What is done to a file: "write" stands for all that changes its bytes or length, "rename" for `os.replace`, too."""

Refusal = Literal["ENOSPC", "EIO", "EDQUOT", "EROFS"]

ALWAYS: Final = 2**63
"""Times of a fault that lasts until it is healed."""


@attrs.frozen
class Touch:
    """What a fault does to one operation.

    Attributes:
        seconds: How long it takes longer.
        error: Error that is raised instead of it.
        is_torn: The first half of the bytes is written, and the process killed.
    """

    seconds: float = 0.0
    error: OSError | None = None
    is_torn: bool = False


@attrs.frozen
class DiskFault(MemberFault):
    """From the `nth` operation on, counted for each process since this was planned, `times` of them misbehave.

    Attributes:
        on: The operations.
        error: Name of the error that is raised instead, or "".
        seconds: How long each takes longer.
        is_torn: The first half of the bytes is written, and the process killed.
    """

    on: tuple[Operation, ...]
    nth: int = 1
    times: int = 1
    error: str = ""
    seconds: float = 0.0
    is_torn: bool = False

    def __str__(self) -> str:
        effect = f"fails({self.error})" if self.error else "tears" if self.is_torn else f"slow({self.seconds:g})"
        return f"disk {self.where.text} {'|'.join(self.on)} nth={self.nth}: {effect}"

    def touching(self, active: ActiveFault, place: Place, operation: Operation) -> Touch | None:
        if place not in self.where.places or operation not in self.on:
            return None
        if not active.hits(place, self.nth, self.times):
            return None
        active.fire_at("disk", place)
        error = getattr(errno, self.error) if self.error else 0
        return Touch(self.seconds, OSError(error, os.strerror(error)) if error else None, self.is_torn)


class OfDisk(OfMembers):
    """Disks, as the actors of some members see them in Python's files."""

    def full(self) -> Heal:
        """Refuse every write (ENOSPC).

        Returns:
            A function that makes room.
        """
        return self._plan(("write",), 1, ALWAYS, error="ENOSPC")

    def slow(self, seconds: float) -> Heal:
        """Let each read, write and sync take `seconds` longer; each blocks its process.

        Returns:
            A function that ends the fault.
        """
        return self._plan(("read", "write", "sync"), 1, ALWAYS, seconds=checked_amount("seconds", seconds))

    def fails(self, operation: Operation, error: Refusal = "EIO", *, nth: int = 1, times: int = 1) -> None:
        """Make operations raise `OSError` instead of having an effect.

        Args:
            operation: "open", "read", "write", "sync" (`os.fsync`, `os.fdatasync`) or "rename" (`os.replace`, too).
            error: Name of the error number.
            nth: Number of the first operation, counted for each member from now on.
            times: Number of operations from there on.
        """
        checked_one_of("the operation", operation, get_args(Operation))
        checked_one_of("the error", error, get_args(Refusal))
        self._plan((operation,), nth, times, error=error)

    def tears(self, *, nth: int = 1) -> None:
        """Kill each member in its nth write, of which the file has the first half then."""
        self._plan(("write",), nth, 1, is_torn=True)

    def _plan(self, on: tuple[Operation, ...], nth: int, times: int, **effect: Any) -> Heal:
        nth, times = checked_count("nth", nth), checked_count("times", times)
        return self._faults.plan(DiskFault(self._where, on, nth, times, **effect))


# ---- what stands between an actor and its files ----------------------------------------------------------------------


class ProcessKilled(BaseException):
    """Ends the code of a simulated process that was killed in the middle of a write."""


@attrs.frozen(eq=False)
class FaultyDisk:
    """Files of one process, or of a simulation, that ask before each operation.

    Attributes:
        is_asked: Whether the running code is that of an actor for which faults are possible.
        touch: Called before an operation of an actor; returns what a fault does to it, or None.
        wait: Lets the running process spend some seconds.
        kill: Kills the running process.
    """

    is_asked: Callable[[], bool]
    touch: Callable[[Operation], Touch | None]
    wait: Callable[[float], None]
    kill: Callable[[], None]

    def changes(self) -> list[tuple[Any, str, Any]]:
        """Return the names to replace: (owner, name, function)."""
        opening = self._opening(io.open)
        made: list[tuple[Any, str, Any]] = [(builtins, "open", opening), (io, "open", opening)]
        made += [(os, name, self._asking(operation, getattr(os, name))) for name, operation in _CALLS.items()]
        return [*made, (os, "write", self._writing(os.write)), (os, "pwrite", self._writing(os.pwrite))]

    def ask(self, operation: Operation) -> Touch | None:
        """Wait or raise as a fault has it; return it if the operation is a write to be torn."""
        touch = self.touch(operation)
        if touch is None:
            return None
        self.wait(touch.seconds)
        if touch.error is not None:
            raise touch.error
        return touch if touch.is_torn else None

    def write(self, write: Callable[[Any], int], data: Any) -> int:
        """Write some bytes, or as many of them as a fault lets."""
        if self.ask("write") is None:
            return write(data)
        half = memoryview(data).cast("B")
        write(half[: len(half) // 2])
        self.kill()
        raise ProcessKilled("it was killed in the middle of a write")

    def _asking(self, operation: Operation, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `os` whose first argument is a path or a descriptor, and which asks first."""

        def ask(target: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_asked() and (not isinstance(target, int) or _is_file(target)):
                self.ask(operation)
            return real(target, *args, **kwargs)

        return ask

    def _writing(self, real: Callable[..., int]) -> Callable[..., int]:
        """Return a function of `os` that writes to a descriptor, and asks first."""

        def write(fd: int, data: Any, *args: Any) -> int:
            if not self.is_asked() or not _is_file(fd):
                return real(fd, data, *args)
            return self.write(lambda part: real(fd, part, *args), data)

        return write

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `open` whose files ask: as that of `io`, which has no place for another kind of raw file."""

        def open_asking(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,  # noqa: FBT001, FBT002 - the signature of `open`
            opener: Any = None,
        ) -> Any:
            is_text = "b" not in mode
            is_refused = buffering == 0 if is_text else encoding or errors or newline  # by an error of `open` itself
            if is_refused or not self.is_asked():
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                self.ask("open")
            raw = _AskingFile(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
            try:
                if buffering == 0:
                    return raw
                kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
                buffered = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
                if not is_text:
                    return buffered
                made: Any = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
                made.mode = mode
            except BaseException:
                raw.close()
                raise
            return made

        return open_asking


class _AskingFile(io.FileIO):
    """A raw file that asks before it reads or writes."""

    def __init__(self, disk: FaultyDisk, file: Any, mode: str, closefd: bool, opener: Any) -> None:  # noqa: FBT001
        super().__init__(file, mode, closefd, opener)
        self._disk = disk if _is_file(self.fileno()) else None

    def write(self, data: Any, /) -> int:
        if self._disk is None or not self._disk.is_asked():
            return super().write(data)
        return self._disk.write(super().write, data)

    def truncate(self, size: int | None = None, /) -> int:
        self._ask("write")
        return super().truncate(size)

    def readinto(self, buffer: Any, /) -> int:
        self._ask("read")
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._ask("read")
        return super().readall()

    def read(self, size: int | None = -1, /) -> bytes:
        self._ask("read")
        return super().read(-1 if size is None else size)

    def _ask(self, operation: Operation) -> None:
        if self._disk is not None and self._disk.is_asked():
            self._disk.ask(operation)


_CALLS: Final[dict[str, Operation]] = {
    "open": "open",
    "read": "read",
    "pread": "read",
    "truncate": "write",
    "ftruncate": "write",
    "fsync": "sync",
    "fdatasync": "sync",
    "rename": "rename",
    "replace": "rename",
}
"""Functions of `os`, and what they do to the file that is their first argument."""


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False  # what is called with it says so
