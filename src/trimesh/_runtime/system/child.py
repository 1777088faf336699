"""Child processes: the specification of a launch, and the handle of its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.system import linux, records
from trimesh._runtime.system.exits import ExitReport, log_abandoned
from trimesh._runtime.system.linux import signal_group
from trimesh._runtime.system.output import MODES
from trimesh.config import Settings
from trimesh.ids import ProcId

OutputMode = Literal["forward", "inherit", "discard"] | os.PathLike[str]
ExitHook = Callable[[ExitReport], None]

_NEWS_PARTS: Final = 4


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start.

    Attributes:
        proc_id: Its process id, drawn by the caller, never used before.
        mesh: Name of the process mesh.
        labels, sizes, rank: Extent of the mesh as spawned, and the place in it.
        incarnation: 0 for the first process at this point, one more for each restart.
        grace: Seconds for clean-up, passed to the worker.
        env: Variables on top of the caller's environment.
        cwd: Working directory; None is the caller's.
        output: "forward" (lines to the controller's streams, with coordinates), "inherit" (its streams as they are),
            "discard", or a path to append both streams to.
        python: Interpreter to execute; None forks the spawner.
        preload: Modules imported before the worker enters.
        cpus: CPUs that it is restricted to; empty for those of the spawner.
        entry: `module:function` that is called as `(config, link, broker, lifelines) -> exit code`.
        pickled: Whether values are pickled in its family.
        extra: Opaque bytes for the worker.
        is_far: Whether the requesting process is on another host.
        record: Folder of the flight records of its run; empty for none.
        share: Its share of the host; None outside of placements.
    """

    proc_id: ProcId
    mesh: str
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    rank: int = 0
    incarnation: int = 0
    seed: int = 0
    grace: float = limits.GRACE_SECONDS
    env: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    cwd: str | None = None
    output: OutputMode = "forward"
    python: str | None = None
    preload: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    entry: str = records.ENTRY
    pickled: bool = True
    settings: Settings = Settings()
    extra: bytes = b""
    is_far: bool = False
    record: str = ""
    share: records.HostShare | None = None


async def wait_for_news(wait: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Wait at most `seconds` for news of an end.

    The time is counted in parts: if this very process is stopped meanwhile (SIGSTOP), that uses up only one part.
    """
    for _ in range(_NEWS_PARTS):
        with trio.move_on_after(seconds / _NEWS_PARTS):
            await wait()
            return


class Child:
    """A process that this one has launched and owns.

    Attributes:
        proc_id: Its process id in the family.
        name: Mesh and coordinates, for texts.
        pid: Its pid; it leads a session and a process group of the same number.
        pidfd: Open until `close`.
        link: The owner's end of the stream socket to it. `link.detach()` takes its descriptor.
        report: Its exit report, once it has ended.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        pid: int,
        pidfd: int,
        link: socket.socket,
        *,
        on_exit: ExitHook | None,
        signal_by_spawner: Callable[[ProcId, int], None],
    ) -> None:
        self.proc_id = spec.proc_id
        self.name = name_of(spec)
        self.pid = pid
        self.pidfd = pidfd
        self.link = link
        self.report: ExitReport | None = None
        self._on_exit = on_exit
        self._closes_at_end = False
        self._exited = trio.Event()
        self._signal_by_spawner = signal_by_spawner

    def __repr__(self) -> str:
        state = "running" if self.report is None else self.report.describe()
        return f"<Child {self.name} pid={self.pid} {state}>"

    async def wait_exited(self) -> ExitReport:
        """Wait until it has ended and return its report.

        Blocking: checkpoint. At most `limits.EXIT_REPORT_SECONDS` after the end, also when the spawner is silent.
        """
        await self._exited.wait()
        assert self.report is not None
        return self.report

    def signal(self, signum: int) -> None:
        """Signal its whole process group; never blocks. Does nothing once it was reported."""
        if self.report is None and not linux.signal_group(self.pidfd, signum):
            self._signal_by_spawner(self.proc_id, signum)  # its parent can, on every kernel, without a race

    def close(self) -> None:
        """Close `pidfd`, and `link` unless it was detached. Idempotent; called after the report."""
        self.link.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def close_at_end(self) -> None:
        """Close it when its report arrives, before the hook is called; now if it has arrived."""
        self._closes_at_end = True
        if self.report is not None:
            self.close()

    def finish(self, report: ExitReport) -> None:
        """Set its exit report; the first one counts (LA-2). Called by the launcher."""
        if self.report is None:
            self.report = report
            if self._closes_at_end:
                self.close()
            if self._on_exit is not None:
                self._on_exit(report)
            self._exited.set()

    def disown(self) -> None:
        """Drop the hook: the launch did not succeed."""
        self._on_exit = None


