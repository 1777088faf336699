"""What can be profiled: steps that are repeated, and who computes in them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import descendants

Step = Callable[[Any], Awaitable[int]]
"""Does something with a mesh, or with a warm host; returns how many items that was."""


@dataclass(frozen=True)
class Workload:
    """One thing to profile.

    Attributes:
        title: In tables.
        item: What its microseconds are divided by.
        step: Of the program, over and over; None for programs that only import, one after the other.
        ranks: Of the mesh; 0 for a warm host, whose spawner is then the other side.
        is_spinning: Processes may spin before they sleep. The sampler stops a process for each sample, which ends the
            spin, so elsewhere it is off, and here samples are taken without stopping, and without native frames.
    """

    title: str
    item: str
    step: Step | None
    ranks: int = 1
    is_spinning: bool = False

    @property
    def sides(self) -> tuple[str, ...]:
        """Return who computes: this program is here."""
        if self.step is None:
            return ("spawner",)
        return ("here", "there" if self.ranks else "spawner")


async def _calls(mesh: Any) -> int:
    for value in range(200):
        await mesh.one(value)
    return 200


async def _tasks(mesh: Any) -> int:
    await mesh.tasks(1000)
    return 1000


async def _map(mesh: Any) -> int:
    await mesh.batch(2000)
    return 2000


async def _broadcast(mesh: Any) -> int:
    for value in range(2000):
        await mesh.offer(value, 0)
    await mesh.drain()
    return 2000


async def _broadcast_awaited(mesh: Any) -> int:
    for value in range(2000):
        await mesh.post(value, 0)
    await mesh.drain()
    return 2000


async def _mesh_calls(mesh: Any) -> int:
    for value in range(50):
        await mesh.all(value)
    return 50


async def _stream(mesh: Any) -> int:
    await mesh.stream(5000)
    return 5000


def _echo(nbytes: int, calls: int) -> Step:
    value = bytes(1) * nbytes

    async def echo(mesh: Any) -> int:
        for _ in range(calls):
            await mesh.one(value)
        return calls

    return echo


async def _start(host: Any) -> int:
    from bench.meshes import trimesh_mesh

    async with trimesh_mesh.open_mesh(1, host) as mesh:
        await mesh.all(1)
    return 1


async def _kill(host: Any) -> int:
    from bench.meshes import trimesh_mesh
    from trimesh import ProcDied

    died = 0
    try:
        async with trimesh_mesh.open_mesh(4, host) as mesh:
            os.kill(mesh.pids[0], signal.SIGKILL)
            await mesh.wait()
    except* ProcDied:
        died = 1
    assert died, "the death of a killed process was not noticed"
    return died


WORKLOADS = {
    "call_one": Workload("`call_one`, one after the other", "call", _calls),
    "call_one_spinning": Workload("`call_one`, spinning before sleeping", "call", _calls, is_spinning=True),
    "tasks": Workload("`call_one`, a task a call", "call", _tasks),
    "map": Workload("`map`, window 128", "item", _map),
    "broadcast": Workload("`broadcast`, sent and drained", "message", _broadcast),
    "broadcast_awaited": Workload("`broadcast`, each awaited", "message", _broadcast_awaited),
    "call_8": Workload("`call` over 8 ranks", "call", _mesh_calls, ranks=8),
    "stream": Workload("items of a stream", "item", _stream),
    "bytes_64KiB": Workload("echo of 64 KiB as `bytes`", "echo", _echo(64 << 10, 50)),
    "bytes_64MiB": Workload("echo of 64 MiB as `bytes`", "echo", _echo(64 << 20, 2)),
    "cold": Workload("what a spawner imports", "start", None),
    "warm": Workload("start, call and stop of one process, warm", "start", _start, ranks=0),
    "kill": Workload("start of 4, warm, one killed, out of the block", "mesh", _kill, ranks=0),
}


@asynccontextmanager
async def open_workload(workload: Workload) -> AsyncIterator[tuple[Any, dict[str, int]]]:
    """Yield what its step takes, and the pid of each side."""
    from bench.meshes import trimesh_mesh

    here = os.getpid()
    if workload.ranks:
        async with trimesh_mesh.open_mesh(workload.ranks) as mesh:
            yield mesh, {"here": here, "there": mesh.pids[0]}
    else:
        async with trimesh_mesh.open_host() as host:
            await _start(host)
            yield host, {"here": here, "spawner": _spawner_of(here)}


def _spawner_of(pid: int) -> int:
    for child in descendants(pid):
        if Path(f"/proc/{child}/comm").read_text().strip() == "trimesh-spawner":
            return child
    raise RuntimeError(f"process {pid} has no spawner among its children")
