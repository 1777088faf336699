"""What is seen of processes on the hosts of a job that do not answer (Q1)."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

import trimesh
from trimesh import Actor, Isolate, endpoint, observe
from trimesh._runtime.life import current_proc
from trimesh.cli.processes import run_lines
from trimesh.observe.run_snapshot import hosts_between

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


class Worker(Actor):
    @endpoint
    async def pids(self) -> tuple[int, int]:
        return os.getpid(), parent_of(os.getppid())

    @endpoint
    async def has_torch(self) -> bool:
        return "torch" in sys.modules


class Logging(Actor):
    @endpoint
    async def step(self, number: int) -> None:
        trimesh.log({"loss": 0.5}, step=number)


@pytest.mark.daily
async def test_process_that_a_signal_has_stopped_is_called_stopped() -> None:
    """Q1: its agent sees it, and reads its actors from its flight record; its sibling runs."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, hosts.spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
            workers = await procs.spawn("workers", Worker)
            pid, _ = await workers.slice(hosts=0, gpus=1).pids.call_one()
            os.kill(pid, signal.SIGSTOP)
            try:
                views = await current_proc().inquiries.ask()
                seen = await observe.snapshot()
            finally:
                os.kill(pid, signal.SIGCONT)
    [reported] = [view for view in views if view.proc.state == "stopped"]
    assert [actor.name for actor in reported.actors] == ["workers[hosts=0,gpus=1]"]
    states = {proc.name: proc.state for proc in seen.procs}
    assert states["procs[hosts=0,gpus=1]"] == "stopped"
    assert states["procs[hosts=0,gpus=0]"] == "running"
    [stopped] = [proc for proc in seen.procs if proc.state == "stopped"]
    assert stopped.memory_bytes > 1 << 20
    assert stopped.cpu_seconds > 0.0
    assert {host.state for host in seen.hosts} == {"running"}


@pytest.mark.daily
async def test_machines_have_figures_and_versions_also_without_processes() -> None:
    """Q1: by the controller of its own machine, by agents of theirs; torch where a process has loaded it."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts, hosts.slice(hosts=0).spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            _, agent = await workers.pids.call_one()
            has_torch = {hosts.names[0]: await workers.has_torch.call_one()}
            before = await observe.snapshot()
            seen = await observe.snapshot()
    rows = {row.name: row for row in seen.hosts}
    there, empty = (rows[name] for name in hosts.names)
    [here] = [row for name, row in rows.items() if name not in hosts.names]
    assert (there.agent, there.procs, there.pid) == ("running", 1, agent)
    assert (empty.agent, empty.procs, empty.state) == ("running", 0, "running")
    assert (here.agent, here.pid) == ("", os.getpid())
    for name, row in rows.items():
        assert row.cpus == os.cpu_count()
        assert 0 < row.memory_free_bytes < row.memory_bytes
        assert "/dev/shm" in [disk.path for disk in row.disks]
        assert all(disk.free_bytes <= disk.nbytes for disk in row.disks)
        assert (row.python, row.kernel) == (sys.version.split()[0], os.uname().release)
        assert bool(row.torch) == has_torch.get(name, row is here and "torch" in sys.modules)
    assert all(one.cpu is not None and one.received is not None for one in hosts_between(seen, before))


@pytest.mark.daily
async def test_metrics_of_all_hosts_reach_the_program(tmp_path: Path) -> None:
    """Q14, Q16: those of processes that their agents started, with the host among the coordinates."""
    with trio.fail_after(HANG_SECONDS):
        async with trimesh.log_to(tmp_path), jobs.LocalJob(2) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Logging)
            for number in range(3):
                await workers.step.call(number)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [(row["point"]["hosts"], row["step"]) for row in rows if row["mesh"] == "workers"]
    assert sorted(steps) == [(host, step) for host in range(2) for step in range(3)]


@pytest.mark.daily
async def test_host_that_does_not_answer_is_called_silent() -> None:
    """Q1: not its processes alone: what to look at is the host."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts, hosts.spawn_procs({"gpus": 1}, supervision=Isolate()) as procs:
            workers = await procs.spawn("workers", Worker)
            pid, agent = await workers.slice(hosts=1, gpus=0).pids.call_one()
            for one in (agent, pid):
                os.kill(one, signal.SIGSTOP)
            try:
                seen = await observe.snapshot()
            finally:
                for one in (agent, pid):
                    os.kill(one, signal.SIGCONT)
    assert {(host.name, host.state) for host in seen.hosts if host.name in hosts.names} == {
        (hosts.names[0], "running"),
        (hosts.names[1], "silent"),
    }
    [agentless] = [host for host in seen.hosts if host.state == "silent"]
    assert (agentless.agent, agentless.at) == ("silent", 0.0)
    [silent] = [proc for proc in seen.procs if proc.state == "silent"]
    assert silent.name == "procs[hosts=1,gpus=0]"
    shown = [line.plain for line in run_lines(seen)]
    assert f": host {hosts.names[1]} silent, with 1 process: procs[hosts=1,gpus=0]; see: " in shown[0]
    assert any(f"its host {hosts.names[1]} does not answer either" in line for line in shown)
