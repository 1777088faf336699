"""The spawner's poll loop: requests of the family, exits of workers, their output, the end of the controller.

Invariants
    SP-1  Nothing here starts a thread or a Trio run; every fork is made by the only thread.
    SP-2  A worker whose launch was not answered with `Launched` is gone when `LaunchFailed` is sent.
    SP-3  Every worker that was `Launched` gets exactly one `Exited`, after it was reaped.
    SP-4  When the controller or its connection ends, every descendant is killed before the spawner exits.
    SP-5  Nothing here waits for a process of the family to read: records without room are queued, output is dropped.

The spawner: a small single-threaded process that forks workers, reaps them, and ends with its controller.

    controller --exec--> import for workers --> Ready --> poll loop until Stop or death

The client passes three arguments: the broker socket, the controller's pidfd, the controller's pid. Its program has
disabled the collector: imports leave no garbage worth collecting.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final, NoReturn

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.spawner import boot, wire
from trimesh._runtime.spawner.inheritance import privileges_of
from trimesh._runtime.spawner.socket import BrokerSocket, close_all
from trimesh._runtime.spawner.workers import (
    Children,
    Connection,
    ExitHistory,
    Orphans,
    OutputPipe,
    SpawnedWorker,
    prepare,
)
from trimesh._runtime.system import exits, linux
from trimesh._runtime.system.forks import carry_script, keep_trackers
from trimesh._runtime.system.output import OutputQueue
from trimesh.errors import ProtocolError

_BATCHES_IN_FLIGHT: Final = 2
_TEXT_CHARS_MAX: Final = 12_000
_END_POLL_MS: Final = 5

_SWEEP_SECONDS: Final = 0.005
"""Polling interval for an orphan that is executing another program, which takes it a millisecond."""

_Handler = Callable[[int], None]


class ForkedChild(BaseException):
    """Raised in the child after a fork, to leave the spawner's stack before anything else runs."""

    def __init__(self, start: boot.WorkerStart) -> None:
        self.start = start


def _wake(_signum: int, _frame: types.FrameType | None) -> None:
    """Handle SIGCHLD: the wakeup descriptor has already been written to."""


