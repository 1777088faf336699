"""`trimesh.aio.Actor`, the base class of actors written in asyncio, and the asyncio loop that they share.

The loop runs in a thread of its own, or on the main thread of a worker.

    none --lease()--> starting --> running --last release()--> ending --> none

LH-1 the first actor that needs it starts it, and the last one to go ends it; in between all share it.
LH-2 it is served as long as the links of the process: calls of unwinding actors work.
LH-3 an end that no actor requested fails everything that waits for the loop, with an error.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import msgspec
import outcome
import trio

from trimesh._runtime.actors import LIVE, ServeSlot, lifespan_of
from trimesh._runtime.life import Proc, current_proc
from trimesh._runtime.tasks import Waiting
from trimesh._runtime.values import ENDPOINTS, EndpointKind, EndpointSpec, endpoints_of
from trimesh._transport.native.transport import NativeTransport
from trimesh.actor import actor
from trimesh.aio.asyncio_work import (
    Tasks,
    block_in_asyncio,
    broken_loop,
    items_from_asyncio,
    run_in_asyncio,
    start_task,
    tasks_of_actor,
)
from trimesh.aio.body import open_trio
from trimesh.aio.driver import NAMES, SOME_EVENTS, driver_for
from trimesh.aio.slots import AsyncioSlot, running_slot
from trimesh.aio.trio_run import TrioRun, find_run
from trimesh.errors import TrimeshInternalError

_loop_of_actor: ContextVar[MainLoop | LoopThread] = ContextVar("trimesh_aio_loop")


class Actor(actor.Actor):
    """Base class of actors whose code runs in asyncio: engines, clients and servers that need a running loop.

    A subclass is written like one of `trimesh.Actor`, and its handles are used alike. Its `__init__`, `lifespan` and
    endpoints run in tasks of one asyncio loop on the main thread, which all such actors of a process share. A plain
    `def` endpoint runs on that loop, too, or in a worker thread with `thread=True`. Operations on meshes can be awaited
    there, as with `trimesh.aio`.

    Code that blocks the loop blocks the links and other actors of the process. `class Engine(trimesh.aio.Actor,
    own_thread=True)` gives actors of such classes a loop in a thread of their own; subclasses inherit it. In the
    controller (`this_proc()`) the loop is always in a thread.

    A cancel or a deadline of the caller cancels the task of the endpoint, once, and the caller waits until it has
    ended. A generator endpoint is ahead of its consumer as in Trio. When the actor ends, tasks that it started and left
    running are cancelled and awaited. `setup=` of the processes may set the event loop policy (uvloop).

    Cost: a call takes 1.3 to 1.8 times as long as with `trimesh.Actor`, and two thread switches more with
    `own_thread=True`.
    """

    _own_thread = False

    def __init_subclass__(cls, *, own_thread: bool | None = None, **kwargs: Any) -> None:
        """Collect the endpoints of the class; see `trimesh.Actor`."""
        super().__init_subclass__(**kwargs)
        if own_thread is not None:
            cls._own_thread = own_thread
        setattr(cls, ENDPOINTS, {name: _on_loop(spec) for name, spec in endpoints_of(cls).items()})


def _on_loop(spec: EndpointSpec) -> EndpointSpec:
    """Return the spec of an endpoint with a function that runs it on the loop of its actor."""
    function, name = spec.fn, f"{spec.name}()"
    if spec.kind is EndpointKind.THREAD:
        return spec
    if spec.kind is EndpointKind.GENERATOR:

        def generate(actor: Any, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            return items_from_asyncio(_loop_of_actor.get(), partial(function, actor, *args, **kwargs), name)

        vars(generate)["__wrapped__"] = function  # for its annotations
        return msgspec.structs.replace(spec, fn=generate)

    start = _in_a_task(function) if spec.kind is EndpointKind.INLINE else function

    async def run(actor: Any, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        work, slot = partial(start, actor, *args, **kwargs), running_slot()
        if slot is None:
            return await run_in_asyncio(_loop_of_actor.get(), work, name)
        return await slot.call(work, name)

    vars(run)["__wrapped__"] = function
    return msgspec.structs.replace(spec, fn=run, kind=EndpointKind.ASYNC)


def _in_a_task(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return function(*args, **kwargs)

    return call


@asynccontextmanager
async def _live(
    cls: type[Actor], make: Callable[[], Any], made: Callable[[Any], None]
) -> AsyncGenerator[ServeSlot | None, None]:
    """Make an actor and hold its `lifespan` open, both in asyncio; see `actors.life.Live`."""
    loop = await _lease(own_thread=cls._own_thread)
    tasks: Tasks = set()
    tasks_of_actor.set(tasks)
    _loop_of_actor.set(loop)
    try:
        actor = await run_in_asyncio(loop, _in_a_task(make), "__init__()")
        made(actor)
        del make  # it refers to the arguments, which only the actor should keep alive
        async with block_in_asyncio(loop, lifespan_of(actor), "lifespan"):
            del actor
            yield loop.serve_slot if isinstance(loop, MainLoop) else None
    finally:
        try:
            if tasks and not loop.has_ended:
                with trio.CancelScope(shield=True):
                    await run_in_asyncio(loop, partial(_end, tasks), "the end of its tasks")
        finally:
            await loop.release()


async def _lease(*, own_thread: bool) -> MainLoop | LoopThread:
    """Lease the loop for an actor of this process: the main one, or that of a thread. The caller releases it.

    Raises:
        RuntimeError: The process is ending, or is simulated.
    """
    proc = current_proc()
    if proc.is_simulated:
        raise RuntimeError(
            "an actor in a simulation must be a trimesh.Actor, got a trimesh.aio.Actor, whose loop has a clock of its "
            'own: test it over real processes, `@pytest.mark.mesh_backend("proc")`, or move its code into a '
            "trimesh.Actor"
        )
    return (None if own_thread else await lease_main_loop(proc)) or await lease_thread(proc)


async def _end(tasks: Tasks) -> None:
    """Cancel the tasks that an actor left running, and wait for them; asyncio logs their errors."""
    while others := tasks - {asyncio.current_task()}:
        for task in others:
            task.cancel("its actor has ended")
        await asyncio.wait(others)


setattr(Actor, LIVE, classmethod(_live))


# ---- the loop of a thread of its own ---------------------------------------------------------------------------------


class LoopThread:
    """An asyncio loop and the thread that it runs in.

    Attributes:
        run: The loop's interface to the Trio run of the process; set once the loop runs.
        works: Work for which Trio tasks wait; it fails if the loop ends by itself.
    """

    def __init__(self) -> None:
        self.run: TrioRun
        self.works: set[Waiting] = set()
        self._users = 0
        self._is_running = False
        self._started = trio.Event()
        self._unused = trio.Event()
        self._ended = trio.Event()
        self._stop: asyncio.Event
        self._error: BaseException | None = None

    # ---- Trio's side -----------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True if it accepts no more work."""
        return self._unused.is_set() or self._ended.is_set()

    async def release(self) -> None:
        """Give the lease back; the last user ends the loop and waits for its end, shielded."""
        self._users -= 1
        if not self._users:
            self._unused.set()
            with trio.CancelScope(shield=True):
                await self._ended.wait()

    def broken(self) -> TrimeshInternalError:
        """Return the error for users of a loop that has ended by itself."""
        return broken_loop(self._error)

    async def _wait_started(self) -> None:
        await self._started.wait()
        if not self._is_running:
            raise self.broken()

    @trio.lowlevel.enable_ki_protection
    async def _serve(self) -> None:
        """Run the thread until the last user releases it, or the process stops serving its links."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_thread, trio.lowlevel.current_trio_token())
            try:
                await self._unused.wait()
            finally:
                self._unused.set()
                if self._is_running:
                    self._tell_stop()

    async def _wait_thread(self, token: trio.lowlevel.TrioToken) -> None:
        context = contextvars.Context()  # tasks of the loop must not belong to the first actor
        try:
            with trio.CancelScope(shield=True):
                # Its own limiter, because the thread would occupy a slot of the default one all its life.
                limiter = trio.CapacityLimiter(1)
                await trio.to_thread.run_sync(lambda: context.run(self._run_loop, token), limiter=limiter)
        except BaseException as error:  # noqa: BLE001 - actors fail with it
            self._error = error
        self._is_running = False
        self._ended.set()
        self._started.set()
        self._fail_works()  # whose actors end, and release it

    def _fail_works(self, error: BaseException | None = None) -> None:
        self._error = error or self._error
        for work in list(self.works):
            work.fail(self.broken())

    def _runs(self, run: TrioRun) -> None:
        self.run, self._is_running = run, True
        self._started.set()
        if self._unused.is_set():  # its only user was cancelled before it ran
            self._tell_stop()

    def _tell_stop(self) -> None:
        self.run.tell(self._stop.set)

    # ---- asyncio's side --------------------------------------------------------------------------------------

    def _run_loop(self, token: trio.lowlevel.TrioToken) -> None:
        with asyncio.Runner() as runner:
            runner.get_loop().set_task_factory(start_task)
            try:
                runner.run(self._serve_loop(token))
            except (Exception, SystemExit) as error:
                with suppress(trio.RunFinishedError):  # before the runner cancels the tasks of this work
                    token.run_sync_soon(self._fail_works, error)
                raise

    async def _serve_loop(self, token: trio.lowlevel.TrioToken) -> None:
        self._stop = asyncio.Event()
        async with open_trio(trio_token=token):
            run = find_run(asyncio.get_running_loop())
            assert run is not None
            run.post(partial(self._runs, run))
            await self._stop.wait()


async def lease_thread(proc: Proc) -> LoopThread:
    """Lease the loop in a thread of this process, for one of its Trio tasks; the first lease starts it.

    The caller releases it.

    Raises:
        RuntimeError: The process is ending.
    """
    thread = cast("LoopThread | None", proc.above.get(LoopThread))
    if thread is None or thread.has_ended:
        thread = proc.above[LoopThread] = LoopThread()
        if not proc.serve(thread._serve):  # noqa: SLF001 - its own module
            raise RuntimeError("actors must be spawned before their process begins to end, got one after that")
    thread._users += 1  # noqa: SLF001 - the same
    try:
        await thread._wait_started()  # noqa: SLF001 - the same
    except BaseException:
        await thread.release()
        raise
    return thread


# ---- the loop of the main thread, which drives the Trio run while asyncio actors live --------------------------------

# `trio.run` runs a turn, then gets events from its `io_manager`. A `MainLoop` takes the place of the I/O manager: its
# `get_events` runs the loop, whose driver runs the turns, and returns when the last actor has gone.

Steps = Generator[float, Any, None]

ASKED: Final = frozenset(("io_manager", "get_events"))
"""Names that the code of `trio.run` must use; otherwise it would never call `MainLoop.get_events`."""


class MainLoop:
    """The asyncio loop of a worker, which drives its Trio run.

    Args:
        transport: The native transport; it spins in the waits of the loop.
        steps: Trio's run generator.

    Attributes:
        run: The Trio run of the loop; set once it serves.
        works: Work that fails if the loop ends by itself.
        ended: Set when the loop has ended and `trio.run` waits by itself again.
    """

    def __init__(self, transport: NativeTransport, steps: Steps) -> None:
        self.run: TrioRun
        self.works: set[Waiting] = set()
        self.ended = trio.Event()
        self._transport = transport
        self._steps = steps
        self._names = cast("Any", NAMES)
        self._runner = self._names.context.runner
        self._io_manager = self._runner.io_manager
        self._users = 1  # the actor that it is made for
        self._is_running = False
        self._started = trio.Event()
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None

    # ---- Trio's side -----------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True once the last actor has released it, or the loop has ended by itself."""
        return self._users == 0 or (self._started.is_set() and not self._is_running)

    def open(self) -> None:
        """Let the loop drive the Trio run, as soon as the current turn is over."""
        self._runner.io_manager = self

    async def wait_started(self) -> None:
        """Wait until it accepts work."""
        await self._started.wait()
        if not self._is_running:
            raise self.broken()

    def share(self) -> None:
        """Add a user."""
        self._users += 1

    async def release(self) -> None:
        """Give the lease back; the last user ends the loop and waits for its end, shielded."""
        self._users -= 1
        if not self._users:
            if self._stop is not None:
                self._stop.set()
            with trio.CancelScope(shield=True):
                await self.ended.wait()

    def broken(self) -> TrimeshInternalError:
        return broken_loop(self._error)

    async def serve_slot(self, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a slot of an actor's mailbox."""
        await AsyncioSlot(self.run, self.works).live(serve)

    # ---- in place of the io manager ----------------------------------------------------------------------------

    def get_events(self, timeout: float) -> Any:
        """Run the loop until the last actor has released it; return that there may be events."""
        del timeout  # the loop has its own
        self._runner.io_manager = self._io_manager
        # asyncio's `add_signal_handler` sets `signal.set_wakeup_fd` for the loop, and does not restore Trio's.
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        library = self._names.library
        before, library.name = library.name, None
        try:
            self._run_loop()
        finally:
            library.name = before
            signal.set_wakeup_fd(wakeup)
        return SOME_EVENTS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io_manager, name)

    def _run_loop(self) -> None:
        over: list[outcome.Outcome[Any]] = []

        def finished(result: outcome.Outcome[Any]) -> None:
            over.append(result)
            if self._stop is not None:
                self._stop.set()

        trio_hooks = sys.get_asyncgen_hooks()
        loop = asyncio.new_event_loop()
        driver = driver_for(loop, self._runner, self._steps, finished)
        try:
            asyncio.set_event_loop(loop)
            loop.set_task_factory(start_task)
            with self._transport.moving_run():
                driver.start()
            try:
                loop.run_until_complete(_with_generators_of_trio(trio_hooks, self._serve(loop)))
            except BaseException as error:  # noqa: BLE001 - actors fail with it
                self._error = error
            self._is_running = False
            if not over:
                self._fail_works()
            finishing = loop.create_task(_with_generators_of_trio(trio_hooks, _finish(loop)))
            while not finishing.done():  # the loop may be stopped again
                with suppress(BaseException):  # only the first error is reported
                    loop.run_until_complete(finishing)
            if not over:
                self._fail_works()
        finally:
            if not over:
                with self._transport.moving_run():
                    driver.stop()
                self._started.set()
                self.ended.set()
            asyncio.set_event_loop(None)
            loop.close()
        if over and isinstance(over[0], outcome.Error) and isinstance(over[0].error, trio.TrioInternalError):
            raise over[0].error

    def _fail_works(self) -> None:
        """Fail the work that waits for the loop: all of it if the loop has ended by itself (LH-3)."""
        for work in list(self.works):
            work.fail(self.broken())

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._stop = asyncio.Event()
        async with open_trio():
            run = find_run(loop)
            assert run is not None
            self.run, self._is_running = run, True
            self._started.set()
            if not self._users:  # its only user was cancelled before it ran
                self._stop.set()
            await self._stop.wait()


