"""Handles on hosts as arguments: refused in a sentence; jobs are values. Variables of a SlurmJob."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, endpoint, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls


class Taker(Actor):
    @endpoint
    async def take(self, value: Any) -> Any:
        return value


@pytest.mark.real
@pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])
async def test_handles_on_hosts_are_refused_in_a_sentence() -> None:
    """H1: what is said is what to do instead; an entered job is still a value."""
    job = jobs.LocalJob(1)
    with trio.fail_after(HANG_SECONDS):
        async with job as hosts, jobs.open_door("127.0.0.1") as door, hosts.spawn_procs({"gpus": 1}) as procs:
            takers = await procs.spawn("takers", Taker)
            for value in (hosts, [hosts], hosts.slice(hosts=0)):
                with pytest.raises(TypeError, match=r"cannot be sent to another process, .*: send a mesh of") as caught:
                    await takers.take.call(value)
                assert "__reduce__" not in str(caught.value)
            with pytest.raises(TypeError, match=r"call this_host\(\) in the actor"):
                await takers.take.call(this_host())
            with pytest.raises(TypeError, match="a door can only be used by the program"):
                await takers.take.call(door)
            assert list(await takers.take.call(job)) == [job]
            with pytest.raises(ValueError, match=r"trimesh\.per_rank\(await trimesh\.spmd\.env\(procs\)\)"):
                hosts.spawn_procs({"gpus": 1}, rendezvous=True)


def test_variables_of_a_slurm_job_are_those_of_its_agents() -> None:
    job = jobs.SlurmJob(2, env={"NCCL_DEBUG": "INFO"})
    assert job.agent_env == {"NCCL_DEBUG": "INFO"}
    assert not any("NCCL_DEBUG" in option for option in job.salloc_options("x"))
    assert pickle.loads(pickle.dumps(job)) == job
