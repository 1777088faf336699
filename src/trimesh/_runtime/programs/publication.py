"""The publishing program: listens at a name and brokers links for connecting programs.

    client -> publisher   Join, after the greeting fits; Connect, ExitOf
    publisher -> client   Greeting at once; Joined or Declined; Connected, ConnectFailed, ExitKnown; Leaving

PB-1 Nothing from a client is read before the kernel has confirmed that it belongs to this user, and nothing is ever
     unpickled here: links carry values, and this socket none.
PB-2 After the block is left no client has a link to any process of this family.

FN-1 The folder is private (`system/user_files.py`), so that no other user can intercept connections.
FN-2 Taking, clearing or judging a name requires the lock of the folder, so that a name without a listener is never
     mistaken for one that is just being taken.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._native.lib import ABI_VERSION
from trimesh._runtime.life.controller import lease_proc
from trimesh._runtime.life.family import Family
from trimesh._runtime.life.local_host import LocalHost, accept_links, is_near
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import stopped
from trimesh._runtime.peers.peer import Parcel
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.socket import BrokerSocket
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.user_files import credentials_of, entered, user_folder
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
        """Send, or queue; a client that does not read is disconnected."""
        try:
            self.broker.send(record, fds)
        except OSError:
            self.scope.cancel(reason="the client has ended")
        if self.broker.queued > limits.PROGRAM_ANSWERS_MAX:
            self.scope.cancel(reason="the client does not read the replies to its requests")
        elif self.broker.queued:
            self._has_queued.set()

    async def write(self) -> None:
        """Send queued records until cancelled."""
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
            EOFError, OSError, ProtocolError: The connection has ended, or the record is invalid.
        """
        while True:
            received = self.broker.receive()
            if received is not None:
                for fd in received.fds:  # no request carries one
                    os.close(fd)
                return received.record
            await trio.lowlevel.wait_readable(self.broker.socket)


class PublishedName:
    """A published name: its listener, and the connected programs."""

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
        """Accept clients until the publication ends."""
        listener = self._taken.listener
        with self._scope:
            while listener.fileno() != -1:  # it may have been closed before this task runs first
                await trio.lowlevel.wait_readable(listener)
                try:
                    sock, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError:  # no descriptor is left: waiting clients are accepted when there is one
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
                    raise ProtocolError(f"a client may request links and exit reports, got {type(record).__name__}")
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
            raise ProtocolError(f"a client must join first, got {type(join).__name__}")
        try:
            check_fit(ours, join.side)
        except ConnectError as error:
            client.send(wire.Declined(str(error)))
            return
        named = ProcId(join.side.proc_id)
        if self._proc.find_peer(named) is not None or self._proc.death_of(named) is not None:
            client.send(wire.Declined(f"a program joins once, under an id of its own, got {named:x} again"))
            return
        client.proc_id = named
        self._proc.peer(named)  # no other program can have it from now on
        self._family.clients.add(client.proc_id)
        client.send(wire.Joined(self._handle))

    async def _connect(self, client: _Client, source: ProcId, question: wire.Connect) -> None:
        target = ProcId(question.target)
        try:
            sock = await self._broker(target, source)
        except (MeshError, OSError) as error:
            report = await self._family.exit_of(self._proc.peer(target))
            known = report if report is not None and report.is_known else None
            client.send(wire.ConnectFailed(question.request, str(error), is_gone=known is not None, exit=known))
            return
        client.targets.add(target)
        client.send(wire.Connected(question.request, not is_near(sock)), (sock.detach(),))

    async def _broker(self, target: ProcId, source: ProcId) -> socket.socket:
        """Return one end of a new connection, after handing the other end to a process of this family.

        Raises:
            MeshError, OSError: The process is gone, or a resource is lacking.
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
        raise lost or LinkLost(f"process {target} does not belong to this program")

    async def _tell_exit(self, client: _Client, question: wire.ExitOf) -> None:
        report = await self._family.exit_of(self._proc.peer(ProcId(question.proc_id)))
        known = report if report is not None and report.is_known else None
        client.send(wire.ExitKnown(question.request, known))

    # ---- the end ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Release the name: no program can connect any more."""
        self._scope.cancel(reason="the publication ends")
        self._taken.give_back()
        _open.discard(self)

    async def end(self, *, at_once: bool, grace: float) -> None:
        """Request all clients to leave, and disconnect those that do not.

        Args:
            at_once: Whether they give up their calls under way.
            grace: Time limit in seconds for finishing those calls.

        Blocking: shielded by the caller, for at most `grace` and `limits.LEAVING_CLIENTS_SECONDS`.
        """
        clients = list(self._clients)
        for client in clients:
            client.send(wire.Leaving(f"{self._taken.name!r} is no longer published", at_once))
        with trio.move_on_after(limits.LEAVING_CLIENTS_SECONDS + (0 if at_once else grace)):
            for client in clients:
                await client.ended.wait()
        for client in clients:
            client.scope.cancel(reason="the publication ends")
            await client.ended.wait()
            if client.proc_id is not None:
                await self._cut_off(client.proc_id, client.targets)

    async def _cut_off(self, stranger: ProcId, targets: set[ProcId]) -> None:
        """End the remaining links of a client (PB-2); it may have closed some itself."""
        text = f"{self._taken.name!r} is no longer published"
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
        describe: Returns the handle for a client.
        grace: Time limit in seconds for calls of clients under way when the block is left.

    Raises:
        ConnectError: The name is taken, or the folder of names cannot be used.
        RuntimeError: This process is not a controller.
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
    """Return the transport of this process; refuse workers and simulations.

    Raises:
        RuntimeError: This process is a worker, or simulated.
    """
    if not isinstance(proc.transport, NativeTransport):
        raise RuntimeError(  # noqa: TRY004 - a simulation, and no argument of the wrong type
            f"handles can be {what} only by real programs, got a simulated one: pass the handle to its actors"
        )
    if family.root is not None:
        raise RuntimeError(
            f"handles can be {what} only in the controller, got a worker: do it in the program that opened the "
            "outermost block, and pass workers an actor of this_proc() that calls for them"
        )
    return proc.transport


