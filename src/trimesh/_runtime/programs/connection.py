r"""The connecting program: links to processes of another program, and the end of the connection.

    JOINED --Leaving, or the end of the block--> LEAVING --calls have ended--> closed: `MeshStopped`
       \-----------the socket has ended------------------------------------->  lost: `ConnectionLost`

PC-1 Before the other program is known to fit, only records of a fixed shape are read; nothing is ever unpickled here.
PC-2 When the connection ends, each known process of the other program is declared gone, with the reason, before any
     question that waits for an answer fails.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Iterable, Mapping

import attrs
import trio

from trimesh import limits
from trimesh._runtime.calls.membership import family_of, membership_of
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.current import find_proc
from trimesh._runtime.life.local_host import is_near
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import ProcDeath, stopped
from trimesh._runtime.peers.host import NoLinkError
from trimesh._runtime.programs.publication import check_fit, controllers_transport, dial, side_of
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.client import SpawnerClient, SpawnerLostError
from trimesh._runtime.spawner.socket import BrokerSocket, Received, close_all, stream_of
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.values.endpoint_spec import MemberInfo, MeshInfo
from trimesh._transport.interface import Link
from trimesh._transport.native.transport import NativeTransport
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ConnectError, ConnectionLost, LimitExceeded, ProtocolError, ShapeError, SpawnError
from trimesh.ids import MeshId, ProcId
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region

_open: ForgottenInChildren[ProgramConnection] = ForgottenInChildren()


class ProgramConnection:
    """Another program that this one has connected to.

    Attributes:
        is_stopping: Whether new calls are refused.
        family: Its controller.
    """

    def __init__(
        self,
        proc: Proc,
        transport: NativeTransport,
        broker: BrokerSocket,
        other: wire.Side,
        name: str,
        handle: wire.PublishedHandle,
    ) -> None:
        self.is_stopping = False
        self.handle = handle
        self.family = ProcId(other.proc_id)
        self._proc = proc
        self._transport = transport
        self._broker = broker
        self._whom = f"{name!r} of {other.program} (pid {other.pid})"
        self._known = {ProcId(other.proc_id), ProcId(handle.owner)} | {ProcId(one.proc_id) for one in handle.members}
        self._death: ProcDeath | None = None
        self._leaving: str | None = None
        self._is_told_to_leave = trio.Event()
        self.client = SpawnerClient(broker, on_notice=self._noticed, on_lost=self._lost, whom=self._whom)
        _open.add(self)

    # ---- as a neighbour --------------------------------------------------------------------------------------

    def knows(self, proc_id: ProcId) -> bool:
        return proc_id in self._known

    async def connect(self, target: ProcId) -> Link:
        try:
            received = await self.client.ask(lambda request: wire.Connect(request, target))
        except (SpawnerLostError, OSError, LimitExceeded) as error:
            raise SpawnError(str(error)) from None
        record = received.record
        if not isinstance(record, wire.Connected):
            close_all(received.fds)
            text = record.text if isinstance(record, wire.ConnectFailed) else f"got {type(record).__name__}"
            raise SpawnError(f"cannot connect to process {target} of {self._whom}: {text}")
        if len(received.fds) != 1:
            close_all(received.fds)
            raise NoLinkError("this process has no descriptor left for a link: raise `ulimit -n`")
        sock = stream_of(received.fds[0], is_far=record.is_far)
        self._known.add(target)
        try:
            return self._transport.open_link(sock, local=is_near(sock), lease=False, peer=target)
        except (OSError, LimitExceeded) as error:
            sock.close()
            raise NoLinkError(f"cannot open a link to process {target} of {self._whom}: {error}") from error

    async def exit_of(self, target: ProcId) -> ExitReport:
        """Request the exit report of a process of that program; see `Host.exit_of`."""
        try:
            received = await self.client.ask(lambda request: wire.ExitOf(request, target))
        except (SpawnerLostError, OSError, LimitExceeded):
            return ExitReport.unknown(target)
        close_all(received.fds)
        record = received.record
        if isinstance(record, wire.ExitKnown) and record.exit is not None:
            return record.exit
        return ExitReport.unknown(target)

    # ---- the end ---------------------------------------------------------------------------------------------

    def _noticed(self, received: Received) -> None:
        close_all(received.fds)
        record = received.record
        if isinstance(record, wire.Leaving) and self._leaving is None:
            self.is_stopping = True
            self._leaving = record.text
            if record.at_once:
                self.close()
            else:
                self._is_told_to_leave.set()

    def _lost(self) -> None:
        if self._leaving is None:
            self._settle(ProcDeath(f"the connection was lost: {self.client.lost}", ConnectionLost))
        else:
            self._settle(stopped(self._leaving))

    def close(self) -> None:
        """End the connection at once; calls under way fail. Idempotent."""
        self.is_stopping = True
        self._settle(stopped(self._leaving or f"the block that was connected to {self._whom} has been left"))
        self.client.stop()
        self._broker.close()
        _open.discard(self)

    def forget(self) -> None:
        """In a forked child: close our copy."""
        self.client.forget()

    def _settle(self, death: ProcDeath) -> None:
        if self._death is None:
            self._death = death
            for proc_id in sorted(self._known):
                self._proc.declare_gone(self._proc.peer(proc_id), death)

    @trio.lowlevel.enable_ki_protection
    async def serve(self) -> None:
        """Receive until the connection ends; leave when the other program requests it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._leave_when_told)
            await self.client.run()
            nursery.cancel_scope.cancel()

    async def _leave_when_told(self) -> None:
        await self._is_told_to_leave.wait()
        await self.drain()
        self.close()

    async def drain(self) -> None:
        """Wait until no call to that program is under way."""
        self.is_stopping = True
        while self._death is None and any(self._calls()):  # noqa: ASYNC110 - the end of a call sets no event for it
            await trio.sleep(limits.LEAVING_POLL_SECONDS)

    def _calls(self) -> Iterable[object]:
        for proc_id in self._known:
            peer = self._proc.find_peer(proc_id)
            yield peer is not None and peer.calls


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_connection(name: str) -> AsyncGenerator[ProgramConnection, None]:
    """Connect to the program of this user that publishes a name.

    Raises:
        ConnectError: There is no such program, or it does not fit, or does not answer.
        RuntimeError: This process is not a controller.

    Blocking: entering for at most `limits.JOIN_SECONDS`. Leaving waits for calls of other tasks that are under way,
        within the enclosing scope; it does not wait after an exception or a cancel.
    """
    running = find_proc()
    if running is not None and running.family is not None:
        controllers_transport(running, running.family, "connected to")
    broker = BrokerSocket(await _dialled(name))
    try:
        other = await _greeting(broker, name)
        # A new controller does without pickle if either program wants that.
        is_pickled = None if running is not None else other.pickle == "on" == reread().pickle
        async with lease_proc(is_pickled) as (proc, family):
            transport = controllers_transport(proc, family, "connected to")
            ours = side_of(pickled=proc.values.is_pickled, proc_id=proc.proc_id)
            check_fit(ours, other)
            if other.proc_id == proc.proc_id:
                raise ConnectError(f"{name!r} is published by this program itself: use the handle that it publishes")
            if ProcId(other.proc_id) in family.neighbours or proc.death_of(ProcId(other.proc_id)) is not None:
                raise ConnectError(
                    "a program can connect to another one once while its outermost block is open; this one is, or was, "
                    f"connected to {other.program} (pid {other.pid}), which publishes {name!r}: keep that connection, "
                    "publish one actor that returns handles on the others, or leave all blocks first"
                )
            handle = await _joined(broker, ours, name)
            connection = ProgramConnection(proc, transport, broker, other, name, handle)
            family.neighbours[ProcId(other.proc_id)] = connection
            proc.nursery.start_soon(connection.serve)
            try:
                yield connection
                await connection.drain()
            finally:
                connection.close()
                del family.neighbours[ProcId(other.proc_id)]
    finally:
        broker.close()


