"""A host served by an agent, at the controller: processes are started there, and linked through the session.

RH-1 The guarantees of `SpawnerClient` for a spawner hold for an agent: each question is answered, or the host is lost.
RH-2 A lost host is one failure: each of its processes gets a report without a diagnosis, and the `loss` of its child
     names the host. Their links end, because their channels do.
RH-3 The report of a process is delivered after its launch has returned, whichever arrived first.

AQ-1 An agent is notified of the loss of another one once, at once, and of nothing about that one afterwards.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.hosts.casts import CastSender
from trimesh._runtime.life.job_hosts import HostCode
from trimesh._runtime.life.local_host import accept_links, spec_of
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import HostLoss
from trimesh._runtime.peers.host import LaunchRequest, NoLinkError, ProcessState
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.boot import own_prefixes
from trimesh._runtime.spawner.client import FarPlace, Siblings, SpawnerClient, SpawnerLostError
from trimesh._runtime.spawner.launcher import capture_caller
from trimesh._runtime.spawner.socket import Received, close_all, stream_of
from trimesh._runtime.system.child import LaunchSpec, config_of, name_of, output_of
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.records import AgentReady, Listening, Parted, Relayed, Tunnel
from trimesh._transport.interface import Link
from trimesh._transport.native.transport import NativeTransport
from trimesh._transport.relay import Session
from trimesh._wire import observed
from trimesh._wire.observed import ActorRow, HostRow
from trimesh.config import current
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import LimitExceeded, ProtocolError, SpawnError
from trimesh.ids import ProcId
from trimesh.shape.extent import Point

OnExit = Callable[[ExitReport], None]


class RemoteChild:
    """A process on another host."""

    def __init__(self, host: RemoteHost, proc_id: ProcId, pid: int, link: Link) -> None:
        self._host = host
        self.proc_id = proc_id
        self.pid = pid
        self.link = link

    @property
    def host_name(self) -> str:
        return self._host.name

    @property
    def loss(self) -> HostLoss | None:
        """Loss of its host; None while the host serves."""
        return self._host.loss

    @property
    def lease(self) -> str:
        """Name of the limit that bounds its silence."""
        return "FAR_LINK_LEASE_SECONDS"

    @property
    def report_seconds(self) -> float:
        return limits.FAR_EXIT_REPORT_SECONDS

    async def spawner_state(self) -> str | None:
        """See `HostChild.spawner_state`: its agent answers."""
        known = await self._host.state_of(0)
        return None if known is None else known.letter

    async def kernel_state(self, record: str = "") -> ProcessState | None:
        """See `HostChild.kernel_state`: its agent answers."""
        return await self._host.state_of(self.pid, record)

    def signal(self, signum: int) -> None:
        """Send a signal to its process group; never blocks."""
        self._host.signal(self.proc_id, signum)


class RemoteHost:
    """A host behind a session; see `Host`. Made by `open_remote_host`.

    Attributes:
        point: Coordinates among the hosts of its job.
        place: Its agent, and the group of agents that this one may connect to.
        loss: Loss of the host; None while it serves.
        is_loss_taken: Whether processes ran there, so that their meshes report the loss.
        on_lost: Called once, when it is lost, after those processes were reported.
        code: Code brought there by `hosts.sync` or `hosts.install`, for processes started from now on.
        client: The connection to its agent.
        on_agent_failed: Called with the error text of its agent when that ends; decides why the host is lost.
    """

    def __init__(
        self,
        proc: Proc,
        transport: NativeTransport,
        siblings: Siblings,
        pipe: SessionPipe,
        name: str,
        point: Point,
        agents: AgentTable,
    ) -> None:
        self.name = name
        self.point = point
        self.place = FarPlace(pipe.session.peer, agents)
        self.loss: HostLoss | None = None
        self.is_loss_taken = False
        self.on_agent_failed: Callable[[str], None] = partial(self.lose, "agent exit")
        self.on_lost: Callable[[HostLoss], None] = lambda _: None
        self.code: HostCode | None = None
        self.client = SpawnerClient(pipe, on_notice=self._noticed, on_lost=self._lost, whom=f"the agent of {name}")
        self._proc = proc
        self._transport = transport
        self._siblings = siblings
        self._agents = agents
        self._pipe = pipe
        self._casts = CastSender(self._open_casts, pipe.session.peer, agents)
        self._accept = accept_links(proc, transport, self._casts.caster)
        self._hooks: dict[ProcId, OnExit] = {}
        self._launching: dict[ProcId, ExitReport | None] = {}
        self._ready = trio.Event()
        self._tasks: trio.Nursery | None = None

    # ---- as a host -------------------------------------------------------------------------------------------

    async def launch(self, request: LaunchRequest, on_exit: OnExit) -> RemoteChild:
        spec = msgspec.structs.replace(spec_of(request), is_far=True)
        name = name_of(spec)
        self._launching[request.proc_id] = None
        try:
            failure = f"it did not begin to run within the setting spawn_seconds ({current().spawn_seconds:g} s)"
            try:
                with trio.move_on_after(current().spawn_seconds):
                    received = await self.client.ask(lambda number: self._launch_of(spec, number))
                    if isinstance(received.record, wire.Launched) and received.fds:
                        return self._born(request, received.record.pid, received.fds[0], on_exit)
                    close_all(received.fds)
                    failure = (
                        received.record.text
                        if isinstance(received.record, wire.LaunchFailed)
                        else "this process has no descriptor left for it (see ulimit -n)"
                    )
            except (SpawnerLostError, OSError, LimitExceeded) as error:
                raise SpawnError(f"cannot start {name} on {self.name}: {error}") from None
            except trio.Cancelled:
                await self._take_back(request.proc_id)
                raise
            await self._take_back(request.proc_id)
            raise SpawnError(f"cannot start {name} on {self.name}: {failure}")
        finally:
            self._launching.pop(request.proc_id, None)

    def _launch_of(self, spec: LaunchSpec, number: int) -> wire.Launch:
        output, path = output_of(spec.output)
        return wire.Launch(
            request=number,
            config=config_of(spec, self._proc.proc_id, self._proc.proc_id),
            context=far_caller(spec.env, self.code),
            entry=spec.entry,
            python=b"" if spec.python is None else spec.python.encode(),
            preload=spec.preload,
            output=output,
            output_path=path,
            cpus=spec.cpus,
        )

    def _born(self, request: LaunchRequest, pid: int, fd: int, on_exit: OnExit) -> RemoteChild:
        proc_id = request.proc_id
        sock = stream_of(fd, is_far=True)
        try:
            link = self._transport.open_link(
                sock,
                local=False,
                lease=True,
                peer=proc_id,
                hello_seconds=current().spawn_seconds,
                lease_seconds=limits.FAR_LINK_LEASE_SECONDS,
            )
        except (OSError, LimitExceeded) as error:
            sock.close()
            self.signal(proc_id, signal.SIGKILL)
            raise SpawnError(
                f"cannot start a process of {request.mesh} on {self.name}: no link to the new process: {error}"
            ) from error
        link.caster = self._casts.caster
        child = RemoteChild(self, proc_id, pid, link)
        ended = self._launching.get(proc_id)
        if ended is None and self.loss is None:
            self._hooks[proc_id] = on_exit
        else:  # RH-3
            report = ended or ExitReport.unknown(proc_id, pid)
            self._proc.nursery.start_soon(_call_later, partial(on_exit, report))
        return child

    async def _take_back(self, proc_id: ProcId) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KILL_SECONDS):
            self.signal(proc_id, signal.SIGKILL)
            await self.exit_of(proc_id)

    def signal(self, proc_id: ProcId, signum: int) -> None:
        """Signal the group of a process; never blocks. Does nothing if the host is lost."""
        self.client.post(wire.Signal(proc_id, signum))

    async def state_of(self, pid: int, record: str = "") -> ProcessState | None:
        """Return the state of a process there, or of its spawners (0); None if the agent is lost."""
        try:
            received = await self.client.ask(lambda request: wire.StateOf(request, pid, record))
        except (SpawnerLostError, OSError, LimitExceeded):
            return None
        known = received.record
        if not isinstance(known, wire.StateKnown):
            return None
        actors = tuple[ActorRow, ...]()
        with suppress(ProtocolError):  # an observation ends no run
            actors = observed.decode_actors(known.actors) if known.actors else ()
        return ProcessState(known.state, known.cpu_seconds, known.memory_bytes, actors)

    async def machine(self) -> HostRow | None:
        """See `ServedHost.machine`: its agent answers."""
        try:
            received = await self.client.ask(wire.MachineOf)
        except (SpawnerLostError, OSError, LimitExceeded):
            return None
        known = received.record
        with suppress(ProtocolError):  # an observation ends no run
            return observed.decode_host(known.row) if isinstance(known, wire.MachineKnown) else None
        return None

    async def connect(self, target: ProcId) -> Link:
        try:
            received = await self.client.ask(lambda request: wire.Connect(request, target))
        except (SpawnerLostError, OSError, LimitExceeded) as error:
            raise SpawnError(f"cannot connect to process {target:x} on {self.name}: {error}") from None
        record = received.record
        if not isinstance(record, wire.Connected):
            close_all(received.fds)
            text = record.text if isinstance(record, wire.ConnectFailed) else f"got {type(record).__name__}"
            raise SpawnError(f"cannot connect to process {target:x} on {self.name}: {text}")
        if len(received.fds) != 1:
            raise NoLinkError("this process has no descriptor left for a link (see ulimit -n)")
        sock = stream_of(received.fds[0], is_far=True)
        try:
            link = self._transport.open_link(
                sock, local=False, lease=False, peer=target, lease_seconds=limits.FAR_LINK_LEASE_SECONDS
            )
        except (OSError, LimitExceeded) as error:
            sock.close()
            raise NoLinkError(f"cannot open a link to process {target:x} on {self.name}: {error}") from error
        link.caster = self._casts.caster
        return link

    async def exit_of(self, target: ProcId) -> ExitReport:
        report = self._siblings.exits.get(target)
        if report is None:
            try:
                received = await self.client.ask(lambda request: wire.ExitOf(request, target))
            except (SpawnerLostError, OSError, LimitExceeded):
                return ExitReport.unknown(target)
            report = received.record.exit if isinstance(received.record, wire.ExitKnown) else None
        return report or ExitReport.unknown(target)

    def retire(self) -> None:
        """Do nothing: the agent stays for as long as the job."""

    async def flush_output(self) -> None:
        """Wait until the output of its processes is shown; see `Host.flush_output`."""
        with trio.move_on_after(limits.OUTPUT_FLUSH_SECONDS), suppress(SpawnerLostError):
            await self.client.ask(wire.Flush)
        self._siblings.printer.write_counts(at_once=True)

    async def _show_counts(self) -> None:
        """Print due counts of equal output lines, of all hosts, until none are left."""
        is_more = True
        try:
            while is_more:
                await trio.sleep(limits.OUTPUT_SAME_SECONDS)
                is_more = self._siblings.printer.write_counts()
        finally:
            self._siblings.printer.write_counts(at_once=is_more)

    # ---- records of the agent --------------------------------------------------------------------------------

    def _noticed(self, received: Received) -> None:
        match received.record:
            case AgentReady(host=host):
                self.name = self.name or host
                self._ready.set()
            case wire.Exited(exit=report):
                self._siblings.exits.add(report)
                proc_id = ProcId(report.proc_id)
                hook = self._hooks.pop(proc_id, None)
                if hook is not None:
                    hook(report)
                elif proc_id in self._launching:
                    self._launching[proc_id] = report
            case wire.Output(chunks=chunks):
                if self._siblings.printer.write(chunks, is_far=True) and self._tasks is not None:
                    self._tasks.start_soon(self._show_counts)
                self.client.post(wire.OutputTaken())
            case wire.Incoming(source=source) if len(received.fds) == 1:
                self._accept(ProcId(source), stream_of(received.fds[0], is_far=True))
            case wire.ForeignConnect() | wire.ForeignExitOf() as question if self._tasks is not None:
                self._tasks.start_soon(self._siblings.answer, self.client, question)
            case Listening() | Tunnel() | Relayed() | Parted():
                self._agents.take(self, received)
            case _:
                close_all(received.fds)

    # ---- the end ---------------------------------------------------------------------------------------------

    def lose(self, reason: str, text: str) -> None:
        """Record that the host is lost; the first reason counts.

        Args:
            reason: See `HostLost.reason`.
            text: Reason as a sentence.
        """
        if self.loss is not None:
            return
        self.loss = HostLoss(self.name, reason, text, self.point)
        if self._proc.family is not None:
            self._proc.family.lost_hosts[self.name] = text
        self._agents.part(self)
        self._pipe.lose(text)
        self._ready.set()
        hooks, self._hooks = self._hooks, {}
        self.is_loss_taken = bool(hooks)
        for proc_id, hook in hooks.items():
            # For other processes that request its exit report.
            self._siblings.exits.add(ExitReport.unknown(proc_id, lost_host=self.loss.record))
            hook(ExitReport.unknown(proc_id))
        self.on_lost(self.loss)

    def _lost(self) -> None:
        self.on_agent_failed(str(self.client.lost))

    @trio.lowlevel.enable_ki_protection
    async def serve(self, nursery: trio.Nursery) -> None:
        """Serve the connection until it ends, or `client.stop` is called."""
        self._tasks = nursery
        nursery.start_soon(self._casts.run)
        await self.client.run()

    def _open_casts(self, sock: socket.socket) -> None:
        self._pipe.put(wire.CastChannel(), (sock.detach(),))

    async def wait_ready(self) -> None:
        """Wait until processes can be started there.

        Raises:
            SpawnError: The host was lost before.
        """
        await self._ready.wait()
        if self.loss is not None:
            raise SpawnError(f"the host {self.name} was lost before it was ready: {self.loss.text}")


async def _call_later(function: Callable[[], None]) -> None:
    await trio.lowlevel.checkpoint()
    function()


@asynccontextmanager
async def open_remote_host(
    proc: Proc, pipe: SessionPipe, name: str, point: Point, agents: AgentTable
) -> AsyncGenerator[RemoteHost, None]:
    """Serve a host while the body runs; then stop its agent, which ends everything there.

    Args:
        proc: The controller.
        pipe: Session with the agent.
        point: Coordinates among the hosts of its job.
        agents: Agents that this one may connect to; it is among them while the body runs.
    """
    family, transport = proc.family, proc.transport
    assert isinstance(transport, NativeTransport)
    assert family is not None
    assert family.siblings is not None
    siblings = family.siblings
    host = RemoteHost(proc, transport, siblings, pipe, name, point, agents)
    siblings.add_far(host.client, host.place)
    agents.add(host)
    family.remotes.append(host)
    family.lost_hosts.pop(name, None)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.serve, nursery)
            try:
                yield host
            finally:
                siblings.stopping(host.client)
                host.client.post(wire.Stop())
                host.client.stop()
                nursery.cancel_scope.cancel()
    finally:
        agents.part(host)
        family.remotes.remove(host)
        siblings.remove(host.client)


# ---- session pipe ----------------------------------------------------------------------------------------------------

# Records between a controller and an agent, or two agents, over a session between hosts, as over a broker socket.
#
# A record without a socket goes on channel 0, behind its length. A record with a socket becomes the purpose of a new
# channel, which carries the bytes of the socket, so records without sockets may overtake it.

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16


class SessionPipe:
    """One end; see `RecordPipe`."""

    session: Session

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)  # noqa: FBT003
        self._control = control
        self._out = bytearray()
        self._in = bytearray()
        self._channels = deque[Received]()
        self._lost: str | None = None
        self.is_ended_in_order = False
        self._is_broken = False
        self._has_channel = trio.Event()

    @staticmethod
    def pair() -> tuple[SessionPipe, socket.socket]:
        """Return a pipe, and the socket of channel 0 for its session."""
        ours, theirs = socket.socketpair()
        return SessionPipe(ours), theirs

    # ---- out -------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """1 while records wait for room, else 0."""
        return int(bool(self._out))

    def put(self, record: wire.AnyRecord, fds: Sequence[int] = ()) -> None:
        """Send a record, or queue it. Owns `fds`, at most one, a stream socket.

        Raises:
            LimitExceeded: It is too large, or there are too many channels.
        """
        if self._lost is not None:
            close_all(fds)
            return
        data = wire.encode(record)
        if fds:
            sock = socket.socket(fileno=fds[0])
            close_all(fds[1:])
            try:
                self.session.open_channel(sock, data)
            except LimitExceeded:
                sock.close()
                raise
        elif len(data) > limits.BROKER_RECORD_BYTES_MAX:
            raise LimitExceeded("BROKER_RECORD_BYTES_MAX", len(data))
        else:
            self._out += _LENGTH.pack(len(data)) + data

    def flush(self) -> bool:
        """Send queued records while there is room; return whether the queue is empty."""
        try:
            while self._out:
                del self._out[: self._control.send(self._out)]
        except (BlockingIOError, InterruptedError):
            return False
        return True

    async def wait_writable(self) -> None:
        """Wait until there may be room."""
        await trio.lowlevel.wait_writable(self._control)

    # ---- in --------------------------------------------------------------------------------------------------

    def opened(self, channel: int, purpose: bytes) -> None:
        """Accept a channel that the peer has opened; called by the receiver of the session's events."""
        try:
            record = wire.decode(purpose)
        except ProtocolError as error:
            self.session.refuse_channel(channel)
            self.lose(str(error))
            return
        if isinstance(record, wire.Detached):
            self.session.refuse_channel(channel)
            self.lose("a record between hosts must be whole, got Detached")
            return
        try:
            ours, theirs = socket.socketpair()
        except OSError:  # out of descriptors: `truncated` reports that one is missing
            self.session.refuse_channel(channel)
            self._channels.append(Received(record, (), truncated=True))
        else:
            self.session.accept_channel(channel, theirs)
            self._channels.append(Received(record, (ours.detach(),), truncated=False))
        self._has_channel.set()

    def lose(self, reason: str, *, is_orderly: bool = False) -> None:
        """Record that the session is over, and whether the peer has ended it in good order; the first reason counts."""
        if self._lost is None:
            self._lost = reason
            self.is_ended_in_order = is_orderly
            self._has_channel.set()

    def receive(self) -> Received | None:
        """Return the next record, None when there is none yet.

        Raises:
            OSError: The session is over; the text states the reason.
            ProtocolError: The bytes are not a record.
        """
        if self._channels:
            return self._channels.popleft()
        record = self._next_record()
        if record is not None:
            return Received(record, (), truncated=False)
        if self._lost is not None:
            raise ConnectionResetError(self._lost)
        return None

    def _next_record(self) -> wire.AnyRecord | None:
        while True:
            if len(self._in) >= _LENGTH.size:
                length = _LENGTH.unpack_from(self._in)[0]
                if length > (most := limits.BROKER_RECORD_BYTES_MAX):
                    raise ProtocolError(f"a record must have at most {most} bytes, got {length}")
                if len(self._in) >= _LENGTH.size + length:
                    data = bytes(self._in[_LENGTH.size : _LENGTH.size + length])
                    del self._in[: _LENGTH.size + length]
                    record = wire.decode(data)
                    if isinstance(record, wire.Detached):
                        raise ProtocolError("a record between hosts must be whole, got Detached")
                    return record
            if self._is_broken:
                return None
            try:
                more = self._control.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError:
                more = b""
            if not more:
                self._is_broken = True  # the session is over; the reason arrives by `lose`
                return None
            self._in += more

    async def wait_readable(self) -> None:
        """Wait until there is something to receive, or the end."""
        if self._channels or self._lost is not None:
            await trio.lowlevel.checkpoint()
            return
        self._has_channel = trio.Event()
        if self._is_broken:
            await self._has_channel.wait()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_channel, nursery.cancel_scope)
            await trio.lowlevel.wait_readable(self._control)
            nursery.cancel_scope.cancel()

    async def _wait_for_channel(self, scope: trio.CancelScope) -> None:
        await self._has_channel.wait()
        scope.cancel()

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the pipe, and received sockets that were not taken."""
        self.lose("it was closed")
        for received in self._channels:
            close_all(received.fds)
        self._channels.clear()
        self._control.close()

    def fileno(self) -> int:
        """Return the descriptor of channel 0, -1 once closed."""
        return self._control.fileno()


# ---- agent table -----------------------------------------------------------------------------------------------------

# Agents of one authority, in the controller, which relays records of two agents until they are connected.

_log = logging.getLogger("trimesh")


class AgentTable:
    """Agents that may connect to each other, certified by one authority.

    Attributes:
        relayed: Pairs of names of hosts whose messages go, or have gone, through this process, with the reason.
    """

    def __init__(self) -> None:
        self.relayed: dict[tuple[str, str], str] = {}
        self._hosts: dict[int, RemoteHost] = {}

    def add(self, host: RemoteHost) -> None:
        self._hosts[host.place.agent] = host

    def part(self, host: RemoteHost) -> None:
        """Make all other agents end their sessions with that of a host that is lost, or left the job. Idempotent."""
        if self._hosts.pop(host.place.agent, None) is not None:
            for other in self._hosts.values():
                other.client.post(Parted(host.place.agent))

    def take(self, host: RemoteHost, received: Received) -> None:
        """Handle a record of a host's agent about another agent."""
        record, own = received.record, host.place.agent
        assert isinstance(record, Listening | Tunnel | Relayed | Parted)
        other = self._hosts.get(record.agent)
        if other is None or own not in self._hosts:
            close_all(received.fds)
            return
        match record:
            case Tunnel():
                with suppress(LimitExceeded, OSError):  # the requesting agent sees the end of its socket
                    other.client.post(Tunnel(own), received.fds)
                return
            case Listening(addresses=addresses):
                other.client.post(Listening(own, addresses))
            case Relayed(text=text):
                self._warn_relayed(host.name, other.name, text)
            case Parted():
                other.client.post(Parted(own, is_lost=False))
        close_all(received.fds)

    def _warn_relayed(self, name: str, other: str, text: str) -> None:
        if (name, other) in self.relayed:
            return
        self.relayed[name, other] = text
        _log.warning(
            "%s cannot reach %s directly, so their messages go through the host of this program: %s", name, other, text
        )


