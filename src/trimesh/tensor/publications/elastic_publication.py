"""Versions that the members of an elastic mesh publish, whoever they are now."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from trimesh.actor.actor_mesh import ActorMesh
from trimesh.actor.procs.current import current_view
from trimesh.errors import LinkLost, MeshErrorGroup, MeshStopped, ProcDied, ProtocolError, ShapeError, leaves
from trimesh.rdma.publications.published import Published
from trimesh.tensor.publications.state_publication import Publication, rebuild
from trimesh.tensor.publications.state_snapshot import StateSnapshot

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
