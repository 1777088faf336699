"""Handles on hosts as arguments (M11): actors spawn on hosts that are shared; others are refused. Jobs are values."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import attempt
from tests.conformance.probe import Probe
from tests.jobs.provisioner import AsyncioProvisioner, Provisioner
from tests.patience import HANG_SECONDS

from trimesh import Actor, HostMesh, Isolate, MeshErrorGroup, MeshStopped, endpoint, leaves, this_host, this_proc

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

needs_tls = pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])


class Taker(Actor):
    @endpoint
    async def take(self, value: Any) -> Any:
        return value


@pytest.mark.real
@needs_tls
async def test_handles_on_hosts_that_are_not_shared_are_refused_in_a_sentence() -> None:
    """H1, M11: what is said is what to do instead; an entered job is still a value."""
    job = jobs.LocalJob(1)
    with trio.fail_after(HANG_SECONDS):
        async with job as hosts, jobs.open_door("127.0.0.1") as door, hosts.spawn_procs({"gpus": 1}) as procs:
            takers = await procs.spawn("takers", Taker)
            for value in (hosts, [hosts], hosts.slice(hosts=0)):
                with pytest.raises(TypeError, match=r"does not share them: open it with shared=True, .*") as caught:
                    await takers.take.call(value)
                assert "__reduce__" not in str(caught.value)
            with pytest.raises(TypeError, match=r"call this_host\(\) in the actor"):
                await takers.take.call(this_host())
            with pytest.raises(TypeError, match="a door can only be used by the program"):
                await takers.take.call(door)
            assert list(await takers.take.call(job)) == [job]
            with pytest.raises(ValueError, match=r"trimesh\.per_rank\(await trimesh\.spmd\.env\(procs\)\)"):
                hosts.spawn_procs({"gpus": 1}, rendezvous=True)


@asynccontextmanager
async def provisioned(
    cls: Any = Provisioner, hosts: Any = 2, **options: Any
) -> AsyncGenerator[tuple[HostMesh, Any], None]:
    """Enter a job that shares its hosts, with a provisioner on this host."""
    job = jobs.LocalJob(hosts, shared=True, **options)
    with trio.fail_after(HANG_SECONDS):
        async with job as shared, this_host().spawn_procs({}, name="brains", supervision=Isolate()) as procs:
            yield shared, await procs.spawn("provisioner", cls)


async def wait_ended(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            found = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with trio.fail_after(HANG_SECONDS):
            await trio.lowlevel.wait_readable(found)
        os.close(found)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.daily
@pytest.mark.real
@needs_tls
async def test_actor_spawns_on_hosts_that_it_was_sent() -> None:
    """M11: awaited and entered actors, actors by name, a function of the point, parts, commands, a view."""
    async with provisioned(hosts={"a": 1, "b": 1}) as (hosts, provisioner):
        assert await provisioner.total.call_one(hosts, 10) == [12, 12, 12, 12, 5, 5, 101]
        assert await provisioner.total.call_one(hosts["b"], 1) == [3, 3, 5, 101]
        found = await provisioner.places.call_one(hosts)
        assert [(rank, shard) for rank, _, shard in found] == [(0, "0.0"), (1, "1.0")]
        await wait_ended([pid for _, pid, _ in found])
        assert await provisioner.names.call_one(hosts) == (hosts.names, {"hosts": 2}, hosts.names[1:])
        assert await provisioner.echo.call_one(hosts) == [(0, "there"), (1, "there")]
        grown = await hosts.grow(1)
        assert len(await provisioner.total.call_one(grown, 1)) == 10


@pytest.mark.real
@needs_tls
async def test_provisioner_on_the_hosts_themselves_and_one_in_this_process() -> None:
    """M11: whoever in the family has the handle."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2, shared=True) as hosts, hosts.slice(hosts=0).spawn_procs({}) as procs:
            there = await procs.spawn("there", Provisioner)
            assert await there.total.call_one(hosts.slice(hosts=1), 1) == [3, 3, 5, 101]
            async with this_proc().spawn("here", Provisioner) as here:
                assert await here.total.call_one(hosts.slice(hosts=1), 1) == [3, 3, 5, 101]


