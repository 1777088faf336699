"""Actors that publish, and that read what others publish."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import trio

from trimesh import Actor, endpoint
from trimesh._runtime.actors.cell import find_cell
from trimesh._runtime.life.current import current_proc
from trimesh.rdma import Published, VersionGone
from trimesh.rdma.publications.publisher import publications_of


def version_of(number: int, size: int = 3000) -> dict[str, bytes]:
    """Return what a version holds: all its bytes are its number, so that a torn one would show."""
    return {"a": bytes([number % 251]) * size, "b": bytes([number % 251]) * (size // 3)}


def is_torn(tensors: dict[str, Any], number: int) -> bool:
    """Return whether some byte is of another version."""
    return any(data != bytes([number % 251]) * len(data) for data in tensors.values())


def tables() -> tuple[int, int, int]:
    """Return what this process, and the actor that asks, keep."""
    proc, cell = current_proc(), find_cell()
    assert cell is not None, "an actor asks"
    return len(publications_of(proc).left()), len(proc.bulk.registrations()), len(cell.on_end)


def mappings() -> int:
    """Return how many blocks this process has mapped."""
    return Path("/proc/self/maps").read_text().count("trimesh-block")


SMALL, LARGE = 3_000, 300_000
"""Sizes of versions: of one that is copied when it is pinned (RE-6), and of one that is read afterwards."""

READING_TRANSFERS = {SMALL: 0, LARGE: 3}
"""Of a version that is pinned: none, or two tensors and a look at the row."""

PINNING_TRANSFERS = {size: 3 + reading for size, reading in READING_TRANSFERS.items()}
"""The same by a reader that has read before: the cell, the copy of the layout, and a look at the board come first."""

FIRST_TRANSFERS = {size: 5 + pinning for size, pinning in PINNING_TRANSFERS.items()}
"""The same by `Reader.follow`, when it has not: the board, its row, two looks at the lease, one at the version."""


def steps_of(transfers: dict[int, int]) -> list[tuple[int, int]]:
    """Return each size of a version with the number of each transfer."""
    return [(size, nth) for size, count in transfers.items() for nth in range(1, count + 1)]


class Publisher(Actor):
    """Publishes versions."""

    def __init__(self, slots: int = 2, size: int = 3000) -> None:
        self.published = Published(slots=slots)
        self.size = size

    @endpoint
    async def handle(self) -> Any:
        return self.published

    @endpoint
    async def publish(self, first: int, last: int | None = None, *, size: int | None = None) -> int:
        """Publish the versions `first` to `last`, as fast as it goes, from now on of another size."""
        self.size = size or self.size
        for number in range(first, (last or first) + 1):
            version = await self.published.publish(version_of(number, self.size))
            assert version == number
        return last or first

    @endpoint
    async def pid(self) -> int:
        return current_proc().pid

    @endpoint
    async def close(self) -> None:
        await self.published.aclose()

    @endpoint(group="others")
    async def wait_for_ever(self) -> None:
        await trio.sleep_forever()

    @endpoint
    async def forget_readers(self) -> None:
        """Count all that read as ended, as if their links were cut."""
        proc = current_proc()
        for publisher in publications_of(proc)._publishers.values():
            publisher._meet()  # one that has just pinned may not have been seen
            for reader in list(publisher._readers):
                publisher.gone(proc.peer(reader))

    @endpoint
    async def open(self) -> Any:
        """Begin another publication; the one before should be closed."""
        self.published = Published()
        return self.published

    @endpoint
    async def tables(self) -> tuple[int, int, int]:
        """Return how many publications are left, buffers, and things that end with the actor."""
        return tables()


class Follower(Actor):
    """Has a live copy of what is published, and computes with it meanwhile."""

    def __init__(self, size: int = 3000) -> None:
        self.live = {name: bytearray(len(data)) for name, data in version_of(0, size).items()}
        self.mixed = 0
        self.version = 0
        self.taken = trio.Event()

    @endpoint
    async def follow(self, published: Any, last: int | None = None, trainer: Any = None) -> list[int]:
        """Take versions over until `last`, or until the publication ends; return their numbers."""
        seen = list[int]()
        async with trio.open_nursery() as nursery:
            if last is not None and trainer is None:  # a virtual clock would stand still: there is nothing to wait for
                nursery.start_soon(self._compute)
            renew = None if trainer is None else trainer.handle.call_one
            async for version in published.follow(self.live, renew=renew):
                assert not is_torn(self.live, version), "what was taken over is there when its number is"
                seen.append(version)
                self.version = version
                self.taken.set()
                self.taken = trio.Event()
                if version == last:
                    break
            nursery.cancel_scope.cancel()
        return seen

    async def _compute(self) -> None:
        """Look at all of it again and again, as a forward pass does, without a wait in between."""
        while True:
            self.mixed += len({data[at] for data in self.live.values() for at in (0, -1)}) > 1
            await trio.lowlevel.checkpoint()

    @endpoint(group="others")
    async def wait_for(self, version: int) -> int:
        while self.version != version:
            await self.taken.wait()
        return version

    @endpoint(group="others")
    async def count_mixed(self) -> int:
        return self.mixed


class Reader(Actor):
    """Follows a publication."""

    def __init__(self) -> None:
        self.leave = trio.Event()
        self.has_pinned = trio.Event()

    @endpoint
    async def follow(self, published: Any, last: int) -> list[int]:
        """Read versions until `last`; return their numbers, a torn one negated."""
        seen = list[int]()
        while not seen or abs(seen[-1]) < last:
            await published.wait_newer(abs(seen[-1]) if seen else 0)
            async with published.pin() as snapshot:
                tensors = await snapshot.read()
                seen.append(-snapshot.version if is_torn(tensors, snapshot.version) else snapshot.version)
        return seen

    @endpoint
    async def latest(self, published: Any) -> int:
        """Read the latest version; return its number, negated if it is torn."""
        async with published.pin() as snapshot:
            return -snapshot.version if is_torn(await snapshot.read(), snapshot.version) else snapshot.version

    @endpoint
    async def chase(self, published: Any, last: int) -> list[int]:
        """Pin, until `last` is there, the version before the latest, which goes next; return those that were torn."""
        torn, latest = list[int](), 0
        while latest < last:
            latest = await published.wait_newer(latest)
            try:
                async with published.pin(latest - 1) as snapshot:
                    if is_torn(await snapshot.read(), latest - 1):
                        torn.append(latest - 1)
            except VersionGone:
                pass
        return torn

    @endpoint(concurrency=2, group="pins")
    async def hold(self, published: Any, version: int | None = None) -> int:
        """Pin a version until `let_go`; return it, negated if what it holds has changed meanwhile."""
        async with published.pin(version) as snapshot:
            self.has_pinned.set()
            await self.leave.wait()
            return -snapshot.version if is_torn(await snapshot.read(), snapshot.version) else snapshot.version

    @endpoint(group="others", concurrency=4)
    async def pinned(self) -> None:
        await self.has_pinned.wait()

    @endpoint(group="others", concurrency=4)
    async def let_go(self) -> None:
        self.leave.set()

    @endpoint(group="others", concurrency=4)
    async def wait_newer(self, published: Any, version: int) -> int:
        return await published.wait_newer(version)

    @endpoint(group="others", concurrency=4)
    async def mapped(self, most: int | None = None) -> int:
        """Wait until at most so many blocks are mapped here; return how many. A simulation has none."""
        while (found := mappings()) > (found if most is None else most):
            gc.collect()
            await trio.sleep(0.01)
        return found

    @endpoint(group="others", concurrency=4)
    async def tables(self) -> tuple[int, int, int]:
        return tables()

    @endpoint(group="others", concurrency=4)
    async def try_pin(self, published: Any, version: int) -> str:
        """Pin a version for a moment; return its number, or the name of the error."""
        try:
            async with published.pin(version) as snapshot:
                return str(snapshot.version)
        except Exception as error:  # noqa: BLE001 - whatever it is
            return type(error).__name__
