r"""Actor runtime: the task that sets up one actor, serves its mailbox, drains it and cleans up.

    starting --ready--> serving --drain--> draining --stop--> ending --> ended
                            \------------------------stop----/

CE-1 `__init__` and the first half of `lifespan` run before any endpoint; an error there is raised by `start`.
CE-2 endpoints run inside `lifespan`; an error of `lifespan` while serving ends the actor and goes to its owner.
CE-3 clean-up runs after every endpoint has unwound, and has `grace` seconds.
CE-4 draining serves the messages accepted before from the owner, or from the process that borrowed the mesh. Those of
     other processes are cancelled, new ones are refused.
CE-5 messages that arrive after the end of an actor wait, in order, for its successor, if one will run in this process.

DR-1 draining waits for a call that was not cancelled, however long it takes (rule M3).
DR-2 a cancelled call has `grace` seconds from its cancel to unwind. If all slots of a group run calls that exceeded it,
     the calls queued for the group are cancelled. If all remaining calls exceeded it, draining ends.
"""

from __future__ import annotations

import contextvars
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import trio

from trimesh._runtime.actors.context import ExecutionContext, OwnMeshes, set_context, set_proc_of_task
from trimesh._runtime.actors.mailbox import Mailbox
from trimesh._runtime.actors.reports import report_ended, report_failure
from trimesh._runtime.actors.server import LocatedError, Server
from trimesh._runtime.calls.started import StartedCalls
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.tasks.background import split_cancelled
from trimesh._runtime.values.codec import Values
from trimesh._runtime.values.endpoint_spec import ENDPOINTS, class_of, endpoints_of
from trimesh._wire.memory import DefinitionId
from trimesh.errors import ActorFailed, Origin, ProtocolError, leaves, text_of
from trimesh.ids import MeshId
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer
    from trimesh._runtime.recording import CallRecorder


_log = logging.getLogger("trimesh")
_current: ContextVar[Cell | None] = ContextVar("trimesh_cell", default=None)


class ActorSpec(msgspec.Struct, frozen=True):
    """Specification of one actor.

    Attributes:
        make: Factory of the actor object, called in the actor's process.
        point: Coordinates of the actor in the mesh as spawned.
        incarnation: Number of restarts before this one, 0 for the first.
        is_held: Whether messages wait for a successor in this process if the actor ends by itself (CE-5).
        home: Meshes to which the actor belongs; None for the agent, the actor of the runtime in each process.
    """

    mesh: MeshId
    name: str
    cls: Any  # a class, or Box[int]
    make: Callable[[], Any]
    point: Point
    incarnation: int = 0
    is_held: bool = False
    home: OwnMeshes | None = None


