"""Replicas of a pool: health checks, resizing, and rolling updates.

PZ-1 A replica that has left its mesh gets no requests. Its running requests go to another one if they have not begun,
     or may run twice. It keeps its index: one that comes back at that index is the same replica.
PZ-2 To shrink, `resize` drains first: running requests of the leaving replicas end before these stop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import trio

from trimesh._runtime.meshes import kill_wanted
from trimesh._runtime.tasks import in_trio_taking
from trimesh.actor.actor_mesh import ActorMesh, processes_of
from trimesh.actor.proc_mesh import ProcMesh, check_resize, current_view
from trimesh.plain_numbers import plain_real, plain_whole
from trimesh.service.dispatch import Replica
from trimesh.service.pool.engine import PoolEngine

if TYPE_CHECKING:
    from trimesh.blocking import calls as blocking

A = TypeVar("A")

SickThen = Literal["drain", "replace"]
"""What happens to a replica that fails its probes."""


class Health:
    """Health check of replicas: one that does not answer gets no requests until it does.

    Args:
        probe: An endpoint without arguments: `Generator.ping`; give it a slot of its own (`@endpoint(group="health")`),
            or it waits behind requests.
        every: Seconds between two probes, and the time limit of one.
        tries: Number of failed probes in a row after which the replica gets no requests until one succeeds.
        then: "drain" leaves its processes as they are, so that a replica that hangs stays in that state; "replace"
            kills them, so that their policy handles a death (`Restart` replaces them).

    Raises:
        ValueError: `every` or `tries` is not positive, or `then` is neither of both.
    """

    def __init__(
        self, probe: blocking.Endpoint[[], Any], *, every: float = 1.0, tries: int = 3, then: SickThen = "drain"
    ) -> None:
        if then not in get_args(SickThen):
            raise ValueError(f'then must be "drain" or "replace", got {then!r}')
        every, tries = plain_real(every), plain_whole(tries)
        if not (every > 0 and tries >= 1):
            raise ValueError(f"Health needs every > 0 and tries >= 1, got every={every!r}, tries={tries!r}")
        self.probe: str = getattr(probe, "spec").name  # noqa: B009 - it is another class to type checkers
        self.every = every
        self.tries = tries
        self.then = then

    async def watch(self, engine: PoolEngine, index: int) -> None:
        """Probe one replica for as long as the pool is open."""
        failures = 0
        while True:
            await trio.sleep(self.every)
            failures = 0 if await self._is_well(engine.views[index]) else failures + 1
            is_sick = failures >= self.tries
            if is_sick != (index in engine.sick):
                (engine.sick.add if is_sick else engine.sick.discard)(index)
                engine.judge(index)
                engine.pump()
                if is_sick and self.then == "replace":
                    failures = 0
                    await kill_wanted(processes_of(engine.views[index]))

    async def _is_well(self, view: ActorMesh) -> bool:
        if len(view.alive()) < len(view):
            return True  # its death is known, and is handled elsewhere
        with trio.move_on_after(self.every):
            outcomes = await getattr(view, self.probe).options(abandon_after=0).call_settled()
            return all(outcome.ok for outcome in outcomes.values())
        return False


class ElasticReplicas:
    """Makes a pool follow the size of its actors' processes along their first dimension; `resize` changes that size.

    Raises:
        TypeError: `procs` is not a mesh of processes.
        ValueError: `along` is not the first dimension of `procs` and of the actors.
    """

    def __init__(self, engine: PoolEngine, procs: ProcMesh, along: str | None) -> None:
        if not isinstance(procs, ProcMesh):
            raise TypeError(f"procs must be the mesh of processes in which the actors run, got {procs!r}")
        if along is None:
            raise ValueError("a pool that follows its processes needs along=, their first dimension: along='replica'")
        self._engine = engine
        self._procs = procs
        self._along = along
        self._lock = trio.Lock()
        labels = list(procs.extent)[:1], list(engine.mesh.extent)[:1]
        if labels != ([along], [along]):
            raise ValueError(
                f"a pool follows the size of its processes along their first dimension, and along={along!r} is not the "
                f"first of {procs!r} and of {engine.mesh!r}"
            )

    async def watch(self) -> None:
        """Follow the membership of the processes while the pool is open."""
        async with self._procs.membership() as views:
            async for _ in views:
                await self._follow()

    async def _follow(self) -> None:
        engine = self._engine
        mesh: Any = await current_view(engine.mesh)
        size: int = mesh.size(self._along)
        for index in range(len(engine.views), size):
            engine.add(mesh.slice(**{self._along: index}))
        for index in range(len(engine.views)):
            engine.set_absent(index, is_absent=index >= size)
        engine.updates.check()
        engine.pump()

    def check(self, replicas: int) -> None:
        """Raise `ShapeError` or `RuntimeError` if the processes could not have this size."""
        check_resize(self._procs, self._along, replicas)

    async def resize(self, replicas: int) -> None:
        engine = self._engine
        async with self._lock:
            leaving = range(replicas, len(engine.views))
            for index in leaving:
                engine.dispatcher.set_drained(index, is_drained=True)
            engine.pump()
            try:
                await engine.wait_until(lambda: not any(engine.dispatcher.replicas[one].running for one in leaving))
                await self._procs.resize(**{self._along: replicas})
                await self._follow()
            finally:
                for index in leaving:  # replicas that have left stay out while they are absent
                    engine.dispatcher.set_drained(index, is_drained=False)
                engine.pump()


class Rolling(Generic[A]):
    """The replicas, one at a time: `async for replica in replicas`.

    Args:
        engine: The pool.
        at_most: Replicas that may be out of service at once.
    """

    def __init__(self, engine: PoolEngine, at_most: int) -> None:
        self._engine = engine
        self._at_most = at_most
        self._seen: set[int] = set()
        self._out: list[int] = []
        self._given: int | None = None

    def __aiter__(self) -> Rolling[A]:
        return self

    def __anext__(self) -> Awaitable[A]:
        """Put the previous replica back into service, and return the next one, once it runs no more requests.

        Raises:
            StopAsyncIteration: All replicas have had their turn.
        """
        return in_trio_taking(self._next, self._put_back)

    async def _next(self) -> A:
        if self._given is not None:
            self._let_in(self._given)
            self._given = None
        while True:
            self._take_out()
            if not self._out:
                raise StopAsyncIteration
            replica = self._engine.dispatcher.replicas[self._out[0]]
            await self._engine.wait_until(partial(_is_idle_or_gone, replica))
            if replica.is_member:
                self._given = replica.index
                found: Any = self._engine.views[replica.index]
                return found  # type: ignore[no-any-return]
            self._let_in(replica.index)  # it left the pool meanwhile

    def _take_out(self) -> None:
        """Take replicas that have not had their turn out of service, until `at_most` are out."""
        for one in self._engine.dispatcher.replicas:
            if len(self._out) < self._at_most and one.is_member and one.index not in self._seen:
                self._seen.add(one.index)
                self._out.append(one.index)
                self._engine.dispatcher.set_updating(one.index, is_updating=True)
        self._engine.pump()

    def _put_back(self, _: A) -> None:
        self._given = None  # it is still the first of those that are out: the next step returns it again

    def _let_in(self, index: int) -> None:
        self._out.remove(index)
        self._engine.dispatcher.set_updating(index, is_updating=False)
        self._engine.pump()

    @classmethod
    @asynccontextmanager
    async def open(cls, engine: PoolEngine, at_most: int) -> AsyncGenerator[Rolling[A], None]:
        """Put all replicas back into service when the body is left."""
        serving = sum(one.is_member for one in engine.dispatcher.replicas)
        at_most = plain_whole(at_most)
        if not 1 <= at_most <= max(1, serving - 1):
            raise ValueError(
                f"at_most must be at least 1 and leave one of the {serving} replicas in service, got {at_most!r}"
            )
        rolling = cls(engine, at_most)
        try:
            yield rolling
        finally:
            for index in [*rolling._out]:
                rolling._let_in(index)


def _is_idle_or_gone(replica: Replica) -> bool:
    return not replica.running or not replica.is_member
