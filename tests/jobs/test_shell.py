"""A shell on a host, at a terminal of this machine."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import wait_gone

import trimesh.blocking as tb
from trimesh import origin, this_host

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

SHELL = ["sh"]
ENV = {"PS1": "ready> "}


class Seat:
    """A user before a terminal.

    Attributes:
        name: Of the terminal.
        seen: What is on the screen.
    """

    def __init__(self) -> None:
        self.user, self.side = pty.openpty()
        self.name = os.ttyname(self.side)
        self.seen = b""
        os.set_blocking(self.user, False)
        self.size(31, 97)

    def size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.user, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: bytes) -> None:
        assert os.write(self.user, text) == len(text)

    async def see(self, text: bytes) -> bytes:
        """Wait until a text is on the screen; return what was there before it, and forget both."""
        while text not in self.seen:
            await trio.lowlevel.wait_readable(self.user)
            self.seen += os.read(self.user, 65_536)
        before, _, self.seen = self.seen.partition(text)
        return before

    @property
    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.side)


@pytest.fixture
def seat() -> Iterator[Seat]:
    """A terminal of 31 rows and 97 columns."""
    found = Seat()
    yield found
    os.close(found.user)
    os.close(found.side)


async def shell_in(nursery: trio.Nursery, hosts: Any, seat: Seat, codes: list[int]) -> trio.CancelScope:
    """Start a shell at a seat, and wait for its prompt."""
    scope = trio.CancelScope()

    async def run() -> None:
        with scope:
            codes.append(await hosts.shell(SHELL, env=ENV, terminal=seat.name))

    nursery.start_soon(run)
    await seat.see(b"ready> ")
    return scope


@pytest.mark.daily
async def test_shell_has_a_terminal_on_its_host(seat: Seat) -> None:
    """H19: its size, job control by keys, its exit code; and the terminal here is as before."""
    before = seat.modes
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts, trio.open_nursery() as nursery:
            codes = list[int]()
            await shell_in(nursery, hosts.slice(hosts=1), seat, codes)
            assert seat.modes != before
            seat.type(b"stty size; test -t 0 && test -t 2 && echo it is a ter''minal\n")
            await seat.see(b"31 97\r\n")
            await seat.see(b"it is a terminal\r\n")
            # A shell may lose a key between the echo of its own and the start of what follows: the child says it.
            seat.type(b"sh -c \"echo be''gun; exec sleep 1000\"; echo $((6 * 7))\n")
            await seat.see(b"begun\r\n")
            seat.type(b"\x03")
            await seat.see(b"ready> ")
            seat.size(12, 34)
            os.kill(os.getpid(), signal.SIGWINCH)
            seat.type(b"while test \"$(stty size)\" != '12 34'; do sleep 0.01; done; echo re''sized\n")
            await seat.see(b"resized\r\n")
            seat.type(b"echo the l''ast; exit 3\n")
            await seat.see(b"the last\r\n")
    assert codes == [3]
    assert seat.modes == before


async def test_cancel_hangs_up_and_leaves_nothing(seat: Seat) -> None:
    """H19: what runs there ends with it, in the background too; the terminal is restored."""
    before = seat.modes
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, trio.open_nursery() as nursery:
            scope = await shell_in(nursery, hosts, seat, [])
            seat.type(b"(trap '' HUP; sleep 1000) & echo pid $!-$$ .\n")
            await seat.see(b"\r\npid ")
            pids = [int(one) for one in (await seat.see(b" .\r\n")).split(b"-")]
            scope.cancel()
            await wait_gone(pids)
    assert seat.modes == before


async def test_user_who_goes_away_ends_the_shell(seat: Seat) -> None:
    """H19: the end of the keys is that of the shell; it is not one of the program."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, trio.open_nursery() as nursery:
            codes = list[int]()
            await shell_in(nursery, hosts, seat, codes)
            seat.type(b"\x04")
    assert codes == [0]


async def test_much_output_comes_whole(seat: Seat) -> None:
    """SR-2: the last bytes, too, and nothing is taken while the screen is slow."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, trio.open_nursery() as nursery:
            codes = list[int]()

            async def run() -> None:
                script = "i=0; while test $i -lt 20000; do echo line $i; i=$((i+1)); done; printf end"
                codes.append(await hosts.shell(["sh", "-c", script], terminal=seat.name))

            nursery.start_soon(run)
            text = await seat.see(b"end")
            assert text == b"".join(b"line %d\r\n" % number for number in range(20_000))
    assert codes == [0]


async def test_wrong_uses_are_refused(seat: Seat) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            with pytest.raises(ValueError, match="one host"):
                await hosts.shell(terminal=seat.name)
            with pytest.raises(ValueError, match="needs a terminal"):
                await hosts.slice(hosts=0).shell()
            with pytest.raises(FileNotFoundError):
                await hosts.slice(hosts=0).shell(terminal="/dev/no-terminal")
            with pytest.raises(TypeError, match="list of arguments"):
                await hosts.slice(hosts=0).shell("htop", terminal=seat.name)
            with pytest.raises(FileNotFoundError) as caught:
                await hosts.slice(hosts=0).shell(cwd="/no/such/folder", terminal=seat.name)
            assert origin(caught.value) is not None


def test_blocking_programs_have_a_shell(seat: Seat) -> None:
    def user() -> None:
        os.set_blocking(seat.user, True)
        while b"ready> " not in seat.seen:
            seat.seen += os.read(seat.user, 1_000)
        seat.type(b"exit 4\n")

    thread = threading.Thread(target=user)
    thread.start()
    with tb.fail_after(HANG_SECONDS):
        assert tb.this_host().shell(SHELL, env=ENV, terminal=seat.name) == 4
    thread.join()


async def test_this_host_has_one(seat: Seat) -> None:
    with trio.fail_after(HANG_SECONDS):
        assert await this_host().shell(["sh", "-c", "kill -9 $$"], terminal=seat.name) == -signal.SIGKILL
