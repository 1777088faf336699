"""The control socket of a run: who may ask, what is answered while the loop does not run, what is left (Q3, Q4)."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS

from trimesh import Actor, ConnectError, configured, endpoint, observe, this_host
from trimesh._runtime.control import RunClient

pytestmark = pytest.mark.real
T = TypeVar("T")


class Keeper(Actor):
    @endpoint
    async def hold(self) -> None:
        await trio.sleep_forever()


def found_by(function: Callable[[], T]) -> T:
    """Call a function in another thread while this one, with its Trio loop, waits."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(HANG_SECONDS)


def asked() -> observe.RunSnapshot:
    with observe.find_run() as run:
        return run.snapshot()


@pytest.mark.daily
@pytest.mark.usefixtures("patient")
async def test_run_is_asked_from_outside(folder: Path):
    """Q3: while a block is open, in a folder that only this user may enter; nothing is left of it."""
    before = time.time()
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        entered = time.time()
        keepers = await procs.spawn("keepers", Keeper)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keepers.hold.call)
            await trio.testing.wait_all_tasks_blocked()
            seen = await trio.to_thread.run_sync(asked)
            nursery.cancel_scope.cancel()
        assert seen.by == "loop"
        assert [proc.name for proc in seen.procs] == ["controller", "procs[gpus=0]", "procs[gpus=1]"]
        assert {call.name for call in seen.calls} == {"keepers[gpus=0]", "keepers[gpus=1]"}
        assert seen.job is not None
        assert seen.job.pid == os.getpid()
        assert before <= seen.job.started_at <= entered
        for path in (folder, folder / ".runs"):
            assert path.stat().st_mode & 0o777 == 0o700
    assert list((folder / ".runs").iterdir()) == []
    with pytest.raises(ConnectError, match="no run of this user"):
        observe.find_run()


@pytest.mark.daily
async def test_run_answers_while_its_loop_does_not_run():
    """Q4: a thread answers in its place, with the stack of the loop's thread."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        keepers = await procs.spawn("keepers", Keeper)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keepers.hold.call)
            await trio.testing.wait_all_tasks_blocked()
            seen = found_by(asked)
            nursery.cancel_scope.cancel()
    assert seen.by == "thread"
    controller = next(proc for proc in seen.procs if not proc.parent)
    assert controller.state == "stuck"
    assert "in found_by" in controller.stack
    assert [(call.name, call.endpoint) for call in seen.calls] == [("keepers[gpus=0]", "hold")]
    assert {proc.state for proc in seen.procs if proc.parent} == {"running"}


async def test_switched_off_there_is_no_socket(folder: Path):
    """Q3: TRIMESH_OBSERVE=off opens none."""
    with configured(observe="off", record="off"):
        async with this_host().spawn_procs({"gpus": 1}):
            assert os.listdir(folder.parent) == []


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("damage", [open_to_others, a_link])
async def test_folder_that_cannot_be_trusted_is_refused(
    damage: Callable[[Path], None], folder: Path, caplog: pytest.LogCaptureFixture
):
    """Q3: the run goes on without a socket, and says so; who looks on is told, too."""
    damage(folder)
    async with this_host().spawn_procs({"gpus": 1}):
        with pytest.raises(ConnectError, match="cannot list the runs of this user"):
            observe.runs()
    assert [record.levelname for record in caplog.records if "cannot inspect this run" in record.getMessage()] == [
        "WARNING"
    ]


@pytest.mark.usefixtures("patient")
async def test_foreign_bytes_end_the_connection_and_nothing_else(folder: Path):
    """Q3: a request that is none is answered in words, one that is too large by a close."""

    def speak(data: bytes) -> bytes:
        [name] = os.listdir(folder / ".runs")
        with socket.socket(socket.AF_UNIX) as sock:
            runs = os.open(folder / ".runs", os.O_RDONLY)  # paths of sockets have at most 107 bytes
            try:
                sock.connect(f"/proc/self/fd/{runs}/{name}")
            finally:
                os.close(runs)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with sock.makefile("rb") as said:
                return said.read()

    async with this_host().spawn_procs({"gpus": 1}):
        said = await trio.to_thread.run_sync(speak, struct.pack("!I", 3) + b"\xc1\xc1\xc1")
        assert "must be a valid table" in msgspec.msgpack.decode(said[4:])["error"]
        unknown = msgspec.msgpack.encode({"kind": "dance"})
        said = await trio.to_thread.run_sync(speak, struct.pack("!I", len(unknown)) + unknown)
        assert "does not know the request 'dance'" in msgspec.msgpack.decode(said[4:])["error"]
        assert await trio.to_thread.run_sync(speak, struct.pack("!I", 2**31)) == b""
        assert (await trio.to_thread.run_sync(asked)).by == "loop"


def test_socket_of_a_killed_run_is_removed(folder: Path):
    """Q3: whoever comes across it removes it."""
    program = "import trio\nfrom trimesh import this_host\nasync def main():\n"
    program += "    async with this_host().spawn_procs({'gpus': 1}):\n        print('open', flush=True)\n"
    program += "        await trio.sleep_forever()\ntrio.run(main)\n"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with observe.find_run(process.pid) as run:
            assert len(run.snapshot().procs) == 2
        process.kill()
        process.wait()
    assert len(os.listdir(folder / ".runs")) == 1
    assert observe.runs() == []
    assert os.listdir(folder / ".runs") == []


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")

ANOTHER_USER = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX) if sys.argv[1] == "connect" else socket.socket(fileno=int(sys.argv[2]))
os.setgroups([])
os.setgid(65_534)
os.setuid(65_534)
if sys.argv[1] == "connect":
    try:
        sock.connect(sys.argv[2])
        sock.sendall(b"\\0\\0\\0\\x0d\\x81\\xa4kind\\xa5views")
        print("answered" if sock.recv(1) else "closed")
    except OSError as error:
        print(type(error).__name__)
else:
    sock.listen()
    print("listens", flush=True)
    sys.stdin.read()
"""


