"""The client of the spawner: blocks, connections, and a spawner that is silent or gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing
from tests.runtime import worker_entries
from tests.runtime.conftest import SERVE, CancelAtNth, Start, ask, hear, nested, new_id, spawner_of, spec_of, tell
from tests.runtime.processes import family, see, state, suspended, wait_gone

from trimesh import limits
from trimesh._runtime.spawner.launcher import ProcLauncher, open_spawner
from trimesh._runtime.system.exits import ExitReport
from trimesh.errors import LinkLost, ProcDied, SpawnError
from trimesh.ids import ProcId

pytestmark = pytest.mark.real

# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.daily
async def test_block_leaves_nothing_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Z01, Z11: workers that still run are killed; everything is reaped."""
    root_id = new_id()
    async with open_spawner(root_id, entry=SERVE) as launcher:
        children = [await launcher.launch(spec_of()) for _ in range(3)]
        for child in children:
            await hear(child)
        pids = [*family(root_id)]
        assert len(pids) == 4

    assert [child.report.signal for child in children if child.report] == [signal.SIGKILL] * 3
    assert [see(pid) for pid in pids] == [None] * 4
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error", [ValueError("from the body"), KeyboardInterrupt(), ExceptionGroup("g", [ValueError()])]
)
async def test_block_lets_the_body_s_exception_out_bare(error: BaseException) -> None:
    """No group is put around it."""
    root_id = new_id()

    async def run() -> None:
        async with open_spawner(root_id, entry=SERVE) as launcher:
            await hear(await launcher.launch(spec_of()))
            raise error

    with pytest.raises(type(error)) as caught:
        await run()

    assert caught.value is error
    assert not family(root_id)


async def test_block_is_cancellable_at_any_checkpoint() -> None:
    """M1: cancel at the nth checkpoint of entering, launching and leaving, for all n."""
    root_id = new_id()
    for nth in range(1, 200):
        finished = False
        with trio.CancelScope() as scope:
            instrument = CancelAtNth(scope, nth)
            trio.lowlevel.add_instrument(instrument)
            try:
                async with open_spawner(root_id, entry=SERVE) as launcher:
                    await launcher.launch(spec_of())
                    await launcher.flush_output()
                finished = True
            finally:
                trio.lowlevel.remove_instrument(instrument)
        assert not family(root_id)
        if finished and not instrument.has_fired:
            assert nth > 3
            return
    pytest.fail("it never came to its end")


async def test_stop_all_ends_own_children(launcher: ProcLauncher, start: Start) -> None:
    """In parallel; the spawner stays."""
    children = [await start() for _ in range(3)]

    await launcher.stop_all()

    assert [child.report.signal for child in children if child.report] == [signal.SIGKILL] * 3
    await start()


