"""Where users' awaits come from: a Trio task, or the task of another loop that needs a portal into Trio.

Every public coroutine function passes its work through `in_trio`; every public async context manager is a `TrioBlock`
or passes through `in_trio_block`; every public sync function that looks at the runtime passes through `in_trio_now`. In
a Trio task they cost one look and return what they were given. Elsewhere they return the same thing, done in Trio by
the portal that `trimesh.aio` brings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar, cast

from trio.lowlevel import enable_ki_protection, in_trio_run, in_trio_task

from trimesh._runtime.system.forks import end_child, is_forked_run
from trimesh._runtime.tasks.crossing import Site
from trimesh._wire.exceptions.tracebacks import has_user_frame, without_own_frames
from trimesh.errors import MeshErrorGroup, context_of, leaves, set_context

P = ParamSpec("P")
T = TypeVar("T")


class Portal(Protocol):
    """What takes the work of code outside of Trio there, and brings back what comes of it."""

    def run(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Run a coroutine function in Trio; a cancel of the caller cancels it there and waits for its end."""
        ...

    def take(self, step: Callable[[], Awaitable[T]], put_back: Callable[[T], None]) -> Awaitable[T]:
        """Run a step that takes something out; what it has taken for a caller that is cancelled is put back."""
        ...

    def block(
        self, enter: Callable[[], Awaitable[T]], leave: Callable[[BaseException | None], Awaitable[bool | None]]
    ) -> AbstractAsyncContextManager[T]:
        """Return a block whose body is here, and which is entered and left in one task of Trio.

        Args:
            enter: Gives what the body gets.
            leave: Gets what the body has raised; returns whether that is settled.
        """
        ...

    def run_now(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that does not wait in the thread of Trio."""
        ...

    def place(self) -> Site[Any] | None:
        """Return where in Trio the work of the running code is done; None where none is."""
        ...


_portal: Portal | None = None


def set_portal(portal: Portal) -> None:
    """Make `portal` the one that code outside of Trio takes."""
    global _portal  # noqa: PLW0603 - one for all loops of the process: it keeps them apart itself
    _portal = portal


def in_trio(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Return `function` where the caller is a Trio task; elsewhere what runs it in Trio.

    Raises:
        RuntimeError: The caller is no Trio task, and `trimesh.aio` is not in use.
    """
    return function if in_trio_task() else partial(_the_portal().run, function)


def in_trio_taking(step: Callable[[], Awaitable[T]], put_back: Callable[[T], None]) -> Awaitable[T]:
    """Return the next of what `step` takes out, an item of a stream, say.

    Outside of Trio a cancel may come between the end of the step in Trio and its caller; `put_back` is given what would
    be lost then.
    """
    return step() if in_trio_task() else _the_portal().take(step, put_back)


def in_trio_block(block: AbstractAsyncContextManager[T]) -> AbstractAsyncContextManager[T]:
    """Return what enters and leaves `block` in Trio, wherever its body is.

    Entering raises `RuntimeError` where that is no Trio task, and `trimesh.aio` is not in use.
    """
    return _Wrapped(block)


def in_trio_now(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` where the caller is in Trio; elsewhere what runs it there, if there is a portal."""
    return function if _portal is None or in_trio_task() else partial(_portal.run_now, function)


def place_outside() -> Site[Any] | None:
    """Return where in Trio the work of the running code is done; None for a task of Trio, which is there itself."""
    return None if _portal is None or in_trio_task() else _portal.place()


class TrioBlock(ABC, Generic[T]):
    """An async context manager that is entered and left in Trio, wherever its body is."""

    _crossing: AbstractAsyncContextManager[T] | None = None

    @enable_ki_protection
    async def __aenter__(self) -> T:
        """Enter it."""
        self._begin()
        try:
            if in_trio_task():
                return await self._enter()
            self._crossing = _the_portal().block(self._enter, self._leave)
            return await self._crossing.__aenter__()
        except BaseException as error:
            without_own_frames(error)
            raise

    @enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave it."""
        if is_forked_run():
            end_child(error)
        try:
            if self._crossing is None:
                is_settled = await self._leave(error)
            else:
                is_settled = await self._crossing.__aexit__(kind, error, traceback)
            if is_settled or error is None:
                return is_settled
            found, context = error, None
        except BaseException as raised:
            found = without_own_nurseries(raised, error)
            context = context_of(found)
            if found is raised and found is not error:
                without_own_frames(found)
                raise
        if error is not None and _is_same(found, error):  # it goes on as it has come
            if traceback is not None:
                BaseException.with_traceback(error, traceback)
            without_own_frames(error)
            return False
        try:
            raise without_own_frames(found)
        finally:
            set_context(found, context)  # which the error of the body has replaced
            del found, error, context

    def _begin(self) -> None:
        """Note that it is used, before it is entered; a cancel may come between."""

    @abstractmethod
    async def _enter(self) -> T: ...

    @abstractmethod
    async def _leave(self, error: BaseException | None) -> bool | None:
        """Leave it, in the same Trio task; `error` is what the body has raised."""


class _Wrapped(TrioBlock[T], Generic[T]):
    """Any context manager as a block."""

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self._block = block

    async def _enter(self) -> T:
        return await self._block.__aenter__()

    async def _leave(self, error: BaseException | None) -> bool | None:
        if error is None:
            return await self._block.__aexit__(None, None, None)
        try:
            return await self._block.__aexit__(type(error), error, error.__traceback__)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1 and group.exceptions[0] is error:
                return False  # of a block of ours inside, which the user has not opened
            raise


def without_own_nurseries(raised: BaseException, error: BaseException | None) -> BaseException:
    """Return what the leaving of a block has raised, without the groups of nurseries that the user has not opened.

    Args:
        raised: By the leaving.
        error: By the body, which is left as it is.

    Returns:
        `raised`, or `error` where nothing else has failed, or one group of what tasks of ours have raised.
    """
    members = _members(raised, error)
    if len(members) == 1 and (members[0] is raised or members[0] is error):
        return members[0]
    exceptions = [member for member in members if isinstance(member, Exception)]
    if len(exceptions) == len(members):
        return MeshErrorGroup(_FAILED, exceptions)
    return BaseExceptionGroup(_FAILED, members)


def _is_same(found: BaseException, error: BaseException) -> bool:
    """Tell whether an exception is the error of the body, or a copy of its group, as a cancel scope makes one."""
    if found is error:
        return True
    is_copy = all(isinstance(one, BaseExceptionGroup) for one in (found, error))
    return is_copy and [id(leaf) for leaf in leaves(found)] == [id(leaf) for leaf in leaves(error)]


def _members(raised: BaseException, error: BaseException | None) -> list[BaseException]:
    if raised is error or not isinstance(raised, BaseExceptionGroup):
        return [raised]
    group = cast("BaseExceptionGroup[BaseException]", raised)
    if group.message != _NURSERY or has_user_frame(group):
        return [group]
    return [member for one in group.exceptions for member in _members(one, error)]


_FAILED: Final = "a task of a block failed"
_NURSERY: Final = "Exceptions from Trio nursery"
"""Message of the groups that nurseries of Trio make."""


def _the_portal() -> Portal:
    if _portal is not None:
        return _portal
    if in_trio_run():
        raise RuntimeError("meshes must be used in Trio tasks, got a callback of a Trio run: start a task from it")
    raise RuntimeError(
        "meshes must be used in Trio tasks, got code outside of trio.run(): from asyncio, enter the mesh by "
        "`async with trimesh.aio.spawn_procs(...) as procs:`, a job after `import trimesh.aio`"
    )
