"""Running programs of this user on this machine, queried through their control sockets."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import trio

from trimesh import limits
from trimesh._runtime.control import RunClient, known_runs
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio
from trimesh._wire import observed
from trimesh.errors import ConnectError
from trimesh.observe.run_snapshot import RunSnapshot, merge, unanswered, with_records


class _Connection:
    """A connection to a run, closed when its block is left."""

    def __init__(self, client: RunClient) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()


class ObservedRun(_Connection):
    """A running program, as another one sees it. A context manager: leaving it ends the connection, not the run.

    Nothing here needs Trio; every method blocks the calling thread until the answer has come.

    Attributes:
        pid: Of its controller.
    """

    def __init__(self, client: RunClient) -> None:
        super().__init__(client)
        self.pid = client.pid

    def snapshot(self, *, seconds: float = 0.0, rows_max: int = limits.OBSERVED_ROWS) -> RunSnapshot:
        """Return what all processes of the run do.

        Args:
            seconds: For which processes may take to answer; 0.0 for the usual bound.
            rows_max: Rows of a table.

        Raises:
            ConnectError: It has ended, or does not answer.
        """
        answer = self._client.ask(observed.ControlRequest(kind="views", seconds=seconds))
        return merge(with_records(answer.views), time.time(), by=answer.by, rows_max=rows_max)

    def events(self, after: int = 0) -> Sequence[observed.EventRow]:
        """Return events of members that the controller owns, after event number `after`.

        Raises:
            ConnectError: It has ended, or does not answer.
        """
        return self._client.ask(observed.ControlRequest(kind="events", after=after)).events

    def output(self, after: int = 0) -> Sequence[observed.OutputRow]:
        """Return output lines after line number `after`, of processes whose `output` is "forward".

        The controller keeps the newest `limits.OBSERVED_OUTPUT_BYTES`; one answer has at most
        `limits.OBSERVED_OUTPUT_LINES`, the newest.

        Raises:
            ConnectError: It has ended, or does not answer.
        """
        return self._client.ask(observed.ControlRequest(kind="output", after=after)).output

    def kill(self, proc_id: str) -> None:
        """Kill a process of the run; its mesh handles the death by its policy.

        Args:
            proc_id: `ProcRow.id` of a process that the controller owns.

        Raises:
            ConnectError: There is no such process, or the run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="kill", target=proc_id))

    def cancel(self, call_id: str) -> None:
        """Have a call cancelled where it runs or waits; its caller gets a `RemoteCancelled`.

        Args:
            call_id: `CallRow.id` of a call to a process that the controller owns, or to the controller.

        Raises:
            ConnectError: There is no such call, or the run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="cancel", target=call_id))

    def holds(self) -> Sequence[observed.HoldRow]:
        """Return the threads that wait for a debugger, or have one, the oldest first.

        Raises:
            ConnectError: The run does not answer.
        """
        return self._client.ask(observed.ControlRequest(kind="holds")).holds

    def attach(self, hold_id: str) -> DebugTerminal:
        """Attach as the terminal of a held thread; this connection serves nothing else afterwards.

        Args:
            hold_id: `HoldRow.id`.

        Raises:
            ConnectError: It has ended, another terminal debugs in this run, or the run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="attach", target=hold_id))
        return DebugTerminal(self._client)

    def stop(self) -> None:
        """Do to the run what a Ctrl-C does.

        Raises:
            ConnectError: The run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="stop"))


class DebugTerminal(_Connection):
    """The terminal of one thread that is held. A context manager: leaving it, or `close`, lets the thread go on.

    Every method blocks; `hear` may be called in another thread than the others.
    """

    def hear(self) -> tuple[str, str] | None:
        """Wait for the next message of the debugger; return None when the run has ended.

        "output" and text; "prompt", when it waits for a line, and its text; "ended" and why.
        """
        heard = self._client.hear()
        return None if heard is None else (heard.said, heard.text)

    def say(self, line: str) -> None:
        """Answer a prompt.

        Args:
            line: Without its end.

        Raises:
            ConnectError: The run has ended.
        """
        self._client.say(observed.ControlRequest(kind="line", text=f"{line}\n"))


def runs() -> list[ObservedRun]:
    """Return the running programs of this user on this machine that can be asked; to be closed.

    Raises:
        ConnectError: Their folder belongs to another user, or others may enter it.
    """
    found = list[ObservedRun]()
    for pid, name in known_runs():
        with suppress(ConnectError):
            found.append(ObservedRun(RunClient(pid, name)))
    return found


def find_run(pid: int | None = None) -> ObservedRun:
    """Return a running program of this user on this machine.

    Args:
        pid: Of its controller; None for the only one there is.

    Raises:
        ConnectError: There is none, or more than one.
    """
    found = runs()
    if pid is not None:
        chosen = [one for one in found if one.pid == pid]
        if not chosen:
            known = ", ".join(str(one.pid) for one in found) or "none"
            _close(found)
            raise ConnectError(f"no run of this user has process {pid} as its controller; there are: {known}")
    else:
        chosen = found
        if len(found) != 1:
            known = ", ".join(str(one.pid) for one in found)
            _close(found)
            if not known:
                raise ConnectError("no run of this user has an open block on this machine")
            raise ConnectError(
                f"one run is expected, and {len(found)} of this user are there; name one by the pid of its controller, "
                f"--pid {found[0].pid} on the command line, find_run({found[0].pid}) in Python: {known}"
            )
    _close([one for one in found if one is not chosen[0]])
    return chosen[0]


def _close(some: Sequence[ObservedRun]) -> None:
    for one in some:
        one.close()


# ---- snapshots of the program itself ---------------------------------------------------------------------------------


async def snapshot(*, seconds: float = limits.OBSERVE_SECONDS, rows_max: int = limits.OBSERVED_ROWS) -> RunSnapshot:
    """Return a snapshot of this process and all that it owns.

    In a controller that is the whole run; in an actor, its process and those below it. All are queried in parallel. A
    process whose Trio loop does not run is queried by a signal and shown as "stuck", with its stack. One in which C
    code holds the GIL is shown as "silent", with its stack, too.

    Args:
        seconds: Time limit for the answers.
        rows_max: Maximum rows of a table; `cut` of the snapshot counts the omitted ones.

    Raises:
        RuntimeError: No mesh is open here.

    Blocking: a checkpoint; a few milliseconds if every loop runs, else at most `seconds`.
    """
    return await in_trio(_snapshot)(seconds, rows_max)


async def _snapshot(seconds: float, rows_max: int) -> RunSnapshot:
    await trio.lowlevel.checkpoint()
    views = await current_proc().inquiries.ask(seconds)
    if unanswered(views):
        views = await trio.to_thread.run_sync(with_records, views)
    return merge(views, time.time(), rows_max=rows_max)


async def watch(*, every: float = 1.0, rows_max: int = limits.OBSERVED_ROWS) -> AsyncGenerator[RunSnapshot, None]:
    """Yield snapshots again and again, the first at once.

    Args:
        every: Seconds between two.
        rows_max: As of `snapshot`.

    Raises:
        RuntimeError: No mesh is open here.
    """
    while True:
        yield await snapshot(rows_max=rows_max)
        await in_trio(trio.sleep)(every)
