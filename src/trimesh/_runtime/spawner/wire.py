"""Records between the spawner and the processes of its family: requests, answers, notices.

Each record is one tagged msgpack array; unknown tags and fields are refused. Descriptors travel beside a record
(`spawner/socket`); the docstring of each record says which.

    any process  -> spawner   Request: Hello Launch Signal Connect ExitOf Flush OutputTaken Retire Stop
    controller   -> agent               CastChannel; StateOf and MachineOf, answered by StateKnown and MachineKnown
    new worker   -> spawner   Request: Entered, or SetupRefused
    spawner      -> process   Notice:  Ready Fatal Launched LaunchFailed Connected ConnectFailed Incoming
                                       Exited ExitKnown Output Flushed
    spawner      -> controller         ForeignConnect ForeignExitOf, answered as a spawner answers Connect and ExitOf
    controller <-> agents, two agents  those at the end of `system/records`
    two programs                       Greeting Join Joined Declined Leaving, and Connect and ExitOf with their answers

Texts of the operating system (paths, environment) are bytes, because they need not be valid Unicode.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.records import (
    ENTRY,
    AgentReady,
    Arriving,
    CastFeed,
    ConnectedDirect,
    Count,
    Id,
    Listening,
    OutputChunk,
    Parted,
    Record,
    Relayed,
    Tunnel,
    WorkerConfig,
)
from trimesh.errors import ProtocolError
from trimesh.ids import ID_MAX

# Annotations are not texts here: msgspec would compile each of them in every new process.


Request = Annotated[int, Meta(ge=1, le=ID_MAX)]

# ---- parts of records ------------------------------------------------------------------------------------


class WarningFilter(Record, frozen=True):
    """One entry of `warnings.filters`; patterns as texts, the category by module and qualified name."""

    action: str
    message: str
    category_module: str
    category_name: str
    module: str
    line: Count


class CallerContext(Record, frozen=True, kw_only=True):
    """Context that a new process inherits from the process that requests it (rule O2).

    Attributes:
        env: The whole environment.
        cwd: Working directory; empty when the caller's own is gone.
        sys_path, argv: `sys.path` and `sys.argv`.
        filters: `warnings.filters`, first to last.
        umask: File mode mask.
        rlimits: (resource, soft, hard).
        prefixes: Folders of the caller's Python installation; another interpreter leaves out entries in them.
        version: Major and minor version of the caller's Python.
    """

    env: dict[bytes, bytes]
    cwd: bytes
    sys_path: tuple[bytes, ...]
    argv: tuple[bytes, ...]
    filters: tuple[WarningFilter, ...]
    umask: int
    rlimits: tuple[tuple[int, int, int], ...]
    prefixes: tuple[bytes, ...]
    version: tuple[int, int]


# ---- requests --------------------------------------------------------------------------------------------


class Hello(Record, frozen=True, tag=True):
    """First record of the controller.

    Attributes:
        root_id: The controller.
        modules: Imported before anything is forked; the last ones are the user's `preload`.
        agent: Id of the agent that sends this for a controller on another host, and whose mark processes here carry; 0
            if the controller itself sends this.
    """

    root_id: Id
    modules: tuple[str, ...]
    agent: Count = 0


class Launch(Record, frozen=True, tag=True, kw_only=True):
    """Start a worker. Answered by `Launched` or `LaunchFailed`.

    Attributes:
        request: Number of this request on this connection.
        config: Parameters of the worker.
        entry: `module:function` to run.
        python: Interpreter to execute; empty to fork.
        preload: Modules that the new process imports before it enters.
        output: "forward", "inherit", "discard", or "file".
        output_path: Path for "file".
        cpus: The only CPUs it may run on; empty for the CPUs of the spawner.
    """

    request: Request
    config: WorkerConfig
    context: CallerContext
    entry: str = ENTRY
    python: bytes = b""
    preload: tuple[str, ...] = ()
    output: str = "forward"
    output_path: bytes = b""
    cpus: tuple[Count, ...] = ()


class Entered(Record, frozen=True, tag=True):
    """First record of a worker: everything is set up and its entry is about to run."""


class SetupRefused(Record, frozen=True, tag=True):
    """First and last record of a worker whose set-up failed; it exits."""

    text: str


class Signal(Record, frozen=True, tag=True):
    """Send `signum` to the process group of a worker that the sender has launched; the controller may reach all."""

    proc_id: Id
    signum: Annotated[int, Meta(ge=1, le=64)]


class Connect(Record, frozen=True, tag=True):
    """Make a connection to `target`. Answered by `Connected` or `ConnectFailed`; the target gets `Incoming`.

    Attributes:
        request: Number of this request on this connection.
        target: The process that gets the other end.
        source: Controller only: the connecting process, a worker of another spawner; None for the sender itself.
        is_far: Controller only: the source is on another host.
        agent: To an agent only: the agent of that host; the end may go there over a session of the two. 0 for none.
        answers: Request number of that agent's question.
    """

    request: Request
    target: Id
    source: Id | None = None
    is_far: bool = False
    agent: Count = 0
    answers: Count = 0


class ExitOf(Record, frozen=True, tag=True):
    """Request the exit report of `proc_id`. Answered by `ExitKnown` once it has ended."""

    request: Request
    proc_id: Id


class Flush(Record, frozen=True, tag=True):
    """Controller only: answered by `Flushed` after all output that workers have written until now."""

    request: Request


class StateOf(Record, frozen=True, tag=True):
    """Controller to an agent only: query the kernel's state of a process there. Answered by `StateKnown`.

    Attributes:
        request: Number of this request on this connection.
        pid: Pid of the process; 0 for the spawners there: the state of one that is stopped, if there is one.
        record: Its flight record, on the controller's host; empty if its actors are not wanted.
    """

    request: Request
    pid: Count
    record: str = ""


class MachineOf(Record, frozen=True, tag=True):
    """Controller to an agent only: query the figures of its machine. Answered by `MachineKnown`."""

    request: Request


class OutputTaken(Record, frozen=True, tag=True):
    """Controller only: one `Output` has been written; another may come."""


class CastChannel(Record, frozen=True, tag=True):
    """Controller to an agent only: bodies of casts come here. Descriptor: the agent's end; see `hosts/casts`."""