async def _with_generators_of_trio(trio_hooks: Any, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` with hooks by which Trio finalizes async generators of its tasks, and asyncio those of its own."""
    asyncio_hooks: Any = sys.get_asyncgen_hooks()
    ours: set[int] = set()  # ids of generators of asyncio tasks

    def first(generator: Any) -> None:
        if trio.lowlevel.in_trio_task():
            ours.discard(id(generator))  # an ended generator may have had the same id
            trio_hooks.firstiter(generator)
        else:
            ours.add(id(generator))
            asyncio_hooks.firstiter(generator)

    def last(generator: Any) -> None:
        if id(generator) in ours:
            ours.discard(id(generator))
            asyncio_hooks.finalizer(generator)
        else:
            trio_hooks.finalizer(generator)

    sys.set_asyncgen_hooks(first, last)  # until the loop stops, which restores the earlier hooks
    await work


async def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Shut the loop down as `asyncio.run` does at its end; the Trio run continues meanwhile."""
    await _end_tasks(loop)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
    await _end_tasks(loop)  # tasks that Trio started meanwhile


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    while tasks := asyncio.all_tasks(loop) - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def find_steps() -> Steps | None:
    """Return the generator of the running Trio run, if `trio.run` drives it: then a loop can drive it instead."""
    if NAMES is None or not hasattr(NAMES.context, "runner"):
        return None
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - its documented name
    while frame is not None and frame.f_code is not NAMES.run_code:
        frame = frame.f_back
    run = None if frame is None else frame.f_back
    if run is None or not ASKED.issubset(run.f_code.co_names):
        return None
    steps: Any = run.f_locals.get("gen")
    return cast("Steps", steps) if getattr(steps, "gi_code", None) is NAMES.run_code else None


async def lease_main_loop(proc: Proc) -> MainLoop | None:
    """Lease the loop that drives the Trio run of a worker; None where none can. The caller releases it."""
    while (here := cast("MainLoop | None", proc.above.get(MainLoop))) is not None and here.has_ended:
        if here.ended.is_set():
            del proc.above[MainLoop]
        else:
            await here.ended.wait()
    if here is not None:
        here.share()
    else:
        is_worker = proc.family is not None and proc.family.root is not None
        steps = find_steps() if is_worker else None
        if steps is None or not isinstance(proc.transport, NativeTransport):
            return None
        here = proc.above[MainLoop] = MainLoop(proc.transport, steps)
        here.open()
    try:
        await here.wait_started()
    except BaseException:
        await here.release()
        raise
    return here
