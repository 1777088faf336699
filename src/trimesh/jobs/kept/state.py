"""State files of kept jobs, and the protocol between a keeper and its clients.

    $XDG_STATE_HOME/trimesh/jobs/NAME.json, by default in ~/.local/state; files of mode 0600 in a folder of mode 0700

KF-1 A file is written under a temporary name and then renamed: a reader never sees half a state.
KF-2 The first process that creates the file of a name takes the name; it is free again when the file is gone.
KF-3 No file holds a secret: the kernel identifies the users that connect to a keeper.
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
        version: Version of this format; grows when a field is removed or changes its meaning.
        name: Name of the job.
        key: Random id of its keeper, never reused; also the address of its socket.
        kind: Class name of the job.
        host, boot: Machine of the keeper, and the boot id of that machine.
        pid, started: Process id of the keeper, and its start in ticks since boot.
        status: "starting" while hosts are awaited, "kept", or "ended" by the failure in `words`.
        since, until: Unix times of the keeper's start and of the end of the lease.
        parts: Numbers of hosts by the names of their meshes.
        hosts: Names of the machines.
        words: Why the job has ended.
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
    """Return the name if a kept job may have it.

    Raises:
        TypeError, ValueError: It is no valid name.
    """
    return checked_file_name(name, "the name of a kept job", limits.KEPT_NAME_CHARS_MAX)


def folder() -> Path:
    """Return the folder of state files."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "trimesh" / "jobs"


def file_of(name: str) -> Path:
    """Return the state file of a name."""
    return folder() / f"{name}{_SUFFIX}"


def log_of(name: str) -> Path:
    """Return the path of a keeper's log; its end is quoted when the keeper fails to start."""
    return folder() / f"{name}.log"


@contextmanager
def _entered() -> Generator[int, None, None]:
    """Open the folder; make it if it is missing.

    Raises:
        ConnectError: It is not private to this user, or cannot be made.
    """
    place = folder()
    with ExitStack() as stack:
        try:
            place.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with entered(place.parent):
                pass
            fd = stack.enter_context(entered(place))
        except OSError as error:
            raise ConnectError(f"the folder of kept jobs, {place}, cannot be used: {error}") from error
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
            raise ConnectError(taken_words(state.name)) from None
        finally:
            os.unlink(new, dir_fd=fd)


def taken_words(name: str) -> str:
    """Return why a name cannot be taken."""
    return (
        f"a kept job must have a name of its own, got {name!r}, which is taken (see `trimesh job list`): choose "
        f"another one, or free it by `trimesh job stop {name}`"
    )


def replace(state: KeptState) -> None:
    """Write a new state of a name that this keeper has taken.

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
    """Free a name, and remove its log, unless another keeper has taken the name by now."""
    with suppress(ConnectError, OSError), _entered() as fd:
        if read(state.name).key == state.key:
            os.unlink(f"{state.name}{_SUFFIX}", dir_fd=fd)
            os.unlink(f"{state.name}.log", dir_fd=fd)


def read(name: str) -> KeptState:
    """Return the state in the file of a name.

    Raises:
        ConnectError: There is no such file, it is not private, is no state, or is of another version.
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
        f"{path} must be of version {VERSION}, got {version}: use the release of trimesh that keeps this job"
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


# ---- is the keeper of a state file still alive? -----------------------------------------------------------------


def why_gone(state: KeptState) -> str:
    """Return why a job of this machine is no longer kept; "" while its keeper lives.

    Raises:
        ConnectError: Its keeper is on another machine, so this one cannot know.
    """
    here = host_name()
    if state.host != here:
        raise ConnectError(
            f"a kept job can only be used on the machine of its keeper; {state.name} is kept on {state.host}, and this "
            f"is {here}: log in there. If that machine is gone for good, remove {file_of(state.name)}"
        )
    if state.boot != boot_id():
        return f"{here} has been rebooted since"
    if state.status == "ended":
        return f"it has ended: {state.words}"
    if start_of(state.pid) != state.started:
        until = "" if state.until > time.time() else ", and its lease has ended"
        return f"its keeper, process {state.pid}, is gone{until}"
    return ""


# ---- protocol of a keeper and its clients: a line of JSON each, over a Unix socket -----------------------------------

# The socket has an abstract name, so that no folder has to outlive a login. Each side asks the kernel for the other's
# user (SO_PEERCRED).

_READ_BYTES: Final = 1 << 16


class StatusRequest(msgspec.Struct, frozen=True, tag="look"):
    """Requests the state and the attached program; the reply is `JobStatus`."""


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Requests that the lease end `lease` seconds from now."""

    lease: float


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Requests the hosts; the end of this connection gives them back.

    Attributes:
        pid: Process id of the program.
        grace: Seconds that its blocks take to end: the keeper sends a notice to leave that long, and a margin, before
            the hosts end. None requests no notices.
    """

    pid: int
    grace: float | None = None


