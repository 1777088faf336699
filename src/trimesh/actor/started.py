"""Verbs with a result, and `StartedCall`: a call that is sent now and awaited later."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Protocol, TypeVar, cast

import msgspec
import trio

from trimesh._runtime.actors import find_cell
from trimesh._runtime.calls import (
    BUDGET_REASON,
    Membership,
    NurseryOwner,
    OutgoingCall,
    Owner,
    StartedWork,
    absorb_budget,
    begin,
    finish,
)
from trimesh._runtime.life import current_proc
from trimesh._runtime.meshes import ActorMembers
from trimesh._runtime.tasks import Site, effective_deadline, in_trio, in_trio_now, place_outside
from trimesh._runtime.values import EndpointSpec
from trimesh._wire.exceptions.tracebacks import without_own_frames
from trimesh.actor import item_map, verbs
from trimesh.actor.options import NO_OPTIONS, Options
from trimesh.actor.verbs import VerbRow
from trimesh.actor.view import Addressees, MeshView
from trimesh.errors import RemoteCancelled

if TYPE_CHECKING:
    import asyncio


T = TypeVar("T")


class StartedCall(Generic[T]):
    """A running call; `await` returns the result of the verb or raises its error.

    It may be awaited several times and by several tasks. A cancel of an awaiting task ends the wait, not the call. An
    error that no task awaited fails the owner of the call when the handle is dropped or the owner ends.

    Raises, when awaited:
        RemoteCancelled: It was cancelled by `cancel`, by the deadline of the task that started it, or with its owner.
    """

    __slots__ = ("_work",)

    def __init__(self, work: StartedWork) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait for the outcome; a checkpoint."""
        return in_trio(self._result)().__await__()

    @property
    def done(self) -> bool:
        """True once the call has ended, for any reason."""
        return self._work.ended.is_set()

    @property
    def was_cut(self) -> bool:
        """True if `cancel`, its deadline or its owner's end cancelled it; `await` then raises `RemoteCancelled`."""
        return self._work.cut_reason is not None

    def cancel(self, reason: str = "") -> None:
        """Cancel the call, also remotely; no effect if it has ended. `await` waits until it has unwound."""
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


class UnsentCall(Protocol):
    """A call with bound arguments that has not been sent."""

    def begin(self, addressees: Addressees, deadline: float) -> Callable[[], Awaitable[Any]]:
        """Send; return a function that waits for the outcome."""
        ...

    async def refuse(self) -> Any:
        """Raise or return the verb's result for a mesh whose block has been left, without sending."""


class _Call(msgspec.Struct, frozen=True):
    """The call of a verb that waits for results."""

    verb: VerbRow
    mesh: MeshView
    spec: EndpointSpec
    options: Options
    bound: verbs.Bound
    ranks: Sequence[int]
    work: StartedWork

    def begin(self, addressees: Addressees, deadline: float) -> Callable[[], Awaitable[Any]]:
        proc, info, targets = addressees
        request = verbs.request_to(self.mesh, info, self.spec, self.bound, self.ranks, self.options)
        awaiters = self.work.awaiters
        return partial(
            self._finish, begin(proc, targets, request, deadline, fail_fast=self.verb.fail_fast, awaiters=awaiters)
        )

    async def _finish(self, call: OutgoingCall) -> Any:
        return self.verb.conclude(await finish(call, errors_win=self.verb.errors_win), self.mesh, self.spec)

    async def refuse(self) -> Any:
        return self.verb.conclude(verbs.refusals(self.mesh, self.spec, self.ranks), self.mesh, self.spec)


def start(
    verb: VerbRow,
    mesh: MeshView,
    spec: EndpointSpec,
    options: Options,
    bound: verbs.Bound,
    nursery: trio.Nursery | None,
    place: Site[Any] | None,
) -> StartedCall[Any]:
    """Start a call for `CallVerb.start` or `start_in`; `place` is the site in Trio of asyncio code that starts it."""
    ranks = verb.ranks(mesh, ())
    task, deadline = _starter(place)
    work = make_work(mesh, spec, deadline, nursery)
    if options.retry is not None:
        assert verb.again is not None
        work.finish = partial(verb.again, verb, mesh, spec, bound, options)
    else:
        send(_Call(verb, mesh, spec, options, bound, ranks, work), mesh, ranks, work, deadline)
    if (cell := find_cell()) is not None:
        incoming = cell.mailbox.call_of(task)
        if incoming is not None:
            incoming.started = (*incoming.started, work)
    return StartedCall(work)


