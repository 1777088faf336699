"""Jobs whose hosts never come, or are about to end: keepers import them by name."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import trio

from trimesh import SpawnError
from trimesh.jobs.job import Job
from trimesh.jobs.local import LocalJob, LocalLauncher


@attrs.frozen
class QueuedJob(Job):
    """Waits in a queue, which is a file; "" has no room.

    Attributes:
        path: Of the file, there while it waits.
    """

    path: str
    hosts: int = attrs.field(default=1, init=False)

    def launcher(self) -> QueuedLauncher:
        """See `Job.launcher`."""
        return QueuedLauncher(self.path)


class QueuedLauncher(LocalLauncher):
    """Never gets to start an agent."""

    def __init__(self, path: str) -> None:
        super().__init__(1)
        self._path = path

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """See `Launcher.open`."""
        if not self._path:
            raise SpawnError("no nodes today")
        path = trio.Path(self._path)
        await path.touch()
        try:
            await trio.sleep_forever()
            yield
        finally:
            with trio.CancelScope(shield=True):
                await path.unlink()


@attrs.frozen
class EndingJob(LocalJob):
    """Hosts with a limit of time, which is a file: it is told before that is there, and ends with it.

    Attributes:
        path: Of the file.
    """

    path: str = attrs.field(default="", kw_only=True)

    def launcher(self) -> EndingLauncher:
        """See `Job.launcher`."""
        return EndingLauncher(self)


class EndingLauncher(LocalLauncher):
    """Says that its hosts are about to end."""

    def __init__(self, job: EndingJob) -> None:
        super().__init__(sum(job.parts.values()) + job.spares)
        self._path = trio.Path(job.path)

    async def wait_notice(self) -> str:
        """See `Launcher.wait_notice`."""
        return await self._wait("notice")

    async def wait_end(self, ahead: float = 0.0) -> str:
        """See `Launcher.wait_end`: who is attached is told before the keeper is."""
        return await self._wait("end" if ahead == 0 else f"end for {ahead:g}")

    async def _wait(self, text: str) -> str:
        while not await self._path.exists() or text not in (await self._path.read_text()).splitlines():  # noqa: ASYNC110
            await trio.sleep(0.01)
        return f"the file says {text}"
