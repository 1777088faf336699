"""`StartedCall`: a call that has been sent and is awaited later."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import msgspec
import trio

from trimesh._runtime.actors import find_cell
from trimesh._runtime.calls import (
    BUDGET_REASON,
    NurseryOwner,
    Owner,
    Request,
    Result,
    StartedWork,
    absorb_budget,
    begin,
    finish,
)
from trimesh._runtime.life import Proc, current_proc
from trimesh._runtime.meshes import ActorMembers
from trimesh._runtime.peers import Target
from trimesh._runtime.tasks import Site, effective_deadline, in_trio, in_trio_now
from trimesh._runtime.values import EndpointSpec
from trimesh.actor import verbs
from trimesh.actor.options import Options
from trimesh.actor.view import MeshView
from trimesh.errors import RemoteCancelled

T = TypeVar("T")


class StartedCall(Generic[T]):
    """A call that has been sent and runs; `await` gives what the verb would have returned, or raises what it would.

    It may be awaited by several tasks, and again. A cancel of who awaits ends the wait, not the call. An error that has
    not been awaited fails the owner of the call once the handle is dropped, or the owner ends.

    Raises, when awaited:
        RemoteCancelled: The call was cancelled, by `cancel`, by the deadline of who has started it, or with its owner.
    """

    __slots__ = ("_work",)

    def __init__(self, work: StartedWork) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait for the outcome; a checkpoint."""
        return in_trio(self._result)().__await__()

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self._work.ended.is_set()

    @property
    def was_cut(self) -> bool:
        """Whether `cancel`, its deadline or the end of its owner has ended it; then `await` raises that."""
        return self._work.cut_reason is not None

    def cancel(self, reason: str = "") -> None:
        """Cancel it, remote side too; nothing when it has ended. `await` waits until that has unwound."""
        text = f"{self._work.what} was cancelled by its StartedCall"
        in_trio_now(self._work.cancel)(f"{text}: {reason}" if reason else text)

    async def _result(self) -> T:
        work = self._work
        is_unbounded = effective_deadline() == math.inf
        task = trio.lowlevel.current_task()
        if is_unbounded:
            work.awaiters.append(task)
        try:
            if work.ended.is_set():
                await trio.lowlevel.checkpoint()
            else:
                await work.ended.wait()
        finally:
            if is_unbounded:
                work.awaiters.remove(task)
        if work.error is not None:
            work.claim()
            raise work.error
        if work.cut_reason is not None:
            if work.cut_reason == BUDGET_REASON:
                await absorb_budget()
            raise RemoteCancelled(reason=work.cut_reason)
        return cast("T", work.value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a started call has no {name!r}: write `await` before it for its result; it has .done and .cancel()",
                name=name,
            )

    def __del__(self) -> None:
        self._work.drop()

    def __repr__(self) -> str:
        return f"<started call of {self._work.what}, {'ended' if self.done else 'running'}>"


class Way(msgspec.Struct, frozen=True):
    """What makes one verb of a call differ from others.

    Attributes:
        name: Of the verb.
        run: Does it, and waits.
        again: The same with `options(retry=)`; None where that means nothing.
        ranks: Who is called.
        conclude: Makes of the results what the verb returns, or raises.
        fail_fast: Whether the first failure cancels the other ranks.
        errors_win: Whether an error of an endpoint wins over a cancel of the caller.
    """

    name: str
    run: Callable[..., Awaitable[Any]]
    again: Callable[..., Awaitable[Any]] | None
    ranks: Callable[[MeshView], Sequence[int]]
    conclude: Callable[[MeshView, EndpointSpec, Sequence[Result]], Any]
    fail_fast: bool = False
    errors_win: bool = True


class UnsentCall(Protocol):
    """A call whose arguments have been bound, and which has not been sent."""

    def begin(self, targets: Sequence[Target], deadline: float) -> Callable[[], Awaitable[Any]]:
        """Send; return what waits for the outcome."""
        ...

    async def refuse(self) -> Any:
        """Conclude what cannot be sent, because the block of the mesh has been left."""