async def test_retired_spawner_ends_with_its_last_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody tells it to stop; it takes no launch meanwhile, and everybody is told how the last worker has ended."""
    async with open_spawner(new_id(), entry=SERVE) as launcher:
        children = [await launcher.launch(spec_of()) for _ in range(2)]
        for child in children:
            await hear(child)
        spawner = spawner_of(launcher)
        launcher.retire()
        with pytest.raises(SpawnError, match="is stopping"):
            await launcher.launch(spec_of())

        await tell(children[0], "exit", 3)
        assert (await children[0].wait_exited()).exit_code == 3
        await ask(children[1], "print", "stdout", "last\n")
        assert state(spawner)
        await tell(children[1], "exit", 4)

        await wait_gone([spawner])
        assert [(await child.wait_exited()).exit_code for child in children] == [3, 4]
        assert (await launcher.exit_of(children[1].proc_id)).exit_code == 4
        assert capsys.readouterr().out == "w | last\n"


async def test_retired_spawner_without_workers_ends() -> None:
    """There is nothing to wait for."""
    async with open_spawner(new_id(), entry=SERVE) as launcher:
        spawner = spawner_of(launcher)

        launcher.retire()

        await wait_gone([spawner])


async def test_every_public_coroutine_is_a_checkpoint(launcher: ProcLauncher, start: Start) -> None:
    """K01: also where the answer is known."""
    child = await start()
    child.signal(signal.SIGKILL)
    await child.wait_exited()

    with trio.testing.assert_checkpoints():
        await child.wait_exited()
    with trio.testing.assert_checkpoints():
        await launcher.exit_of(child.proc_id)
    with trio.testing.assert_checkpoints():
        await launcher.flush_output()
    with trio.testing.assert_checkpoints():
        await launcher.stop_all()
    child.signal(signal.SIGKILL)  # has been reaped: nothing is signalled
    child.close()
    child.close()


# ---- connections -----------------------------------------------------------------------------------------------------


@attrs.define
class Incoming:
    """What was connected to this process."""

    met: list[tuple[ProcId, socket.socket]] = attrs.field(factory=list)

    def take(self, source: ProcId, sock: socket.socket) -> None:
        """Keep a connection."""
        self.met.append((source, sock))


@asynccontextmanager
async def nest(incoming: Incoming, levels: int = 1) -> AsyncIterator[tuple[ProcLauncher, ProcId, socket.socket]]:
    """A chain of workers; the spawner, the topmost one and the link to it."""
    async with open_spawner(new_id(), entry=SERVE, incoming=incoming.take) as launcher:
        child = await launcher.launch(nested(levels))
        await hear(child)
        yield launcher, child.proc_id, child.link
        for _, sock in incoming.met:
            sock.close()


async def test_controller_connects_to_a_worker() -> None:
    """The worker gets the other end, and who it is."""
    async with nest(Incoming()) as (launcher, worker_id, _):
        sock = await launcher.connect(worker_id)
        with sock:
            assert await trio.to_thread.run_sync(worker_entries.hear, sock) == ["met", launcher.root_id]


async def test_worker_connects_to_the_controller() -> None:
    """Any process of the family may; nothing listens and nothing has a name."""
    incoming = Incoming()
    async with nest(incoming) as (_, worker_id, link):
        await trio.to_thread.run_sync(worker_entries.say, link, "connect")
        while not incoming.met:
            await trio.testing.wait_all_tasks_blocked(0.001)

        ((source, sock),) = incoming.met
        assert source == worker_id
        assert await trio.to_thread.run_sync(worker_entries.hear, sock) == "from below"


async def test_connecting_to_what_has_ended_says_how(launcher: ProcLauncher, start: Start) -> None:
    """ProcDied with the diagnosis while it is remembered; for a stranger without."""
    child = await start()
    await tell(child, "exit", 3)
    await child.wait_exited()

    with pytest.raises(ProcDied) as caught:
        await launcher.connect(child.proc_id)
    assert (caught.value.exit_code, caught.value.reason) == (3, "exited")
    with pytest.raises(ProcDied) as caught:
        await launcher.connect(new_id())
    assert caught.value.reason == "lost"
    with pytest.raises(LinkLost, match="itself"):
        await launcher.connect(launcher.root_id)


async def test_incoming_connection_that_nobody_takes_is_closed(launcher: ProcLauncher) -> None:
    """No callback: the peer sees the end at once."""
    child = await launcher.launch(nested(1))
    await hear(child)

    await trio.to_thread.run_sync(worker_entries.say, child.link, "connect")

    await trio.to_thread.run_sync(worker_entries.say, child.link, "exit_of")
    await trio.testing.wait_all_tasks_blocked()
    child.signal(signal.SIGKILL)
    assert (await child.wait_exited()).signal == signal.SIGKILL


# ---- a spawner that is silent or gone --------------------------------------------------------------------------------


async def test_stopped_spawner_delays_nothing_for_ever(launcher: ProcLauncher, start: Start) -> None:
    """LA-4: an exit is seen by pidfd, and told without a diagnosis in `limits.EXIT_REPORT_SECONDS`."""
    child, other = await start(), await start()
    with suspended(spawner_of(launcher)):
        began = time.monotonic()
        child.signal(signal.SIGKILL)
        report = await child.wait_exited()
        assert not report.is_known
        assert report.describe() == "lost without a diagnosis"
        assert time.monotonic() - began >= limits.EXIT_REPORT_SECONDS
    await tell(other, "exit", 4)
    assert (await other.wait_exited()).exit_code == 4
    assert child.report is report


async def test_block_with_a_stopped_spawner_ends() -> None:
    """It is continued, and does its work: nobody else knows how the worker ended."""
    root_id = new_id()
    async with open_spawner(root_id, entry=SERVE) as launcher:
        child = await launcher.launch(spec_of())
        await hear(child)
        os.kill(spawner_of(launcher), signal.SIGSTOP)
    assert (await child.wait_exited()).signal == signal.SIGKILL
    assert not family(root_id)


@pytest.mark.daily
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_spawner_that_is_killed_takes_everything_along(signum: int) -> None:
    """Z05: its workers, their foreign children of every kind, their own workers; the owner learns of each loss."""
    root_id = new_id()
    reports = list[ExitReport]()
    async with open_spawner(root_id, entry=SERVE) as launcher:
        children = [await launcher.launch(spec_of(), on_exit=reports.append) for _ in range(2)]
        for child in children:
            await hear(child)
        foreign = [await ask(children[0], "fork", kind) for kind in ("group", "session", "daemon", "exec")]
        chain = await hear(await launcher.launch(nested(2)))
        spawner = spawner_of(launcher)

        os.kill(spawner, signum)
        await wait_gone([spawner, *foreign, *chain, *(child.pid for child in children)])

        for child in children:
            await child.wait_exited()
        assert {report.proc_id for report in reports} == {child.proc_id for child in children}
        with pytest.raises(SpawnError, match="the spawner has ended"):
            await launcher.launch(spec_of())
        with pytest.raises(LinkLost):
            await launcher.connect(root_id)
    assert not family(root_id)


class KillAtNth(trio.abc.Instrument):
    """Kills a process when tasks have come to the nth checkpoint."""

    def __init__(self, pid: int, nth: int) -> None:
        self.left = nth
        self.pidfd = os.pidfd_open(pid)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count."""
        self.left -= 1
        if self.left == 0:
            with contextlib.suppress(ProcessLookupError):  # it had just ended
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


