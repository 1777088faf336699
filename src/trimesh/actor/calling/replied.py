"""`broadcast` with `options(reply_to=port)`: every outcome goes to a port, as it comes (ADR 0041)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import trio

from trimesh._runtime.calls import Err, RepliedCall, Request, Result, begin_replied, reason_of, result_of
from trimesh._runtime.channels import Port
from trimesh._runtime.life import Proc, current_proc
from trimesh._runtime.peers import Target
from trimesh._runtime.values import EndpointSpec
from trimesh.actor import verbs
from trimesh.actor.calling.started import make_work, send
from trimesh.actor.view import MeshView
from trimesh.errors import MeshErrorGroup
from trimesh.shape.extent import Point


async def broadcast(
    mesh: MeshView, spec: EndpointSpec, port: Port[Any], args: verbs.Args, kwargs: verbs.Kwargs
) -> None:
    bound = verbs.bind(mesh, spec, args, kwargs)
    await trio.lowlevel.checkpoint_if_cancelled()
    replies = _Replies(port.clone(), f"{mesh.name}.{spec.name}", tuple(mesh.region.points()))
    try:
        work = make_work(mesh, spec)
        proc = current_proc()
        ranks = mesh.ranks()
        send(_Broadcast(mesh, spec, bound, ranks, proc, replies), mesh, ranks, proc, work)
    except BaseException:
        replies.close()
        raise
    assert work.finish is not None
    work.finish = partial(_finish, work.finish, replies)
    work.drop()  # no task awaits it, so that its error is the owner's
    if replies.sent.is_set():
        await trio.lowlevel.checkpoint()
        return
    try:
        await replies.sent.wait()
    except trio.Cancelled as cut:
        work.cancel(reason_of(cut, work.what))
        raise


async def _finish(finish: Callable[[], Awaitable[None]], replies: _Replies) -> None:
    try:
        await finish()
    finally:
        replies.close()


class _Replies:
    """The port that gets the outcomes of one broadcast.

    Attributes:
        sent: Set once the message is queued everywhere, or will not be.
    """

    def __init__(self, port: Port[Any], what: str, points: Sequence[Point]) -> None:
        self.sent = trio.Event()
        self._port = port
        self._what = what
        self._points = points
        self._lost: list[Exception] = []
        self._is_broken = False

    async def put(self, index: int, result: Result) -> None:
        """Send the outcome of one member; wait for room."""
        if not self._is_broken:
            try:
                await self._port.send((self._points[index], verbs.outcome_of(result)))
            except trio.BrokenResourceError:
                self._is_broken = True
            else:
                return
        self._lose(result)

    def put_nowait(self, index: int, result: Result) -> None:
        """Send the outcome of one member if there is room."""
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            self._port.send_nowait((self._points[index], verbs.outcome_of(result)))

    def _lose(self, result: Result) -> None:
        if isinstance(result, Err):
            self._lost.append(result.error)

    def check(self) -> None:
        """Raise the errors that no receiver has got."""
        if self._lost:
            raise MeshErrorGroup(f"{self._what} failed, and the receiver of its replies is closed", self._lost)

    def close(self) -> None:
        self.sent.set()
        self._port.close()


class _Broadcast(msgspec.Struct, frozen=True):
    """A broadcast whose arguments have been bound; see `UnsentCall`."""

    mesh: MeshView
    spec: EndpointSpec
    bound: verbs.Bound
    ranks: Sequence[int]
    proc: Proc
    replies: _Replies

    def begin(self, targets: Sequence[Target], deadline: float) -> Callable[[], Awaitable[None]]:
        """See `UnsentCall`; a broadcast has no deadline."""
        del deadline
        request = verbs.request_to(self.mesh, self.mesh.membership(self.proc).info, self.spec, self.bound, self.ranks)
        call = begin_replied(self.proc, targets, request, self.replies.sent.set)
        return partial(self._deliver, call, request)

    async def _deliver(self, call: RepliedCall, request: Request) -> None:
        left: list[int] = []
        try:
            while left := await call.wait_settled():
                await self._put(left, lambda index: result_of(self.proc, call, request, index, cancelled=False))
        except BaseException as cut:
            await call.end(reason_of(cut, call.what))
            for index in [*left, *call.take_rest()]:
                self.replies.put_nowait(index, result_of(self.proc, call, request, index, cancelled=False))
            raise
        else:
            await call.end("")
        self.replies.check()

    async def _put(self, left: list[int], result: Callable[[int], Result]) -> None:
        """Send outcomes, and take out of `left` what has been sent."""
        while left:
            await self.replies.put(left[0], result(left[0]))
            del left[0]

    async def refuse(self) -> None:
        for index, result in enumerate(verbs.refusals(self.mesh, self.spec, self.ranks)):
            await self.replies.put(index, result)
        self.replies.check()
