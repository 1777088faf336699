"""Every public exception, in one tree, and the functions that read where an error came from.

    TrimeshError
      MeshError          something remote failed
        ProcDied HostLost LinkLost ConnectionLost Unresponsive RemoteCancelled RestartLimit Overloaded MeshStopped
        (MembershipChanged) ActorFailed CollectiveFailed
        RemoteError      a remote exception that could not be rebuilt
      DeadlockError ShapeError LimitExceeded SpawnError (HostRefused) PayloadError ProtocolError ConfigError
      ConnectError
      TrimeshInternalError  our bug
    DeviceMeshError      MeshError and MeshErrorGroup: all that using a mesh raises

A remote exception arrives as the original type; its coordinates are kept beside it as an `Origin`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import attrs

if TYPE_CHECKING:
    from typing import Self

    from trimesh.shape.extent import Point

_E = TypeVar("_E", bound=BaseException)


class TrimeshError(Exception):
    """Base of all exceptions that trimesh defines."""


class DeviceMeshError(Exception):
    """Base of `MeshError` and `MeshErrorGroup`: `except DeviceMeshError` catches all that using a mesh raises.

    It catches a whole group, whatever its leaves are, also a `ValueError` of user code, and so does `except*
    DeviceMeshError`: to handle leaves by `except*`, name their types.
    """


class MeshError(TrimeshError, DeviceMeshError):
    """Something on another process or host failed."""

    def _repr_html_(self) -> str:
        """Return a table of one row for notebooks: its place and its text."""
        return _failures_table([self], "")


class ProcDied(MeshError):
    """A process ended without being asked to.

    Attributes:
        exit_code: Its exit code, or None when a signal ended it or nothing is known.
        signal: Number of the signal that ended it, or None.
        oom_killed: True when the kernel's out-of-memory killer counted a kill in its memory group.
        stderr_tail: Last bytes of its standard error, decoded; "" when there was none.
        reason: "exited", "killed", "stopped" (its lease ran out), or "lost" (exit status unknown).
        by: "grace" when its block ended it because clean-up took longer than `grace`, "kill" when `ProcMesh.kill` did,
            else None.
        maybe_executed: For a call: False only when the message was certainly not delivered.
        record: File of its flight record, which `trimesh autopsy` reads; "" when there is none on this machine.
    """

    def __init__(
        self,
        message: str = "",
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        oom_killed: bool = False,
        stderr_tail: str = "",
        reason: str = "exited",
        by: str | None = None,
        maybe_executed: bool = True,
        record: str = "",
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal
        self.oom_killed = oom_killed
        self.stderr_tail = stderr_tail
        self.reason = reason
        self.by = by
        self.maybe_executed = maybe_executed
        self.record = record


class HostLost(MeshError):
    """A host, and all processes on it, cannot be reached any more.

    Attributes:
        host: Its name.
        point: Its place among the hosts of its job, or None.
        reason: "lease" (it was silent for too long), "agent exit", "protocol", or another word of its launcher.
    """

    def __init__(self, message: str = "", *, host: str = "", point: Point | None = None, reason: str = "lease") -> None:
        super().__init__(message)
        self.host = host
        self.point = point
        self.reason = reason


class LinkLost(MeshError):
    """The connection to a process that may still live was lost."""


class ConnectionLost(MeshError):
    """The program that publishes the called actors has ended, or the connection to it broke."""


class Unresponsive(MeshError):
    """A live process did not acknowledge a cancel in time: `limits.CANCEL_ACK_SECONDS`, or `abandon_after`."""


class RemoteCancelled(MeshError):
    """A remote endpoint was cancelled, but not by its caller.

    Attributes:
        reason: Reason that the canceller gave.
        canceller: Who cancelled, as text, or None when unknown.
    """

    def __init__(self, message: str = "", *, reason: str = "", canceller: str | None = None) -> None:
        super().__init__(message or f"the remote endpoint was cancelled: {reason}")
        self.reason = reason
        self.canceller = canceller


class RestartLimit(MeshError):
    """A supervised mesh failed more often than its policy allows.

    Attributes:
        causes: Every failure of the period, oldest first, the last one included.
    """

    def __init__(self, message: str = "", *, causes: Sequence[BaseException] = ()) -> None:
        super().__init__(message)
        self.causes = tuple(causes)


class Overloaded(MeshError):
    """A process refused work because one of its bounds was reached."""


class MeshStopped(MeshError):
    """The mesh was stopped, or is stopping, and takes no new messages."""


class MembershipChanged(MeshStopped):
    """The call targeted a member that has left its mesh: `resize` took it out.

    Attributes:
        maybe_executed: False only when the endpoint has certainly not run.
    """

    def __init__(self, message: str = "", *, maybe_executed: bool = True) -> None:
        super().__init__(message)
        self.maybe_executed = maybe_executed


class ActorFailed(MeshError):
    """An actor ended by a failure that had no caller; the failure is the `__cause__`."""


class CollectiveFailed(MeshError):
    """A collective operation was not done because another rank of its group could not take part.

    The error of that rank is the `__cause__`.
    """


class RemoteError(MeshError):
    """A remote exception whose type could not be rebuilt here.

    Attributes:
        type_name: Qualified name of the original type.
        message: Text of the original exception.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