# ---- names of published handles: sockets in a private folder of this user --------------------------------------------

FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def checked_program_name(name: Any) -> str:
    """Return a name under which handles may be published; see `checked_file_name`."""
    return checked_file_name(name, "a published name", limits.PUBLISHED_NAME_CHARS_MAX)


def checked_file_name(name: Any, what: str, chars_max: int) -> str:
    """Return a valid file name.

    Args:
        what: Meaning of the name, for error texts.
        chars_max: Greatest length.

    Raises:
        TypeError: It is not text.
        ValueError: It has invalid characters, or too many.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a text, got {name!r}")
    if not FILE_NAME.fullmatch(name) or len(name) > chars_max:
        raise ValueError(
            f"{what} must be 1 to {chars_max} letters, digits, '_', '-' or '.', the first one a letter, digit or '_', "
            f"got {name!r}"
        )
    return name


@contextmanager
def _entered() -> Generator[tuple[Path, int], None, None]:
    """Open the folder; create it if it is missing.

    Raises:
        ConnectError: It cannot be trusted, or not be created.
    """
    folder = user_folder()
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(entered(folder))
        except OSError as error:
            raise ConnectError(f"cannot use the folder of published names, {folder}: {error}") from error
        yield folder, fd


@contextmanager
def _locked(fd: int) -> Generator[None, None, None]:
    """Hold the lock of the folder; holders keep it for microseconds and wait for nothing meanwhile."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _reach(fd: int, name: str) -> socket.socket | None:
    """Return a connection to the listener at a name; None if there is none.

    Raises:
        FileNotFoundError: There is no such name.
        BlockingIOError: Too many clients are connecting at this moment.
    """
    sock = _socket()
    try:
        sock.connect(f"/proc/self/fd/{fd}/{name}")  # paths of sockets have at most 107 bytes
    except ConnectionRefusedError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


