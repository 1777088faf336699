"""`publication`: versions of the tensors of a mesh, which other processes read in place and never torn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import torch
import trio

from trimesh import limits
from trimesh._runtime.actors import find_cell
from trimesh._runtime.life import current_proc
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

    Made by `trimesh.publication`. Sent to other processes, it arrives as a handle for reading. A version is available
    when every rank has published its part. A reader pins it on all ranks, so it never gets parts of two versions.
    """

    __slots__ = ("_members", "_publish")

    _members: ValueMesh[Published]
    _publish: Callable[[], Awaitable[int]] | None

    def __init__(self) -> None:
        raise TypeError("a publication must be opened: write `async with trimesh.publication(model) as weights:`")

    async def publish(self) -> int:
        """Copy the tensors, as they are after all operations issued before, and make them the latest version.

        Returns:
            The version's number; numbers start at 1 and grow by 1.

        Raises:
            MeshErrorGroup: A tensor could not be computed or copied, or a process has ended; no reader will see this
                version.
            TypeError, ValueError: The tensors are no longer a set of tensors on this mesh.
            RuntimeError: This is a handle; only the process that made the publication can publish.

        Blocking: a checkpoint, cancellable; the ranks go on. A rank waits, before it executes its next operation, while
        readers have all of its versions but the latest pinned.
        """
        if self._publish is None:
            raise RuntimeError(
                "only the object of `async with trimesh.publication(...)` can publish, got a handle on it"
            )
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
                scope.cancel()  # the others may never have anything newer

        async with trio.open_nursery() as nursery:
            for member in self._members.values():
                nursery.start_soon(wait, member, nursery.cancel_scope)
        if errors:
            raise errors[0]
        return min(found)

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[StateSnapshot]:
        """Pin a version while a block is open: `async with weights.pin() as snapshot:`.

        Args:
            version: Its number; None pins the latest, and waits for the first one.

        Raises:
            VersionGone: A rank no longer has `version`, or never had it.
            trio.ClosedResourceError, ProcDied, MeshStopped, LimitExceeded, LinkLost: As `Published.pin`.

        Blocking: entering and leaving are checkpoints; a cancelled block releases the pin, too.
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
                seen = latest  # a rank has overwritten it or never had it: wait for a later one
            yield await state_snapshot(latest, parts)

    def follow(
        self,
        target: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        version: int = 0,
        lock: AbstractAsyncContextManager[Any] | None = None,
        renew: Callable[[], Awaitable[Publication]] | None = None,
    ) -> Following:
        """Update a model with each new version, all of it at once: `async for version in weights.follow(model):`.

        Args:
            target: A module, or a mapping of whole tensors: some of the published names, or all. A reader with parts
                (`ShardOf` or `DTensor`) pins versions and calls `read_into` instead.
            version: Only versions above this number are read.
            lock: Held while the tensors are changed, as in `Published.follow`.
            renew: Returns the successor of a publication that has ended, as in `Published.follow`.

        Raises and blocks as `Published.follow`.
        """
        return Following(self, target, version, lock, renew)

    def shard(self, coordinates: Mapping[str, int] | None = None, /, **coords: int) -> Published:
        """Return the publication of one rank: its own tensors, and its parts of global ones, by name.

        Raises:
            ShapeError: No rank has these coordinates.
        """
        return self._members.item(**{**(coordinates or {}), **coords})

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (self._members,)

    def __repr__(self) -> str:
        return f"<publication of {len(self._members)} ranks>"


def rebuild(members: Any) -> Publication:
    """Rebuild a handle on a publication from its pickled fields.

    Raises:
        ProtocolError: The fields are malformed.
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
    """Publish versions of tensors on a mesh: `async with trimesh.publication(model) as weights:`.

    Args:
        tensors: A module on the mesh, for its state dict, or a mapping of tensors by name. It is kept, and read in each
            `publish`.
        slots: Versions that have memory on the ranks at one time, at least 2; see `Published`.

    Returns:
        A block that yields the `Publication`, which actors receive and read. It is closed when the block is left.

    Raises:
        TypeError: There is no mesh tensor, or they are not all on the same ranks.
        ValueError: `slots` is not 2 to `limits.PUBLISHED_SLOTS_MAX`.
        MeshErrorGroup: A process has ended.

    Example:
        async with trimesh.publication(model) as weights:
            await generators.follow.call(weights)
            optimizer.step()
            await weights.publish()
    """
    if not 2 <= slots <= limits.PUBLISHED_SLOTS_MAX:
        raise ValueError(f"slots must be 2 to {limits.PUBLISHED_SLOTS_MAX}, got {slots}")
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
                pass  # the processes have ended, so nothing is left to close