# ---- context of a process on another host: parts of its controller, parts of its own host ----------------------------

# From the controller: `env=`, `sys.argv`, warning filters, the umask, the working directory if the host has a folder of
# that name, and those entries of `sys.path` outside of its Python installation. From the host: the environment, the
# limits, the Python installation with its `sys.path`.

_THREADS: Final = b"OMP_NUM_THREADS"


def far_caller(overlay: Mapping[str, str], code: HostCode | None = None) -> wire.CallerContext:
    """Return the context of this process, the controller, for another host, without its environment.

    Args:
        overlay: Variables set over those of the host.
        code: Code brought to the host: it comes first on `sys.path`; its packages follow the entries of this program.
    """
    context = capture_caller({}, are_several=False)
    said = overlay if code is None else {**code.env, **overlay}
    env = {os.fsencode(name): os.fsencode(value) for name, value in said.items()}
    sys_path = context.sys_path if code is None else _with_code(context.sys_path, code)
    return msgspec.structs.replace(context, env=env, sys_path=sys_path, rlimits=())


def _with_code(own: tuple[bytes, ...], code: HostCode) -> tuple[bytes, ...]:
    inside = tuple(os.fsencode(prefix).rstrip(b"/") + b"/" for prefix in own_prefixes())
    installed = [path for path in own if (path + b"/").startswith(inside)]
    return (*code.paths, *(path for path in own if path not in installed), *code.packages, *installed)


