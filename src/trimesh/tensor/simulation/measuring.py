"""`measure_device`: the numbers of a `Device`, as they are on a mesh with processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.tensor.issue.fetching import fetch_shard
from trimesh.tensor.ops.function import call_on_shard_and_fetch
from trimesh.tensor.ops.global_tensor import distribute
from trimesh.tensor.ops.traffic import traffic
from trimesh.tensor.simulation.device import Device, RankLink

_ROWS: Final = 512
_COPIED_BYTES: Final = 64 << 20
_SENT_BYTES: Final = 8 << 20
_TIMES: Final = 5
_COMMANDS: Final = 200
_COLLECTIVES: Final = 50


async def measure_device(mesh: ProcMesh, *, name: str = "measured") -> Device:
    """Measure what the ranks of a mesh compute, copy and send, for `simulate(..., device=...)`.

    The median of some repetitions each, on the first rank, while nothing else runs there. What the network between
    hosts does is measured only where the first dimension of the mesh spans hosts; else it is taken for the same as the
    link.

    Args:
        mesh: Processes, at least two along the first dimension.
        name: Of the device, for reports.

    Raises:
        ShapeError: The first dimension has one place.
        MeshErrorGroup: A process has ended.

    Blocking: a checkpoint, cancellable; some seconds.

    Example:
        >>> here = await trimesh.tensor.measure_device(procs)
        >>> with trimesh.tensor.simulate({"gpus": 4}, device=here) as mesh: ...
    """
    label, ranks = next(iter(mesh.extent.items()), ("", 1))
    if ranks < 2:
        raise ShapeError(f"links are measured along the first dimension, of two ranks at least, got {mesh.extent!r}")
    first = dict.fromkeys(mesh.extent, 0)
    with mesh.activate():
        flops, copied, launch, memory, is_cuda = await call_on_shard_and_fetch(_measured, shard=first)
    issuing, operator = await _commands(mesh, label)
    return Device(
        name=name,
        flops=flops,
        memory_bytes_per_second=copied,
        memory_bytes=memory,
        launch_seconds=launch,
        operator_seconds=max(0.0, operator - launch),
        issue_seconds=issuing,
        link=(link := await _link(mesh, label, ranks)),
        network=link,
        per_host=max(1, len(mesh)),
        is_asynchronous=is_cuda,
    )


async def _commands(mesh: ProcMesh, label: str) -> tuple[float, float]:
    """Return how long the controller takes to issue a command, and a rank to execute it."""
    issuing, executing = [], []
    there: Any = distribute(torch.ones(64, 64), mesh, [label, None])
    for _ in range(_TIMES):
        await traffic(mesh)
        begun = time.perf_counter()
        for _ in range(_COMMANDS):
            there = there * 1.0
        issuing.append((time.perf_counter() - begun) / _COMMANDS)
        await traffic(mesh)
        executing.append((time.perf_counter() - begun) / _COMMANDS)
    return min(_median(issuing), _median(executing)), _median(executing)


async def _link(mesh: ProcMesh, label: str, ranks: int) -> RankLink:
    """Return what joins the ranks, by the time of collectives of few bytes and of many."""

    async def seconds(nbytes: int, times: int) -> float:
        with mesh.activate():
            one: Any = torch.zeros(nbytes // 4)
        one.reduce_(label)
        await fetch_shard(one.sum(), dict.fromkeys(mesh.extent, 0))
        begun = time.perf_counter()
        for _ in range(times):
            one.reduce_(label)
        await fetch_shard(one.sum(), dict.fromkeys(mesh.extent, 0))
        return (time.perf_counter() - begun) / times

    few = _median([await seconds(32, _COLLECTIVES) for _ in range(_TIMES)])
    many = _median([await seconds(_SENT_BYTES, _TIMES) for _ in range(_TIMES)])
    steps = RankLink(1.0, 1e30).seconds("allreduce", ranks, 0)
    sent = 2 * _SENT_BYTES * (ranks - 1) / ranks
    return RankLink(few / steps, sent / max(many - few, 1e-9))


def _measured() -> tuple[dict[str, float], float, float, int, bool]:
    """Return what a rank measures by itself: operations a second, bytes a second, the least time, bytes of memory."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")

    def seconds(run: Callable[[], object], times: int = _TIMES) -> float:
        found = []
        for _ in range(times):
            begun = time.perf_counter()
            run()
            if is_cuda:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - begun)
        return _median(found)

    flops: dict[str, float] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows = _ROWS * (16 if is_cuda else 1)
        one = torch.ones(rows, rows, dtype=dtype, device=device)
        torch.mm(one, one)  # what it sets up first does not count
        flops[str(dtype).removeprefix("torch.")] = 2.0 * rows**3 / seconds(lambda one=one: one @ one)  # type: ignore[misc]
    large = torch.ones(_COPIED_BYTES // 4, device=device)
    other = torch.empty_like(large)
    copied = 2 * _COPIED_BYTES / seconds(lambda: other.copy_(large))
    small = torch.ones(8, device=device)
    launch = seconds(lambda: small.add_(1.0), 100)
    return flops, copied, launch, _memory(is_cuda=is_cuda), is_cuda


def _memory(*, is_cuda: bool) -> int:
    if is_cuda:
        return int(torch.cuda.get_device_properties(0).total_memory)
    with open("/proc/meminfo") as file:
        return int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024


def _median(values: Iterable[float]) -> float:
    found = sorted(values)
    return found[len(found) // 2]
