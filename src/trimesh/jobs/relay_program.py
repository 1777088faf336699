"""Relay: passes connections of hosts on to a program that they cannot reach. It sees only the bytes of TLS sessions.

The program sends this text to a relay host and runs it there: it needs Python 3.6, and no trimesh.

In a pod the relay cannot dial the program, which dials it, by port-forwards to its loopback address. One connection
begins with `C`: on it the relay reports each host that waits, as `+`. Then the program makes another one for that host,
which begins with `D`.

YR-1 It ends with its standard input (not in a pod), and when it has not heard the program for `lease` seconds.
YR-2 A process below it has the connections. If that dies they break, and another one takes new ones at once.
YR-3 What one side does not read holds the other; the end of one direction is passed on, and a reset resets both.
"""

import asyncio
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

READ_BYTES = 1 << 16
SIOCGIFADDR = 0x8915
ELSEWHERE = "192.0.2.1"


def address_of(interface: str, towards: str) -> str:
    """Return the address at which hosts reach this machine."""
    if interface in [name for _, name in socket.if_nameindex()]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            found = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(found[20:24])
    if interface:
        return str(socket.getaddrinfo(interface, 9, type=socket.SOCK_DGRAM)[0][4][0])
    family, kind, number, _, there = socket.getaddrinfo(towards or ELSEWHERE, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as sock:
        sock.connect(there)
        return str(sock.getsockname()[0])


def listening(address: str, port: int, seconds: float) -> socket.socket:
    """Return a listening socket; the port may be held by an earlier relay, which ends within its lease."""
    until = time.monotonic() + seconds
    while True:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(128)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return sock


class RelayedConnections:
    """The connections of one program."""

    def __init__(self, order: Any, loop: asyncio.AbstractEventLoop, parent: int) -> None:
        self.order = order
        self.loop = loop
        self.parent = parent
        self.count = 0
        self.heard_at = loop.time()
        self.ended: Any = loop.create_future()
        self.control: Any = None
        self.waiting: Any = deque()

    def hear(self) -> None:
        if os.read(0, READ_BYTES):
            self.heard_at = self.loop.time()
        else:
            self.end()

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def look(self) -> None:
        if self.loop.time() - self.heard_at > self.order["lease"] or os.getppid() != self.parent:
            self.end()
        self.tell(b".")
        self.loop.call_later(self.order["beat"], self.look)

    def tell(self, text: bytes) -> None:
        if self.control is not None:
            self.control.write(text)

    async def connect(self) -> Any:
        """Return a connection with the program, which in a pod it is asked for."""
        if "target" in self.order:
            return await asyncio.open_connection("127.0.0.1", self.order["target"])
        made = self.loop.create_future()
        self.waiting.append(made)
        self.tell(b"+")
        return await made

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection that the program has made."""
        try:
            kind = await reader.read(1)
            if kind == b"D" and self.waiting:
                self.waiting.popleft().set_result((reader, writer))
                return
            if kind == b"C":
                self.control, earlier = writer, self.control
                if earlier is not None:
                    earlier.close()
                writer.write(b"." + b"+" * len(self.waiting))
                while await reader.read(READ_BYTES):
                    self.heard_at = self.loop.time()
        except OSError:
            pass
        if self.control is writer:
            self.control = None
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.count >= self.order["connections"]:
            writer.transport.abort()
            return
        self.count += 1
        writers = [writer]
        try:
            there, back = await self.connect()
            writers.append(back)
            await asyncio.gather(self.copy(reader, back), self.copy(there, writer))
            for one in writers:
                one.close()
        except OSError:
            for one in writers:
                one.transport.abort()
        finally:
            self.count -= 1

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await reader.read(READ_BYTES)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def run(order: Any, sockets: Any, parent: int) -> None:
    """Pass connections on until the program has left."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    relay = RelayedConnections(order, loop, parent)
    for sock, serve in zip(sockets, (relay.serve, relay.admit)):  # noqa: B905 - Python 3.6 has no strict=
        loop.run_until_complete(asyncio.start_server(serve, sock=sock))
    if "target" in order:
        loop.add_reader(0, relay.hear)
    relay.look()
    loop.run_until_complete(relay.ended)


def stop(number: int, _: Any) -> None:
    os._exit(128 + number)


def main(text: str = "") -> None:
    """Read the order, listen, report the address, and keep a process that passes connections on."""
    order = json.loads(text or open(0, "rb", 0, closefd=False).readline().decode())  # noqa: SIM115 - it stays open
    signal.signal(signal.SIGTERM, stop)  # the first process of a container ignores signals that it does not handle
    try:
        address = address_of(order["interface"], order["towards"])
        sockets = [listening(address, order["port"], 2 * order["lease"])]
        if "target" not in order:
            sockets.append(listening("127.0.0.1", order["port"], 0))
    except OSError as error:
        sys.exit(f"the relay cannot listen there: {error}")
    sys.stderr.write(f"trimesh-relay {address} {sockets[0].getsockname()[1]}\n")
    sys.stderr.flush()
    parent, status = os.getpid(), 1
    while status:  # a killed process is followed at once, as this one keeps the sockets
        child = os.fork()
        if not child:
            try:
                run(order, sockets, parent)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
    os._exit(0)
