"""Exit reports and their diagnosis; kernel state of live processes.

The spawner, as the parent, makes the reports; the owner of a process ends it (`child.end_child`).
"""

# Annotations are not texts here: msgspec would compile those of the report in every new process.

import logging
import os
import signal
import time
from pathlib import Path
from typing import Final, Self

from trimesh import limits
from trimesh._runtime.system.records import Count, Id, LostHost, Record
from trimesh.errors import ProcDied

_EVENTS_BYTES: Final = 4_096
"""Read size of the kernel's event counts, a file of some ten short lines."""

_PARENT_FIELD, _USER_FIELD, _SYSTEM_FIELD, _START_FIELD = (number - 3 for number in (4, 14, 15, 22))
"""Indexes into the result of `stat_of`."""

STOPPED: Final = ("T", "t")
"""States (`process_state`) of a process stopped by a signal or a debugger."""

_log: Final = logging.getLogger("trimesh.processes")


class ExitReport(Record, frozen=True):
    """End of one process: made by its spawner, and passed on unchanged to every reader.

    Attributes:
        proc_id: Its process id in the family.
        pid: Its pid, which may be in use again.
        exit_code: 0..255, or None after a signal or if nothing is known.
        signal: Number of the signal that ended it, or None.
        oom_killed: True when the kernel counted an out-of-memory kill in its memory group at that time.
        stderr_tail: Last `limits.STDERR_TAIL_BYTES` of its standard error; "" when there was none or it was inherited.
        ended_at: `time.monotonic_ns()` of the moment the exit was noticed; the same clock in all processes of a host.
        is_shown: Whether all its output was sent to be shown before this report.
        lost_host: The host that was lost with it; None if it has ended alone.
    """

    proc_id: Id
    pid: Count
    exit_code: int | None
    signal: int | None
    oom_killed: bool
    stderr_tail: str
    ended_at: int
    is_shown: bool = False
    lost_host: LostHost | None = None

    @classmethod
    def unknown(
        cls, proc_id: int, pid: int = 0, ended_at: int | None = None, lost_host: LostHost | None = None
    ) -> Self:
        """Return the report of a process that is gone for an unknown reason."""
        return cls(
            proc_id=proc_id,
            pid=pid,
            exit_code=None,
            signal=None,
            oom_killed=False,
            stderr_tail="",
            ended_at=time.monotonic_ns() if ended_at is None else ended_at,
            lost_host=lost_host,
        )

    @property
    def is_known(self) -> bool:
        """True if there is a diagnosis; without one the process is gone for an unknown reason."""
        return self.exit_code is not None or self.signal is not None or self.lost_host is not None

    def describe(self) -> str:
        """Return the end in a few words: `exit code 3`, `SIGKILL (out of memory)`."""
        if self.signal is not None:
            return f"{signal_name(self.signal)}{' (out of memory)' if self.oom_killed else ''}"
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        return "lost without a diagnosis"

    def error(
        self, message: str, *, maybe_executed: bool = True, by: str | None = None, record: str = "", reason: str = ""
    ) -> ProcDied:
        """Return the `ProcDied` of this end.

        Args:
            message: Text of the error, naming mesh and point.
            maybe_executed: For a call: False only if the message was certainly not delivered.
            by: "grace" if its owner ended it for exceeding the grace, "kill" if the user requested that.
            record: File of its flight record, or "".
            reason: See `ProcDied.reason`; "" for the text of this report.
        """
        found = "killed" if self.signal is not None else "exited" if self.exit_code is not None else "lost"
        return ProcDied(
            message,
            exit_code=self.exit_code,
            signal=self.signal,
            oom_killed=self.oom_killed,
            stderr_tail=self.stderr_tail,
            reason=reason or found,
            by=by,
            maybe_executed=maybe_executed,
            record=record,
        )


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; `signal 42` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def split_status(code: int, status: int) -> tuple[int | None, int | None]:
    """Return (exit code, signal), one of them None, from `si_code` and `si_status` of `waitid`."""
    return (status, None) if code == os.CLD_EXITED else (None, status)


def decode_tail(tail: bytes) -> str:
    """Return the last bytes of a stream as text, cut at the start of a character."""
    while tail and tail[0] & 0xC0 == 0x80:  # the middle of a UTF-8 sequence
        tail = tail[1:]
    return tail.decode(errors="replace")


# ---- out of memory ---------------------------------------------------------------------------------------


