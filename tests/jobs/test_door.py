"""Who is let in at the door of a mesh: who has a token, once; who has a certificate; who runs the same versions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import HostRefused, LinkLost, MeshErrorGroup, leaves
from trimesh.ids import ProcId

pytest.importorskip("cryptography")

from tests.jobs.strangers import Guest

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs import door as doors
from trimesh.jobs.agent import HostProgram
from trimesh.jobs.connections import ListenAddress, SecureSocket, own_hello
from trimesh.jobs.identity import Authority, JoinToken

pytestmark = [pytest.mark.real, pytest.mark.daily, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

OWN = ProcId(7)


@asynccontextmanager
async def open_door() -> AsyncGenerator[tuple[doors.Door, Authority], None]:
    authority = Authority(time.time())
    with trio.fail_after(HANG_SECONDS), doors.door_context(OWN, authority) as context:
        async with doors.open_door_at(ListenAddress("127.0.0.1"), OWN, authority, context) as door:
            yield door, authority


def program(door: doors.Door, token: JoinToken) -> HostProgram:
    return HostProgram(jobs.AgentOrder(token.text, (door.address,)))


async def test_token_lets_one_host_in_once() -> None:
    """H7: a second use, a wrong secret and a token of another mesh are refused; the door goes on."""
    async with open_door() as (door, _):
        guest = Guest()
        token = door.expect(guest)
        wrong = JoinToken(token.number, bytes(32), token.pin)
        with pytest.raises(HostRefused, match="token"):
            await program(door, wrong)._join()
        credentials = await program(door, token)._join()
        assert credentials.chain
        with pytest.raises(HostRefused, match="token"):
            await program(door, token)._join()
        stranger = JoinToken(token.number, token.secret, Authority(time.time()).pin)
        with pytest.raises(LinkLost):
            await program(door, stranger)._join()
        await program(door, door.expect(guest))._join()
        assert guest.refusals == []


async def test_host_that_leaves_before_its_certificate_is_refused() -> None:
    """H7: the launcher that waits for it hears why, rather than of a time limit."""
    async with open_door() as (door, _):
        guest = Guest()
        token = door.expect(guest)
        host = program(door, token)
        context = tls.TLSContext(pin=token.pin)
        try:
            async with host._dialled(context, is_join=True):
                assert guest.refusals == []
        finally:
            context.close()
        while not guest.refusals:
            await trio.lowlevel.checkpoint()
        assert [type(error) for error in guest.refusals] == [HostRefused]


async def test_member_needs_a_certificate() -> None:
    """H7: who has none, or one of an incarnation that the door does not know, comes no further than its hello."""
    async with open_door() as (door, authority):
        guest = Guest()
        token = door.expect(guest)
        for context in (
            tls.TLSContext(pin=token.pin),
            tls.TLSContext(**_texts(authority.credentials(ProcId(9), time.time()))),
        ):
            host, port = door.address.split(":")
            stream = await trio.open_tcp_stream(host, int(port))
            secure = SecureSocket(stream.socket, context.open(own_hello(ProcId(9), token.mesh), is_server=False))
            with pytest.raises(LinkLost):
                await secure.shake_hands()
                await secure.receive_exactly(1)
            secure.close()
            context.close()
        assert guest.connections == []


def _texts(credentials: object) -> dict[str, bytes]:
    return {name: getattr(credentials, name) for name in ("chain", "key", "authority")}


async def test_other_versions_are_refused_by_the_names_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: `HostRefused` says what each side runs, and nothing of the job is left."""
    monkeypatch.setattr(doors, "own_versions", lambda: ("9.9.9", "3.99.1", ""))
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.LocalJob(1):
            pytest.fail("the host has joined")
    (refused,) = leaves(caught.value)
    assert isinstance(refused, HostRefused)
    assert "this program runs trimesh 9.9.9" in str(refused)
    assert "this program runs Python 3.99.1" in str(refused)


def test_versions_fit_where_the_first_two_numbers_of_python_do() -> None:
    """H7: torch counts where both have loaded it."""
    assert doors.difference(("1.0", "3.11.7", ""), ("1.0", "3.11.9", "2.4.0")) is None
    assert "torch 2.3.0" in str(doors.difference(("1.0", "3.11.7", "2.3.0"), ("1.0", "3.11.7", "2.4.0")))


@pytest.mark.executed("what its agents execute is another text")
async def test_job_that_cannot_start_an_agent_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: an agent that ends before it has joined is told with what it wrote."""
    for boot in ("local._BOOT", "local.BOOT"):
        monkeypatch.setattr(f"trimesh.jobs.{boot}", "raise SystemExit('no trimesh here')")
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with jobs.LocalJob(2):
            pytest.fail("the host has joined")
    assert "no trimesh here" in str(next(iter(leaves(caught.value))))
