"""Drawings of handles and of runs in notebooks, by the states of real processes."""

from __future__ import annotations

import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, Backoff, Isolate, Restart, Stalled, endpoint, limits
from trimesh.observe import live

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Worker(Actor):
    @endpoint
    def hold(self, until: Path) -> None:
        while not until.exists():
            time.sleep(0.01)  # its loop does not turn

    @endpoint
    def odd(self) -> int:
        if trimesh.context().point["gpus"] == 1:
            raise LookupError("an odd one")
        return 7


def shown(handle: object) -> tuple[str, list[str]]:
    """Return the name above a drawing, and the titles of its cells, sorted."""
    card = ElementTree.fromstring(f"<div>{handle._repr_html_()}</div>")  # type: ignore[attr-defined]
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


def test_failures_of_several_members_are_drawn() -> None:
    """Q20: in values by the coordinates of the view, in a group by those of the mesh; equal ones are one row."""
    with tb.spawn_procs({"hosts": 2, "gpus": 2}) as procs:
        outcomes = procs.spawn("workers", Worker).odd.call_settled()
    failed = trimesh.MeshErrorGroup("workers.odd failed", [one.error for one in outcomes if one.error is not None])

    assert shown(outcomes)[1] == [
        "[hosts=0,gpus=0]: returned",
        "[hosts=0,gpus=1]: failed: LookupError: an odd one",
        "[hosts=1,gpus=0]: returned",
        "[hosts=1,gpus=1]: failed: LookupError: an odd one",
    ]
    assert shown(failed) == (
        "workers{'hosts': 2, 'gpus': 2}",
        ["workers[hosts=0,gpus=1]: failed", "workers[hosts=1,gpus=1]: failed"],
    )
    table = failed._repr_html_().partition("<table>")[2]
    assert re.findall(">([^<>]+)</td>", table) == [
        "workers[hosts=0..1,gpus=1]",
        "2 processes",
        " LookupError: an odd one",
    ]
    assert shown(trimesh.MeshErrorGroup("workers.odd failed", failed.failures[:1])) == ("", [])


def test_this_host_is_drawn() -> None:
    """Q20: a mesh of hosts has a cell for each."""
    assert shown(tb.this_host()) == ("this host", [f"hosts: live on {tb.this_host().names[0]}"])


# ---- the overview of a run -------------------------------------------------------------------------------------------


class Output:
    """Output of a cell: keeps what it has to show, and can fail."""

    def __init__(self) -> None:
        self.shown = list[str]()
        self.are_enough = threading.Event()
        self.fails = False
        self.is_closed = False

    def show(self, html: str) -> None:
        assert not self.is_closed
        self.shown.append(html)
        if self.fails or len(self.shown) >= 3:
            self.are_enough.set()
        if self.fails:
            raise OSError("the notebook is gone")

    def close(self) -> None:
        self.is_closed = True

    async def wait_enough(self) -> None:
        assert await trio.to_thread.run_sync(self.are_enough.wait, HANG_SECONDS)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    """The output of a cell, which is drawn into without a pause."""
    found = Output()
    monkeypatch.setattr(live, "open_cell_output", lambda: found)
    monkeypatch.setattr(limits, "LIVE_SECONDS", 0.0)
    return found


@pytest.mark.parametrize("end", ["left", "error", "cancel"])
async def test_overview_ends_with_its_block(end: str, output: Output) -> None:
    """Q21: however the body ends, which goes on as it would alone; the last drawing says when it was made."""
    with trio.fail_after(HANG_SECONDS):
        async with trimesh.this_host().spawn_procs({"hosts": 1, "gpus": 2}) as procs:
            with (
                trio.CancelScope() as scope,
                pytest.raises(LookupError, match="of the body") if end == "error" else nullcontext(),
            ):
                async with procs.slice(gpus=0).live():
                    await output.wait_enough()
                    if end == "error":
                        raise LookupError("of the body")
                    if end == "cancel":
                        scope.cancel()
                        await trio.sleep_forever()
            assert scope.cancelled_caught == (end == "cancel")
            assert output.is_closed
            count = len(output.shown)
            await trimesh.observe.snapshot()
            assert len(output.shown) == count
    assert "as it was at" in output.shown[-1]
    assert "as it was at" not in output.shown[-2]
    for page in output.shown:
        titles = re.findall("<title>(.*?)</title>", page)
        assert [title.partition(":")[0] for title in titles] == ["procs[hosts=0,gpus=0]", "procs[hosts=0,gpus=1]"]


async def test_overview_that_cannot_be_drawn_ends_no_run(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """Q21: it is logged once."""
    output.fails = True
    with trio.fail_after(HANG_SECONDS):
        async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs, procs.live():
            await output.wait_enough()
            assert len((await trimesh.observe.snapshot()).procs) == 3
    assert len(output.shown) == 1
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the overview of the run is not shown any more"
    ]


def test_overview_without_await(output: Output) -> None:
    """Q21, K06: also while the thread waits for a call; a death is in the picture."""
    with tb.spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
        workers = procs.spawn("workers", Worker)
        with procs.live():
            procs.kill([{"gpus": 1}])
            assert output.are_enough.wait(HANG_SECONDS)
            del workers
    assert output.is_closed
    assert "procs[gpus=1]: dead" in output.shown[-1]
    assert "procs[gpus=1] was killed by SIGKILL" in output.shown[-1]


async def test_outside_of_a_notebook_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """Q21: and a process that owns no mesh has none to show."""
    with trio.fail_after(HANG_SECONDS):
        async with trimesh.this_host().spawn_procs({"gpus": 1}) as procs:
            async with procs.live():
                await trimesh.observe.snapshot()
            with pytest.raises(RuntimeError, match="watch a run in the program that owns its processes"):
                trimesh.this_proc().live()
    assert capfd.readouterr() == ("", "")