def _starter(place: Site[Any] | None) -> tuple[trio.lowlevel.Task | None, float]:
    """Return the Trio task that starts a call, or that waits for asyncio code that does, and its deadline."""
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
    """Make the task of a call to a mesh, in the owner of the call.

    Raises:
        RuntimeError: The owner has ended, or there is none.
    """
    owner = _owner_of(mesh) if nursery is None else NurseryOwner(nursery)
    owner.check_open()
    work = StartedWork(f"{mesh.name}.{spec.name}", deadline)
    owner.start(work)
    return work


def send(
    sending: UnsentCall, mesh: MeshView, ranks: Sequence[int], work: StartedWork, deadline: float = math.inf
) -> None:
    """Send to some ranks, in the order in which calls of this process to the mesh are made; let `work` finish it.

    It is sent now, or once all of them have links and earlier started calls have been sent.
    """
    addressees = mesh.targets(ranks)
    if addressees is not None:
        work.finish = sending.begin(addressees, deadline)
        addressees[0].transport.flush()  # the caller may compute for long before its next checkpoint
    elif mesh.is_open:
        membership = mesh.membership(current_proc())
        work.finish = partial(_send_in_turn, sending, mesh, ranks, membership, membership.join_line())
    else:
        work.finish = sending.refuse


async def _send_in_turn(
    sending: UnsentCall, mesh: MeshView, ranks: Sequence[int], membership: Membership, place: object
) -> Any:
    try:
        addressees = await mesh.reach(ranks, place)
        if not mesh.is_open:
            return await sending.refuse()
        outcome = sending.begin(addressees, effective_deadline())
    finally:
        membership.leave_line(place)
    return await outcome()


def _owner_of(mesh: MeshView) -> Owner:
    """Return the owner of a call: the block of the mesh if it is here, else the calling actor, else the outer block."""
    if isinstance(mesh.owner, ActorMembers):
        return mesh.owner.block.started
    cell = find_cell()
    if cell is not None:
        return cell.started
    proc = current_proc()
    if proc.blocks:
        return proc.blocks[0].started
    raise RuntimeError(
        f"a started call needs a block or an actor to own it, got a call to {mesh!r} in neither: "
        "write .start_in(nursery, ...)"
    )


# ---- started calls as tasks of an asyncio task group, which waits for them, fails with them and cancels them ---------


def check_group(group: object) -> None:
    """Check that an object is a task group.

    Raises:
        TypeError: It is something else.
    """
    import asyncio  # noqa: PLC0415 - a caller with a group has imported it

    if not isinstance(group, asyncio.TaskGroup):
        raise TypeError(f"start_in takes a trio.Nursery or an asyncio.TaskGroup, got {group!r}")


def hold(call: StartedCall[Any], group: asyncio.TaskGroup) -> None:
    """Make a task of a group that ends with a call.

    Raises:
        RuntimeError: The group takes no tasks; the call is cancelled.
    """
    waiting = _wait(call)
    try:
        group.create_task(waiting, name=repr(call))
    except BaseException:
        waiting.close()
        call.cancel("its task group takes no tasks")
        raise


async def _wait(call: StartedCall[Any]) -> None:
    import asyncio  # noqa: PLC0415 - as above

    while True:
        try:
            await call
        except asyncio.CancelledError:  # the group raises its own
            call.cancel("its task group was cancelled")
            continue  # wait until the remote endpoint has unwound
        except RemoteCancelled:
            if not call.was_cut:
                raise
        return


# ---- verbs that wait for results, as objects: calling one waits, its `start` does not --------------------------------

P = ParamSpec("P")


class _Threads:
    """Runs work of other threads in Trio; provided by a higher package."""

    run: Callable[..., Any]


_threads = _Threads()


def provide_threads(run: Callable[..., Any]) -> None:
    """Register the function that runs an async function in Trio for a thread and waits for its result."""
    _threads.run = run


