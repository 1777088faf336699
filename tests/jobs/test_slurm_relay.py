"""Slurm behind a login node (H30): commands and relay run there. The commands are scripts with Slurm's words."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio
from tests.jobs.network.observing import needs_network
from tests.jobs.sshd import SSHServer, missing
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of, wait_gone

from trimesh import Actor, HostLost, MeshErrorGroup, SpawnError, endpoint, leaves

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh.testing import open_host_network
from trimesh.testing.real.host_network import CONTROLLER, HostNetwork

pytestmark = [pytest.mark.real, *needs_network, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

SALLOC = """#!/bin/sh
echo "salloc $*" >> "$0.log"
while case "$1" in -*) true;; *) false;; esac do shift; done
SLURM_JOB_ID=7 SLURM_JOB_NODELIST="n[1-2]" "$@"
echo "salloc over" >> "$0.log"
"""
SCONTROL = """#!/bin/sh
case "$*" in
"show hostnames n[1-2]") echo n1; echo n2;;
*"show node n1") echo "NodeName=n1 NodeAddr={0} State=ALLOCATED";;
*"show node n2") echo "NodeName=n2 NodeAddr={1} State=ALLOCATED";;
*"show job 7") echo "JobId=7 JobState=RUNNING Reason=None RunTime=00:00:09 TimeLimit=01:00:00";;
esac
"""
SRUN = """#!/bin/sh
echo "srun $*" >> "$0.log"
while case "$1" in -*) true;; *) false;; esac do case "$1" in --nodelist=*) n=${{1#*=}};; esac; shift; done
case $n in n1) exec {0} "$@";; n2) exec {1} "$@";; esac
"""


class Worker(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


def write_commands(folder: Path, network: HostNetwork) -> None:
    scripts = {
        "salloc": SALLOC,
        "scontrol": SCONTROL.format(network.address(1), network.address(2)),
        "srun": SRUN.format(*(" ".join(network.namespace(rank).prefix) for rank in (1, 2))),
        "squeue": "#!/bin/sh\n",
        "scancel": "#!/bin/sh\n",
    }
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[jobs.SSH, Path, HostNetwork, SSHServer]]:
    """A login node, its folder of commands, the network whose nodes do not reach the program, and the sshd there."""
    folder = tmp_path_factory.mktemp("slurm")
    commands = folder / "bin"
    commands.mkdir()
    with open_host_network(3) as network:
        write_commands(commands, network)
        path = f"{commands}:{os.environ['PATH']}"
        server = SSHServer(folder, network.address(0), network.namespace(0).prefix, "login", path=path, imports=True)
        network.part([1, 2], [CONTROLLER])
        yield jobs.SSH("login", options=server.options), commands, network, server
        server.close()


async def pids_of(job: jobs.SlurmJob) -> Sequence[int]:
    async with job as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
        assert hosts.names == ("n1", "n2")
        workers = await procs.spawn("workers", Worker)
        return list(await workers.pid.call())


async def test_slurm_behind_a_login_node(login: tuple[jobs.SSH, Path, HostNetwork, SSHServer]) -> None:
    """H30: salloc, srun and the relay run there; the allocation ends with the block."""
    via, commands, _, server = login
    with trio.fail_after(HANG_SECONDS):
        pids = await pids_of(jobs.SlurmJob(2, gpus=8, via=via))
        await wait_gone(pids)
    log = (commands / "salloc.log").read_text()
    assert "--gpus-per-node=8" in log
    assert log.endswith("salloc over\n")
    assert (commands / "srun.log").read_text().count("--nodelist=n1") == 1
    server.wait_idle()


async def test_same_commands_on_this_machine(
    login: tuple[jobs.SSH, Path, HostNetwork, SSHServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H30: without `via` they are those of the PATH here, and no agent reaches the program."""
    _, commands, network, _ = login
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr("trimesh.limits.HOST_JOIN_SECONDS", 2.0)
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        await pids_of(jobs.SlurmJob(2, interface=network.address(CONTROLLER)))
    assert {type(leaf) for leaf in leaves(caught.value)} == {SpawnError}


async def test_killed_step_is_one_lost_host(login: tuple[jobs.SSH, Path, HostNetwork, SSHServer]) -> None:
    """H30, H4."""
    via, _, _, server = login
    with trio.fail_after(HANG_SECONDS):
        with pytest.raises(MeshErrorGroup) as caught:
            async with jobs.SlurmJob(2, via=via) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
                workers = await procs.spawn("workers", Worker)
                pid = await workers.slice(hosts=1).pid.call_one()
                os.kill(parent_of(parent_of(pid)), 9)
                await workers.sleep.call()
        [lost] = leaves(caught.value)
        assert isinstance(lost, HostLost)
        assert dict(lost.point or {}) == {"hosts": 1}
    server.wait_idle()


async def test_login_node_without_slurm_is_named(login: tuple[jobs.SSH, Path, HostNetwork, SSHServer]) -> None:
    """H30."""
    via, commands, _, server = login
    (commands / "squeue").rename(commands / "away")
    try:
        with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
            await pids_of(jobs.SlurmJob(2, via=via))
        assert "PATH of login, and squeue is not" in str(next(leaves(caught.value)))
    finally:
        (commands / "away").rename(commands / "squeue")
    server.wait_idle()
