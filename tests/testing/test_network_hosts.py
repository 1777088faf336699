"""The back end "net": the same bodies over simulated hosts and over hosts in network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import trio

from trimesh import Actor, HostLost, Isolate, ShapeError, endpoint, limits
from trimesh.testing import UnsupportedFault, open_host_network, simulate, why_no_networks
from trimesh.testing.real.host_network import missing_tools

both = pytest.mark.mesh_backend("sim", "net")
net = pytest.mark.mesh_backend("net")
needs_network = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_networks() is not None, reason=str(why_no_networks())),
]


class Counter(Actor):
    """Counts, so that what is lost or comes twice is seen."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def add(self, data: bytes = b"") -> int:
        del data
        self.count += 1
        return self.count

    @endpoint
    async def network(self) -> str:
        return os.readlink("/proc/self/ns/net")


@both
@simulate(seeds=10, hosts=2, per_host={"gpus": 1})
async def test_short_cut_loses_and_doubles_nothing(mesh: Any, faults: Any) -> None:
    """H3: on a network, too, a session goes on where it was."""
    async with mesh.spawn("counters", Counter) as counters:
        one = counters.slice(hosts=1)
        for direction in ("both", "a_to_b", "b_to_a"):
            before = await one.add.call_one()
            heal = faults.host(1).cut(direction)
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(one.add.call_one)
                await trio.sleep(limits.AGENT_LEASE_SECONDS / 4)
                heal()
            assert await one.add.call_one() == before + 6


@both
@simulate(seeds=10, hosts=3, per_host={"gpus": 2}, supervision=Isolate())
async def test_long_cut_is_the_loss_of_a_host(mesh: Any, faults: Any, fault_log: Any) -> None:
    """H4: the mesh that isolates its dead goes on with the others."""
    async with mesh.spawn("counters", Counter) as counters:
        heal = faults.host(1).cut()
        with pytest.raises(HostLost) as caught:
            await counters.slice(hosts=1, gpus=0).add.call_one()
        heal()
        assert (caught.value.reason, dict(caught.value.point or {})) == ("lease", {"hosts": 1})
        assert [await counters.slice(hosts=host, gpus=1).add.call_one() for host in (0, 2)] == [1, 1]
        assert [str(fired.fault) for fired in fault_log] == ["host 1: cut"]


@both
@simulate(seeds=10, hosts=2, per_host={"gpus": 1}, supervision=Isolate())
async def test_lost_agent_is_the_loss_of_its_host(mesh: Any, host_mesh: Any, faults: Any) -> None:
    """H4: and no further one can be started there."""
    async with mesh.spawn("counters", Counter) as counters:
        faults.host(0).lose()
        with pytest.raises(HostLost) as caught:
            await counters.slice(hosts=0).add.call_one()
        assert caught.value.reason == "agent exit"
        async with host_mesh.slice(hosts=1).spawn_procs({"cpus": 1}) as procs, procs.spawn("c", Counter) as more:
            assert await more.add.call_one() == 1
        with pytest.raises(ShapeError):
            faults.host(2).lose()


@net
@simulate(hosts=3, per_host={"gpus": 2})
async def test_each_host_has_a_network_of_its_own(mesh: Any) -> None:
    """Its processes and no others, not even those of the test."""
    async with mesh.spawn("counters", Counter) as counters:
        found = list(await counters.network.call())
    assert found[0::2] == found[1::2]
    assert len({*found, os.readlink("/proc/thread-self/ns/net")}) == 4


@net
@simulate(hosts=2, per_host={"gpus": 1})
async def test_bad_network_loses_and_doubles_nothing(mesh: Any, faults: Any) -> None:
    """H3: packets that are lost, a slow cable, connections that are reset."""
    async with mesh.spawn("counters", Counter) as counters:
        for host in (0, 1):
            faults.host(host).drop(0.05)
            faults.host(host).bandwidth(4_000_000)
        for number in range(40):
            if number % 10 == 5:
                faults.host(number // 10 % 2).reset()
            assert list(await counters.add.call(bytes(20_000))) == [number + 1] * 2


@simulate(seeds=1, hosts=2)
async def test_simulated_hosts_have_no_packets(host_mesh: Any, faults: Any) -> None:
    """A fault that cannot be is refused where it is planned."""
    del host_mesh
    for plan in (
        lambda: faults.host(0).drop(0.1),
        lambda: faults.host(0).bandwidth(1000),
        faults.host(0).reset,
    ):
        with pytest.raises(UnsupportedFault, match='"net"'):
            plan()


def test_networks_say_which_commands_are_missing() -> None:
    """So a test is skipped with a reason."""
    assert missing_tools(["ls", "no-such-command"]) == ["no-such-command"]


class TestNetwork:
    """What a test finds when it makes one itself."""

    pytestmark = needs_network

    def test_thread_is_back_where_it_was(self) -> None:
        before = os.readlink("/proc/thread-self/ns/net")
        with open_host_network(2) as network:
            assert os.readlink("/proc/thread-self/ns/net") != before
            assert network.address(0) in network.namespace(0).run(["ip", "addr"])
        assert os.readlink("/proc/thread-self/ns/net") == before

    def test_nothing_outlives_a_process_that_is_killed(self) -> None:
        """NN-1: nothing has a name that would have to be removed."""
        program = (
            "import os, signal\n"
            "from trimesh.testing import open_host_network\n"
            "with open_host_network(2) as network:\n"
            "    print(os.readlink('/proc/thread-self/ns/net'), flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert killed.returncode == -9
        own = killed.stdout.strip()
        assert own.startswith("net:[")
        number = own.removeprefix("net:[").removesuffix("]")
        for command in (["lsns", "-t", "net", "-n", "-o", "NS"], ["findmnt", "-n", "-o", "SOURCE"]):
            shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            assert shown
            assert number not in shown

    @pytest.mark.parametrize("ranks", [[], [2], [0, 1, -1]])
    def test_cut_is_between_some_hosts_and_others(self, ranks: list[int]) -> None:
        with open_host_network(2) as network, pytest.raises(ValueError, match="hosts"):
            network.cut(ranks)

    def test_network_that_cannot_be_made_leaves_nothing(self) -> None:
        before = {*os.listdir("/proc/self/fd")}
        with pytest.raises(ValueError, match="1 to 200"), open_host_network(201):
            pass
        assert before.issuperset(os.listdir("/proc/self/fd"))