class BeginAgent(msgspec.Struct, frozen=True, tag="begin"):
    """Starts the agent of a host.

    Attributes:
        number: Number of this start, by which later records refer to it.
        rank: Rank of the host.
        order: Order for the agent; it contains a secret token.
    """

    number: int
    rank: int
    order: str

    def __repr__(self) -> str:
        return f"BeginAgent({self.number}, rank={self.rank}, order not shown)"


class EndAgent(msgspec.Struct, frozen=True, tag="end"):
    """Ends the agent that `BeginAgent` of this number started."""

    number: int


class ReplaceHost(msgspec.Struct, frozen=True, tag="replace"):
    """Requests a spare machine for a rank at which the program's agent has ended."""

    rank: int


class Attached(msgspec.Struct, frozen=True):
    """The program that holds the hosts of a kept job.

    Attributes:
        host, pid: Machine and process id of the program.
        since: Unix time at which it attached.
    """

    host: str
    pid: int
    since: float


class JobStatus(msgspec.Struct, frozen=True, tag="seen"):
    """The state and the attached program."""

    state: KeptState
    attached: Attached | None = None


class HostsGranted(msgspec.Struct, frozen=True, tag="granted"):
    """Grants the hosts to the program until its connection ends.

    Attributes:
        hosts: Names of the machines.
        parts: Numbers of hosts by the names of their meshes.
        is_named: Whether the job gives names to its meshes.
        host_ids: Setting `host_id` of each host.
        interface: Address at which the program listens for its agents.
        pickle: See `Job.pickle`.
        pki: See `Job.pki`.
        replaces: Whether the keeper supports `ReplaceHost`.
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
    """Reports that an agent has ended; fields as in `AgentExit`."""

    number: int
    text: str
    last_words: str
    reason: str


class HostsNoticed(msgspec.Struct, frozen=True, tag="noticed"):
    """Reports that the hosts are about to end.

    Attributes:
        text: The reason, for people.
        is_end: Whether the program must leave now for its blocks to end in time; False asks it to save its work.
    """

    text: str
    is_end: bool


class HostReplaced(msgspec.Struct, frozen=True, tag="replaced"):
    """Outcome of `ReplaceHost`.

    Attributes:
        rank: Rank of the host.
        name: Name of the machine at that rank now.
        failure: Why it was not replaced; "" otherwise.
    """

    rank: int
    name: str
    failure: str = ""


class KeeperRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Reports that the keeper refused a request, and why."""

    text: str


Question = StatusRequest | Extend | Attach | BeginAgent | EndAgent | ReplaceHost
Answer = JobStatus | HostsGranted | AgentEnded | HostsNoticed | HostReplaced | KeeperRefused


def listen(key: str) -> trio.SocketListener:
    """Listen as the keeper with a key.

    Raises:
        OSError: This process is out of file descriptors.
    """
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw = socket.socket(fileno=sock.detach())
    raw.bind(_address(key))
    raw.listen(limits.KEPT_CLIENTS_MAX)
    return trio.SocketListener(trio.socket.from_stdlib_socket(raw))


async def dial(key: str) -> Lines:
    """Return a connection to the keeper with a key.

    Raises:
        OSError: No such keeper is running.
        ConnectError: The listening process is another user's.
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
    """Return the process id of the other end.

    Raises:
        ConnectError: It is another user's process.
    """
    with socket.socket(fileno=os.dup(sock.fileno())) as raw:
        pid, user = credentials_of(raw)
    if user != os.geteuid():
        raise ConnectError(f"the other end of the socket of a kept job must be of user {os.geteuid()}, got {user}")
    return pid


def _address(key: str) -> str:
    return f"\0trimesh-kept-{key}"


class Lines:
    """One end of a connection: sends and receives records, one line each. Owns the stream."""

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
            ProtocolError: It is not of type `kind`, or too long.
        """
        while (at := self._in.find(b"\n")) < 0:
            if len(self._in) > limits.KEPT_LINE_BYTES_MAX:
                raise ProtocolError(
                    f"a record on the socket of a kept job must have at most limits.KEPT_LINE_BYTES_MAX "
                    f"({limits.KEPT_LINE_BYTES_MAX}) bytes, got more"
                )
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
            raise ProtocolError(
                f"each line on the socket of a kept job must be a record of its protocol, got {len(line)} other bytes: "
                "use the release of trimesh that keeps the job"
            ) from None

    async def wait_closed(self) -> None:
        """Close the sending side, and wait until the other end has closed the connection."""
        try:
            await self.stream.send_eof()
            while await self.stream.receive_some(_READ_BYTES):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def aclose(self) -> None:
        await self.stream.aclose()
