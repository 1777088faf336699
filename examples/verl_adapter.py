"""The dispatch of verl's worker groups on meshes: Runtime, ResourcePool, WorkerGroup, RemoteCall, ObjectStore.

verl's trainers are written against worker groups: a controller calls a method of all workers, a batch is cut among them
and the results are put together. Here that is some hundred lines on `trimesh`, so a trainer written that way can move
over method by method. What is different: a call belongs to the block of its runtime, so none is lost; its deadline is
fixed when it is submitted, and ends the work on the workers, too; the death of a worker is an error with coordinates.

    python examples/verl_adapter.py
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

import trio

import trimesh
from trimesh import Actor, Isolate, endpoint, this_host
from trimesh.service import Store, open_store

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(enum.Enum):
    """What becomes of the arguments of a call, and of its results."""

    ONE_TO_ALL = "the same arguments to all workers; a list of results"
    DP_COMPUTE = "each sequence among the arguments is cut into one piece a worker; the results are put together"
    RANK_ZERO = "to the first worker alone; its result"


_DISPATCHES: dict[str, Dispatch] = {}


def dispatch_of(cls: type[Actor], name: str) -> Dispatch:
    """Return how an endpoint is called."""
    names = [f"{base.__qualname__}.{name}" for base in cls.__mro__]
    return next((_DISPATCHES[one] for one in names if one in _DISPATCHES), Dispatch.ONE_TO_ALL)


def register(dispatch: Dispatch = Dispatch.ONE_TO_ALL) -> Callable[[F], F]:
    """Say how an endpoint is called in a worker group: `@register(Dispatch.DP_COMPUTE)` below `@endpoint`."""

    def mark(method: F) -> F:
        _DISPATCHES[method.__qualname__] = dispatch
        return method

    return mark


class RemoteCall(Generic[R]):
    """A call that was submitted; it runs whether it is waited for or not.

    Attributes:
        deadline: When it ends with `TimeoutError`, on Trio's clock; it was fixed when the call was submitted.
    """

    def __init__(self, name: str, work: Callable[[], Any], timeout: float) -> None:
        self.name = name
        self.deadline = trio.current_time() + timeout
        self._work = work
        self._scope = trio.CancelScope(deadline=self.deadline)
        self._done = trio.Event()
        self._result: R | None = None
        self._error: Exception | None = None

    async def run(self) -> None:
        """Make the call, in a task of the runtime."""
        try:
            with self._scope:
                self._result = await self._work()
            if self._scope.cancelled_caught:
                is_late = trio.current_time() >= self.deadline
                self._error = TimeoutError(f"{self.name} has {'passed its deadline' if is_late else 'been cancelled'}")
        except Exception as error:  # noqa: BLE001 - for whoever waits for the result
            self._error = error
        finally:
            self._done.set()

    def cancel(self) -> None:
        """End it, on the workers, too."""
        self._scope.cancel(reason=f"{self.name} was cancelled")

    async def result(self) -> R:
        """Wait for the result; waiting late gives the call no more time."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class WorkerGroup:
    """Workers of one class, called as one: `await group.generate(prompts)`, or `group.submit("generate", prompts)`."""

    def __init__(self, runtime: Runtime, workers: Any, cls: type[Actor]) -> None:
        self.workers = workers
        self.world_size = len(workers)
        self._runtime = runtime
        self._cls = cls

    def submit(self, name: str, *args: Any, timeout: float = 600.0) -> RemoteCall[Any]:
        """Begin a call, which has `timeout` seconds from now on, in all."""
        dispatch = dispatch_of(self._cls, name)
        first = dict(next(iter(self.workers.points())))
        workers = self.workers.slice(**first) if dispatch is Dispatch.RANK_ZERO else self.workers
        method = getattr(workers, name)
        return self._runtime.start(RemoteCall(name, partial(self._call, method, dispatch, args), timeout))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            return await self.submit(name, *args).result()

        getattr(self.workers, name)  # raises `AttributeError` that names the endpoints
        return call

    async def _call(self, method: Any, dispatch: Dispatch, args: Sequence[Any]) -> Any:
        if dispatch is Dispatch.RANK_ZERO:
            return await method.call_one(*args)
        if dispatch is Dispatch.ONE_TO_ALL:
            return list((await method.call(*args)).values())
        cut = [trimesh.per_rank(_cut(one, self.world_size)) if isinstance(one, list) else one for one in args]
        return [item for piece in (await method.call(*cut)).values() for item in piece]


