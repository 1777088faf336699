"""Relay: passes connections of hosts on to a program that they cannot reach. It sees only the bytes of TLS sessions.

The program sends this text to a relay host and runs it there: it needs Python 3.6, and no trimesh.

YR-1 It ends with its standard input, and when nothing has arrived there for `lease` seconds.
YR-2 A process below it has the connections. If that dies they break, and another one takes new ones at once.
YR-3 What one side does not read holds the other; the end of one direction is passed on, and a reset resets both.
"""

import asyncio
import errno
import fcntl
import json
import os
import socket
import struct
import sys
import time
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
        self.loop.call_later(self.order["lease"] / 6, self.look)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.count >= self.order["connections"]:
            writer.transport.abort()
            return
        self.count += 1
        writers = [writer]
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.order["target"])
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


def run(order: Any, sock: socket.socket, parent: int) -> None:
    """Pass connections on until the program has left."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    relay = RelayedConnections(order, loop, parent)
    loop.run_until_complete(asyncio.start_server(relay.serve, sock=sock))
    loop.add_reader(0, relay.hear)
    relay.look()
    loop.run_until_complete(relay.ended)


def main() -> None:
    """Read the order, listen, report the address, and keep a process that passes connections on."""
    order = json.loads(open(0, "rb", 0, closefd=False).readline().decode())  # noqa: SIM115 - it stays open
    try:
        address = address_of(order["interface"], order["towards"])
        sock = listening(address, order["port"], 2 * order["lease"])
    except OSError as error:
        sys.exit(f"the relay cannot listen there: {error}")
    sys.stderr.write(f"trimesh-relay {address} {sock.getsockname()[1]}\n")
    sys.stderr.flush()
    parent, status = os.getpid(), 1
    while status:  # a killed process is followed at once, as this one keeps the socket
        child = os.fork()
        if not child:
            try:
                run(order, sock, parent)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
    os._exit(0)
