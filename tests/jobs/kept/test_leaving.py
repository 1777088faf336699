"""The end of a block of `jobs.attach`, with a keeper that the test plays."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS

pytest.importorskip("cryptography")

from trimesh.jobs.kept import kept_job
from trimesh.jobs.kept.state import HostsGranted, Lines, Question


async def test_block_ends_when_the_keeper_has_freed_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """H23: the keeper confirms the end of the block, by closing the connection."""
    ours, theirs = (trio.SocketStream(one) for one in trio.socket.socketpair())
    granted = HostsGranted(("n1",), {"hosts": 1}, is_named=False, host_ids=("",), interface="127.0.0.1", pickle=None)
    steps = list[str]()

    async def keeper() -> None:
        lines = Lines(theirs)
        await lines.receive(Question)
        await lines.send(granted)
        assert await lines.receive(Question) is None  # the program has left
        await trio.testing.wait_all_tasks_blocked()
        steps.append("freed")
        await lines.aclose()

    async def reached(_: str) -> tuple[None, Lines]:
        await trio.lowlevel.checkpoint()
        return None, Lines(ours)

    monkeypatch.setattr(kept_job, "reached", reached)
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper)
            async with kept_job._open_attachment("lab"):
                steps.append("attached")
            steps.append("left")
    assert steps == ["attached", "freed", "left"]
