"""Port-forwards in a process of their own: connections of hosts, from the relay pod to the door of the program.

    door at 127.0.0.1  <--  this process  -->  API server, a WebSocket a connection  -->  relay pod  <--  hosts

The relay pod cannot dial the program. So this process keeps one forward on which the relay reports each host that has
dialled it, and makes another one for that host; see `relay_program`. Bytes go on while the program computes.

WF-1 It ends with its standard input.
WF-2 A forward that breaks is made again, for as long as the program lives. A missing right ends the process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import trio

from trimesh import limits
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import LOOPBACK
from trimesh.jobs.kubernetes.cluster import (
    FORBIDDEN,
    ApiError,
    Cluster,
    Forward,
    hopeless,
    is_running,
    name_of,
    open_cluster,
)
from trimesh.jobs.launcher import ChildAgent, start_child

_log: Final = logging.getLogger("trimesh")
_MODULE: Final = "trimesh.jobs.kubernetes.port_forward"
_STATE: Final = "trimesh-forward: "
"""Prefix of a line about the forward to the relay: that it is ready, or why it has ended."""

_READY: Final = f"{_STATE}ready"
_RIGHT: Final = '{apiGroups: [""], resources: ["pods/portforward"], verbs: ["get", "create"]}'


class PortForwarder:
    """The program's side of the process.

    Args:
        order: Namespace, selector, container and port of the relay, and port of the door.
        changed: Called after each change of the attributes.

    Attributes:
        is_ready: Whether it reaches the relay.
        failure: Why it never will; "" otherwise.
    """

    def __init__(self, order: dict[str, Any], changed: Callable[[], None]) -> None:
        self.is_ready = False
        self.failure = ""
        self._order = order
        self._changed = changed

    async def keep(self) -> None:
        """Run it, again and again, unless it cannot reach the relay within `limits.HOST_JOIN_SECONDS`."""
        was_ready = False
        while was_ready or not self.failure:
            child = _Child(await start_child([sys.executable, "-m", _MODULE], "the port-forward"))
            try:
                await child.write(json.dumps(self._order).encode() + b"\n")
                with trio.move_on_after(math.inf if was_ready else limits.HOST_JOIN_SECONDS):
                    was_ready = await child.read_until(self._is_ready_now) is not None or was_ready
                if self.is_ready:
                    await child.read_until(self._logged)
            finally:
                await child.stop()
            self.is_ready = False
            if not was_ready:
                words = (
                    " | ".join(line.removeprefix(_STATE) for line in child.last_lines)
                    or "no answer within limits.HOST_JOIN_SECONDS"
                )
                self.failure = f"the relay pod cannot be reached by a port-forward of the API server: {words}"
            self._changed()
            await trio.sleep(limits.RELAY_RESTART_SECONDS)

    def _is_ready_now(self, line: str) -> bool:
        if line.startswith(_STATE):
            self.is_ready = line == _READY
            self._changed()
        return self.is_ready

    def _logged(self, line: str) -> bool:
        if not self._is_ready_now(line):
            _log.warning("port-forward to the relay pod: %s", line.removeprefix(_STATE))
        return False


class _Child(ChildAgent):
    """The process, which ends with its standard input."""

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):  # it has ended
            await self._process.stdin.send_all(data)

    async def end(self) -> None:
        await self.ended()


# ---- the process -----------------------------------------------------------------------------------------------------


class _Forwards:
    """The forwards."""

    def __init__(self, order: dict[str, Any], cluster: Cluster, nursery: trio.Nursery) -> None:
        self._order = order
        self._cluster = cluster
        self._nursery = nursery
        self._pod = ""
        self._last = ""
        self._is_ready = False
        self._wait = limits.RELAY_RESTART_SECONDS
        self._calls = trio.CapacityLimiter(limits.KUBERNETES_CALLS_AT_ONCE)

    async def run(self) -> None:
        """Keep the forward on which the relay reports hosts."""
        while True:
            try:
                self._say(await self._follow())
            except SpawnError as error:
                self._say(str(error))
                if not self._is_ready:
                    self._nursery.cancel_scope.cancel(reason="the relay cannot be reached")
            except Exception as error:  # noqa: BLE001 - whatever breaks a connection, the next one is made
                self._say(f"the connection broke: {error}")
            await trio.sleep(self._wait)
            self._wait = min(2 * self._wait, limits.RELAY_RESTART_SECONDS_MAX)

    def _say(self, words: str) -> None:
        if words != self._last:
            sys.stderr.write(f"{_STATE}{words}\n")
            sys.stderr.flush()
        self._last = words

    async def _follow(self) -> str:
        """Follow the reports of the relay until they end; return why.

        Raises:
            SpawnError: The relay pod will never run, or a right is missing.
        """
        container = self._order["container"]
        found, _ = await self._cluster.pods(self._order["selector"])
        for pod in found:
            if words := hopeless(pod):
                log = await self._cluster.log(name_of(pod), container)
                said = f"; its last words: {log}" if log else ""
                raise SpawnError(f"the pod {name_of(pod)} cannot be the relay: {words}{said}")
        running = [name_of(pod) for pod in found if is_running(pod, container)]
        if not running:
            return "no relay pod runs"
        self._pod = running[-1]
        async with AsyncExitStack() as stack:
            try:
                forward = await stack.enter_async_context(self._cluster.forward(self._pod, self._order["port"]))
            except ApiError as error:
                if error.status == FORBIDDEN:
                    raise SpawnError(f"{error}; a Role must have {_RIGHT}") from error
                raise
            return await self._listen(forward)

    async def _listen(self, forward: Forward) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat, forward)
            while True:
                data = b""
                with trio.move_on_after(limits.RELAY_LEASE_SECONDS):
                    data = await forward.receive()
                if not data:
                    nursery.cancel_scope.cancel(reason="the forward has ended")
                    return forward.failure or "the connection broke"
                self._say("ready")
                self._is_ready = True
                self._wait = limits.RELAY_RESTART_SECONDS
                for _ in range(data.count(b"+")):
                    if len(self._nursery.child_tasks) < limits.RELAY_CONNECTIONS_MAX:
                        self._nursery.start_soon(self._serve)

    async def _beat(self, forward: Forward) -> None:
        await forward.send(b"C")
        while True:
            await trio.sleep(limits.RELAY_BEAT_SECONDS)
            await forward.send(b".")

    async def _serve(self) -> None:
        """Connect a host with the door; give up after `limits.HOST_JOIN_SECONDS`, as it does."""
        until = trio.current_time() + limits.HOST_JOIN_SECONDS
        while trio.current_time() < until:
            try:
                async with AsyncExitStack() as stack:
                    async with self._calls:
                        forward = await stack.enter_async_context(self._cluster.forward(self._pod, self._order["port"]))
                    await self._copy(forward)
            except ApiError:
                await trio.sleep(limits.RELAY_RESTART_SECONDS)
            except Exception:  # noqa: BLE001 - a broken connection is no loss: the host dials again
                return
            else:
                return

    async def _copy(self, forward: Forward) -> None:
        await forward.send(b"D")
        async with await trio.open_tcp_stream(LOOPBACK, self._order["door"]) as door, trio.open_nursery() as nursery:

            async def send() -> None:
                async for data in door:
                    await forward.send(data)
                nursery.cancel_scope.cancel(reason="the door has closed it")

            nursery.start_soon(send)
            while data := await forward.receive():
                await door.send_all(data)
            nursery.cancel_scope.cancel(reason="the host has closed it")


async def _run(order: dict[str, Any]) -> None:
    async with open_cluster(order["namespace"]) as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(_Forwards(order, cluster, nursery).run)
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            while await stdin.receive_some():
                pass
        signal.alarm(math.ceil(limits.KILL_SECONDS))  # ends this process if a connection cannot be closed
        nursery.cancel_scope.cancel(reason="the program has left")


def main() -> None:
    """Run the forwards by the order on standard input."""
    order = json.loads(sys.stdin.buffer.readline() or sys.exit())
    try:
        trio.run(_run, order)
    except SpawnError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
