"""The state files of kept jobs: `NAME.json` of mode 0600, in a folder that only this user may enter.

    jobs in $XDG_STATE_HOME/trimesh, or in ~/.local/state/trimesh

KF-1 A file is written whole, beside its place, and then moved there: a reader sees one state.
KF-2 The first process that creates the file of a name takes the name; it is free again when the file is gone.
KF-3 No file has a secret: the kernel identifies the users that connect to a keeper.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.programs import FILE_NAME, checked_file_name
from trimesh._runtime.system import credentials_of, entered, host_name, start_of
from trimesh._transport.native.carriers import boot_id
from trimesh.errors import ConnectError, ProtocolError
from trimesh.jobs.pki import OwnPKI

VERSION: Final = 1
_SUFFIX: Final = ".json"

Status = Literal["starting", "kept", "ended"]


class KeptState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the state file of a kept job.

    Attributes:
        version: Grows when a field is taken away or gets another meaning.
        name: Of the job.
        key: Of its keeper, among all that there ever were.
        kind: Class of the job.
        host, boot: Where the keeper runs, and since which start of that machine.
        pid, started: Of the keeper; in ticks since that start.
        status: Whether hosts are waited for, are kept, or why there are none any more is in `words`.
        since, until: Unix times: of the keeper's start, and of the end of the lease.
        parts: Numbers of hosts by the names of their meshes.
        hosts: Names of the machines.
        words: Why it has ended.
    """

    version: int = VERSION
    name: str
    key: str
    kind: str
    host: str
    boot: str
    pid: int
    started: int
    status: Status
    since: float
    until: float
    parts: Mapping[str, int]
    hosts: tuple[str, ...] = ()
    words: str = ""


def checked_kept_name(name: Any) -> str:
    """Return a name that a kept job may have.

    Raises:
        TypeError, ValueError: It may not.
    """
    return checked_file_name(name, "the name of a kept job", limits.KEPT_NAME_CHARS_MAX)


def folder() -> Path:
    """Return where state files are."""
    said = os.environ.get("XDG_STATE_HOME", "")
    return (Path(said) if said else Path.home() / ".local" / "state") / "trimesh" / "jobs"


def file_of(name: str) -> Path:
    """Return the state file of a name."""
    return folder() / f"{name}{_SUFFIX}"


def log_of(name: str) -> Path:
    """Return the path of a keeper's log, which is shown when the keeper fails."""
    return folder() / f"{name}.log"


@contextmanager
def _entered() -> Generator[int, None, None]:
    """Open the folder; make it if it is missing.

    Raises:
        ConnectError: It cannot be trusted, or made.
    """
    place = folder()
    with ExitStack() as stack:
        try:
            place.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with entered(place.parent):
                pass
            fd = stack.enter_context(entered(place))
        except OSError as error:
            raise ConnectError(f"kept jobs are in the folder {place}, which cannot be used: {error}") from error
        yield fd


def open_log(name: str) -> int:
    """Open the log of a keeper, empty, and return its descriptor.

    Raises:
        ConnectError: The folder cannot be used.
    """
    with _entered() as fd:
        return os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600, dir_fd=fd)


def create(state: KeptState) -> None:
    """Take a name.

    Raises:
        ConnectError: It is taken, or the folder cannot be used.
    """
    with _entered() as fd:
        new = _written(fd, state)
        try:
            os.link(new, f"{state.name}{_SUFFIX}", src_dir_fd=fd, dst_dir_fd=fd)
        except FileExistsError:
            raise ConnectError(
                f"the name {state.name!r} is that of a job which is kept, or was: see `trimesh job list`; take another "
                f"name, or end that one by `trimesh job stop {state.name}`"
            ) from None
        finally:
            os.unlink(new, dir_fd=fd)


def replace(state: KeptState) -> None:
    """Write another state of a name that is taken.

    Raises:
        ConnectError: The folder cannot be used.
    """
    with _entered() as fd:
        new = _written(fd, state)
        os.rename(new, f"{state.name}{_SUFFIX}", src_dir_fd=fd, dst_dir_fd=fd)


def _written(fd: int, state: KeptState) -> str:
    new = f".{state.name}.{secrets.token_hex(4)}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=fd), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return new


def remove(state: KeptState) -> None:
    """Free a name, unless it is another keeper's by now; its log goes with it."""
    with suppress(ConnectError, OSError), _entered() as fd:
        if read(state.name).key == state.key:
            os.unlink(f"{state.name}{_SUFFIX}", dir_fd=fd)
            os.unlink(f"{state.name}.log", dir_fd=fd)


def read(name: str) -> KeptState:
    """Return what the state file of a name says.

    Raises:
        ConnectError: There is none, it is not private, or it is of another version.
    """
    path = file_of(name)
    with _entered() as fd:
        try:
            with open(os.open(f"{name}{_SUFFIX}", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd), "rb") as file:
                found = os.fstat(file.fileno())
                if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
                    raise ConnectError(
                        f"the state file of a kept job must be of user {os.geteuid()} and readable by no other, got "
                        f"{path} of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: if it is yours, "
                        f"write: chmod 600 {path}"
                    )
                text = file.read(limits.KEPT_FILE_BYTES_MAX)
        except FileNotFoundError:
            raise ConnectError(f"no job is kept as {name!r} here; `trimesh job list` shows those that are") from None
        except OSError as error:
            raise ConnectError(f"the state file {path} cannot be read: {error.strerror}") from error
    return _parsed(text, path)


def _parsed(text: bytes, path: Path) -> KeptState:
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version == VERSION:
            return msgspec.json.decode(text, type=KeptState)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConnectError(f"{path} must be the state of a kept job: {error}; remove it if nothing is kept") from None
    raise ConnectError(
        f"{path} must be of version {VERSION}, got {version}: another release of trimesh keeps this job; use that"
    )


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def names() -> list[str]:
    """Return all names that are taken.

    Raises:
        ConnectError: The folder cannot be used.
    """
    with _entered() as fd:
        found = [one.removesuffix(_SUFFIX) for one in os.listdir(fd) if one.endswith(_SUFFIX)]
    return sorted(one for one in found if FILE_NAME.fullmatch(one))


# ---- whether it is true still -----------------------------------------------------------------------------------


def why_gone(state: KeptState) -> str:
    """Return why nothing is kept by a keeper of this machine any more; "" where it lives.

    Raises:
        ConnectError: It is one of another machine, which this one cannot know of.
    """
    here = host_name()
    if state.host != here:
        raise ConnectError(
            f"the job {state.name} is kept on {state.host}, and this is {here}: go there, as the program that attaches "
            f"has to run where the keeper does. If that machine is gone for good, remove {file_of(state.name)}"
        )
    if state.boot != boot_id():
        return f"{here} was started anew since the job was kept"
    if state.status == "ended":
        return f"it has ended: {state.words}"
    if start_of(state.pid) != state.started:
        until = "" if state.until > time.time() else ", and so is its lease"
        return f"its keeper, process {state.pid}, is gone{until}"
    return ""


# ---- what a keeper and who asks it say to each other: a line of JSON each, over a socket of this machine -------------

# The socket has an abstract name, so that no folder has to outlive a login. Both sides ask the kernel who the other is.

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
    """The program that has the hosts of a kept job.

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
    """Outcome of `ReplaceHost`.

    Attributes:
        rank: Place of the host.
        name: Name of the new machine.
        failure: Why there is none.
    """

    rank: int
    name: str
    failure: str = ""


class KeeperRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The keeper refused a request."""

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
