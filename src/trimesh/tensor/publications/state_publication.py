"""`publication`: versions of the tensors of a mesh that other processes follow, read where they lie, never torn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import torch
import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio, in_trio_block
from trimesh.errors import MeshError, MeshErrorGroup, ProtocolError, TrimeshError
from trimesh.rdma.publications.published import Following, Published
from trimesh.rdma.publications.reading import VersionGone
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller.answers import answers
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.expected import ANYTHING
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.fetching import checked
from trimesh.tensor.ops.global_tensor import checked_team
from trimesh.tensor.protocol.state_layout import LAYOUT
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
