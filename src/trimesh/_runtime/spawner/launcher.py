"""Process launcher, under Trio: the controller's and workers' interface to the spawner.

    async with open_spawner(root_id) as launcher:          # the controller; attach_launcher(...) in a worker
        child = await launcher.launch(spec)
        child.link                                         # our end of a stream socket to it
        report = await child.wait_exited()

Invariants
    LA-1  A launch that does not return leaves no process: not when it fails, not when it is cancelled.
    LA-2  Each child gets exactly one report, with a diagnosis or without; its hook runs before any waiter wakes.
    LA-3  When `open_spawner` is left, the spawner and everything below it is gone and reaped.
    LA-4  Nothing waits for ever for a silent spawner: pidfds show exits too, and at the end it is killed.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

import trio

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.boot import own_prefixes
from trimesh._runtime.spawner.client import Siblings, SpawnerClient, SpawnerLostError
from trimesh._runtime.spawner.socket import BrokerSocket, Received, close_all, stream_of
from trimesh._runtime.spawner.spawner_process import SpawnerProcess
from trimesh._runtime.system import exits, linux, records
from trimesh._runtime.system.child import (
    Child,
    ExitHook,
    LaunchSpec,
    config_of,
    end_child,
    name_of,
    output_of,
    wait_for_news,
)
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.forks import ForgottenInChildren
from trimesh._runtime.system.linux import refusals
from trimesh.config import current
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import LimitExceeded, LinkLost, SpawnError
from trimesh.ids import ProcId

IncomingHook = Callable[[ProcId, socket.socket], None]

_MODULES: Final = {records.ENTRY: ("trimesh._runtime.life.local_host", "trimesh._runtime.life.ownership")}
"""Modules that an entry imports later, so the spawner imports them before the fork: transport, meshes of actors."""


class ProcLauncher:
    """Starts processes, connects them, reports how they ended. Made by `open_spawner` or `attach_launcher`.

    Attributes:
        proc_id, root_id: This process, and the controller of the family.
    """

    def __init__(
        self,
        broker: BrokerSocket,
        *,
        proc_id: ProcId,
        root_id: ProcId,
        incoming: IncomingHook | None,
        python: str | None = None,
        preload: tuple[str, ...] = (),
        siblings: Siblings | None = None,
        spawner_pid: int = 0,
    ) -> None:
        self.proc_id = proc_id
        self.root_id = root_id
        self._python = python
        self._preload = preload
        self._incoming = incoming
        self._children: dict[ProcId, Child] = {}
        self._unclosed = set[Child]()
        self._exit_poll = select.epoll()  # may fail: nothing else refers to this one yet
        self._client = SpawnerClient(broker, on_notice=self._noticed, on_lost=self._lost)
        self._siblings = siblings or Siblings()
        self._tasks: trio.Nursery | None = None
        self._siblings.add(self._client, spawner_pid)
        self._seen_ended = set[int]()
        self._ready = trio.Event()
        self._is_retired = False
        self._is_stopping = False
        self._watch_scope = trio.CancelScope(shield=True)

    # ---- public ------------------------------------------------------------------------------------------

    async def launch(self, spec: LaunchSpec, *, on_exit: ExitHook | None = None) -> Child:
        """Start a process and return it once it runs its entry.

        Several launches may be on their way at once. The new process takes over this one's environment, working
        directory, `sys.path`, `sys.argv`, warning filters, umask and limits as they are now (rule O2).

        Args:
            spec: What to start.
            on_exit: Called with the report when it has ended, before tasks that wait for its end. Must not raise.

        Raises:
            SpawnError: It could not be started; the text names mesh, point and cause. No process is left (LA-1).

        Blocking: checkpoint, at most the setting `spawn_seconds`. A cancel first kills and reaps the process.
        """
        name = name_of(spec)
        if self._is_stopping or self._is_retired:
            await trio.lowlevel.checkpoint()
            raise SpawnError(f"cannot start {name}: the block that its spawner belongs to is stopping")
        started = list[Child]()

        def answered(received: Received) -> None:
            child = self._take_launched(spec, received, on_exit)
            if child is not None:
                started.append(child)

        failure = f"it did not begin to run within the setting spawn_seconds ({current().spawn_seconds:g} s)"
        try:
            with trio.move_on_after(current().spawn_seconds):
                received = await self._client.ask(lambda request: self._request_of(spec, request), answered)
                if isinstance(received.record, wire.LaunchFailed):
                    raise SpawnError(f"cannot start {name}: {received.record.text}")
                if started:
                    return started[0]
                failure = "this process has no descriptor left for it (see ulimit -n)"
        except (SpawnerLostError, OSError, LimitExceeded) as error:
            raise SpawnError(f"cannot start {name}: {error}") from None
        except trio.Cancelled:
            await self._take_back(spec.proc_id, started)
            raise
        await self._take_back(spec.proc_id, started)
        raise SpawnError(f"cannot start {name}: {failure}")

    async def connect(self, target: ProcId, source: ProcId | None = None) -> socket.socket:
        """Return our end of a new stream socket to another process of the family, which gets the other end.

        `source` is the receiver: in the controller, a program that has connected; None for this process.

        Raises:
            ProcDied: `target` has ended, or never existed; with a diagnosis while its report is remembered.
            LinkLost: The spawner is gone, or there are no descriptors left.

        Blocking: checkpoint. When cancelled, the half-made connection is closed.
        """
        try:
            received = await self._client.ask(lambda request: wire.Connect(request, target, source))
        except (SpawnerLostError, OSError) as error:
            raise LinkLost(f"cannot connect to process {target:x}: {error}") from None
        record = received.record
        if isinstance(record, wire.Connected) and len(received.fds) == 1:
            return stream_of(received.fds[0], is_far=record.is_far)
        close_all(received.fds)
        text = (
            record.text
            if isinstance(record, wire.ConnectFailed)
            else "this process has no descriptor left: raise `ulimit -n`"
        )
        if isinstance(record, wire.ConnectFailed) and record.is_gone:
            report = record.exit or ExitReport.unknown(target)
            raise report.error(f"cannot connect to process {target:x}: {text}")
        raise LinkLost(f"cannot connect to process {target:x}: {text}")

    async def exit_of(self, proc_id: ProcId) -> ExitReport:
        """Wait until any process of the family has ended, and return its report.

        Returns:
            A report without a diagnosis (`is_known` is False) if the process never existed or ended long ago, or if
            the spawner is gone.

        Blocking: checkpoint.
        """
        try:
            received = await self._client.ask(lambda request: wire.ExitOf(request, proc_id))
        except (SpawnerLostError, OSError):
            return self._siblings.exits.get(proc_id) or ExitReport.unknown(proc_id)
        known = received.record.exit if isinstance(received.record, wire.ExitKnown) else None
        return known or self._siblings.exits.get(proc_id) or ExitReport.unknown(proc_id)

    def retire(self) -> None:
        """Launch nothing more; the spawner, which belongs to this process, ends by itself after its last worker."""
        self._is_retired = True
        self._client.post(wire.Retire())

    async def flush_output(self) -> None:
        """Wait until all output that workers have written so far is shown; do nothing in a worker.

        Blocking: checkpoint.
        """
        if self.proc_id != self.root_id:
            await trio.lowlevel.checkpoint()
            return
        with suppress(SpawnerLostError):
            await self._client.ask(wire.Flush)

    async def stop_all(self) -> None:
        """Kill all children of this process and wait until they are gone, or stuck in the kernel.

        Blocking: checkpoint, at most `limits.KILL_SECONDS`; shielded.
        """
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for child in list(self._children.values()):
                    nursery.start_soon(lambda child=child: end_child(child, term_seconds=0))  # type: ignore[misc]
            await trio.lowlevel.checkpoint()

    # ---- launching ---------------------------------------------------------------------------------------

    def _request_of(self, spec: LaunchSpec, request: int) -> wire.Launch:
        python = spec.python or self._python
        output, path = output_of(spec.output)
        return wire.Launch(
            request=request,
            config=config_of(spec, self.proc_id, self.root_id),
            context=capture_caller(spec.env, are_several=prod(spec.sizes) > 1, cwd=spec.cwd),
            entry=spec.entry,
            python=b"" if python is None else os.fsencode(python),
            preload=tuple(dict.fromkeys((*self._preload, *spec.preload))),
            output=output,
            output_path=path,
            cpus=spec.cpus,
        )

    def _take_launched(self, spec: LaunchSpec, received: Received, on_exit: ExitHook | None) -> Child | None:
        """In the client's task: become the owner of a process before its exit can be read."""
        record = received.record
        if not isinstance(record, wire.Launched) or len(received.fds) != 2:
            close_all(received.fds)
            return None
        pidfd, link = received.fds
        child = Child(
            spec,
            record.pid,
            pidfd,
            socket.socket(fileno=link),
            on_exit=on_exit,
            signal_by_spawner=self._signal_by_spawner,
        )
        self._children[child.proc_id] = child
        self._unclosed = {child for child in self._unclosed if child.pidfd >= 0} | {child}
        self._exit_poll.register(pidfd, select.EPOLLIN)
        return child

    async def _take_back(self, proc_id: ProcId, started: list[Child]) -> None:
        """Kill and reap a process whose launch does not return (LA-1)."""
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KILL_SECONDS):
            for child in started:
                child.disown()
            self._signal_by_spawner(proc_id, signal.SIGKILL)
            await self.exit_of(proc_id)
            for child in started:
                child.signal(signal.SIGKILL)
                await child.wait_exited()
                child.close()

    def _signal_by_spawner(self, proc_id: ProcId, signum: int) -> None:
        self._client.post(wire.Signal(proc_id, signum))

    # ---- notices -----------------------------------------------------------------------------------------

    def _noticed(self, received: Received) -> None:
        match received.record:
            case wire.Ready():
                self._ready.set()
            case wire.Exited(exit=report):
                self._siblings.exits.add(report)
                child = self._children.get(ProcId(report.proc_id))
                if child is not None:
                    self._finish(child, report)
            case wire.Output(chunks=chunks):
                self._siblings.printer.write(chunks)
                if not self._is_stopping:  # after Stop nothing is sent: the spawner exits without reading it
                    self._client.post(wire.OutputTaken())
            case wire.Incoming(source=source, is_far=is_far) if len(received.fds) == 1:
                link = stream_of(received.fds[0], is_far=is_far)
                if self._incoming is None:
                    link.close()
                else:
                    self._incoming(ProcId(source), link)
            case wire.ForeignConnect() | wire.ForeignExitOf() as question if self._tasks is not None:
                self._tasks.start_soon(self._siblings.answer, self._client, question)
            case _:
                close_all(received.fds)

    def _finish(self, child: Child, report: ExitReport) -> None:
        if self._children.pop(child.proc_id, None) is not None:
            if child.pidfd in self._seen_ended:
                self._seen_ended.remove(child.pidfd)
            else:
                self._exit_poll.unregister(child.pidfd)
            child.finish(report)

    def _lost(self) -> None:
        """Handle the loss of the spawner: its workers die by their lifelines; kill them and leftovers, too."""
        self._ready.set()
        for child in list(self._children.values()):
            if child.pidfd in self._seen_ended:
                self._finish(child, ExitReport.unknown(child.proc_id, child.pid))  # no diagnosis will come
            else:
                linux.signal_group(child.pidfd, signal.SIGKILL)
        is_due = self._is_stopping or (self._is_retired and not self._children)
        if self.proc_id == self.root_id and not is_due and self._tasks is not None:
            self._tasks.start_soon(self._siblings.kill_rest, self._client, self.root_id)

    @trio.lowlevel.enable_ki_protection
    async def _watch_exits(self) -> None:
        """Detect exits of children by pidfd, in case the spawner does not report them (LA-4)."""
        with self._watch_scope:
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                while True:
                    await trio.lowlevel.wait_readable(self._exit_poll.fileno())
                    ended = dict(self._exit_poll.poll(0))
                    for child in self._children.values():
                        if child.pidfd in ended:
                            self._exit_poll.unregister(child.pidfd)
                            self._seen_ended.add(child.pidfd)
                            nursery.start_soon(self._await_report, child)

    @trio.lowlevel.enable_ki_protection
    async def _await_report(self, child: Child) -> None:
        ended_at = time.monotonic_ns()
        await wait_for_news(child.wait_exited, 0 if self._client.lost is not None else limits.EXIT_REPORT_SECONDS)
        self._finish(child, ExitReport.unknown(child.proc_id, child.pid, ended_at))

    # ---- begin and end -----------------------------------------------------------------------------------

    async def _wait_ready(self, entry: str) -> None:
        modules = (entry.partition(":")[0], *_MODULES.get(entry, ()), *self._preload) if self._python is None else ()
        self._client.post(wire.Hello(self.root_id, modules))
        await self._client.wait_ready(self._ready, f"import {', '.join(modules)}")

    async def _stop_family(self, process: SpawnerProcess) -> None:
        """End the spawner and everything below it (LA-3). Bounded."""
        self._siblings.stopping(self._client)
        with trio.CancelScope(shield=True):
            if not await process.end(self._client):
                await self._siblings.kill_rest(self._client, self.root_id)
                await self.stop_all()

    def _end_tasks(self) -> None:
        """Release processes that are stuck in the kernel after the wait: wake waiters (LA-2), log them."""
        for child in list(self._children.values()):
            exits.log_abandoned(child.name, child.pid)
            self._finish(child, ExitReport.unknown(child.proc_id, child.pid))
        for child in self._unclosed:
            child.close()
        self._client.stop()
        self._watch_scope.cancel()

    def forget(self) -> None:
        """In a forked child: close the copies of descriptors, so that no process waits for this one."""
        self._is_stopping = True
        for child in self._children.values():
            child.close()
        self._children.clear()
        self._exit_poll.close()
        self._client.forget()


