"""A host that an agent serves, as the controller has it: processes are started there, and linked through the session.

RH-1 What `SpawnerClient` promises of a spawner holds of an agent: each question is answered, or the host is lost.
RH-2 A lost host is one failure: each of its processes gets a report that nothing is known of its end, and its child
     says by `loss` that it was the host. Their links end, because their channels do.
RH-3 The report of a process comes after its launch has returned, whatever came first.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.hosts.agent_table import AgentTable
from trimesh._runtime.hosts.cast_sender import CastSender
from trimesh._runtime.hosts.context import far_caller
from trimesh._runtime.hosts.session_pipe import SessionPipe
from trimesh._runtime.life.job_hosts import HostCode
from trimesh._runtime.life.local_host import accept_links, spec_of
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.host import LaunchRequest, NoLinkError
from trimesh._runtime.peers.losses import HostLoss
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.client import SpawnerClient, SpawnerLostError
from trimesh._runtime.spawner.siblings import FarPlace, Siblings
from trimesh._runtime.spawner.socket import Received, close_all, stream_of
from trimesh._runtime.system.child import LaunchSpec, config_of, name_of, output_of
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.records import AgentReady, Listening, Parted, Relayed, Tunnel
from trimesh._transport.interface import Link
from trimesh._transport.native.transport import NativeTransport
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import LimitExceeded, SpawnError
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
        """How its host was lost; None while it is not."""
        return self._host.loss

    @property
    def lease(self) -> str:
        """Name of the limit of its silence."""
        return "FAR_LINK_LEASE_SECONDS"

    @property
    def report_seconds(self) -> float:
        return limits.FAR_EXIT_REPORT_SECONDS

    async def spawner_state(self) -> str | None:
        """See `HostChild.spawner_state`: its agent answers."""
        return await self._host.state_of(0)

    async def kernel_state(self) -> str | None:
        """See `HostChild.kernel_state`: its agent answers."""
        return await self._host.state_of(self.pid)

    def signal(self, signum: int) -> None:
        """Send a signal to its process group; never blocks."""
        self._host.signal(self.proc_id, signum)


class RemoteHost:
    """A host behind a session; see `Host`. Made by `open_remote_host`.

    Attributes:
        point: Its place among the hosts of its job.
        place: Its agent, and with which others that may talk.
        loss: How it was lost; None while it is not.
        is_loss_taken: Whether processes ran there, so that their meshes have the loss.
        on_lost: Called once, when it is lost, after those have been told.
        code: Of the program, in a folder there; what is started from now on has it.
        client: The connection to its agent.
        on_agent_failed: Called with the words of its agent when that ends, by whoever decides why the host is lost.
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
            failure = f"it did not enter within {limits.SPAWN_SECONDS} s"
            try:
                with trio.move_on_after(limits.SPAWN_SECONDS):
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
                sock, local=False, lease=True, peer=proc_id, lease_seconds=limits.FAR_LINK_LEASE_SECONDS
            )
        except (OSError, LimitExceeded) as error:
            sock.close()
            self.signal(proc_id, signal.SIGKILL)
            raise SpawnError(f"{request.mesh}: no link to the new process on {self.name}: {error}") from error
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
        """Signal the group of a process; never blocks. Nothing if the host is lost."""
        self.client.post(wire.Signal(proc_id, signum))

    async def state_of(self, pid: int) -> str | None:
        """Return the state of a process there, or of its spawners (0); None where the agent is lost."""
        try:
            received = await self.client.ask(lambda request: wire.StateOf(request, pid))
        except (SpawnerLostError, OSError, LimitExceeded):
            return None
        return received.record.state if isinstance(received.record, wire.StateKnown) else None

    async def connect(self, target: ProcId) -> Link:
        try:
            received = await self.client.ask(lambda request: wire.Connect(request, target))
        except (SpawnerLostError, OSError, LimitExceeded) as error:
            raise SpawnError(f"cannot connect to process {target} on {self.name}: {error}") from None
        record = received.record
        if not isinstance(record, wire.Connected):
            close_all(received.fds)
            text = record.text if isinstance(record, wire.ConnectFailed) else "its agent answers something else"
            raise SpawnError(f"cannot connect to process {target} on {self.name}: {text}")
        if len(received.fds) != 1:
            raise NoLinkError("this process has no descriptor left for a link (see ulimit -n)")
        sock = stream_of(received.fds[0], is_far=True)
        try:
            link = self._transport.open_link(
                sock, local=False, lease=False, peer=target, lease_seconds=limits.FAR_LINK_LEASE_SECONDS
            )
        except (OSError, LimitExceeded) as error:
            sock.close()
            raise NoLinkError(f"no link to process {target} on {self.name} could be made: {error}") from error
        link.caster = self._casts.caster
        return link

    async def exit_of(self, target: ProcId) -> ExitReport:
        record = self._siblings.exits.get(target)
        if record is None:
            try:
                received = await self.client.ask(lambda request: wire.ExitOf(request, target))
            except (SpawnerLostError, OSError, LimitExceeded):
                return ExitReport.unknown(target)
            record = received.record.exit if isinstance(received.record, wire.ExitKnown) else None
        return ExitReport.unknown(target) if record is None else ExitReport.of(record)

    def retire(self) -> None:
        """Nothing: the agent stays for as long as the job."""

    async def flush_output(self) -> None:
        """Wait until what its processes have written is shown; see `Host.flush_output`."""
        with trio.move_on_after(limits.OUTPUT_FLUSH_SECONDS), suppress(SpawnerLostError):
            await self.client.ask(wire.Flush)
        self._siblings.printer.write_counts(at_once=True)

    async def _show_counts(self) -> None:
        """Show, when their second is over, how many lines were the same; for all hosts, and until there are none."""
        is_more = True
        try:
            while is_more:
                await trio.sleep(limits.OUTPUT_SAME_SECONDS)
                is_more = self._siblings.printer.write_counts()
        finally:
            self._siblings.printer.write_counts(at_once=is_more)

    # ---- what the agent tells --------------------------------------------------------------------------------

    def _noticed(self, received: Received) -> None:
        match received.record:
            case AgentReady(host=host):
                self.name = self.name or host
                self._ready.set()
            case wire.Exited(exit=record, is_shown=is_shown):
                self._siblings.exits.add(record)
                report = ExitReport.of(record, is_shown=is_shown)
                hook = self._hooks.pop(report.proc_id, None)
                if hook is not None:
                    hook(report)
                elif report.proc_id in self._launching:
                    self._launching[report.proc_id] = report
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
        """Learn that the host is lost; the first reason counts.

        Args:
            reason: See `HostLost.reason`.
            text: The same in words.
        """
        if self.loss is not None:
            return
        self.loss = HostLoss(self.name, reason, text, self.point)
        self._agents.part(self)
        self._pipe.lose(text)
        self._ready.set()
        hooks, self._hooks = self._hooks, {}
        self.is_loss_taken = bool(hooks)
        for proc_id, hook in hooks.items():
            report = ExitReport.unknown(proc_id, lost_host=self.loss.record)
            if (record := report.record()) is not None:
                self._siblings.exits.add(record)  # for all processes that ask how it has ended
            hook(ExitReport.unknown(proc_id))
        self.on_lost(self.loss)

    def _lost(self) -> None:
        self.on_agent_failed(str(self.client.lost))

    @trio.lowlevel.enable_ki_protection
    async def serve(self, nursery: trio.Nursery) -> None:
        """Serve the connection until it ends, or `stop`."""
        self._tasks = nursery
        nursery.start_soon(self._casts.run)
        await self.client.run()

    def _open_casts(self, sock: socket.socket) -> None:
        self._pipe.put(wire.CastChannel(), (sock.detach(),))

    async def wait_ready(self) -> None:
        """Wait until processes can be started there.

        Raises:
            SpawnError: It was lost first.
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
    """Serve a host while the body runs; then tell its agent to stop, which ends everything there.

    Args:
        proc: The controller.
        pipe: To the agent.
        point: Its place among the hosts of its job.
        agents: With which its agent may talk; it is among them while the body runs.
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
