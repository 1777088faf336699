"""Several spawners of one controller: connections and news of ends between their workers."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from tests.runtime.conftest import SERVE, ask, hear, new_id, spec_of, tell
from tests.runtime.processes import count_fds, spawners_here, state, suspended, wait_gone, wait_until_all
from tests.runtime.worker_entries import hear as hear_blocking
from tests.runtime.worker_entries import say

from trimesh import limits
from trimesh._runtime.spawner.client import Siblings
from trimesh._runtime.spawner.launcher import ProcLauncher, attach_launcher, open_spawner
from trimesh._runtime.spawner.wire import Connect, encode
from trimesh._runtime.system.child import Child
from trimesh._runtime.system.records import WorkerConfig
from trimesh.errors import MeshError
from trimesh.ids import ProcId

pytestmark = pytest.mark.real

ASKER = "tests.runtime.test_spawner_siblings:asker"


def asker(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """Be a worker that asks its spawner about others; those that connect are told who they are, and dropped."""
    del lifelines
    return trio.run(_ask, config, link, broker)


async def _ask(config: WorkerConfig, link: socket.socket, broker: socket.socket) -> int:
    own, root = ProcId(config.proc_id), ProcId(config.root_id)
    say(link, "hello")
    async with attach_launcher(broker, proc_id=own, root_id=root, incoming=_greet) as launcher:
        while True:
            request = await trio.to_thread.run_sync(hear_blocking, link)
            if request is None:
                return 0
            what, *arguments = request
            if what == "exit":
                return int(arguments[0])
            if what == "forge":
                broker.send(encode(Connect(1, arguments[0], source=arguments[1])))
            else:
                say(link, await _ANSWERS[what](launcher, *arguments))


def _greet(source: ProcId, sock: socket.socket) -> None:
    with sock, suppress(BrokenPipeError):  # it may have given up
        say(sock, ["met", source])


async def _connect(launcher: ProcLauncher, target: int, times: int = 1, seconds: float = 30.0) -> Any:
    """Connect and return what the target says, or how it failed."""
    met = []

    async def once() -> None:
        try:
            sock = await launcher.connect(ProcId(target))
        except MeshError as error:
            met.append([type(error).__name__, getattr(error, "exit_code", None), getattr(error, "reason", str(error))])
            return
        with sock:
            met.append(await trio.to_thread.run_sync(hear_blocking, sock))

    with trio.move_on_after(seconds) as scope:
        async with trio.open_nursery() as nursery:
            for _ in range(times):
                nursery.start_soon(once)
    return "cancelled" if scope.cancelled_caught else met if times > 1 else met[0]


async def _exit_of(launcher: ProcLauncher, target: int) -> Any:
    report = await launcher.exit_of(ProcId(target))
    return [report.is_known, report.exit_code, report.signal]


_ANSWERS = {"connect": _connect, "exit_of": _exit_of}


@asynccontextmanager
async def spawners(count: int = 2) -> AsyncIterator[list[ProcLauncher]]:
    """Spawners of one controller, which is this process."""
    root_id, siblings = new_id(), Siblings()
    async with open_spawner(root_id, entry=ASKER, siblings=siblings) as first:
        if count == 1:
            yield [first]
            return
        async with open_spawner(root_id, entry=ASKER, siblings=siblings) as second:
            if count == 2:
                yield [first, second]
                return
            async with open_spawner(root_id, entry=ASKER, siblings=siblings) as third:
                yield [first, second, third]


async def start(launcher: ProcLauncher) -> Child:
    """Start a worker that asks."""
    child = await launcher.launch(spec_of(entry=ASKER))
    assert await hear(child) == "hello"
    return child


async def test_workers_of_two_spawners_connect_both_ways() -> None:
    """The one that is asked learns who asks, as within one spawner."""
    async with spawners() as (first, second):
        one, other = await start(first), await start(second)

        assert await ask(one, "connect", other.proc_id) == ["met", one.proc_id]
        assert await ask(other, "connect", one.proc_id) == ["met", other.proc_id]


async def test_process_that_no_spawner_knows_never_was() -> None:
    """The clear answer, at once."""
    async with spawners(3) as (first, *_):
        one = await start(first)

        assert await ask(one, "connect", new_id()) == ["ProcDied", None, "lost"]
        assert await ask(one, "exit_of", new_id()) == [False, None, None]


async def test_controller_with_one_spawner_has_nobody_else_to_ask() -> None:
    """Nor does a question about the controller itself leave the spawner."""
    async with spawners(1) as (first,):
        one = await start(first)

        assert await ask(one, "connect", new_id()) == ["ProcDied", None, "lost"]
        assert await ask(one, "exit_of", first.root_id) == [False, None, None]


async def test_end_of_a_foreign_worker_is_told_when_it_comes() -> None:
    """`exit_of` waits; afterwards a connection says how it ended."""
    async with spawners() as (first, second):
        one, other = await start(first), await start(second)
        heard = list[Any]()

        async def wait() -> None:
            heard.append(await ask(one, "exit_of", other.proc_id))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await ask(await start(first), "exit_of", new_id())  # it has been to the controller and back meanwhile
            assert heard == []
            await tell(other, "exit", 3)
        assert heard == [[True, 3, None]]
        assert await ask(one, "connect", other.proc_id) == ["ProcDied", 3, "exited"]


async def test_end_is_remembered_after_the_spawner_has_ended() -> None:
    """SS-2: also for the controller's own questions, also where its killing was part of that end."""
    root_id, siblings = new_id(), Siblings()
    async with open_spawner(root_id, entry=ASKER, siblings=siblings) as first:
        one = await start(first)
        async with open_spawner(root_id, entry=ASKER, siblings=siblings) as second:
            exits, killed = await start(second), await start(second)
            await tell(exits, "exit", 4)
            await exits.wait_exited()

        assert await ask(one, "connect", exits.proc_id) == ["ProcDied", 4, "exited"]
        assert await ask(one, "exit_of", killed.proc_id) == [True, None, signal.SIGKILL]
        assert (await first.exit_of(exits.proc_id)).exit_code == 4