class Retire(Record, frozen=True, tag=True):
    """Controller only: it launches nothing more. Exit as by `Stop` once the last worker has been reaped."""


class Stop(Record, frozen=True, tag=True):
    """Controller only: kill the remaining processes, send the rest of the output, exit with 0."""


# ---- notices ---------------------------------------------------------------------------------------------


class Ready(Record, frozen=True, tag=True):
    """Everything is imported; workers can be launched."""


class Fatal(Record, frozen=True, tag=True):
    """The spawner ends for this reason, and every worker with it."""

    text: str


class Launched(Record, frozen=True, tag=True):
    """The worker has entered. Descriptors: its pidfd, the owner's end of the link."""

    request: Request
    pid: Id


class LaunchFailed(Record, frozen=True, tag=True):
    """No such worker runs; nothing of it is left."""

    request: Request
    text: str


class Connected(Record, frozen=True, tag=True):
    """Descriptor: one end of a stream socket whose other end the target got; through hosts if that is far."""

    request: Request
    is_far: bool = False


class ConnectFailed(Record, frozen=True, tag=True):
    """The target is gone (`exit` has its report while remembered), or never existed, or a descriptor was missing."""

    request: Request
    text: str
    is_gone: bool = False
    exit: ExitReport | None = None


class Incoming(Record, frozen=True, tag=True):
    """Another process has connected. Descriptor: our end of the stream socket; through hosts if that is far."""

    source: Id
    is_far: bool = False


class Exited(Record, frozen=True, tag=True):
    """To the owner, with a copy to the controller: a worker that had entered has ended and was reaped."""

    exit: ExitReport


class ExitKnown(Record, frozen=True, tag=True):
    """Answer to `ExitOf`; None for a process that never existed, or ended too long ago."""

    request: Request
    exit: ExitReport | None


class Output(Record, frozen=True, tag=True):
    """To the controller: output of workers."""

    chunks: tuple[OutputChunk, ...]


class Flushed(Record, frozen=True, tag=True):
    """Answer to `Flush`, in order with `Output`."""

    request: Request


class StateKnown(Record, frozen=True, tag=True):
    """Answer to `StateOf`.

    Attributes:
        state: The kernel's letter, empty where there is no such process.
        cpu_seconds, memory_bytes: Its processor time and memory.
        actors: Encoded `ActorRow`s of its flight record.
    """

    request: Request
    state: str
    cpu_seconds: Annotated[float, Meta(ge=0.0)] = 0.0
    memory_bytes: Count = 0
    actors: bytes = b""