class CallVerb(Generic[P, T]):
    """A verb with a result, of one endpoint: `await mesh.add.call(1)`, or `mesh.add.call.start(1)` to await later."""

    __slots__ = ("_mesh", "_options", "_spec", "_text", "_verb")

    def __init__(self, verb: VerbRow, mesh: MeshView, spec: EndpointSpec, options: Options) -> None:
        self._text = ""  # made once: Trio reads it for each task that runs this verb
        self._verb = verb
        self._mesh = mesh
        self._spec = spec
        self._options = options

    async def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Send, and wait for the result: a checkpoint, cancellable."""
        verb, mesh, spec, options = self._verb, self._mesh, self._spec, self._options
        result: T
        try:
            if options is not NO_OPTIONS:
                self._check()
            run = verb.run
            if options.retry is not None:
                assert verb.again is not None
                run = verb.again
            result = await in_trio(run)(verb, mesh, spec, verbs.bind(mesh, spec, args, kwargs), options)
        except Exception as error:
            without_own_frames(error)
            raise
        return result

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> StartedCall[T]:
        """Send now; return a handle to await later.

        The block that owns the mesh owns the call. If the handle came from another process, the calling actor owns it
        or, in the controller, the outermost block. Leaving a block waits for the call, or cancels it if an error or a
        cancel leaves the block; an actor that stops cancels it. The call has the current deadline of the running task,
        and a cancel of the running endpoint cancels it. In asyncio the deadline is that of `trimesh.aio.fail_after`,
        of the endpoint, or of the code that runs the loop; `asyncio.timeout`, and deadlines of a parent task, do not
        count.

        Awaiting the handle raises the error of the call. An error that no task awaited fails the owner when the handle
        is dropped, at the latest when the owner ends.

        Calls are sent in the order in which they are started, except those with `options(retry=...)`.

        Raises:
            TypeError: The arguments do not fit, or cannot be serialised; nothing was sent.
            ValueError, MeshStopped: As from the verb.
            RuntimeError: The owner has ended, or there is none.

        Blocking: never. Messages to a full mailbox wait in this process.
        """
        return self._start(None, args, kwargs)

    def start_in(
        self, nursery: trio.Nursery | asyncio.TaskGroup, /, *args: P.args, **kwargs: P.kwargs
    ) -> StartedCall[T]:
        """Send now, as a task of a nursery or of an asyncio task group; see `start`.

        As for any task, the nursery waits for the call, its cancel cancels it, and an error fails it at once.
        """
        if isinstance(nursery, trio.Nursery):
            return self._start(nursery, args, kwargs)
        check_group(nursery)
        started_call = self._start(None, args, kwargs)
        hold(started_call, nursery)
        return started_call

    def from_thread(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call from a thread, and wait there for the result: `mesh.add.call.from_thread(1)`.

        For any thread of the program except Trio's: the thread of an endpoint with `thread=True`, whose deadline and
        cancel apply to the call; your own thread; one of an asyncio executor. `trimesh.from_thread.run` does the same
        with any function.

        Raises:
            RuntimeError: The caller is a Trio task, or a plain endpoint without `thread=True`, whose loop it would
                block; or no mesh is open in this process.
            trimesh.blocking.Cancelled: The process ends, or the time limit around the call is over.
            BaseException: Error of the verb.

        Blocking: the thread, until the result is there. It costs two switches between threads more than `await`.
        """
        result: T = _threads.run(self, *args, **kwargs)
        return result

    def _start(self, nursery: trio.Nursery | None, args: Any, kwargs: Any) -> StartedCall[T]:
        self._check()
        bound = verbs.bind(self._mesh, self._spec, args, kwargs)
        start_now, place = in_trio_now(start), place_outside()
        return start_now(self._verb, self._mesh, self._spec, self._options, bound, nursery, place)

    def _check(self) -> None:
        self._options.check_verb(f"{self._mesh.name}.{self._spec.name}", self._verb.name)

    @property
    def spelling(self) -> str:
        """Spelling of the verb, for hints."""
        return f"{self._mesh.name}.{self._spec.name}.{self._verb.name}"

    def __repr__(self) -> str:
        if not self._text:
            self._text = f"<{self._verb.name} of {self._mesh!r}.{self._spec.name}>"
        return self._text


# Python's warning for a coroutine that was never awaited shows this name and the line that made it.
vars(CallVerb)["__call__"].__qualname__ = "call of an endpoint (write `await mesh.endpoint.call(...)`)"

CALL: Final = VerbRow("call", verbs.all_ranks, verbs.values_of, verbs.run, item_map.again_all, fail_fast=True)
CALL_SETTLED: Final = VerbRow("call_settled", verbs.all_ranks, verbs.outcomes_of, verbs.run, errors_win=False)
CALL_ONE: Final = VerbRow("call_one", verbs.one_rank, verbs.bare, verbs.run, item_map.again_one)
CHOOSE: Final = VerbRow("choose", verbs.chosen_rank, verbs.bare, verbs.run, item_map.again_one)