async def test_end_that_is_waited_for_is_told_although_the_spawner_ends_with_it() -> None:
    """SS-1: a question that is under way when a block ends."""
    root_id, siblings = new_id(), Siblings()
    heard = list[Any]()
    async with open_spawner(root_id, entry=ASKER, siblings=siblings) as first, trio.open_nursery() as nursery:
        one = await start(first)

        async def wait(proc_id: ProcId) -> None:
            heard.append(await ask(one, "exit_of", proc_id))

        async with open_spawner(root_id, entry=ASKER, siblings=siblings) as second:
            other = await start(second)
            nursery.start_soon(wait, other.proc_id)
            await ask(await start(first), "exit_of", new_id())
    assert heard == [[True, None, signal.SIGKILL]]


async def test_killed_spawner_answers_with_what_is_known() -> None:
    """Its workers die with it, and nobody can say how."""
    async with spawners() as (first, second):
        one, other = await start(first), await start(second)
        pid = spawners_here()[1]
        os.kill(pid, signal.SIGKILL)
        await other.wait_exited()

        assert await ask(one, "connect", other.proc_id) == ["ProcDied", None, "lost"]
        assert await ask(one, "exit_of", other.proc_id) == [False, None, None]


async def test_killed_spawner_takes_nothing_of_another_one_along() -> None:
    """Z05: what it leaves behind is found by the mark of the family, which its siblings' processes carry, too."""
    async with spawners() as (first, second):
        mine, theirs = [await launcher.launch(spec_of(entry=SERVE)) for launcher in (first, second)]
        for child in (mine, theirs):
            await hear(child)
        kinds = ("group", "session", "daemon", "exec")
        kept, lost = [[await ask(child, "fork", kind) for kind in kinds] for child in (mine, theirs)]

        os.kill(spawners_here()[1], signal.SIGKILL)
        await wait_gone([theirs.pid, *lost])

        assert all(map(state, [mine.pid, *kept]))
    await wait_gone(kept)


async def test_killed_spawner_leaves_nothing_that_is_executing_another_program() -> None:
    """Z05: such a process has no mark for a moment, so it is looked at again."""
    async with spawners() as (first, second):
        mine, theirs = [await launcher.launch(spec_of(entry=SERVE)) for launcher in (first, second)]
        for child in (mine, theirs):
            await hear(child)
        lost = await ask(theirs, "fork_executing", 50)

        os.kill(spawners_here()[1], signal.SIGKILL)
        await wait_gone([theirs.pid, *lost])

        assert state(mine.pid)


async def test_stopped_spawner_holds_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """LA-4: its own worker cannot be reached; those of others can."""
    async with spawners(3) as (first, second, third):
        one, other, else_ = await start(first), await start(second), await start(third)
        with suspended(spawners_here()[1]):
            assert await ask(one, "connect", else_.proc_id) == ["met", one.proc_id]
            with monkeypatch.context() as patched:
                patched.setattr(limits, "FOREIGN_CONNECT_SECONDS", 0.2)
                kind, _, text = await ask(one, "connect", other.proc_id)
            assert (kind, "did not answer" in text) == ("LinkLost", True)
        assert await ask(one, "connect", other.proc_id) == ["met", one.proc_id]


async def test_connections_that_nobody_waits_for_any_more_are_closed() -> None:
    """The asker gives up, or dies, while the other spawner is stopped: no descriptor stays anywhere."""
    async with spawners() as (first, second):
        one, two, other = await start(first), await start(first), await start(second)
        assert await ask(one, "connect", other.proc_id) == ["met", one.proc_id]
        pids = [os.getpid(), *spawners_here(), one.pid, other.pid]
        before = [count_fds(pid) for pid in pids]
        with suspended(spawners_here()[1]):
            assert await ask(one, "connect", other.proc_id, 20, 0.05) == "cancelled"
            await tell(two, "connect", other.proc_id, 20)
            two.signal(signal.SIGKILL)
            await two.wait_exited()
        two.close()

        assert await ask(one, "connect", other.proc_id) == ["met", one.proc_id]
        await wait_until_all(lambda: [count_fds(pid) <= fds for pid, fds in zip(pids, before, strict=True)])


async def test_many_connections_at_once_all_come() -> None:
    """Both ways, hundreds of questions under way."""
    async with spawners() as (first, second):
        one, other = await start(first), await start(second)
        met = list[Any]()

        async def connect(child: Child, target: Child) -> None:
            met.append((child.proc_id, await ask(child, "connect", target.proc_id, 100)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect, one, other)
            nursery.start_soon(connect, other, one)

        assert dict(met) == {child.proc_id: [["met", child.proc_id]] * 100 for child in (one, other)}


async def test_worker_asks_for_itself_only() -> None:
    """A `Connect` on behalf of another process is the controller's; the sender of a forged one is heard no more."""
    async with spawners() as (first, _):
        forger, victim = await start(first), await start(first)

        await tell(forger, "forge", victim.proc_id, victim.proc_id)

        assert await ask(forger, "exit_of", victim.proc_id) == [False, None, None]
        assert await ask(victim, "exit_of", new_id()) == [False, None, None]
