"""`HostMesh.forward`: forwards a local port to a port of a host.

Each TCP connection has a socket in this process and one on the host; two channels carry its bytes, one per direction.

    socket --receive--> port ......> receiver --send--> socket      and the same in the other direction

CA-1 An empty item marks the end of a direction: the other side closes its socket for writing, and the opposite
     direction goes on.
CA-2 A direction that ends without this mark has failed. The connection is then reset, so no peer takes it as complete.
CA-3 At most `limits.FORWARD_CHUNKS` of `limits.FORWARD_CHUNK_BYTES` are under way in a direction; then its socket is
     not read.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._runtime.channels import Port, Receiver
from trimesh.actor.actor import Actor
from trimesh.actor.channel import open_channel
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import HostMesh
from trimesh.context_managers import asynccontextmanager
from trimesh.plain_numbers import whole_number

_ADDRESS: Final = "127.0.0.1"
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Forwarding:
    """A port of this machine that leads to one of a host, while its block is open; see `HostMesh.forward`.

    Attributes:
        port: Number of the port on 127.0.0.1.
        connections: Number of open connections.
        failures: The last `limits.FORWARD_FAILURES_KEPT` reasons why the host could not connect to its service.
    """

    def __init__(self, port: int, tunnel: PortTunnel, what: str) -> None:
        self.port = port
        self.connections = 0
        self.failures: deque[str] = deque(maxlen=limits.FORWARD_FAILURES_KEPT)
        self._tunnel = tunnel
        self._what = what

    @property
    def address(self) -> str:
        """Listening address, as `127.0.0.1:8888`."""
        return f"{_ADDRESS}:{self.port}"

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept connections; at most `limits.FORWARD_CONNECTIONS_MAX` are open at a time."""
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
                except Exception as error:  # noqa: BLE001 - ends one connection; the loss of the host ends the block
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
        OSError: The port cannot be used; `errno` says why.
    """
    try:
        [listener] = await trio.open_tcp_listeners(port, host=_ADDRESS)
    except OSError as error:
        rule = "local= must be a free port of this machine, or 0 for any"
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
        raise ValueError(f"forward() needs one host, got {len(hosts)}: write hosts.slice(hosts=0).forward(...)")
    host, port = checked_remote(remote)
    number = _checked_port(local, least=0, what="local=")
    listener = await _listening(number)  # before anything starts on the host: blocks there would wrap the error
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
    """Return the name and the port of a service, as the host resolves them.

    Raises:
        TypeError, ValueError: It is neither a port nor `name:port`.
    """
    if not isinstance(remote, str):
        return _ADDRESS, _checked_port(remote, least=1, what="remote=")
    name, _, number = remote.rpartition(":")
    if not name or not number.isascii() or not number.isdigit():
        raise ValueError(
            f"remote= must be a port of the host, or 'name:port' as the host resolves it, got {remote!r}: write 'db:80'"
        )
    return name.strip("[]"), _checked_port(int(number), least=1, what="the port in remote=")


def _checked_port(number: Any, *, least: int, what: str) -> int:
    found = whole_number(number)
    if found is None:
        raise TypeError(f"{what} must be a whole number, got {number!r}")
    if not least <= found < 1 << 16:
        raise ValueError(f"{what} must be a port from {least} to 65535, got {found}")
    return found


# ---- the host's side of `HostMesh.forward`: the actor that connects to a service there -------------------------------


class PortTunnel(Actor):
    """Connects to one address, as this host sees it, for each connection to the program's port."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Keep the connections; reset the open ones at the end."""
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel(reason="the block of the forwarded port is left")

    @endpoint(group="connect", concurrency=limits.FORWARD_CONNECTIONS_MAX)
    async def connect(self, received: Port[bytes]) -> Port[bytes]:
        """Connect, and return the port for bytes to the service.

        Args:
            received: Receives the bytes that the service sends.

        Raises:
            OSError: The service refuses, or does not accept within `limits.FORWARD_CONNECT_SECONDS`.
        """
        try:
            with trio.fail_after(limits.FORWARD_CONNECT_SECONDS):
                stream = await trio.open_tcp_stream(self._host, self._port)
        except trio.TooSlowError:
            received.close()
            seconds = f"limits.FORWARD_CONNECT_SECONDS ({limits.FORWARD_CONNECT_SECONDS:g} s)"
            raise TimeoutError(f"{self._host}:{self._port} did not accept a connection within {seconds}") from None
        except OSError:
            received.close()
            raise
        sent: Port[bytes] = await self._nursery.start(partial(self._carry, stream, received))
        return sent

    async def _carry(
        self, stream: trio.SocketStream, received: Port[bytes], *, task_status: trio.TaskStatus[Port[bytes]]
    ) -> None:
        async with open_channel(bytes, capacity=limits.FORWARD_CHUNKS) as (port, receiver):
            task_status.started(port.clone())
            port.close()
            await carry(stream, received, receiver)


# ---- one side of a forwarded connection: a socket and two channels ---------------------------------------------------

_END: Final = b""
_RESET: Final = struct.pack("ii", 1, 0)


async def carry(stream: trio.SocketStream, port: Port[bytes], receiver: Receiver[bytes]) -> None:
    """Carry the bytes of a connection until both directions have ended or one has failed, then close the socket."""
    is_whole = False
    try:
        async with trio.open_nursery() as nursery:
            failed = nursery.cancel_scope
            nursery.start_soon(_send_on, stream, port, failed)
            nursery.start_soon(_take, receiver, stream, failed)
        is_whole = not failed.cancel_called
    finally:
        port.close()
        if not is_whole:
            reset(stream)
        else:
            stream.socket.close()


def reset(stream: trio.SocketStream) -> None:
    """Close a connection by a TCP reset, so that the other side does not take it as complete."""
    if stream.socket.fileno() >= 0:
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        stream.socket.close()


async def _send_on(stream: trio.SocketStream, port: Port[bytes], failed: trio.CancelScope) -> None:
    try:
        while data := await stream.receive_some(limits.FORWARD_CHUNK_BYTES):
            await port.send(bytes(data))
        await port.send(_END)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        failed.cancel(reason="a forwarded connection was reset")


async def _take(receiver: Receiver[bytes], stream: trio.SocketStream, failed: trio.CancelScope) -> None:
    try:
        async for data in receiver:
            if not data:
                await stream.send_eof()
                return
            await stream.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    failed.cancel(reason="a forwarded connection was reset")
