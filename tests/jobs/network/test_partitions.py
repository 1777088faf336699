"""Both sides of a partition conclude, by the network alone: what was cut off ends by itself."""

from __future__ import annotations

import pytest
import trio
from tests.jobs.network.observing import Teller, needs_network, telling, wait_gone, watching
from tests.patience import HANG_SECONDS

from trimesh import HostLost, Isolate, LinkLost, limits

pytest.importorskip("cryptography")

from trimesh.jobs.agent import HostProgram, _dial
from trimesh.jobs.identity import TokenLedger
from trimesh.jobs.launcher import AgentOrder
from trimesh.testing import NetworkJob, open_host_network

pytestmark = needs_network


async def test_partition_of_two_of_three_hosts_is_concluded_by_both_sides() -> None:
    """H4: the isolated processes end while the partition lasts; nothing of theirs comes after it is healed."""
    lost = dict[int, HostLost]()

    with open_host_network(3) as network, trio.fail_after(HANG_SECONDS):
        job = NetworkJob(network)
        async with (
            job as hosts,
            hosts.spawn_procs({"gpus": 1}, supervision=Isolate()) as procs,
            procs.spawn("tellers", Teller) as tellers,
            telling(tellers, 3) as told,
        ):
            isolated = [pid for host in (1, 2) for pid in await tellers.slice(hosts=host).pids.call_one()]
            await told.more([0, 1, 2], 10)

            async def wait_for(host: int) -> None:
                try:
                    await tellers.slice(hosts=host).sleep.call_one()
                except HostLost as error:
                    lost[host] = error

            with watching(isolated) as pidfds:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait_for, 1)
                    nursery.start_soon(wait_for, 2)
                    heal = network.cut([1, 2])
                    await wait_gone(pidfds)  # the cable of neither works
            assert network.dropped() > 0
            until_lost = [list(numbers) for numbers in told.numbers]
            heal()
            await told.more([0], 100)
            assert told.numbers[1:] == until_lost[1:]
            assert told.is_whole
            for host in (1, 2):
                with pytest.raises(HostLost):
                    await tellers.slice(hosts=host).pids.call_one()
    assert {host: (error.reason, error.host, dict(error.point or {})) for host, error in lost.items()} == {
        1: ("lease", "net/1", {"hosts": 1}),
        2: ("lease", "net/2", {"hosts": 2}),
    }
    assert [job.agents[host].exit_code for host in (1, 2)] == [1, 1], (
        "0 is the exit code of one that was told to end (H2)"
    )


async def test_connection_that_is_not_acknowledged_is_dialled_again() -> None:
    """H3: before the lease is over, in which TCP would try again two times more."""
    with open_host_network(1) as network, trio.fail_after(HANG_SECONDS):
        async with (
            NetworkJob(network) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("tellers", Teller) as tellers,
            telling(tellers, 1) as told,
        ):
            await told.more([0], 10)
            session = hosts._owned.host.hosts[0].host._pipe.session
            heal = network.cut([0])
            while session.is_connected:  # noqa: ASYNC110 - the relay tells its owner alone
                await trio.sleep(0.05)
            heal()
            await told.more([0], 10)
            assert told.is_whole
            assert session.statistics().connections == 2


async def test_agent_does_not_wait_for_ever_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: one that holds no standard input of a launcher ends, too, when the program is out of reach."""
    monkeypatch.setattr(limits, "HOST_JOIN_SECONDS", 0.2)
    with open_host_network(1) as network, trio.fail_after(HANG_SECONDS):
        network.cut([0])
        order = AgentOrder(TokenLedger(bytes(32)).issue(0).text, (f"{network.address(0)}:9",), "", {})
        with pytest.raises(LinkLost, match=r"not let this host join within limits\.HOST_JOIN_SECONDS \(0\.2 s\)"):
            await HostProgram(order, has_lifeline=False).run()


async def test_agent_waits_for_no_address_that_does_not_answer() -> None:
    """H3: the kernel would send the SYN again, later and later."""
    with open_host_network(1) as network, trio.fail_after(HANG_SECONDS):
        network.cut([0])
        with pytest.raises(LinkLost, match=r"no answer within 0\.2 s"):
            await _dial((f"{network.address(0)}:9",), 0.2)
