"""A host that many meshes use: what is left of those that have ended."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import count_fds, spawners_here, state, wait_until_all

from trimesh import Actor, MeshErrorGroup, ProcDied, configured, endpoint, limits, this_host
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.local_host import LocalHost, accept_links
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.spawner import spawner_process, wire
from trimesh._runtime.spawner.socket import BrokerSocket
from trimesh._transport.native import transport
from trimesh._transport.native.transport import NativeTransport
from trimesh.ids import ProcId

pytestmark = pytest.mark.real


class Node(Actor):
    """Is there."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def count_threads_at_exit(self, path: str) -> None:
        atexit.register(lambda: Path(path).write_text(str(len(os.listdir("/proc/self/task")))))


async def test_ended_processes_leave_no_descriptor_on_a_warm_host() -> None:
    """Neither here nor in the spawner: pidfds, links, rings. The file of a history, two seconds later, is no leak."""
    with configured(history=0):
        async with this_host().warm() as host:

            async def once() -> None:
                async with host.spawn_procs({"n": 2}) as procs:
                    await (await procs.spawn("node", Node)).pid.call()

            await once()
            (spawner,) = spawners_here()
            before = count_fds(), count_fds(spawner)
            for _ in range(5):
                await once()

            await wait_until_all(lambda: [count_fds() <= before[0], count_fds(spawner) <= before[1]])


def test_connection_that_comes_while_a_process_ends_is_closed() -> None:
    """It has closed its transport, and its spawner does not know yet: the asker sees the end, this process goes on."""
    transport = NativeTransport(ProcId(2))
    accept = accept_links(Proc(ProcId(2), transport), transport)
    transport.close()
    ours, theirs = socket.socketpair()
    with theirs:
        accept(ProcId(3), ours)

        assert theirs.recv(1) == b""


class Wordy(Actor):
    """Writes much when it is stopped."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        for number in range(3_000):
            print(f"line {number} {'x' * 60}")


@pytest.mark.parametrize("output", ["forward", "callable"])
async def test_output_is_shown_before_a_block_on_a_warm_host_ends(
    output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O7: all of it, although the spawner lives on."""
    monkeypatch.setattr(limits, "OUTPUT_FLUSH_SECONDS", HANG_SECONDS)
    mode: Any = "forward" if output == "forward" else lambda _: "forward"
    async with this_host().warm() as host:
        async with host.spawn_procs({"n": 2}, name="wordy", output=mode) as procs:
            await procs.spawn("wordy", Wordy)

        lines = capsys.readouterr().out.splitlines()
        for rank in range(2):
            mine = [line for line in lines if line.startswith(f"wordy[n={rank}] | line ")]
            assert [int(line.split()[3]) for line in mine] == list(range(3_000))


@attrs.define
class Sent:
    """The records that this process sends to its spawners."""

    records: list[wire.AnyRecord] = attrs.field(factory=list[wire.AnyRecord])

    @property
    def kinds(self) -> list[str]:
        """Their names."""
        return [type(record).__name__ for record in self.records]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What is sent while the test runs."""
    sent, put = Sent(), BrokerSocket.put

    def note(self: BrokerSocket, record: wire.AnyRecord, fds: Sequence[int] = ()) -> None:
        sent.records.append(record)
        put(self, record, fds)

    monkeypatch.setattr(BrokerSocket, "put", note)
    return sent


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
async def test_block_is_left_with_one_word_to_its_spawner(sent: Sent, *, is_killed: bool) -> None:
    """It ends with its last process, and is not asked for output that has been shown; `Stop` finds it on its way."""
    raises = pytest.RaisesGroup(ProcDied) if is_killed else nullcontext()
    with raises:
        async with this_host().spawn_procs({"n": 2}) as procs:
            node = await procs.spawn("node", Node)
            pid = await node.slice(n=0).pid.call_one()
            (spawner,) = spawners_here()
            sent.records.clear()
            if is_killed:
                os.kill(pid, signal.SIGKILL)
                await trio.sleep_forever()

    assert sent.kinds in (["Retire"], ["Retire", "Stop"])
    assert not state(spawner)


async def test_spawner_that_others_use_is_not_retired(sent: Sent) -> None:
    """The block that leaves first says nothing; the last one does."""
    async with this_host().spawn_procs({"n": 1}):
        async with this_host().spawn_procs({"n": 1}):
            sent.records.clear()
        assert not sent.records
        async with this_host().spawn_procs({"n": 1}) as procs:
            assert len(spawners_here()) == 1
            await (await procs.spawn("node", Node)).pid.call()
        sent.records.clear()
    assert sent.kinds in (["Retire"], ["Retire", "Stop"])


async def test_block_that_comes_after_the_retirement_gets_another_spawner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is ending takes no launch any more."""
    retire, answers = LocalHost.retire, list[int]()

    async def spawn_another() -> None:
        async with this_host().spawn_procs({"n": 1}) as procs:
            answers.append(await (await procs.spawn("node", Node)).pid.call_one())

    async with trio.open_nursery() as nursery:

        def note(self: LocalHost) -> None:
            retire(self)
            if not nursery.child_tasks and not answers:
                nursery.start_soon(spawn_another)

        monkeypatch.setattr(LocalHost, "retire", note)
        async with this_host().spawn_procs({"n": 1}):
            pass

    assert len(answers) == 1


@pytest.mark.executed("threads of its interpreter are counted")
async def test_lifelines_are_watched_until_a_process_has_ended(tmp_path: Path) -> None:
    """O3, O4: functions of atexit may take long; the thread that watches is not stopped, and not waited for, first."""
    path = tmp_path / "threads"
    async with this_host().spawn_procs({"n": 1}) as procs:
        await (await procs.spawn("node", Node)).count_threads_at_exit.call(str(path))

    assert path.read_text() == "2"


async def test_stopped_spawner_does_not_keep_a_block_for_its_output() -> None:
    """The wait for output is bounded."""
    async with this_host().warm() as host:
        async with host.spawn_procs({"n": 1}) as procs:
            await procs.spawn("node", Node)
            (spawner,) = spawners_here()
            os.kill(spawner, signal.SIGSTOP)
        os.kill(spawner, signal.SIGCONT)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The spawners that have been begun, as children of this process."""
    found = list[Any]()
    execute = spawner_process._execute

    def executed(*args: Any) -> Any:
        found.append(execute(*args))
        return found[-1]

    monkeypatch.setattr(spawner_process, "_execute", executed)
    return found


async def test_spawner_that_no_host_has_taken_is_killed_and_reaped(begun: list[Any]) -> None:
    """The block was cancelled, say, while the program made itself ready."""
    async with lease_proc(for_host=True):
        (spawner,) = begun
        assert spawner.returncode is None

    assert spawner.returncode == -signal.SIGKILL


async def test_spawner_starts_before_its_program_is_ready_and_ends_when_it_cannot_be(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert [spawner.returncode for spawner in begun] == [None]
        raise OSError(errno.EMFILE, "no descriptor is left")

    monkeypatch.setattr(transport, "NativeTransport", refuse)

    with pytest.raises(MeshErrorGroup) as caught:
        await this_host().spawn_procs({"n": 1}).__aenter__()

    assert [str(error).startswith("cannot prepare this process") for error in caught.value.exceptions] == [True]
    assert [spawner.returncode for spawner in begun] == [-signal.SIGKILL]