class DeadlockError(TrimeshError):
    """A call could never have started: it waits, through others, for itself.

    Attributes:
        cycle: (class of the actor, endpoint, point) of each call of the cycle, which may span several processes. The
            first call holds the slot; each awaits the next; the last one got this error.
    """

    def __init__(self, message: str = "", *, cycle: Sequence[tuple[str, str, Point]] = ()) -> None:
        super().__init__(message)
        self.cycle = tuple(cycle)


class ShapeError(TrimeshError, ValueError):
    """A wrong dimension, index or size."""


class LimitExceeded(TrimeshError):
    """A bound of `trimesh.limits` was reached.

    Attributes:
        limit: Name of the bound.
        value: The rejected value, or 0 if only the native library knows it.
    """

    def __init__(self, limit: str, value: float, message: str = "") -> None:
        super().__init__(message or f"{limit} was exceeded, got {value}")
        self.limit = limit
        self.value = value


class ConfigError(TrimeshError, ValueError):
    """A file, environment variable or `trimesh.configured` names an unknown setting or an invalid value."""


class ConnectError(TrimeshError):
    """A name cannot be published or connected to: it is taken or unknown, or the two programs are incompatible."""


class SpawnError(TrimeshError):
    """A process could not be started."""


class HostRefused(SpawnError):
    """A host may not join: its versions differ, or its identity is wrong. The text has the values of both sides."""


class PayloadError(TrimeshError):
    """A value arrived that cannot be rebuilt in this process; the `__cause__` says why."""


class ProtocolError(TrimeshError):
    """A peer sent bytes that break the protocol."""


class TrimeshInternalError(TrimeshError):
    """A broken promise inside trimesh: a bug of ours, please report it."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if "report" in text else f"{text}; this is a bug of trimesh, please report it"


class RemoteTraceback(Exception):
    """The traceback of the remote process, as the `__cause__` of a rebuilt exception.

    It prints the frames alone; the rebuilt exception prints the text of the error. The frames are a note, because
    Python 3.11 and 3.12 keep only notes inside the margin of a printed group.

    Attributes:
        text: The whole traceback, with the text of the error.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        lines = (line for line in traceback_frames(text) if line and line != TRACEBACK_HEAD)
        shown = with_cells("\n".join(lines))
        self.__notes__ = [shown] if shown else []

    def __str__(self) -> str:
        return TRACEBACK_HEAD


TRACEBACK_HEAD = "Traceback (most recent call last):"


_FRAME = re.compile(r'File "([^"\n]+)"(?=, line \d)')