async def _asked(team: Team, kernel: str, *args: Any) -> list[Any]:
    places = range(len(team.peers))
    request = team.engine.ask(team, places, lambda number: call_kernel(team, kernel, *args, number), ANYTHING)
    found = await answers(request)
    return [found[place] for place in places]


def _named(tensors: Any, team: Team | None) -> tuple[Team, _Names, list[MeshTensor]]:
    """Return the team of some tensors, their names, and the tensors."""
    state: Mapping[str, Any] = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
    if not isinstance(state, Mapping) or not state:
        raise TypeError(f"publication takes a module, or a mapping of names to mesh tensors, got {state!r:.100}")
    found: list[MeshTensor] = []
    for name, value in state.items():
        if not isinstance(name, str) or name == LAYOUT:
            raise TypeError(f"names of published tensors must be strings, and not {LAYOUT!r}, got {name!r}")
        found.append(checked(value))
        team = team or found[0]._held.team
        if found[-1]._held.team is not team:
            raise TypeError(f"tensors of a publication must be on the same ranks, {team.name}, got {name!r}: {value!r}")
        if found[-1]._meta.is_global:
            checked_team(team)
    assert team is not None
    return team, _Names(state), found


class _Names(tuple[str, ...]):
    """Names of tensors, as an operand of an operation."""

    __slots__ = ()


# ---- publications of elastic meshes, whose members change ------------------------------------------------------------

_GONE = (ProcDied, MeshStopped, LinkLost, trio.ClosedResourceError)
"""Errors of a handle on a member that has left."""