def _cut(items: list[Any], pieces: int) -> list[list[Any]]:
    """Cut a batch into pieces of nearly equal sizes, in order."""
    bounds = [len(items) * index // pieces for index in range(pieces + 1)]
    return [items[begin:end] for begin, end in pairwise(bounds)]


class ResourcePool:
    """Processes that worker groups live in; several groups may share them, as colocated roles do."""

    def __init__(self, runtime: Runtime, procs: Any) -> None:
        self.procs = procs
        self._runtime = runtime

    async def worker_group(self, name: str, cls: type[Actor], *args: Any) -> WorkerGroup:
        """Start one worker in each process."""
        return WorkerGroup(self._runtime, await self.procs.spawn(name, cls, *args), cls)


class ObjectStore:
    """Values that are put once and read by reference: batches that several roles need."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._puts = 0

    async def put(self, value: Any) -> str:
        """Keep a value; return its reference, which may be sent to workers together with the store."""
        self._puts += 1
        await self.store.put(reference := f"object/{self._puts}", value)
        return reference

    async def get(self, reference: str) -> Any:
        """Return a value."""
        return await self.store.get(reference)


class Runtime:
    """Owns calls and objects: `async with open_runtime() as runtime, runtime.resource_pool(8) as pool:`."""

    def __init__(self, nursery: trio.Nursery, store: Store) -> None:
        self.objects = ObjectStore(store)
        self._nursery = nursery

    @asynccontextmanager
    async def resource_pool(self, processes: int) -> AsyncGenerator[ResourcePool, None]:
        """Have processes for a block; the death of one leaves the others."""
        async with this_host().spawn_procs({"dp": processes}, supervision=Isolate()) as procs:
            yield ResourcePool(self, procs)

    def start(self, call: RemoteCall[R]) -> RemoteCall[R]:
        """Run a call in the block of the runtime."""
        self._nursery.start_soon(call.run)
        return call


@asynccontextmanager
async def open_runtime() -> AsyncGenerator[Runtime, None]:
    """Open a runtime; leaving the block cancels calls that run."""
    async with open_store() as store, trio.open_nursery() as nursery:
        yield Runtime(nursery, store)
        nursery.cancel_scope.cancel(reason="the runtime is being left")


# ---- a trainer's loop on it ------------------------------------------------------------------------------------------


class Rollout(Actor):
    """Answers prompts."""

    @endpoint(concurrency=2)
    @register(Dispatch.DP_COMPUTE)
    async def generate(self, prompts: list[str], version: int) -> list[str]:
        """Answer some prompts."""
        rank = trimesh.context().point["dp"]
        return [f"{prompt} by {rank} of version {version}" for prompt in prompts]

    @endpoint(concurrency=2)
    async def stall(self) -> None:
        """Take for ever."""
        await trio.sleep_forever()

    @endpoint
    @register(Dispatch.RANK_ZERO)
    async def describe(self, store: Store, reference: str) -> str:
        """Say how many prompts an object has."""
        return f"{len(await store.get(reference))} prompts"


async def main() -> None:
    """Dispatch calls, let one pass its deadline, lose a worker."""
    async with open_runtime() as runtime, runtime.resource_pool(3) as pool:
        rollout = await pool.worker_group("rollout", Rollout)
        prompts = [f"prompt {index}" for index in range(7)]
        answers = await rollout.generate(prompts, 1)
        assert [answer.partition(" by ")[0] for answer in answers] == prompts
        print(f"{len(answers)} answers of {rollout.world_size} workers, in order")

        reference = await runtime.objects.put(prompts)
        print(f"the first worker sees {await rollout.describe(runtime.objects.store, reference)}")

        late = rollout.submit("stall", timeout=0.2)
        await trio.sleep_until(late.deadline)  # the controller does something else meanwhile
        try:
            await late.result()
        except TimeoutError as error:
            print(error)

        await pool.procs.kill([{"dp": 1}])
        try:
            await rollout.generate(prompts, 2)
        except* trimesh.ProcDied as group:
            print(f"lost: {[dict(point) for error in trimesh.leaves(group) for point in trimesh.coords(error)]}")


if __name__ == "__main__":
    trio.run(main)