def with_cells(text: str) -> str:
    """Return a traceback in which cells of a notebook are named as IPython names them: `Cell In[3], line 7`."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()  # None outside of a notebook, or of a shell
    if shell is None:
        return text
    name_of = shell.compile.format_code_name  # ("Cell", "In[3]"); None for a file

    def named(found: re.Match[str]) -> str:
        return " ".join(name_of(found[1]) or (found[0],))

    return _FRAME.sub(named, text)


def traceback_frames(text: str) -> list[str]:
    """Return the lines of a traceback up to its last frame, without the text of the error."""
    lines = text.rstrip("\n").split("\n")
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return []
    end = frames[-1] + 1
    while end < len(lines) and lines[end].startswith("    "):
        end += 1
    return lines[:end]


class MeshErrorGroup(ExceptionGroup[Exception], DeviceMeshError):
    """All failures of one mesh call, or of one block.

    Its text includes the first failure. Failures of several members with equal type, text and remote traceback are one
    in `exceptions`, and print once; `failures`, `leaves` and `coords` have one of each member.

    Attributes:
        partial: Results received before the failure, as a `ValueMesh`, or None.
        mesh: Name of the mesh, or None.
        endpoint: Name of the endpoint, or None.
    """

    partial: Any
    mesh: str | None
    endpoint: str | None

    def __new__(
        cls,
        message: str,
        exceptions: Sequence[Exception],
        *,
        partial: Any = None,
        mesh: str | None = None,
        endpoint: str | None = None,
    ) -> Self:
        self = super().__new__(cls, message, _distinct(exceptions))
        self.__dict__[FAILURES] = tuple(exceptions)
        self.partial = partial
        self.mesh = mesh
        self.endpoint = endpoint
        return self

    def __init__(
        self,
        message: str,
        exceptions: Sequence[Exception],
        *,
        partial: Any = None,
        mesh: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        super().__init__(message, exceptions)  # the rest is set by `__new__`, which alone makes groups

    @property
    def failures(self) -> tuple[Exception, ...]:
        """One failure of each member, equal ones included; `exceptions` has each distinct one once."""
        found: tuple[Exception, ...] | None = self.__dict__.get(FAILURES)
        return self.exceptions if found is None else found

    def split(self, condition: Any, /) -> Any:
        """Split by type or predicate, applied to every failure."""
        return super(MeshErrorGroup, self._unfolded()).split(condition)

    def subgroup(self, condition: Any, /) -> Any:
        """Return the part that matches a type or predicate, applied to every failure."""
        return super(MeshErrorGroup, self._unfolded()).subgroup(condition)

    def _unfolded(self) -> MeshErrorGroup:
        """Return a group with every failure in `exceptions`; itself if it has them."""
        return self if len(self.exceptions) == len(self.failures) else self._around(self.failures)

    def folded(self) -> MeshErrorGroup:
        """Return a group with equal failures once in `exceptions`; itself if it has them so."""
        distinct = _distinct(self.failures)
        return self if len(self.exceptions) == len(distinct) else self._around(distinct)

    def _around(self, exceptions: Sequence[Exception]) -> MeshErrorGroup:
        group = BaseExceptionGroup.__new__(type(self), self.message, exceptions)
        group.__dict__.update(self.__dict__, **{FAILURES: self.failures})
        group.__cause__, group.__context__ = self.__cause__, self.__context__
        group.__suppress_context__ = self.__suppress_context__
        return group.with_traceback(self.__traceback__)

    def derive(self, exceptions: Sequence[Any], /) -> MeshErrorGroup:  # type: ignore[override]  # no BaseException here
        """Return a group of the same mesh, endpoint and partial results around other exceptions."""
        is_folded = len(self.exceptions) < len(self.failures)
        equals = self._equals() if is_folded else {}  # Python splits only `exceptions`
        found = [equal for error in exceptions for equal in equals.get(id(error), (error,))]
        return MeshErrorGroup(self.message, found, partial=self.partial, mesh=self.mesh, endpoint=self.endpoint)

    def _equals(self) -> dict[int, list[Exception]]:
        """Return each set of equal failures, by the identity of the one in `exceptions`."""
        firsts: dict[object, int] = {}
        found: dict[int, list[Exception]] = {}
        for error in self.failures:
            found.setdefault(firsts.setdefault(_key(error), id(error)), []).append(error)
        return found

    def __str__(self) -> str:
        return f"{self.message}: {first_failure(self.failures)}"

    def _repr_html_(self) -> str:
        """Return a table for notebooks, below a drawing of the mesh where several members failed.

        Equal failures of several members are one row.
        """
        failures = list(leaves(self))
        return _places_drawn(failures) + _failures_table(failures, self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the remote tracebacks, too: the default drops every cause (E04)."""
        texts = [_remote_text(leaf) for leaf in leaves(self)]
        state = {name: value for name, value in self.__dict__.items() if name not in LOCAL_ENTRIES}
        return _rebuild_group, (type(self), self.message, self.failures, texts), state