class ElasticPublication(Publication):
    """Publication of a mesh of actors that grows, shrinks and loses members.

    Made by `elastic_publication`. A version is available when all current members have published it, and their parts
    cover each tensor: after a change, that is the first version in the new layout.
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
                        seen = max(latest, snapshot.version)  # members have changed since: the next one is whole
                except _GONE:
                    await self._renewed(source)
            yield snapshot

    async def _source(self) -> Publication:
        """Return the publication of the current members."""
        points = list((await current_view(self._mesh)).alive().points())
        if self._found is None or self._found[0] != points:
            self._found = await self._ask()
        return self._found[1]

    async def _renewed(self, source: Publication) -> None:
        """Query the current members after an error of one that is gone; called while that error is handled.

        Raises:
            Exception: That error, if the members are unchanged.
        """
        found = await self._ask()
        if list(found[1]._members.values()) == list(source._members.values()):
            raise  # noqa: PLE0704 - the error that its caller handles
        self._found = found

    async def _ask(self) -> tuple[list[Any], Publication]:
        """Query the current members for their handles."""
        while True:
            mesh: Any = await current_view(self._mesh)
            alive = mesh.alive()
            points = list(alive.points())
            if not points:
                await _restarted(mesh)
                continue
            try:
                return points, rebuild(await getattr(alive, self._endpoint).call())
            except MeshErrorGroup as group:
                is_gone = all(isinstance(leaf, _GONE) for leaf in leaves(group))
                if not is_gone or points == list((await current_view(self._mesh)).alive().points()):
                    raise  # otherwise query again: a member has just left

    def shard(self, coordinates: Any = None, /, **coords: int) -> Published:
        """Refuse: the ranks of an elastic publication change."""
        raise ShapeError("an elastic publication has no fixed ranks: get the handle of the member's own publication")

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_elastic, (self._mesh, self._endpoint)

    def __repr__(self) -> str:
        return f"<publication of the members of {self._mesh!r}>"


async def _restarted(mesh: Any) -> None:
    """Wait until those of a mesh's members that are being restarted have been; none is live.

    Raises:
        MeshStopped: Still none is.
    """
    view = mesh._view
    await view.membership(current_proc()).settle(view.ranks)
    if not list(mesh.alive().points()):
        raise MeshStopped(f"an elastic publication needs a member, but none of {mesh.name} is left")


def rebuild_elastic(mesh: Any, endpoint: Any) -> ElasticPublication:
    """Rebuild a handle on an elastic publication from its pickled fields.

    Raises:
        ProtocolError: The fields are malformed.
    """
    if not isinstance(mesh, ActorMesh) or not isinstance(endpoint, str):
        raise ProtocolError("an elastic publication must be named by a mesh of actors and an endpoint")
    made = ElasticPublication.__new__(ElasticPublication)
    made._publish, made._mesh, made._endpoint, made._found = None, mesh, endpoint, None
    return made


def elastic_publication(publishers: Any, endpoint: str = "publication") -> Publication:
    """Return a handle on the publication of a mesh whose members join, leave and restart.

    `weights = elastic_publication(trainers)` is like `publication_of(await trainers.publication.call())`, but readers
    query the members again when one has joined or left. It can be sent to any actor.

    Args:
        publishers: Actors, each with a `ShardPublisher`.
        endpoint: Name of their endpoint that returns the `handle` of the `ShardPublisher`.

    Raises:
        TypeError: `publishers` is not a mesh of actors.
        AttributeError: They have no such endpoint.

    Cost: each `pin` queries the owner of the mesh for its members.
    """
    if not isinstance(publishers, ActorMesh):
        raise TypeError(f"elastic_publication takes a mesh of actors, got {publishers!r:.100}")
    getattr(publishers, endpoint)
    return rebuild_elastic(publishers, endpoint)


# ---- tensors sharded over actors: each publishes its parts, readers read them as one publication ---------------------


class ShardPublisher:
    """Publisher of one rank's parts of a set of tensors: an FSDP rank, an actor of a tensor parallel group.

    Each rank makes one in its actor, and publishes its parts under the same version numbers. With the handles of all
    ranks, `publication_of` reads whole versions. It ends with the actor that made it.

    Args:
        retain: Number of the newest versions that stay readable, at least 1, even while ranks are one version apart.
            Each has its own memory, so later changes by the optimizer do not affect it.
        alone: Whether its versions are read separately, not combined with those of other members of its mesh.

    Raises:
        ValueError: `retain` is not 1 to `limits.PUBLISHED_SLOTS_MAX - 1`.
        RuntimeError: No mesh is open here.

    Attributes:
        handle: The handle for readers of this rank; return it from an endpoint.

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
            raise ValueError(f"retain must be 1 to {limits.PUBLISHED_SLOTS_MAX - 1}, got {retain}")
        self.handle = Published(slots=retain + 1)
        self._is_alone = alone

    async def publish(self, tensors: Mapping[str, torch.Tensor | ShardOf], *, version: int | None = None) -> int:
        """Copy this rank's parts of tensors, and make them its latest version; return the version's number.

        Readers get a version once every rank has published it.

        Args:
            tensors: By name, with the same names on all ranks: a `ShardOf`, a `DTensor`, or a whole tensor that no
                other rank publishes. They must not be written to during the call.
            version: Number of the version, the same on all ranks; None for one more than the last.

        Raises:
            ValueError: This is not the first member of its mesh, and all tensors are whole: the first member publishes
                them already.

        Raises and blocks as `Published.publish`.
        """
        if not self._is_alone:
            _check_replica(tensors)
        parts: list[PartOfState] = []
        local: dict[str, Any] = {}
        for name, value in tensors.items():
            if not isinstance(name, str) or name == LAYOUT:
                raise TypeError(f"names of published tensors must be strings, and not {LAYOUT!r}, got {name!r}")
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
        """Announce that no version follows; existing ones can be read and pinned until `aclose`."""
        finish(self.handle)

    async def aclose(self) -> None:
        """Close the publication; see `Published.aclose`."""
        await self.handle.aclose()


def _check_replica(tensors: Mapping[str, Any]) -> None:
    """Refuse the whole state of a replica: readers would find each part several times."""
    cell = find_cell()
    if cell is None or not tensors or cell.spec.point.rank == 0:
        return
    if any(isinstance(one, ShardOf) or hasattr(one, "placements") for one in tensors.values()):
        return
    raise ValueError(
        f"each part of a publication must be published by one rank, got whole tensors on "
        f"{place_name(cell.spec.name, cell.spec.point)}, which is not the first: on other replicas publish "
        "ShardOf(tensor, size=tensor.shape, start=[0] * tensor.dim(), is_first=False) under the same names; for "
        "replicas that are read one by one write ShardPublisher(alone=True)"
    )


def publication_of(handles: ValueMesh[Published] | Iterable[Published]) -> Publication:
    """Combine the handles of several ranks into one publication: `publication_of(await trainers.handle.call())`.

    It can be sent to any actor. A version is available when every rank has published it, and a reader pins it on all of
    them, so it never gets parts of two versions. After the restart of a rank make another one, with its new handle.

    Args:
        handles: `ShardPublisher.handle` of every rank.

    Raises:
        ProtocolError: There are none, or one of them is not a handle.
    """
    if not isinstance(handles, ValueMesh):
        found = list(handles)
        handles = ValueMesh(Region(Extent({"ranks": len(found)})), found)
    return rebuild(handles)
