"""Links between real processes: what passes, and how each way to die is seen."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import pytest
import trio
from tests.conformance.transports import Recorder
from tests.native import peer as peer_module
from tests.patience import HANG_SECONDS

from trimesh import limits
from trimesh._transport.interface import DownReason, Lane
from trimesh._transport.native.transport import NativeLink, NativeTransport
from trimesh.ids import ProcId

pytestmark = pytest.mark.real

SCRIPT = str(Path(peer_module.__file__))


@contextlib.contextmanager
def running(*arguments: object, fds: tuple[int, ...], new_group: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run peer.py until the block ends."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=new_group,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@attrs.define(eq=False)
class Pair:
    """Our end of a link to a process that runs peer.py."""

    transport: NativeTransport
    link: NativeLink
    recorder: Recorder
    process: subprocess.Popen[str]


def sockets(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind != "tcp":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def lease_seconds() -> float:
    """Long, so that a busy machine ends no link; tests of the lease have a short one (`short_lease`)."""
    return HANG_SECONDS


short_lease = pytest.mark.parametrize("lease_seconds", [peer_module.LEASE_SECONDS])


@pytest.fixture(params=["local", "tcp"])
async def pair(request: pytest.FixtureRequest, lease_seconds: float) -> AsyncIterator[Pair]:
    kind = request.param
    mine, theirs = sockets(kind)
    transport = NativeTransport(ProcId(1), beat_seconds=peer_module.BEAT_SECONDS, lease_seconds=lease_seconds)
    mode = "local" if kind == "local" else "stream"
    with running("serve", mode, theirs.fileno(), 0, fds=(theirs.fileno(),)) as process:
        theirs.close()
        link = transport.open_link(mine, local=kind == "local", lease=True)
        recorder = Recorder()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(transport.run, recorder)
                with trio.fail_after(HANG_SECONDS):
                    await link.up.wait()
                yield Pair(transport, link, recorder, process)
                nursery.cancel_scope.cancel()
        finally:
            transport.close()


# ---- what passes ---------------------------------------------------------------------------------------------------


async def test_hello_tells_who_the_peer_is(pair: Pair):
    assert (pair.link.peer_epoch, pair.link.peer_pid) == (peer_module.EPOCH, pair.process.pid)


@pytest.mark.daily
async def test_messages_are_echoed_in_order(pair: Pair):
    sizes = random.Random(3)
    bodies = [[sizes.randbytes(sizes.choice([0, 10, 5000, 70_000]))] for _ in range(300)]

    for i, one in enumerate(bodies):
        event = pair.link.send(b"echo %d" % i, one)
        if event is not None:
            await event.wait()

    messages = await pair.recorder.wait_messages(300)
    assert [m.head for m in messages] == [b"echo %d" % i for i in range(300)]
    assert [m.contents for m in messages] == bodies


async def test_large_message_is_echoed_and_control_overtakes_it(pair: Pair):
    piece = random.Random(4).randbytes(limits.FRAME_PAYLOAD_BYTES_MAX)  # what is larger may leave at once
    bodies = [piece] * 256 + [b"", piece[:7]]

    pair.link.send(b"echo large", bodies)
    pair.link.send(b"echo-control", lane=Lane.CONTROL)

    messages = await pair.recorder.wait_messages(2)
    assert [m.head for m in messages] == [b"echo-control", b"echo large"]
    assert messages[1].contents == bodies


async def test_burst_of_messages_keeps_order(pair: Pair):
    pair.link.send(b"count 20000")

    await pair.recorder.wait_messages(20_000)

    assert pair.recorder.heads() == [b"%d" % i for i in range(20_000)]


async def test_close_ends_both_processes(pair: Pair):
    pair.link.close()

    assert (await pair.recorder.wait_down(pair.link)).reason is DownReason.CLOSED
    assert await trio.to_thread.run_sync(pair.process.wait, HANG_SECONDS) == 0


# ---- how an end is seen --------------------------------------------------------------------------------------------


@pytest.mark.daily
async def test_killed_peer_is_an_end(pair: Pair):
    pair.process.kill()

    assert (await pair.recorder.wait_down(pair.link)).reason is DownReason.EOF


async def test_everything_sent_before_an_exit_is_received_before_the_end(pair: Pair):
    """LI-1; a stream's bytes that had not left the process are lost with it, in order."""
    pair.link.send(b"count 500")
    pair.link.send(b"exit 0")

    await pair.recorder.wait_down(pair.link)

    heads = pair.recorder.heads()
    assert heads == [b"%d" % i for i in range(len(heads))]
    assert pair.recorder.late == []


