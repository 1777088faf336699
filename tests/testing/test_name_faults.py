"""Names of hosts that do not resolve, resolve late or to another address, simulated and over real processes (S1)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import trio

from trimesh import Actor, endpoint
from trimesh.testing import simulate

BOTH = pytest.mark.mesh_backend("sim", "proc")
ADDRESS = "127.0.0.9"


class Client(Actor):
    """Looks up names, in the ways that Python has."""

    @endpoint
    async def ask(self, name: str) -> str:
        return str(socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)[0][4][0])

    @endpoint
    async def ask_by_trio(self, name: str) -> str:
        return str((await trio.socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM))[0][4][0])

    @endpoint(thread=True)
    def ask_in_thread(self, name: str) -> str:
        return socket.gethostbyname(name)

    @endpoint
    async def ask_for_all(self, name: str) -> str:
        found, others, addresses = socket.gethostbyname_ex(name)
        assert (found, others) == (name, [])
        return addresses[0]

    @endpoint(thread=True)
    def connect(self, name: str, way: Callable[[tuple[str, int]], None]) -> None:
        with socket.create_server((ADDRESS, 0)) as server:
            way((name, server.getsockname()[1]))


def by_python(address: tuple[str, int]) -> None:
    socket.create_connection(address).close()


def by_hand(address: tuple[str, int]) -> None:
    with socket.socket() as one:
        one.connect(address)


def by_asyncio(address: tuple[str, int]) -> None:
    async def connect() -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.close()

    asyncio.run(connect())


WAYS = ["ask", "ask_by_trio", "ask_in_thread", "ask_for_all"]


@BOTH
@simulate(seeds=2)
async def test_names_do_not_resolve_until_they_are_healed(mesh, faults, fault_log):
    client = await mesh.spawn("client", Client)
    one: Any = client.slice(gpus=1)

    for way in WAYS:
        heal = faults.names({"gpus": 1}).fails("EAI_AGAIN")
        with pytest.raises(socket.gaierror, match="Temporary failure") as caught:
            await getattr(one, way).call_one("localhost")
        assert caught.value.errno == socket.EAI_AGAIN
        assert await getattr(client.slice(gpus=0), way).call_one("localhost") == "127.0.0.1"
        heal()
        assert await getattr(one, way).call_one("localhost") == "127.0.0.1"
    assert {(fired.site, fired.where) for fired in fault_log} == {("names", "procs[gpus=1]")}


@BOTH
@simulate(seeds=2)
async def test_one_name_resolves_to_another_address(mesh, faults):
    client = await mesh.slice(gpus=0).spawn("client", Client)
    faults.names({"gpus": 0}, "db.internal").resolves(ADDRESS)
    faults.names({"gpus": 0}, "old.internal").fails(nth=2, times=1)
    faults.names({"gpus": 0}, "old.internal").resolves("::1")

    for way in WAYS:
        assert await getattr(client, way).call_one("db.internal") == ADDRESS
        assert await getattr(client, way).call_one("localhost") == "127.0.0.1"
    assert await client.ask.call_one("10.1.1.1") == "10.1.1.1"
    assert await client.ask.call_one("OLD.internal.") == "::1"
    with pytest.raises(socket.gaierror, match="Name or service not known"):
        await client.ask.call_one("old.internal")
    assert await client.ask.call_one("old.internal") == "::1"


@pytest.mark.mesh_backend("proc")
@simulate(seeds=1, per_host={"gpus": 1})
async def test_connections_by_name_ask(mesh, faults):
    client = await mesh.spawn("client", Client)

    heal = faults.names(mesh, "db.internal").resolves(ADDRESS)
    for way in (by_python, by_hand, by_asyncio):
        await client.connect.call_one("db.internal", way)
    heal()

    faults.names(mesh).fails()
    for way in (by_python, by_hand, by_asyncio):
        with pytest.raises(socket.gaierror, match="not known"):
            await client.connect.call_one("localhost", way)


@simulate(seeds=3)
async def test_slow_names_take_their_time(mesh, faults):
    client: Any = await mesh.slice(gpus=0).spawn("client", Client)
    faults.names({"gpus": 0}).slow(3.0)

    for way in ("ask", "ask_in_thread"):
        start = trio.current_time()
        await getattr(client, way).call_one("db.internal")
        assert trio.current_time() - start >= 3
        if way == "ask":
            start = trio.current_time()
            await client.ask.call_one("10.1.1.1")
            assert trio.current_time() - start < 1


@simulate(seeds=3)
async def test_simulated_names_have_addresses_of_their_own(mesh):
    client = await mesh.spawn("client", Client)

    found = {name: await client.ask.call(name) for name in ("a.internal", "b.internal")}

    assert {value.rpartition(".")[0].partition(".")[0] for one in found.values() for value in one.values()} == {"198"}
    assert all(len(set(one.values())) == 1 for one in found.values()), "the same in each process"
    assert found["a.internal"].values() != found["b.internal"].values()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda names: names.slow(0), "seconds must be above 0"),
        (lambda names: names.fails("NXDOMAIN"), "the error must be one of EAI_NONAME, EAI_AGAIN, EAI_FAIL"),
        (lambda names: names.resolves("db.internal"), "must resolve to an IP address such as"),
    ],
)
@simulate(seeds=1)
async def test_wrong_name_faults_are_refused(mesh, faults, act, text):
    with pytest.raises(ValueError, match=text):
        act(faults.names(mesh))
