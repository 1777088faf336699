"""`Device` and `RankLink`: the cost model of a simulation. Pure.

The whole model:

    an operator     the largest of (operations / flops), (bytes read and written / memory_bytes_per_second) and
                    `launch_seconds`; a view takes only time of the rank's Python
    a command       `operator_seconds` of the rank's Python, which runs ahead of the device if that is asynchronous
    a collective    as a ring of n ranks: (n - 1) steps of `latency_seconds`, plus bytes sent by a rank /
                    `bytes_per_second`; an all-reduce takes twice the steps, or those of a tree if that is faster
    the controller  `issue_seconds` a command, before the ranks can execute it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import torch

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.tensor.issue.fetching import fetch_shard
from trimesh.tensor.ops.function import call_on_shard_and_fetch
from trimesh.tensor.ops.global_tensor import distribute
from trimesh.tensor.ops.profiling import traffic

_TWICE: Final = frozenset({"allreduce", "allreduce_coalesced", "barrier"})
_ONCE: Final = frozenset({"broadcast", "reduce", "send", "recv", "recv_anysource"})


def _positive(device: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    del device
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"{attribute.name} must be a positive number, got {value!r}")


def _not_negative(device: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    del device
    if not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise ValueError(f"{attribute.name} must be 0 or more, got {value!r}")


def _rates(device: object, attribute: attrs.Attribute[Mapping[str, float]], value: Mapping[str, float]) -> None:
    del device
    if not value or not all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in value.values()):
        raise ValueError(f"{attribute.name} must have a positive number for each dtype, got {value!r}")


@attrs.frozen
class RankLink:
    """Link between the ranks along a dimension of a mesh.

    Attributes:
        latency_seconds: Latency of one step of a collective.
        bytes_per_second: Bandwidth at which a rank sends, while it receives as much.
    """

    latency_seconds: float = attrs.field(validator=_not_negative)
    bytes_per_second: float = attrs.field(validator=_positive)

    def seconds(self, name: str, ranks: int, sent: int) -> float:
        """Return the duration of a collective, in seconds.

        Args:
            name: Name of a method of torch's process groups.
            ranks: Number of ranks that take part.
            sent: Bytes that each of them sends in a ring.
        """
        if ranks < 2:
            return 0.0
        sending = sent / self.bytes_per_second
        depth = math.ceil(math.log2(ranks))
        if name in _ONCE:
            return depth * self.latency_seconds + sending
        if name in _TWICE:
            return min(2 * (ranks - 1), 2 * depth) * self.latency_seconds + sending
        return (ranks - 1) * self.latency_seconds + sending


@attrs.frozen
class Device:
    """Performance of one device and its links; make your own by `attrs.evolve` or `measure_device`.

    Attributes:
        name: Name for reports.
        flops: Operations per second, by dtype (`{"float32": 67e12}`); other dtypes get the smallest value.
        memory_bytes_per_second: Memory bandwidth, reads and writes together.
        memory_bytes: Size of its memory.
        launch_seconds: Minimal duration of an operator that computes.
        operator_seconds: Time of the rank's Python for each operation.
        issue_seconds: Time of the controller for each operation.
        link: Link to devices on the same host.
        network: Link to devices on other hosts.
        per_host: Devices on a host; ranks are numbered host by host.
        is_asynchronous: Whether the rank's Python goes on while the device computes, until it needs a collective.
    """

    name: str
    flops: Mapping[str, float] = attrs.field(validator=_rates)
    memory_bytes_per_second: float = attrs.field(validator=_positive)
    memory_bytes: int = attrs.field(validator=_positive)
    launch_seconds: float = attrs.field(validator=_not_negative)
    operator_seconds: float = attrs.field(validator=_not_negative)
    issue_seconds: float = attrs.field(validator=_not_negative)
    link: RankLink
    network: RankLink
    per_host: int = attrs.field(validator=_positive)
    is_asynchronous: bool = True

    def compute_seconds(self, dtype: str, operations: float, moved: float) -> float:
        """Return the duration, in seconds, of an operator with these operations and bytes read and written."""
        rate = self.flops.get(dtype) or min(self.flops.values())
        return max(operations / rate, moved / self.memory_bytes_per_second, self.launch_seconds)


DEVICES: Final = {
    # Data sheet of the SXM version, not measured; times of Python are those of an idle CPU.
    "h100": Device(
        name="h100",
        flops={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12, "int8": 1979e12},
        memory_bytes_per_second=3.35e12,
        memory_bytes=80_000_000_000,
        launch_seconds=5e-6,
        operator_seconds=160e-6,
        issue_seconds=15e-6,
        link=RankLink(5e-6, 450e9),
        network=RankLink(15e-6, 50e9),
        per_host=8,
    ),
    # `measure_device` of two ranks of one thread each, on two cores of a shared virtual machine at a load of 13.
    "cpu": Device(
        name="cpu",
        flops={"float32": 18e9, "float64": 11e9, "bfloat16": 200e9},
        memory_bytes_per_second=7.3e9,
        memory_bytes=25_000_000_000,
        launch_seconds=2.6e-6,
        operator_seconds=217e-6,
        issue_seconds=13.5e-6,
        link=RankLink(1.7e-3, 144e6),
        network=RankLink(1.7e-3, 144e6),
        per_host=64,
        is_asynchronous=False,
    ),
}
"""Devices that `simulate` knows by name."""


def device_of(device: Device | str) -> Device:
    """Return a device, which may be given by name.

    Raises:
        ValueError: No device has that name.
        TypeError: It is neither a device nor a name.
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"a device must be a Device or the name of one, got {device!r}")
    if device not in DEVICES:
        raise ValueError(f"a device must be one of {sorted(DEVICES)}, got {device!r}: write Device(...) for another")
    return DEVICES[device]


# ---- `measure_device`: measures a `Device` on a mesh with processes --------------------------------------------------

_ROWS: Final = 512
_COPIED_BYTES: Final = 64 << 20
_SENT_BYTES: Final = 8 << 20
_TIMES: Final = 5
_COMMANDS: Final = 200
_COLLECTIVES: Final = 50


async def measure_device(mesh: ProcMesh, *, name: str = "measured") -> Device:
    """Measure compute, memory and link speeds of the ranks of a mesh, for `simulate(..., device=...)`.

    Takes medians of several runs on the first rank, while nothing else runs there. `link` and `network` are both the
    link between ranks along the first dimension of the mesh, and `per_host` is the size of the mesh.

    Args:
        mesh: Processes, at least two along the first dimension.
        name: Name of the device, for reports.

    Raises:
        ShapeError: The first dimension has size 1.
        MeshErrorGroup: A process has ended.

    Blocking: a checkpoint, cancellable; some seconds.

    Example:
        >>> here = await trimesh.tensor.measure_device(procs)
        >>> with trimesh.tensor.simulate({"gpus": 4}, device=here) as mesh: ...
    """
    label, ranks = next(iter(mesh.extent.items()), ("", 1))
    if ranks < 2:
        raise ShapeError(f"the first dimension must have at least 2 ranks to measure links, got {mesh.extent!r}")
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
    """Return the time of the controller to issue a command, and of a rank to execute it, in seconds."""
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
    """Return the link between ranks, from the duration of small and large collectives."""

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
    """Measure one rank: operations and bytes per second, minimal duration, memory size, whether it is asynchronous."""
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
        torch.mm(one, one)  # warm-up
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
