"""Process groups of elastic meshes: each new set of members ends the group and forms another one.

`from trimesh.service.groups import open_groups`: `async with open_groups(procs) as groups:` in the process that owns
the mesh, `async with groups.joined() as group:` in its actors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio, in_trio_block
from trimesh.actor.actor import Actor
from trimesh.actor.context import context
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import this_proc
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import MeshError, place_name
from trimesh.events import MembershipView
from trimesh.plain_numbers import plain_whole
from trimesh.service.accounts import Answer, Place, RoundKeys, RoundMember, Rounds
from trimesh.service.errors import GroupEnded
from trimesh.service.owner_calls import hand_over, take_over

if TYPE_CHECKING:
    from trimesh.tensor.groups.elastic import DeviceMesh, EpochGroup, MemberGroups

__all__ = ["ElasticGroup", "ElasticGroups", "GroupEnded", "open_groups"]

R = TypeVar("R")
GroupBackend = Literal["gloo"] | None


def open_groups(
    procs: ProcMesh, *, least: int = 1, backend: GroupBackend = "gloo"
) -> AbstractAsyncContextManager[ElasticGroups]:
    """Form process groups of the actors of an elastic mesh, one after the other.

    There is one group at a time, of all members of the newest view (`ProcMesh.membership`). A group ends when a member
    is lost, or `resize` or a restart changes the members: those that wait in one of its collectives get `GroupEnded`,
    which names its epoch, and the members form the next group.

    Args:
        procs: Processes of one host, owned by this process.
        least: Least number of members of a group; fewer wait for others.
        backend: "gloo" (members need torch), for `torch.distributed` on host tensors; or None for groups that you make
            yourself: an `ElasticGroup` then only names its members and reports its end (`ElasticGroup.on_end`).

    Raises:
        TypeError: `procs` is no mesh of processes.
        ValueError: A number is out of its bounds, or there is no such backend.
        RuntimeError: This process does not own `procs`.
    """
    if not isinstance(procs, ProcMesh):
        raise TypeError(f"open_groups takes a mesh of processes, as spawn_procs returns it, got {procs!r:.100}")
    least = plain_whole(least)
    if least < 1:
        raise ValueError(f"least must be at least 1, got {least}")
    if backend is not None and backend not in get_args(get_args(GroupBackend)[0]):
        raise ValueError(
            'backend must be "gloo", or None for groups that you make yourself, such as NCCL, and abort by on_end, got '
            f"{backend!r}"
        )
    return in_trio_block(_open(procs, least, backend))


@asynccontextmanager
async def _open(procs: ProcMesh, least: int, backend: GroupBackend) -> AsyncGenerator[ElasticGroups, None]:
    name = f"groups of {procs.name}"[: limits.NAME_CHARS_MAX]
    views = procs.membership()
    key = hand_over(views)
    async with this_proc().spawn(name, GroupsFront, key, procs.name, least) as front:
        yield ElasticGroups(front, procs.name, key, backend)


class ElasticGroups:
    """The process groups of an elastic mesh, one after the other; a handle for its actors."""

    def __init__(self, front: Any, name: str, key: int, backend: GroupBackend) -> None:
        self._front = front
        self._name = name
        self._key = key
        self._backend = backend

    def joined(self) -> AbstractAsyncContextManager[ElasticGroup]:
        """Join the group of all members of the newest view: `async with groups.joined() as group:`.

        Entering waits until each member of the newest view has joined. When the view changes (a member is lost, joins
        or leaves), or a member leaves the block by an error, the group has *ended*: running and new operations in it
        raise `GroupEnded`, and the members join again. A body that ends well waits until all other bodies have ended
        well, or the group has ended.

        Raises:
            RuntimeError: The caller is not an actor.
            ValueError: This process is in a group already.
            GroupEnded: The group ended while it was being made; join again.
            MeshStopped: The block of the groups is being left.

        Blocking: entering and leaving wait, cancellable.
        """
        return in_trio_block(self._joined())

    @asynccontextmanager
    async def _joined(self) -> AsyncGenerator[ElasticGroup, None]:
        place = _place_of(context().point.items())
        failed: list[Exception] = []
        async with self._front.join.stream(place) as replies:
            _, (number, epoch, places) = await anext(replies)
            shown = [_place_of(one) for one in places]
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
        group.end(f"its owner no longer reports: {error}")


class ElasticGroup:
    """Process group of the members of one epoch. Valid inside its block.

    Attributes:
        epoch: Epoch of the view whose members it has.
        number: Number of the group, increasing: the same members may have several, one after the other.
        places: Coordinates of its members, in the order of their ranks.
        rank: Rank of this member in the group, from 0 to `size - 1`.
        size: Number of members.
    """

    def __init__(self, front: Any, name: str, key: str, epoch: int, places: Sequence[Place], own: Place) -> None:
        self.number = int(key.rpartition("/")[2])
        self._key = key
        self.epoch = epoch
        self.places = [dict(place) for place in places]
        self.rank = list(places).index(own)
        self.size = len(places)
        self._front = front
        self._name = name
        self._ended: GroupEnded | None = None
        self._over = trio.Event()
        self._calls: list[Callable[[], object]] = []
        self._groups: MemberGroups | None = None

    @property
    def process_group(self) -> EpochGroup:
        """The `torch.distributed` group; also the default group of this process, unless there is another one.

        Raises:
            RuntimeError: `open_groups` has `backend=None`.
        """
        return self._made().whole

    def device_mesh(self, label: str | None = None) -> DeviceMesh:
        """Return a device mesh over the members; all of them call it, each in a thread (`run`).

        Args:
            label: Name of its only dimension; None takes the dimensions of the mesh of processes, which must then have
                all its members.

        Raises:
            ShapeError: Members are missing.
            RuntimeError: See `process_group`.
            GroupEnded: The group has ended.
        """
        return self._made().device_mesh(label)

    def _made(self) -> MemberGroups:
        if self._groups is None:
            raise RuntimeError(
                "open_groups(procs, backend=None) makes no process groups: make your own, and abort them by on_end"
            )
        return self._groups

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function in a thread that does collectives, or waits for other members in another way.

        Raises:
            GroupEnded: The group has ended before, or its end made the function fail.
            BaseException: Raised by the function.

        Blocking: a checkpoint. A cancel waits until the function returns, at the latest when the group ends.
        """
        self.check()
        return await in_trio(trio.to_thread.run_sync)(function, *args)

    def check(self) -> None:
        """Raise `GroupEnded` if the group has ended."""
        if self._ended is not None:
            raise self._error()

    async def wait_ended(self) -> None:
        """Wait until the group has ended other than by this block, for a body that does other work meanwhile.

        Blocking: a checkpoint, cancellable.
        """
        await in_trio(self._over.wait)()

    def on_end(self, call: Callable[[], object]) -> None:
        """Register a function (`pg.abort`) to call in Trio, without arguments, when the group ends before its block.

        If the group has ended, this calls the function at once.
        """
        if self._ended is None:
            self._calls.append(call)
        else:
            call()

    # ---- life cycle ------------------------------------------------------------------------------------------

    async def make(self) -> None:
        """Connect the members."""
        from trimesh.tensor.groups.elastic import MemberGroups  # noqa: PLC0415 - imports torch

        token = trio.lowlevel.current_trio_token()
        groups = MemberGroups(self._key, self.places, self.rank, partial(self._ask, token), self._why)
        self.on_end(groups.end)
        self._groups = groups
        await trio.to_thread.run_sync(groups.make, abandon_on_cancel=True)

    def end(self, why: str) -> None:
        """Mark the group as ended, and call the functions of `on_end`, which release waiting operations."""
        if self._ended is None:
            text = f"the process group of epoch {self.epoch} of {self._name} has ended: {why or 'all have finished'}"
            self._ended = GroupEnded(text, epoch=self.epoch)
            self._over.set()
            calls, self._calls = self._calls, []
            for call in calls:
                call()

    def close(self) -> None:
        """Leave the group."""
        self.end("its block was left")
        if self._groups is not None:
            self._groups.close()

    def _error(self) -> GroupEnded:
        assert self._ended is not None
        return GroupEnded(str(self._ended), epoch=self.epoch)

    def _why(self) -> Exception | None:
        return None if self._ended is None else self._error()

    def _ask(
        self,
        token: trio.lowlevel.TrioToken,
        verb: str,
        keys: Sequence[str],
        values: Sequence[bytes] = (),
        numbers: Sequence[int] = (),
        seconds: float | None = None,
    ) -> tuple[int, list[bytes]]:
        """Send a request to the store of the group, from any thread except Trio's; return a number and values."""

        async def ask() -> tuple[int, list[bytes]] | None:
            with trio.fail_after(seconds if seconds is not None else float("inf")):
                return await self._front.ask.call_one(  # type: ignore[no-any-return]
                    self.number, verb, list(keys), list(values), list(numbers)
                )

        found = trio.from_thread.run(ask, trio_token=token)
        if found is None:
            trio.from_thread.run_sync(self.end, "a member left while it was being made", trio_token=token)
            raise self._error()
        return found

    def __repr__(self) -> str:
        return f"<group of epoch {self.epoch}: rank {self.rank} of {self.size}>"