def config_of(spec: LaunchSpec, parent_id: ProcId, root_id: ProcId) -> records.WorkerConfig:
    return records.WorkerConfig(
        proc_id=spec.proc_id,
        parent_id=parent_id,
        root_id=root_id,
        mesh=spec.mesh,
        labels=spec.labels,
        sizes=spec.sizes,
        rank=spec.rank,
        incarnation=spec.incarnation,
        seed=spec.seed,
        grace=spec.grace,
        pickled=spec.pickled,
        settings=spec.settings,
        extra=spec.extra,
        share=spec.share,
        is_far=spec.is_far,
        record=spec.record,
    )


def name_of(spec: LaunchSpec) -> str:
    """Return mesh and coordinates for messages."""
    return records.member_name(config_of(spec, spec.proc_id, spec.proc_id))


def checked_output(output: Any) -> OutputMode:
    """Return an `output` value of one process.

    Raises:
        ValueError: It is invalid; a word that is not a mode may be a file name, or a misspelt mode.
    """
    if isinstance(output, os.PathLike) or output in MODES:
        return cast("OutputMode", output)
    modes = ", ".join(f'"{mode}"' for mode in MODES)
    meant = f"; for a file of this name write pathlib.Path({output!r})" if isinstance(output, str) else ""
    raise ValueError(
        f"output must be {modes} or a path, or a function of the point that returns one, got {output!r}{meant}"
    )


def output_of(output: OutputMode) -> tuple[str, bytes]:
    """Return mode and path of an `output` value.

    Raises:
        ValueError: It is invalid.
    """
    output = checked_output(output)
    return (output, b"") if isinstance(output, str) else ("file", os.fsencode(Path(output).absolute()))


@trio.lowlevel.enable_ki_protection
async def end_child(
    child: Child,
    *,
    term_seconds: float = limits.TERM_SECONDS,
    kill_seconds: float = limits.KILL_SECONDS,
) -> ExitReport | None:
    """End a process and its group: SIGTERM, `term_seconds`, SIGKILL, `kill_seconds`.

    A stopped process is continued first, so that SIGTERM reaches it. Runs shielded: it is bounded by its own arguments.

    Args:
        child: A process of this one.
        term_seconds: 0 goes straight to SIGKILL.
        kill_seconds: A process that is still there afterwards is stuck in the kernel (D state); it is logged and
            abandoned. It ends by itself as soon as the kernel lets it.

    Returns:
        Its report, or None when it was abandoned.

    Blocking: checkpoint, at most the sum of both bounds.
    """
    with trio.CancelScope(shield=True):
        if child.report is None and term_seconds > 0:
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)
            with trio.move_on_after(term_seconds):
                return await child.wait_exited()
        child.signal(signal.SIGKILL)
        with trio.move_on_after(kill_seconds):
            return await child.wait_exited()
    log_abandoned(child.name, child.pid)
    return None