@pytest.mark.real
@needs_tls
async def test_asyncio_and_blocking_provisioners() -> None:
    """M11, K05, K06."""
    async with provisioned(AsyncioProvisioner) as (hosts, provisioner):
        assert await provisioner.total.call_one(hosts, 1) == [2, 2]
    async with provisioned() as (hosts, provisioner):
        assert await provisioner.total_blocking.call_one(hosts) == [6, 6]


@pytest.mark.real
@needs_tls
async def test_hosts_are_sent_without_pickle() -> None:
    """M11: handle, options and policy are records; so is what a restart does."""
    async with provisioned(pickle="off") as (hosts, provisioner):
        assert await provisioner.total.call_one(hosts, 1) == [3, 3, 3, 3, 5, 5, 101]
        assert [shard for _, _, shard in await provisioner.places.call_one(hosts)] == ["0.0", "1.0"]
        assert sorted(await provisioner.heals.call_one(hosts)) == [1, 2]


@pytest.mark.real
@needs_tls
async def test_cancel_or_death_of_the_provisioner_ends_what_it_started() -> None:
    """M11, C01: the program and its hosts go on."""
    async with provisioned() as (hosts, provisioner), this_host().spawn_procs({}, name="logs") as procs:
        for way in ("cancel", "kill"):
            log = await procs.spawn(f"log of {way}", Probe)
            async with trio.open_nursery() as nursery:
                held = attempt(nursery, provisioner.hold.call, hosts, log)
                pids: list[int] = []
                while not pids:
                    pids = [pid for what, found in await log.seen.call_one() if what == "pids" for pid in found]
                    await trio.lowlevel.checkpoint()
                assert all(map(is_alive, pids))
                if way == "cancel":
                    held.cancel()
                else:
                    os.kill(provisioner._view.current.members[0].pid, signal.SIGKILL)
                await held.over.wait()
            await wait_ended(pids)
        async with hosts.spawn_procs({"gpus": 1}) as others, others.spawn("takers", Taker) as takers:
            assert list(await takers.take.call(1)) == [1, 1]


@pytest.mark.real
@needs_tls
async def test_ends_of_processes_are_the_provisioners() -> None:
    """M11: under the policy that it names; what the program owns goes on."""
    async with provisioned() as (hosts, provisioner):
        kinds, places = await provisioner.loses.call_one(hosts)
        assert (kinds, places) == (["ProcDied"], [{"hosts": 1, "gpus": 0}])
        assert sorted(await provisioner.heals.call_one(hosts)) == [1, 2]


@pytest.mark.real
@needs_tls
async def test_hosts_that_are_left_first_end_what_was_started_there() -> None:
    """M11: the provisioner gets `MeshStopped`; a handle that is used later raises it, too."""
    with trio.fail_after(HANG_SECONDS):
        async with this_host().spawn_procs({}, name="brains") as procs, procs.spawn("log", Probe) as log:
            provisioner = await procs.spawn("provisioner", Provisioner)
            async with trio.open_nursery() as nursery:
                async with jobs.LocalJob(2, shared=True) as hosts:
                    held = attempt(nursery, provisioner.hold.call, hosts, log)
                    while not await log.seen.call_one():
                        await trio.lowlevel.checkpoint()
                with pytest.raises(MeshErrorGroup) as caught:
                    await held.result()
                assert {type(leaf) for leaf in leaves(caught.value)} == {MeshStopped}


@pytest.mark.real
@needs_tls
async def test_what_only_the_owner_of_hosts_does_is_refused() -> None:
    """M11: in words that name the verb."""
    async with provisioned() as (hosts, provisioner):
        texts = await provisioner.refused.call_one(hosts)
        assert [text for verb, text in zip(("grow", "wait_notice", "async with", "sync", "install"), texts, strict=True)
                if verb not in text] == []  # fmt: skip


def test_variables_of_a_slurm_job_are_those_of_its_agents() -> None:
    job = jobs.SlurmJob(2, env={"NCCL_DEBUG": "INFO"})
    assert job.agent_env == {"NCCL_DEBUG": "INFO"}
    assert not any("NCCL_DEBUG" in option for option in job.salloc_options("x"))
    assert pickle.loads(pickle.dumps(job)) == job
