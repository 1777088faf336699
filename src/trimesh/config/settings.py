"""The settings: one struct with kind, default and text of each; `SETTINGS` has names and kinds."""

# Annotations are not texts here: a new process decodes the struct, and msgspec would compile each of them there.

from collections.abc import Callable
from typing import Annotated, Any, Final, cast

import msgspec

from trimesh import limits
from trimesh.plain_numbers import real_number, whole_number


class Kind(msgspec.Struct, frozen=True):
    """The values that one setting may have.

    Attributes:
        known: Description of valid values, for an error text that continues with `, got ...`.
        check: Function that returns a valid value in its stored form; raises ValueError, whose text is not used.
        read: Function that converts a text of the environment, before `check`.
        unit: Unit of a number; else empty.
    """

    known: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any] = str
    unit: str = ""


def seconds(*, may_wait: bool = False, may_be_none: bool = False) -> Kind:
    """Return the kind of a time; `may_wait` allows infinity, `may_be_none` allows None."""

    def check(value: Any) -> float | None:
        if value is None and may_be_none:
            return None
        found = real_number(value)
        if found is None or not found >= 0 or (found == float("inf") and not may_wait):
            raise ValueError
        return found

    return Kind("a number of seconds >= 0" + (" (inf waits for ever)" if may_wait else ""), check, float, "seconds")


def items(most: int) -> Kind:
    """Return the kind of a whole number from 1 to `most`."""

    def check(value: Any) -> int:
        found = whole_number(value)
        if found is None or not 1 <= found <= most:
            raise ValueError
        return found

    return Kind(f"a whole number from 1 to {most}", check, int, "items")


def choice(*words: str) -> Kind:
    """Return the kind of one of some words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return Kind(f"one of {', '.join(words)}", check)


def names(*words: str) -> Kind:
    """Return the kind of some names in their order, of `words` if there are any."""

    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError  # noqa: TRY004 - as for other values: the caller makes the text
        found = tuple(cast("list[Any]", value))
        for name in found:
            if not isinstance(name, str) or not name or (words and name not in words):
                raise ValueError
        return found

    def read(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    of = f"some of {', '.join(words)}" if words else "names"
    return Kind(f"{of}: a list of texts, in the environment separated by commas", check, read)


def text(known: str = "a text", *, is_address: bool = False) -> Kind:
    """Return the kind of any text; of an address if `is_address`."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError  # noqa: TRY004 - as above
        if value and is_address:
            import ipaddress  # noqa: PLC0415 - `import trimesh` stays cheap

            ipaddress.ip_address(value)
        return value

    return Kind(known, check)


# ---- settings --------------------------------------------------------------------------------------------------------

