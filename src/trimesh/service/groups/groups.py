"""`open_groups`, and `ElasticGroups`, the handle by which members join."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, get_args

import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio_block
from trimesh.actor.actor import Actor
from trimesh.actor.context import context
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import this_proc
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import MeshError
from trimesh.plain_numbers import plain_whole
from trimesh.service.accounts.keys import Answer
from trimesh.service.accounts.rounds import Place, RoundMember
from trimesh.service.groups.engine import GroupsEngine, place_of
from trimesh.service.groups.member import ElasticGroup
from trimesh.service.work.handover import hand_over, take_over

GroupBackend = Literal["gloo"] | None


class GroupsFront(Actor):
    """Elastic groups, for the members."""

    def __init__(self, number: int) -> None:
        self.engine: GroupsEngine = take_over(number)
        self.joined: dict[tuple[int, Place], RoundMember] = {}

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="joins")
    async def join(self, place: Place) -> AsyncGenerator[tuple[int, int, Any], None]:
        """Give a round: its number, its epoch, its places; and when it is over the same with the reason, or ""."""
        place = place_of(place)
        joined = self.engine.join(place)
        try:
            await self.engine.wait_formed(joined)
            key = joined.number, place
            self.joined[key] = joined
            try:
                yield joined.number, joined.epoch, joined.places
                await self.engine.wait_over(joined)
            finally:
                del self.joined[key]
            yield joined.number, joined.epoch, joined.why
        finally:
            self.engine.leave(joined)

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="ends")
    async def finish(self, number: int, place: Place) -> None:
        """Note that a member is done; return when the others of its round are, or the round has ended."""
        joined = self.joined.get((number, place_of(place)))
        if joined is not None:
            self.engine.finish(joined)
            await self.engine.wait_over(joined)

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="keys")
    async def ask(
        self, number: int, verb: str, keys: Sequence[str], values: Sequence[bytes], numbers: Sequence[int]
    ) -> Answer | None:
        """Answer a question about the keys of a round; None when that is over."""
        return await self.engine.ask(number, verb, keys, values, numbers)


class ElasticGroups:
    """The process groups of an elastic mesh, one after the other; a handle for its actors."""

    def __init__(self, front: Any, name: str, key: int, backend: GroupBackend) -> None:
        self._front = front
        self._name = name
        self._key = key
        self._backend = backend

    def joined(self) -> AbstractAsyncContextManager[ElasticGroup]:
        """Be in the group of all members of the newest view: `async with groups.joined() as group:`.

        Entering waits until each member of the newest view has joined. When that changes (a member is lost, comes or
        goes), or a member leaves the block by an error, the group has *ended*: what its members do in it, or begin to
        do, raises `GroupEnded`, and they join again. A body that ends well waits for those of the others, or for the
        end of the group.

        Raises:
            RuntimeError: The caller is no actor.
            ValueError: This process is in a group already.
            GroupEnded: The group has ended while it was being made; join again.
            MeshStopped: The block of the groups is being left.

        Blocking: entering and leaving wait, cancellable.
        """
        return in_trio_block(self._joined())

    @asynccontextmanager
    async def _joined(self) -> AsyncGenerator[ElasticGroup, None]:
        place = place_of(context().point.items())
        failed: list[Exception] = []
        async with self._front.join.stream(place) as replies:
            _, (number, epoch, places) = await anext(replies)
            shown = [place_of(one) for one in places]
            group = ElasticGroup(self._front, self._name, f"{self._name}/{self._key}/{number}", epoch, shown, place)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch, replies, group)
                try:
                    if self._backend is not None:
                        await group.make()
                    yield group
                    await self._front.finish.call_one(number, place)
                except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery
                    failed.append(error)
                finally:
                    nursery.cancel_scope.cancel(reason="the block of the group is being left")
                    group.close()
        if failed:
            raise failed.pop()

    def __repr__(self) -> str:
        return f"<process groups of {self._name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ElasticGroups, (self._front, self._name, self._key, self._backend)


async def _watch(replies: Any, group: ElasticGroup) -> None:
    try:
        async for _, (_, _, why) in replies:
            group.end(why)
    except MeshError as error:
        group.end(f"its owner says no more: {error}")


def open_groups(
    procs: ProcMesh, *, least: int = 1, backend: GroupBackend = "gloo"
) -> AbstractAsyncContextManager[ElasticGroups]:
    """Let the actors of an elastic mesh meet in process groups, one after the other.

    There is one group at a time, of all members of the newest view (`ProcMesh.membership`). When a member is lost, or
    `resize` and restarts change who they are, it ends: those that wait in a collective of it get `GroupEnded`, which
    names its epoch, and they form the next one.

    Args:
        procs: Processes of one host, which this process owns.
        least: Members that a group has at least; fewer wait for others.
        backend: "gloo" (members need torch), for `torch.distributed` on tensors of the host; or None: then a group says
            who is in it and when it has ended (`ElasticGroup.on_end`), to groups that you make yourself.

    Raises:
        TypeError: `procs` is no mesh of processes.
        ValueError: A number is out of its bounds, or there is no such backend.
    """
    if not isinstance(procs, ProcMesh):
        raise TypeError(f"open_groups takes a mesh of processes, as spawn_procs gives it, got {procs!r:.100}")
    least = plain_whole(least)
    if least < 1:
        raise ValueError(f"a group has at least one member, got least={least}")
    if backend is not None and backend not in get_args(get_args(GroupBackend)[0]):
        raise ValueError(
            'backend is "gloo", or None for groups of your own, as of NCCL on devices, which on_end ends by an abort; '
            f"got {backend!r}"
        )
    return in_trio_block(_open(procs, least, backend))


@asynccontextmanager
async def _open(procs: ProcMesh, least: int, backend: GroupBackend) -> AsyncGenerator[ElasticGroups, None]:
    engine = GroupsEngine(procs, least)
    name = f"groups of {procs.name}"[: limits.NAME_CHARS_MAX]
    key = hand_over(engine)
    async with this_proc().spawn(name, GroupsFront, key) as front, trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch)
        try:
            yield ElasticGroups(front, procs.name, key, backend)
        finally:
            nursery.cancel_scope.cancel(reason="the block of the groups is being left")
