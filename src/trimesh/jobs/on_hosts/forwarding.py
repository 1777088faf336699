"""The program's side of `HostMesh.forward`: a port of this machine that leads to one of a host."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Final

import trio

from trimesh import limits
from trimesh.actor.channel import open_channel
from trimesh.actor.host_mesh import HostMesh
from trimesh.context_managers import asynccontextmanager
from trimesh.jobs.on_hosts.carrying import carry, reset
from trimesh.jobs.on_hosts.tunnel import PortTunnel
from trimesh.plain_numbers import whole_number

_ADDRESS: Final = "127.0.0.1"
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Forwarding:
    """A port of this machine that leads to one of a host, while its block is open; see `HostMesh.forward`.

    Attributes:
        port: Number of the port on 127.0.0.1.
        connections: How many are open.
        failures: The last reasons why the host could not connect to its service: `limits.FORWARD_FAILURES_KEPT`.
    """

    def __init__(self, port: int, tunnel: PortTunnel, what: str) -> None:
        self.port = port
        self.connections = 0
        self.failures: deque[str] = deque(maxlen=limits.FORWARD_FAILURES_KEPT)
        self._tunnel = tunnel
        self._what = what

    @property
    def address(self) -> str:
        """Where it listens, as `127.0.0.1:8888`."""
        return f"{_ADDRESS}:{self.port}"

    async def serve(self, listener: trio.SocketListener) -> None:
        """Take connections; never more than `limits.FORWARD_CONNECTIONS_MAX` at a time."""
        slots = trio.Semaphore(limits.FORWARD_CONNECTIONS_MAX)
        async with trio.open_nursery() as nursery:
            while True:
                await slots.acquire()
                nursery.start_soon(self._carry, await _accept(listener), slots)

    async def _carry(self, stream: trio.SocketStream, slots: trio.Semaphore) -> None:
        self.connections += 1
        try:
            async with open_channel(bytes, capacity=limits.FORWARD_CHUNKS) as (port, receiver):
                try:
                    sent = await self._tunnel.connect.call_one(port)
                except Exception as error:  # noqa: BLE001 - of one connection; the end of the host ends the block
                    self.failures.append(f"{self._what}: {error}")
                    return
                port.close()
                await carry(stream, sent, receiver)
        finally:
            reset(stream)
            self.connections -= 1
            slots.release()

    def __repr__(self) -> str:
        return f"<{self.address} to {self._what}, {self.connections} connections>"


async def _listening(port: int) -> trio.SocketListener:
    """Listen on this machine.

    Raises:
        OSError: The port cannot be used; of the kind that the system says.
    """
    try:
        [listener] = await trio.open_tcp_listeners(port, host=_ADDRESS)
    except OSError as error:
        rule = "local= is a port of this machine that is free, or 0 for any"
        raise OSError(error.errno, f"{rule}, got {port}: {os.strerror(error.errno or 0)}") from None
    return listener


async def _accept(listener: trio.SocketListener) -> trio.SocketStream:
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            await trio.sleep(limits.FORWARD_ACCEPT_RETRY_SECONDS)


@asynccontextmanager
async def forward(hosts: HostMesh, local: int, remote: int | str) -> AsyncGenerator[Forwarding, None]:
    """Forward a port; see `HostMesh.forward`."""
    if len(hosts) != 1:
        raise ValueError(f"a port leads to one host, got {len(hosts)}: write hosts.slice(hosts=0).forward(...)")
    host, port = checked_remote(remote)
    number = _checked_port(local, least=0)
    listener = await _listening(number)  # before anything is started on the host, whose failures come in groups
    async with listener, hosts.spawn_procs({}, name="forward") as procs:
        tunnel = await procs.spawn("forward", PortTunnel, host, port)
        bound: int = listener.socket.getsockname()[1]
        forwarding = Forwarding(bound, tunnel, f"{host}:{port} on {hosts.names[0]}")
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(forwarding.serve, listener)
            try:
                yield forwarding
            except Exception as error:  # noqa: BLE001 - raised again below: the nursery would wrap it
                failure = error
            nursery.cancel_scope.cancel(reason="the block of the forwarded port is left")
        if failure is not None:
            raise failure


def checked_remote(remote: Any) -> tuple[str, int]:
    """Return name and port of a service as a host sees them.

    Raises:
        TypeError, ValueError: It is no port, and no `name:port`.
    """
    if not isinstance(remote, str):
        return _ADDRESS, _checked_port(remote, least=1)
    name, _, number = remote.rpartition(":")
    if not name or not number.isascii() or not number.isdigit():
        raise ValueError(f"remote is a port of the host, or 'name:port' as the host sees it, got {remote!r}")
    return name.strip("[]"), _checked_port(int(number), least=1)


def _checked_port(number: Any, *, least: int) -> int:
    found = whole_number(number)
    if found is None:
        raise TypeError(f"a port is a number, got {number!r}")
    if not least <= found < 1 << 16:
        raise ValueError(f"a port is a number from {least} to 65535, got {found}")
    return found