class MachineKnown(Record, frozen=True, tag=True):
    """Answer to `MachineOf`: an encoded `HostRow`."""

    request: Request
    row: bytes


class ForeignConnect(Record, frozen=True, tag=True):
    """To the controller: `source` requests a connection to a process that this spawner does not know."""

    request: Request
    source: Id
    target: Id


class ForeignExitOf(Record, frozen=True, tag=True):
    """To the controller: a worker requests the exit report of a process that this spawner does not know."""

    request: Request
    proc_id: Id


# ---- between programs (`_runtime/programs`) ---------------------------------------------------------------


class Side(Record, frozen=True, kw_only=True):
    """Description of a program, sent by itself.

    Attributes:
        trimesh, protocol, python: Versions.
        pickle: "on" or "off".
        pid, proc_id: Pid and id of its controller.
        program: Name of its script.
    """

    trimesh: str
    protocol: int
    python: str
    pickle: str
    pid: Id
    program: str
    proc_id: Id


class PublishedMember(Record, frozen=True):
    """A member of a published mesh; see `MemberInfo`."""

    proc_id: Id
    host: str
    pid: Count
    incarnation: Count


class PublishedHandle(Record, frozen=True, kw_only=True):
    """A handle on a mesh; see `MeshInfo` and `Region`.

    Attributes:
        mesh, owner: Ids of the mesh and its owner.
        name, actor: Names of the mesh and its class.
        is_healing: Whether members that end may be replaced.
        base, extent: Labels and sizes of the mesh, and of the part shown.
        table, excluded: Ranks that are shown, and the missing ones among them.
        members: By rank.
        endpoints: Endpoints of the class: each name, and whether it is a generator.
    """

    mesh: Id
    owner: Id
    name: str
    actor: str
    is_healing: bool
    base: tuple[tuple[str, Count], ...]
    extent: tuple[tuple[str, Count], ...]
    table: tuple[Count, ...]
    excluded: tuple[Count, ...]
    members: tuple[PublishedMember, ...]
    endpoints: dict[str, bool]


class Greeting(Record, frozen=True, tag=True):
    """First record of a publishing program to a connecting one."""

    side: Side


class Join(Record, frozen=True, tag=True):
    """First record of a connecting program. Answered by `Joined` or `Declined`."""

    side: Side


class Joined(Record, frozen=True, tag=True):
    """The program may request links."""

    handle: PublishedHandle


class Declined(Record, frozen=True, tag=True):
    """The program may not connect."""

    text: str


class Leaving(Record, frozen=True, tag=True):
    """The publication has ended: finish running calls, or give them up, and close.

    Attributes:
        text: Reason.
        at_once: Whether the calls are to be given up.
    """

    text: str
    at_once: bool


Answer = Connected | ConnectFailed | ExitKnown
"""Answers of a spawner to `Connect` and `ExitOf`, and of the controller about a foreign process."""

AnyRequest = (
    Hello
    | Launch
    | Entered
    | SetupRefused
    | Signal
    | Connect
    | ExitOf
    | Flush
    | StateOf
    | MachineOf
    | OutputTaken
    | CastChannel
    | Retire
    | Stop
    | Answer
    | Join
    | Arriving
    | CastFeed
    | Listening
    | Tunnel
    | Parted
)

AnyNotice = (
    Ready
    | AgentReady
    | ConnectedDirect
    | Listening
    | Tunnel
    | Relayed
    | Parted
    | Fatal
    | Launched
    | LaunchFailed
    | Connected
    | ConnectFailed
    | Incoming
    | Exited
    | ExitKnown
    | Output
    | Flushed
    | StateKnown
    | MachineKnown
    | ForeignConnect
    | ForeignExitOf
    | Greeting
    | Joined
    | Declined
    | Leaving
)


class Detached(Record, frozen=True, tag=True):
    """Stands for a record that is too large for a packet. Descriptor before all others: a memfd with the record."""

    size: Count


AnyRecord = AnyRequest | AnyNotice

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRequest | AnyNotice | Detached] = msgspec.msgpack.Decoder(
    AnyRequest | AnyNotice | Detached
)


def encode(record: AnyRecord | Detached) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes) -> AnyRecord | Detached:
    """Return the record in `data`.

    Raises:
        ProtocolError: `data` is not a record.
    """
    try:
        return _decoder.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own errors and UnicodeDecodeError are ValueErrors
        raise ProtocolError(f"a packet must hold a spawner record, got {len(data)} other bytes: {error}") from None
