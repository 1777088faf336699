"""Keeper: detached program that holds the hosts of a kept job until its lease ends.

    the job's block: agents of the hosts
        seats: an actor on each host, with an agent that waits for a program
            an attached program: a connection; orders go to the seats, ends of agents come back

KK-1 The keeper holds the job as any program does: however this process ends, the job ends, on hosts and in schedulers.
KK-2 One program at a time has the hosts. The next one gets them when each agent of the one before has ended, and
     nothing of it is left. A program's death ends its connection, which the kernel reports at once.
KK-3 The lease also counts while the machine sleeps. Its end ends the attached program and this process; if that takes
     longer than `limits.KEPT_END_SECONDS`, a thread that needs no Python ends this process.
KK-4 Until the job is kept, the end of standard input undoes everything: a cancelled `keep` leaves nothing.

Seat: an actor on each kept host that has an agent ready, and passes it the order of an attaching program.

    keeper --its own session--> agent of the host --> seat --standard input--> agent for one program --> its processes

KT-1 An agent serves one program, and then ends with all that it has started. The next agent is started while that
     program runs, so it is ready even for a program that attaches as soon as the previous one has left. It and its
     spawner have loaded their modules, and have never held anything of a program.
KT-2 The seat's process holds the standard input of that agent, so the agent ends with it, also when both are killed.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, NoReturn

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.hosts import marked
from trimesh._runtime.system import host_name, start_of
from trimesh._runtime.tasks import open_heard_signals
from trimesh._supervision.policy import Restart
from trimesh._transport.native.carriers import boot_id
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import configured
from trimesh.errors import ConnectError, HostLost, ProtocolError, SpawnError, TrimeshError, leaves
from trimesh.jobs.job import Job
from trimesh.jobs.kept import state as states
from trimesh.jobs.kept.kept_job import ForeseenEnd
from trimesh.jobs.launcher import AgentOrder, ChildAgent, start_child
from trimesh.jobs.local import agent_command
from trimesh.jobs.on_hosts.commands import host_environment
from trimesh.jobs.opening import JobRun, open_job_run

_BYTES_MAX: Final = 1 << 24
_RESTARTS: Final = 16
"""Host losses that are replaced within an hour; more mean that the hosts are unusable."""


class KeepOrder(msgspec.Struct, frozen=True):
    """Order of a keeper, on its standard input.

    Attributes:
        name: Name of the kept job.
        lease: Seconds from when the hosts are ready.
        job: The job, pickled by the program that starts the keeper.
    """

    name: str
    lease: float
    job: bytes


class KeeperReport(msgspec.Struct, frozen=True):
    """Report of a keeper to its starter, a line of JSON each: first its pid, then the outcome of the start.

    Attributes:
        pid: Process id of the keeper.
        state: State of the kept job, once its hosts are ready.
        failure: Why no job is kept.
        is_taken: True if the name is taken.
    """

    pid: int
    state: states.KeptState | None = None
    failure: str = ""
    is_taken: bool = False


class Keeper:
    """Keeps one job."""

    def __init__(self, order: KeepOrder, job: Job) -> None:
        self._order = order
        self._job = job
        self._scope = trio.CancelScope()
        self._is_kept = False
        self._is_told = False
        self._is_over = False
        self._changed = trio.Event()
        self._ends_at = 0.0
        self._state = states.KeptState(
            name=order.name,
            key=os.urandom(16).hex(),
            kind=type(job).__name__,
            host=host_name(),
            boot=boot_id(),
            pid=os.getpid(),
            started=start_of(os.getpid()) or 0,
            status="starting",
            since=time.time(),
            until=0.0,
            parts=dict(job.parts),
        )
        self._held: HeldHosts | None = None

    async def run(self) -> None:
        """Keep the job until its lease ends, or a signal stops it."""
        try:
            states.create(self._state)
        except ConnectError as error:
            _tell(KeeperReport(os.getpid(), failure=str(error), is_taken=True))
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_signals)
                nursery.start_soon(self._watch_input)
                await self._keep()
                nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - reported, and written to the state file
            self._failed(error)
        else:
            states.remove(self._state)

    async def _keep(self) -> None:
        with self._scope, configured(observe="off", record="off", progress="off", output="discard"):
            async with open_job_run(self._job) as (hosts, run):
                await self._hold(hosts, run)

    async def _hold(self, hosts: HostMesh, run: JobRun) -> None:
        policy = Restart("one_for_one", along="hosts", intensity=_RESTARTS, period=3600.0)
        async with (
            hosts.spawn_procs({}, name="seats", supervision=policy) as procs,
            procs.spawn("seats", Seat) as seats,
        ):
            ids = tuple(self._job.host_id(rank) for rank in range(len(hosts)))
            foreseen = ForeseenEnd(self._order.name, self._seconds_left, run.launcher, hosts.wait_notice)
            self._held = HeldHosts(
                self._job, seats, hosts, ids, run.launcher.interface, foreseen, lambda: run.spares > 0
            )
            async with states.listen(self._state.key) as listener, trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, self._serve, [listener])
                self._set_lease(self._order.lease)
                self._update(status="kept", hosts=tuple(hosts.names))
                self._is_kept = True
                _tell(KeeperReport(os.getpid(), self._state))
                _let_go()
                reason, text = await self._wait_ending()
                await self._held.end(reason, text)
                nursery.cancel_scope.cancel(reason=text)

    # ---- the lease -------------------------------------------------------------------------------------------

    def _set_lease(self, seconds: float) -> None:
        self._ends_at = _awake_clock() + seconds
        self._state = msgspec.structs.replace(self._state, until=time.time() + seconds)
        faulthandler.dump_traceback_later(seconds + limits.KEPT_END_SECONDS, exit=True)

    def _seconds_left(self) -> float:
        return self._ends_at - _awake_clock()

    async def _wait_ending(self) -> tuple[str, str]:
        """Wait until the job has to end; return the reason, as `HostLost.reason`, and its text."""
        while self._ends_at - _awake_clock() > 0 and not self._is_told:
            self._changed = trio.Event()
            with trio.move_on_after(min(self._ends_at - _awake_clock(), limits.KEPT_LOOK_SECONDS)):
                await self._changed.wait()
        self._is_over = True
        if self._is_told:
            return "cancelled", f"the kept job {self._state.name} was stopped"
        return "time limit", f"the lease of the kept job {self._state.name} has ended"

    def _update(self, **changes: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        states.replace(self._state)

    # ---- what ends it ----------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._is_told = True
        self._changed.set()
        if not self._is_kept:
            self._scope.cancel(reason="the keeper was stopped")

    async def _watch_signals(self) -> None:
        with open_heard_signals(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                self._stop()

    async def _watch_input(self) -> None:
        async with trio.lowlevel.FdStream(os.dup(0)) as stream:
            while await stream.receive_some():
                pass
        if not self._is_kept:
            self._stop()

    def _failed(self, error: Exception) -> None:
        words = "; ".join(str(one) for one in leaves(error))
        sys.stderr.write(f"trimesh keeper of {self._state.name}: {words}\n")
        if self._is_kept:
            self._update(status="ended", words=words)
        else:
            states.remove(self._state)
            _tell(KeeperReport(os.getpid(), failure=words))

    # ---- requests --------------------------------------------------------------------------------------------

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection; invalid records end only this connection."""
        lines = states.Lines(stream)
        async with stream:
            try:
                states.check_user(stream.socket)
                question = await lines.receive(states.Question)
                await self._answer(question, lines)
            except (ConnectError, ProtocolError, trio.BrokenResourceError):
                return

    async def _answer(self, question: object, lines: states.Lines) -> None:
        assert self._held is not None
        match question:
            case states.StatusRequest():
                await lines.send(states.JobStatus(self._state, self._held.attached))
            case states.Extend(lease=lease) if 0 < lease <= limits.KEPT_LEASE_SECONDS_MAX and not self._is_over:
                self._set_lease(lease)
                self._update()
                self._changed.set()
                await lines.send(states.JobStatus(self._state, self._held.attached))
            case states.Extend():
                await lines.send(
                    states.KeeperRefused(
                        "a lease must be at most limits.KEPT_LEASE_SECONDS_MAX and of a job that is not ending, got "
                        f"{question}"
                    )
                )
            case states.Attach(pid=pid, grace=grace):
                await self._held.serve(lines, pid, grace)
            case _:
                raise ProtocolError("a connection to a keeper must begin with StatusRequest, Extend or Attach")