async def test_watched_process_that_ends_is_seen(pair: Pair):
    pidfd = os.pidfd_open(pair.process.pid)
    pair.transport.watch(pair.link, pidfd)
    os.close(pidfd)

    pair.link.send(b"exit 3")

    assert (await pair.recorder.wait_down(pair.link)).reason in (DownReason.EXITED, DownReason.EOF)


async def test_watched_process_is_seen_to_end_while_others_hold_its_socket(pair: Pair):
    """A forked child of the peer keeps the socket open: only the pidfd tells."""
    bystander = await trio.lowlevel.open_process(["sleep", "3600"])
    pidfd = os.pidfd_open(bystander.pid)
    pair.transport.watch(pair.link, pidfd)
    os.close(pidfd)

    bystander.kill()

    assert (await pair.recorder.wait_down(pair.link)).reason is DownReason.EXITED
    await bystander.wait()


@short_lease
async def test_stopped_peer_loses_its_lease(pair: Pair):
    """O5."""
    pair.link.send(b"stop")

    assert (await pair.recorder.wait_down(pair.link)).reason is DownReason.LEASE


@short_lease
async def test_link_has_a_lease_of_its_own_if_it_is_given_one(pair: Pair) -> None:
    """A stopped peer is lost to the link with the lease of all, and not yet to the one with a longer one."""
    mine, theirs = socket.socketpair()
    other = NativeTransport(ProcId(3), beat_seconds=HANG_SECONDS / 2, lease_seconds=HANG_SECONDS)
    far = pair.transport.open_link(mine, local=False, lease=True, lease_seconds=HANG_SECONDS)
    other.open_link(theirs, local=False, lease=False)  # it says hello, and no beat for a long time
    try:
        await far.up.wait()
        pair.link.send(b"stop")
        assert (await pair.recorder.wait_down(pair.link)).reason is DownReason.LEASE
        assert not pair.recorder.is_down(far)
    finally:
        other.close()


@pytest.mark.parametrize("lease_seconds", [2 * peer_module.LEASE_SECONDS])
async def test_peer_that_holds_the_gil_in_c_keeps_its_lease(pair: Pair, lease_seconds: float):
    """A GIL held for long is stalled, not dead."""
    pair.link.send(b"hold-gil %f" % (1.3 * lease_seconds))  # real time, counted by a native thread
    pair.link.send(b"echo after")

    messages = await pair.recorder.wait_messages(2)

    assert [m.head for m in messages] == [b"let go", b"echo after"]


async def test_peer_that_holds_the_gil_in_c_is_told_to_be_stalled_and_to_go_on(pair: Pair):
    """P2: its native thread says so while no Python can run there; a stall is not the end of anything."""
    pair.link.send(b"hold-gil-until-told")

    await pair.recorder.wait(lambda: bool(pair.recorder.stalls))
    link, seconds = pair.recorder.stalls[0]
    assert link is pair.link
    assert seconds >= peer_module.STALL_SECONDS
    assert pair.recorder.heads() == []  # it is told before it is over

    assert pair.process.stdin is not None
    pair.process.stdin.write("\n")
    pair.process.stdin.flush()
    await pair.recorder.wait(lambda: pair.recorder.stalls[-1][1] == 0)
    await pair.recorder.wait_messages(1)
    pair.link.send(b"echo after")
    assert [m.head for m in await pair.recorder.wait_messages(2)] == [b"let go", b"echo after"]


by_rings = pytest.mark.parametrize("pair", ["local"], indirect=True)


@by_rings
async def test_idle_peer_is_not_stalled(pair: Pair):
    await trio.sleep(2 * peer_module.STALL_SECONDS)  # real time, counted by a native thread over there
    stalls = pair.recorder.stalls
    # What a busy machine keeps from running goes on by itself; a loop that nothing wakes would be stalled for ever.
    await pair.recorder.wait(lambda: not stalls or stalls[-1][1] == 0)

    pair.link.send(b"echo alive")
    await pair.recorder.wait_messages(1)