PREFIX: Final = "TRIMESH_"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings: meaning, and cost or gain of other values.

    A line `Default:` describes a default that the value does not show.
    """

    grace: Annotated[float, seconds(may_wait=True)] = limits.GRACE_SECONDS
    """Time limit of clean-up when a block is left; processes that exceed it are killed. For `grace=`.
    Leaving a block whose actors hang takes that long."""
    output: Annotated[str, choice("forward", "inherit", "discard")] = "forward"
    """Destination of the output of processes. For `output=`.
    `forward` adds coordinates and costs the controller some microseconds a line."""
    pickle: Annotated[str, choice("on", "off")] = "on"
    """Pickling of values in a family. For `pickle=` at its outermost block.
    `off` unpickles nothing; values then travel by annotations, which endpoints must have."""
    preload: Annotated[tuple[str, ...], names()] = ()
    """Modules imported once, before processes are forked. For `preload=`.
    Their import delays the first mesh; processes share its memory.
    Default: none."""
    spawn_seconds: Annotated[float, seconds(may_wait=True)] = limits.SPAWN_SECONDS
    """Time limit from the request for a process to its first message, with imports of `preload`, without `setup`.
    Raise it for slow disks and large images; a shorter time reports a hanging start sooner."""
    abandon_after: Annotated[float | None, seconds(may_be_none=True)] = None
    """Wait of a cancelled caller for acknowledgements. For `options(abandon_after=)`.
    A shorter wait returns sooner from hung actors, whose calls may still run.
    Default: `limits.CANCEL_ACK_SECONDS` seconds; `limits.STALLED_ACK_SECONDS` if all are known to be stalled."""
    stream_window: Annotated[int, items(limits.STREAM_WINDOW_MAX)] = limits.STREAM_WINDOW
    """Items that a generator endpoint may be ahead of its consumer. For `options(window=)` of `stream`.
    More items of each member may wait in memory; fewer make a fast producer wait for the round trip."""
    map_window: Annotated[int, items(limits.STREAM_WINDOW_MAX)] = limits.MAP_WINDOW
    """Items of a `map` that may be under way. For its `window=`.
    More items and results may wait in memory; fewer than members leave some members idle."""
    stall_after: Annotated[float, seconds()] = limits.STALL_SECONDS
    """Time without a turn after which the Trio loop of a worker is reported as stalled, with its stack.
    A shorter time reports blocking code sooner, and long garbage collections, too."""
    spin: Annotated[str, choice("auto", "off")] = "auto"
    """Spinning of a process on its links for a moment before it sleeps.
    `off` saves that processor time; a call takes 12 to 30 us longer."""
    rdma: Annotated[tuple[str, ...], names("shm", "cma", "tcp", "ucx")] = ()
    """Allowed carriers of bulk data between processes; `cuda_ipc` needs `shm`.
    `tcp` listens on a port; a carrier that is left out may be the fastest.
    Default: all; `tcp` only if no process may read another's memory."""
    rdma_address: Annotated[str, text("an IP address of this host", is_address=True)] = ""
    """Address at which a process listens for `tcp`.
    Any process that reaches it can connect; only one with a handle is served.
    Default: 127.0.0.1."""
    ucx: Annotated[str, text("a file or folder")] = ""
    """The library UCX (1.11 or newer), or its folder.
    Code of that file runs in every process.
    Default: `/opt/hpcx`, the system's, that of the package `libucx`."""
    host_id: Annotated[str, text()] = ""
    """Identity of this host: processes of one host reach each other's memory.
    Two identities make two hosts of one machine, with only `tcp` and `ucx` between them.
    Default: derived from its boot id and its process namespace."""
    collectives: Annotated[str, text("an address, a network or an interface of each host")] = ""
    """Address at which ranks of tensors listen for those of other machines (`torch.distributed`): `eth0`, `10.0.0.0/8`.
    gloo and NCCL neither encrypt nor authenticate: name a trusted network.
    Default: none: ranks of several machines make no process groups; those of one use 127.0.0.1."""
    direct: Annotated[str, text('an address, a network or an interface of each host, or "off"')] = ""
    """Address at which a host's agent listens for other agents: `eth0`, `10.0.0.0/8`. For agents, as they start.
    With `off`, or an address that others cannot reach, messages between hosts go through the host of the program.
    Default: the address from which it reaches the program, unless that is a loopback address."""
    direct_advertise: Annotated[tuple[str, ...], names()] = ()
    """Addresses that other agents dial in place of `direct`, `host` or `host:port`, tried in order. For agents.
    If none answers within a second, messages between the two go through the host of the program.
    Default: the address of `direct`."""
    observe: Annotated[str, choice("on", "off")] = "on"
    """Control socket of the program, for the command `trimesh`, while a block is open.
    With `off` only `trimesh.dump` and signals inspect a hanging run. A socket costs 0.3 ms a block."""
    record: Annotated[str, choice("on", "off")] = "on"
    """Flight record of each process, which `trimesh autopsy` reads after the run has died.
    With `off` nothing is left of a killed run. A record costs 0.5 us a call and 1 MB of disk a process."""
    history: Annotated[float, seconds()] = limits.HISTORY_SECONDS
    """Time for which the run keeps rows, events and metrics for `trimesh query`, in a file beside the flight record.
    0 keeps none. It costs the controller some milliseconds a second; the file has at most 64 MiB."""
    progress: Annotated[str, choice("auto", "on", "off")] = "auto"
    """Progress of `map`, and of starts of processes and jobs, shown after two seconds.
    `auto` shows it if stderr is a terminal, and in notebooks; `on` also logs a line every ten seconds elsewhere."""
    traceback: Annotated[str, choice("short", "full")] = "short"
    """Frames of this library in tracebacks: `short` leaves them out.
    `full` shows them, for work on trimesh."""
    debug: Annotated[str, choice("on", "post-mortem", "off")] = "on"
    """Debugging of workers: `breakpoint()`, and with `post-mortem` also errors of endpoints, wait for `trimesh debug`.
    Calls to a held worker wait, too. With `off`, `breakpoint()` in a worker raises an error."""
    debug_wait: Annotated[float, seconds()] = limits.DEBUG_WAIT_SECONDS
    """Wait of a held worker for `trimesh debug`; then it goes on.
    A shorter wait delays an unattended run less."""
    job: Annotated[str, text("the name of a job of the file")] = ""
    """Table `[jobs.NAME]` of the file from which `trimesh.jobs.default()` makes a job.
    Default: none: `LocalJob(1)`, one agent on this machine."""
    labels: Annotated[tuple[str, ...], names()] = ()
    """Labels of a host, for `Need(labels=)`: `zone=a,disk=nvme`. Hosts of a job read them from their environment.
    Default: none."""
    nvml: Annotated[str, text("a file")] = ""
    """The library NVML of NVIDIA's driver, which lists GPUs. Hosts of a job read it from their environment.
    Code of that file runs in a process that lists the GPUs of a host.
    Default: the system's `libnvidia-ml.so.1`."""
    libssl: Annotated[str, text("a file")] = ""
    """The OpenSSL library (3.0 or newer) that encrypts between hosts.
    Code of that file runs in every process that has links to other hosts.
    Default: the system's `libssl.so.3`."""
    native_lib: Annotated[str, text("a file")] = ""
    """A libtrimesh.so to load in place of the package's own.
    Code of that file runs in every process.
    Default: the package's."""


class Setting(msgspec.Struct, frozen=True):
    """One setting, as files and the environment set it.

    Attributes:
        name: Its name as a keyword and in files.
        kind: Its valid values.
    """

    name: str
    kind: Kind

    @property
    def variable(self) -> str:
        """Name of the setting in the environment."""
        return PREFIX + self.name.upper()


SETTINGS: Final = tuple(Setting(name, field.__metadata__[0]) for name, field in Settings.__annotations__.items())
"""Every setting, in the order of the page."""

BY_NAME: Final = {one.name: one for one in SETTINGS}
"""Settings by name."""
