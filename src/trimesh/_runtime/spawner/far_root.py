"""The root of a spawner whose controller is on another host: hands on what the two say to each other.

FA-1 What runs below carries this process's mark, not the controller's: agents of one machine do not end each other's.
FA-2 When it is left, the spawner and everything below it is gone and reaped, or stuck in the kernel.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection

import trio

from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.client import SpawnerClient
from trimesh._runtime.spawner.process import SpawnerProcess
from trimesh._runtime.spawner.siblings import kill_rest
from trimesh._runtime.spawner.socket import Received
from trimesh._runtime.system import records
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.ids import ProcId

NoticeHook = Callable[[Received], None]

MODULES = (records.ENTRY.partition(":")[0], "trimesh._runtime.life.local_host")


class FarRoot:
    """Stands for a controller on another host. Made by `open_far_root`.

    Attributes:
        client: The connection to the spawner.
    """

    def __init__(
        self,
        process: SpawnerProcess,
        controller: ProcId,
        own: ProcId,
        on_notice: NoticeHook,
        modules: tuple[str, ...],
        spared: Callable[[], Collection[int]],
    ) -> None:
        self.pid = process.pid
        self.client = SpawnerClient(process.broker, on_notice=self._noticed, on_lost=self._lost)
        self._process = process
        self._controller = controller
        self._own = own
        self._on_notice = on_notice
        self._modules = modules
        self._spared = spared
        self._ready = trio.Event()

    def _noticed(self, received: Received) -> None:
        if isinstance(received.record, wire.Ready):
            self._ready.set()
        else:
            self._on_notice(received)

    def _lost(self) -> None:
        self._ready.set()

    async def wait_ready(self) -> None:
        """Wait until workers can be forked.

        Raises:
            SpawnError: They cannot.
        """
        self.client.post(wire.Hello(self._controller, MODULES + self._modules, self._own))
        await self.client.wait_ready(self._ready, "start")

    @trio.lowlevel.enable_ki_protection
    async def stop(self) -> None:
        """End the spawner and everything below it (FA-2). Bounded."""
        with trio.CancelScope(shield=True):
            if not await self._process.end(self.client):
                await kill_rest(self._own, lambda: [pid for pid in self._spared() if pid != self.pid])


@asynccontextmanager
async def open_far_root(
    controller: ProcId,
    own: ProcId,
    on_notice: NoticeHook,
    modules: tuple[str, ...] = (),
    spared: Callable[[], Collection[int]] = tuple,
    process: SpawnerProcess | None = None,
) -> AsyncGenerator[FarRoot, None]:
    """Start a spawner for a controller on another host.

    Args:
        on_notice: Called for all that the spawner tells, with descriptors that it then owns. Must not raise.
        modules: Imported once, before it forks.
        spared: Other spawners with the same mark; what lives below them is left alone at the end.
        process: One that was started for `own` and has not been told anything; None starts it.

    Raises:
        SpawnError: It cannot be started, or a module cannot be imported.
    """
    failure: SpawnError | None = None
    process = process or SpawnerProcess.start(own)
    try:
        root = FarRoot(process, controller, own, on_notice, modules, spared)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(root.client.run)
            try:
                try:
                    await root.wait_ready()
                except SpawnError as error:  # raised outside of the nursery, which would wrap it
                    failure = error
                else:
                    yield root
            finally:
                await root.stop()
                root.client.stop()
        if failure is not None:
            raise failure
    finally:
        process.close()