_launchers: ForgottenInChildren[ProcLauncher] = ForgottenInChildren()


@asynccontextmanager
async def open_spawner(
    root_id: ProcId,
    *,
    python: str | None = None,
    preload: Sequence[str] = (),
    incoming: IncomingHook | None = None,
    entry: str = records.ENTRY,
    siblings: Siblings | None = None,
    process: SpawnerProcess | None = None,
) -> AsyncGenerator[ProcLauncher, None]:
    """Start a spawner; this process is the controller of the family.

    Args:
        root_id: Incarnation of this process.
        python: Interpreter of every worker, started by exec, without imports ahead of it. None forks workers.
        preload: Modules that the spawner imports before it forks, or each executed worker before it enters.
        incoming: Called with (process, stream socket) when another process of the family connects to this one; owns the
            socket. Must not raise. Without it connections are closed.
        entry: Entry of workers; its module is imported before they are forked.
        siblings: The other spawners of this process: their workers and those of this one can connect to each other.
        process: One that was started for `root_id` and has not received anything, owned from here on; None starts it.

    Raises:
        SpawnError: The spawner cannot be started, or a module cannot be preloaded; the text carries its traceback.

    Blocking: entering waits until everything is imported (about 0.2 s without `preload`); leaving kills and reaps
        whatever is left, shielded, at most some `limits.KILL_SECONDS`.
    """
    process = process or SpawnerProcess.start(root_id)
    try:
        launcher = ProcLauncher(
            process.broker,
            proc_id=root_id,
            root_id=root_id,
            incoming=incoming,
            python=python,
            preload=tuple(preload),
            siblings=siblings,
            spawner_pid=process.pid,
        )
    except BaseException as error:
        process.abandon()
        if isinstance(error, OSError):  # out of descriptors
            raise SpawnError(f"cannot start the spawner: {error}{refusals()}") from error
        raise
    try:
        begin, end = partial(launcher._wait_ready, entry), partial(launcher._stop_family, process)  # noqa: SLF001
        async with _serving(launcher, begin, end):
            yield launcher
    finally:
        process.close()