class GroupsFront(Actor):
    """Coordinates the rounds of a mesh, in the process that owns it; members call it."""

    def __init__(self, number: int, name: str, least: int) -> None:
        self.views: AbstractAsyncContextManager[AsyncIterator[MembershipView]] = take_over(number)
        self.mesh_name = name
        self.rounds = Rounds(least)
        self.joined: dict[tuple[int, Place], RoundMember] = {}
        self.news: dict[RoundMember, trio.Event] = {}
        self.keys: dict[int, RoundKeys] = {}
        self.keys_changed = trio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Follow the mesh's membership while the groups are open."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            yield
            nursery.cancel_scope.cancel(reason="the block of the groups is being left")

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="joins")
    async def join(self, place: Place) -> AsyncGenerator[tuple[int, int, Any], None]:
        """Yield number, epoch and places of the next round; at its end number, epoch, and the reason or ""."""
        place = _place_of(place)
        member, changed = self.rounds.join(place)
        self.news[member] = trio.Event()
        self._tell(changed)
        try:
            while not member.number:
                await self.news[member].wait()
            key = member.number, place
            self.joined[key] = member
            try:
                yield member.number, member.epoch, member.places
                await self._wait_over(member)
            finally:
                del self.joined[key]
            yield member.number, member.epoch, member.why
        finally:
            name = place_name(self.mesh_name, dict(place))
            self._tell(self.rounds.leave(member, f"{name} has died, or has left it before the others"))
            del self.news[member]

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="ends")
    async def finish(self, number: int, place: Place) -> None:
        """Mark a member as finished; return when the round is over."""
        member = self.joined.get((number, _place_of(place)))
        if member is not None:
            self._tell(self.rounds.finish(member))
            await self._wait_over(member)

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="keys")
    async def ask(
        self, number: int, verb: str, keys: Sequence[str], values: Sequence[bytes], numbers: Sequence[int]
    ) -> Answer | None:
        """Answer a request to the keys of a round (see `RoundKeys`); None if the round ends first."""
        await trio.lowlevel.checkpoint()
        while (known := self.keys.get(number)) is not None:
            answer = known.ask(verb, keys, values, numbers)
            if answer is not None:
                self._tell_keys()
                return answer
            await self.keys_changed.wait()
        return None

    async def _follow(self) -> None:
        async with self.views as views:
            async for view in views:
                members = [_place_of(point.items()) for point in view.members]
                joined = [_place_of(point.items()) for point in view.joined]
                self._tell(self.rounds.see(view.epoch, members, joined, _what_changed(self.mesh_name, view)))

    async def _wait_over(self, member: RoundMember) -> None:
        while not member.is_over:
            await self.news[member].wait()

    def _tell(self, changed: Iterable[RoundMember]) -> None:
        """Wake members whose round has changed, and requests that wait for keys."""
        for one in changed:
            if one.is_over:
                self.keys.pop(one.number, None)
            else:
                self.keys.setdefault(one.number, RoundKeys())
            if one in self.news:
                self.news[one].set()
                self.news[one] = trio.Event()
        self._tell_keys()

    def _tell_keys(self) -> None:
        self.keys_changed.set()
        self.keys_changed = trio.Event()


def _place_of(point: Iterable[tuple[str, int]]) -> Place:
    """Return coordinates as a hashable value."""
    return tuple((str(label), int(index)) for label, index in point)


def _what_changed(mesh: str, view: MembershipView) -> str:
    left = [f"{place_name(mesh, one.point)} has left ({type(one.reason).__name__})" for one in view.left]
    joined = [f"{place_name(mesh, point)} has joined" for point in view.joined]
    return f"epoch {view.epoch}: {', '.join(left + joined) or 'the members have changed'}"
