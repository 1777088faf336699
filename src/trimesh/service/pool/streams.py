r"""Streams of a pool: requests to endpoints that are async generators, each read by one consumer.

    waiting --assigned--> open --all members have settled--> over
       ^                    |                                  |
       \----its replica has died before the first item---------/

PT-1 a stream holds its place at the replica until every member has settled, wherever its consumer is then.
PT-2 each stream is counted once, when its block is left, or when entering fails.
PT-3 a stream that has yielded an item is never sent to another replica.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio
from trio.lowlevel import in_trio_task

from trimesh import limits
from trimesh._runtime.calls import reason_of, yield_to_cancel
from trimesh._runtime.tasks import TrioBlock, in_trio_taking
from trimesh._wire.messages import CancelAck
from trimesh.actor import verbs
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.options import NO_OPTIONS
from trimesh.actor.results import Results, Stream
from trimesh.errors import MeshErrorGroup, MeshStopped
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh.service.pool.engine import CallOptions, PoolCall, PoolEngine

R = TypeVar("R")


class PoolStream(TrioBlock["PoolStream[R]"], AsyncIterator[R], Generic[R]):
    """Items of one stream: `async with pool.stream.generate(prompt) as tokens: async for token in tokens`.

    Use it once. One task at a time may iterate.
    """

    def __init__(self, items: Results[tuple[Any, R]]) -> None:
        self._items = items
        self._taken: list[R] = []  # put back by a step outside of Trio that was cancelled at that moment

    async def _enter(self) -> PoolStream[R]:
        """Wait for a replica and send the request.

        Raises:
            TypeError: The endpoint is not an async generator, or the arguments do not fit.
            Overloaded, Paused, RemoteCancelled, MeshStopped: As for a call of the pool.
        """
        await self._items.__aenter__()
        return self

    async def _leave(self, error: BaseException | None) -> bool | None:
        if error is None:
            return await self._items.__aexit__(None, None, None)
        return await self._items.__aexit__(type(error), error, error.__traceback__)

    def __aiter__(self) -> PoolStream[R]:
        return self

    def __anext__(self) -> Awaitable[R]:
        """Return the next item.

        Raises:
            StopAsyncIteration: The generator has ended.
            Exception: The exception of the generator, behind its items; of a replica of several members a
                `MeshErrorGroup`.
            ProcDied: The replica died. Raised once; so are `Paused`, `RemoteCancelled` and `MeshStopped`.
        """
        if in_trio_task():
            return self._next()
        return in_trio_taking(self._next, self._taken.append)

    async def _next(self) -> R:
        if self._taken:
            await trio.lowlevel.checkpoint()
            return self._taken.pop(0)
        return (await anext(self._items))[1]


class PoolItems(Stream[R]):
    """Items of a stream in the process that owns the pool, each with the point of its member."""

    _call: PoolCall

    def __init__(
        self, engine: PoolEngine, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> None:
        engine.check_kind(name, streams=True)
        mesh = engine.views[0]._view  # noqa: SLF001 - a method would hide an endpoint of that name
        super().__init__(mesh, engine.spec_of(name), NO_OPTIONS, ((), {}))
        self._engine = engine
        self._arguments = args, kwargs
        self._call_options = options
        self._is_sent = False
        self._has_given = False
        self._has_failed = False
        self._sent_at = 0.0
        self._seconds: float | None = None  # until the first item
        self._error: Exception | None = None  # raised here, not by the generator
        self._ended: trio.Event | None = None  # of the task by which the pool ends an open stream

    # ---- one attempt ---------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        engine = self._engine
        await trio.lowlevel.checkpoint()
        call = self._call = engine.begin(self._spec.name, *self._arguments, self._call_options, streams=True)
        try:
            await self._send()
        except BaseException as error:
            engine.count_failed(call, error)
            if call in engine.calls:
                engine.let_go(call)
            raise

    async def _send(self) -> None:
        """Wait for a replica, and open the stream there."""
        call, engine = self._call, self._engine
        call.scope = trio.CancelScope()
        with call.scope:
            if call.state == "new":
                await engine.attempts.wait_turn(engine, call, self._call_options)
            if call.state == "new" and (admitted := engine.admit(call, self._call_options)) is not None:
                await admitted.wait()
            while not self._is_sent:
                index = await engine.assigned(call)
                try:
                    await self._send_to(index)
                except Exception as error:
                    if not engine.is_end_of(call, error):
                        raise
                    engine.see_down(index)
                    if not engine.may_try_again(call, error):
                        raise
                    engine.send_elsewhere(call)
                    self._has_failed = False
            return
        assert call.error is not None
        raise call.error

    async def _send_to(self, index: int) -> None:
        view = self._engine.views[index]._view  # noqa: SLF001 - as above
        args, kwargs = self._arguments
        self._mesh, self._points = view, tuple(view.region.points())
        self._bound = verbs.bind(view, self._spec, args, kwargs, streams=True)
        self._sent_at = trio.current_time()
        try:
            await super()._open()
        except MeshErrorGroup as group:
            raise self._group(group.exceptions) from None
        assert self._stream is not None
        self._is_sent = True
        self._call.end = self._end
        self._stream.on_over = self._over
        if self._stream.collector.is_complete:
            self._over()
        elif self._call.error is not None:
            self._end(str(self._call.error))

    def _over(self) -> None:
        """Free the place at the replica: all members have settled."""
        stream = self._stream
        assert stream is not None
        self._call.end = stream.on_over = None
        if self._seconds is None and not stream.collector.failures:
            self._seconds = trio.current_time() - self._sent_at
        self._engine.release(self._call, self._seconds)

    def _end(self, reason: str) -> None:
        """End the open stream for the pool, whatever its consumer does."""
        self._call.end = None
        self._error = self._call.error
        self._ended = trio.Event()
        self._engine.nursery.start_soon(self._end_now, reason[: limits.REASON_CHARS_MAX], self._ended)

    async def _end_now(self, reason: str, ended: trio.Event) -> None:
        try:
            assert self._stream is not None
            await self._stream.close(reason)
        finally:
            if self._call in self._engine.calls:  # a member does not acknowledge
                self._engine.release(self._call, None)
            ended.set()

    # ---- items -------------------------------------------------------------------------------------------------

    def _take(self) -> tuple[Point, R] | None:
        if not self._is_sent:
            return None
        found = super()._take()
        while found is not None and found[0] is not self._points[0]:
            found = super()._take()
        if found is not None and not self._has_given:
            self._note_first()
        return found

    async def _next(self) -> tuple[Point, R] | None:
        while True:
            try:
                if not self._is_sent:
                    await self._send()
                found = await super()._next()
            except trio.ClosedResourceError:
                return None  # the pool has ended the stream
            except Exception as error:  # noqa: BLE001 - raised by `_advance`
                self._error = error
                return None
            if found is None:
                if not await self._goes_elsewhere():
                    return None
            elif found[0] is self._points[0]:
                if not self._has_given:
                    self._note_first()
                return found

    def _note_first(self) -> None:
        self._has_given = True
        self._seconds = trio.current_time() - self._sent_at

    async def _goes_elsewhere(self) -> bool:
        """Queue the stream again if its replica has died and it may run on another one; return whether it may."""
        call, engine = self._call, self._engine
        await yield_to_cancel(self._failed())
        failures = self._failures(cancelled=False)
        if not failures or self._broken or self._error is not None:
            return False
        error = self._group(failures)
        self._has_failed = False
        if not engine.is_end_of(call, error):
            return False
        assert call.replica is not None
        engine.see_down(call.replica)
        if self._has_given or engine.is_closed or not engine.may_try_again(call, error):
            return False
        await super()._close("its replica has died")
        self._is_sent = False
        self._seconds = None
        engine.resume(call)
        return True

    # ---- its end -----------------------------------------------------------------------------------------------

    async def _leave(self, error: BaseException | None) -> None:
        try:
            await super()._leave(error)
        finally:
            self._conclude()

    async def _close(self, reason: str) -> None:
        self._call.end = None  # from now on a cancel of the pool changes nothing
        if self._ended is not None:
            with trio.CancelScope(shield=True):
                await self._ended.wait()
        elif self._is_sent:
            await super()._close(reason)

    def _conclude(self) -> None:
        call, engine = self._call, self._engine
        if self._stream is not None:
            self._stream.on_over = None  # a cycle of references otherwise
        if call in engine.calls:
            engine.let_go(call)
        else:
            engine.reading -= 1
        counts = engine.counts
        is_cancel = self._error is not None and self._error is call.error and not call.is_unrouted
        if self._has_failed and not is_cancel:
            counts.failed += 1
        elif self._is_over and not self._has_failed:
            counts.succeeded += 1
        else:
            counts.cancelled += 1

    def _failures(self, *, cancelled: bool) -> list[Exception]:
        error = self._error
        raised = super()._failures(cancelled=cancelled or error is not None) if self._is_sent else []
        return raised if raised or error is None or cancelled else [error]

    def _group(self, failures: Sequence[Exception]) -> Exception:
        self._has_failed = True
        if len(failures) == 1 and (failures[0] is self._error or len(self._points) == 1):
            return failures[0]
        return super()._group(failures)


class FrontItems(Stream[R]):
    """Items of a stream in another process than the pool's, through the actor beside the pool."""

    def __init__(self, front: ActorMesh, name: str, args: tuple[Any, ...], note_moves: Callable[[int], None]) -> None:
        mesh = front._view  # noqa: SLF001 - as above
        spec = mesh.endpoints["stream"]
        super().__init__(mesh, spec, NO_OPTIONS, verbs.bind(mesh, spec, args, {}, streams=True))
        self._name = name
        self._note_moves = note_moves

    @property
    def what(self) -> str:
        return self._name

    async def _open(self) -> None:
        """Send the request, and wait until it has a replica."""
        try:
            await super()._open()
            if await self._next() is None:
                failures = self._failures(cancelled=False)
                await yield_to_cancel(self._failed())
                raise self._group(failures or [MeshStopped(f"the stream {self._name} has ended before its replica")])
        except BaseException as error:
            await self._close(reason_of(error, self.what))
            if isinstance(error, MeshErrorGroup):
                raise self._group(error.exceptions) from None
            raise

    def _take(self) -> tuple[Any, R] | None:
        return self._noted(super()._take())

    async def _next(self) -> tuple[Any, R] | None:
        return self._noted(await super()._next())

    def _noted(self, found: Any) -> tuple[Any, R] | None:
        if found is None:
            return None
        moved: tuple[Any, R] = found[1]
        self._note_moves(moved[0])
        return moved

    def _failures(self, *, cancelled: bool) -> list[Exception]:
        outcome = None if self._stream is None else self._stream.collector.outcomes[0]
        if isinstance(outcome, CancelAck) and outcome.by == "other" and not cancelled:
            return [MeshStopped(f"the pool of {self._name} has stopped: {outcome.reason}")]
        return super()._failures(cancelled=cancelled)

    def _group(self, failures: Sequence[Exception]) -> Exception:
        return failures[0] if len(failures) == 1 else super()._group(failures)