FAILURES = "__trimesh_failures__"
"""Entry of a `MeshErrorGroup` with all its failures, equal ones included."""

SHORTENED = "__trimesh_shortened__"
"""Entry of an exception whose traceback has lost frames of this library; see `trimesh._wire.exceptions.tracebacks`."""

LOCAL_ENTRIES = frozenset((FAILURES, SHORTENED))
"""Entries of exceptions that stay in the process."""

_WORDS_CHARS_MAX = 300
"""Characters of the first failure in the text of a group: a line of a log."""

_SAME = "the same at "
"""Begins the note of a failure that stands for equal ones."""


def _key(error: Exception) -> object:
    """Return a key that equal failures of several members share; an error without a place has a key of its own."""
    where = entries_of(error).get(_ORIGIN)
    if not isinstance(where, Origin) or where.point is None or isinstance(error, BaseExceptionGroup):
        return id(error)
    cause = cause_of(error)
    place = "\n".join(getattr(cause, "__notes__", ())) if isinstance(cause, RemoteTraceback) else id(cause or None)
    return class_of(error), text_of(error), place


def _distinct(exceptions: Sequence[Exception]) -> Sequence[Exception]:
    """Return the first of each set of equal failures; a note on it names the places of the others."""
    if len(exceptions) < 2 or not all(isinstance(error, Exception) for error in exceptions):
        return exceptions  # the constructor refuses members that are not exceptions
    sets: dict[object, list[Exception]] = {}
    for error in exceptions:
        sets.setdefault(_key(error), []).append(error)
    if len(sets) == len(exceptions):
        return exceptions
    for first, *rest in sets.values():
        if rest:
            _note_once(first, _SAME + _places(rest))
    return [equal[0] for equal in sets.values()]


def _note_once(error: Exception, note: str) -> None:
    """Replace an earlier note of this kind: a failure may be put into several groups."""
    notes = entries_of(error).get(_NOTES)
    if isinstance(notes, list):
        notes[:] = [one for one in cast("list[object]", notes) if not (isinstance(one, str) and one.startswith(_SAME))]
    add_note(error, note)


def _places(errors: Sequence[BaseException]) -> str:
    """Return the places of failures; those in one row of one dimension as a range: `trainers[gpus=1..7]`."""
    named = [where for error in errors if (where := origin(error)) is not None and where.point is not None]
    first = named[0]
    assert first.point is not None
    axes = [(label, [one.point[label] for one in named if one.point is not None]) for label in first.point]
    moving = [(label, row) for label, row in axes if len(set(row)) > 1]
    if len({one.mesh for one in named}) == 1 and len(moving) == 1:
        [(label, row)] = moving
        if row == list(range(row[0], row[0] + len(row))):
            fixed = {name: str(values[0]) for name, values in axes}
            return place_name(first.mesh, fixed | {label: f"{row[0]}..{row[-1]}"})
    shown = ", ".join(place_name(one.mesh, one.point) for one in named[:_PLACES_SHOWN])
    return f"{shown} and {len(named) - _PLACES_SHOWN} more" if len(named) > _PLACES_SHOWN else shown


_PLACES_SHOWN = 8
"""Maximum places that a note lists when they form no range."""


