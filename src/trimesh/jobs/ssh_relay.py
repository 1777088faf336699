"""Relay on a host that ssh reaches: hosts that cannot reach the program connect there.

    program: door at 127.0.0.1  <--  ssh -R, one channel a connection  <--  relay: listens for the hosts

The forwarded port of ssh is one of the relay host's loopback, as `GatewayPorts` is usually off. The relay program
listens at an address that hosts reach, and connects each connection with that port.

RX-1 A relay whose connection broke is started again at the same port for as long as the block is open. Sessions survive
     if that takes less than their lease.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import AsyncGenerator
from contextlib import suppress
from importlib import resources
from typing import Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.addresses import LOOPBACK, held_port, with_port
from trimesh.jobs.launcher import ChildAgent, start_child
from trimesh.jobs.ssh import SSH, start_failure

_log: Final = logging.getLogger("trimesh")
_ALLOCATED: Final = re.compile(r"Allocated port (\d+) for remote forward")
_REFUSED: Final = re.compile(r"remote port forwarding failed|administratively prohibited")
_SAYS: Final = re.compile(r"trimesh-relay (\S+) (\d+)")

# One line for any login shell: without single quotes, backslashes and exclamation marks. The text of the program
# follows on standard input, which is read without a buffer, as the order and the beats come after it.
_BOOT: Final = 'import json; exec(json.loads(open(0, "rb", 0, closefd=False).readline().decode())); main()'


class RelayPlace(msgspec.Struct, frozen=True):
    """Relay that is ready.

    Attributes:
        port: Port of 127.0.0.1 at which the program is to listen.
        address: Address that hosts dial, `host:port`.
    """

    port: int
    address: str


@asynccontextmanager
async def open_ssh_relay(via: SSH, interface: str, towards: str) -> AsyncGenerator[RelayPlace, None]:
    """Run a relay while the body runs.

    Args:
        interface: Its listening address there: an address, a name of the relay host or of an interface; "" takes the
            address of its route to `towards`.
        towards: Name or address of a host, as the relay host resolves it; "" for the default route.

    Raises:
        SpawnError: It cannot be started.
    """
    with held_port() as port:
        relay = _Relay(via, interface, towards, port)
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            try:
                with trio.move_on_after(limits.HOST_JOIN_SECONDS):
                    await nursery.start(relay.keep)
                if not relay.address:
                    raise SpawnError(f"the relay on {via.host} was not ready within limits.HOST_JOIN_SECONDS")
                yield RelayPlace(relay.ports[0], relay.address)
            except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
                failure = error
            nursery.cancel_scope.cancel(reason="the block of the relay is left")
        if failure is not None:
            try:
                raise failure
            finally:
                del failure


class _Relay:
    """The relay of one program.

    Attributes:
        ports: Local port, and that of the relay once it is known, else 0.
        address: Address that hosts dial; "" until it is known.
    """

    def __init__(self, via: SSH, interface: str, towards: str, port: int) -> None:
        self.ports = (port, 0)
        self.address = ""
        self._via = via
        self._order: dict[str, Any] = {
            "interface": interface,
            "towards": towards,
            "lease": limits.RELAY_LEASE_SECONDS,
            "beat": limits.RELAY_BEAT_SECONDS,
            "connections": limits.RELAY_CONNECTIONS_MAX,
        }

    @property
    def _command(self) -> list[str]:
        options = (
            *("-T", "-x", "-o", "BatchMode=yes", "-o", "RemoteCommand=none", "-o", "LogLevel=INFO"),
            *("-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "ExitOnForwardFailure=no"),
            *("-o", f"ConnectTimeout={limits.SSH_CONNECT_SECONDS}"),
            *("-o", f"ServerAliveInterval={limits.RELAY_ALIVE_SECONDS}", "-o", "ServerAliveCountMax=2"),
            *("-R", f"{LOOPBACK}:0:{LOOPBACK}:{self.ports[0]}"),
        )
        there = f"exec {shlex.quote(self._via.python)} -S -c {shlex.quote(_BOOT)}"
        return ["ssh", *self._via.options, *options, "--", self._via.host, there]

    async def keep(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run it, again and again; the first failure to start is raised."""
        wait = limits.RELAY_RESTART_SECONDS
        while True:
            began = trio.current_time()
            why = await self._run_once(task_status)
            if not self.address:
                raise SpawnError(f"cannot start the relay on {self._via.host}: {why}")
            if trio.current_time() - began > limits.AGENT_LEASE_SECONDS:
                wait = limits.RELAY_RESTART_SECONDS
                _log.warning("the relay on %s has ended (%s) and is started again", self._via.host, why)
            await trio.sleep(wait)
            wait = min(2 * wait, limits.RELAY_RESTART_SECONDS_MAX)

    async def _run_once(self, task_status: trio.TaskStatus[None]) -> str:
        """Run it until it has ended, and return why."""
        ssh = _SSHChild(await start_child(self._command, f"the relay on {self._via.host}"))
        refusals = list[str]()
        try:
            async with trio.open_nursery() as nursery:

                async def serve() -> None:
                    refusals.extend(await self._serve(ssh, task_status))
                    nursery.cancel_scope.cancel(reason="the relay is of no use")

                nursery.start_soon(serve)
                await ssh.ended()
                if not self.address:
                    await trio.sleep(limits.AGENT_WORDS_SECONDS)
                nursery.cancel_scope.cancel(reason="ssh has ended")
        finally:
            await ssh.stop()
        if refusals:
            return refusals[0]
        code = ssh.exit_code
        meaning = start_failure(self._via.host, code, tuple(ssh.last_lines), None)
        return f"{meaning or f'exit code {code}'}; its last words: {' | '.join(ssh.last_lines)}"

    async def _serve(self, ssh: _SSHChild, task_status: trio.TaskStatus[None]) -> list[str]:
        """Start the relay program behind ssh, and tell it that this program lives. Returns why that is impossible."""
        line = await ssh.read_until(lambda text: bool(_ALLOCATED.search(text) or _REFUSED.search(text))) or ""
        if _REFUSED.search(line):
            return ["its ssh server must allow `ssh -R` of a port of its loopback address (AllowTcpForwarding)"]
        if found := _ALLOCATED.search(line):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._beat, ssh, int(found[1]))
                line = await ssh.read_until(lambda text: _SAYS.search(text) is not None) or ""
                if said := _SAYS.search(line):
                    self.ports = (self.ports[0], int(said[2]))
                    if not self.address:
                        self.address = with_port(said[1], int(said[2]))
                        task_status.started()
                await ssh.read_until(lambda _: False)
        await trio.sleep_forever()  # ssh has ended
        raise AssertionError("unreachable")

    async def _beat(self, ssh: _SSHChild, target: int) -> None:
        text = resources.files("trimesh.jobs").joinpath("relay_program.py").read_text(encoding="utf-8")
        order = {**self._order, "port": self.ports[1], "target": target}
        await ssh.write(b"%s\n%s\n" % (json.dumps(text).encode(), json.dumps(order).encode()))
        while True:
            await trio.sleep(limits.RELAY_BEAT_SECONDS)
            await ssh.write(b".")


class _SSHChild(ChildAgent):
    """The ssh client behind which the relay runs; it ends with its standard input."""

    @property
    def exit_code(self) -> int:
        return self._process.returncode or 0

    async def write(self, data: bytes) -> None:
        """Write to the relay program; nothing happens if it has ended."""
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._process.stdin.send_all(data)

    async def end(self) -> None:
        with trio.move_on_after(limits.SSH_END_SECONDS):
            await self.ended()