def parse_oom_kills(text: str) -> int | None:
    """Return the `oom_kill` count of cgroup v2's memory.events or v1's memory.oom_control, None without one."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def memory_event_paths(cgroups: str, mounts: str) -> list[str]:
    """Return the files that may hold the out-of-memory count of a process, best first.

    Args:
        cgroups: Text of `/proc/PID/cgroup`.
        mounts: Text of `/proc/PID/mountinfo`. In a container the cgroup's path may not exist below the mount; the
            mount itself is then the group of the container.
    """
    found = list[str]()
    for line in cgroups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_unified = controllers == ""
        if not is_unified and "memory" not in controllers.split(","):
            continue
        name = "memory.events" if is_unified else "memory.oom_control"
        for mount in _cgroup_mounts(mounts, "cgroup2" if is_unified else "cgroup", "" if is_unified else "memory"):
            inside = path if path.startswith("/") and not path.startswith("/..") else "/"
            found += [f"{mount}{inside.rstrip('/')}/{name}", f"{mount}/{name}"]
    return found


def _cgroup_mounts(mounts: str, kind: str, controller: str) -> list[str]:
    points = list[str]()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        columns, options = before.split(), after.split()
        if len(columns) < 5 or len(options) < 3 or options[0] != kind:
            continue
        if not controller or controller in options[2].split(","):
            points.append(columns[4])
    return points


class OomLedger:
    """Separates SIGKILLs of the out-of-memory killer from others by the kernel's count of them.

    Each counted kill explains one SIGKILL that follows within `limits.OOM_CLAIM_SECONDS`. A kill of a foreign process
    of the same group can be mistaken for one of ours in that window; the kernel gives no way to separate them.
    """

    def __init__(self, count: int, now: float) -> None:
        self._seen = count
        self._unclaimed = 0
        self._seen_at = now

    def observe(self, count: int, now: float) -> None:
        """Record the kernel's count."""
        if count > self._seen:
            self._unclaimed += count - self._seen
            self._seen_at = now
        elif now - self._seen_at > limits.OOM_CLAIM_SECONDS:
            self._unclaimed = 0
        self._seen = count

    def claim(self, count: int, now: float) -> bool:
        """Return whether a SIGKILL seen now is explained by the killer; each counted kill explains one."""
        self.observe(count, now)
        if self._unclaimed == 0:
            return False
        self._unclaimed -= 1
        return True


class OomWatch:
    """Reads the out-of-memory count of this process's memory group; silent where it cannot be read."""

    def __init__(self, now: float) -> None:
        self._fd = -1
        try:
            cgroups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        for name in memory_event_paths(cgroups, mounts):
            try:
                self._fd = os.open(name, os.O_RDONLY)
            except OSError:
                continue
            count = self._read()
            if count is not None:
                self._ledger = OomLedger(count, now)
                return
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> int | None:
        try:
            return parse_oom_kills(os.pread(self._fd, _EVENTS_BYTES, 0).decode("ascii", errors="replace"))
        except OSError:
            return None

    def explains_kill(self, now: float) -> bool:
        """Return whether a SIGKILL seen now was the out-of-memory killer's."""
        count = None if self._fd < 0 else self._read()
        return count is not None and self._ledger.claim(count, now)


# ---- processes that do not end ---------------------------------------------------------------------------


def stat_of(pid: int) -> list[str]:
    """Return the fields after the name, which may contain any character: proc_pid_stat(5) counts them from 3.

    Raises:
        OSError: There is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def cpu_seconds_of(pid: int) -> float:
    """Return the processor time of a process, that of its threads included; 0.0 if unknown."""
    try:
        fields = stat_of(pid)
        return (int(fields[_USER_FIELD]) + int(fields[_SYSTEM_FIELD])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def memory_of(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def process_state(pid: int) -> str:
    """Return the kernel's one-letter state of a process (R, S, D, T, Z, ...), or "" when it is gone."""
    try:
        return stat_of(pid)[0]
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since the boot of this machine; None if it has ended."""
    try:
        fields = stat_of(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[_START_FIELD])


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        return int(stat_of(pid)[_PARENT_FIELD])
    except OSError:
        return 0


def log_abandoned(name: str, pid: int) -> None:
    """Log that a process could not be ended (rule Z08)."""
    text = (
        "%s (pid %d, state %s) is still there after SIGKILL and is abandoned; the kernel ends it when it can, "
        "unless this process, which acts for user %d, may not signal it"
    )
    _log.error(text, name, pid, process_state(pid) or "gone", os.geteuid())
