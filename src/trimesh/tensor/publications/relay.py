"""Relays of published weights: one process of each host fetches a version, readers on that host read it there.

    publisher --> host 0 --> hosts 2, 3
    publisher --> host 1 --> hosts 4, 5 ...

RL-1 A relay holds whole versions, never parts of two: it pins the version while it reads.
RL-2 A reader whose relay has ended reads from the publisher; so does a relay whose source has ended.
RL-3 When the publisher has died, a relay keeps its versions, also for new readers, until its block is left.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import torch
import trio

from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio_block
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import LinkLost, MeshError, MeshStopped, ProcDied, ProtocolError
from trimesh.rdma.publications.published import Published
from trimesh.tensor.publications.state_publication import Publication, ShardPublisher, publication_of
from trimesh.tensor.publications.state_snapshot import StateSnapshot

_ENDS = (ProcDied, MeshStopped, LinkLost, trio.ClosedResourceError)


class WeightRelay(Actor):
    """Actor that holds the newest versions of a publication, whole."""

    def __init__(self, retain: int) -> None:
        self.shards = ShardPublisher(retain=retain, alone=True)
        self.spare: dict[str, torch.Tensor] = {}

    @endpoint
    def publication(self) -> Published:
        return self.shards.handle

    @endpoint(group="relay")
    async def run(self, origin: Publication, parent: Published | None) -> None:
        """Fetch each version from another relay or the publisher, until the publisher finishes."""
        source = origin if parent is None else publication_of([parent])
        version = 0
        while True:
            try:
                version = await source.wait_newer(version)
                async with source.pin() as snapshot:
                    version = snapshot.version
                    await snapshot.read_into(self._room(snapshot))
                await self.shards.publish(self.spare, version=version)
            except _ENDS as error:
                if source is not origin:
                    source = origin
                    continue
                if isinstance(error, ProcDied | LinkLost):
                    self.shards.finish()  # waiting readers learn the reason from the publisher itself (RL-2, RL-3)
                    return
                break
        await self.shards.aclose()

    def _room(self, snapshot: StateSnapshot) -> Mapping[str, torch.Tensor]:
        """Return tensors of the sizes and types of a version; those of the previous version if they fit."""
        wanted = snapshot.kinds()
        if {name: (tuple(one.size()), one.dtype) for name, one in self.spare.items()} != wanted:
            self.spare = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in wanted.items()}
        return self.spare


class RelayedPublication(Publication):
    """Publication that readers read from the relay on their host. Made by `open_relays`."""

    __slots__ = ("_origin", "_relays")

    _origin: Publication
    _relays: Sequence[Published]

    async def _wait_newer(self, version: int) -> int:
        near = self._near()
        if near is not None:
            try:
                return await near._wait_newer(version)
            except _ENDS:
                pass
        return await self._origin._wait_newer(version)

    @asynccontextmanager
    async def _pin(self, version: int | None) -> AsyncGenerator[StateSnapshot]:
        async with AsyncExitStack() as stack:
            near = self._near()
            snapshot: StateSnapshot | None = None
            if near is not None:
                try:
                    snapshot = await stack.enter_async_context(near._pin(version))
                except _ENDS:
                    pass
            if snapshot is None:
                snapshot = await stack.enter_async_context(self._origin._pin(version))
            yield snapshot

    def _near(self) -> Publication | None:
        """Return the publication of the relay on this host; None if there is no relay."""
        here = current_proc().bulk.host
        found = next((one for one in self._relays if one.host == here), None)
        return None if found is None else publication_of([found])

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_relayed, (self._origin, list(self._relays))

    def __repr__(self) -> str:
        return f"{self._origin!r} by {len(self._relays)} relays"


def rebuild_relayed(origin: Any, relays: Any) -> RelayedPublication:
    """Rebuild a handle on a relayed publication from its pickled fields.

    Raises:
        ProtocolError: The fields are malformed.
    """
    is_list = isinstance(relays, list) and all(isinstance(one, Published) for one in relays)
    if not isinstance(origin, Publication) or not is_list:
        raise ProtocolError("a relayed publication must be named by its origin and its relays")
    made = RelayedPublication.__new__(RelayedPublication)
    made._members, made._publish = origin._members, None
    made._origin, made._relays = origin, relays
    return made


def open_relays(
    weights: Publication, procs: ProcMesh, *, fan_out: int = 2, retain: int = 1
) -> AbstractAsyncContextManager[Publication]:
    """Open relays in a block, so that each host fetches a version only once.

    `async with open_relays(weights, procs.slice(gpus=0)) as relayed:`: one process of each host fetches each version
    whole, from the publisher or from the relay of another host. Readers read it on their host (`relayed.pin()`). So the
    traffic into a host does not grow with its readers, nor the traffic of the publisher with the hosts.

    Args:
        weights: The publication.
        procs: One process of each host; readers on other hosts read from the publisher.
        fan_out: Number of hosts that fetch from one host, the publisher's included.
        retain: Number of the newest versions that a relay keeps. Each takes the memory of the whole state, and so does
            one more that is being written.

    Returns:
        A block that yields a publication, which can be sent to any actor. It ends with the block.

    Raises:
        TypeError: `weights` is not a publication, or `procs` not a mesh of processes.
        ValueError: `fan_out` is below 1, or `retain` out of bounds.
    """
    if not isinstance(weights, Publication):
        raise TypeError(f"open_relays takes a publication, as of publication_of, got {weights!r:.100}")
    if not isinstance(procs, ProcMesh):
        raise TypeError(f"open_relays takes a mesh of processes, one on each host, got {procs!r:.100}")
    if fan_out < 1:
        raise ValueError(f"fan_out must be at least 1, got {fan_out}")
    return in_trio_block(_open(weights, procs, fan_out, retain))


@asynccontextmanager
async def _open(weights: Publication, procs: ProcMesh, fan_out: int, retain: int) -> AsyncGenerator[Publication]:
    async with procs.spawn("weight relays", WeightRelay, retain) as relays, trio.open_nursery() as nursery:
        handles = list((await relays.publication.call()).values())
        for index, point in enumerate(relays.points()):
            parent = None if index < fan_out else handles[index // fan_out - 1]
            nursery.start_soon(_run, relays.slice(**dict(point)), weights, parent)
        try:
            yield rebuild_relayed(weights, handles)
        finally:
            nursery.cancel_scope.cancel(reason="the block of the relays is being left")


async def _run(relay: Any, weights: Publication, parent: Published | None) -> None:
    try:
        await relay.run.call_one(weights, parent)
    except MeshError:
        pass  # RL-2: its readers, and the relays below it, read from the publisher
