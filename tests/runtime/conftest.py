"""A spawner for a test, and short ways to start workers with it."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from tests.runtime import worker_entries
from tests.runtime.processes import children, family

from trimesh._runtime.spawner.launcher import ProcLauncher, open_spawner
from trimesh._runtime.system.child import Child, LaunchSpec
from trimesh.ids import ID_MAX, ProcId

SERVE = "tests.runtime.worker_entries:serve"


def new_id() -> ProcId:
    """Draw an incarnation."""
    return ProcId(random.randrange(1, ID_MAX))


def spec_of(**fields: Any) -> LaunchSpec:
    """Return a spec of one worker `w` that serves, with some fields set."""
    return LaunchSpec(**{"proc_id": new_id(), "mesh": "w", "entry": SERVE, **fields})


def nested(levels: int) -> LaunchSpec:
    """Return the spec of a worker that owns a worker, and so on; the innermost one serves."""
    return spec_of(entry="tests.runtime.worker_entries:nested", extra=str(levels).encode())


def spawner_of(launcher: ProcLauncher) -> int:
    """Return the pid of the spawner: the one child of this process that carries the family's marker."""
    (pid,) = set(family(launcher.root_id)) & set(children(os.getpid()))
    return pid


async def ask(child: Child, *request: Any) -> Any:
    """Have a serving worker do something and return what it says."""

    def talk() -> Any:
        worker_entries.say(child.link, list(request))
        return worker_entries.hear(child.link)

    return await trio.to_thread.run_sync(talk)


async def tell(child: Child, *request: Any) -> None:
    """Have a serving worker do something that ends it."""
    await trio.to_thread.run_sync(worker_entries.say, child.link, list(request))


async def hear(child: Child) -> Any:
    """Return the next word of a worker."""
    return await trio.to_thread.run_sync(worker_entries.hear, child.link)


class CancelAtNth(trio.abc.Instrument):
    """Cancels a scope when the task that made it has come to its nth checkpoint."""

    def __init__(self, scope: trio.CancelScope, nth: int) -> None:
        self.has_fired = False
        self._task = trio.lowlevel.current_task()
        self._scope = scope
        self._left = nth

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count the steps of the task; a step ends at a checkpoint."""
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self.has_fired = True
                self._scope.cancel()


Start = Callable[..., Any]


@pytest.fixture
async def launcher() -> AsyncIterator[ProcLauncher]:
    """A spawner that is ready to fork workers of the tests."""
    async with open_spawner(new_id(), entry=SERVE) as launcher:
        yield launcher


@pytest.fixture
def start(launcher: ProcLauncher) -> Start:
    """Start one worker that serves: `child = await start(**fields)`."""

    async def start(**fields: Any) -> Child:
        child = await launcher.launch(spec_of(**fields))
        assert await hear(child) == "hello"
        return child

    return start
