"""The life of a host at the door: one session, of which the first report counts (JH-1, JH-2)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.rows import rows

from trimesh import HostRefused, LinkLost, SpawnError, limits
from trimesh._runtime.life import current_proc
from trimesh._transport.relay import HostConnection, SessionDown, SessionEnding
from trimesh.ids import ProcId
from trimesh.testing.simulated.host import open_world

pytest.importorskip("cryptography")

from tests.jobs.site import Site

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs import door as doors
from trimesh.jobs.agent import HostProgram
from trimesh.jobs.connections import ListenAddress, context_of
from trimesh.jobs.identity import Credentials
from trimesh.jobs.pki import UNDERSTOOD

pytestmark = pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])


class Holder(doors.JoinedHost):
    """Writes down its life.

    Attributes:
        came_often: How often it was asked whether it is wanted.
        taken: Whether it has taken each of its connections.
        failures: Why it cannot be used.
    """

    def __init__(self, links: doors.HostLinks | None = None) -> None:
        super().__init__("n1")
        if links is not None:
            self._links = links
        self.came_often = 0
        self.taken = list[bool]()
        self.failures = list[str]()

    def came(self) -> bool:
        self.came_often += 1
        return super().came()

    def connected(self, incarnation: ProcId, connection: HostConnection) -> bool:
        self.taken.append(super().connected(incarnation, connection))
        return self.taken[-1]

    def became_ready(self) -> None:
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        assert isinstance(error, SpawnError)
        self.failures.append(str(error))


class Unwanted(Holder):
    """Is wanted no more when it comes."""

    def came(self) -> bool:
        super().came()
        return False


@asynccontextmanager
async def open_links(own: Credentials | None = None) -> AsyncGenerator[doors.HostLinks, None]:
    with trio.fail_after(HANG_SECONDS):
        async with open_world(), doors.open_host_links(current_proc(), ListenAddress("127.0.0.1"), own) as links:
            yield links


def program(links: doors.HostLinks, holder: Holder) -> HostProgram:
    return HostProgram(jobs.AgentOrder(links.door.expect(holder).text, (links.door.address,)))


@asynccontextmanager
async def member(host: HostProgram, credentials: Credentials) -> AsyncGenerator[Any, None]:
    """Connect a host that has joined."""
    context = context_of(credentials)
    try:
        async with host._dialled(context) as secure:
            yield secure
    finally:
        context.close()


async def until_closed(secure: Any) -> None:
    with pytest.raises(LinkLost):
        while True:
            await secure.receive_exactly(1)


async def test_host_has_one_session_over_all_its_connections() -> None:
    """JH-1: with its block that is over, and the door knows it no more."""
    async with open_links() as links:
        holder = Holder(links)
        host = program(links, holder)
        credentials = await host._join()
        assert not holder.joined.is_set()
        async with member(host, credentials) as first:
            await holder.joined.wait()
            async with member(host, credentials) as second:
                await until_closed(first)  # the session has taken the other one
                holder.close()
                await until_closed(second)
        assert (holder.came_often, holder.taken) == (1, [True, True])
        with pytest.raises(HostRefused, match="incarnation"):
            async with member(host, credentials):
                pytest.fail("its session is over")
        assert holder.failures == []
        known = weakref.ref(holder)
        del holder
        gc.collect()
        assert known() is None


async def test_host_that_says_nothing_is_lost_and_let_in_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """JH-1: its certificate is right, its session over."""
    monkeypatch.setattr(limits, "HOST_LEASE_SECONDS", 0.2)
    async with open_links() as links:
        holder = Holder(links)
        host = program(links, holder)
        credentials = await host._join()
        async with member(host, credentials) as secure:
            await holder.lost.wait()
            await until_closed(secure)
        async with member(host, credentials) as secure:
            await until_closed(secure)
        assert (holder.came_often, holder.taken) == (1, [True, False])
        assert holder.failures == [
            "the host n1 was lost before it was ready: its agent sent nothing for limits.HOST_LEASE_SECONDS (0.2 s)"
        ]
        holder.close()


@pytest.mark.parametrize("kind", [Holder, Unwanted])
async def test_host_that_nothing_waits_for_gets_no_session(kind: type[Holder]) -> None:
    """JH-1: whether it was given up before it came, or when it did."""
    async with open_links() as links:
        holder = kind(links)
        host = program(links, holder)
        if kind is Holder:
            holder.close()
        async with member(host, await host._join()) as secure:
            await until_closed(secure)
        assert not holder.joined.is_set()
        assert (holder.came_often, holder.taken) == (int(kind is Unwanted), [False])


@rows(
    "ending, reason, said",
    [
        (SessionEnding.LEASE, "", "its agent sent nothing for limits.HOST_LEASE_SECONDS (4 s)"),
        (SessionEnding.BYE, "", "its agent has ended"),
        (SessionEnding.PROTOCOL, "a frame too long", "a frame too long"),
    ],
)
async def test_first_report_of_a_loss_counts(ending: SessionEnding, reason: str, said: str) -> None:
    """JH-2"""
    holder = Holder()
    holder.session_down(SessionDown(None, ending, reason))  # type: ignore[arg-type] - which it does not look at
    assert holder.lost.is_set()
    holder.agent_failed("its agent has been killed")
    assert holder.failures == [f"the host n1 was lost before it was ready: {said}"]


async def test_refusal_is_a_failure_of_the_host() -> None:
    """H7"""
    holder = Holder()
    holder.refused(HostRefused("it has a wrong name"))
    assert holder.failures == ["the host n1 may not join: it has a wrong name"]


async def test_links_know_whether_they_are_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """H7: those of a user's own certificates are not."""
    pki = Site(tmp_path / "site", "n1").host("n1")
    for own, is_plain in (
        (await doors.own_credentials(None, "", "it"), False),
        (await doors.own_credentials(pki, "", "it"), False),
        (await doors.own_credentials(None, UNDERSTOOD, "it"), True),
    ):
        async with open_links(own) as links:
            assert links.is_plain is is_plain
    assert [record.levelname for record in caplog.records] == ["WARNING"]