_STRIDE = 6


@pytest.mark.parametrize("first", [1, *(pytest.param(nth, marks=pytest.mark.stress) for nth in range(2, _STRIDE + 1))])
async def test_spawner_killed_at_any_moment_leaves_nothing(first: int) -> None:
    """At the nth step of launching and leaving (all n under `stress`): never a process, never a hang."""
    for nth in range(first, 300, _STRIDE):
        root_id = new_id()
        pids = list[int]()
        async with open_spawner(root_id, entry=SERVE) as launcher:
            instrument = KillAtNth(spawner_of(launcher), nth)
            trio.lowlevel.add_instrument(instrument)

            async def launch(launcher: ProcLauncher = launcher, pids: list[int] = pids) -> None:
                with contextlib.suppress(SpawnError):
                    pids.append((await launcher.launch(spec_of())).pid)

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(launch)
            await launcher.flush_output()
        trio.lowlevel.remove_instrument(instrument)
        os.close(instrument.pidfd)
        await wait_gone([*pids, *family(root_id)])
        if instrument.left > 0:
            assert len(pids) == 3
            return
    pytest.fail("it never came to its end")


async def test_launch_that_waits_for_a_spawner_learns_of_its_end(launcher: ProcLauncher) -> None:
    """Whoever waits is told, no task hangs."""
    pid = spawner_of(launcher)
    os.kill(pid, signal.SIGSTOP)

    async def launch() -> None:
        with pytest.raises(SpawnError, match="the spawner has ended"):
            await launcher.launch(spec_of())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(launch)
        nursery.start_soon(launcher.exit_of, new_id())
        nursery.start_soon(launcher.flush_output)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(pid, signal.SIGKILL)


async def test_requests_beyond_the_socket_s_room_are_queued(launcher: ProcLauncher) -> None:
    """`signal` and requests never block: what a stopped spawner does not read waits here, in order."""
    pid = spawner_of(launcher)
    answers = list[bool]()

    async def one() -> None:
        answers.append((await launcher.exit_of(new_id())).is_known)

    async with trio.open_nursery() as nursery:
        with suspended(pid):
            for _ in range(2_000):
                nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()

    assert answers == [False] * 2_000


async def test_forked_child_of_the_controller_holds_nothing_of_ours(launcher: ProcLauncher, start: Start) -> None:
    """O4: it closes our descriptors, so that an end is an end; the controller goes on."""
    child = await start()
    receiver, sender = os.pipe()

    pid = os.fork()
    if pid == 0:
        try:
            try:
                launcher._client.post(None)  # type: ignore[arg-type]  # dropped: this process has no spawner
                answer = "forgotten"
            except BaseException as error:  # noqa: BLE001
                answer = repr(error)
            os.write(sender, f"{child.pidfd} {child.link.fileno()} {answer}".encode())
        finally:
            os._exit(0)
    os.close(sender)
    await trio.to_thread.run_sync(os.waitpid, pid, 0)
    pidfd, link, answer = os.read(receiver, 10_000).decode().split(maxsplit=2)
    os.close(receiver)

    assert (pidfd, link, answer) == ("-1", "-1", "forgotten")
    assert (await ask(child, "about"))["pid"] == child.pid
    assert state(child.pid)
