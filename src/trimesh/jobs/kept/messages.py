"""What a keeper and who asks it say to each other: a line of JSON each, over a socket of this machine.

The socket has an abstract name, so that no folder has to outlive a login. Both sides ask the kernel who the other is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.control import credentials_of
from trimesh.errors import ConnectError, ProtocolError
from trimesh.jobs.kept.state import KeptState
from trimesh.jobs.pki import OwnPKI

_READ_BYTES: Final = 1 << 16


class LookAtJob(msgspec.Struct, frozen=True, tag="look"):
    """Asks for the state, and for who is attached."""


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Has the lease end so many seconds from now."""

    lease: float


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Asks for the hosts; they are given back when this connection ends.

    Attributes:
        pid: Of the asker.
        grace: Of its blocks, in seconds: so long before its hosts end it is told to leave; None does not tell it.
    """

    pid: int
    grace: float | None = None


class BeginAgent(msgspec.Struct, frozen=True, tag="begin"):
    """Starts the agent of a host.

    Attributes:
        number: Of this start.
        rank: Of the host.
        order: What the agent is told: a secret is in it.
    """

    number: int
    rank: int
    order: str

    def __repr__(self) -> str:
        return f"BeginAgent({self.number}, rank={self.rank}, order not shown)"


class EndAgent(msgspec.Struct, frozen=True, tag="end"):
    """Ends the agent of such a start."""

    number: int


class ReplaceHost(msgspec.Struct, frozen=True, tag="replace"):
    """Has another machine in the place of one, whose agent of the program has ended."""

    rank: int


class Attached(msgspec.Struct, frozen=True):
    """Who has the hosts of a kept job.

    Attributes:
        host, pid: Of the program.
        since: Unix time.
    """

    host: str
    pid: int
    since: float


class JobSeen(msgspec.Struct, frozen=True, tag="seen"):
    """The state, and who is attached."""

    state: KeptState
    attached: Attached | None = None


class HostsGranted(msgspec.Struct, frozen=True, tag="granted"):
    """The hosts are the asker's until its connection ends.

    Attributes:
        hosts: Their names.
        parts: Numbers of hosts by the names of their meshes.
        is_named: Whether the job gives names to its meshes.
        host_ids: Setting `host_id` of each.
        interface: Where the asker listens for them.
        pickle: See `Job.pickle`.
        pki: See `Job.pki`.
        replaces: Whether the keeper knows `ReplaceHost`.
        insecure: See `Job.insecure`.
    """

    hosts: tuple[str, ...]
    parts: Mapping[str, int]
    is_named: bool
    host_ids: tuple[str, ...]
    interface: str
    pickle: Literal["on", "off"] | None
    pki: OwnPKI | None = None
    replaces: bool = False
    insecure: str = ""


class AgentEnded(msgspec.Struct, frozen=True, tag="ended"):
    """An agent has ended; see `AgentExit`."""

    number: int
    text: str
    last_words: str
    reason: str


class HostsNoticed(msgspec.Struct, frozen=True, tag="noticed"):
    """The hosts are about to end.

    Attributes:
        text: Why, in words.
        is_end: Whether the program has to leave now, to leave in order.
    """

    text: str
    is_end: bool


class HostReplaced(msgspec.Struct, frozen=True, tag="replaced"):
    """What has come of `ReplaceHost`.

    Attributes:
        rank: The place.
        name: Of the machine that is there.
        failure: Why there is none.
    """

    rank: int
    name: str
    failure: str = ""


class KeeperRefused(msgspec.Struct, frozen=True, tag="refused"):
    """What was asked is not done."""

    text: str


Question = LookAtJob | Extend | Attach | BeginAgent | EndAgent | ReplaceHost
Answer = JobSeen | HostsGranted | AgentEnded | HostsNoticed | HostReplaced | KeeperRefused


def listen(key: str) -> trio.SocketListener:
    """Listen as the keeper with a key.

    Raises:
        OSError: There are no descriptors.
    """
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw = socket.socket(fileno=sock.detach())
    raw.bind(_address(key))
    raw.listen(limits.KEPT_CLIENTS_MAX)
    return trio.SocketListener(trio.socket.from_stdlib_socket(raw))


async def dial(key: str) -> Lines:
    """Return a connection to the keeper with a key.

    Raises:
        OSError: There is none.
        ConnectError: Another user listens there.
    """
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await sock.connect(_address(key))
        check_user(sock)
    except BaseException:
        sock.close()
        raise
    return Lines(trio.SocketStream(sock))


def check_user(sock: trio.socket.SocketType) -> int:
    """Return the process at the other end.

    Raises:
        ConnectError: It is another user's.
    """
    with socket.socket(fileno=os.dup(sock.fileno())) as raw:
        pid, user = credentials_of(raw)
    if user != os.geteuid():
        raise ConnectError(f"the other end of the socket of a kept job must be of user {os.geteuid()}, got {user}")
    return pid


def _address(key: str) -> str:
    return f"\0trimesh-kept-{key}"


class Lines:
    """One end of a connection, by records. Owns the stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._sending = trio.Lock()
        self._in = bytearray()

    async def send(self, record: Question | Answer) -> None:
        """Send a record.

        Raises:
            trio.BrokenResourceError: The other end is gone.
        """
        async with self._sending:
            await self.stream.send_all(msgspec.json.encode(record) + b"\n")

    async def receive(self, kind: Any) -> Any:
        """Return the next record; None when the other end is gone.

        Raises:
            ProtocolError: It is none of `kind`.
        """
        while (at := self._in.find(b"\n")) < 0:
            if len(self._in) > limits.KEPT_LINE_BYTES_MAX:
                raise ProtocolError(f"a line must have at most {limits.KEPT_LINE_BYTES_MAX} bytes, got more")
            try:
                data = await self.stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._in += data
        line = bytes(self._in[:at])
        del self._in[: at + 1]
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ProtocolError(f"a keeper and who asks it send records, got {len(line)} bytes that are none") from None

    async def wait_closed(self) -> None:
        """Say that nothing more is sent, and wait until the other end has closed the connection."""
        try:
            await self.stream.send_eof()
            while await self.stream.receive_some(_READ_BYTES):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def aclose(self) -> None:
        await self.stream.aclose()