def _awake_clock() -> float:
    """Return seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _tell(told: KeeperReport) -> None:
    """Write a line to the program that started this process; it may be gone."""
    try:
        os.write(1, msgspec.json.encode(told) + b"\n")
    except OSError:
        return


def _let_go() -> None:
    """Close the pipes to the program that started this process."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _read_order() -> KeepOrder:
    """Read the order and nothing more: the end of the input is watched afterwards."""
    size = int.from_bytes(_read_exactly(4), "little")
    if size > _BYTES_MAX:
        raise ProtocolError(f"the order of a keeper must have at most {_BYTES_MAX} bytes, got {size}")
    return msgspec.msgpack.decode(_read_exactly(size), type=KeepOrder)


def _read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise ProtocolError(f"standard input of a keeper must hold {size} more bytes, got {len(data)}")
        data += part
    return bytes(data)


def _read_job(order: KeepOrder) -> Job:
    try:
        job = pickle.loads(order.job)  # trusted: it comes by a pipe from the process that started this one
    except Exception as error:
        raise TrimeshError(
            f"the class of a kept job must be importable by another process: {error}; define it in a module"
        ) from error
    assert isinstance(job, Job)
    return job


def main() -> NoReturn:
    """Run a keeper by the order on standard input. Ends by `os._exit`: the interpreter needs no clean-up."""
    code = 0
    _tell(KeeperReport(os.getpid()))
    try:
        order = _read_order()
        trio.run(Keeper(order, _read_job(order)).run)
    except (TrimeshError, OSError) as error:
        code = 1
        _tell(KeeperReport(os.getpid(), failure=str(error)))
    except BaseException as error:  # noqa: BLE001 - logged, and reported if the starter still listens
        code = 1
        sys.stderr.write(f"trimesh keeper: {error!r}\n")
        _tell(KeeperReport(os.getpid(), failure=repr(error)))
    sys.stderr.flush()
    os._exit(code)


