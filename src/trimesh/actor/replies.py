"""Replies used as they arrive: folded by `call_reduced`, or sent to a port by `broadcast` with `reply_to=`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import trio

from trimesh._runtime.calls import Err, RepliedCall, Result, begin_replied, reason_of, result_of
from trimesh._runtime.channels import Port
from trimesh._runtime.values import EndpointSpec
from trimesh.actor import verbs
from trimesh.actor.options import Options
from trimesh.actor.results import Stream
from trimesh.actor.started import make_work, send
from trimesh.actor.verbs import VerbRow
from trimesh.actor.view import Addressees, MeshView
from trimesh.errors import MeshErrorGroup, ShapeError
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh

Fold = Callable[[Any, Any], Any]


def reducing_verb(fn: Fold, along: str | Sequence[str] | None, *, commutative: bool) -> VerbRow:
    """Return the verb `call_reduced` for one function, which folds the results of all members, or along dimensions.

    Raises:
        TypeError: `fn` is not callable, or `along` has something else than names.
    """
    if not callable(fn):
        raise TypeError(f"call_reduced takes a function of two results, got {fn!r}: write call_reduced(operator.add)")
    dims = (along,) if isinstance(along, str) else along
    if dims is not None and not all(isinstance(dim, str) for dim in dims):
        raise TypeError(f"call_reduced takes along= one or more names of dimensions, got {along!r}")

    async def run(_: VerbRow, mesh: MeshView, spec: EndpointSpec, bound: verbs.Bound, options: Options) -> Any:
        folding = Folding(mesh, fn, dims, commutative=commutative)
        index_of = {point: index for index, point in enumerate(mesh.region.points())}
        async with Stream[Any](mesh, spec, options, bound) as results:
            async for point, value in results:
                folding.take(index_of[point], value)
        return folding.result()

    def conclude(results: Sequence[Result], mesh: MeshView, spec: EndpointSpec) -> Any:
        folding = Folding(mesh, fn, dims, commutative=True)  # these results are in order already
        for index, value in enumerate(verbs.values_of(results, mesh, spec).values()):
            folding.take(index, value)
        return folding.result()

    def ranks(mesh: MeshView, _: Collection[int]) -> Sequence[int]:
        check(mesh, dims)  # before anything is sent
        return mesh.ranks

    return VerbRow("call_reduced", ranks, conclude, run, fail_fast=True)


def check(mesh: MeshView, along: Sequence[str] | None) -> None:
    """Check that the results of a view can be folded along these dimensions.

    Raises:
        ShapeError: A dimension is not one of the view.
        ValueError: The view is empty, so that there is nothing to return.
    """
    extent = mesh.region.extent
    for dim in along or ():
        if dim not in extent:
            known = ", ".join(map(str, extent)) or "none"
            raise ShapeError(f"call_reduced takes along= dimensions of {mesh!r}, got {dim!r}; its dimensions: {known}")
    if along is None and not mesh.ranks:
        raise ValueError(f"call_reduced needs a mesh of at least one member, got the empty view {mesh!r}")


class Folding:
    """Accumulated values: one, or one for each point of the dimensions that remain.

    Args:
        mesh: The view that is called.
        fn: Function of the accumulated value and the next result.
        along: Dimensions to fold away; None for all of them, with a bare result.
        commutative: Fold results as they arrive; else in the order of the view, holding early ones.

    Raises:
        ShapeError: A dimension is not one of the view.
        ValueError: The view is empty, so that there is nothing to return.
    """

    def __init__(self, mesh: MeshView, fn: Fold, along: Sequence[str] | None, *, commutative: bool) -> None:
        check(mesh, along)
        extent = mesh.region.extent
        self._fn = fn
        self._is_bare = along is None
        self._extent = Extent({} if along is None else {dim: extent[dim] for dim in extent if dim not in along})
        places = {tuple(point.items()): rank for rank, point in enumerate(Region(self._extent).points())}
        self._place_of = [places[tuple((dim, point[dim]) for dim in self._extent)] for point in mesh.region.points()]
        self._next_of: dict[int, list[int]] = {}
        for index in reversed(range(len(self._place_of))):
            self._next_of.setdefault(self._place_of[index], []).append(index)
        self._is_ordered = not commutative
        self._early: dict[int, Any] = {}
        self._folded: dict[int, Any] = {}

    def take(self, index: int, value: Any) -> None:
        """Fold, or hold, the result of the member at an index of the view."""
        place = self._place_of[index]
        if not self._is_ordered:
            self._fold(place, value)
            return
        self._early[index] = value
        waiting = self._next_of[place]
        while waiting and waiting[-1] in self._early:
            self._fold(place, self._early.pop(waiting.pop()))

    def _fold(self, place: int, value: Any) -> None:
        self._folded[place] = self._fn(self._folded[place], value) if place in self._folded else value

    def result(self) -> Any:
        """Return the folded value, or a `ValueMesh` of them over the remaining dimensions."""
        if self._is_bare:
            return self._folded[0]
        missing = set(range(self._extent.nelements)) - self._folded.keys()
        values = tuple(self._folded[place] for place in sorted(self._folded))
        return ValueMesh(Region(self._extent).exclude_ranks(missing), values)


# ---- `broadcast` with `options(reply_to=port)`: forwards every outcome to a port (docs/design/calls.md) --------------


async def broadcast(
    mesh: MeshView, spec: EndpointSpec, port: Port[Any], args: verbs.Args, kwargs: verbs.Kwargs
) -> None:
    bound = verbs.bind(mesh, spec, args, kwargs)
    await trio.lowlevel.checkpoint_if_cancelled()
    replies = _Replies(port.clone(), f"{mesh.name}.{spec.name}", tuple(mesh.region.points()))
    try:
        work = make_work(mesh, spec)
        send(_Broadcast(mesh, spec, bound, replies), mesh, mesh.ranks, work)
    except BaseException:
        replies.close()
        raise
    assert work.finish is not None
    work.finish = partial(_finish, work.finish, replies)
    work.drop()  # no task awaits it, so its owner raises its error
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
    """Sends the outcomes of one broadcast to its port; keeps failures that no receiver can get.

    Attributes:
        sent: Set once the message is queued everywhere, or can no longer be.
    """

    def __init__(self, port: Port[Any], what: str, points: Sequence[Point]) -> None:
        self.sent = trio.Event()
        self._port = port
        self._what = what
        self._points = points
        self._lost: list[Exception] = []
        self._is_broken = False

    async def put(self, index: int, result: Result) -> None:
        """Send the outcome of one member, waiting for room in the channel."""
        if not self._is_broken:
            try:
                await self._port.send((self._points[index], verbs.outcome_of(result)))
            except trio.BrokenResourceError:
                self._is_broken = True
            else:
                return
        self._lose(result)

    def put_nowait(self, index: int, result: Result) -> None:
        """Send the outcome of one member if the channel has room; else drop it."""
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            self._port.send_nowait((self._points[index], verbs.outcome_of(result)))

    def _lose(self, result: Result) -> None:
        if isinstance(result, Err):
            self._lost.append(result.error)

    def check(self) -> None:
        """Raise the failures that could not be sent."""
        if self._lost:
            raise MeshErrorGroup(f"{self._what} failed, and the receiver of its replies is closed", self._lost)

    def close(self) -> None:
        self.sent.set()
        self._port.close()


class _Broadcast(msgspec.Struct, frozen=True):
    """A broadcast with bound arguments, not sent yet; an `UnsentCall`."""

    mesh: MeshView
    spec: EndpointSpec
    bound: verbs.Bound
    replies: _Replies

    def begin(self, addressees: Addressees, deadline: float) -> Callable[[], Awaitable[None]]:
        """Send; `deadline` is ignored, as a broadcast has none."""
        del deadline
        proc, info, targets = addressees
        request = verbs.request_to(self.mesh, info, self.spec, self.bound, self.mesh.ranks)
        return partial(self._deliver, begin_replied(proc, targets, request, self.replies.sent.set))

    async def _deliver(self, call: RepliedCall) -> None:
        left: list[int] = []
        try:
            while left := await call.wait_settled():
                await self._put(left, partial(result_of, call))
        except BaseException as cut:
            await call.end(reason_of(cut, call.what))
            for index in [*left, *call.take_rest()]:
                self.replies.put_nowait(index, result_of(call, index))
            raise
        else:
            await call.end("")
        self.replies.check()

    async def _put(self, left: list[int], result: Callable[[int], Result]) -> None:
        """Send outcomes and remove the sent ones from `left`."""
        while left:
            await self.replies.put(left[0], result(left[0]))
            del left[0]

    async def refuse(self) -> None:
        for index, result in enumerate(verbs.refusals(self.mesh, self.spec, self.mesh.ranks)):
            await self.replies.put(index, result)
        self.replies.check()
