"""The other process of the tests.

`peer.py serve KIND SOCKET LEASE` obeys the heads of messages on a link (KIND: local or stream) over descriptor SOCKET,
and ends when the link does; LEASE 1: so it does when the other side is silent. `peer.py hold PIDFD ...` ties its life
to other processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

import trio

from trimesh._transport.interface import Lane, Link, LinkDown
from trimesh._transport.native.transport import NativeTransport
from trimesh.ids import ProcId

BEAT_SECONDS = 0.05
STALL_SECONDS = 0.5
LEASE_SECONDS = 1.0  # a busy machine may keep a thread from running for a while
EPOCH = ProcId(4242)

libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL while C runs, as bad extension modules do


class Peer:
    """Does what the head of a message says."""

    def __init__(self, transport: NativeTransport, scope: trio.CancelScope) -> None:
        self.transport = transport
        self.scope = scope

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        command, _, argument = bytes(head).decode().partition(" ")
        if command == "echo":
            link.send(bytes(head), bodies)
        elif command == "echo-control":
            link.send(bytes(head), lane=Lane.CONTROL)
        elif command == "hold-gil":
            libc.usleep(int(float(argument) * 1e6))
            link.send(b"let go")
        elif command == "hold-gil-until-told":
            libc.read(0, ctypes.create_string_buffer(1), 1)
            link.send(b"let go")
        elif command == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif command == "exit":
            os._exit(int(argument))
        elif command == "count":
            for i in range(int(argument)):
                link.send(b"%d" % i)
        else:
            raise AssertionError(f"unknown command {command!r}")

    def link_down(self, link: Link, down: LinkDown) -> None:
        self.scope.cancel()

    def link_stalled(self, link: Link, seconds: float) -> None:
        raise AssertionError("the tests' own process does not say that it stalls")


async def serve(kind: str, fd: int, lease: bool) -> None:
    transport = NativeTransport(
        EPOCH, beat_seconds=BEAT_SECONDS, lease_seconds=LEASE_SECONDS, stall_seconds=STALL_SECONDS
    )
    link = transport.open_link(socket.socket(fileno=fd), local=kind == "local", lease=lease)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.run, Peer(transport, nursery.cancel_scope))
        await link.up.wait()
        print("up", flush=True)
    transport.close()


def hold(fds: list[int]) -> None:
    """Tie a lifeline to each pidfd, fork a foreign child, say who we are, and hold the GIL in C for ever."""
    transport = NativeTransport(EPOCH)
    for fd in fds:
        transport.add_lifeline(fd)
    child = os.fork()
    if child == 0:
        signal.pause()
    print(os.getpid(), child, flush=True)
    libc.sleep(3600)


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "serve":
        trio.run(serve, arguments[0], int(arguments[1]), arguments[2] == "1")
    else:
        assert mode == "hold"
        hold([int(one) for one in arguments])
