"""`trimesh debug`: threads of processes of a run that a debugger holds (Q11)."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, ConnectError, aio, configured, endpoint, jobs, limits, observe, this_host
from trimesh._runtime.holds import scopes_around

pytestmark = pytest.mark.real


class Stopping(Actor):
    @endpoint
    async def stop(self, number: int) -> int:
        doubled = number * 2
        breakpoint()
        more = doubled + 1
        await trio.lowlevel.checkpoint()
        return more

    @endpoint(thread=True)
    def stop_in_thread(self, number: int) -> int:
        breakpoint()
        return number

    @endpoint
    async def pass_on(self, other: Any, number: int) -> int:
        with trio.fail_after(HANG_SECONDS) as scope:
            before = scope.deadline
            found = int(await other.stop.call_one(number))
        assert scope.deadline > before
        return found

    @endpoint
    async def fail(self, shard: int) -> None:
        wanted = f"shard {shard}"
        raise ValueError(wanted)

    @endpoint
    async def own(self, number: int) -> int:
        async with this_host().spawn_procs({"cores": 1}) as procs:
            inner = await procs.spawn("inner", Stopping)
            return int(await inner.stop.call_one(number))

    @endpoint
    async def ask(self, other: Any, shard: int) -> None:
        await other.fail.call_one(shard)


class Looped(aio.Actor):
    @endpoint
    async def stop(self, number: int) -> int:
        breakpoint()
        return number


class Session:
    """A terminal that a test drives, in threads beside the loop of the run."""

    def __init__(self, terminal: observe.DebugTerminal) -> None:
        self.terminal = terminal

    async def hear(self, wanted: str) -> str:
        """Return all that is said up to the next prompt, or "ended"."""
        return await trio.to_thread.run_sync(self._hear, wanted)

    def _hear(self, wanted: str) -> str:
        text = ""
        while (heard := self.terminal.hear()) is not None:
            text += heard[1]
            if heard[0] in ("prompt", "ended"):
                if heard[0] == "ended":
                    self.terminal.close()
                assert heard[0] == wanted, text
                return text
        raise AssertionError(f"the run has ended, after {text!r}")

    async def ask(self, line: str, wanted: str = "prompt") -> str:
        self.terminal.say(line)
        return await self.hear(wanted)


async def held(count: int = 1) -> tuple[observe.HoldRow, ...]:
    """Wait until so many threads are held."""

    def look() -> tuple[observe.HoldRow, ...]:
        with observe.find_run() as run:
            return tuple(run.holds())

    with trio.fail_after(HANG_SECONDS):
        while len(found := await trio.to_thread.run_sync(look)) < count:  # noqa: ASYNC110 - another process
            await trio.sleep(0.01)
    return found


async def attached(row: observe.HoldRow) -> Session:
    def attach() -> observe.DebugTerminal:
        run = observe.find_run()
        try:
            return run.attach(row.id)
        except BaseException:
            run.close()
            raise

    return Session(await trio.to_thread.run_sync(attach))


async def start(nursery: trio.Nursery, results: list[Any], call: Callable[..., Any], *args: Any) -> None:
    async def run() -> None:
        results.append(await call(*args))

    nursery.start_soon(run)


@pytest.mark.daily
async def test_breakpoint_of_an_endpoint():
    """Q11: pdb where it stands, with the names of the frame; steps go over an `await`."""
    results: list[int] = []
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            await start(nursery, results, stopping.slice(gpus=1).stop.call_one, 20)
            [row] = await held()
            assert (row.name, row.proc_name, row.kind) == ("stopping[gpus=1].stop", "procs[gpus=1]", "breakpoint")
            assert re.search(r"test_debug.py\", line \d+ in stop", row.at)
            session = await attached(row)
            heard = await session.hear("prompt")
            if sys.version_info >= (3, 13):  # since when pdb stops at `breakpoint()` itself
                assert "-> breakpoint()" in heard
                heard = await session.ask("n")
            assert "more = doubled + 1" in heard
            assert "40" in await session.ask("p doubled")
            assert "await trio.lowlevel.checkpoint()" in await session.ask("n")
            assert "return more" in await session.ask("n")
            assert "held" in {proc.state for proc in (await observe.snapshot()).procs}
            await session.ask("!more = 7")
            await session.ask("c", "ended")
    assert results == [7]


async def test_attach_refused_by_a_blocked_loop_is_not_carried_out_later():
    results: list[int] = []
    refused: list[BaseException] = []
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            await start(nursery, results, stopping.stop.call_one, 20)
            [row] = await held()

            def attach() -> None:
                try:
                    with observe.find_run() as run:
                        run.attach(row.id)
                except ConnectError as error:
                    refused.append(error)

            thread = threading.Thread(target=attach)
            thread.start()
            thread.join()  # in the loop, which is blocked by it
            assert "Trio loop is blocked" in str(refused)
            session = await attached(row)
            await session.hear("prompt")
            await session.ask("c", "ended")
    assert results == [41]


async def test_deadlines_of_what_waits_are_paused():
    """Q11: of the callers, and of theirs; they have as much left when it goes on as they had."""
    results: list[int] = []
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope(deadline=trio.current_time() + HANG_SECONDS)

            async def ask() -> None:
                with scope:
                    results.append(await stopping.slice(gpus=1).pass_on.call_one(stopping.slice(gpus=0), 20))

            ends_at = scope.deadline
            nursery.start_soon(ask)
            with trio.fail_after(HANG_SECONDS):
                while scope.deadline != float("inf"):  # noqa: ASYNC110 - the runtime sets it
                    await trio.sleep(0.01)
            [row] = await held()
            session = await attached(row)
            await session.hear("prompt")
            await session.ask("c", "ended")
    assert results == [41]
    assert ends_at < scope.deadline < trio.current_time() + HANG_SECONDS


async def test_terminal_that_goes_lets_it_go_on():
    results: list[int] = []
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            await start(nursery, results, stopping.stop.call_one, 1)
            session = await attached((await held())[0])
            await session.hear("prompt")
            session.terminal.close()
    assert results == [3]


async def test_no_terminal_comes(caplog: pytest.LogCaptureFixture):
    """Q11: it says where to come, and goes on after `debug_wait`."""

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    with configured(debug_wait=0.1):
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            stopping = await procs.spawn("stopping", Stopping)
            assert await stopping.stop.call_one(1) == 3
            with trio.fail_after(HANG_SECONDS):
                while not [text for text in told() if "continues:" in text]:  # noqa: ASYNC110 - may follow the answer
                    await trio.sleep(0.01)
    texts = told()
    assert any(f"trimesh debug --pid {os.getpid()} 'procs[gpus=0]'" in text for text in texts)
    assert "stopping[gpus=0].stop continues: no debugger attached" in texts


async def test_one_terminal_at_a_time():
    results: list[int] = []
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            await start(nursery, results, stopping.stop.call, 1)
            first, second = await held(2)
            session = await attached(first)
            await session.hear("prompt")
            with pytest.raises(ConnectError, match="one debugger at a time: another terminal has stopping"):
                await attached(second)
            await session.ask("q", "ended")
            session = await attached(second)
            await session.hear("prompt")
            await session.ask("\x04", "ended")
    assert list(results[0].values()) == [3, 3]


async def test_cancelled_call_is_not_held():
    """Q11: a breakpoint that no terminal has taken ends with its call."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stopping.stop.call_one, 1)
            await held()
            nursery.cancel_scope.cancel()
        with pytest.raises(ValueError, match="shard 1"):
            await stopping.fail.call_one(1)