def another_user(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", ANOTHER_USER, *arguments], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout.strip()


@as_root
@pytest.mark.usefixtures("patient")
async def test_other_users_are_not_answered(folder: Path):
    """Q3: the folder keeps them out; were it open, the socket would still close: the kernel says who they are."""
    async with this_host().spawn_procs({"gpus": 1}):
        [name] = os.listdir(folder / ".runs")
        runs = os.open(folder / ".runs", os.O_RDONLY)  # paths of sockets have at most 107 bytes
        try:
            path = f"/proc/{os.getpid()}/fd/{runs}/{name}"
            assert await trio.to_thread.run_sync(another_user, "connect", path) == "PermissionError"
        finally:
            os.close(runs)
        short = Path(tempfile.gettempdir()) / f"trimesh-test-{os.getpid()}"  # a folder that all may enter
        os.link(folder / ".runs" / name, short)
        try:
            os.chmod(short, 0o777)
            said = await trio.to_thread.run_sync(another_user, "connect", str(short))
            assert said in ("closed", "ConnectionResetError", "BrokenPipeError")
        finally:
            os.unlink(short)
        assert len((await trio.to_thread.run_sync(asked)).procs) == 2


@as_root
def test_socket_that_another_user_listens_at_is_not_asked(folder: Path):
    """Q3: whoever has put it there."""
    folder.mkdir(mode=0o700)
    (folder / ".runs").mkdir(mode=0o700)
    runs = os.open(folder / ".runs", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"/proc/self/fd/{runs}/1-abc")
        os.close(runs)
        command = [sys.executable, "-c", ANOTHER_USER, "listen", str(sock.fileno())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, pass_fds=[sock.fileno()], **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            assert observe.runs() == []
            with pytest.raises(ConnectError, match="no run of this user"):
                observe.find_run()
            with pytest.raises(ConnectError, match="the run 1-abc belongs to another user"):
                RunClient(1, "1-abc")
            process.communicate()