class Spawner:
    """The poll loop and its state."""

    def __init__(
        self,
        root: BrokerSocket,
        root_id: int,
        controller_pidfd: int,
        marker: linux.ProcessMarker,
        preload_env: Mapping[bytes, bytes],
        kept_fds: frozenset[int],
    ) -> None:
        self._root = Connection(root, root_id)
        self._controller_pidfd = controller_pidfd
        self._marker = marker
        self._preload_env = preload_env
        self._kept_fds = kept_fds
        self._pid = os.getpid()
        self._own_pidfd = os.pidfd_open(self._pid)
        self._poll = select.epoll()
        self._handlers: dict[int, _Handler] = {}
        self._connections: dict[int, Connection] = {root_id: self._root}
        self._members: dict[int, SpawnedWorker] = {}
        self._by_pid: dict[int, SpawnedWorker] = {}
        self._exits = ExitHistory()
        self._exit_waiters: dict[int, list[tuple[Connection, int]]] = {}
        self._foreign = ForeignQuestions(self._root, self._send)
        self._children = Children()
        self._orphans = Orphans(marker.family, self._children)
        self._sweep_again: float | None = None
        self._oom = exits.OomWatch(time.monotonic())
        self._output = OutputQueue()
        self._batches = 0
        self._is_retired = False
        self._is_ending = False
        self._handled_signals: tuple[int, ...] = ()
        self._wake_receiver, self._wake_sender = socket.socketpair()

    # ---- the loop ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the controller stops it, is gone, or needs no more workers; then end every descendant."""
        for end in (self._wake_receiver, self._wake_sender):
            end.settimeout(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, _wake)
        signal.signal(signal.SIGTERM, self._terminated)
        self._handled_signals = boot.handled_signals()
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        self._watch(self._wake_receiver.fileno(), self._signalled)
        self._watch(self._controller_pidfd, self._controller_died)
        self._watch_connection(self._root)
        self._send(self._root, wire.Ready())
        while not self._is_ending and (self._members or not self._is_retired):
            for fd, events in self._poll.poll(self._sweep_again):
                handler = self._handlers.get(fd)
                if handler is not None and not self._is_ending:
                    handler(events)
            if self._sweep_again is not None:
                self._sweep_orphans()
        self.end_family()

    def forget(self) -> None:
        """In a forked child: release everything; the descriptors are closed by number, once."""
        for connection in self._connections.values():
            connection.broker.forget()
        for member in self._members.values():
            member.broker.forget()
            member.pipes.clear()
        self._wake_receiver.detach()
        self._wake_sender.detach()
        self._poll.close()

    def _watch(self, fd: int, handler: _Handler, events: int = select.EPOLLIN) -> None:
        self._poll.register(fd, events)
        self._handlers[fd] = handler

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _terminated(self, _signum: int, _frame: types.FrameType | None) -> None:
        self._is_ending = True

    def _controller_died(self, _events: int) -> None:
        self._is_ending = True

    def _signalled(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        self._reap()

    # ---- connections -------------------------------------------------------------------------------------

    def _watch_connection(self, connection: Connection) -> None:
        self._watch(connection.broker.fileno(), lambda events: self._serve(connection, events))

    def _serve(self, connection: Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush(connection)
        if not events & ~select.EPOLLOUT:
            return
        try:
            while connection.is_open and not self._is_ending:
                received = connection.broker.receive()
                if received is None:
                    return
                if connection is self._root and isinstance(received.record, wire.Answer):
                    self._foreign.answered(received.record, received.fds)
                    continue
                close_all(received.fds)  # no request carries one
                self._handle(connection, received.record)
        except (EOFError, OSError, ProtocolError):
            self._drop(connection)

    def _send(self, connection: Connection, record: wire.AnyRecord, fds: tuple[int, ...] = ()) -> bool:
        """Send, or queue. The descriptors are given away.

        Returns:
            False when the record will never arrive.
        """
        if not connection.is_open:
            close_all(fds)
            return False
        try:
            connection.broker.send(record, fds)
        except OSError:
            self._drop(connection)
            return False
        self._await_room(connection)
        return True

    def _flush(self, connection: Connection) -> None:
        try:
            connection.broker.flush()
        except OSError:
            self._drop(connection)
            return
        self._await_room(connection)
        if connection is self._root:
            self._pump_output()

    def _await_room(self, connection: Connection) -> None:
        queued = connection.broker.queued
        if queued > limits.BROKER_QUEUE_RECORDS_MAX:
            self._drop(connection)
        elif connection.is_open and connection.awaits_room != (queued > 0):
            connection.awaits_room = queued > 0
            self._poll.modify(connection.broker.fileno(), select.EPOLLIN | (select.EPOLLOUT if queued else 0))

    def _drop(self, connection: Connection) -> None:
        """Disconnect a process. Losing the controller ends the spawner; a worker runs until it notices the loss."""
        if not connection.is_open:
            return
        connection.is_open = False
        self._unwatch(connection.broker.fileno())
        if connection is self._root:
            self._is_ending = True
            return
        self._connections.pop(connection.proc_id, None)
        connection.broker.close()
        member = self._members.get(connection.proc_id)
        if member is not None and not member.has_entered:
            # It can never enter. Most likely it is already ending, and its exit report will show why.
            member.signal_group(signal.SIGKILL)
            member.has_hung_up = True

    def _give_up(self, member: SpawnedWorker, reason: str) -> None:
        """End a worker that has not entered; `LaunchFailed` follows when it is reaped."""
        member.refusal = member.refusal or reason
        member.signal_group(signal.SIGKILL)

    # ---- requests ----------------------------------------------------------------------------------------

    def _handle(self, sender: Connection, record: wire.AnyRecord) -> None:
        member = self._members.get(sender.proc_id)
        if member is not None and not member.has_entered:
            self._handle_first_word(member, record)
            return
        match record:
            case wire.Launch():
                self._launch(sender, record)
            case wire.Signal():
                target = self._members.get(record.proc_id)
                if target is not None and (sender is self._root or target.owner is sender):
                    target.signal_group(record.signum)
            case wire.Connect():
                self._connect(sender, record)
            case wire.ExitOf():
                self._exit_of(sender, record)
            case wire.Flush() if sender is self._root:
                for pipe in [pipe for found in self._members.values() for pipe in found.pipes]:
                    pipe.drain()
                self._output.mark(record.request)
                self._pump_output()
            case wire.OutputTaken() if sender is self._root:
                self._batches = max(self._batches - 1, 0)
                self._pump_output()
            case wire.Retire() if sender is self._root:
                self._is_retired = True
            case wire.Stop() if sender is self._root:
                self._is_ending = True
            case _:
                raise ProtocolError(f"process {sender.proc_id:x} may not send {type(record).__name__} to the spawner")

    def _handle_first_word(self, member: SpawnedWorker, record: wire.AnyRecord) -> None:
        match record:
            case wire.Entered():
                self._entered(member)
            case wire.SetupRefused():
                member.refusal = record.text[:_TEXT_CHARS_MAX]
            case _:
                raise ProtocolError(f"a worker must first send Entered or SetupRefused, got {type(record).__name__}")

    def _connect(self, sender: Connection, record: wire.Connect) -> None:
        if record.source is not None and sender is not self._root:
            raise ProtocolError(f"only the controller may connect others, got Connect from {sender.proc_id:x}")
        target, source = self._connections.get(record.target), record.source or sender.proc_id
        if target is sender:
            self._send(sender, wire.ConnectFailed(record.request, "a process needs no connection to itself"))
            return
        if target is None:
            known = self._exits.get(record.target)
            if known is None and record.target not in self._members and self._foreign.may_ask(sender, record.target):
                self._foreign.connect(sender, record)
            else:
                self._send(sender, wire.ConnectFailed(record.request, "it has ended", is_gone=True, exit=known))
            return
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._send(sender, wire.ConnectFailed(record.request, f"the spawner has no descriptor left: {error}"))
            return
        is_of_root = target is self._root or (sender is self._root and record.source is None)
        is_far = record.is_far or (is_of_root and self._marker.family != self._root.proc_id)
        if self._send(target, wire.Incoming(source, is_far), (theirs.detach(),)):
            self._send(sender, wire.Connected(record.request, is_far), (ours.detach(),))
        else:
            ours.close()
            self._send(sender, wire.ConnectFailed(record.request, "it is ending", is_gone=True))

    def _exit_of(self, sender: Connection, record: wire.ExitOf) -> None:
        known = self._exits.get(record.proc_id)
        if record.proc_id in self._members:
            self._exit_waiters.setdefault(record.proc_id, []).append((sender, record.request))
        elif known is None and self._foreign.may_ask(sender, record.proc_id):
            self._foreign.exit_of(sender, record)
        else:
            self._send(sender, wire.ExitKnown(record.request, known))

    # ---- launching ---------------------------------------------------------------------------------------

    def _launch(self, owner: Connection, launch: wire.Launch) -> None:
        config = launch.config
        if config.root_id != self._root.proc_id or config.parent_id != owner.proc_id:
            raise ProtocolError("a process must launch workers as its own children, in its own family")
        if config.proc_id in self._members or config.proc_id in self._connections or self._exits.get(config.proc_id):
            raise ProtocolError(f"a process id must be launched once, got {config.proc_id:x} again")
        try:
            prepared = prepare(self._blank_start(owner, launch), owner, self._output)
        except OSError as error:
            self._send(
                owner, wire.LaunchFailed(launch.request, f"the spawner cannot open its pipes and sockets: {error}")
            )
            return
        member = prepared.member
        try:
            member.pid = os.fork()
        except OSError as error:
            prepared.close_child_half()
            member.close()
            self._send(owner, wire.LaunchFailed(launch.request, f"the spawner cannot fork: {error}"))
            return
        if member.pid == 0:
            member.broker.forget()  # the parent's half; closed by number with all others
            raise ForkedChild(prepared.start)
        prepared.close_child_half()
        self._adopt(member)

    def _adopt(self, member: SpawnedWorker) -> None:
        connection = Connection(member.broker, member.proc_id)
        self._members[member.proc_id] = self._by_pid[member.pid] = member
        self._connections[member.proc_id] = connection
        self._watch_connection(connection)
        for pipe in member.pipes:
            self._watch(pipe.fd, lambda _, pipe=pipe: self._read_output(pipe))  # type: ignore[misc]
        try:
            member.pidfd = os.pidfd_open(member.pid)
        except OSError as error:
            self._give_up(member, f"the spawner has no descriptor left for the process: {error}")

    def _blank_start(self, owner: Connection, launch: wire.Launch) -> boot.WorkerStart:
        parent = self._members.get(owner.proc_id)
        lifelines = (self._controller_pidfd, self._own_pidfd, *(() if parent is None else (parent.pidfd,)))
        return boot.WorkerStart(
            launch=launch,
            link=-1,
            broker=-1,
            lifelines=lifelines,
            stdout=None,
            stderr=None,
            kept=self._kept_fds,
            preload_env=self._preload_env,
            handled_signals=self._handled_signals,
            spawner_pid=self._pid,
            privileges=privileges_of(os.getppid() if parent is None else parent.pid),
            marker=self._marker,
        )

    def _entered(self, member: SpawnedWorker) -> None:
        if member.refusal is not None:  # it was given up during its set-up
            return
        try:
            pidfd = os.dup(member.pidfd)
        except OSError as error:
            self._give_up(member, f"the spawner has no descriptor left for the process: {error}")
            return
        member.has_entered = True
        owner = member.owner
        if not self._send(owner, wire.Launched(member.launch.request, member.pid), (pidfd, member.take_link())):
            member.signal_group(signal.SIGKILL)

    # ---- output ------------------------------------------------------------------------------------------

    def _read_output(self, pipe: OutputPipe) -> None:
        pipe.read()
        if pipe.is_ended:
            self._unwatch(pipe.fd)
            pipe.close()
        self._pump_output()

    def _pump_output(self) -> None:
        """Send batches to the controller while it keeps up; it acknowledges each, so notices never wait behind many."""
        while self._batches < _BATCHES_IN_FLIGHT and self._root.is_open and not self._root.broker.queued:
            item = self._output.take()
            if item is None:
                return
            if isinstance(item, int):
                self._send(self._root, wire.Flushed(item))
            else:
                self._batches += 1
                self._send(self._root, wire.Output(item))

    # ---- exits -------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reap every child that has ended: members with a report, orphans without."""
        are_orphans_due = False
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            member = self._by_pid.get(found.si_pid)
            if member is None:
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)
                self._orphans.reaped(found.si_pid)
            else:
                self._member_ended(member, *exits.split_status(found.si_code, found.si_status))
            are_orphans_due = True
        if are_orphans_due:
            self._sweep_orphans()
            self._pump_output()

    def _sweep_orphans(self) -> None:
        is_done = self._orphans.sweep({pid: member.proc_id for pid, member in self._by_pid.items()})
        self._sweep_again = None if is_done else _SWEEP_SECONDS

    def _member_ended(self, member: SpawnedWorker, exit_code: int | None, signum: int | None) -> None:
        connection = self._connections.get(member.proc_id)
        if connection is not None and not member.has_entered:
            self._serve(connection, select.EPOLLIN)  # its first record may still be unread
        member.signal_group(signal.SIGKILL)  # while it is a zombie its number, and its group's, are not used again
        ended_at = time.monotonic_ns()
        os.waitid(os.P_PID, member.pid, os.WEXITED)
        self._by_pid.pop(member.pid)
        self._members.pop(member.proc_id)
        for pipe in member.pipes:
            self._unwatch(pipe.fd)
            pipe.close()
        self._pump_output()  # its last lines go out before the report of its end, as far as there is room
        report = exits.ExitReport(
            proc_id=member.proc_id,
            pid=member.pid,
            exit_code=exit_code,
            signal=signum,
            oom_killed=signum == signal.SIGKILL and self._oom.explains_kill(time.monotonic()),
            stderr_tail=member.stderr_tail(),
            ended_at=ended_at,
            is_shown=not self._output,
        )
        self._exits.add(report)
        self._report(member, report)
        if connection is not None:
            self._drop(connection)
        member.close()
        for child in list(self._members.values()):
            if child.owner.proc_id == member.proc_id:
                child.signal_group(signal.SIGKILL)  # its owner is gone; its own lifeline would end it, too

    def _report(self, member: SpawnedWorker, report: exits.ExitReport) -> None:
        if member.has_entered:
            self._send(member.owner, wire.Exited(report))
            if member.owner is not self._root:
                self._send(self._root, wire.Exited(report))
        else:
            text = member.refusal
            if text is None and member.has_hung_up and report.signal == signal.SIGKILL:
                text = "it closed its connection to the spawner before it was set up"
            if text is None:
                how = report.describe()
                text = f"the process ended before it was set up ({how})\n{report.stderr_tail}".rstrip()
            self._send(member.owner, wire.LaunchFailed(member.launch.request, text))
        for connection, request in self._exit_waiters.pop(member.proc_id, ()):
            self._send(connection, wire.ExitKnown(request, report))

    # ---- the end -----------------------------------------------------------------------------------------

    def end_family(self) -> None:
        """Kill and reap every descendant, send the rest of the output (SP-4)."""
        deadline = time.monotonic() + limits.KILL_SECONDS
        for member in self._members.values():
            member.signal_group(signal.SIGKILL)
        waiter = select.poll()
        waiter.register(self._wake_receiver, select.POLLIN)
        while time.monotonic() < deadline:
            self._signalled(0)
            children = self._children.pids()
            if not children:
                break
            self._orphans.end(children)
            waiter.poll(_END_POLL_MS)
        self._send_rest(time.monotonic() + limits.KILL_SECONDS)

    def _send_rest(self, deadline: float) -> None:
        """Send queued records while the controller lives and reads."""
        waiter = select.poll()
        waiter.register(self._root.broker.fileno(), select.POLLOUT)
        waiter.register(self._controller_pidfd, select.POLLIN)
        self._batches = -(1 << 62)  # nothing waits behind the output any more
        while self._root.is_open and (self._output or self._root.broker.queued):
            self._flush(self._root)
            left = deadline - time.monotonic()
            events = dict(waiter.poll(max(left, 0) * 1000)) if self._root.broker.queued else {}
            if left <= 0 or self._controller_pidfd in events:
                return


# ---- questions of workers about processes that their spawner does not know -------------------------------------------

# They go to the controller, which queries its other spawners (`spawner/client`). The spawner passes the answer on.

Send = Callable[[Connection, wire.AnyRecord, tuple[int, ...]], bool]
"""Sends, or queues, a record with descriptors, which are given away; returns False when it will never arrive."""


class ForeignQuestions:
    """Unanswered questions; one entry for each request of a worker.

    Args:
        root: Connection of the controller.
    """

    def __init__(self, root: Connection, send: Send) -> None:
        self._root = root
        self._send = send
        self._numbers = count(1)
        self._asked: dict[int, tuple[Connection, int]] = {}

    def may_ask(self, sender: Connection, proc_id: int) -> bool:
        """Return whether the controller may know more about a process; it queries each spawner itself."""
        return sender is not self._root and proc_id != self._root.proc_id

    def connect(self, sender: Connection, question: wire.Connect) -> None:
        """Request a connection to a process of another spawner."""
        number = self._add(sender, question.request)
        self._send(self._root, wire.ForeignConnect(number, sender.proc_id, question.target), ())

    def exit_of(self, sender: Connection, question: wire.ExitOf) -> None:
        """Request the exit report of a process of another spawner."""
        self._send(self._root, wire.ForeignExitOf(self._add(sender, question.request), question.proc_id), ())

    def _add(self, sender: Connection, request: int) -> int:
        number = next(self._numbers)
        self._asked[number] = (sender, request)
        return number

    def answered(self, answer: wire.Answer, fds: tuple[int, ...]) -> None:
        """Pass on an answer of the controller. The descriptors are given away.

        Raises:
            ProtocolError: There was no such question.
        """
        asked = self._asked.pop(answer.request, None)
        if asked is None:
            close_all(fds)
            raise ProtocolError(f"the controller must answer pending questions only, got an answer to {answer.request}")
        sender, request = asked
        if isinstance(answer, wire.Connected) and not fds:
            self._send(sender, wire.ConnectFailed(request, "the spawner has no descriptor left"), ())
        else:
            self._send(sender, msgspec.structs.replace(answer, request=request), fds)


# ---- main ------------------------------------------------------------------------------------------------------------

EXIT_FATAL: Final = 70
"""Exit code after an error of the spawner itself, or of a module that it imports on request."""

_THREAD_PROBES: Final = 20
_THREAD_PROBE_SECONDS: Final = 0.005


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the spawner, and the worker in each child that it forks."""
    socket_fd, controller_pidfd, controller_pid = (int(argument) for argument in arguments)
    marker = linux.ProcessMarker()
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != controller_pid:
        os._exit(EXIT_FATAL)
    for fd in (socket_fd, controller_pidfd):
        os.set_inheritable(fd, False)  # noqa: FBT003
    root = BrokerSocket(socket.socket(fileno=socket_fd))
    spawner: Spawner | None = None
    try:
        spawner = _start(root, controller_pidfd, marker)
        spawner.run()
    except ForkedChild as child:
        assert spawner is not None
        spawner.forget()
        start = child.start
    except BaseException as error:  # noqa: BLE001 - the last frame of the process; reported to the controller
        _fail(root, spawner, error)
    else:
        os._exit(0)
    del spawner, root
    boot.run_forked(start)


def _fail(root: BrokerSocket, spawner: Spawner | None, error: BaseException) -> NoReturn:
    text = str(error) if isinstance(error, boot.RefusalError) else "".join(traceback.format_exception(error))
    with contextlib.suppress(BaseException):
        root.send(wire.Fatal(text[-_TEXT_CHARS_MAX:]))
    with contextlib.suppress(BaseException):
        if spawner is not None:
            spawner.end_family()
    os._exit(EXIT_FATAL)


def _start(root: BrokerSocket, controller_pidfd: int, marker: linux.ProcessMarker) -> Spawner:
    linux.become_subreaper()
    linux.set_process_name("trimesh-spawner")
    _raise_descriptor_limit()
    hello = _wait_hello(root, controller_pidfd)
    marker.family = hello.agent or hello.root_id
    marker.write(marker.family)
    keep_trackers()
    carry_script()
    own_fds, env = _open_fds(), dict(os.environb)
    for name in hello.modules:
        boot.import_preload(name)
        check_forkable(name)
    load_native()
    kept_fds = frozenset(_open_fds() - own_fds)
    preload_env = {name: value for name, value in os.environb.items() if env.get(name) != value}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # From here on workers may exist, and only this process can end all of them: it must detect the controller's death
    # itself. The signal merely continues a stopped spawner.
    linux.set_parent_death_signal(signal.SIGCONT)
    gc.freeze()  # the collector of a worker does not touch, and so does not copy, shared objects
    gc.enable()
    return Spawner(root, hello.root_id, controller_pidfd, marker, preload_env, kept_fds)


def load_native() -> None:
    """Load the native library for all workers that are going to use it; that starts no thread."""
    if "trimesh._native.lib" in sys.modules:
        from trimesh._native import lib  # noqa: PLC0415 - not otherwise

        with contextlib.suppress(lib.NativeLibraryError):  # a worker that needs it will report that
            lib.load()


def _raise_descriptor_limit() -> None:
    """Raise the descriptor limit as far as possible: about eight a worker. Workers get their caller's limit back."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _wait_hello(root: BrokerSocket, controller_pidfd: int) -> wire.Hello:
    waiter = select.poll()
    waiter.register(root.fileno(), select.POLLIN)
    waiter.register(controller_pidfd, select.POLLIN)
    while True:
        if controller_pidfd in dict(waiter.poll()):
            os._exit(EXIT_FATAL)
        received = root.receive()
        if received is not None:
            if isinstance(received.record, wire.Hello):
                return received.record
            raise ProtocolError(f"the controller's first record must be Hello, got {type(received.record).__name__}")


def _open_fds() -> set[int]:
    found = set[int]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found


def check_forkable(name: str) -> None:
    """Check that this process can still be forked after the import of `name` (rule O2).

    Raises:
        RefusalError: The module started a thread, CUDA, or Trio.
    """
    problem = None
    torch: Any = sys.modules.get("torch")
    threads = _thread_count()
    if trio.lowlevel.in_trio_run():
        problem = "it runs Trio"
    elif torch is not None and torch.cuda.is_initialized():
        problem = "it has initialised CUDA"
    elif threads != 1:
        problem = f"it has started {threads - 1} thread(s)"
    if problem is not None:
        raise boot.RefusalError(
            f"a preloaded module must leave the process fit to be forked, but after importing {name!r} {problem}; "
            "leave it out of preload=, or write python=sys.executable to start processes by exec"
        )


def _thread_count() -> int:
    """Count threads; one that has just ended may be seen for a moment."""
    count = 1
    for _ in range(_THREAD_PROBES):
        count = len(os.listdir("/proc/self/task"))
        if count == 1:
            break
        time.sleep(_THREAD_PROBE_SECONDS)
    return count
