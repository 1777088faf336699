"""Staged incidents: what the page and `trimesh ps` say first names the culprit (docs/how-to/find-a-culprit.md)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.dashboard.rigged import RiggedSource
from tests.memory_groups import memory_group
from tests.patience import HANG_SECONDS
from tests.program_template import Script, open_script

pytest.importorskip("cyclopts")
pytest.importorskip("anycorn", reason="comes with the extra `dashboard`")

from tests.dashboard.asking import act, ask, entered, serving

from trimesh import limits
from trimesh._native import tls
from trimesh.cli.commands import newest_dead
from trimesh.cli.dashboard.board import Board, see
from trimesh.cli.dashboard.feed import PageFeed, RunSource
from trimesh.cli.dashboard.problems import Problem
from trimesh.cli.dashboard.runs import first_run
from trimesh.cli.processes import run_lines
from trimesh.errors import ConnectError
from trimesh.observe import RunSnapshot

pytestmark = pytest.mark.real
VICTIMS = Path(__file__).parents[1] / "observe" / "victims.py"


class StagedSource(RunSource):
    """A run that begins to fail when it has been looked at."""

    def __init__(self, process: Script) -> None:
        super().__init__(process.pid)
        self._input = process.stdin

    def snapshot(self) -> RunSnapshot:
        """Return what all say; then let the program begin."""
        seen = super().snapshot()
        if self._input is not None:
            self._input.close()
            self._input = None
        return seen


@contextmanager
def staged(way: str, *before: str, waits: bool = False) -> Iterator[RunSource]:
    """Run a program that comes to a standstill in some way.

    Args:
        way: How.
        before: What stands before its command.
        waits: Let it do so only once the page has been drawn, see `last`.
    """
    with open_script(VICTIMS, way, before=before, has_input=waits) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            source = StagedSource(process)
            try:
                yield source
            finally:
                source.close()
        finally:
            process.kill()
            process.wait()


def first(source: RunSource, kind: str, is_whole: Callable[[Problem], bool] = lambda _: True) -> Problem:
    """Return the first problem, once it is of a kind, and all of it is there."""
    ends_at = time.monotonic() + HANG_SECONDS
    found: list[Problem] = []
    while time.monotonic() < ends_at:
        seen = source.snapshot()
        found = list(see(seen).board.problems)
        if found and found[0].kind == kind and is_whole(found[0]):
            line = next(iter(run_lines(seen))).plain  # Q18
            assert line.startswith(f"run {source.pid}: {found[0].title}"), line
            assert "; see: trimesh " in line
            return found[0]
    raise AssertionError(f"the page does not begin with {kind!r}: {found}")


async def last(source: RunSource) -> Board:
    """Return the board of a run that has ended."""
    feed = PageFeed(source, every=0.05)
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery, aclosing(feed.follow()) as parts:
            nursery.start_soon(feed.run)
            async for _ in parts:
                if feed.seen is not None and feed.seen.board.state == "ended":
                    dead = await trio.to_thread.run_sync(newest_dead)  # Q18
                    assert f": {feed.seen.board.problems[0].title[:100]}" in dead
                    nursery.cancel_scope.cancel()
                    return feed.seen.board
    raise AssertionError


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts for half a second counts as long."""
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.5)


def test_rank_that_computes_without_a_checkpoint():
    with staged("computes") as source:
        one = first(source, "stuck", lambda one: one.names == ("procs[gpus=2]",) and "in compute" in one.at)
    assert one.count == 1


def test_calls_that_wait_for_each_other_under_a_deadline():
    with staged("deadlock") as source:
        one = first(source, "deadlock", lambda one: "the first deadline ends it" in one.text)
    assert {"workers[gpus=0]", "workers[gpus=1]"} == set(one.names)
    assert any("workers[gpus=0].ask" in line for line in one.chain)


@pytest.mark.usefixtures("early")
def test_slow_rank_among_many():
    with staged("slow") as source:
        one = first(source, "alone", lambda one: one.names == ("workers[gpus=2]",) and "in step" in one.at)
    assert "workers.step" in one.title


