"""Running programs of this user on this machine, queried through their control sockets."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from types import TracebackType
from typing import Self

import trio

from trimesh import limits
from trimesh._runtime.control import RunClient, known_runs
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio
from trimesh._wire import observed
from trimesh.errors import ConnectError
from trimesh.observe.run_snapshot import RunSnapshot, merge, recorded_runs, unanswered, with_records


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
    """Connection to a running program of this user. A context manager: leaving it ends the connection, not the run.

    No method needs Trio; each blocks the calling thread until the answer arrives.

    Attributes:
        pid: Process id of its controller.
    """

    def __init__(self, client: RunClient) -> None:
        super().__init__(client)
        self.pid = client.pid

    def snapshot(self, *, seconds: float = 0.0, rows_max: int = limits.OBSERVED_ROWS) -> RunSnapshot:
        """Return a snapshot of all processes of the run.

        Args:
            seconds: Time limit for answers of processes; 0.0 for the usual one.
            rows_max: Maximum rows of a table.

        Raises:
            ConnectError: The run has ended, or does not answer.
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

    def samples(self, after: int = 0) -> tuple[int, Sequence[observed.SampleRow]]:
        """Return the number of the newest sample of metrics, and the samples after sample number `after`.

        The controller collects them once a second while it is asked, and keeps the newest
        `limits.METRIC_SAMPLES_COLLECTED`; one answer has at most `limits.METRIC_SAMPLES_ANSWERED`, the newest.

        Raises:
            ConnectError: It has ended, does not answer, or its Trio loop is blocked.
        """
        answer = self._client.ask(observed.ControlRequest(kind="samples", after=after))
        return answer.number, answer.samples

    def kill(self, proc_id: str) -> None:
        """Kill a process of the run; its mesh handles the death by its policy.

        Args:
            proc_id: `ProcRow.id` of a process that the controller owns.

        Raises:
            ConnectError: There is no such process, or the run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="kill", target=proc_id))

    def cancel(self, call_id: str) -> None:
        """Cancel a call where it runs or waits; its caller gets a `RemoteCancelled`.

        Args:
            call_id: `CallRow.id` of a call to a process that the controller owns, or to the controller.

        Raises:
            ConnectError: There is no such call, or the run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="cancel", target=call_id))

    def holds(self) -> Sequence[observed.HoldRow]:
        """Return the threads that are held for a debugger, the oldest first.

        Raises:
            ConnectError: The run does not answer.
        """
        return self._client.ask(observed.ControlRequest(kind="holds")).holds

    def attach(self, hold_id: str) -> DebugTerminal:
        """Attach as the terminal of a held thread; this connection serves nothing else afterwards.

        Args:
            hold_id: `HoldRow.id`.

        Raises:
            ConnectError: The thread has gone on, another terminal is attached in this run, or the run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="attach", target=hold_id))
        return DebugTerminal(self._client)

    def stop(self) -> None:
        """Interrupt the run, as Ctrl-C does.

        Raises:
            ConnectError: The run does not answer.
        """
        self._client.ask(observed.ControlRequest(kind="stop"))


class DebugTerminal(_Connection):
    """The terminal of one held thread. A context manager: leaving it, or `close`, lets the thread go on.

    Every method blocks; `hear` may run in another thread than the others.
    """

    def hear(self) -> tuple[str, str] | None:
        """Wait for the next message of the debugger: a kind and a text; return None when the run has ended.

        Kinds are "output"; "prompt", when it waits for a line; and "ended", with the reason.
        """
        heard = self._client.hear()
        return None if heard is None else (heard.said, heard.text)

    def say(self, line: str) -> None:
        """Answer a prompt.

        Args:
            line: The line, without a line break.

        Raises:
            ConnectError: The run has ended.
        """
        self._client.say(observed.ControlRequest(kind="line", text=f"{line}\n"))

    def leave(self) -> None:
        """Detach at a prompt; the thread stays held, for the next terminal. `hear` then returns "ended".

        Raises:
            ConnectError: The run has ended.
        """
        self._client.say(observed.ControlRequest(kind="leave"))


def runs() -> list[ObservedRun]:
    """Return the running programs of this user on this machine that accept connections. Close each of them.

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
        pid: Process id of its controller; None for the only run.

    Raises:
        ConnectError: There is none, or more than one.
    """
    found = runs()
    if pid is not None:
        chosen = [one for one in found if one.pid == pid]
        if not chosen:
            text = _not_found(pid, found)
            _close(found)
            raise ConnectError(text)
    else:
        chosen = found
        if len(found) != 1:
            known = ", ".join(str(one.pid) for one in found)
            _close(found)
            if not known:
                raise ConnectError("no run of this user has an open block on this machine")
            raise ConnectError(
                f"a run must be named by the pid of its controller if there are several, got none of {known}: write "
                f"--pid {found[0].pid} on the command line, find_run({found[0].pid}) in Python"
            )
    _close([one for one in found if one is not chosen[0]])
    return chosen[0]


def _not_found(pid: int, found: Sequence[ObservedRun]) -> str:
    """Return an error text for a pid that is no controller's: whose it is, or the pids that there are."""
    text = f"no run of this user has process {pid} as its controller"
    for one in found:
        with suppress(ConnectError):
            name = next((proc.name for proc in one.snapshot().procs if proc.pid == pid), None)
            if name is not None:
                return f"{text}; it is {name} of run {one.pid}: write --pid {one.pid}"
    with suppress(ConnectError):
        if pid in {folder.pid for folder in recorded_runs()}:
            return f"{text}; run {pid} has ended: trimesh autopsy {pid} shows how"
    pids = [str(one.pid) for one in found]
    meant = "".join(f"; did you mean {one}?" for one in get_close_matches(str(pid), pids, n=1))
    return f"{text}; their controllers: {', '.join(pids) or 'none'}{meant}"


def _close(some: Sequence[ObservedRun]) -> None:
    for one in some:
        one.close()


# ---- snapshots of the program itself ---------------------------------------------------------------------------------


async def snapshot(*, seconds: float = limits.OBSERVE_SECONDS, rows_max: int = limits.OBSERVED_ROWS) -> RunSnapshot:
    """Return a snapshot of this process and all processes that it owns.

    In a controller that is the whole run; in an actor, its process and those below it. All are queried in parallel. A
    process whose Trio loop does not run is queried by a signal and shown as "stuck", with its stack. One in which C
    code holds the GIL is shown as "silent", also with its stack.

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
    """Yield snapshots at an interval, the first at once.

    Args:
        every: Interval in seconds.
        rows_max: See `snapshot`.

    Raises:
        RuntimeError: No mesh is open here.
    """
    while True:
        yield await snapshot(rows_max=rows_max)
        await in_trio(trio.sleep)(every)
