"""Kept jobs: start, list, extend, stop and attach."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh._runtime.life import HostsNotice
from trimesh._runtime.system import MARKER, start_of
from trimesh._runtime.tasks import in_trio, run_to_end
from trimesh.actor.host_mesh import HostMesh
from trimesh.config import reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import ConnectError, ProtocolError, SpawnError
from trimesh.jobs.job import Job, Pickle
from trimesh.jobs.kept import state as states
from trimesh.jobs.launcher import AgentExit, AgentOrder, Launcher
from trimesh.jobs.local import interpreter_command
from trimesh.jobs.opening import open_job
from trimesh.jobs.pki import OwnPKI
from trimesh.plain_numbers import real_number

if TYPE_CHECKING:
    from trimesh.jobs.kept.keeper import KeeperReport


_BOOT: Final = (
    "import os, sys\nif os.fork(): os._exit(0)\nsys.path[:] = sys.argv[1:]\n"
    "from trimesh.jobs.kept.keeper import main\nmain()"
)
"""Forks first, so that the keeper is not a child of the program that starts it."""

_READ_BYTES: Final = 1 << 16


class KeptJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is kept, or was.

    Attributes:
        state: Contents of its state file.
        attached: The program that holds its hosts; None while they are free.
        gone: Why the job is no longer kept; "" while it is.
    """

    state: states.KeptState
    attached: states.Attached | None = None
    gone: str = ""

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.state.name

    @property
    def until(self) -> float:
        """Unix time at which its lease ends."""
        return self.state.until


async def keep(name: str, job: Job, *, lease: float) -> KeptJob:
    """Start a job that outlives this program: `await jobs.keep("exp7", SSHJob(["n1", "n2"]), lease=7200)`.

    Returns when its hosts are ready. `jobs.attach(name)` then gives them to a program of this user on this machine as a
    mesh. If this call is cancelled, or this program ends before it returns, nothing is left running.

    Args:
        name: Name of the kept job; no other kept job of this user may have it.
        job: The job; its class must be importable by another process.
        lease: Seconds, counted from when the hosts are ready, after which the job ends; see `extend`.

    Raises:
        TypeError, ValueError: The name, the job or the lease is invalid.
        ConnectError: The name is taken.
        SpawnError: The hosts cannot be started; the message includes the reason of the refusal.
    """
    states.checked_kept_name(name)
    if not isinstance(job, Job):
        raise TypeError(f"keep() takes a job, such as LocalJob(2), got {job!r}")
    seconds = checked_lease(lease)
    check_keepable(job)
    return await in_trio(partial(_keep, name, job, seconds))()


def checked_lease(lease: Any) -> float:
    """Return the seconds of a lease.

    Raises:
        ValueError: It is no positive number of seconds, or too large.
    """
    found = real_number(lease)
    if found is None or not 0 < found <= limits.KEPT_LEASE_SECONDS_MAX:
        raise ValueError(
            f"a lease must be a number of seconds, more than 0 and at most limits.KEPT_LEASE_SECONDS_MAX "
            f"({limits.KEPT_LEASE_SECONDS_MAX:g}), got {lease!r}"
        )
    return found


def check_keepable(job: Job) -> None:
    """Check that a job can be kept.

    Raises:
        ValueError: It fixes the port that its hosts dial, has a relay, or this is a process of a mesh.
    """
    if getattr(job, "via", None) is not None:
        raise ValueError(
            f"a job with via= cannot be kept, as its relay leads to one program, got {job!r}: keep it by a program on "
            "the relay host"
        )
    if getattr(job, "port", 0) or getattr(job, "advertise", ()):
        raise ValueError(
            "a kept job must leave out port= and advertise=, because each program that attaches listens at a port of "
            f"its own, got {job!r}"
        )
    if MARKER in os.environ:
        raise ValueError(
            "a job can only be kept by the controller process, and this is a process of a mesh, whose end would end "
            "the job: call keep() in your program"
        )