async def test_killed_process_ends_its_session():
    """Q11: the terminal is told."""
    with pytest.raises(ExceptionGroup):
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            stopping = await procs.spawn("stopping", Stopping)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stopping.stop.call_one, 1)
                [row] = await held()
                session = await attached(row)
                await session.hear("prompt")
                os.kill(row.pid, signal.SIGKILL)
                assert "procs[gpus=0] has ended" in await session.hear("ended")


@pytest.mark.parametrize("way", ["thread", "asyncio", "nested", "host"])
async def test_wherever_an_endpoint_runs(way: str):
    """Q11: a thread, a task of asyncio, a process that a worker owns, and one of a host of a job."""
    results: list[int] = []
    hosts = jobs.LocalJob(1) if way == "host" else None
    async with hosts or trio.open_nursery() as outer:
        here = outer if hosts is not None else this_host()
        async with here.spawn_procs({"gpus": 1}) as procs:  # type: ignore[union-attr]
            cls = Looped if way == "asyncio" else Stopping
            stopping: Any = await procs.spawn("stopping", cls)
            name = {"thread": "stop_in_thread", "nested": "own"}.get(way, "stop")
            async with trio.open_nursery() as nursery:
                await start(nursery, results, getattr(stopping, name).call_one, 5)
                session = await attached((await held())[0])
                await session.hear("prompt")
                assert "5" in await session.ask("p number")
                await session.ask("c", "ended")
    assert results == [5 if way in ("thread", "asyncio") else 11]


async def test_error_is_held_before_it_travels():
    """Q11: with TRIMESH_DEBUG=post-mortem, once: where it was raised, not at each caller."""
    with configured(debug="post-mortem"):
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            stopping = await procs.spawn("stopping", Stopping)

            async def ask() -> None:
                with pytest.raises(ValueError, match="shard 3"):
                    await stopping.slice(gpus=0).ask.call_one(stopping.slice(gpus=1), 3)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                [row] = await held()
                assert (row.name, row.kind) == ("stopping[gpus=1].fail", "post-mortem")
                assert row.text == "ValueError: shard 3"
                session = await attached(row)
                assert "raise ValueError(wanted)" in await session.hear("prompt")
                assert "'shard 3'" in await session.ask("p wanted")
                await session.ask("q", "ended")


