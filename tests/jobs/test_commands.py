"""Commands on the hosts of a job: their output, their exit codes, their end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of, wait_gone

import trimesh.aio  # noqa: F401 - asyncio programs run commands once it is imported
import trimesh.blocking as tb
from trimesh import HostLost, MeshErrorGroup, leaves, origin, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


class Seen:
    """Takes lines, and tells when there are enough of them."""

    def __init__(self, enough: int = 0) -> None:
        self.lines = list[jobs.OutputLine]()
        self.are_enough = trio.Event()
        self._enough = enough

    def __call__(self, line: jobs.OutputLine) -> None:
        self.lines.append(line)
        if len(self.lines) == self._enough:
            self.are_enough.set()

    @property
    def pids(self) -> list[int]:
        return [int(word) for line in self.lines for word in line.text.split()]


async def test_command_runs_on_each_host_with_its_output_by_lines(tmp_path: Path) -> None:
    """H15: exit codes over the hosts; lines have coordinates, the stream, and come in order; input is empty."""
    script = 'cat; echo "$WORD in $PWD"; echo; printf "no newline"; echo problem >&2; exit 3'
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            seen = Seen()
            codes = await hosts.run(["sh", "-c", script], output=seen, env={"WORD": "hello"}, cwd=tmp_path)
            assert [(dict(point), code) for point, code in codes.items()] == [({"hosts": 0}, 3), ({"hosts": 1}, 3)]
            for rank in range(2):
                own = [line for line in seen.lines if dict(line.point) == {"hosts": rank}]
                assert {line.host for line in own} == {hosts.names[rank]}
                out = [line.text for line in own if line.stream == "stdout"]
                assert out == [f"hello in {tmp_path}", "", "no newline"]
                assert [line.text for line in own if line.stream == "stderr"] == ["problem"]
            assert str(seen.lines[0]).startswith(f"{seen.lines[0].host}[hosts=")
            part = hosts.slice(hosts=slice(1, 2))
            assert list(await part.run(["sh", "-c", "kill -9 $$"])) == [-signal.SIGKILL]
            one = await hosts.slice(hosts=1).run(["true"])
            assert (dict(one.extent), list(one)) == ({}, [0])
            assert list(await this_host().run(["false"])) == [1]


@pytest.mark.daily
async def test_command_that_fails_is_an_error_where_that_is_asked_for() -> None:
    """H15: with the coordinates of its host and its last words; one that cannot be started always is."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            with pytest.raises(MeshErrorGroup) as caught:
                await hosts.run(["sh", "-c", "echo it is wrong >&2; exit 4"], check=True)
            for failure in leaves(caught.value):
                where = origin(failure)
                assert isinstance(failure, subprocess.CalledProcessError)
                assert where is not None
                assert where.point is not None
                assert (failure.returncode, failure.stderr, list(where.point)) == (4, b"it is wrong\n", ["hosts"])
            with pytest.raises(MeshErrorGroup) as caught:
                await hosts.run(["/nonexistent/program"])
            assert next(type(failure) for failure in leaves(caught.value)) is FileNotFoundError


async def test_failed_command_ends_the_others(tmp_path: Path) -> None:
    """H15, C02: with `check=True` what runs on other hosts is ended; the lines until then have come."""
    mark = tmp_path / "first"
    script = f"if mkdir {mark} 2>/dev/null; then echo $$; exec sleep 1000; fi; cat {mark}/go; exit 1"
    seen = Seen(enough=1)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            os.mkfifo(tmp_path / "go")
            script = script.replace(f"{mark}/go", str(tmp_path / "go"))

            async def run() -> None:
                with pytest.raises(MeshErrorGroup) as caught:
                    await hosts.run(["sh", "-c", script], check=True, output=seen)
                (failure,) = leaves(caught.value)
                assert isinstance(failure, subprocess.CalledProcessError)
                assert failure.returncode == 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                await seen.are_enough.wait()
                await trio.to_thread.run_sync((tmp_path / "go").write_text, "")
            await wait_gone(seen.pids)


async def test_cancelled_command_is_ended_with_its_group() -> None:
    """H15: SIGTERM, then SIGKILL after the grace, to all that it has started."""
    script = 'trap "" TERM; sleep 1000 & echo $! $$; while :; do wait; done'
    seen = Seen(enough=2)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: hosts.run(["sh", "-c", script], output=seen, grace=0.2))
                await seen.are_enough.wait()
                nursery.cancel_scope.cancel()
            assert len(seen.pids) == 4
            await wait_gone(seen.pids)
            assert list(await hosts.run(["true"])) == [0, 0]


@pytest.mark.daily
async def test_output_of_a_cancelled_command_is_shown_to_its_end() -> None:
    """H15: what it writes as it ends on SIGTERM, more than its pipe holds, comes before the call ends."""
    last = f'i=0; while [ $i -lt 3000 ]; do echo "last $i {"x" * 40}"; i=$((i+1)); done; exit 0'
    script = f"trap '{last}' TERM; echo begun; while :; do sleep 0.01; done"
    seen = Seen(enough=2)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: hosts.run(["sh", "-c", script], output=seen, grace=HANG_SECONDS))
                await seen.are_enough.wait()
                nursery.cancel_scope.cancel()
            for rank in range(2):
                own = [line.text.split() for line in seen.lines if dict(line.point) == {"hosts": rank}]
                assert [words[1] for words in own if words[0] == "last"] == [str(number) for number in range(3000)]


