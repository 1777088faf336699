"""How agents of two hosts reach each other: who is let in, whom a dialler believes, what is told to others."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS
from tests.rows import rows

from trimesh import ConfigError, LinkLost, limits
from trimesh.ids import ProcId

pytest.importorskip("cryptography")

from trimesh._native import tls
from trimesh._transport.relay import HostConnection
from trimesh.jobs.connections import NOWHERE, DirectWays, ListenAddress, direct_place
from trimesh.jobs.identity import Authority

pytestmark = pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])

HERE = "127.0.0.1"
PLACE = ListenAddress(HERE, 0, (HERE,))
ONE, TWO, THREE = ProcId(1), ProcId(2), ProcId(3)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is to be late is: both sides are in this process, which a busy machine may keep waiting."""
    monkeypatch.setattr(limits, "HOST_DIAL_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(limits, "DIRECT_DIAL_SECONDS", HANG_SECONDS)


@attrs.frozen
class Agent:
    """An agent's ways, and the connections of others that were let in."""

    ways: DirectWays
    connected: list[HostConnection]

    def take(self, connection: HostConnection) -> None:
        """Remember a connection."""
        self.connected.append(connection)


class Agents:
    """Agents of one authority."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.authority = Authority(time.time())
        self._nursery = nursery
        self._contexts = list[tls.TLSContext]()
        self._connections = list[list[HostConnection]]()

    def add(self, own: ProcId) -> Agent:
        """Make one."""
        certified = self.authority.credentials(own, time.time())
        context = tls.TLSContext(chain=certified.chain, key=certified.key, authority=certified.authority)
        self._contexts.append(context)
        agent = Agent(DirectWays(context, certified, own, self.authority.mesh, PLACE, self._nursery), [])
        self._connections.append(agent.connected)
        return agent

    def close(self) -> None:
        """Close all."""
        for connections in self._connections:
            for connection in connections:
                close(connection)
        for context in self._contexts:
            context.close()


def close(connection: HostConnection) -> None:
    connection.sock.close()
    connection.tls.free()


@asynccontextmanager
async def agents(count: int = 1) -> AsyncGenerator[list[Agents], None]:
    """Make agents of some authorities."""
    made = list[Agents]()
    try:
        with trio.fail_after(HANG_SECONDS):
            async with trio.open_nursery() as nursery:
                made += [Agents(nursery) for _ in range(count)]
                yield made
                nursery.cancel_scope.cancel()
    finally:
        for one in made:
            one.close()


async def wait_taken(agent: Agent, count: int = 1) -> None:
    while len(agent.connected) < count:  # noqa: ASYNC110 - the other side of a connection is through a moment later
        await trio.sleep(0.01)


async def test_agent_that_is_expected_is_let_in_at_the_address_that_it_was_told() -> None:
    async with agents() as (family,):
        one, two = family.add(ONE), family.add(TWO)
        addresses = two.ways.listen_for(ONE, two.take)
        assert [address.rpartition(":")[0] for address in addresses] == [HERE]
        close(await one.ways.dial(TWO, addresses))
        await wait_taken(two)


async def test_agent_that_is_not_expected_is_refused() -> None:
    """H5: also one that was, and whose host is lost: its certificate is as good as before."""
    async with agents() as (family,):
        two, three = family.add(TWO), family.add(THREE)
        addresses = two.ways.listen_for(ONE, two.take)
        with pytest.raises(LinkLost, match="incarnation"):
            await three.ways.dial(TWO, addresses)
        two.ways.listen_for(THREE, two.take)
        close(await three.ways.dial(TWO, addresses))
        await wait_taken(two)
        two.ways.forget(THREE)
        with pytest.raises(LinkLost, match="incarnation"):
            await three.ways.dial(TWO, addresses)
        assert len(two.connected) == 1


async def test_address_of_another_incarnation_is_not_the_one_that_is_meant() -> None:
    """H5: whatever expects this agent at a recycled address gets nothing, and the next address is tried."""
    async with agents() as (family,):
        one, two, three = family.add(ONE), family.add(TWO), family.add(THREE)
        recycled = three.ways.listen_for(ONE, three.take)
        with pytest.raises(LinkLost, match="certificate"):
            await one.ways.dial(TWO, recycled)
        addresses = two.ways.listen_for(ONE, two.take)
        close(await one.ways.dial(TWO, (*recycled, *addresses)))
        await wait_taken(two)
        assert three.connected == []


async def test_certificate_of_another_authority_is_worth_nothing() -> None:
    """H7: to neither side."""
    async with agents(2) as (family, others):
        one, two = family.add(ONE), others.add(TWO)
        with pytest.raises(LinkLost, match="cannot be trusted"):
            await one.ways.dial(TWO, two.ways.listen_for(ONE, two.take))
        assert two.connected == []


async def test_agent_listens_while_others_are_expected() -> None:
    """H5: the second session uses the port of the first one; the last one closes it."""
    async with agents() as (family,):
        one, two = family.add(ONE), family.add(TWO)
        addresses = two.ways.listen_for(ONE, two.take)
        assert two.ways.listen_for(THREE, two.take) == addresses
        two.ways.forget(ONE)
        with pytest.raises(LinkLost, match="incarnation"):
            await one.ways.dial(TWO, addresses)
        two.ways.forget(THREE)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LinkLost, match="refused"):
            await one.ways.dial(TWO, addresses)


async def test_addresses_that_do_not_answer_take_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """H5: in order, each for so long, all together no longer; who accepts and says nothing does not answer."""
    monkeypatch.setattr(limits, "HOST_DIAL_SECONDS", 0.05)
    monkeypatch.setattr(limits, "DIRECT_DIAL_SECONDS", 0.12)
    async with agents() as (family,), await _silent() as silent:
        one = family.add(ONE)
        address = f"{HERE}:{silent.socket.getsockname()[1]}"
        with pytest.raises(LinkLost) as caught:
            await one.ways.dial(TWO, (address,) * 5)
        assert str(caught.value).count("no answer within 0.05 s") <= 2
        assert str(caught.value).endswith("no answer within 0.12 s")
        for wrong in ("nothing", "nothing:x", f"{HERE}:70000", "a..b:1"):
            with pytest.raises(LinkLost, match=wrong):
                await one.ways.dial(TWO, (wrong,))
        with pytest.raises(LinkLost, match="no address that other hosts reach"):
            await one.ways.dial(TWO, ())


async def test_strangers_who_say_nothing_keep_no_way_through_the_program_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: so many may be half open at the port; whoever comes then is turned away, and comes by the other way."""
    monkeypatch.setattr(limits, "DIRECT_HALF_OPEN_MAX", 2)
    async with agents() as (family,):
        one, two = family.add(ONE), family.add(TWO)
        addresses = two.ways.listen_for(ONE, two.take)
        strangers = [await trio.open_tcp_stream(HERE, int(addresses[0].rpartition(":")[2])) for _ in range(2)]
        with pytest.raises(LinkLost, match=r"closed|broke"):
            await one.ways.dial(TWO, addresses)
        for stranger in strangers:
            await stranger.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        close(await one.ways.dial(TWO, addresses))
        await wait_taken(two)


async def _silent() -> trio.SocketListener:
    (listener,) = await trio.open_tcp_listeners(0, host=HERE)
    return listener


async def test_ways_over_a_socket_pair_are_as_safe_as_others() -> None:
    """H5: what goes through the program's host is encrypted between the two agents, which know each other."""
    async with agents() as (family,):
        one, two, three = family.add(ONE), family.add(TWO), family.add(THREE)
        two.ways.listen_for(ONE, two.take)

        async def shake(dialler: Agent) -> list[HostConnection | LinkLost]:
            ours, theirs = socket.socketpair()
            found = list[HostConnection | LinkLost]()

            async def over(agent: Agent, sock: socket.socket, peer: ProcId, *, is_dialler: bool) -> None:
                try:
                    found.append(await agent.ways.over(sock, peer, is_dialler=is_dialler))
                except LinkLost as error:
                    found.append(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: over(dialler, ours, TWO, is_dialler=True))
                nursery.start_soon(lambda: over(two, theirs, ONE, is_dialler=False))
            return found

        for connection in await shake(one):
            assert isinstance(connection, HostConnection)
            close(connection)
        assert all(isinstance(one, LinkLost) for one in await shake(three))


@rows(
    ("wanted", "advertised", "route", "is_one_machine", "place"),
    [
        ("", (), "10.0.0.7", False, ListenAddress("10.0.0.7", 0, ("10.0.0.7",))),
        ("", (), HERE, False, NOWHERE),
        ("", (), "::1", False, NOWHERE),
        ("", (), HERE, True, ListenAddress(HERE, 0, (HERE,))),
        ("", (), "169.254.1.2", False, NOWHERE),
        ("lo", (), "10.0.0.7", False, NOWHERE),
        ("127.0.0.0/8", (), "10.0.0.7", True, ListenAddress(HERE, 0, (HERE,))),
        ("off", ("gateway",), "10.0.0.7", True, NOWHERE),
        ("10.9.9.9", (), "10.0.0.7", False, ListenAddress("10.9.9.9", 0, ("10.9.9.9",))),
        ("", ("gateway", "10.1.1.1"), "10.0.0.7", False, ListenAddress("10.0.0.7", 0, ("gateway", "10.1.1.1"))),
        ("", ("gateway:4000",), "10.0.0.7", False, ListenAddress("10.0.0.7", 4000, ("gateway:4000",))),
    ],
)
def test_what_is_told_to_others_is_apart_from_where_it_listens(
    wanted: str, advertised: tuple[str, ...], route: str, is_one_machine: bool, place: ListenAddress
) -> None:
    """H5: loopback is never told to another machine."""
    assert direct_place(wanted, advertised, route, is_one_machine=is_one_machine) == place


def test_interface_that_a_host_does_not_have_is_an_error_with_words() -> None:
    with pytest.raises(ConfigError, match="the setting direct must be an address, a network or an interface"):
        direct_place("eth77", (), "10.0.0.7", is_one_machine=False)
