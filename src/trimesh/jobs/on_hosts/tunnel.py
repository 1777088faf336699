"""The host's side of `HostMesh.forward`: the actor that connects to a service there."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import trio

from trimesh import limits
from trimesh._runtime.channels import Port
from trimesh.actor.actor import Actor
from trimesh.actor.channel import open_channel
from trimesh.actor.endpoint import endpoint
from trimesh.jobs.on_hosts.carrying import carry


class PortTunnel(Actor):
    """Connects to one address as this host sees it, for each connection to a port of the program."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Keep the connections; what is open at the end is reset."""
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel(reason="the block of the forwarded port is left")

    @endpoint(group="connect", concurrency=limits.FORWARD_CONNECTIONS_MAX)
    async def connect(self, received: Port[bytes]) -> Port[bytes]:
        """Connect, and return where bytes for the service are sent to.

        Args:
            received: Gets what the service sends.

        Raises:
            OSError: There is no service, or it does not answer within `limits.FORWARD_CONNECT_SECONDS`.
        """
        try:
            with trio.fail_after(limits.FORWARD_CONNECT_SECONDS):
                stream = await trio.open_tcp_stream(self._host, self._port)
        except trio.TooSlowError:
            received.close()
            seconds = f"{limits.FORWARD_CONNECT_SECONDS:g} s"
            raise TimeoutError(f"{self._host}:{self._port} does not take a connection within {seconds}") from None
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