@contextmanager
def terminal(*command: str) -> Iterator[tuple[Callable[[str], str], Callable[[str], None], int]]:
    """Run a command at a terminal; yield what waits for a text, what types a line, and its pid."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "dumb"
        os.execv(sys.executable, [sys.executable, "-m", "trimesh.cli", *command])
    seen = ""

    def expect(wanted: str) -> str:
        nonlocal seen
        ends_at = threading.Timer(HANG_SECONDS, os.kill, (pid, signal.SIGKILL))
        ends_at.start()
        try:
            while wanted not in seen:
                try:
                    seen += os.read(fd, 4096).decode(errors="replace")
                except OSError:
                    break
        finally:
            ends_at.cancel()
        before, found, seen = seen.partition(wanted)
        assert found or not wanted, before
        return before

    try:
        yield expect, lambda line: os.write(fd, f"{line}\n".encode()) and None, pid
    finally:
        os.close(fd)


async def test_command_at_a_terminal(folder: Path):
    """Q11: the whole way, from the keys of a person to the frame of an endpoint; a terminal that hangs up lets go."""
    results: list[int] = []
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            for number in (20, 30):
                await start(nursery, results, stopping.stop.call_one, number)
                await held()
                with terminal("debug", "stopping[gpus=0]") as (expect, write, pid):
                    assert "stopping[gpus=0].stop" in await trio.to_thread.run_sync(expect, "(Pdb) ")
                    if number == 20:
                        write("p doubled")
                        assert "40" in await trio.to_thread.run_sync(expect, "(Pdb) ")
                        write("c")
                        await trio.to_thread.run_sync(expect, "[it goes on]")
                        _, status = await trio.to_thread.run_sync(os.waitpid, pid, 0)
                        assert os.waitstatus_to_exitcode(status) == 0
                    else:
                        os.kill(pid, signal.SIGKILL)
                        await trio.to_thread.run_sync(os.waitpid, pid, 0)
    assert sorted(results) == [41, 61]
    assert limits.DEBUG_WAIT_SECONDS > HANG_SECONDS


def test_scopes_of_a_task_are_found():
    """Trio's private hook that pausing uses."""

    async def main() -> None:
        with trio.CancelScope() as outer:
            async with trio.open_nursery() as nursery:
                with trio.CancelScope(shield=True) as inner:
                    await trio.lowlevel.checkpoint()
                    found = list(scopes_around(trio.lowlevel.current_task()))
                    assert found[:3] == [inner, nursery.cancel_scope, outer]

    trio.run(main)


async def commanded(*arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of `trimesh debug`."""
    command = [sys.executable, "-m", "trimesh", "debug", *arguments]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.daily
async def test_one_command_to_all_held_ranks():
    """Q11: equal answers are one, the others by rank; all stay held, for the next command too."""
    pytest.importorskip("cyclopts")
    results: list[Any] = []
    async with this_host().spawn_procs({"gpus": 3}) as procs:
        stopping = await procs.spawn("stopping", Stopping)
        async with trio.open_nursery() as nursery:
            for rank, number in enumerate((20, 20, 30)):
                await start(nursery, results, stopping.slice(gpus=rank).stop.call_one, number)
            await held(3)
            for expression, equal, other in (("number", 20, 30), ("doubled", 40, 60)):
                code, text, errors = await commanded("--all", f"p {expression}")
                assert (code, errors) == (0, "")
                lines = text.splitlines()
                assert lines[:2] == ["stopping[gpus=2].stop", f"    {other}"]
                assert sorted(lines[2].split(", ")) == ["stopping[gpus=0].stop", "stopping[gpus=1].stop"]
                assert lines[3:] == [f"    {equal}"]
            code, text, _ = await commanded("--all", "p number", "--json", "stopping[gpus=2]")
            assert (code, text) == (0, '[{"names":["stopping[gpus=2].stop"],"text":"30\\n"}]\n')
            code, _, errors = await commanded("--all", "next")
            assert code == 2
            assert "step a single rank by trimesh debug POINT" in errors
            [first] = [row for row in await held(3) if row.name.startswith("stopping[gpus=0]")]
            session = await attached(first)  # an ordinary terminal goes on from there
            await session.hear("prompt")
            assert "20" in await session.ask("p number")
            session.terminal.leave()
            await session.hear("ended")
            assert results == []
            code, text, _ = await commanded("--all", "c")
            assert code == 0
            assert text.endswith("    [it goes on]\n")
        assert sorted(results) == [41, 41, 61]
        code, _, errors = await commanded("--all", "p number")
        assert (code, errors) == (1, "trimesh: no thread of the run is held for a debugger\n")


async def test_rank_that_was_left_goes_on_by_itself():
    """Q11: it waits for another terminal as long as for the first one."""
    results: list[Any] = []
    with configured(debug_wait=2.0):
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            stopping = await procs.spawn("stopping", Stopping)
            async with trio.open_nursery() as nursery:
                await start(nursery, results, stopping.stop.call_one, 20)
                [row] = await held()
                session = await attached(row)
                await session.hear("prompt")
                session.terminal.leave()
                await session.hear("ended")
    assert results == [41]