@pytest.mark.daily
async def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    """H15, O6: also a daemon that has left its group, and holds its output open; the call does not wait for it."""
    mark = tmp_path / "mark"
    daemon = f"echo $$; : > {mark}; exec sleep 1000"
    script = f"setsid sh -c '{daemon}' & sleep 1000 & echo $!; while ! [ -e {mark} ]; do :; done"
    seen = Seen()
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            assert list(await hosts.run(["sh", "-c", script], output=seen)) == [0]
            assert len(seen.pids) == 2
            await wait_gone(seen.pids)


async def test_lost_host_is_said_by_the_call() -> None:
    """H15, H4, Q20: one `HostLost`; the job goes on with the other hosts, and the drawing of a notebook shows it."""
    seen = Seen(enough=2)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            with pytest.raises(BaseExceptionGroup) as caught:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lambda: hosts.run(["sh", "-c", "echo $PPID; exec sleep 1000"], output=seen))
                    await seen.are_enough.wait()
                    (helper,) = [int(line.text) for line in seen.lines if dict(line.point) == {"hosts": 1}]
                    os.kill(parent_of(parent_of(helper)), signal.SIGKILL)
            (lost,) = leaves(caught.value)
            assert isinstance(lost, HostLost)
            assert (lost.reason, lost.point and dict(lost.point)) == ("agent exit", {"hosts": 1})
            assert f"hosts[hosts=1]: lost on {hosts.names[1]}" in hosts._repr_html_()
            assert list(await hosts.slice(hosts=slice(0, 1)).run(["true"])) == [0]


async def test_output_waits_for_who_takes_it() -> None:
    """H15: nothing is lost, and a command without end is held; what its taker raises ends it and comes through."""
    taken = Seen()

    def refuse(line: jobs.OutputLine) -> None:
        taken(line)
        if len(taken.lines) == 50_000:
            raise ZeroDivisionError("as the test wants it")

    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            all_of_it = Seen()
            await hosts.run(["seq", "20000"], output=all_of_it)
            for rank in range(2):
                own = [int(line.text) for line in all_of_it.lines if dict(line.point) == {"hosts": rank}]
                assert own == list(range(1, 20_001))
            with pytest.raises(ZeroDivisionError):
                await hosts.run(["yes"], output=refuse)
            assert len(taken.lines) == 50_000
            long = Seen()
            await hosts.slice(hosts=0).run(["sh", "-c", "head -c 20000 /dev/zero | tr '\\0' x"], output=long)
            assert [len(line.text) for line in long.lines] == [8_192, 8_192, 3_616]
            await check_held(hosts.slice(hosts=0))


async def check_held(host: Any) -> None:
    """A command is held in its writes while the program takes nothing; without a taker it is never held."""
    command = ["sh", "-c", "echo $$; exec seq 300000"]
    states = list[str]()
    numbers = list[int]()

    def hold(line: jobs.OutputLine) -> None:
        numbers.append(int(line.text))
        if len(numbers) == 2:  # the program stands still
            until = time.monotonic() + HANG_SECONDS
            while states[-50:] != ["S"] * 50 and time.monotonic() < until:
                stat = Path(f"/proc/{numbers[0]}/stat")
                states.append(stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "ended")
                time.sleep(0.002)

    assert list(await host.run(command, output=hold)) == [0]
    assert numbers[1:] == list(range(1, 300_001))
    assert states[-50:] == ["S"] * 50
    assert list(await host.run(command)) == [0]


@pytest.mark.parametrize("pickle", ["on", "off"])
def test_asyncio_program_runs_commands(pickle: Any) -> None:
    """H15, K05: as in Trio; a cancel of the task ends the command."""
    seen = Seen()

    async def main() -> None:
        async with asyncio.timeout(HANG_SECONDS), jobs.LocalJob(1, pickle=pickle) as hosts:
            assert list(await hosts.run(["sh", "-c", "echo $$"], output=seen)) == [0]
            begun = asyncio.get_running_loop()
            told = asyncio.Event()

            def tell(line: jobs.OutputLine) -> None:
                seen(line)
                begun.call_soon_threadsafe(told.set)

            running = asyncio.create_task(hosts.run(["sh", "-c", "echo $$; exec sleep 1000"], output=tell))
            await told.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())
    trio.run(wait_gone, seen.pids)


def test_plain_program_runs_commands() -> None:
    """H15, K06: without `await`."""
    seen = Seen()
    with tb.fail_after(HANG_SECONDS), tb.enter(jobs.LocalJob(2)) as entered:
        hosts = tb.face(entered)
        assert list(hosts.run(["sh", "-c", "echo $$"], output=seen)) == [0, 0]
        assert [dict(point) for point in hosts.points()] == [{"hosts": 0}, {"hosts": 1}]
    assert len(set(seen.pids)) == 2


async def test_commands_that_are_none_are_refused() -> None:
    """H15: before a process is started."""
    host: Any = this_host()
    with pytest.raises(TypeError, match="list of arguments"):
        await host.run("ls -l")
    with pytest.raises(ValueError, match="must have a program"):
        await host.run([])
    with pytest.raises(ValueError, match="without NUL"):
        await host.run(["echo", "a\0b"])
    with pytest.raises(TypeError, match="env must be"):
        await host.run(["true"], env={"A": 1})
    with pytest.raises(ValueError, match="without '='"):
        await host.run(["true"], env={"A=B": "1"})
    with pytest.raises(ValueError, match="finite number"):
        await host.run(["true"], grace=float("inf"))
    with pytest.raises(TypeError, match="function of a line"):
        await host.run(["true"], output="print")
