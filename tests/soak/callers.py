"""The callers of the mixed workload: one step after the other, each of which is checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import attrs
import trio
from tests.soak.actors import Inner, Planned, Worker
from tests.soak.schedule import Step

import trimesh
from trimesh import (
    ActorFailed,
    LinkLost,
    MeshStopped,
    ProcDied,
    RemoteCancelled,
    Retry,
    SpawnError,
    Unresponsive,
    limits,
    open_channel,
    this_host,
)
from trimesh.testing.plans.system_faults import SpawnFault

TROUBLE: Final = (ProcDied, MeshStopped, ActorFailed, LinkLost, RemoteCancelled, Unresponsive, MemoryError)
"""What a caller may get when something has gone wrong."""

UNSTARTED: Final = (SpawnError, ProcDied)
"""What comes of a process whose start fails."""

LATE: Final = 0.5
"""Seconds by which a caller may leave later than its deadline and the bound for acknowledgements say."""

FLOOD: Final = limits.MAILBOX_MESSAGES + 20
"""More messages than a mailbox takes."""

ITEMS: Final = 7
"""Items of a stream, a map, and of each sender to a channel."""


class WorkloadError(AssertionError):
    """A caller got what it must not get."""


def check(rule: str, holds: object, text: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise WorkloadError(f"{rule}: {text}")


@attrs.define(eq=False)
class Callers:
    """What all callers share.

    Attributes:
        faults: Plans faults of starts.
        procs: The mesh of processes that comes and goes.
        meshes: Two actor meshes there.
        other: An actor elsewhere.
        is_troubled: Whether anything has gone wrong that callers may notice.
        is_hard_to_start: Whether the start of some process may fail.
        spawned: Names of the actor meshes of `procs`, in spawn order.
        repeated: Tokens of messages that may run more than once.
    """

    faults: Any
    procs: Any
    meshes: Sequence[Any]
    other: Any
    is_troubled: bool = False
    is_hard_to_start: bool = False
    spawned: list[str] = attrs.field(factory=list[str])
    repeated: set[int] = attrs.field(factory=set[int])
    _spawning: trio.Lock = attrs.field(factory=trio.Lock)

    async def take(self, step: Step) -> None:
        """Take one step, and check when it is over."""
        start = trio.current_time()
        what: Callable[[Step], Awaitable[None]] = getattr(self, f"_{step.kind}", self._call)
        with trio.CancelScope() as scope:
            if step.deadline is not None:
                scope.deadline = start + step.deadline
            await what(step)
        took = trio.current_time() - start
        if step.deadline is not None:
            text = f"{step} has left {took:g} s after it began"
            check("W-2", took <= step.deadline + limits.CANCEL_ACK_SECONDS + LATE, text)
        await trio.sleep(step.pause)

    # ---- what comes ------------------------------------------------------------------------------------------

    def explain(self, step: Step, error: BaseException) -> None:
        """Check that a step, or trouble, explains an error."""
        for leaf in trimesh.leaves(error):
            if isinstance(leaf, Planned):
                check("W-1", leaf.args == (step.number,) and step.how.startswith("fail"), f"{step} raised {leaf!r}")
                continue
            explained = self.explained if step.deadline is None else (*self.explained, RemoteCancelled)
            if not isinstance(leaf, explained):
                raise leaf

    @property
    def explained(self) -> tuple[type[Exception], ...]:
        """The errors that have been explained by now, whoever gets them."""
        return (*(TROUBLE if self.is_troubled else ()), *(UNSTARTED if self.is_hard_to_start else ()))

    def value(self, step: Step, value: Any) -> None:
        """Check a value that came."""
        check("W-1", step.how != "fail", f"{step} returned {value!r} instead of raising")
        check("W-1", value == step.number, f"{step} returned {value!r}")

    def view(self, step: Step) -> Any:
        """Return the members that a step is for."""
        mesh = self.meshes[step.mesh]
        return mesh.exclude([{"n": rank} for rank in range(len(mesh)) if rank not in step.ranks])

    def first(self, step: Step) -> Any:
        """Return one of them."""
        return self.meshes[step.mesh].slice(n=step.ranks[0])

    # ---- calls -----------------------------------------------------------------------------------------------

    async def _call(self, step: Step) -> None:
        verb, args = step.kind, (step.number, step.how, step.seconds, bytes(step.ballast))
        if verb.startswith("broadcast") and step.how == "fail":
            self.is_troubled = True  # its policy may restart what has failed
        try:
            if step.via is None or verb == "broadcast_nowait":
                done = getattr(getattr(self.view(step), step.endpoint), verb)(*args)
                found = done if verb == "broadcast_nowait" else await done
            else:
                caller = self.other if step.via < 0 else self.meshes[0].slice(n=step.via)
                found = await caller.relay.call_one(self.view(step), verb, step.endpoint, args)
        except trio.WouldBlock:
            check("W-1", verb == "broadcast_nowait", f"{step} would block")
        except Exception as error:  # noqa: BLE001 - judged
            self.explain(step, error)
        else:
            self._judge(step, found)

    def _judge(self, step: Step, found: Any) -> None:
        if step.kind in ("broadcast", "broadcast_nowait"):
            check("W-1", found is None, f"{step} returned {found!r}")
        elif step.kind in ("call", "call_settled"):
            check("W-1", len(found) == len(step.ranks), f"{step} returned {found!r}")
            for one in found.values():
                if step.kind == "call":
                    self.value(step, one)
                elif one.ok:
                    self.value(step, one.value)
                else:
                    self.explain(step, one.error)
        else:
            self.value(step, found)

    async def _retried(self, step: Step) -> None:
        self.repeated.add(step.number)
        verb = ("call", "call_one", "choose")[step.number % 3]
        view = self.first(step) if verb == "call_one" else self.view(step)
        options = view.again.options(retry=Retry(2, on=(ProcDied,), backoff=0.1))
        try:
            found = await getattr(options, verb)(step.number, step.how, step.seconds)
        except Exception as error:  # noqa: BLE001 - judged
            self.explain(step, error)
        else:
            for one in found.values() if verb == "call" else [found]:
                self.value(step, one)

    async def _flood(self, step: Step) -> None:
        """Send more than a mailbox takes, behind one that is slow."""
        first = 10_000 * step.number
        view = self.first(step)
        try:
            await view.one.broadcast(first, "sleep", step.seconds)
            for number in range(1, FLOOD):
                await view.one.broadcast(first + number, "at once", 0.0)
        except Exception as error:  # noqa: BLE001 - judged
            self.explain(step, error)

    # ---- many results ----------------------------------------------------------------------------------------

    async def _items(self, step: Step) -> None:
        view = self.view(step)
        came: dict[int, list[int]] = {rank: [] for rank in step.ranks}
        merge = "collect" if step.number % 2 else "fail_fast"
        try:
            stream = view.items.options(merge=merge, window=1 + step.number % 4)
            async with stream.stream(step.number, ITEMS, step.how, step.seconds) as results:
                async for point, item in results:
                    came[self.rank(point)].append(item)
                    if step.number % 5 == 0 and item == ITEMS // 2:
                        return
            check("W-1", step.how != "fail", f"{step} ended without an error")
            check("W-3", all(len(items) == ITEMS for items in came.values()), f"{step} gave {came}")
        except Exception as error:  # noqa: BLE001 - judged
            self.explain(step, error)
        finally:
            for items in came.values():
                check("W-3", items == list(range(len(items))), f"{step} gave {came}")

    def rank(self, point: Any) -> int:
        """Return the rank of a point of a view of `w`."""
        return int(point.rank)

    async def _map(self, step: Step) -> None:
        came: list[int] = []
        work = [(step.number, index, step.how, step.seconds / 4) for index in range(ITEMS)]
        try:
            async with self.view(step).mapped.map(work, window=3) as results:
                async for index, value in results:
                    check("W-1", value == (step.number, index), f"{step} gave {value} for {index}")
                    came.append(index)
            check("W-1", step.how != "fail", f"{step} ended without an error")
            check("W-3", sorted(came) == list(range(ITEMS)), f"{step} gave {came}")
        except Exception as error:  # noqa: BLE001 - judged
            self.explain(step, error)
        check("W-3", len(came) == len(set(came)), f"{step} gave {came}")

    async def _channel(self, step: Step) -> None:
        came: dict[int, list[int]] = {rank: [] for rank in step.ranks}
        told: list[int] = []

        async def tell(port: Any) -> None:
            async with port:
                outcomes = await self.view(step).tell.call_settled(port, step.number, ITEMS, step.seconds)
            for rank, outcome in zip(step.ranks, outcomes.values(), strict=True):
                if outcome.ok:
                    told.append(rank)
                else:
                    self.explain(step, outcome.error)

        async with open_channel(tuple, capacity=step.number % 4) as (port, receiver), trio.open_nursery() as nursery:
            nursery.start_soon(tell, port)
            async for token, rank, item in receiver:
                check("W-1", token == step.number, f"{step} got an item of step {token}")
                came[rank].append(item)
        for rank, items in came.items():
            check("W-3", items == list(range(len(items))), f"{step} got {came}")
            check("W-3", len(items) == ITEMS or rank not in told, f"{step} got {came}")

    # ---- owning ----------------------------------------------------------------------------------------------

    async def _spawn(self, step: Step) -> None:
        """Spawn another actor mesh, which now and then fails on one rank."""
        fails_at = step.ranks[0] if step.how == "fail" else None
        name = f"extra{step.number}"
        try:
            async with self._spawning:  # or which came first could not be said
                self.spawned.append(name)
                extra = await self.procs.spawn(name, Worker, fails_at)
            found = await extra.inline.call(step.number, "at once", 0.0)
            check("W-1", fails_at is None, f"{step} was spawned in spite of an error")
            check("W-1", len(found) == len(self.procs), f"{step} gave {found!r}")
        except Exception as error:  # noqa: BLE001 - judged
            for leaf in trimesh.leaves(error):
                if fails_at is None or not isinstance(leaf, Planned) or leaf.args != (-1,):
                    self.explain(step, leaf)

    async def _nest(self, step: Step) -> None:
        """Have a member own a process."""
        try:
            found = await self.first(step).nest.call_one(step.number, step.seconds)
            check("W-1", found == step.number, f"{step} returned {found!r}")
        except Exception as error:  # noqa: BLE001 - judged
            self.explain(step, error)

    async def _procs(self, step: Step) -> None:
        """Own a mesh for a while, whose start may fail."""
        if step.how.startswith("fail"):
            self.is_hard_to_start = True  # this one or another one that is started at the same time
            self.faults.plan(SpawnFault(1, "launch" if step.number % 2 else "handshake"), f"c7.{step.number}")
        try:
            async with this_host().spawn_procs({"m": 2}, name=f"own{step.number}") as procs:
                inner = await procs.spawn("inner", Inner)
                await inner.echo.call(step.number, step.seconds)
        except Exception as error:  # noqa: BLE001 - judged
            self.explain(step, error)