def test_full_mailbox():
    with staged("floods") as source:
        one = first(source, "full", lambda one: "in wait" in one.at)
    assert one.names == ("workers[gpus=2]",)
    assert "workers[gpus=2].wait holds it" in one.text


@pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])
async def test_host_that_was_lost():
    with staged("loses a host", waits=True) as source:
        one = (await last(source)).problems[0]
    assert one.kind == "ended"
    assert "HostLost" in one.title
    assert "agent" in one.title


async def test_rank_that_the_kernel_kills_for_want_of_memory():
    with memory_group(320 << 20) as group:
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        with staged("leaks", "sh", "-c", join, "sh", waits=True) as source:
            one = (await last(source)).problems[0]
    assert (one.kind, one.names) == ("ended", ("procs[gpus=2]",))
    assert "SIGKILL (out of memory)" in one.title
    assert "workers[gpus=2].leak" in one.text


@pytest.mark.stress
@pytest.mark.usefixtures("early")
def test_collective_that_waits_for_a_rank_that_has_left():
    """Who has left is said first; then, that the others do not turn their loops."""
    with staged("left") as source:
        one = first(source, "absent", lambda one: one.is_sure)
        found = see(source.snapshot()).board.problems
    assert one.names == ("workers[gpus=1]",)
    assert [one.count for one in found if one.kind == "stuck"] == [3]


@pytest.mark.stress
def test_rank_that_leaks_memory():
    with staged("leaks") as source:
        one = first(source, "memory")
    assert one.names == ("procs[gpus=2]",)


def test_command_serves_the_run_and_says_what_it_has_died_of():
    """The whole way: the command, its address, what a browser would ask, a kill by the page, the end of the run."""
    with staged("slow") as source:
        command = [sys.executable, "-m", "trimesh.cli", "dashboard", "--pid", str(source.pid), "--every", "0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
            try:
                assert page.stdout is not None
                address = page.stdout.readline()
                match = re.fullmatch(r"http://127.0.0.1:([0-9]+)/\?token=(.+)\n", address)
                assert match is not None
                browser = Visitor(int(match[1]), match[2])
                browser.board("live", lambda board: names_of(board) == ["controller", "procs", "workers"])
                detail = browser.get("/api/detail?name=procs:procs:3")
                assert detail["activity"]["proc"]["name"] == "procs[gpus=3]"
                places = browser.get("/api/places")
                assert [name for _, name, *_ in places] == [f"procs[gpus={rank}]" for rank in range(4)]
                tasks: Any = {"endpoints": []}
                while "workers.step" not in tasks["endpoints"]:  # the program may not have come to it
                    tasks = browser.get(f"/api/tasks?procs={','.join(one[0] for one in places)}&millis=600000")
                bar = next(bar for row in tasks["rows"] for bar in row["bars"] if row["name"] == "procs[gpus=2]")
                call = browser.get(f"/api/call?proc={places[2][0]}&number={bar[6]}")
                assert (call["caller"], call["name"].partition(".")[0]) == ("controller", "workers[gpus=2]")
                trace = browser.get("/api/trace?millis=600000")
                assert "step" in [event["name"] for event in trace["traceEvents"]]
                browser.kill(detail["activity"]["proc"]["id"])
                assert "procs[gpus=3] has died first" in browser.board("ended")["problems"][0]["title"]
                assert page.stdout.readline() not in ("", address)
                page.send_signal(signal.SIGINT)
                assert page.wait(HANG_SECONDS) == 0
            finally:
                page.kill()


def names_of(board: Any) -> list[str]:
    """Return the names of the meshes on a board."""
    return sorted(mesh["name"] for mesh in board["meshes"])


class Visitor:
    """A browser, as far as this test needs one."""

    def __init__(self, port: int, token: str, cookie: str = "") -> None:
        self.port, self.cookie = port, cookie
        if cookie:
            return
        with closing(self._request(f"/?token={token}")) as answer:
            self.cookie = (answer.getheader("set-cookie") or "").partition(";")[0]

    def _request(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"cookie": self.cookie, "connection": "close", **named})
        return connection.getresponse()

    def get(self, path: str) -> Any:
        """Return what is answered."""
        with closing(self._request(path)) as answer:
            return json.loads(answer.read())

    def board(self, state: str, is_whole: Callable[[Any], bool] = lambda _: True, run: str = "") -> Any:
        """Return the first board that has a state, and has all that it should have."""
        with closing(self._request(f"/api/stream?run={run}" if run else "/api/stream")) as answer:
            while line := answer.readline():
                if not line.startswith(b"data: {"):
                    continue
                board = json.loads(line[6:])
                if board["state"] == state and is_whole(board):
                    return board
        raise AssertionError("the stream has ended")

    def kill(self, target: str) -> None:
        """Kill a process, as the page does it."""
        body = json.dumps({"target": target}).encode()
        token, origin = self.get("/api/session")["act"], f"http://127.0.0.1:{self.port}"
        headers = {"origin": origin, "content_type": "application/json", "x_trimesh_token": token}
        with closing(self._request("/api/kill", "POST", body, **headers)) as answer:
            assert answer.status == 200, answer.read()


