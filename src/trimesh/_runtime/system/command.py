"""Run a command that leads a process group of its own, which ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from trimesh import limits
from trimesh._runtime.system.prctl import signal_group


async def run_process(
    command: Any,
    *,
    grace: float = limits.GRACE_SECONDS,
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as `trio.run_process` does, with all that it starts: none of it outlives the call.

    The command leads a process group of its own. When the call is cancelled, by its caller's cancel or deadline say,
    the group gets SIGTERM, and SIGKILL `grace` seconds later or when the command itself has ended. What is left of
    the group after the command has ended by itself is killed, too. A process that leaves the group, as daemons do,
    ends with the worker at the latest.

    Args:
        command: A list of arguments, or a string with `shell=True`.
        grace: Seconds from SIGTERM to SIGKILL.
        task_status: For `nursery.start(trimesh.run_process, ...)`, which returns the `trio.Process` once it runs.
        **options: As `trio.run_process` takes them: `capture_stdout=True`, `check=False`, `cwd=...`.

    Returns:
        What `trio.run_process` returns.

    Raises:
        subprocess.CalledProcessError: The command has failed, unless `check=False`.
        OSError: It could not be started.
        ValueError: `grace` is negative or no number.
        TypeError: An option says how to start a group, or how to deliver a cancel, which this function decides.

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
            # In the session of this process, by which the spawner knows what a worker has left behind.
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
    """The process group of one command; told of its start in place of who has asked to be."""

    def __init__(self, status: trio.TaskStatus[trio.Process]) -> None:
        self.nursery: trio.Nursery | None = None
        self._status = status
        self._process: trio.Process | None = None
        self._pidfd = -1

    def started(self, process: trio.Process) -> None:
        """Take the process, before anything waits for it, so that its number is its own."""
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        assert self.nursery is not None
        self.nursery.start_soon(self._end_with, process)
        self._status.started(process)

    async def _end_with(self, process: trio.Process) -> None:
        """Kill what is left once the command has ended: it may hold pipes open that are read to their end."""
        await process.wait()
        self.send(signal.SIGKILL)

    def send(self, signum: int) -> None:
        """Signal all processes of the group that are left."""
        process = self._process
        if process is None or signal_group(self._pidfd, signum):
            return
        # An older kernel: a number that was waited for is the group's for as long as no process has it.
        if process.returncode is None or not Path(f"/proc/{process.pid}").exists():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def end(self) -> None:
        """Kill what is left, and forget the group."""
        self.send(signal.SIGKILL)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._process, self._pidfd = None, -1


async def _deliver_cancel(group: _Group, grace: float, process: trio.Process) -> None:
    """Ask the group to end, then kill it; cancelled when the command has ended."""
    del process
    group.send(signal.SIGTERM)
    await trio.sleep(grace)
    group.send(signal.SIGKILL)