@asynccontextmanager
async def attach_launcher(
    broker: socket.socket,
    *,
    proc_id: ProcId,
    root_id: ProcId,
    incoming: IncomingHook | None = None,
    is_left_to_exit: bool = False,
) -> AsyncGenerator[ProcLauncher, None]:
    """Use the spawner of the family from a worker.

    Args:
        broker: The socket that the worker's entry was given; owned from now on.
        proc_id: As in its `WorkerConfig`.
        root_id: As in its `WorkerConfig`.
        incoming: See `open_spawner`.
        is_left_to_exit: Leave the socket open for the end of the process to close: one wake-up less of the spawner.

    Blocking: leaving kills own children and waits until they are gone, shielded, at most `limits.KILL_SECONDS`.
    """
    connection = BrokerSocket(broker)
    try:
        launcher = ProcLauncher(connection, proc_id=proc_id, root_id=root_id, incoming=incoming)
        async with _serving(launcher, trio.lowlevel.checkpoint, launcher.stop_all):
            yield launcher
    finally:
        if not is_left_to_exit:
            connection.close()


@asynccontextmanager
async def _serving(
    launcher: ProcLauncher, begin: Callable[[], Awaitable[None]], end: Callable[[], Awaitable[None]]
) -> AsyncGenerator[None, None]:
    """Run the tasks of a launcher around a body; raise the body's exception bare, without the nursery's group."""
    raised: BaseException | None = None
    _launchers.add(launcher)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(launcher._client.run)  # noqa: SLF001
            nursery.start_soon(launcher._watch_exits)  # noqa: SLF001
            try:
                await begin()
                yield
            except BaseException as error:  # noqa: BLE001 - raised again below, outside of the nursery
                raised = error
            with trio.CancelScope(shield=True):
                launcher._is_stopping = True  # noqa: SLF001
                try:
                    await end()
                finally:
                    launcher._end_tasks()  # noqa: SLF001
    finally:
        _launchers.discard(launcher)
        launcher._siblings.remove(launcher._client)  # noqa: SLF001
        launcher._exit_poll.close()  # noqa: SLF001
    if raised is not None:
        raise raised


