"""Drawings of handles in notebooks, by the states of real processes."""

from __future__ import annotations

import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, Backoff, Isolate, Restart, Stalled, endpoint

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Worker(Actor):
    @endpoint
    def hold(self, until: Path) -> None:
        while not until.exists():
            time.sleep(0.01)  # its loop does not turn


def shown(handle: object) -> tuple[str, list[str]]:
    """Return the name above a drawing, and the titles of its cells, sorted."""
    card = ElementTree.fromstring(handle._repr_html_())  # type: ignore[attr-defined]
    titles = [title.text or "" for title in card.iter("{http://www.w3.org/2000/svg}title")]
    return card.findtext(".//code") or "", sorted(titles)


def test_drawing_has_members_by_their_states(tmp_path: Path) -> None:
    """Q20: a process that is killed has ended, one that is being restarted says so, and so does one that stalls."""
    until = tmp_path / "until"
    with (
        trimesh.configured(stall_after=0.2),
        tb.spawn_procs({"hosts": 2, "gpus": 2}, supervision=Isolate()) as procs,
    ):
        workers = procs.spawn("workers", Worker)
        procs.kill([{"hosts": 1, "gpus": 0}])
        with procs.events() as events:
            held = workers.slice(hosts=0, gpus=1).hold.call_one.submit(until)
            next(event for event in events if isinstance(event, Stalled))
            name, (first, stalled, ended, last) = shown(procs)
            until.touch()
            held.result()
        assert name == "processes procs{'hosts': 2, 'gpus': 2}"
        assert [first, ended, last] == [
            "procs[hosts=0,gpus=0]: live",
            "procs[hosts=1,gpus=0]: ended",
            "procs[hosts=1,gpus=1]: live",
        ]
        assert stalled.startswith("procs[hosts=0,gpus=1]: stalled for ")
        part = workers.slice(hosts=1)
        assert shown(part) == (
            "actors workers[hosts=1]{'gpus': 2} of Worker",
            ["workers[hosts=1,gpus=0]: ended", "workers[hosts=1,gpus=1]: live"],
        )
        assert shown(part.alive())[1] == ["workers[hosts=1,gpus=1]: live"]
    assert set(shown(workers)[1]) == {f"workers[hosts={a},gpus={b}]: ended" for a in (0, 1) for b in (0, 1)}


async def test_member_that_is_being_restarted_says_so() -> None:
    """Q20: also by the handles of Trio."""
    with trio.fail_after(HANG_SECONDS):
        async with trimesh.this_host().spawn_procs({"gpus": 2}, supervision=Restart(backoff=Backoff(60))) as procs:
            workers = await procs.spawn("workers", Worker)
            await procs.kill([{"gpus": 1}])
            assert shown(procs)[1] == ["procs[gpus=0]: live", "procs[gpus=1]: restarting"]
            assert shown(workers)[1] == ["workers[gpus=0]: live", "workers[gpus=1]: restarting"]


def test_this_host_is_drawn() -> None:
    """Q20: a mesh of hosts has a cell for each."""
    assert shown(tb.this_host()) == ("this host", [f"hosts: live on {tb.this_host().names[0]}"])