class Cell:
    """One actor in this process: its mailbox, its task and its state.

    Attributes:
        spec: Its specification.
        owner: Process that spawned it.
        endpoints: Its endpoints, by name.
        ended: Set once the actor has ended, for whatever reason.
        cause: Failure that ended it, or None.
        on_end: Callbacks run at its end, which release objects that it created for other processes.
        started: Calls that the actor started without awaiting them yet.
        task: Task of `run`, once it has begun.
    """

    __slots__ = (
        "_actor",
        "_context",
        "_draining",
        "_failure",
        "_held",
        "_interrupted",
        "_is_ending",
        "_is_holding",
        "_life",
        "_nursery",
        "_refusal",
        "_serve_slot",
        "_server",
        "_serving",
        "_stopping",
        "cause",
        "ended",
        "endpoints",
        "mailbox",
        "on_end",
        "owner",
        "proc",
        "spec",
        "started",
        "task",
    )

    def __init__(self, proc: Proc, spec: ActorSpec, owner: Peer) -> None:
        self.proc = proc
        self.spec = spec
        self.owner = owner
        self._interrupted: list[IncomingCall] = []
        recorder = self._call_recorder()
        self.mailbox = Mailbox(
            self._serve,
            self._start_slot,
            self._interrupted.append,
            proc.deadlocks.crowded,
            recorder,
            proc.transport.wait_here,
            proc.deadlocks.early,
        )
        self.ended = trio.Event()
        self.endpoints = dict(endpoints_of(spec.cls))
        self._actor: Any = None
        self._nursery: trio.Nursery | None = None
        self._context: contextvars.Context | None = None
        self._server: Server | None = None
        self._serve_slot: ServeSlot | None = None
        self._life = trio.CancelScope()
        self._serving = trio.CancelScope()
        self._draining = False
        self._stopping = False
        self._failure: Exception | None = None
        self._is_ending = False
        self._held: list[IncomingCall] = []
        self._is_holding = False
        self._refusal = "stopped"
        self.cause: Exception | None = None
        self.task: trio.lowlevel.Task | None = None
        self.on_end: dict[Callable[[], None], None] = {}
        self.started = StartedCalls(spec.name, self._fail)

    def _call_recorder(self) -> CallRecorder | None:
        if self.proc.recorder is None:
            return None
        point = self.spec.point
        mesh = "" if self.spec.home is None else self.spec.name  # requests to the agent belong to no mesh
        return self.proc.recorder.of_actor(mesh, {label: point[label] for label in point})

    # ---- messages --------------------------------------------------------------------------------------------

    def deliver(self, call: IncomingCall) -> None:
        """Queue a message; hold it for the successor (CE-5), or refuse it, if the actor is stopping or has ended."""
        if self._is_holding:
            self._held.append(call)
        elif self._draining:  # until its end, and afterwards
            if self.ended.is_set():
                self._answer(call)
            else:
                call.refused(self._refusal, f"{self.spec.name} is stopping")
        elif self._is_ending:
            self._interrupted.append(call)
        else:
            self.mailbox.put(call)

    def deliver_all(self, calls: Sequence[IncomingCall]) -> None:
        """Accept several messages for one endpoint."""
        if self._is_holding or self._draining or self._is_ending:
            for call in calls:
                self.deliver(call)
        else:
            self.mailbox.put_all(calls)

    def waiting(self) -> Iterator[IncomingCall]:
        """Yield the accepted messages that run in no slot yet."""
        yield from self.mailbox.queued()
        yield from self._held
        yield from (call for call in self._interrupted if not call.running)

    def _answer(self, call: IncomingCall) -> None:
        """Reply with an error to a call that the actor's end interrupted, or that arrived after it."""
        if self.cause is not None and not call.is_broadcast:
            first = next(leaves(self.cause))
            error = ActorFailed(f"{self.spec.name} has failed: {type(first).__name__}: {text_of(first)}")
            error.__cause__ = self.cause
            call.failed(self.proc.values.encode_error(error, self.origin(None)))
        elif call.running:
            call.cancel("other", f"{self.spec.name} has ended")
            call.cancelled()
        else:
            call.refused(self._refusal, f"{self.spec.name} has ended")

    def cancel(self, call: IncomingCall, by: str, reason: str) -> None:
        """Cancel one accepted call: remove it from the mailbox if it is queued, let it unwind if it runs."""
        call.cancel(by, reason)
        waiting = next((calls for calls in (self._interrupted, self._held) if call in calls), None)
        if waiting is not None:
            waiting.remove(call)
            call.cancelled()
        elif call.running:
            if self._server is not None and self._server.unanswered.pop(call, None) is not None:
                call.cancelled()
            self.mailbox.tell_change()
        elif not call.ended and self.mailbox.remove(call):
            call.cancelled()

    def cancel_background(self, reason: str) -> None:
        """Cancel the accepted broadcasts, which have no waiting caller."""
        for call in [*self.mailbox.queued(), *self.mailbox.running()]:
            if call.is_broadcast:
                self.cancel(call, "other", reason)

    def take_held(self) -> list[IncomingCall]:
        """Remove and return the messages held for this actor's successor (CE-5)."""
        held, self._held = self._held, []
        return held

    def release(self) -> None:
        """Stop holding messages: the actor has no successor."""
        self._is_holding = False
        for call in self.take_held():
            self._answer(call)

    def _start_slot(self, slot: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._nursery is not None
        assert self._context is not None
        # A slot sees context variables set by `lifespan`, not those of the task that read the frame.
        live = slot if self._serve_slot is None else partial(self._serve_slot, slot)
        self._context.copy().run(self._nursery.start_soon, live)

    def _where(self, endpoint: str | None) -> ExecutionContext:
        spec = self.spec
        return ExecutionContext(spec.point, spec.name, self._actor, endpoint, spec.incarnation, spec.home)

    def origin(self, endpoint: str | None) -> Origin:
        """Return the coordinates for errors of this actor."""
        spec = self.spec
        return Origin(
            spec.point,
            spec.name,
            class_of(spec.cls).__qualname__,
            endpoint,
            self.proc.host_name,
            self.proc.pid,
            spec.incarnation,
        )

    def _serve(self, call: IncomingCall) -> Awaitable[None] | None:
        assert self._server is not None
        if self.proc.sites is not None:
            call.spec = self.proc.sites.dispatch(self, call)
        return self._server.serve(call)

    def _lost(self, call: IncomingCall, error: Exception) -> None:
        self._report(call.spec.name, error, ended=False)

    def _report(self, endpoint: str, error: Exception, *, ended: bool) -> None:
        """Report a failure for which no caller waits to the owner."""
        encoded = self.proc.values.encode_error(error, self.origin(endpoint or None))
        report_failure(self.owner, self.spec.mesh, endpoint, encoded, ended=ended)

    # ---- life ------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the actor from `__init__` to the end of `lifespan`; call `task_status.started` when it serves.

        Raises:
            LocatedError: Set-up failed. Once the actor serves, only `Cancelled` is raised; failures go to the owner.
        """
        self.task = trio.lowlevel.current_task()
        set_proc_of_task(self.proc)
        _current.set(self)
        set_context(self._where(None))
        try:
            with self._life:
                await self._live(task_status)
        except trio.Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001 - raised, or reported to the owner
            if self._nursery is None:
                raise self._failed_start(error) from None
            self._end_with(error)
        else:
            if not self._stopping:
                report_ended(self.owner, self.spec.mesh)
        finally:
            if self.spec.is_held and not self._stopping:
                self._is_holding = True
                if self._nursery is None:  # it never served: waiting messages wait for the next attempt
                    self._held += self.mailbox.take_queued()
            self._draining = self._stopping = True
            for end in tuple(self.on_end):
                end()
            self.ended.set()
            unanswered = () if self._server is None else [*self._server.unanswered]
            for call in [*self._interrupted, *self.mailbox.take_queued(), *unanswered]:
                self._answer(call)
                if call.answering is not None:
                    call.answering.cut()
            self._interrupted.clear()
            self._let_go()

    async def _live(self, task_status: trio.TaskStatus[None]) -> None:
        live = live_of(class_of(self.spec.cls))
        async with live(self.spec.make, self._made) as serve_slot, trio.open_nursery() as nursery:
            self._nursery = nursery
            self._serve_slot = serve_slot
            self._context = contextvars.copy_context()
            hold_error = None if self.spec.home is None else self.proc.holds.post_mortem
            values = self.proc.values
            self._server = Server(self._actor, self._context, self._where, self.origin, values, self._lost, hold_error)
            self.started.open(nursery)
            self.mailbox.open()
            task_status.started()
            try:
                with self._serving:
                    await trio.sleep_forever()
            finally:
                self._is_ending = True
                self.started.close(f"{self.spec.name} stops")
            nursery.cancel_scope.cancel(reason=f"{self.spec.name} stops")
        errors = self.started.take_errors()
        if errors:
            raise ExceptionGroup(f"calls that {self.spec.name} started and never awaited have failed", errors)

    def _failed_start(self, error: BaseException) -> BaseException:
        """Wrap an error of the set-up: Trio sets attributes on it, which the user's class may refuse."""
        return error if split_cancelled(error)[1] is None else LocatedError(error, self.origin(None))

    def _fail(self, error: Exception) -> None:
        """End the actor by raising `error` in a task of its nursery."""
        assert self._nursery is not None
        self._nursery.start_soon(_raise, error)

    def _made(self, actor: Any) -> None:
        self._actor = actor
        self.spec = msgspec.structs.replace(
            self.spec, make=_make_again
        )  # from here on only the actor holds the arguments
        set_context(self._where(None))

    def _let_go(self) -> None:
        """Drop all references that lead to the actor; called in the task of `run`.

        The cell and its mailbox form a reference cycle, as do this task and an actor that stores its nursery. They live
        until the garbage collector runs, but the actor's memory must be freed now.
        """
        self._actor = self._nursery = self._context = self._server = None
        set_context(self._where(None))

    def _end_with(self, error: BaseException) -> None:
        cancelled, rest = split_cancelled(error)
        if rest is None:
            raise error
        failure = self.proc.values.local_error(rest, self.origin(None))
        if self._stopping:
            self._failure = failure  # raised by `stop`, whose caller waits for it
        else:
            self.cause = failure
            self._report("", failure, ended=True)
        if cancelled is not None:
            raise cancelled from None

    async def drain(self, grace: float) -> None:
        """Refuse new messages and finish the accepted ones (CE-4, DR-1, DR-2); see rule M3."""
        self._draining = True
        home = self.spec.home
        borrower = None if home is None or home.actors is None else home.actors.borrower
        for call in [*self.mailbox.queued(), *self.mailbox.running()]:
            if call.peer is not self.owner and call.peer.proc_id != borrower:
                self.cancel(call, "other", f"{self.spec.name} is stopping")
        await drain(self.mailbox, grace, self._pass_over)

    def _pass_over(self, call: IncomingCall) -> None:
        """Cancel a queued message that cannot start, as cancelled calls hold all its slots (DR-2)."""
        text = f"{self.spec.name} is stopping, and {call.spec.name} waits behind a cancelled call that has not ended"
        if call.is_broadcast:
            _log.warning("a broadcast is dropped: %s", text)
        self.cancel(call, "stopped", text)

    async def stop(self, grace: float, by: str = "other", *, hold: bool = False) -> None:
        """End the actor: cancel running calls, then clean up, for at most `grace` seconds.

        Args:
            grace: Time limit in seconds.
            by: Reason reported to callers of running calls: "stopped" for an actor that will be restarted,
                "left" for one whose process leaves its mesh.
            hold: Whether new messages wait for a successor (CE-5).

        Raises:
            Exception: Clean-up failed.
            ActorFailed: It did not end in time and was cancelled.
        """
        self._draining = self._stopping = True
        self._is_holding = hold
        if by == "left":
            self._refusal = by
        for call in [*self.mailbox.queued(), *self.mailbox.running()]:
            self.cancel(call, by, f"{self.spec.name} is stopping")
        deadline = math.inf if grace == math.inf else trio.current_time() + grace
        with trio.CancelScope(shield=True, deadline=deadline):
            await self.mailbox.wait_idle()
            self._serving.cancel()
            await self.ended.wait()
        if not self.ended.is_set():
            self._life.cancel(reason=f"the grace of {self.spec.name} ran out")
            with trio.CancelScope(shield=True):
                await self.ended.wait()
            text = f"{self.spec.name} took longer to stop than its grace ({grace:g} s) and was cancelled"
            raise ActorFailed(text) from self._failure
        if self._failure is not None:
            raise self._failure


def find_cell() -> Cell | None:
    """Return the actor that the running task belongs to, or None."""
    return _current.get()


def cell_in(task_context: contextvars.Context) -> Cell | None:
    """Return the actor set in a task's context, or None."""
    return task_context.get(_current)


async def _raise(error: Exception) -> NoReturn:
    raise error


def _make_again() -> NoReturn:
    raise AssertionError("an actor is made once")


# ---- draining --------------------------------------------------------------------------------------------------------

# Draining lets accepted calls run to their end, except those queued behind cancelled calls that do not end.


async def drain(mailbox: Mailbox, grace: float, cancel: Callable[[IncomingCall], None]) -> None:
    """Wait until a mailbox is idle, or holds only calls cancelled more than `grace` seconds ago.

    Args:
        mailbox: Mailbox of an actor that accepts no new messages.
        grace: Seconds.
        cancel: Cancels a call that is queued behind such calls.
    """
    while not mailbox.is_idle():
        groups = [group for group in mailbox.groups() if group.running]
        over = {group: _given_up_until(group.running, grace) for group in groups}
        late = [group for group in groups if over[group] <= trio.current_time()]
        for group in late:
            for call in list(group.queue) if group.is_full else ():
                cancel(call)
        if mailbox.is_open and len(late) == len(groups) and not any(mailbox.queued()):
            return
        with trio.CancelScope(
            deadline=min((until for until in over.values() if not _is_over(until)), default=math.inf)
        ):
            await mailbox.wait_changed()


def _is_over(until: float) -> bool:
    return until <= trio.current_time()


def _given_up_until(calls: Iterable[IncomingCall], grace: float) -> float:
    """Return the time at which all running calls have exceeded `grace`; `math.inf` if one is not cancelled."""
    return max(call.cancelled_at for call in calls) + grace


# ---- life ------------------------------------------------------------------------------------------------------------

# Adapters by which an actor class replaces Trio, such as `trimesh.aio.Actor`: how to create it and run its slots.

ServeSlot = Callable[[Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Body of a slot's task: gets the function that serves the slot and runs it as the actor needs."""

Live = Callable[[Callable[[], Any], Callable[[Any], None]], AbstractAsyncContextManager[ServeSlot | None]]
"""Creates an actor and enters its `lifespan`, around all its service. Yields the `ServeSlot`, or None for Trio.

Arguments: the factory of the object, and a callback that gets the object before its `lifespan` begins.
"""

LIVE: Final = "__trimesh_live__"
"""Attribute of an actor class that holds its `Live`."""


@asynccontextmanager
async def _live_in_trio(make: Callable[[], Any], made: Callable[[Any], None]) -> AsyncGenerator[None, None]:
    actor = make()
    made(actor)
    del make  # it holds the arguments, which only the actor may hold from here on
    async with lifespan_of(actor):
        del actor
        yield


def live_of(cls: type) -> Live:
    """Return the `Live` of an actor class."""
    live: Live = getattr(cls, LIVE, _live_in_trio)
    return live


def lifespan_of(actor: Any) -> AbstractAsyncContextManager[Any]:
    """Return the `lifespan` of an actor's class; a null context manager if it has none."""
    # Looked up on the class, as Python does for `__enter__`: the object's `__getattr__` may return anything.
    mro: tuple[type, ...] = type(actor).__mro__
    found: Any = next((vars(base)["lifespan"] for base in mro if "lifespan" in vars(base)), None)
    if found is None:
        return nullcontext()
    bound: Any = found.__get__(actor, mro[0]) if hasattr(found, "__get__") else found
    block: AbstractAsyncContextManager[Any] = bound()
    return block


# ---- recipe: class and arguments of an actor, kept as first spawned, for its replacements ----------------------------

Kept = tuple[bytes, Sequence[bytearray], Sequence[object]]
"""A recipe as it is sent."""


class Recipe(msgspec.Struct, frozen=True):
    """A class and the arguments of its `__init__`, encoded, so later changes by the caller have no effect.

    Attributes:
        payload: The encoded triple (class, args, kwargs).
        buffers: Copies of out-of-band buffers.
        definitions: Code sent by value that the process must have first.
        ports: Ports of channels among the arguments. They stay open here so that each replacement gets them, too; a
            port that its owner has closed can no longer be sent (`TypeError`).
    """

    payload: bytes
    buffers: Sequence[bytearray]
    definitions: Sequence[DefinitionId]
    ports: Sequence[object] = ()

    @property
    def value(self) -> Kept:
        """The recipe as sent to a process."""
        return self.payload, self.buffers, self.ports


def keep(values: Values, name: str, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    """Encode the class and arguments of an actor.

    Raises:
        TypeError: An argument cannot be serialised; the text names it.
    """
    encoded = values.encode_construction(values.sent_class(cls), args, kwargs, name=name)
    buffers = [bytearray(buffer) for buffer in encoded.buffers]
    return Recipe(bytes(encoded.payload), buffers, encoded.definitions, encoded.attachments)


def argument_named(
    error: BaseException, values: Values, name: str, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BaseException:
    """Return the error of a spawn that was not sent; for an argument's error it names the argument or class."""
    if isinstance(error, TypeError):
        try:
            values.encode_construction(cls, args, kwargs, name=name)
        except TypeError as named:
            named.__suppress_context__ = True  # it repeats all of `error`
            return named
    return error


def make_asked(values: Values, name: str, kept: Kept) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """Decode like `make_from`, for a process that is not this one's owner and so may not cause imports here.

    Raises:
        PayloadError: They cannot be rebuilt here.
        ProtocolError: The class is not an actor class.
    """
    payload, buffers, _ = kept
    memory = [memoryview(one) for one in buffers]
    cls, args, kwargs = values.decode_construction(payload, memory, name=name, may_import=False)
    if not hasattr(class_of(cls), ENDPOINTS):
        raise ProtocolError(f"only an actor class can be spawned, got {cls!r}")
    return cls, args, kwargs


def make_from(values: Values, name: str, kept: Kept) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """Return class, arguments and keyword arguments; runs user code.

    Raises:
        PayloadError: They cannot be rebuilt here.
    """
    payload, buffers, _ = kept  # held until the ports among the arguments have been rebuilt
    return values.decode_construction(payload, [memoryview(one) for one in buffers], name=name)