def context_here(asked: wire.CallerContext, *, are_several: bool) -> wire.CallerContext:
    """Return the context of a process on this host that a controller on another host has requested.

    Args:
        asked: Context sent by the controller.
        are_several: See `capture_caller`.
    """
    own = capture_caller({}, are_several=False)
    env = {**own.env, **asked.env}
    if are_several:
        env.setdefault(_THREADS, b"1")
    return msgspec.structs.replace(
        own,
        env=env,
        cwd=asked.cwd if asked.cwd and os.path.isdir(asked.cwd) else own.cwd,
        sys_path=_sys_path(asked),
        argv=asked.argv,
        filters=asked.filters,
        umask=asked.umask,
    )


def _sys_path(asked: wire.CallerContext) -> tuple[bytes, ...]:
    own = [os.fsencode(path) for path in sys.path]
    if asked.version == sys.version_info[:2] and list(asked.prefixes) == [os.fsencode(one) for one in own_prefixes()]:
        return tuple(dict.fromkeys((*asked.sys_path, *own)))
    inside = tuple(prefix.rstrip(b"/") + b"/" for prefix in asked.prefixes)
    theirs = [path for path in asked.sys_path if not (path + b"/").startswith(inside)]
    return tuple(dict.fromkeys((*theirs, *own)))