# ---- the hosts of a kept job in its keeper, and the attached program -------------------------------------------------


class HeldHosts:
    """The hosts, and the program attached to them.

    Args:
        job: The kept job.
        seats: Mesh of `Seat`, one on each host.
        hosts: The mesh of hosts.
        host_ids: Setting `host_id` of each host.
        interface: Address at which attached programs listen for their agents.
        foreseen: Waits for the notices before the hosts end.
        has_spares: Returns whether the job has a spare host.

    Attributes:
        attached: The program that holds the hosts; None while they are free.
    """

    def __init__(
        self,
        job: Job,
        seats: Any,
        hosts: Any,
        host_ids: Sequence[str],
        interface: str,
        foreseen: ForeseenEnd,
        has_spares: Callable[[], bool],
    ) -> None:
        self.attached: states.Attached | None = None
        self._job = job
        self._seats = seats
        self._hosts = hosts
        self._host_ids = tuple(host_ids)
        self._interface = interface
        self._foreseen = foreseen
        self._has_spares = has_spares
        self._leaving = trio.Event()
        self._free = trio.Event()
        self._ending: tuple[str, str] | None = None
        self._scopes: dict[int, trio.CancelScope] = {}
        self._has_ended = trio.Event()

    async def serve(self, lines: states.Lines, pid: int, grace: float | None) -> None:
        """Grant the hosts to a program until its connection ends, or refuse it."""
        refusal = await self._wait_turn()
        if refusal is not None:
            await lines.send(states.KeeperRefused(refusal))
            return
        self.attached = states.Attached(host_name(), pid, time.time())
        self._leaving = trio.Event()
        self._free = trio.Event()
        try:
            parts = dict(self._job.parts)
            await lines.send(
                states.HostsGranted(
                    tuple(self._hosts.names),
                    parts,
                    self._job.is_named,
                    self._host_ids,
                    self._interface,
                    self._job.pickle,
                    self._job.pki,
                    replaces=True,
                    insecure=self._job.insecure,
                )
            )
            async with trio.open_nursery() as nursery:
                if grace is not None:
                    nursery.start_soon(_tell_program, lines, self._foreseen.wait_notice, False)  # noqa: FBT003
                    nursery.start_soon(_tell_program, lines, partial(self._foreseen.wait_end, grace), True)  # noqa: FBT003
                await self._take_orders(lines, nursery)
                self._leaving.set()
                nursery.cancel_scope.cancel(reason="the program that was attached has left")
        finally:
            self.attached = None
            self._free.set()

    async def _wait_turn(self) -> str | None:
        """Wait while the hosts are being cleaned; return why a program is refused, or None."""
        if self.attached is not None:
            with trio.move_on_after(limits.KEPT_PATIENCE_SECONDS):
                await self._leaving.wait()
        with trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
            while self.attached is not None and self._leaving.is_set():
                await self._free.wait()
        if self._ending is not None:
            return self._ending[1]
        if self.attached is None:
            return None
        who = self.attached
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(who.since))
        if self._leaving.is_set():
            seconds = f"limits.KEPT_CLEAN_SECONDS ({limits.KEPT_CLEAN_SECONDS:g} s)"
            return f"process {who.pid} has left, but its agents have not ended within {seconds}: try again later"
        return (
            f"one program at a time has the hosts of a kept job, and process {who.pid} on {who.host} has had them "
            f"since {at}: end that, or wait for it"
        )

    async def _take_orders(self, lines: states.Lines, nursery: trio.Nursery) -> None:
        while (record := await lines.receive(states.BeginAgent | states.EndAgent | states.ReplaceHost)) is not None:
            match record:
                case states.BeginAgent(number=number, rank=rank, order=order) if 0 <= rank < len(self._host_ids):
                    scope = self._scopes[number] = trio.CancelScope()
                    nursery.start_soon(self._run_agent, lines, number, rank, order, scope)
                case states.EndAgent(number=number) if number in self._scopes:
                    self._scopes[number].cancel(reason="the program has told its agent to end")
                case states.ReplaceHost(rank=rank) if 0 <= rank < len(self._host_ids):
                    nursery.start_soon(self._replace, lines, rank)
                case _:
                    pass

    async def _replace(self, lines: states.Lines, rank: int) -> None:
        """Replace the machine at a rank if there is a spare one; otherwise its seat starts a new agent anyway."""
        failure = ""
        if self._has_spares():
            failure = f"no spare was ready within limits.KEPT_REPLACE_SECONDS ({limits.KEPT_REPLACE_SECONDS:g} s)"
            with trio.move_on_after(limits.KEPT_REPLACE_SECONDS):
                try:
                    await self._hosts.replace({"hosts": rank})
                    failure = ""
                except SpawnError as error:
                    failure = str(error)
        await _send(lines, states.HostReplaced(rank, self._hosts.names[rank], failure))

    async def _run_agent(
        self, lines: states.Lines, number: int, rank: int, order: str, scope: trio.CancelScope
    ) -> None:
        ended = states.AgentEnded(number, "its program ended it", "", "agent exit")
        with scope:
            seat = self._seats.slice(hosts=rank).serve.options(abandon_after=limits.KEPT_CLEAN_SECONDS)
            try:
                ended = states.AgentEnded(number, *(await seat.call_one(order)))
            except Exception as error:  # noqa: BLE001 - any error means that the program has lost this host
                ended = states.AgentEnded(number, *_words_of(error))
        if self._ending is not None:
            reason, text = self._ending
            ended = states.AgentEnded(number, text, "", reason)
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KEPT_ANSWER_SECONDS):
            await _send(lines, ended)
        del self._scopes[number]
        self._has_ended.set()

    async def end(self, reason: str, text: str) -> None:
        """End all agents of the attached program, refuse other programs, and wait until no agent is left.

        `reason` is as `HostLost.reason`, `text` its explanation.
        """
        self._ending = (reason, text)
        for scope in self._scopes.values():
            scope.cancel(reason=text)
        with trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
            while self._scopes:
                self._has_ended = trio.Event()
                await self._has_ended.wait()