async def _dialled(name: str) -> socket.socket:
    with trio.move_on_after(limits.JOIN_SECONDS):
        while True:
            sock = dial(name)
            if sock is not None:
                await trio.lowlevel.checkpoint()
                return sock
            await trio.sleep(limits.JOIN_RETRY_SECONDS)
    raise ConnectError(f"the program that publishes {name!r} has accepted no connection for {limits.JOIN_SECONDS:g} s")


async def _greeting(broker: BrokerSocket, name: str) -> wire.Side:
    record = await _next(broker, name)
    if isinstance(record, wire.Greeting):
        return record.side
    raise ConnectError(f"the program that publishes {name!r} {_unexpected(record)}")


async def _joined(broker: BrokerSocket, ours: wire.Side, name: str) -> wire.PublishedHandle:
    try:
        broker.send(wire.Join(ours))
    except OSError as error:
        raise ConnectError(f"the program that publishes {name!r} has ended: {error}") from None
    record = await _next(broker, name)
    if isinstance(record, wire.Joined):
        return record.handle
    raise ConnectError(f"the program that publishes {name!r} {_unexpected(record)}")


def _unexpected(record: wire.AnyRecord) -> str:
    if isinstance(record, wire.Declined | wire.Leaving):
        return f"has declined: {record.text}"
    return f"speaks another protocol, got {type(record).__name__}"