class TakenName:
    """A name that this program listens at.

    Attributes:
        listener: Socket to which others connect; not blocking.
    """

    def __init__(self, name: str, listener: socket.socket, inode: int) -> None:
        self.name = name
        self.listener = listener
        self._inode = inode

    def give_back(self) -> None:
        """Stop listening, and remove the name unless another program has taken it meanwhile."""
        self.listener.close()
        with suppress(ConnectError, OSError), _entered() as (_, fd), _locked(fd):
            if os.stat(self.name, dir_fd=fd).st_ino == self._inode:
                os.unlink(self.name, dir_fd=fd)

    def forget(self) -> None:
        """In a forked child: close our copy."""
        self.listener.close()


def take_name(name: str) -> TakenName:
    """Listen at a name; a name whose program has ended is taken over.

    Raises:
        ConnectError: Another program listens there, or the folder cannot be used.
    """
    with _entered() as (folder, fd), _locked(fd):
        try:
            taken: socket.socket | None = _reach(fd, name)
            is_busy = False
        except FileNotFoundError:
            taken, is_busy = None, False
        except BlockingIOError:
            taken, is_busy = None, True
        if taken is not None or is_busy:
            who = "another program"
            if taken is not None:
                who = f"process {credentials_of(taken)[0]}"
                taken.close()
            raise ConnectError(
                f"a name can be published once, and {who} publishes {name!r}: choose another name, or end that program"
            )
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        listener = _socket()
        try:
            listener.bind(f"/proc/self/fd/{fd}/{name}")
            listener.listen(limits.PROGRAM_CLIENTS_MAX)
            return TakenName(name, listener, os.stat(name, dir_fd=fd).st_ino)
        except OSError as error:
            listener.close()
            raise ConnectError(f"cannot listen at {folder / name}: {error}") from error


def dial(name: str) -> socket.socket | None:
    """Return a connection to the program of this user that publishes a name; None while too many are connecting.

    Raises:
        ConnectError: There is no such program, or it has ended; its remains are removed.
    """
    with _entered() as (folder, fd):
        try:
            sock = _reach(fd, name)
            if sock is None:  # perhaps it is just being taken, which holding the lock rules out
                with _locked(fd):
                    sock = _reach(fd, name)
                    if sock is None:
                        os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            known = ", ".join(sorted(filter(FILE_NAME.fullmatch, os.listdir(fd)))) or "none"
            raise ConnectError(
                f"no program of this user publishes {name!r} on this host (in {folder}); published names: {known}"
            ) from None
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return None
            raise ConnectError(f"cannot connect to {folder / name}: {error}") from error
    if sock is None:
        raise ConnectError(f"the program that published {name!r} has ended; what it left in {folder} was removed")
    if credentials_of(sock)[1] != os.geteuid():
        sock.close()
        raise ConnectError(f"{name!r} is published by another user: publish it as user {os.geteuid()}, as here")
    return sock


# ---- greeting: descriptions of two programs, and whether they fit ----------------------------------------------------


def side_of(*, pickled: bool, proc_id: ProcId) -> wire.Side:
    """Return the description of this program."""
    from trimesh._runtime.system.machine import own_version  # noqa: PLC0415 - few programs need it

    return wire.Side(
        trimesh=own_version(),
        protocol=ABI_VERSION,
        python=f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        pickle="on" if pickled else "off",
        pid=os.getpid(),
        program=Path(sys.argv[0] or "python").name,
        proc_id=proc_id,
    )


def check_fit(ours: wire.Side, theirs: wire.Side) -> None:
    """Refuse a program whose messages this one cannot, or must not, read.

    Raises:
        ConnectError: They differ; both are named.
    """
    for what, own, other in (
        ("the same version of trimesh", (ours.trimesh, ours.protocol), (theirs.trimesh, theirs.protocol)),
        ("the same Python", ours.python, theirs.python),
        ("the same pickle=", ours.pickle, theirs.pickle),
    ):
        if own != other:
            raise ConnectError(
                f"programs that connect must have {what}: {_name(ours)} has {_text(own)}, "
                f"{_name(theirs)} has {_text(other)}"
            )


def _name(side: wire.Side) -> str:
    return f"{side.program} (pid {side.pid})"


def _text(value: str | tuple[str, int]) -> str:
    return value if isinstance(value, str) else f"{value[0]} (protocol {value[1]})"