def first_failure(exceptions: Sequence[BaseException]) -> str:
    """Return the first failure in one line, its place, and how many more there are."""
    found = [leaf for error in exceptions for leaf in leaves(error)]
    first = found[0]
    text = text_of(first).strip().partition("\n")[0]
    words = f"{type(first).__name__}: {text}" if text else type(first).__name__
    if len(words) > _WORDS_CHARS_MAX:
        words = words[: _WORDS_CHARS_MAX - 3] + "..."
    where = origin(first)
    place = "" if where is None else place_name(where.mesh, where.point)
    is_named = not place or place in words
    rest = f"and {len(found) - 1} more" if len(found) > 1 else ""
    inside = " ".join(part for part in ("" if is_named else place, rest) if part)
    return f"{words} ({inside})" if inside else words


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or an empty text if a user's `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - as above
        return ""


def _remote_text(error: BaseException) -> str:
    """Return the remote traceback that ends the chain of an exception, or an empty text."""
    cause = cause_of(error)
    while cause is not None and not isinstance(cause, RemoteTraceback):
        cause = cause_of(cause)
    return "" if cause is None else cause.text


def _rebuild_group(
    cls: type[MeshErrorGroup], message: str, exceptions: Sequence[Exception], texts: Sequence[str]
) -> MeshErrorGroup:
    group = cls(message, exceptions)
    for leaf, text in zip(leaves(group), texts, strict=True):
        if text and cause_of(leaf) is None:
            set_cause(leaf, RemoteTraceback(text))
    return group


def place_name(mesh: str, point: Mapping[str, object] | None) -> str:
    """Return the name of a member, as texts and the command line spell it; without dimensions, that of its mesh.

    Example:
        >>> place_name("procs", {"hosts": 1, "gpus": 2})
        'procs[hosts=1,gpus=2]'
        >>> place_name("trainer", {})
        'trainer'
    """
    inside = ",".join(f"{label}={index}" for label, index in (point or {}).items())
    return f"{mesh}[{inside}]" if inside else mesh


@attrs.frozen
class Origin:
    """Origin of an error: the coordinates of the code that raised it.

    Attributes:
        point: Coordinates in the extent of the mesh as spawned, or None for an error outside any member.
        mesh: Name of the process or actor mesh.
        actor: Class name of the actor, or None.
        endpoint: Name of the endpoint, or None.
        host: Name of the host.
        pid: Process id there, or None if it is not known, as before a process is started.
        incarnation: 0 for the first process at this point, one more for each restart.
    """

    point: Point | None
    mesh: str
    actor: str | None = None
    endpoint: str | None = None
    host: str = ""
    pid: int | None = None
    incarnation: int = 0


_ORIGIN = "__trimesh_origin__"


@overload
def origin(error: MeshError) -> Origin: ...
@overload
def origin(error: BaseException) -> Origin | None: ...
def origin(error: BaseException) -> Origin | None:
    """Return where `error` came from, or None for an error of this process's own code.

    Args:
        error: A leaf; groups have no origin of their own.
    """
    found = entries_of(error).get(_ORIGIN)
    if isinstance(found, Origin):
        return found
    # A `MeshError` is always remote, so its origin is never None; one made by hand has an empty origin.
    return Origin(None, "") if isinstance(error, MeshError) else None


def has_origin(error: BaseException) -> bool:
    """Return whether `error` has an origin attached."""
    return isinstance(entries_of(error).get(_ORIGIN), Origin)


def set_origin(error: BaseException, where: Origin) -> None:
    """Attach `where` to `error`, unless it already has an origin (the first one is the true one)."""
    if not has_origin(error):
        entries_of(error)[_ORIGIN] = where


# Attributes of a user's exception are set past its class, which may refuse them, as a frozen dataclass does.

_DICT: Any = BaseException.__dict__["__dict__"]
_CAUSE: Any = BaseException.__dict__["__cause__"]
_CONTEXT: Any = BaseException.__dict__["__context__"]


def entries_of(error: BaseException) -> dict[str, Any]:
    """Return the true `__dict__`."""
    entries: dict[str, Any] = _DICT.__get__(error)
    return entries


KEPT_TEXT = "__trimesh_text__"
"""Entry of an exception with the text that it had where it was raised, and of the class that shows it."""


