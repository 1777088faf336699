"""The verbs that wait for results, as objects: called they wait, `start` sends now and waits later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar

import trio

from trimesh._runtime.tasks import in_trio, in_trio_now, place_outside
from trimesh._runtime.values import EndpointSpec
from trimesh._wire.exceptions.tracebacks import without_own_frames
from trimesh.actor import retrying, verbs
from trimesh.actor.calling import started
from trimesh.actor.calling.started import StartedCall, Way
from trimesh.actor.options import NO_OPTIONS, Options
from trimesh.actor.view import MeshView

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
T = TypeVar("T")


class _Threads:
    """What brings the work of threads to Trio, which a package above provides."""

    run: Callable[..., Any]


_threads = _Threads()


def provide_threads(run: Callable[..., Any]) -> None:
    """Say what runs an async function in Trio for a thread, and waits there for its result."""
    _threads.run = run


class CallVerb(Generic[P, T]):
    """A verb with a result, of one endpoint: `await mesh.add.call(1)`, or `mesh.add.call.start(1)` to await later."""

    __slots__ = ("_mesh", "_options", "_spec", "_text", "_way")

    def __init__(self, way: Way, mesh: MeshView, spec: EndpointSpec, options: Options) -> None:
        self._text = ""  # made once: Trio asks for it each time that a task is started by it
        self._way = way
        self._mesh = mesh
        self._spec = spec
        self._options = options

    async def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Send, and wait for the result: a checkpoint, cancellable."""
        way, options = self._way, self._options
        result: T
        try:
            if options is NO_OPTIONS:
                result = await in_trio(way.run)(self._mesh, self._spec, args, kwargs)
                return result
            self._check()
            if options.retry is not None and way.again is not None:
                result = await in_trio(way.again)(self._mesh, self._spec, options, args, kwargs)
            else:
                result = await in_trio(way.run)(self._mesh, self._spec, args, kwargs, options)
        except Exception as error:
            without_own_frames(error)
            raise
        return result

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> StartedCall[T]:
        """Send now; return a handle to await the result by.

        The call belongs to the block that owns the mesh; of a handle that came from elsewhere, to the actor that calls
        (or, in the controller, to its outermost block). A block that is left waits for it, or cancels it when it is
        left by an error or a cancel; an actor that stops cancels it. Its deadline is that of the running task now, and
        a cancel of the endpoint that runs now cancels it. In asyncio that is the deadline of `trimesh.aio.fail_after`,
        of the endpoint, or of what runs the loop; `asyncio.timeout`, and deadlines of the task that has started the
        running one, do not count.

        An error is raised where the handle is awaited. If no task has awaited it, it fails the owner: as soon as the
        handle is gone, at the latest when the owner ends.

        Messages leave in the order in which they were started; those of `options(retry=...)` in none.

        Raises:
            TypeError: The arguments do not fit, or cannot be serialised; nothing was sent.
            ValueError, MeshStopped: As from the verb.
            RuntimeError: The owner has ended, or there is none.

        Blocking: never. What a full mailbox keeps from leaving waits in this process.
        """
        return self._start(None, args, kwargs)

    def start_in(
        self, nursery: trio.Nursery | asyncio.TaskGroup, /, *args: P.args, **kwargs: P.kwargs
    ) -> StartedCall[T]:
        """Send now, as a task of `nursery`, in asyncio of a task group; see `start`.

        It waits for the call, its cancel cancels it, and an error fails it at once, as that of any task.
        """
        if isinstance(nursery, trio.Nursery):
            return self._start(nursery, args, kwargs)
        from trimesh.actor.calling import in_task_group  # noqa: PLC0415 - it needs asyncio, which is there then

        in_task_group.check_group(nursery)
        started_call = self._start(None, args, kwargs)
        in_task_group.hold(started_call, nursery)
        return started_call

    def from_thread(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call from a thread, and wait there for the result: `mesh.add.call.from_thread(1)`.

        For any thread of any process of the program but the one of Trio: that of an endpoint with `thread=True`, whose
        deadline and cancel the call has; one that you have started; one of an executor of asyncio.
        `trimesh.from_thread.run` does the same with a function of yours.

        Raises:
            RuntimeError: The caller is in a Trio task, or a plain endpoint without `thread=True`, which it would stop;
                or no mesh is open in this process.
            trimesh.blocking.Cancelled: The process ends, or the time limit around it is over.
            BaseException: What the verb raises.

        Blocking: the thread, until the result is there. It costs two switches between threads more than `await`.
        """
        result: T = _threads.run(self, *args, **kwargs)
        return result

    def _start(self, nursery: trio.Nursery | None, args: Any, kwargs: Any) -> StartedCall[T]:
        self._check()
        begin, place = in_trio_now(started.start), place_outside()
        return begin(self._way, self._mesh, self._spec, self._options, nursery, place, args, kwargs)

    def _check(self) -> None:
        self._options.check_verb(f"{self._mesh.name}.{self._spec.name}", self._way.name)

    @property
    def spelling(self) -> str:
        """How the verb is written, for hints."""
        return f"{self._mesh.name}.{self._spec.name}.{self._way.name}"

    def __repr__(self) -> str:
        if not self._text:
            self._text = f"<{self._way.name} of {self._mesh!r}.{self._spec.name}>"
        return self._text


# Python warns of a coroutine that was never awaited by this name, and shows the line that has made it.
vars(CallVerb)["__call__"].__qualname__ = "call of an endpoint (write `await mesh.endpoint.call(...)`)"

CALL: Final = Way("call", verbs.call, retrying.call, MeshView.ranks, verbs.values_of, fail_fast=True)
CALL_SETTLED: Final = Way(
    "call_settled",
    verbs.call_settled,
    None,
    MeshView.ranks,
    lambda mesh, spec, results: verbs.outcomes_of(mesh, results),
    errors_win=False,
)
CALL_ONE: Final = Way(
    "call_one", verbs.call_one, retrying.call_one, verbs.one_rank, lambda mesh, spec, results: verbs.bare(results)
)
CHOOSE: Final = Way(
    "choose",
    verbs.choose,
    retrying.choose,
    lambda mesh: [verbs.pick(mesh, "choose")],
    lambda mesh, spec, results: verbs.bare(results),
)