async def test_act_that_is_refused_says_why():
    """As the run says it."""

    class Refusing(RiggedSource):
        def kill(self, proc_id: str) -> None:
            raise ConnectError("its process has ended, or belongs to another one of the run")

    async with serving(Refusing(1, 2)) as server:
        answer = await act(server, "kill", "7", await entered(server))
        assert (answer.status, json.loads(answer.text)["error"][:21]) == (502, "its process has ended")
        assert (await ask(server, "/api/session")).status == 401


async def test_runs_are_listed_and_opened_one_beside_the_other():
    """Q8: a living one, and a dead one with its cause, its processes and its calls, to which nothing can be done."""
    with open_script(VICTIMS, "dies") as dead, staged("slow") as living:
        assert dead.stdout is not None
        assert dead.stdout.readline()
        assert dead.stdin is None
        dead.wait()
        with trio.fail_after(HANG_SECONDS):
            async with serving(None) as server:
                cookie = await entered(server)
                entries = json.loads((await ask(server, "/api/runs", cookie=cookie)).text)
                assert [(one["pid"], one["is_alive"]) for one in entries] == [(living.pid, True), (dead.pid, False)]
                assert "procs[gpus=1] has died first" in entries[1]["text"]
                assert entries[1]["command"]
                for entry, state in zip(entries, ("live", "ended"), strict=True):
                    await trio.to_thread.run_sync(_first_board, server.port, cookie, entry["key"], state)
                key = entries[1]["key"]
                places = json.loads((await ask(server, f"/api/places?run={key}", cookie=cookie)).text)
                assert [name for _, name, *_ in places] == [f"procs[gpus={rank}]" for rank in range(4)]
                path = f"/api/tasks?run={key}&millis=600000&procs={places[1][0]}"
                assert "workers.die" in json.loads((await ask(server, path, cookie=cookie)).text)["endpoints"]
                answer = await act(server, f"kill?run={key}", places[0][0], cookie)
                assert (answer.status, "has ended, got a request to kill" in answer.text) == (502, True)
                for wrong in ("../x", "1", ""):
                    assert (await ask(server, f"/api/detail?run={wrong}", cookie=cookie)).status == 502
                await act(server, f"kill?run={living.pid}", "1", cookie)


def _first_board(port: int, cookie: str, key: str, state: str) -> None:
    visitor = Visitor(port, "", cookie)
    board = visitor.board(state, lambda board: board["meshes"] != [], run=key)
    if state == "ended":
        assert board["problems"][0]["names"] == ["procs[gpus=1]"]
        assert [one["kind"] for one in board["problems"]] == ["ended"]


@pytest.mark.daily
def test_page_begins_with_the_only_living_run():
    """Q8: else with the list; without any run it is an error."""
    with pytest.raises(ConnectError, match="no run of this user"):
        first_run(None)
    with staged("slow") as one:
        found = first_run(None)
        assert found is not None
        assert found.pid == one.pid
        found.close()
        with staged("slow"):
            assert first_run(None) is None
        with pytest.raises(ConnectError, match="no run of this user has process 1"):
            first_run(1)