def class_of(error: BaseException) -> type[BaseException]:
    """Return the class that an exception was raised with, not one that was made to show its text."""
    cls = type(error)
    return cls.__bases__[0] if KEPT_TEXT in cls.__dict__ else cls


def add_note(error: BaseException, note: str) -> None:
    """Add a note, as `error.add_note` does where the class allows it."""
    entries = entries_of(error)
    notes: Any = entries.get(_NOTES)
    if type(notes) is not list:
        entries[_NOTES] = [note]
        return
    cast("list[object]", notes).append(note)


def notes_on(error: BaseException) -> Sequence[str]:
    notes = entries_of(error).get(_NOTES)
    return [note for note in cast("list[object]", notes) if isinstance(note, str)] if type(notes) is list else []


def cause_of(error: BaseException) -> BaseException | None:
    """Return the true `__cause__`."""
    cause: BaseException | None = _CAUSE.__get__(error)
    return cause


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set `__cause__`, which hides the context."""
    _CAUSE.__set__(error, cause)


def context_of(error: BaseException) -> BaseException | None:
    """Return the true `__context__`."""
    context: BaseException | None = _CONTEXT.__get__(error)
    return context


def set_context(error: BaseException, context: BaseException | None) -> None:
    _CONTEXT.__set__(error, context)


_NOTES = "__notes__"


@overload
def leaves(error: BaseExceptionGroup[_E]) -> Iterator[_E]: ...
@overload
def leaves(error: BaseException) -> Iterator[BaseException]: ...
def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group that are not groups themselves, in order; an exception yields itself."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for child in group.failures if isinstance(group, MeshErrorGroup) else group.exceptions:
            yield from leaves(child)
    else:
        yield error


def coords(error: BaseException) -> list[Point]:
    """Return the points of the leaves of `error` that have one, in order.

    The result can be given to `mesh.exclude`. Errors of this process's own code have no point and are left out.
    """
    found: list[Point] = []
    for leaf in leaves(error):
        where = origin(leaf)
        if where is not None and where.point is not None:
            found.append(where.point)
    return found


def _failures_table(failures: Sequence[BaseException], caption: str) -> str:
    from trimesh.html_table import table  # noqa: PLC0415 - only notebooks ask

    sets: dict[object, list[BaseException]] = {}
    for failure in failures:
        sets.setdefault(_key(failure) if isinstance(failure, Exception) else id(failure), []).append(failure)
    return table(("where", "process", "error"), map(_cells_of, sets.values()), len(sets), caption)


def _places_drawn(failures: Sequence[BaseException]) -> str:
    """Return a drawing of the mesh on which several members failed; empty if it was one, or on several meshes."""
    from trimesh.mesh_drawing import mesh_card  # noqa: PLC0415 - only notebooks draw

    places = [(where.mesh, where.point) for one in failures if (where := origin(one)) is not None]
    meshes = {(mesh, point.extent): point.extent for mesh, point in places if point is not None}
    ranks = {point.rank for _, point in places if point is not None}
    if len(ranks) < 2 or len(meshes) > 1:
        return ""
    [((mesh, _), extent)] = meshes.items()
    states = ["failed" if rank in ranks else "" for rank in range(extent.nelements)]
    titles = [f"{place_name(mesh, point)}: failed" for point in extent.points()]
    return mesh_card(f"{mesh}{dict(extent)}", extent, states, titles)


def error_in_words(error: BaseException) -> str:
    """Return type and text of an error as a cell of a table of HTML."""
    from trimesh.html_table import ErrorCell  # noqa: PLC0415 - only notebooks ask

    text = text_of(error)
    return ErrorCell(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _cells_of(equal: Sequence[BaseException]) -> tuple[object, ...]:
    """Return the cells of one failure, or of equal ones of several members."""
    where = origin(equal[0])
    if where is None:
        return "", "", error_in_words(equal[0])
    places = place_name(where.mesh, None) if where.point is None else _places(equal)
    process = f"{len(equal)} processes" if len(equal) > 1 else "" if where.pid is None else f"pid {where.pid}"
    return places, process, error_in_words(equal[0])
