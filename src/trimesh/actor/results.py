"""Results of `stream` and `map`: an iterator of results as they arrive, in a block that ends the calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import trio
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled, in_trio_task

from trimesh._routing.collector import Outcome
from trimesh._runtime.calls import (
    Err,
    Ok,
    OutgoingStream,
    encode_request,
    reason_of,
    remaining_budget,
    results_of,
    value_of,
    yield_to_cancel,
)
from trimesh._runtime.life import current_proc
from trimesh._runtime.meshes import fold_into_deaths
from trimesh._runtime.tasks import TrioBlock, in_trio_taking, split_cancelled
from trimesh._runtime.values import EndpointKind, EndpointSpec
from trimesh.actor import verbs
from trimesh.actor.options import Options
from trimesh.actor.view import MeshView
from trimesh.config import current
from trimesh.errors import MeshErrorGroup
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._transport.interface import Transport

T = TypeVar("T")


class Results(TrioBlock["Results[T]"], AsyncIterator[T], Generic[T]):
    """Results of many messages, one at a time: `async with ... as results: async for key, value in results`.

    Leaving the block early, in any way, cancels running calls and waits until they have unwound (S04). The iteration
    raises failures as one `MeshErrorGroup`, after earlier results (S05), which passes through the block unchanged. The
    block raises failures that the iteration has not raised.

    Use it once. One task at a time may iterate.
    """

    _transport: Transport

    def __init__(self, mesh: MeshView, spec: EndpointSpec) -> None:
        self._mesh = mesh
        self._spec = spec
        self._state = "new"
        self._is_over = False
        self._is_waited_for = False
        self._taken: list[T] = []  # results put back by a step outside of Trio that was cancelled at that moment

    @property
    def what(self) -> str:
        """Name of the endpoint, for messages."""
        return f"{self._mesh.name}.{self._spec.name}"

    @trio.lowlevel.enable_ki_protection
    async def _enter(self) -> Self:
        """Send the messages.

        Raises:
            RuntimeError: It was entered before.
            MeshErrorGroup: The block that owns the mesh is being left.
            TypeError: An argument cannot be serialised; nothing was sent.
        """
        if self._state != "new":
            raise RuntimeError(f"results of {self.what} can be entered once: call the verb again")
        self._state = "left"
        self._transport = current_proc().transport
        await self._open()
        self._state = "open"
        return self

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        """Return the next result.

        Raises:
            StopAsyncIteration: There are no more.
            MeshErrorGroup: Members have failed; raised once, after the results.
            trio.BusyResourceError: Another task is waiting for a result.
            trio.ClosedResourceError: The block has been left.
            RuntimeError: The block has not been entered.
        """
        if in_trio_task():
            return self._advance()
        return in_trio_taking(self._advance, self._taken.append)

    @trio.lowlevel.enable_ki_protection
    async def _advance(self) -> T:
        if self._state != "open" or self._taken or self._is_over or self._is_waited_for:
            return await self._advance_otherwise()
        self._is_waited_for = True
        try:
            await checkpoint_if_cancelled()
            found = self._take()
            if found is not None:
                transport = self._transport
                if not (transport.skips_left and transport.skip_turn()):
                    await cancel_shielded_checkpoint()
                return found
            found = await self._next()
        finally:
            self._is_waited_for = False
        if found is not None:
            return found
        await yield_to_cancel(self._failed())
        failures = self._failures(cancelled=False)
        self._is_over = True
        if failures:
            raise self._group(failures)
        raise StopAsyncIteration

    async def _advance_otherwise(self) -> T:
        """Return a result that was put back, or raise why there is none."""
        if self._state == "new":
            raise RuntimeError(f"results of {self.what} must be entered first: write `async with ... as results:`")
        await trio.lowlevel.checkpoint()
        if self._state == "left":
            raise trio.ClosedResourceError(f"the block of the results of {self.what} has been left: iterate inside it")
        if self._taken:
            return self._taken.pop(0)
        if self._is_over:
            raise StopAsyncIteration
        raise trio.BusyResourceError(f"another task waits for a result of this {self.what}: iterate in one task")

    @trio.lowlevel.enable_ki_protection
    async def _leave(self, error: BaseException | None) -> None:
        """End the calls and raise failures that the iteration has not raised.

        Raises:
            MeshErrorGroup: Those failures, and the body's own error, if any.
            BaseExceptionGroup: Those failures, and the body's `KeyboardInterrupt` or other base exception.
        """
        self._state = "left"
        cancelled, rest = split_cancelled(error)
        cut = cancelled is not None or isinstance(error, KeyboardInterrupt)
        reason = reason_of(error, self.what) if error is not None and cut else f"the consumer of {self.what} has left"
        await self._close(reason)
        if not cut:
            try:
                if not self._is_over:
                    await yield_to_cancel(self._failed())
                if error is None:
                    await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                cut = True
                if error is None and (self._is_over or not self._failures(cancelled=True)):
                    raise
        failures = [] if self._is_over else self._failures(cancelled=cut)
        if failures:
            raise self._beside(rest, failures) from None

    def _beside(self, error: BaseException | None, failures: Sequence[Exception]) -> BaseException:
        if error is None:
            return self._group(failures)
        if isinstance(error, Exception):
            return self._group([error, *failures])
        return BaseExceptionGroup(f"{self.what} failed", [self._group(failures), error])

    def _group(self, failures: Sequence[Exception]) -> Exception:
        text = f"{self.what} failed, {len(failures)} {'error' if len(failures) == 1 else 'errors'}"
        return MeshErrorGroup(text, fold_into_deaths(failures), mesh=self._mesh.name, endpoint=self._spec.name)

    @abstractmethod
    async def _open(self) -> None:
        """Begin; a checkpoint."""

    def _take(self) -> T | None:
        """Return an arrived result without waiting; None leaves it to `_next`."""
        return None

    @abstractmethod
    async def _next(self) -> T | None:
        """Wait for the next result; None when there are no more. A checkpoint."""

    @abstractmethod
    async def _close(self, reason: str) -> None:
        """Cancel running calls; wait, shielded and bounded, until they have unwound."""

    @abstractmethod
    def _failed(self) -> Sequence[Outcome]:
        """Return the outcomes of failed calls."""

    @abstractmethod
    def _failures(self, *, cancelled: bool) -> list[Exception]:
        """Return the errors; if the consumer is cancelled, only those that endpoints raised."""


# ---- `stream`: results of all members as they arrive, one of each, or many from a generator endpoint -----------------

R = TypeVar("R")


class Stream(Results[tuple[Point, R]]):
    """See `Endpoint.stream`."""

    _stream: OutgoingStream | None

    def __init__(self, mesh: MeshView, spec: EndpointSpec, options: Options, bound: verbs.Bound) -> None:
        super().__init__(mesh, spec)
        self._bound = bound
        self._is_fail_fast = options.is_fail_fast
        self._window = (options.window or current().stream_window) if spec.kind is EndpointKind.GENERATOR else 0
        self._options = options
        self._is_chosen = bool(options.choose)
        self._points = tuple(mesh.region.points())
        self._broken: list[Exception] = []
        self._stream = None

    async def _open(self) -> None:
        await trio.lowlevel.checkpoint()
        ranks = self._mesh.ranks
        if not ranks and not self._is_chosen:
            return
        if not self._mesh.is_open:
            verbs.raise_group(self._mesh, self._spec, verbs.refusals(self._mesh, self._spec, ranks))
        if self._is_chosen:
            chosen = verbs.pick(self._mesh, "stream")
            self._points = (self._points[ranks.index(chosen)],)
            ranks = [chosen]
        proc, targets, request = await verbs.prepare(self._mesh, self._spec, self._bound, ranks, self._options)
        budget = remaining_budget(proc)
        call_id = proc.new_call_id()
        parcel = encode_request(proc, request, call_id, targets[0].mesh, budget, window=self._window)
        self._stream = OutgoingStream(
            proc,
            call_id,
            request,
            targets,
            fail_fast=self._is_fail_fast,
            budget=budget,
            window=self._window,
        )
        self._stream.start(parcel)

    def _take(self) -> tuple[Point, R] | None:
        if self._stream is None or self._broken:
            return None
        item = self._stream.take()
        if item is None:
            return None
        result = value_of(self._stream, item, item.index)
        if isinstance(result, Ok):
            return self._points[item.index], result.value
        self._note_broken(result)
        return None

    async def _next(self) -> tuple[Point, R] | None:
        if self._stream is None:
            await trio.lowlevel.checkpoint()
            return None
        while True:
            item = await self._stream.next()
            if item is None:
                return None
            if self._broken and self._is_fail_fast:
                continue  # the item that could not be rebuilt was the last one
            result = value_of(self._stream, item, item.index)
            if isinstance(result, Ok):
                return self._points[item.index], result.value
            self._note_broken(result)

    def _note_broken(self, result: Err) -> None:
        self._broken.append(result.error)
        if self._is_fail_fast and self._stream is not None:
            self._stream.cancel_rest(f"an item of {self.what} could not be rebuilt")

    async def _close(self, reason: str) -> None:
        if self._stream is not None:
            await self._stream.close(reason)

    def _failed(self) -> Sequence[Outcome]:
        return [] if self._stream is None else list(self._stream.collector.failed())

    def _failures(self, *, cancelled: bool) -> list[Exception]:
        if self._stream is None:
            return []
        results = results_of(self._stream, cancelled=cancelled)
        return self._broken + [result.error for result in results if isinstance(result, Err)]
