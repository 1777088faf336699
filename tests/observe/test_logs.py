"""What processes have written, as it is seen from outside (Q3)."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator

import pytest
import trio
from tests.observe.test_incidents import Shell, cancelled_at_the_end

from trimesh import Actor, Isolate, endpoint, limits, observe, this_host
from trimesh._runtime.snapshot import memory_of
from trimesh._runtime.system.output import STDERR, STDOUT, OutputLog
from trimesh._runtime.system.records import OutputChunk

pytest.importorskip("cyclopts")

from trimesh.cli.logs import is_at, log_lines

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("patient")]


class Speaker(Actor):
    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    async def wait(self) -> None:
        await trio.sleep_forever()

    @endpoint(thread=True)
    def storm(self, lines: int) -> None:
        for number in range(lines):
            print(f"line {number} of a storm that says nothing but that it is one, again and again")

    @endpoint(concurrency=2, group="awake")
    async def awake(self) -> None:
        await trio.lowlevel.checkpoint()


STORM_ROUNDS = 2
STORM_LINES = 50_000


@pytest.fixture
def trimesh_command(capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capfd)


def shown(said: str) -> list[str]:
    """Return the lines of a command without their times; what the controller itself shows has none."""
    return [line[14:] for line in said.splitlines() if re.match(r"\d\d:\d\d:\d\d\.\d{3}  ", line)]


async def test_output_of_ranks_is_shown_by_time_and_rank(trimesh_command: Shell):
    """Q3: what the controller has shown, as long as it keeps it; no text can steer the terminal."""
    async with this_host().spawn_procs({"gpus": 3}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        await speakers.say.call("ready\x1b[2J")
        await speakers.slice(gpus=2).say.call("alone")
        while len(lines := shown((await trimesh_command("logs", "--all"))[1])) < 4:
            pass
        assert sorted(lines) == [
            *(f"procs[gpus={rank}] | ready\\x1b[2J" for rank in range(2)),
            "procs[gpus=2] | alone",
            "procs[gpus=2] | ready\\x1b[2J",
        ]
        _, said = await trimesh_command("logs", "--at", "gpus=2")
        assert shown(said) == ["procs[gpus=2] | ready\\x1b[2J", "procs[gpus=2] | alone"]
        _, said = await trimesh_command("logs", "--json", "--at", "procs[gpus=0]")
        assert [json.loads(line)["text"] for line in said.splitlines() if line[0] == "{"] == ["ready\x1b[2J"]


async def test_lines_are_followed_from_where_the_last_answer_ended(trimesh_command: Shell):
    """Q3: no line comes twice."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        with observe.find_run() as run:
            await speakers.say.call("one")
            while not (first := await trio.to_thread.run_sync(run.output)):
                pass
            await speakers.say.call("two")
            while not (second := await trio.to_thread.run_sync(run.output, first[-1].number)):
                pass
    assert [(row.text, row.name) for row in (*first, *second)] == [("one", "procs[gpus=0]"), ("two", "procs[gpus=0]")]


def test_a_storm_of_lines_is_kept_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OBSERVED_OUTPUT_BYTES", 10_000)
    monkeypatch.setattr(limits, "OBSERVED_OUTPUT_LINES", 20)
    log = OutputLog()
    for number in range(1_000):
        log.keep([OutputChunk("a[n=0]", STDOUT, 0, (b"line %d" % number, b"\rbar 1\rbar 2"))])
    rows = log.after(0)
    assert [row.number for row in rows] == list(range(1_981, 2_001))
    assert [row.text for row in rows[-2:]] == ["line 999", "bar 2"]
    assert len(log.after(1_999)) == 1
    log.keep([OutputChunk("a[n=0]", STDERR, 7, (b"\xff",))])
    assert [(row.number, row.dropped, row.text) for row in log.after(2_000)] == [(2_001, 7, ""), (2_002, 0, "\ufffd")]


