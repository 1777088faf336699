"""`publication`: versions of the tensors of a mesh that other processes follow, read where they lie, never torn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import torch
import trio

from trimesh import limits
from trimesh._runtime.actors import find_cell
from trimesh._runtime.tasks import in_trio, in_trio_block
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.proc_mesh import current_view
from trimesh.errors import (
    LinkLost,
    MeshError,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    ProtocolError,
    ShapeError,
    TrimeshError,
    leaves,
    place_name,
)
from trimesh.plain_numbers import plain_whole
from trimesh.rdma.publications.published import Following, Published, finish
from trimesh.rdma.publications.reading import VersionGone
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller.engine import answers
from trimesh.tensor.controller.shapes import ANYTHING, ShardOf, shard_of
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.fetching import checked
from trimesh.tensor.ops.global_tensor import checked_team
from trimesh.tensor.protocol.placement import LAYOUT, PartOfState
from trimesh.tensor.publications.state_snapshot import StateSnapshot, state_snapshot


class Publication:
    """Versions of a set of named tensors on a mesh: its ranks publish them, many processes read.

    Made by `trimesh.publication`. Sent to other processes, it arrives as a handle by which they read. A version is
    there when every rank has published its part; a reader pins it on all of them, so that it never gets parts of two.
    """

    __slots__ = ("_members", "_publish")

    _members: ValueMesh[Published]
    _publish: Callable[[], Awaitable[int]] | None

    def __init__(self) -> None:
        raise TypeError("a publication is made by `async with trimesh.publication(model) as weights:`")

    async def publish(self) -> int:
        """Copy the tensors as they are now, after all that was issued before, and make them the latest version.

        Returns:
            Its number: one more each time, from 1.

        Raises:
            MeshErrorGroup: A tensor could not be computed or copied, or a process has ended; no reader will see this
                version.
            TypeError, ValueError: What is to be published is no set of tensors on this mesh any more.
            RuntimeError: This is a handle: the process that has made it publishes.

        Blocking: a checkpoint, cancellable; the ranks go on. A rank waits, before it executes what comes next, while
        readers have all of its versions but the latest pinned.
        """
        if self._publish is None:
            raise RuntimeError("a handle on a publication reads: publish by the object that trimesh.publication() gave")
        return await in_trio(self._publish)()

    async def wait_newer(self, version: int = 0) -> int:
        """Wait until every rank has published a version above `version`; return the number of the latest.

        Raises and blocks as `Published.wait_newer`.
        """
        return await in_trio(self._wait_newer)(version)

    async def _wait_newer(self, version: int) -> int:
        found: list[int] = []
        errors: list[Exception] = []

        async def wait(member: Published, scope: trio.CancelScope) -> None:
            try:
                found.append(await member.wait_newer(version))
            except (TrimeshError, trio.ClosedResourceError) as error:
                errors.append(error)
                scope.cancel()  # the others may have nothing newer for as long as they live

        async with trio.open_nursery() as nursery:
            for member in self._members.values():
                nursery.start_soon(wait, member, nursery.cancel_scope)
        if errors:
            raise errors[0]
        return min(found)

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[StateSnapshot]:
        """Keep a version as it is for as long as a block: `async with weights.pin() as snapshot:`.

        Args:
            version: Which; by default the latest, for the first of which it waits.

        Raises:
            VersionGone: `version` is not there any more, or was never, on one of the ranks.
            trio.ClosedResourceError, ProcDied, MeshStopped, LimitExceeded, LinkLost: As `Published.pin`.

        Blocking: entering and leaving it are checkpoints; it is given back also when the block is cancelled.
        """
        return in_trio_block(self._pin(version))

    @asynccontextmanager
    async def _pin(self, version: int | None) -> AsyncGenerator[StateSnapshot]:
        seen = 0
        async with AsyncExitStack() as stack:
            while True:
                latest = await self._wait_newer(seen) if version is None else version
                try:
                    async with AsyncExitStack() as pins:
                        parts = [await pins.enter_async_context(one.pin(latest)) for one in self._members.values()]
                        stack.push_async_exit(pins.pop_all())
                    break
                except VersionGone:
                    if version is not None:
                        raise
                seen = latest  # one rank has gone on already, or never had it: the others get there
            yield await state_snapshot(latest, parts)

    def follow(
        self,
        target: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        version: int = 0,
        lock: AbstractAsyncContextManager[Any] | None = None,
        renew: Callable[[], Awaitable[Publication]] | None = None,
    ) -> Following:
        """Let a model take over each new version, all of it in one step: `async for version in weights.follow(model):`.

        Args:
            target: A module, or a mapping of whole tensors: some of the published names, or all. A reader that has
                parts, as `ShardOf` or `DTensor`, pins versions and calls `read_into`.
            version: The first that is taken over is above it.
            lock: Entered while the tensors are changed, as of `Published.follow`.
            renew: Returns the publication that takes the place of one that has ended, as of `Published.follow`.

        Raises and blocks as `Published.follow`.
        """
        return Following(self, target, version, lock, renew)

    def shard(self, coordinates: Mapping[str, int] | None = None, /, **coords: int) -> Published:
        """Return what one rank publishes: its own tensors, and its parts of global ones, by their names.

        Raises:
            ShapeError: The coordinates are of no rank.
        """
        return self._members.item(**{**(coordinates or {}), **coords})

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (self._members,)

    def __repr__(self) -> str:
        return f"<publication of {len(self._members)} ranks>"


def rebuild(members: Any) -> Publication:
    """Return a handle on a publication.

    Raises:
        ProtocolError: The fields name none.
    """
    if not isinstance(members, ValueMesh) or not all(isinstance(one, Published) for one in members.values()):
        raise ProtocolError("a publication of a mesh must be named by those of its ranks")
    return _publication(members, None)


def _publication(members: ValueMesh[Published], publish: Callable[[], Awaitable[int]] | None) -> Publication:
    made = Publication.__new__(Publication)
    made._members, made._publish = members, publish
    return made


def publication(
    tensors: torch.nn.Module | Mapping[str, torch.Tensor], *, slots: int = 2
) -> AbstractAsyncContextManager[Publication]:
    """Publish tensors on a mesh, again and again: `async with trimesh.publication(model) as weights:`.

    Args:
        tensors: A module on the mesh, of which the state is published, or a mapping of tensors by their names. It is
            kept and looked at in each `publish`.
        slots: How many versions have memory on the ranks, from 2; see `Published`.

    Returns:
        A block that yields the `Publication`: to be sent to actors, who read it. It is closed when the block is left.

    Raises:
        TypeError: There is no mesh tensor, or one that is not on the same ranks as the others.
        ValueError: `slots` is not 2 to `limits.PUBLISHED_SLOTS_MAX`.
        MeshErrorGroup: A process has ended.

    Example:
        async with trimesh.publication(model) as weights:
            await generators.follow.call(weights)
            optimizer.step()
            await weights.publish()
    """
    if not 2 <= slots <= limits.PUBLISHED_SLOTS_MAX:
        raise ValueError(f"a publication has 2 to {limits.PUBLISHED_SLOTS_MAX} slots, got {slots}")
    team, _, _ = _named(tensors, None)
    return in_trio_block(_opened(tensors, team, slots))


@asynccontextmanager
async def _opened(tensors: Any, team: Team, slots: int) -> AsyncGenerator[Publication]:
    number, version = team.engine.shapes.new_number(), 0

    async def publish() -> int:
        nonlocal version
        _, names, values = _named(tensors, team)
        version += 1
        mine = version
        await _asked(team, "publish", values, names, number, mine)
        return mine

    handles = await _asked(team, "publication_open", number, slots)
    try:
        yield _publication(ValueMesh(team.region, handles), publish)
    finally:
        with trio.move_on_after(limits.REVOKE_SECONDS, shield=True):
            try:
                await _asked(team, "publication_close", number)
            except (MeshError, MeshErrorGroup):
                pass  # with the processes that have ended nothing is left to be closed


async def _asked(team: Team, kernel: str, *args: Any) -> list[Any]:
    places = range(len(team.peers))
    request = team.engine.ask(team, places, lambda number: call_kernel(team, kernel, *args, number), ANYTHING)
    found = await answers(request)
    return [found[place] for place in places]


def _named(tensors: Any, team: Team | None) -> tuple[Team, _Names, list[MeshTensor]]:
    """Return the ranks that some tensors are on, their names, and them."""
    state: Mapping[str, Any] = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
    if not isinstance(state, Mapping) or not state:
        raise TypeError(f"a module, or a mapping of tensors by their names, is published, got {state!r:.100}")
    found: list[MeshTensor] = []
    for name, value in state.items():
        if not isinstance(name, str) or name == LAYOUT:
            raise TypeError(f"published tensors are named by texts other than {LAYOUT!r}, got {name!r}")
        found.append(checked(value))
        team = team or found[0]._held.team
        if found[-1]._held.team is not team:
            raise TypeError(f"all tensors of a publication are on the same ranks, {team.name}, got {name!r}: {value!r}")
        if found[-1]._meta.is_global:
            checked_team(team)
    assert team is not None
    return team, _Names(state), found


class _Names(tuple[str, ...]):
    """Names that are part of an operation."""

    __slots__ = ()


# ---- versions that the members of an elastic mesh publish, whoever they are now --------------------------------------

_GONE = (ProcDied, MeshStopped, LinkLost, trio.ClosedResourceError)
"""What a handle on a member raises that has left."""


class ElasticPublication(Publication):
    """A publication that follows a mesh of actors as that grows, shrinks and loses members.

    Made by `elastic_publication`. A version counts when all members of the moment have published it, and their parts
    are all of each tensor: after a change that is the first one that they publish in their new layout.
    """

    __slots__ = ("_endpoint", "_found", "_mesh")

    _mesh: ActorMesh
    _endpoint: str
    _found: tuple[list[Any], Publication] | None

    async def _wait_newer(self, version: int) -> int:
        while True:
            source = await self._source()
            try:
                found = await source._wait_newer(version)
            except _GONE:
                await self._renewed(source)
                continue
            if await self._source() is source:
                return found

    @asynccontextmanager
    async def _pin(self, version: int | None) -> AsyncGenerator[StateSnapshot]:
        seen = 0
        async with AsyncExitStack() as stack:
            while True:
                latest = await self._wait_newer(seen) if version is None else version
                source = await self._source()
                try:
                    async with AsyncExitStack() as pins:
                        snapshot = await pins.enter_async_context(source._pin(version))
                        if version is not None or snapshot.is_whole:
                            stack.push_async_exit(pins.pop_all())
                            break
                        seen = max(latest, snapshot.version)  # of members that were others: the next one is whole
                except _GONE:
                    await self._renewed(source)
            yield snapshot

    async def _source(self) -> Publication:
        """Return the publication of those that are members now."""
        points = list((await current_view(self._mesh)).alive().points())
        if self._found is None or self._found[0] != points:
            self._found = await self._ask()
        return self._found[1]

    async def _renewed(self, source: Publication) -> None:
        """Find out who has come in place of members that are gone; called while their error is handled.

        Raises:
            Exception: That error, if the members are the same.
        """
        found = await self._ask()
        if list(found[1]._members.values()) == list(source._members.values()):
            raise  # noqa: PLE0704 - the error that its caller handles
        self._found = found

    async def _ask(self) -> tuple[list[Any], Publication]:
        """Ask the members that are there now for their handles."""
        while True:
            alive: Any = (await current_view(self._mesh)).alive()
            points = list(alive.points())
            if not points:
                raise MeshStopped(f"no member of {self._mesh.name} is left that publishes")
            try:
                return points, rebuild(await getattr(alive, self._endpoint).call())
            except MeshErrorGroup as group:
                is_gone = all(isinstance(leaf, _GONE) for leaf in leaves(group))
                if not is_gone or points == list((await current_view(self._mesh)).alive().points()):
                    raise  # else a member has left that was not known to have

    def shard(self, coordinates: Any = None, /, **coords: int) -> Published:
        """Refuse: whose parts they are changes."""
        raise ShapeError("an elastic publication has no fixed ranks: ask the member itself for what it publishes")

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_elastic, (self._mesh, self._endpoint)

    def __repr__(self) -> str:
        return f"<publication of the members of {self._mesh!r}>"


def rebuild_elastic(mesh: Any, endpoint: Any) -> ElasticPublication:
    """Return a handle on an elastic publication.

    Raises:
        ProtocolError: The fields name none.
    """
    if not isinstance(mesh, ActorMesh) or not isinstance(endpoint, str):
        raise ProtocolError("an elastic publication must be named by a mesh of actors and an endpoint")
    made = ElasticPublication.__new__(ElasticPublication)
    made._publish, made._mesh, made._endpoint, made._found = None, mesh, endpoint, None
    return made


def elastic_publication(publishers: Any, endpoint: str = "publication") -> Publication:
    """Return a handle on what the members of a mesh publish, as that grows, shrinks, and is restarted.

    `weights = elastic_publication(trainers)`: like `publication_of(await trainers.publication.call())`, but readers ask
    again when a member has come or gone. It may be sent to any actor.

    Args:
        publishers: Actors, each with a `ShardPublisher`.
        endpoint: Name of their endpoint that returns its `handle`.

    Raises:
        TypeError: `publishers` is no mesh of actors.
        AttributeError: They have no such endpoint.

    Cost: each `pin` asks the owner of the mesh who is there.
    """
    if not isinstance(publishers, ActorMesh):
        raise TypeError(f"an elastic publication is of a mesh of actors, got {publishers!r:.100}")
    getattr(publishers, endpoint)
    return rebuild_elastic(publishers, endpoint)


# ---- versions of tensors whose parts several actors have: each publishes its own, readers get them as one ------------


class ShardPublisher:
    """What one of several ranks publishes of a set of tensors: an FSDP rank, an actor of a tensor parallel group.

    Each rank makes one in its actor, and publishes its parts under the same numbers. Who has the handles of all of them
    reads whole versions, by `publication_of`. It ends with the actor that made it.

    Args:
        retain: How many of the newest versions stay readable, from 1; ranks may be one version apart besides. Each has
            memory of its own, so what the optimizer changes afterwards does not touch it.
        alone: Whether its versions are read by themselves, not as one with those of other members of its mesh.

    Raises:
        ValueError: `retain` is not 1 to `limits.PUBLISHED_SLOTS_MAX - 1`.
        RuntimeError: No mesh is open here.

    Attributes:
        handle: What readers need of this rank: an endpoint returns it.

    Example:
        self.shards = ShardPublisher()                                   # in each trainer; an endpoint returns .handle
        await self.shards.publish(self.model.state_dict(), version=step)   # of DTensors, say

        weights = publication_of(await trainers.handle.call())           # anywhere
        async with weights.pin() as snapshot:
            await snapshot.read_into({"w": ShardOf(mine, size=(4096, 1024), start=(0, 512))})
    """

    def __init__(self, *, retain: int = 1, alone: bool = False) -> None:
        retain = plain_whole(retain)
        if not 1 <= retain < limits.PUBLISHED_SLOTS_MAX:
            raise ValueError(f"1 to {limits.PUBLISHED_SLOTS_MAX - 1} versions are retained, got {retain}")
        self.handle = Published(slots=retain + 1)
        self._is_alone = alone

    async def publish(self, tensors: Mapping[str, torch.Tensor | ShardOf], *, version: int | None = None) -> int:
        """Copy this rank's parts of tensors, and make them its latest version; return its number.

        A version is there for readers once every rank has published it.

        Args:
            tensors: By name, the same names on all ranks: each a `ShardOf`, a `DTensor`, or a whole tensor that this
                rank alone publishes whole. They must not be written to meanwhile.
            version: Its number, the same on all ranks; None for one more than the last.

        Raises:
            ValueError: This is not the first member of its mesh, and all tensors are whole: then the first one has
                published them, too.

        Raises and blocks as `Published.publish`.
        """
        if not self._is_alone:
            _check_replica(tensors)
        parts: list[PartOfState] = []
        local: dict[str, Any] = {}
        for name, value in tensors.items():
            if not isinstance(name, str) or name == LAYOUT:
                raise TypeError(f"published tensors are named by texts other than {LAYOUT!r}, got {name!r}")
            one = shard_of(value)
            is_here = one.is_first and one.box.count > 0
            parts.append(
                PartOfState(
                    name,
                    is_global=True,
                    dtype=str(one.tensor.dtype).removeprefix("torch."),
                    size=one.size,
                    start=one.box.start,
                    part=one.box.size,
                    is_here=is_here,
                )
            )
            if is_here:
                local[name] = one.tensor.detach().contiguous()
        return await self.handle.publish({LAYOUT: bytearray(msgspec.msgpack.encode(parts)), **local}, version=version)

    def finish(self) -> None:
        """Say that no version follows; those that are there are read and pinned until `aclose`."""
        finish(self.handle)

    async def aclose(self) -> None:
        """Publish nothing any more; see `Published.aclose`."""
        await self.handle.aclose()


def _check_replica(tensors: Mapping[str, Any]) -> None:
    """Refuse the whole state of a replica, of which readers would find each part several times."""
    cell = find_cell()
    if cell is None or not tensors or cell.spec.point.rank == 0:
        return
    if any(isinstance(one, ShardOf) or hasattr(one, "placements") for one in tensors.values()):
        return
    raise ValueError(
        f"each part of a publication is published by one rank, got whole tensors on "
        f"{place_name(cell.spec.name, cell.spec.point)}, which is not the first: of replicas the others publish "
        "ShardOf(tensor, size=tensor.shape, start=[0] * tensor.dim(), is_first=False) under the same names, and "
        "replicas that are read one by one have ShardPublisher(alone=True)"
    )


def publication_of(handles: ValueMesh[Published] | Iterable[Published]) -> Publication:
    """Return a handle on what several ranks publish as one: `publication_of(await trainers.handle.call())`.

    It may be sent to any actor. A version is there when every rank has published it, and pinned on all of them, so no
    reader ever gets parts of two. When one of the ranks has been restarted, make another one, with its new handle.

    Args:
        handles: `ShardPublisher.handle` of every rank.

    Raises:
        ProtocolError: There are none, or one of them is something else.
    """
    if not isinstance(handles, ValueMesh):
        found = list(handles)
        handles = ValueMesh(Region(Extent({"ranks": len(found)})), found)
    return rebuild(handles)
