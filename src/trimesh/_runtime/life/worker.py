"""Main program of a worker process: serves the owner until that requests the end, or is lost."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import trio

from trimesh import limits
from trimesh._runtime.actors.agent import Agent, run_with_agent
from trimesh._runtime.actors.context import set_proc_of_run
from trimesh._runtime.debugger import debug
from trimesh._runtime.flight_feed import FlightRecord, record_worker
from trimesh._runtime.life.family import Family
from trimesh._runtime.life.local_host import LocalHost, accept_links
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.snapshot import look_by_signal
from trimesh._runtime.spawner.launcher import attach_launcher
from trimesh._runtime.system import linux
from trimesh._runtime.system.records import WorkerConfig
from trimesh._runtime.watch.report import describe_self
from trimesh._runtime.watch.stacks import arm_stack
from trimesh._transport.native.transport import NativeTransport
from trimesh._wire.observed import encode
from trimesh.config import current, install
from trimesh.ids import ProcId
from trimesh.shape.extent import Extent, Point


async def serve_owner(
    proc: Proc,
    family: Family,
    owner: Peer,
    point: Point,
    on_lost: Callable[[], None],
    stack_fd: int = -1,
    record: FlightRecord | None = None,
) -> None:
    """Run `proc` until its owner requests its end.

    Args:
        family: Reports the loss of the owner.
        point: Its coordinates.
        on_lost: Ends the process at once: it must not outlive the owner, and clean-up must not run (O4).
        stack_fd: See `Agent`.
        record: Its flight record; None without.
    """

    async def wait_until_lost() -> None:
        await family.parent_lost.wait()
        on_lost()

    async with trio.open_nursery() as nursery:
        agent: Agent = await nursery.start(run_with_agent, proc, owner, point, stack_fd)
        nursery.start_soon(wait_until_lost)
        if record is not None:
            nursery.start_soon(record.keep_looking)
            nursery.start_soon(record.read_gpus, current())
        await agent.exit_requested.wait()
        proc.inquiries.send_rest(owner)
        nursery.cancel_scope.cancel(reason="the owner has stopped this process")


def main(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """Run a worker process: called by the spawner's child once it is set up.

    Args:
        link: Stream socket to its owner.
        broker: Broker socket to the spawner.
        lifelines: pidfds; when one of these processes ends, this one is killed at once.

    Returns:
        The exit code.
    """
    return trio.run(_main, config, link, broker, lifelines)


async def _main(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    install(config.settings)
    transport = NativeTransport(ProcId(config.proc_id), stall_seconds=config.settings.stall_after)
    for pidfd in lifelines:
        transport.add_lifeline(pidfd)
        os.close(pidfd)
    # From here on a thread detects the end of the spawner and kills the whole group. The kernel's signal is faster, but
    # would kill only this process; from now on it merely continues a stopped process.
    linux.set_parent_death_signal(signal.SIGCONT)
    proc = Proc(ProcId(config.proc_id), transport, main=sys.modules["__main__"], pickled=config.pickled)
    proc.share = config.share
    debug(proc, config.settings)
    record = record_worker(proc, config)
    set_proc_of_run(proc)
    root = ProcId(config.root_id)
    incoming = accept_links(proc, transport)
    async with attach_launcher(
        broker, proc_id=proc.proc_id, root_id=root, incoming=incoming, is_left_to_exit=True
    ) as launcher:
        host = LocalHost(transport, launcher)
        proc.family = Family(proc, lambda _: nullcontext(host), ProcId(config.parent_id), host, root)
        parent = ProcId(config.parent_id)
        is_near, far_lease = not config.is_far, limits.FAR_LINK_LEASE_SECONDS if config.is_far else 0
        opened = transport.open_link(link, local=is_near, lease=False, peer=parent, lease_seconds=far_lease)
        owner = proc.adopt_link(parent, opened)
        stack_fd = arm_stack(partial(describe_self, proc), lambda: encode(look_by_signal(proc)))
        if config.is_far:  # a pid of this host means another process on the owner's host
            stack_fd = -1
        extent = Extent(dict(zip(config.labels, config.sizes, strict=True)))
        try:
            await serve_owner(proc, proc.family, owner, extent.point(config.rank), _kill_group, stack_fd, record)
        finally:
            transport.leave_to_exit()  # the thread keeps the lifelines while atexit functions run
    if record is not None:
        record.end_worker(config)
    return 0


def _kill_group() -> None:
    os.killpg(0, signal.SIGKILL)
