"""A publisher and its readers while any of them is killed and transfers are late: whole versions, or errors of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from tests.conformance.publishing import is_torn, version_of

import trimesh
from trimesh import Actor, LinkLost, MeshStopped, ProcDied, endpoint
from trimesh.rdma import Published, VersionGone
from trimesh.testing import simulate

OURS = (ProcDied, MeshStopped, LinkLost, trio.ClosedResourceError)
SLOTS = 3
SIZES = (300, 60_000)
"""One that is copied when it is pinned, and one that is read afterwards."""
READERS = 3


class Trainer(Actor):
    """Publishes one version after the other; a new incarnation begins at 1."""

    def __init__(self) -> None:
        self.weights = Published(slots=SLOTS)
        self.version = 0

    @endpoint
    async def handle(self) -> Any:
        return self.weights

    @endpoint(group="publishing")
    async def publish(self, seconds: float) -> int:
        """Publish the next version; give up after so many seconds, as a cancelled caller does."""
        with trio.move_on_after(seconds):
            size = SIZES[self.version % len(SIZES)]
            self.version = await self.weights.publish(version_of(self.version + 1, size))
        return self.version


class Generator(Actor):
    """Reads versions."""

    @endpoint
    async def read(self, weights: Any, seen: int, pause: float) -> int:
        """Take the latest version, or one before it, and think about it for a while; return its number."""
        latest = await weights.wait_newer(seen)
        async with weights.pin(max(1, latest - 1) if pause > 1 else None) as snapshot:
            before = await snapshot.read()
            await trio.sleep(pause)
            after = await snapshot.read()
            for tensors in (before, after):
                assert not is_torn(tensors, snapshot.version), f"version {snapshot.version} is torn"
        return latest


async def publish_on(trainer: Any, draw: Any) -> None:
    """Publish until cancelled, whatever becomes of the trainer."""
    while True:
        try:
            await trainer.publish.call_one(draw.choice((0.001, 0.1, 5)))
        except OURS:
            pass
        await trio.sleep(draw.uniform(0, 0.3))


async def read_on(trainer: Any, generator: Any, draw: Any, note: Callable[[str], object]) -> None:
    """Read until cancelled; a handle that is of no use any more is asked for anew."""
    while True:
        seen = 0
        try:
            weights = await trainer.handle.call_one()
            while True:
                seen = await generator.read.call_one(weights, seen, draw.choice((0.05, 0.2, 2)))
                note("a version was read")
        except VersionGone:
            note("a version was gone")
        except OURS as error:
            note(f"a reader got {type(error).__name__}")
            await trio.sleep(0.1)


async def until_it_works(work: Callable[[], Awaitable[int]]) -> int:
    """Return what comes of it once nobody is being killed any more."""
    while True:
        try:
            return await work()
        except OURS:
            await trio.sleep(0.1)


@simulate(
    seeds=15,
    per_host={"gpus": 1 + READERS},
    supervision=trimesh.Restart("one_for_one", intensity=1000, period=60),
    sometimes=("a version was read", "a version was gone", "a reader got ProcDied"),
)
async def test_versions_are_whole_while_anybody_is_killed(mesh, chaos):
    """N4: nothing hangs, nobody gets a torn version, and no pin is left: the publisher publishes on at the end."""
    trainer = await mesh.slice(gpus=0).spawn("trainer", Trainer)
    generators = await mesh.slice(gpus=slice(1, 1 + READERS)).spawn("generators", Generator)
    each = [generators.slice(gpus=index) for index in range(READERS)]

    plan = chaos.plan(kill=1, delay=0.5, transfer=2, every=(0.1, 1), max_down=2)
    async with chaos.safety(plan, duration=6), trio.open_nursery() as nursery:
        nursery.start_soon(publish_on, trainer, chaos.draw("publishing"))
        for index, generator in enumerate(each):
            nursery.start_soon(read_on, trainer, generator, chaos.draw("reading", index), chaos.sometimes)

    async with chaos.liveness(within=120):
        first = await until_it_works(lambda: trainer.publish.call_one(60))
        last = first + 2 * SLOTS
        for number in range(first + 1, last + 1):
            assert await trainer.publish.call_one(60) == number
        weights = await trainer.handle.call_one()
        for generator in each:
            assert await until_it_works(lambda one=generator: one.read.call_one(weights, 0, 0.1)) == last