async def _tell_program(lines: states.Lines, wait: Callable[[], Awaitable[str]], is_end: bool) -> None:  # noqa: FBT001
    await _send(lines, states.HostsNoticed(await wait(), is_end))


async def _send(lines: states.Lines, record: states.AgentEnded | states.HostsNoticed | states.HostReplaced) -> None:
    """Send a record to a program that may have gone."""
    try:
        await lines.send(record)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


def _words_of(error: Exception) -> tuple[str, str, str]:
    first = next(iter(leaves(error)))
    reason = first.reason if isinstance(first, HostLost) else "agent exit"
    return f"{type(first).__name__}: {first}", "", reason or "agent exit"


# ---- seat ------------------------------------------------------------------------------------------------------------


class Seat(Actor):
    """Keeps an agent ready on its host, and passes it the order of an attaching program."""

    def __init__(self) -> None:
        self._ready: WaitingAgent | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Keep an agent ready while this actor lives."""
        self._ready = await _start()
        try:
            yield
        finally:
            await self._end_ready()

    async def _end_ready(self) -> None:
        agent, self._ready = self._ready, None
        if agent is not None:
            await agent.stop()

    @endpoint
    async def serve(self, order: str) -> tuple[str, str, str]:
        """Pass an order to the agent, and return its end as in `AgentExit`: text, last words, reason.

        A cancel ends the agent. When this returns, nothing that the agent started is left, and the next one is ready.

        Raises:
            SpawnError: No agent can be started here.
        """
        agent, self._ready = self._ready, None
        if agent is not None and agent.has_ended:  # for example, killed for memory
            await agent.stop()
            agent = None
        if agent is None:
            agent = await _start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._prepare, limits.KEPT_PREPARE_SECONDS)
                await agent.tell(AgentOrder.parse(order.encode()))
                ended = await agent.wait()
                nursery.cancel_scope.cancel(reason="the program has left")
        finally:
            await agent.stop()
            with trio.CancelScope(shield=True):
                await self._prepare()
        return ended.text, ended.last_words, ended.reason

    async def _prepare(self, seconds: float = 0.0) -> None:
        """Start the next agent after some seconds; if that fails, `serve` tries again and reports the error."""
        await trio.sleep(seconds)
        with trio.CancelScope(shield=True):
            if self._ready is None:
                try:
                    self._ready = await _start()
                except SpawnError:
                    pass


class WaitingAgent(ChildAgent):
    """A started agent that waits for its order."""

    async def end(self) -> None:
        """See `ChildAgent.end`: its standard input is closed, so it ends what it has started, and then itself."""
        await self.ended()


async def _start() -> WaitingAgent:
    # In the process group of this process, whose end kills the group, including an agent that a signal has stopped.
    command, host = agent_command("main_prepared"), host_name()
    return WaitingAgent(await start_child(command, host, marked(host_environment()), is_apart=False))
