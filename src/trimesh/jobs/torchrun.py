"""`spmd.from_torchrun`: the processes of a torchrun job as hosts, in the order of their ranks.

    rank 0: open_door ----store----> an order for each rank, with its token
    rank 1, 2, ...: order --exec--> agent in place of the process, which joins

TQ-1 Processes other than that of rank 0 become agents by exec: torchrun supervises them as before, and a host that is
     lost is a failed rank for torchrun.
TQ-2 Each agent has the environment of its rank, and so have its processes: `init_process_group()` works in actors.
TQ-3 The store is dropped before processes start: in a job without a store of torchrun's own, rank 0 serves the next.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import trio

from trimesh import limits
from trimesh._runtime.hosts import marked, open_hosts_proc
from trimesh._runtime.system import close_others, host_name
from trimesh.actor.host_mesh import HostMesh
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.actor.spawning import Spawning
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.external_hosts import DoorHost, DoorRun
from trimesh.jobs.launcher import AgentOrder, ChildAgent, start_child
from trimesh.jobs.local import agent_command

T = TypeVar("T")

_NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK: Final = "127.0.0.1"


def from_torchrun(*, interface: str | None = None, port: int = 0, **options: Any) -> Spawning[ProcMesh]:
    """Return the block of `spmd.from_torchrun`, which has the arguments.

    Raises:
        RuntimeError: This is no process of a torchrun job.
    """
    missing = [name for name in _NAMES if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"from_torchrun() needs the variables of torchrun, and {', '.join(missing)} are not set: start the program "
            "by `torchrun --nproc-per-node 8 script.py`, or use this_host().spawn_procs(...) without torchrun"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        interface = interface or _LOOPBACK

    @asynccontextmanager
    async def open_() -> AsyncGenerator[ProcMesh, None]:
        if rank:
            await _become_agent(rank)
        async with (
            _hosts(size, interface, port, options.get("pickle")) as hosts,
            hosts.spawn_procs({}, **options) as procs,
        ):
            yield procs

    async def adopt() -> ProcMesh:
        raise RuntimeError("from_torchrun() needs a block: write `async with spmd.from_torchrun() as procs:`")

    return Spawning("from_torchrun()", open_, adopt)


@asynccontextmanager
async def _hosts(size: int, interface: str | None, port: int, pickle: str | None) -> AsyncGenerator[HostMesh, None]:
    """Yield the hosts of the job, of which the first is an agent beside this process."""
    async with open_hosts_proc(pickled=None if pickle is None else pickle == "on") as proc:
        run = DoorRun(proc, interface, port, (), None, "")
        async with run.begun():
            await run.wait_ready("the door for the processes of the torchrun job could not be opened")
            ranks = [DoorHost(run) for _ in range(size)]
            door = run.links.door
            orders = [
                AgentOrder(door.expect(one).text, door.addresses, is_one_machine=interface == _LOOPBACK)
                for one in ranks
            ]
            agent = ChildAgent(await start_child(agent_command(), host_name(), marked(dict(os.environ))))
            try:
                await agent.begin(orders[0])
                await _in_thread(partial(_publish, orders))
                async with run.owned(await _joined(run, ranks), {}) as hosts:
                    yield hosts
            finally:
                await agent.stop()


async def _joined(run: DoorRun, ranks: Sequence[DoorHost]) -> list[DoorHost]:
    """Wait until all ranks have joined; return them in their order.

    Raises:
        MeshErrorGroup: One was refused.
        SpawnError: One has not joined in time.
    """
    with trio.move_on_after(limits.JOIN_TOKEN_SECONDS):
        return sorted(await run.claim(len(ranks)), key=ranks.index)
    missing = ", ".join(str(rank) for rank, one in enumerate(ranks) if not one.joined.is_set())
    seconds = f"limits.JOIN_TOKEN_SECONDS ({limits.JOIN_TOKEN_SECONDS:g} s)"
    raise SpawnError(f"ranks {missing} of the torchrun job have not joined within {seconds}")


def _publish(orders: Sequence[AgentOrder]) -> None:
    """Put the orders into the store of the job, and wait until all ranks have read theirs."""
    store = _job_store()
    for rank, order in enumerate(orders):
        store.set(_key(rank), order.line)
    store.wait([_read_key(rank) for rank in range(1, len(orders))])


async def _become_agent(rank: int) -> NoReturn:
    """Become the agent of a rank, in place of this process."""
    order = await _in_thread(partial(_read_order, rank))
    sys.stdout.flush()
    sys.stderr.flush()
    memory = os.memfd_create("trimesh order")
    os.write(memory, order)
    os.lseek(memory, 0, os.SEEK_SET)
    os.dup2(memory, 0)
    close_others({0, 1, 2})
    command = agent_command("main_alone")
    os.execve(command[0], command, marked(dict(os.environ)))  # noqa: S606 - our own interpreter


def _read_order(rank: int) -> bytes:
    store = _job_store()
    line: bytes = store.get(_key(rank))
    store.set(_read_key(rank), b"1")
    return line


def _job_store() -> Any:
    from trimesh.tensor.groups.torchrun import open_job_store  # noqa: PLC0415 - it imports torch

    return open_job_store()


def _key(rank: int) -> str:
    return f"trimesh/order/{rank}"


def _read_key(rank: int) -> str:
    return f"trimesh/read/{rank}"


async def _in_thread(work: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