def checked_variables(given: Any, what: str) -> dict[str, str]:
    """Return variables of an environment; an empty dict for None.

    Args:
        given: Value from the user.
        what: Its name in errors.

    Raises:
        TypeError: It is not a mapping, or a name or a value is not text.
        ValueError: The system allows no such name or value in an environment.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a mapping of names to strings, got {given!r}")
    found: dict[str, str] = {}
    entries: dict[Any, Any] = {**given}
    for name, value in entries.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of {what} must be strings, got {name!r}")
        if not isinstance(value, str | bytes | os.PathLike):
            text = f"{name!r}: {str(value)!r}"
            raise TypeError(f"the values of {what} must be strings, got {name}={value!r}: write {text}")
        text = os.fsdecode(cast("str", value))
        if not name or "=" in name or "\0" in name or "\0" in text:
            raise ValueError(f"{what} must have names without '=' and no NUL characters, got {name!r}: {text!r}")
        found[name] = text
    return found


# ---- run a command in a process group of its own, which ends with it -------------------------------------------------


async def run_process(
    command: Any,
    *,
    grace: float = limits.GRACE_SECONDS,
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as `trio.run_process` does; no process that it starts outlives the call.

    The command leads a process group of its own. A cancel of the call, by its caller or by a deadline, sends SIGTERM to
    the group, and SIGKILL `grace` seconds later or when the command itself has ended. After the command has ended by
    itself, the rest of its group is killed, too. A process that leaves the group, as daemons do, ends with the worker
    at the latest.

    Args:
        command: A list of arguments, or a string with `shell=True`.
        grace: Seconds from SIGTERM to SIGKILL.
        task_status: For `nursery.start(trimesh.run_process, ...)`, which returns the `trio.Process` once it runs.
        **options: Options of `trio.run_process`, such as `capture_stdout=True`, `check=False`, `cwd=...`.

    Returns:
        The result of `trio.run_process`.

    Raises:
        subprocess.CalledProcessError: The command has failed, unless `check=False`.
        OSError: It could not be started.
        ValueError: `grace` is negative, or not a number.
        TypeError: An option sets how a group is started or a cancel delivered, which this function decides.

    Blocking: a checkpoint, cancellable; a cancel returns when the group has ended, at most about `grace` later.
    """
    if not grace >= 0:
        raise ValueError(f"grace must be seconds, at least 0, got {grace!r}")
    for name in ("deliver_cancel", "start_new_session", "process_group", "preexec_fn"):
        if name in options:
            raise TypeError(f"run_process decides {name}= itself: leave it out, or use trio.run_process")
    group = _Group(task_status)
    done: list[subprocess.CompletedProcess[bytes] | BaseException] = []
    async with trio.open_nursery() as nursery:
        group.nursery = nursery
        try:
            # In the session of this process, by which the spawner recognises leftovers of a worker.
            options |= {"process_group": 0, "deliver_cancel": partial(_deliver_cancel, group, grace)}
            done.append(await trio.run_process(command, task_status=cast("Any", group), **options))
        except BaseException as error:  # noqa: BLE001 - raised again below: a nursery would wrap it
            done.append(error)
        finally:
            nursery.cancel_scope.cancel(reason="the command has ended")
            group.end()
    [result] = done
    if isinstance(result, BaseException):
        try:
            raise result
        finally:
            del result, done
    return result


class _Group:
    """The process group of one command; receives its start before the caller's `task_status` does."""

    def __init__(self, status: trio.TaskStatus[trio.Process]) -> None:
        self.nursery: trio.Nursery | None = None
        self._status = status
        self._process: trio.Process | None = None
        self._pidfd = -1

    def started(self, process: trio.Process) -> None:
        """Record the process before anything waits for it, so that its pid cannot have been reused."""
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        assert self.nursery is not None
        self.nursery.start_soon(self._end_with, process)
        self._status.started(process)

    async def _end_with(self, process: trio.Process) -> None:
        """Kill the rest of the group once the command has ended, as it may hold pipes open that are being read."""
        await process.wait()
        self.send(signal.SIGKILL)

    def send(self, signum: int) -> None:
        """Signal all processes of the group that are left."""
        process = self._process
        if process is None or signal_group(self._pidfd, signum):
            return
        # An older kernel: the pid of a reaped command is still the group's unless a new process has it.
        if process.returncode is None or not Path(f"/proc/{process.pid}").exists():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def end(self) -> None:
        """Kill the rest of the group, and forget it."""
        self.send(signal.SIGKILL)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._process, self._pidfd = None, -1


async def _deliver_cancel(group: _Group, grace: float, process: trio.Process) -> None:
    """Send SIGTERM to the group, SIGKILL after `grace`; cancelled when the command has ended."""
    del process
    group.send(signal.SIGTERM)
    await trio.sleep(grace)
    group.send(signal.SIGKILL)