# ---- caller ----------------------------------------------------------------------------------------------------------

# Context that a new process inherits from its caller, captured at the moment of the launch (rule O2).

_RESOURCES: Final = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_THREADS_VARIABLE: Final = b"OMP_NUM_THREADS"


def capture_caller(overlay: Mapping[str, str], *, are_several: bool, cwd: str | None = None) -> wire.CallerContext:
    """Return the context of the running process.

    Args:
        overlay: Variables set on top of the environment.
        are_several: The process is one of several of its mesh: each gets one computing thread unless the caller's
            environment or `overlay` says otherwise, as torchrun does, because N times all cores is too much.
        cwd: Working directory; by default the caller's.
    """
    env = dict(os.environb)
    env.update((os.fsencode(name), os.fsencode(value)) for name, value in overlay.items())
    if are_several:
        env.setdefault(_THREADS_VARIABLE, b"1")
    return wire.CallerContext(
        env=env,
        cwd=_working_directory() if cwd is None else os.fsencode(Path(cwd).absolute()),
        sys_path=tuple(os.fsencode(path) for path in sys.path),
        argv=tuple(os.fsencode(argument) for argument in sys.argv),
        filters=warning_filters(),
        umask=_umask(),
        rlimits=tuple((number, *resource.getrlimit(number)) for number in _RESOURCES),
        prefixes=tuple(os.fsencode(prefix) for prefix in own_prefixes()),
        version=sys.version_info[:2],
    )


def _working_directory() -> bytes:
    try:
        return os.getcwdb()
    except FileNotFoundError:  # it was removed meanwhile: the new process keeps the spawner's
        return b""


def _umask() -> int:
    """Read the mask without `os.umask`, which would change it for a moment in all threads."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def warning_filters() -> tuple[wire.WarningFilter, ...]:
    """Return `warnings.filters`, first to last."""
    found = list[wire.WarningFilter]()
    for action, message, category, module, line in warnings.filters:
        for kind in category if isinstance(category, tuple) else (category,):
            parts = (kind.__module__, kind.__qualname__, _pattern(module), line)
            found.append(wire.WarningFilter(action, _pattern(message), *parts))
    return tuple(found)


def _pattern(pattern: str | re.Pattern[str] | None) -> str:
    if pattern is None:
        return ""
    return pattern if isinstance(pattern, str) else pattern.pattern
