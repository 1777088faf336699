"""The settings: one struct with their values, one table with what there is to say of each."""

# Annotations are not texts here: a new process decodes the struct, and msgspec would compile each of them there.

from typing import Final

import msgspec

from trimesh import limits
from trimesh.config.kinds import Choice, Count, Kind, Names, Seconds, Text

PREFIX: Final = "TRIMESH_"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings; `SETTINGS` says what each is, and what it costs."""

    grace: float = limits.GRACE_SECONDS
    output: str = "forward"
    pickle: str = "on"
    preload: tuple[str, ...] = ()
    abandon_after: float | None = None
    stream_window: int = limits.STREAM_WINDOW
    map_window: int = limits.MAP_WINDOW
    stall_after: float = limits.STALL_SECONDS
    spin: str = "auto"
    rdma: tuple[str, ...] = ()
    rdma_address: str = ""
    ucx: str = ""
    host_id: str = ""
    collectives: str = ""
    direct: str = ""
    direct_advertise: tuple[str, ...] = ()
    observe: str = "on"
    record: str = "on"
    progress: str = "auto"
    traceback: str = "short"
    debug: str = "on"
    debug_wait: float = limits.DEBUG_WAIT_SECONDS
    job: str = ""
    libssl: str = ""
    native_lib: str = ""


class Setting(msgspec.Struct, frozen=True):
    """What there is to say of one setting.

    Attributes:
        name: As a keyword and in files; the variable of the environment is `TRIMESH_` and the name in capitals.
        kind: Its values.
        unit: Of a number; else empty.
        about: What it is.
        cost: What another value costs, or gains.
        default: What counts if nothing is said, as people write it; empty for the value itself.
    """

    name: str
    kind: Kind
    unit: str
    about: str
    cost: str
    default: str = ""

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()


SETTINGS: Final = (
    Setting(
        "grace",
        Seconds(may_wait=True),
        "seconds",
        "Time for clean-up when a block is left; a process that is not done by then is killed. For `grace=`.",
        "Leaving a block whose actors hang takes that long.",
    ),
    Setting(
        "output",
        Choice(("forward", "inherit", "discard")),
        "",
        "What becomes of what processes print. For `output=`.",
        "`forward` adds coordinates and takes the controller some microseconds a line.",
    ),
    Setting(
        "pickle",
        Choice(("on", "off")),
        "",
        "Whether values are pickled in a family. For `pickle=` at its outermost block.",
        "`off` lets no byte be unpickled; values then travel by annotations, which endpoints must have.",
    ),
    Setting(
        "preload",
        Names(),
        "",
        "Modules imported once, before processes are forked. For `preload=`.",
        "Their import delays the first mesh; each process is spared it, and shares the memory.",
        "none",
    ),
    Setting(
        "abandon_after",
        Seconds(may_be_none=True),
        "seconds",
        "How long a caller that has cancelled waits for acknowledgements. For `options(abandon_after=)`.",
        "Shorter returns sooner from hung actors, whose calls may still run.",
        f"{limits.CANCEL_ACK_SECONDS:g} seconds; {limits.STALLED_ACK_SECONDS:g} if all are known to be stalled",
    ),
    Setting(
        "stream_window",
        Count(limits.STREAM_WINDOW_MAX),
        "items",
        "How many items a generator endpoint may be ahead of its consumer. For `options(window=)` of `stream`.",
        "So many items of each member may wait in memory; few make a fast producer wait for the round trip.",
    ),
    Setting(
        "map_window",
        Count(limits.STREAM_WINDOW_MAX),
        "items",
        "How many items of a `map` may be under way. For its `window=`.",
        "So many items and results may wait in memory; fewer than members leave some idle.",
    ),
    Setting(
        "stall_after",
        Seconds(),
        "seconds",
        "For how long the Trio loop of a worker may stand still before that is reported with its stack.",
        "Shorter reports code that blocks sooner, and long garbage collections, too.",
    ),
    Setting(
        "spin",
        Choice(("auto", "off")),
        "",
        "Whether a process may spin on its links for a moment before it sleeps.",
        "`off` saves that processor time; a call takes 12 to 30 us more.",
    ),
    Setting(
        "rdma",
        Names(("shm", "cma", "tcp", "ucx")),
        "",
        "By what bulk data may travel, beside memory of the process itself; `cuda_ipc` needs `shm`.",
        "`tcp` listens on a port; what is left out may be what is fastest.",
        "all; `tcp` where no process may read another's memory",
    ),
    Setting(
        "rdma_address",
        Text("an IP address of this host", is_address=True),
        "",
        "Where a process listens for `tcp`.",
        "Any process that reaches the address can connect; only one that has a handle is served.",
        "127.0.0.1",
    ),
    Setting(
        "ucx",
        Text("a file or folder"),
        "",
        "The library UCX (1.11 or newer), or its folder.",
        "Code of that file runs in every process.",
        "`/opt/hpcx`, the system's, that of the package `libucx`",
    ),
    Setting(
        "host_id",
        Text(),
        "",
        "Identity of this host: processes of one host reach each other's memory.",
        "Two identities make two hosts of one machine, which have only `tcp` and `ucx` between them.",
        "of its boot and its namespace of processes",
    ),
    Setting(
        "collectives",
        Text("an address, a network or an interface of each host"),
        "",
        "Where ranks of tensors listen for `torch.distributed` with those of other machines: `eth0`, `10.0.0.0/8`.",
        "gloo and NCCL neither encrypt nor ask who connects: name a network that is trusted.",
        "none: ranks of several machines make no process groups; those of one use 127.0.0.1",
    ),
    Setting(
        "direct",
        Text('an address, a network or an interface of each host, or "off"'),
        "",
        "Where the agent of a host listens for those of other hosts: `eth0`, `10.0.0.0/8`. For agents, as they start.",
        "`off`, or an address that others do not reach: messages between hosts go through the host of the program.",
        "the address from which it reaches the program, unless that is a loopback address",
    ),
    Setting(
        "direct_advertise",
        Names(),
        "",
        "What other agents dial in place of that address, `host` or `host:port`, tried in order. For agents.",
        "Where none answers within a second, messages between the two go through the host of the program.",
        "that address",
    ),
    Setting(
        "observe",
        Choice(("on", "off")),
        "",
        "Whether the program has a control socket while a block is open, at which the command `trimesh` asks.",
        "`off`: what hangs can only be asked with `trimesh.dump`, and by signals. A socket costs 0.3 ms a block.",
    ),
    Setting(
        "record",
        Choice(("on", "off")),
        "",
        "Whether each process keeps what happens in a file, which `trimesh autopsy` reads when the run has died.",
        "`off`: nothing is left of a run that was killed. A record takes 0.5 us a call and 1 MB of disk a process.",
    ),
    Setting(
        "progress",
        Choice(("auto", "on", "off")),
        "",
        "Whether what takes more than two seconds shows how far it is: starts of processes and jobs, `map`.",
        "`auto` shows it where stderr is a terminal, and in notebooks; `on` writes a line to a log every ten seconds.",
    ),
    Setting(
        "traceback",
        Choice(("short", "full")),
        "",
        "Whether tracebacks leave out the frames of this library.",
        "`full` shows how an error came through it: for bugs of ours, and for those who work on it.",
    ),
    Setting(
        "debug",
        Choice(("on", "post-mortem", "off")),
        "",
        "What waits for `trimesh debug`: `breakpoint()` in a worker; with `post-mortem` also errors of endpoints.",
        "Calls that wait for what is held wait too. `off`: `breakpoint()` in a worker raises an error.",
    ),
    Setting(
        "debug_wait",
        Seconds(),
        "seconds",
        "For how long a worker that is held waits for `trimesh debug`; then it goes on.",
        "Longer leaves more time to come; shorter costs a run less that is not watched.",
    ),
    Setting(
        "job",
        Text("the name of a job of the file"),
        "",
        "Which table `[jobs.NAME]` of the file `trimesh.jobs.default()` makes a job of.",
        "The same script then runs on the hosts of that job.",
        "none: `LocalJob(1)`, one agent on this machine",
    ),
    Setting(
        "libssl",
        Text("a file"),
        "",
        "The library of OpenSSL (3.0 or newer) that encrypts between hosts.",
        "Code of that file runs in every process that has links to other hosts.",
        "the system's `libssl.so.3`",
    ),
    Setting(
        "native_lib",
        Text("a file"),
        "",
        "A libtrimesh.so to load in place of the package's own.",
        "Code of that file runs in every process.",
        "the package's",
    ),
)
"""Every setting, in the order of the page."""

BY_NAME: Final = {one.name: one for one in SETTINGS}
"""The same by name."""
