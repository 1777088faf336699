"""Two ranks that are threads of this process, connected by gloo over the loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from trimesh.shape.extent import Extent
from trimesh.tensor.groups.group import NamedGroup
from trimesh.tensor.groups.groups import register, unregister
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.engine import engine_of

CPU = torch.device("cpu")


class Here(threading.local):
    """The rank of each thread."""

    rank = 0


HERE = Here()


class EachRank(NamedGroup):
    """Torch's default group, which only gives ranks: it connects none."""

    def rank(self) -> int:
        return HERE.rank


def open_meshes() -> Iterator[list[Any]]:
    """Yield the device mesh of each of two ranks; for a fixture."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh

    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def connect(rank: int) -> None:
        made: Any = dist.ProcessGroup(store, rank, 2)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=5)
        made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, rank, 2, options)
        made._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        made._set_group_name(f"sequences/{rank}")
        groups[rank] = made

    on_each(connect)
    found: list[Any] = []
    every = EachRank(0, 2, "sequences")
    register(every, "sequences", [0, 1], store)
    c10d._update_default_pg(every)
    for rank, group in enumerate(groups):
        register(group, f"sequences/{rank}", [0, 1], store)
        HERE.rank = rank
        found.append(DeviceMesh.from_group(group, "cpu", mesh=[0, 1], mesh_dim_names=("gpus",)))
        found[-1]._thread_id = rank  # those of two ranks are never equal
    yield found
    c10d._update_default_pg(None)
    unregister(every, "sequences")
    for rank, group in enumerate(groups):
        unregister(group, f"sequences/{rank}")


def on_each(work: Callable[[int], None]) -> None:
    """Do something for both ranks at once."""
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        HERE.rank = rank
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failed:
        raise failed[0]


def a_rank(number: int) -> tuple[Rank, TeamOnRank]:
    outside: Any = SimpleNamespace(leave=lambda *_, **__: None, reply=lambda *_: None)
    rank, team = Rank("procs", Extent(gpus=2), number, CPU, outside), TeamOnRank(1, Extent(gpus=2), [0], [], 0, 0)
    engine_of(rank)
    return rank, team