@pytest.mark.stress
async def test_ranks_that_write_at_full_speed_hold_nothing_up(monkeypatch: pytest.MonkeyPatch):
    """Q3, O8: ten ranks, lines as fast as they go: what is not shown is counted, memory is bounded, no rank is lost."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("sys.stdout", io.StringIO())
    before = memory_of(os.getpid())
    async with this_host().spawn_procs({"gpus": 10}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        async with trio.open_nursery() as nursery:
            for _ in range(STORM_ROUNDS):
                nursery.start_soon(speakers.storm.call, STORM_LINES)
            calls = 0
            while len(nursery.child_tasks):
                assert len((await speakers.awake.call()).values()) == 10
                calls += 1
                await trio.sleep(0.05)
        with observe.find_run() as run:
            kept = await trio.to_thread.run_sync(run.output)
        states = {proc.state for proc in (await observe.snapshot()).procs}
    grown = memory_of(os.getpid()) - before
    assert states == {"running"}
    assert sum(len(row.text) for row in kept) <= limits.OBSERVED_OUTPUT_BYTES
    assert sum(row.dropped for row in kept) > 0
    assert grown < 64 << 20, (grown, calls)


def rows(*said: tuple[float, str, str]) -> Iterator[observe.OutputRow]:
    for number, (at, name, text) in enumerate(said, 1):
        yield observe.OutputRow(number=number, at=at, name=name, text=text)


def test_equal_lines_are_one_within_a_second() -> None:
    said = list(rows((1.0, "a[n=0]", "x"), (1.2, "a[n=1]", "x"), (1.3, "a[n=0]", "x"), (9.0, "a[n=1]", "x")))
    assert shown("\n".join(log_lines(said, shows_all=False))) == [
        "a[n=0] | x  x2: and a[n=1]",
        "a[n=0] | x",
        "a[n=1] | x",
    ]
    assert len(list(log_lines(said, shows_all=True))) == 4


def test_places_are_chosen_by_name_or_coordinates() -> None:
    name = "trainers[hosts=1,gpus=13]"
    chosen = ("", name, "gpus=13", "hosts=1,gpus=13", "gpus=1", "gpus=3", "trainers", "hosts=0,gpus=13")
    assert [is_at(name, at) for at in chosen] == [True, True, True, True, False, False, False, False]


async def test_report_of_a_living_run_is_one_file(trimesh_command: Shell, tmp_path):
    """Q3: state, calls, waits, stacks, output, events, machine; not written over another file."""
    async with this_host().spawn_procs({"gpus": 2}, supervision=Isolate()) as procs, cancelled_at_the_end() as nursery:
        speakers = await procs.spawn("speakers", Speaker)
        await speakers.slice(gpus=0).say.call("hello")
        await trimesh_command.until("hello", "logs")
        nursery.start_soon(speakers.slice(gpus=1).wait.call_one)
        await trimesh_command.until("wait  running", "calls")
        assert await trimesh_command("report", str(tmp_path / "report.txt")) == (0, "")
        text = (tmp_path / "report.txt").read_text()
        parts = ("==== processes", "speakers[gpus=1].wait  running", "in wait", "| hello", "kernel", "==== autopsy")
        for part in parts:
            assert part in text
        assert (await trimesh_command("report", str(tmp_path / "report.txt")))[0] == 1
        code, said = await trimesh_command("report", "--json")
        assert code == 0
        found = json.loads(said.splitlines()[-1])
        assert [call["endpoint"] for call in found["snapshot"]["calls"]] == ["wait"]
        assert [row["text"] for row in found["output"]] == ["hello"]
        assert found["autopsy"]["ended"] == "running"
        assert {one["name"] for one in found["doctor"]} >= {"kernel", "ptrace"}


async def test_report_without_a_run_is_refused(trimesh_command: Shell, tmp_path):
    assert (await trimesh_command("report", str(tmp_path / "report.txt")))[0] == 3
    assert not (tmp_path / "report.txt").exists()