async def _keep(name: str, job: Job, lease: float) -> KeptJob:
    from trimesh.jobs.kept.keeper import KeeperReport, KeepOrder  # noqa: PLC0415 - the native library is loaded by it

    if name in states.names():
        raise ConnectError(states.taken_words(name))
    try:
        text = pickle.dumps(attrs.evolve(job))
    except Exception as error:
        raise SpawnError(f"a kept job must be picklable, got {job!r}: {error}") from error
    order = msgspec.msgpack.encode(KeepOrder(name, lease, text))
    log = states.open_log(name)
    try:
        process = await trio.lowlevel.open_process(
            interpreter_command(_BOOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        raise SpawnError(f"the keeper of {name} cannot be started: {error}") from error
    finally:
        os.close(log)
    assert process.stdin is not None
    assert process.stdout is not None
    async with process.stdin as to_keeper, process.stdout as from_keeper:
        told: KeeperReport | None = None
        data = bytearray()
        try:
            await process.wait()
            await to_keeper.send_all(len(order).to_bytes(4, "little") + order)
            while more := await from_keeper.receive_some(_READ_BYTES):
                data += more
                for line in data.split(b"\n")[:-1]:
                    told = msgspec.json.decode(line, type=KeeperReport)
                if told is not None and (told.state is not None or told.failure):
                    break
        except trio.BrokenResourceError:
            told = None
        except BaseException:
            await _take_back(to_keeper, from_keeper, told)
            raise
    if told is None or (told.state is None and not told.failure):
        raise SpawnError(f"the keeper of {name} exited before its hosts were ready: {_last_words(name)}")
    if told.state is not None:
        return KeptJob(state=told.state)
    if told.is_taken:
        raise ConnectError(told.failure)
    raise SpawnError(f"the hosts of {name} could not be started: {told.failure}")


async def _take_back(
    to_keeper: trio.abc.SendStream, from_keeper: trio.abc.ReceiveStream, told: KeeperReport | None
) -> None:
    """Make a keeper give up, and wait until it has; one that hangs is killed."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(limits.KEPT_END_SECONDS) as scope:
            await to_keeper.aclose()
            while await from_keeper.receive_some(_READ_BYTES):
                pass
        if scope.cancelled_caught and told is not None:
            with suppress(ProcessLookupError):
                os.kill(told.pid, signal.SIGKILL)


def _last_words(name: str) -> str:
    try:
        text = states.log_of(name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no output)"
    return " | ".join(text.splitlines()[-limits.AGENT_LINES_KEPT :]) or "(no output)"


# ---- requests to a keeper ---------------------------------------------------------------------------------------


async def reached(name: str) -> tuple[states.KeptState, states.Lines]:
    """Return the state of a kept job, and a connection to its keeper.

    Raises:
        ConnectError: The job is not kept on this machine, or not any more, or is still starting.
    """
    state = states.read(states.checked_kept_name(name))
    gone = states.why_gone(state)
    if gone:
        raise ConnectError(f"the job {name} is not kept any more: {gone}; `trimesh job stop {name}` frees the name")
    if state.status == "starting":
        raise ConnectError(f"the job {name} is still starting: process {state.pid} waits for its hosts; try again")
    try:
        return state, await states.dial(state.key)
    except OSError as error:
        raise ConnectError(f"the keeper of {name}, process {state.pid}, cannot be reached: {error}") from error


async def asked(lines: states.Lines, question: states.Question, name: str, *, seconds: float = 0.0) -> Any:
    """Send a request to a keeper, and return its reply.

    Args:
        lines: Connection to the keeper.
        question: The request.
        name: Name of the job.
        seconds: Time limit of the requested work, added to that of a reply.

    Raises:
        ConnectError: The keeper refuses, does not answer in time, or has ended.
    """
    with trio.move_on_after(seconds + limits.KEPT_ANSWER_SECONDS):
        try:
            await lines.send(question)
            answer: Any = await lines.receive(states.Answer)
        except (trio.BrokenResourceError, ProtocolError) as error:
            raise ConnectError(f"the request to the keeper of {name} failed: {error}") from error
        if answer is None:
            raise ConnectError(f"the keeper of {name} has ended")
        if isinstance(answer, states.KeeperRefused):
            raise ConnectError(f"{name}: {answer.text}")
        return answer
    work = f" and {seconds:g} s of work" if seconds else ""
    raise ConnectError(
        f"the keeper of {name} has not answered within limits.KEPT_ANSWER_SECONDS ({limits.KEPT_ANSWER_SECONDS:g} s)"
        f"{work}"
    )


async def kept() -> list[KeptJob]:
    """Return the kept jobs of this user and the attached programs; also jobs that have ended but were not stopped.

    Raises:
        ConnectError: The folder of state files cannot be used.
    """
    return await in_trio(_kept)()


async def _kept() -> list[KeptJob]:
    found = list[KeptJob]()
    for name in states.names():
        try:
            state = states.read(name)
        except ConnectError:
            if states.file_of(name).exists():
                raise
            continue  # it ended just now
        found.append(await _looked(state))
    return found


async def _looked(state: states.KeptState) -> KeptJob:
    try:
        gone = states.why_gone(state)
        if gone or state.status == "starting":
            return KeptJob(state=state, gone=gone)
        _, lines = await reached(state.name)
        async with lines.stream:
            seen: states.JobStatus = await asked(lines, states.StatusRequest(), state.name)
    except ConnectError as error:
        return KeptJob(state=state, gone=str(error))
    return KeptJob(state=seen.state, attached=seen.attached)


async def extend(name: str, *, lease: float) -> KeptJob:
    """Make the lease of a kept job end `lease` seconds from now, whether a program is attached or not.

    Raises:
        ValueError: The lease is no positive number of seconds, or too large.
        ConnectError: No job is kept by that name.
    """
    return await in_trio(partial(_extend, name, checked_lease(lease)))()


async def _extend(name: str, lease: float) -> KeptJob:
    _, lines = await reached(name)
    async with lines.stream:
        seen: states.JobStatus = await asked(lines, states.Extend(lease), name)
    return KeptJob(state=seen.state, attached=seen.attached)


async def stop(name: str) -> str:
    """End a kept job and the attached program; return a description of the outcome.

    If the job has ended already, this only frees its name.

    Raises:
        ConnectError: No job is kept by that name, or its keeper is on another machine.
    """
    return await in_trio(partial(_stop, states.checked_kept_name(name)))()


async def _stop(name: str) -> str:
    state = states.read(name)
    gone = states.why_gone(state)
    if gone:
        states.remove(state)
        return f"it had ended before: {gone}; its name is free now"
    pidfd = os.pidfd_open(state.pid)
    try:
        if start_of(state.pid) == state.started:  # the descriptor is the keeper's, not that of a reused pid
            return await _ended(state, pidfd)
    finally:
        os.close(pidfd)
    return "it has ended, and nothing of it is left"


async def _ended(state: states.KeptState, pidfd: int) -> str:
    """End a keeper, and return how that went."""
    text = "it has ended, and nothing of it is left"
    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # it may have been stopped
    with trio.move_on_after(limits.KEPT_END_SECONDS) as scope:
        await trio.lowlevel.wait_readable(pidfd)
    if scope.cancelled_caught:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfd)
        text = f"its keeper did not end within {limits.KEPT_END_SECONDS:g} s, and was killed; its hosts end with it"
    states.remove(state)
    return text


# ---- ends that are known in advance: of the lease, and of a time limit of the job ------------------------------------


class ForeseenEnd:
    """Waits for the notices that an attached program gets before its hosts end.

    Args:
        name: Name of the kept job.
        seconds_left: Returns the seconds left of the lease.
        launcher: Launcher of the job, which knows a time limit of its scheduler.
        wait_job_notice: Waits for the notice that the job gives to its own program, the keeper.
    """

    def __init__(
        self,
        name: str,
        seconds_left: Callable[[], float],
        launcher: Launcher,
        wait_job_notice: Callable[[], Awaitable[str]],
    ) -> None:
        self._name = name
        self._seconds_left = seconds_left
        self._launcher = launcher
        self._wait_job_notice = wait_job_notice

    async def wait_notice(self) -> str:
        """Wait until the first end is so near that a program should save its work; return why."""
        return await _first(partial(self._wait_lease, limits.KEPT_NOTICE_SECONDS), self._wait_job_notice)

    async def wait_end(self, grace: float) -> str:
        """Wait until a program whose blocks take `grace` seconds has to leave; return why."""
        seconds = grace + limits.KEPT_LEAVE_SECONDS
        return await _first(partial(self._wait_lease, seconds), partial(self._launcher.wait_end, seconds))

    async def _wait_lease(self, seconds: float) -> str:
        """Wait until `seconds` are left, or half of what is left now if less; the lease may be extended meanwhile."""
        ahead = min(seconds, self._seconds_left() / 2)
        while (left := self._seconds_left()) > ahead:  # noqa: ASYNC110 - a clock that counts sleep has no event
            await trio.sleep(min(left - ahead, limits.KEPT_LOOK_SECONDS))
        return f"the lease of the kept job {self._name} ends in {max(left, 0):.0f} s"


async def _first(*waits: Callable[[], Awaitable[str]]) -> str:
    found = list[str]()
    async with trio.open_nursery() as nursery:

        async def run(wait: Callable[[], Awaitable[str]]) -> None:
            found.append(await wait())
            nursery.cancel_scope.cancel(reason="another end is nearer")

        for wait in waits:
            nursery.start_soon(run, wait)
    return found[0]


# ---- an attached program: its agents get their orders from the keeper ------------------------------------------------

_log = logging.getLogger("trimesh")


def _checked_name(_: object, __: object, name: Any) -> None:
    states.checked_kept_name(name)


@attrs.frozen
class AttachedJob(Job):
    """Hosts of a kept job, made by `attach`. Entering acquires them; leaving gives them back clean.

    Attributes:
        name: Name of the kept job.
        pickle: "off" unpickles nothing in this program and its processes, see `spawn_procs`; None takes the value of
            the kept job.
        pki: Certificates of your own authority; None takes those of the kept job.
    """

    name: str = attrs.field(validator=_checked_name)
    hosts: Any = attrs.field(default=None, init=False, repr=False, eq=False)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[HostMesh, None]:
        async with _open_attachment(self.name) as attachment:
            granted = attachment.granted
            hosts = dict(granted.parts) if granted.is_named else sum(granted.parts.values())
            pickled, pki = self.pickle or granted.pickle, self.pki or granted.pki
            insecure = "" if pki is not None else granted.insecure
            job = _GrantedJob(
                hosts,
                pickle=pickled,
                pki=pki,
                insecure=insecure,
                shared=self.shared,
                name=self.name,
                attachment=attachment,
            )
            async with open_job(job) as mesh:
                yield mesh


def attach(name: str, *, pickle: Pickle | None = None, pki: OwnPKI | None = None, shared: bool = False) -> AttachedJob:
    """Return the hosts of a kept job, to be entered: `async with jobs.attach("exp7") as hosts:`.

    This program holds them until the block is left; then they are cleaned and free for the next program. The block
    behaves as that of any `Job`.

    Args:
        name: Name of the kept job, see `keep`.
        pickle: "off" unpickles nothing in this program and its processes, see `spawn_procs`; None takes the value of
            the kept job.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None takes those of the kept job.
        shared: Let actors that get the hosts as an argument spawn on them.

    Raises:
        TypeError, ValueError: The name is invalid.
        ConnectError: On entering: no job is kept by that name, or another program, named in the text, is attached.
    """
    return AttachedJob(name, pickle=pickle, pki=pki, shared=shared)


@attrs.frozen
class _GrantedJob(Job):
    """A kept job, as its keeper granted it to this program."""

    name: str = attrs.field(kw_only=True)
    attachment: HostAttachment = attrs.field(kw_only=True, repr=False, eq=False)

    def launcher(self) -> KeptLauncher:
        return KeptLauncher(self.attachment)

    def host_id(self, rank: int) -> str:
        return self.attachment.granted.host_ids[rank]


class KeptLauncher(Launcher):
    """Starts agents through the keeper."""

    def __init__(self, attachment: HostAttachment) -> None:
        self.hosts = attachment.granted.hosts
        self.interface = attachment.granted.interface
        self._attachment = attachment

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attachment.read)
            yield
            nursery.cancel_scope.cancel(reason="the block is left")

    async def start(self, rank: int, order: AgentOrder) -> KeptAgent:
        return await self._attachment.start(rank, order)

    async def replace(self, rank: int) -> None:
        """See `Launcher.replace`: takes a spare host of the kept job, if it has one."""
        if self._attachment.granted.replaces:
            name = await self._attachment.replace(rank)
            self.hosts = [name if one == rank else before for one, before in enumerate(self.hosts)]

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        del say
        await trio.lowlevel.checkpoint()
        raise SpawnError(
            f"cannot add {count} hosts: a kept job has only the {len(self.hosts)} that it was kept with; keep a larger "
            "job"
        )

    async def wait_notice(self) -> str:
        return await self._attachment.notice.wait()

    async def wait_end(self, ahead: float = 0.0) -> str:
        """See `Launcher.wait_end`; `ahead` is ignored, as the keeper knows the program's grace from `Attach`."""
        del ahead
        return await self._attachment.ending.wait()


class KeptAgent:
    """An agent that the keeper started for this program; see `StartedAgent`."""

    def __init__(self, attachment: HostAttachment, number: int) -> None:
        self.ended = trio.Event()
        self.exit = AgentExit("the keeper of the job has ended, or was killed")
        self._attachment = attachment
        self._number = number

    async def wait(self) -> AgentExit:
        await self.ended.wait()
        return self.exit

    async def stop(self) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
            if not self.ended.is_set():
                await self._attachment.tell(states.EndAgent(self._number))
                await self.ended.wait()


class HostAttachment:
    """A connection to a keeper that has granted its hosts.

    Attributes:
        granted: Description of the hosts, from the keeper.
        notice: Set when the hosts are about to end.
        ending: Set when the program has to leave them.
    """

    def __init__(self, lines: states.Lines, granted: states.HostsGranted) -> None:
        self.granted = granted
        self.notice, self.ending = HostsNotice(), HostsNotice()
        self._replacing = trio.Lock()
        self._replaced: states.HostReplaced | None = None
        self._has_replaced = trio.Event()
        self._lines = lines
        self._agents: dict[int, KeptAgent] = {}
        self._number = 0
        self._is_over = False

    async def start(self, rank: int, order: AgentOrder) -> KeptAgent:
        """Start an agent.

        Raises:
            SpawnError: The keeper is gone.
        """
        self._number += 1
        agent = self._agents[self._number] = KeptAgent(self, self._number)
        if self._is_over or not await self.tell(states.BeginAgent(self._number, rank, order.line.decode())):
            raise SpawnError(
                f"no agent can be started on host {self.granted.hosts[rank]}: the keeper of the job has ended"
            )
        return agent

    async def replace(self, rank: int) -> str:
        """Replace the machine at a rank by a spare one, and return the name of the machine there.

        Raises:
            SpawnError: The keeper could not replace it, or is gone.
        """
        async with self._replacing:
            self._replaced, self._has_replaced = None, trio.Event()
            if not self._is_over and await self.tell(states.ReplaceHost(rank)):
                await self._has_replaced.wait()
            answer: states.HostReplaced | None = self._replaced
        if answer is None:
            raise SpawnError(f"the host {self.granted.hosts[rank]} cannot be replaced: the keeper of the job has ended")
        if answer.failure:
            raise SpawnError(f"the keeper of the job could not replace the host {answer.name}: {answer.failure}")
        return answer.name

    async def tell(self, record: states.BeginAgent | states.EndAgent | states.ReplaceHost) -> bool:
        """Send a record to the keeper, and return whether it is still there."""
        try:
            await self._lines.send(record)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def leave(self, name: str) -> None:
        """Give the hosts back; return when the keeper has them, so that the next program is not refused.

        If agents are still running, or the keeper does not confirm within `limits.KEPT_CLEAN_SECONDS`, this logs a
        warning; the keeper then cleans the hosts by itself, as after a program that died.
        """
        if not self._agents:
            with trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
                await self._lines.wait_closed()
                return
        _log.warning(
            "the keeper of %s has not confirmed within limits.KEPT_CLEAN_SECONDS (%g s) that its hosts are free; "
            "`trimesh job list` shows when they are",
            name,
            limits.KEPT_CLEAN_SECONDS,
        )

    async def read(self) -> None:
        """Handle records of the keeper until it has gone."""
        try:
            while self._take(await self._lines.receive(states.Answer)):
                pass
        except ProtocolError:
            pass
        self._is_over = True
        self._has_replaced.set()
        for agent in self._agents.values():
            agent.ended.set()

    def _take(self, record: object) -> bool:
        match record:
            case states.AgentEnded(number=number):
                if (agent := self._agents.pop(number, None)) is not None:
                    agent.exit = AgentExit(record.text, record.last_words, record.reason)
                    agent.ended.set()
            case states.HostsNoticed(text=text, is_end=is_end):
                (self.ending if is_end else self.notice).tell(text)
            case states.HostReplaced():
                self._replaced = record
                self._has_replaced.set()
            case _:
                return False
        return True


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _open_attachment(name: str) -> AsyncGenerator[HostAttachment, None]:
    """Hold the hosts of a kept job while the body runs.

    Raises:
        ConnectError: The job is not kept here, or its keeper refuses.
    """
    _, lines = await reached(name)
    grace = reread().grace
    grace = grace if math.isfinite(grace) else 0.0  # an endless grace cannot be planned for
    async with lines.stream:
        attach = states.Attach(os.getpid(), grace)
        granted: states.HostsGranted = await asked(lines, attach, name, seconds=limits.KEPT_CLEAN_SECONDS)
        attachment = HostAttachment(lines, granted)
        try:
            yield attachment
        finally:
            # Shielded, as the end of agents is, also from Ctrl-C, which Trio raises inside of a shield.
            _, interrupt = await run_to_end(partial(attachment.leave, name))
            if interrupt is not None:
                raise interrupt