class _Call(msgspec.Struct, frozen=True):
    """The call of a verb that waits for results."""

    way: Way
    mesh: MeshView
    spec: EndpointSpec
    options: Options
    bound: verbs.Bound
    ranks: Sequence[int]
    proc: Proc
    work: StartedWork

    def begin(self, targets: Sequence[Target], deadline: float) -> Callable[[], Awaitable[Any]]:
        info = self.mesh.membership(self.proc).info
        request = self.options.patient(verbs.request_to(self.mesh, info, self.spec, self.bound, self.ranks))
        awaiters = self.work.awaiters
        call = begin(self.proc, targets, request, deadline, fail_fast=self.way.fail_fast, awaiters=awaiters)
        return partial(self._finish, call, request)

    async def _finish(self, call: Any, request: Request) -> Any:
        results = await finish(self.proc, call, request, errors_win=self.way.errors_win)
        return self.way.conclude(self.mesh, self.spec, results)

    async def refuse(self) -> Any:
        return self.way.conclude(self.mesh, self.spec, verbs.refusals(self.mesh, self.spec, self.ranks))


def start(
    way: Way,
    mesh: MeshView,
    spec: EndpointSpec,
    options: Options,
    nursery: trio.Nursery | None,
    place: Site[Any] | None,
    args: verbs.Args,
    kwargs: verbs.Kwargs,
) -> StartedCall[Any]:
    """See `CallVerb.start` and `CallVerb.start_in`; `place` is where code of asyncio that starts it is in Trio."""
    bound = verbs.bind(mesh, spec, args, kwargs)
    ranks = way.ranks(mesh)
    task, deadline = _starter(place)
    work = make_work(mesh, spec, deadline, nursery)
    if options.retry is not None:
        assert way.again is not None
        work.finish = partial(way.again, mesh, spec, options, args, kwargs)
    else:
        proc = current_proc()
        send(_Call(way, mesh, spec, options, bound, ranks, proc, work), mesh, ranks, proc, work, deadline)
    if task is not None and (cell := find_cell()) is not None:
        incoming = cell.mailbox.call_of(task)
        if incoming is not None:
            incoming.started = (*incoming.started, work)
    return StartedCall(work)


def _starter(place: Site[Any] | None) -> tuple[trio.lowlevel.Task | None, float]:
    """Return the task of Trio that starts a call, or that waits for the code which does, and its deadline."""
    if place is not None:
        return place.keeper, place.deadline
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(
            "a call must be started in a task of Trio or asyncio, got a thread: write "
            "`mesh.step.call.from_thread(...)`, which waits, or `submit` of trimesh.blocking, which gives a future"
        )
    return trio.lowlevel.current_task(), effective_deadline()


def make_work(
    mesh: MeshView, spec: EndpointSpec, deadline: float = math.inf, nursery: trio.Nursery | None = None
) -> StartedWork:
    """Make the task of a call to a mesh, which belongs to its owner.

    Raises:
        RuntimeError: The owner has ended, or there is none.
    """
    owner = _owner_of(mesh) if nursery is None else NurseryOwner(nursery)
    owner.check_open()
    work = StartedWork(f"{mesh.name}.{spec.name}", deadline)
    owner.start(work)
    return work


def send(
    sending: UnsentCall, mesh: MeshView, ranks: Sequence[int], proc: Proc, work: StartedWork, deadline: float = math.inf
) -> None:
    """Send to some ranks, in the order in which calls of this process to the mesh are made; let `work` finish it.

    It is sent now, or when all of them have links and what was started before has been sent.
    """
    if not mesh.is_open:
        work.finish = partial(_refuse_later, sending)
        return
    membership = mesh.membership(proc)
    targets = membership.ready(ranks)
    if targets is None:
        work.finish = partial(_send_in_turn, sending, mesh, ranks, proc, membership.join_line())
    else:
        work.finish = sending.begin(targets, deadline)
        proc.transport.flush()  # what runs next here may be long


async def _send_in_turn(sending: UnsentCall, mesh: MeshView, ranks: Sequence[int], proc: Proc, place: object) -> Any:
    membership = mesh.membership(proc)
    try:
        await mesh.settle(proc, ranks, place)
        if not mesh.is_open:
            return await sending.refuse()
        targets = [membership.target(rank) for rank in ranks]
        outcome = sending.begin(targets, effective_deadline())
    finally:
        membership.leave_line(place)
    return await outcome()


async def _refuse_later(sending: UnsentCall) -> Any:
    await trio.lowlevel.checkpoint()
    return await sending.refuse()


def _owner_of(mesh: MeshView) -> Owner:
    """Return what a call to a mesh belongs to: the block that owns the mesh, or else the actor that calls."""
    if isinstance(mesh.owner, ActorMembers):
        return mesh.owner.block.started
    cell = find_cell()
    if cell is not None:
        return cell.started
    proc = current_proc()
    if proc.blocks:
        return proc.blocks[0].started
    raise RuntimeError(
        f"a call must be started where a block or an actor owns it, got a call to {mesh!r} in neither: "
        "write .start_in(nursery, ...)"
    )
