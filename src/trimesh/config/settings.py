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
        known: The right ones, for a text that goes on with `, got ...`.
        check: Returns a value as it is kept; raises ValueError, whose text is not used, for any other.
        read: Returns the value that a text of the environment stands for, not yet checked.
        unit: Of a number; else empty.
    """

    known: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any] = str
    unit: str = ""


def seconds(*, may_wait: bool = False, may_be_none: bool = False) -> Kind:
    """Return the kind of a time; infinite where `may_wait`, left to trimesh where `may_be_none`."""

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
            raise ValueError  # noqa: TRY004 - of one kind with the others: the text is made elsewhere
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

# Annotations are not texts here: a new process decodes the struct, and msgspec would compile each of them there.


PREFIX: Final = "TRIMESH_"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings: what each is, and what another value costs or gains.

    A line `Default:` has what counts if nothing is set, where the value does not show it.
    """

    grace: Annotated[float, seconds(may_wait=True)] = limits.GRACE_SECONDS
    """Time for clean-up when a block is left; a process that is not done by then is killed. For `grace=`.
    Leaving a block whose actors hang takes that long."""
    output: Annotated[str, choice("forward", "inherit", "discard")] = "forward"
    """Destination of the output of processes. For `output=`.
    `forward` adds coordinates and takes the controller some microseconds a line."""
    pickle: Annotated[str, choice("on", "off")] = "on"
    """Whether values are pickled in a family. For `pickle=` at its outermost block.
    `off` lets no byte be unpickled; values then travel by annotations, which endpoints must have."""
    preload: Annotated[tuple[str, ...], names()] = ()
    """Modules imported once, before processes are forked. For `preload=`.
    Their import delays the first mesh; each process is spared it, and shares the memory.
    Default: none."""
    abandon_after: Annotated[float | None, seconds(may_be_none=True)] = None
    """How long a caller that has cancelled waits for acknowledgements. For `options(abandon_after=)`.
    A shorter one returns sooner from hung actors, whose calls may still run.
    Default: `limits.CANCEL_ACK_SECONDS` seconds; `limits.STALLED_ACK_SECONDS` if all are known to be stalled."""
    stream_window: Annotated[int, items(limits.STREAM_WINDOW_MAX)] = limits.STREAM_WINDOW
    """Items that a generator endpoint may be ahead of its consumer. For `options(window=)` of `stream`.
    So many items of each member may wait in memory; few make a fast producer wait for the round trip."""
    map_window: Annotated[int, items(limits.STREAM_WINDOW_MAX)] = limits.MAP_WINDOW
    """Items of a `map` that may be under way. For its `window=`.
    So many items and results may wait in memory; fewer than members leave some idle."""
    stall_after: Annotated[float, seconds()] = limits.STALL_SECONDS
    """A Trio loop of a worker that stands still for so long is reported with its stack.
    A shorter time reports blocking code sooner, and long garbage collections, too."""
    spin: Annotated[str, choice("auto", "off")] = "auto"
    """Whether a process may spin on its links for a moment before it sleeps.
    `off` saves that processor time; a call takes 12 to 30 us more."""
    rdma: Annotated[tuple[str, ...], names("shm", "cma", "tcp", "ucx")] = ()
    """Carriers of bulk data, beside memory of the process itself; `cuda_ipc` needs `shm`.
    `tcp` listens on a port; a carrier that is left out may be the fastest.
    Default: all; `tcp` where no process may read another's memory."""
    rdma_address: Annotated[str, text("an IP address of this host", is_address=True)] = ""
    """Address at which a process listens for `tcp`.
    Any process that reaches the address can connect; only one that has a handle is served.
    Default: 127.0.0.1."""
    ucx: Annotated[str, text("a file or folder")] = ""
    """The library UCX (1.11 or newer), or its folder.
    Code of that file runs in every process.
    Default: `/opt/hpcx`, the system's, that of the package `libucx`."""
    host_id: Annotated[str, text()] = ""
    """Identity of this host: processes of one host reach each other's memory.
    Two identities make two hosts of one machine, which have only `tcp` and `ucx` between them.
    Default: made of its boot and its namespace of processes."""
    collectives: Annotated[str, text("an address, a network or an interface of each host")] = ""
    """Address at which ranks of tensors listen for those of other machines (`torch.distributed`): `eth0`, `10.0.0.0/8`.
    gloo and NCCL neither encrypt nor authenticate: name a trusted network.
    Default: none: ranks of several machines make no process groups; those of one use 127.0.0.1."""
    direct: Annotated[str, text('an address, a network or an interface of each host, or "off"')] = ""
    """Address at which a host's agent listens for other agents: `eth0`, `10.0.0.0/8`. For agents, as they start.
    `off`, or an address that others do not reach: messages between hosts go through the host of the program.
    Default: the address from which it reaches the program, unless that is a loopback address."""
    direct_advertise: Annotated[tuple[str, ...], names()] = ()
    """Addresses that other agents dial in place of that one, `host` or `host:port`, tried in order. For agents.
    Where none answers within a second, messages between the two go through the host of the program.
    Default: that address."""
    observe: Annotated[str, choice("on", "off")] = "on"
    """Whether the program has a control socket, for the command `trimesh`, while a block is open.
    `off`: a run that hangs is inspected only by `trimesh.dump` and signals. A socket costs 0.3 ms a block."""
    record: Annotated[str, choice("on", "off")] = "on"
    """Whether each process keeps a flight record, which `trimesh autopsy` reads when the run has died.
    `off`: nothing is left of a run that was killed. A record takes 0.5 us a call and 1 MB of disk a process."""
    progress: Annotated[str, choice("auto", "on", "off")] = "auto"
    """Whether starts of processes and jobs, and `map`, show their progress after two seconds.
    `auto` shows it where stderr is a terminal, and in notebooks; `on` writes a line to a log every ten seconds."""
    traceback: Annotated[str, choice("short", "full")] = "short"
    """Whether tracebacks leave out the frames of this library.
    `full` shows the way of an error through it: for bugs of trimesh, and for work on it."""
    debug: Annotated[str, choice("on", "post-mortem", "off")] = "on"
    """Whether `breakpoint()` in a worker, and with `post-mortem` errors of endpoints, wait for `trimesh debug`.
    Calls to a held worker wait, too. `off`: `breakpoint()` in a worker raises an error."""
    debug_wait: Annotated[float, seconds()] = limits.DEBUG_WAIT_SECONDS
    """Wait of a held worker for `trimesh debug`; then it goes on.
    A longer one leaves more time to attach; a shorter one costs an unattended run less."""
    job: Annotated[str, text("the name of a job of the file")] = ""
    """Table `[jobs.NAME]` of the file from which `trimesh.jobs.default()` makes a job.
    The same script then runs on the hosts of that job.
    Default: none: `LocalJob(1)`, one agent on this machine."""
    libssl: Annotated[str, text("a file")] = ""
    """The library of OpenSSL (3.0 or newer) that encrypts between hosts.
    Code of that file runs in every process that has links to other hosts.
    Default: the system's `libssl.so.3`."""
    native_lib: Annotated[str, text("a file")] = ""
    """A libtrimesh.so to load in place of the package's own.
    Code of that file runs in every process.
    Default: the package's."""


class Setting(msgspec.Struct, frozen=True):
    """One setting, as files and the environment give it.

    Attributes:
        name: As a keyword and in files.
        kind: Its values.
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
"""The same by name."""
