"""The side of the program that publishes: it listens at a name and brokers links for those who connect.

    client -> publisher   Join, after what it was told fits; Connect, ExitOf
    publisher -> client   Greeting at once; Joined or Declined; Connected, ConnectFailed, ExitKnown; Leaving

PB-1 Nothing of a client is read before the kernel has said that it is of this user, and nothing of it is ever unpickled
     here: links carry values, and this socket none.
PB-2 When the block is left no client has a link to any process of this family.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Callable

import trio

from trimesh import limits
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.family import Family
from trimesh._runtime.life.local_host import LocalHost, accept_links, is_near
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import stopped
from trimesh._runtime.peers.peer import Parcel
from trimesh._runtime.programs.names import TakenName, check_fit, side_of, take_name
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.socket import BrokerSocket
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.user_files import credentials_of
from trimesh._transport.native.transport import NativeTransport
from trimesh._wire import messages
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ConnectError, LinkLost, MeshError, ProtocolError
from trimesh.ids import ProcId

_open: ForgottenInChildren[PublishedName] = ForgottenInChildren()


class _Client:
    """One program that is connected, or about to be."""

    def __init__(self, sock: socket.socket) -> None:
        self.broker = BrokerSocket(sock)
        self.proc_id: ProcId | None = None
        self.targets = set[ProcId]()
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self._has_queued = trio.Event()

    def send(self, record: wire.AnyRecord, fds: tuple[int, ...] = ()) -> None:
        """Send, or queue; who does not read is cut off."""
        try:
            self.broker.send(record, fds)
        except OSError:
            self.scope.cancel(reason="the client has ended")
        if self.broker.queued > limits.PROGRAM_ANSWERS_MAX:
            self.scope.cancel(reason="the client does not read what it has asked for")
        elif self.broker.queued:
            self._has_queued.set()

    async def write(self) -> None:
        """Send what is queued, until cancelled."""
        while True:
            await self._has_queued.wait()
            self._has_queued = trio.Event()
            while self.broker.queued:
                await trio.lowlevel.wait_writable(self.broker.socket)
                try:
                    self.broker.flush()
                except OSError:
                    self.scope.cancel(reason="the client has ended")
                    return

    async def receive(self) -> wire.AnyRecord:
        """Return the next record.

        Raises:
            EOFError, OSError, ProtocolError: There is none.
        """
        while True:
            received = self.broker.receive()
            if received is not None:
                for fd in received.fds:  # no request carries one
                    os.close(fd)
                return received.record
            await trio.lowlevel.wait_readable(self.broker.socket)


class PublishedName:
    """A name that this program listens at, and the programs that have connected."""

    def __init__(
        self, proc: Proc, family: Family, transport: NativeTransport, taken: TakenName, handle: wire.PublishedHandle
    ) -> None:
        self._proc = proc
        self._family = family
        self._taken = taken
        self._handle = handle
        self._clients = dict[_Client, None]()
        self._accept = accept_links(proc, transport)
        self._scope = trio.CancelScope(shield=True)
        _open.add(self)

    def forget(self) -> None:
        """In a forked child: close our copies."""
        self._taken.forget()
        for client in self._clients:
            client.broker.close()

    @trio.lowlevel.enable_ki_protection
    async def listen(self) -> None:
        """Take in clients until the publication ends."""
        listener = self._taken.listener
        with self._scope:
            while listener.fileno() != -1:  # it may have been closed before this task runs first
                await trio.lowlevel.wait_readable(listener)
                try:
                    sock, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError:  # no descriptor is left: those that wait are taken in when there is one
                    await trio.sleep(limits.PROGRAM_ACCEPT_PAUSE_SECONDS)
                    continue
                client = _Client(sock)
                self._clients[client] = None
                self._proc.nursery.start_soon(self._keep, client)

    # ---- one client ------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def _keep(self, client: _Client) -> None:
        try:
            with client.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.write)
                    await self._serve(client, nursery)
                    nursery.cancel_scope.cancel()
        finally:
            self._clients.pop(client, None)
            if client.proc_id is not None:
                self._family.clients.discard(client.proc_id)
            client.broker.close()
            client.ended.set()

    async def _serve(self, client: _Client, nursery: trio.Nursery) -> None:
        try:
            with trio.move_on_after(limits.JOIN_SECONDS) as patience:
                await self._admit(client)
            if patience.cancelled_caught or client.proc_id is None:
                return
            while True:
                record = await client.receive()
                if isinstance(record, wire.Connect):
                    nursery.start_soon(self._connect, client, client.proc_id, record)
                elif isinstance(record, wire.ExitOf):
                    nursery.start_soon(self._tell_exit, client, record)
                else:
                    raise ProtocolError(f"a client asks for links and ends, got {type(record).__name__}")
        except (EOFError, OSError, ProtocolError):
            return

    async def _admit(self, client: _Client) -> None:
        _, user = credentials_of(client.broker.socket)
        if user != os.geteuid():
            client.send(
                wire.Declined(f"{self._taken.name!r} is for programs of user {os.geteuid()}, got one of user {user}")
            )
            return
        ours = side_of(pickled=self._proc.values.is_pickled, proc_id=self._proc.proc_id)
        if len(self._clients) > limits.PROGRAM_CLIENTS_MAX:
            client.send(wire.Declined(f"{self._taken.name!r} has limits.PROGRAM_CLIENTS_MAX clients already"))
            return
        client.send(wire.Greeting(ours))
        join = await client.receive()
        if not isinstance(join, wire.Join):
            raise ProtocolError(f"a client joins first, got {type(join).__name__}")
        try:
            check_fit(ours, join.side)
        except ConnectError as error:
            client.send(wire.Declined(str(error)))
            return
        named = ProcId(join.side.proc_id)
        if self._proc.find_peer(named) is not None or self._proc.death_of(named) is not None:
            client.send(wire.Declined("a program has a number of its own, and joins by it once"))
            return
        client.proc_id = named
        self._proc.peer(named)  # which another one cannot have from now on
        self._family.clients.add(client.proc_id)
        client.send(wire.Joined(self._handle))

    async def _connect(self, client: _Client, source: ProcId, question: wire.Connect) -> None:
        target = ProcId(question.target)
        try:
            sock = await self._broker(target, source)
        except (MeshError, OSError) as error:
            report = await self._family.exit_of(self._proc.peer(target))
            record = None if report is None else report.record()
            client.send(wire.ConnectFailed(question.request, str(error), is_gone=record is not None, exit=record))
            return
        client.targets.add(target)
        client.send(wire.Connected(question.request, not is_near(sock)), (sock.detach(),))

    async def _broker(self, target: ProcId, source: ProcId) -> socket.socket:
        """Return one end of a connection whose other end a process of this family has got.

        Raises:
            MeshError, OSError: There is no such process any more, or something is wanting.
        """
        if target == self._proc.proc_id:
            ours, theirs = socket.socketpair()
            self._accept(source, theirs)
            return ours
        lost: MeshError | None = None
        for host in self._family.open_hosts():
            if isinstance(host, LocalHost):
                try:
                    return await host.launcher.connect(target, source)
                except MeshError as error:
                    lost = error
        raise lost or LinkLost(f"process {target} is not of this program")

    async def _tell_exit(self, client: _Client, question: wire.ExitOf) -> None:
        report = await self._family.exit_of(self._proc.peer(ProcId(question.proc_id)))
        client.send(wire.ExitKnown(question.request, None if report is None else report.record()))

    # ---- the end ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Give the name back: no program can connect any more."""
        self._scope.cancel(reason="the publication ends")
        self._taken.give_back()
        _open.discard(self)

    async def end(self, *, at_once: bool, grace: float) -> None:
        """Have all clients leave, and cut off those that do not.

        Args:
            at_once: Whether they give up what they have under way.
            grace: Seconds in which they may end it.

        Blocking: shielded by the caller, for at most `grace` and `limits.LEAVING_CLIENTS_SECONDS`.
        """
        clients = list(self._clients)
        for client in clients:
            client.send(wire.Leaving(f"{self._taken.name!r} is not published any more", at_once))
        with trio.move_on_after(limits.LEAVING_CLIENTS_SECONDS + (0 if at_once else grace)):
            for client in clients:
                await client.ended.wait()
        for client in clients:
            client.scope.cancel(reason="the publication ends")
            await client.ended.wait()
            if client.proc_id is not None:
                await self._cut_off(client.proc_id, client.targets)

    async def _cut_off(self, stranger: ProcId, targets: set[ProcId]) -> None:
        """End what is left of a client's links (PB-2); those that it has closed itself are gone already."""
        text = f"{self._taken.name!r} is not published any more"
        self._proc.declare_gone(self._proc.peer(stranger), stopped(text))
        head = messages.encode(messages.Disconnect(stranger))
        peers = [self._proc.peer(target) for target in targets if target != self._proc.proc_id]
        await self._family.try_to_connect(peers)
        for peer in peers:
            peer.send(Parcel(head))


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_publication(
    name: str, describe: Callable[[Proc], wire.PublishedHandle], grace: float
) -> AsyncGenerator[None, None]:
    """Let other programs connect while a block is open.

    Args:
        describe: Makes what they get from this process.
        grace: Seconds for what they have under way when the block is left.

    Raises:
        ConnectError: The name is taken, or the folder of names cannot be used.
        RuntimeError: This is no controller.
    """
    async with lease_proc() as (proc, family):
        await trio.lowlevel.checkpoint()
        transport = controllers_transport(proc, family, "published")
        handle = describe(proc)
        publication = PublishedName(proc, family, transport, take_name(name), handle)
        proc.nursery.start_soon(publication.listen)
        at_once = True
        try:
            yield
            at_once = False
        finally:
            publication.stop()
            with trio.CancelScope(shield=at_once):
                try:
                    await publication.end(at_once=at_once, grace=grace)
                except trio.Cancelled:
                    with trio.CancelScope(shield=True):
                        await publication.end(at_once=True, grace=0)
                    raise


def controllers_transport(proc: Proc, family: Family, what: str) -> NativeTransport:
    """Return the links of this process; refuse workers and simulations.

    Raises:
        RuntimeError: This process is one.
    """
    if not isinstance(proc.transport, NativeTransport):
        raise RuntimeError(  # noqa: TRY004 - a simulation, and no argument of the wrong type
            f"handles are {what} by real programs, and this one is simulated: give actors the handle"
        )
    if family.root is not None:
        raise RuntimeError(
            f"handles are {what} by the program whose outermost block is open, not by its workers: do it there, and "
            "give workers an actor of this_proc() that calls for them"
        )
    return proc.transport