@by_rings
async def test_peer_that_was_stopped_as_a_whole_is_not_stalled(pair: Pair):
    seconds = 4 * peer_module.STALL_SECONDS
    os.kill(pair.process.pid, signal.SIGSTOP)
    await trio.sleep(seconds)
    os.kill(pair.process.pid, signal.SIGCONT)
    pair.link.send(b"echo alive")

    await pair.recorder.wait_messages(1)

    assert all(told < seconds for _, told in pair.recorder.stalls)  # on a busy machine it goes on in parts


@pytest.mark.parametrize("kind", ["local", "stream"])
async def test_stop_of_both_sides_costs_no_lease(kind: str):
    """O5, RT-3: when a machine, or a job, is stopped and goes on, no process is found dead."""
    ends = socket.socketpair()
    with contextlib.ExitStack() as stack:
        pair = [
            stack.enter_context(running("serve", kind, end.fileno(), lease, fds=(end.fileno(),)))
            for end, lease in zip(ends, (1, 0), strict=True)
        ]
        for end in ends:
            end.close()
        for process in pair:
            assert process.stdout is not None
            assert await trio.to_thread.run_sync(process.stdout.readline) == "up\n"

        for process in pair:
            process.send_signal(signal.SIGSTOP)
        await trio.sleep(1.5 * peer_module.LEASE_SECONDS)  # real time: native threads count it
        for process in pair:  # the one that holds the lease first
            process.send_signal(signal.SIGCONT)
        await trio.sleep(1.5 * peer_module.LEASE_SECONDS)

        assert [process.poll() for process in pair] == [None, None]  # they end with their link


# ---- lifelines -----------------------------------------------------------------------------------------------------


def wait_ended(pid_fds: list[int], seconds: float) -> bool:
    """Wait until all processes have ended."""
    poll = select.poll()
    for fd in pid_fds:
        poll.register(fd, select.POLLIN)
    left = set(pid_fds)
    while left:
        ready = poll.poll(seconds * 1000)
        if not ready:
            return False
        for fd, _ in ready:
            left.discard(fd)
            poll.unregister(fd)
    return True


@pytest.mark.parametrize("lifelines", [1, 2])
def test_lifeline_ends_the_group_while_the_gil_is_held_in_c(lifelines: int):
    """Z04, Z07, O4: also the child that the worker has forked. Nothing else would end them for an hour."""
    parents = [subprocess.Popen(["sleep", "3600"]) for _ in range(lifelines)]
    pid_fds = [os.pidfd_open(parent.pid) for parent in parents]
    watched: list[int] = []
    try:
        with running("hold", *pid_fds, fds=tuple(pid_fds), new_group=True) as process:
            assert process.stdout is not None
            worker, child = map(int, process.stdout.readline().split())
            assert worker == process.pid
            watched = [os.pidfd_open(worker), os.pidfd_open(child)]

            parents[-1].kill()

            assert wait_ended(watched, HANG_SECONDS)
            assert process.wait(HANG_SECONDS) == -signal.SIGKILL
    finally:
        for fd in (*pid_fds, *watched):
            os.close(fd)
        for parent in parents:
            parent.kill()
            parent.wait()


def test_lifeline_of_a_process_that_leads_no_group_ends_only_that_process():
    """Its group is ours: killing it would end this test."""
    parent = subprocess.Popen(["sleep", "3600"])
    pid_fd = os.pidfd_open(parent.pid)
    try:
        with running("hold", pid_fd, fds=(pid_fd,)) as process:
            assert process.stdout is not None
            _, child = map(int, process.stdout.readline().split())

            parent.kill()

            assert process.wait(HANG_SECONDS) == 137
            os.kill(child, signal.SIGKILL)  # an orphan of this test's own making
    finally:
        os.close(pid_fd)
        parent.kill()
        parent.wait()


def test_lifeline_of_a_process_that_has_ended_already_fires_at_once():
    parent = subprocess.Popen(["true"])
    pid_fd = os.pidfd_open(parent.pid)
    parent.wait()
    try:
        with running("hold", pid_fd, fds=(pid_fd,), new_group=True) as process:
            assert process.wait(HANG_SECONDS) == -signal.SIGKILL
    finally:
        os.close(pid_fd)