async def _next(broker: BrokerSocket, name: str) -> wire.AnyRecord:
    try:
        with trio.fail_after(limits.JOIN_SECONDS):
            while True:
                received = broker.receive()
                if received is not None:
                    close_all(received.fds)
                    return received.record
                await trio.lowlevel.wait_readable(broker.socket)
    except trio.TooSlowError:
        raise ConnectError(
            f"the program that publishes {name!r} has not answered for {limits.JOIN_SECONDS:g} s: it may be stopped"
        ) from None
    except (EOFError, OSError) as error:
        raise ConnectError(f"the program that publishes {name!r} has ended, or closed the connection") from error
    except ProtocolError as error:
        raise ConnectError(f"the program that publishes {name!r} is of another version of trimesh: {error}") from error


# ---- handles as records: numbers and names, no class and no pickle ---------------------------------------------------


def handle_record(proc: Proc, info: MeshInfo, region: Region, endpoints: Mapping[str, bool]) -> wire.PublishedHandle:
    """Return the record of a handle.

    Raises:
        RuntimeError: The mesh belongs to another program.
    """
    if info.family != family_of(proc):
        raise RuntimeError(
            f"a program can publish only its own meshes, got {info.name!r} of another program: publish it there"
        )
    now = membership_of(proc, info).info
    missing = region.missing()
    return wire.PublishedHandle(
        mesh=info.mesh,
        owner=info.owner,
        name=info.name,
        actor=info.actor or "",
        is_healing=info.is_healing,
        base=tuple(region.base.items()),
        extent=tuple(region.extent.items()),
        table=tuple(attrs.evolve(region, excluded=frozenset[int]()).ranks()),
        excluded=tuple(missing),
        members=tuple(wire.PublishedMember(one.proc_id, one.host, one.pid, one.incarnation) for one in now.members),
        endpoints=dict(endpoints),
    )


def handle_of(connection: ProgramConnection) -> tuple[MeshInfo, Region]:
    """Return the handle that another program publishes.

    Raises:
        ConnectError: The record is not a valid handle.
    """
    handle = connection.handle
    mesh, table, shown = MeshId(handle.mesh), handle.table, set(handle.table)
    try:
        base, extent = Extent(dict(handle.base)), Extent(dict(handle.extent))
        fits = len(shown) == len(table) == extent.nelements and len(handle.members) == base.nelements
        if not (fits and shown <= set(range(base.nelements)) and shown >= set(handle.excluded)):
            raise ConnectError("the other program publishes an invalid handle: its members do not fit its extent")
        region = Region(base, mesh=mesh, extent=extent, table=table, excluded=frozenset(handle.excluded))
        whole = Region(base, mesh=mesh)
    except ShapeError as error:
        raise ConnectError(f"the other program publishes an invalid handle: {error}") from error
    members = tuple(MemberInfo(ProcId(one.proc_id), one.host, one.pid, one.incarnation) for one in handle.members)
    info = MeshInfo(
        mesh, handle.name, handle.actor, whole, members, ProcId(handle.owner), handle.is_healing, connection.family
    )
    return info, region
