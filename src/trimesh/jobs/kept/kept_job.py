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
    from trimesh.jobs.kept.keeper import KeeperTold


_BOOT: Final = (
    "import os, sys\nif os.fork(): os._exit(0)\nsys.path[:] = sys.argv[1:]\n"
    "from trimesh.jobs.kept.keeper import main\nmain()"
)
"""Forks first, so that the keeper is no child of the program that has started it."""

_READ_BYTES: Final = 1 << 16


class KeptJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is kept, or was.

    Attributes:
        state: What its file says.
        attached: The program that has its hosts.
        gone: Why nothing is kept any more; "" while it is.
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
    """Start a job that stays after this program: `await jobs.keep("exp7", SSHJob(["n1", "n2"]), lease=7200)`.

    Returns when its hosts are there; `jobs.attach(name)` then has them as a mesh, in this program or another one of
    this user on this machine. A cancel, and the end of this program before that, leave nothing.

    Args:
        name: Of the kept job, free among those of this user.
        job: The job; its class must be importable by another process.
        lease: Seconds, from when the hosts are there, after which all of it ends; see `extend`.

    Raises:
        TypeError, ValueError: The name, the job or the lease is none.
        ConnectError: The name is taken.
        SpawnError: The hosts cannot be started; the message includes the reason of the refusal.
    """
    states.checked_kept_name(name)
    if not isinstance(job, Job):
        raise TypeError(f"keep takes a job, LocalJob(2) for one, got {job!r}")
    seconds = checked_lease(lease)
    check_keepable(job)
    return await in_trio(partial(_keep, name, job, seconds))()


def checked_lease(lease: Any) -> float:
    """Return the seconds of a lease.

    Raises:
        ValueError: It is no number of seconds, or too large.
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
        ValueError: Its hosts dial a port that one program holds, or this process is one of a mesh.
    """
    if getattr(job, "port", 0) or getattr(job, "advertise", ()):
        raise ValueError(
            f"each program that attaches to a kept job listens at a port of its own, so port= and advertise= have no "
            f"meaning there: leave them out of {job!r}"
        )
    if MARKER in os.environ:
        raise ValueError("a job is kept by a program, not by a process of a mesh, whose end would end it")


async def _keep(name: str, job: Job, lease: float) -> KeptJob:
    from trimesh.jobs.kept.keeper import KeeperTold, KeepOrder  # noqa: PLC0415 - the native library is loaded by it

    if name in states.names():
        raise ConnectError(taken_words(name))
    try:
        text = pickle.dumps(attrs.evolve(job))
    except Exception as error:
        raise SpawnError(f"a job that is kept must be picklable, and this is not: {error}") from error
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
        told: KeeperTold | None = None
        data = bytearray()
        try:
            await process.wait()
            await to_keeper.send_all(len(order).to_bytes(4, "little") + order)
            while more := await from_keeper.receive_some(_READ_BYTES):
                data += more
                for line in data.split(b"\n")[:-1]:
                    told = msgspec.json.decode(line, type=KeeperTold)
                if told is not None and (told.state is not None or told.failure):
                    break
        except trio.BrokenResourceError:
            told = None
        except BaseException:
            await _take_back(to_keeper, from_keeper, told)
            raise
    if told is None or (told.state is None and not told.failure):
        raise SpawnError(f"the keeper of {name} has ended before it had the hosts: {_last_words(name)}")
    if told.state is not None:
        return KeptJob(state=told.state)
    if told.is_taken:
        raise ConnectError(told.failure)
    raise SpawnError(f"the hosts of {name} cannot be had: {told.failure}")


async def _take_back(
    to_keeper: trio.abc.SendStream, from_keeper: trio.abc.ReceiveStream, told: KeeperTold | None
) -> None:
    """Have a keeper give up, and wait until it has; one that hangs is killed."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(limits.KEPT_END_SECONDS) as scope:
            await to_keeper.aclose()
            while await from_keeper.receive_some(_READ_BYTES):
                pass
        if scope.cancelled_caught and told is not None:
            with suppress(ProcessLookupError):
                os.kill(told.pid, signal.SIGKILL)


def taken_words(name: str) -> str:
    """Return why a name cannot be taken."""
    return (
        f"the name {name!r} is that of a job which is kept, or was: see `trimesh job list`; take another name, or end "
        f"that one by `trimesh job stop {name}`"
    )


def _last_words(name: str) -> str:
    try:
        text = states.log_of(name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "it has said nothing"
    return " | ".join(text.splitlines()[-limits.AGENT_LINES_KEPT :]) or "it has said nothing"


# ---- asking a keeper --------------------------------------------------------------------------------------------


async def reached(name: str) -> tuple[states.KeptState, states.Lines]:
    """Return the state of a kept job, and a connection to its keeper.

    Raises:
        ConnectError: It is not kept, or not any more, or not here.
    """
    state = states.read(states.checked_kept_name(name))
    gone = states.why_gone(state)
    if gone:
        raise ConnectError(f"the job {name} is not kept any more: {gone}; `trimesh job stop {name}` frees the name")
    if state.status == "starting":
        raise ConnectError(f"the job {name} is not there yet: process {state.pid} waits for its hosts; try again later")
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
        ConnectError: It refuses, does not answer, or has ended.
    """
    with trio.move_on_after(seconds + limits.KEPT_ANSWER_SECONDS):
        try:
            await lines.send(question)
            answer: Any = await lines.receive(states.Answer)
        except (trio.BrokenResourceError, ProtocolError) as error:
            raise ConnectError(f"the keeper of {name} cannot be asked: {error}") from error
        if answer is None:
            raise ConnectError(f"the keeper of {name} has ended")
        if isinstance(answer, states.KeeperRefused):
            raise ConnectError(f"{name}: {answer.text}")
        return answer
    raise ConnectError(
        f"the keeper of {name} has not answered within limits.KEPT_ANSWER_SECONDS ({limits.KEPT_ANSWER_SECONDS:g} s)"
    )


async def kept() -> list[KeptJob]:
    """Return the jobs of this user that are kept, with who is attached, and those that were and have not been stopped.

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
            continue  # it has ended at this moment
        found.append(await _looked(state))
    return found


async def _looked(state: states.KeptState) -> KeptJob:
    try:
        gone = states.why_gone(state)
        if gone or state.status == "starting":
            return KeptJob(state=state, gone=gone)
        _, lines = await reached(state.name)
        async with lines.stream:
            seen: states.JobSeen = await asked(lines, states.LookAtJob(), state.name)
    except ConnectError as error:
        return KeptJob(state=state, gone=str(error))
    return KeptJob(state=seen.state, attached=seen.attached)


async def extend(name: str, *, lease: float) -> KeptJob:
    """Have the lease of a kept job end so many seconds from now, whether a program is attached or not.

    Raises:
        ValueError: The lease is none.
        ConnectError: Nothing is kept by that name.
    """
    return await in_trio(partial(_extend, name, checked_lease(lease)))()


async def _extend(name: str, lease: float) -> KeptJob:
    _, lines = await reached(name)
    async with lines.stream:
        seen: states.JobSeen = await asked(lines, states.Extend(lease), name)
    return KeptJob(state=seen.state, attached=seen.attached)


async def stop(name: str) -> str:
    """End a kept job and the attached program; return a description of the outcome.

    Of one that is not kept any more, the name is freed.

    Raises:
        ConnectError: There is none by that name, or it is on another machine.
    """
    return await in_trio(partial(_stop, states.checked_kept_name(name)))()


async def _stop(name: str) -> str:
    state = states.read(name)
    gone = states.why_gone(state)
    if gone:
        states.remove(state)
        return f"nothing was kept any more: {gone}"
    pidfd = os.pidfd_open(state.pid)
    try:
        if start_of(state.pid) == state.started:  # it is the keeper that the descriptor is of
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


# ---- ends that are known before: of the lease, and by a limit of time of the job -------------------------------------


class ForeseenEnd:
    """The ends that are known, for the program that is attached.

    Args:
        seconds_left: Returns those of the lease.
        wait_job_notice: Waits for the notice that the job gives to its own program.
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
        """Wait until the first end is so near that a program is to save what it has; return why."""
        return await _first(partial(self._wait_lease, limits.KEPT_NOTICE_SECONDS), self._wait_job_notice)

    async def wait_end(self, grace: float) -> str:
        """Wait until a program whose blocks take `grace` seconds has to leave; return why."""
        seconds = grace + limits.KEPT_LEAVE_SECONDS
        return await _first(partial(self._wait_lease, seconds), partial(self._launcher.wait_end, seconds))

    async def _wait_lease(self, seconds: float) -> str:
        """Wait until `seconds` are left, or half of the present remainder; the lease may be extended meanwhile."""
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


# ---- a program on the hosts of a kept job: agents that its keeper gives their orders ---------------------------------

_log = logging.getLogger("trimesh")


def _checked_name(_: object, __: object, name: Any) -> None:
    states.checked_kept_name(name)


@attrs.frozen
class AttachedJob(Job):
    """Hosts of a kept job, made by `attach`. Entering acquires them; leaving gives them back clean.

    Attributes:
        name: Of the kept job.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes what the kept job says.
        pki: Certificates of your own authority; None takes what the kept job says.
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
            job = _GrantedJob(hosts, pickle=pickled, pki=pki, insecure=insecure, name=self.name, attachment=attachment)
            async with open_job(job) as mesh:
                yield mesh


def attach(name: str, *, pickle: Pickle | None = None, pki: OwnPKI | None = None) -> AttachedJob:
    """Return the hosts of a kept job, to be entered: `async with jobs.attach("exp7") as hosts:`.

    They are this program's until the block is left, then clean and another program's. What `Job` says holds.

    Args:
        name: Of the kept job, see `keep`.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes what the kept job says.
        pki: Certificates of your own authority, by files, see `OwnPKI`; None takes what the kept job says.

    Raises:
        TypeError, ValueError: The name is none.
        ConnectError: On entering: nothing is kept by that name, or another program is attached; the text says which.
    """
    return AttachedJob(name, pickle=pickle, pki=pki)


@attrs.frozen
class _GrantedJob(Job):
    """A kept job, as its keeper has granted it to this program."""

    name: str = attrs.field(kw_only=True)
    attachment: HostAttachment = attrs.field(kw_only=True, repr=False, eq=False)

    def launcher(self) -> KeptLauncher:
        return KeptLauncher(self.attachment)

    def host_id(self, rank: int) -> str:
        return self.attachment.granted.host_ids[rank]


class KeptLauncher(Launcher):
    """Starts agents by the keeper."""

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
        """See `Launcher.replace`: a spare host of the job that is kept, where it has one."""
        if self._attachment.granted.replaces:
            name = await self._attachment.replace(rank)
            self.hosts = [name if one == rank else before for one, before in enumerate(self.hosts)]

    async def grow(self, count: int, say: Callable[[str], None]) -> Sequence[int]:
        del say
        await trio.lowlevel.checkpoint()
        raise SpawnError(
            f"{count} more hosts cannot be had: a kept job has those that it was kept with, {len(self.hosts)}; keep "
            "one that has more"
        )

    async def wait_notice(self) -> str:
        return await self._attachment.notice.wait()

    async def wait_end(self, ahead: float = 0.0) -> str:
        """See `Launcher.wait_end`; the keeper knows what leaving takes."""
        del ahead
        return await self._attachment.ending.wait()


class KeptAgent:
    """An agent that the keeper has given its order; see `StartedAgent`."""

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
        granted: What it has said of them.
        notice: Told that they are about to end.
        ending: Told that the program has to leave them.
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
        """Have an agent started.

        Raises:
            SpawnError: The keeper is gone.
        """
        self._number += 1
        agent = self._agents[self._number] = KeptAgent(self, self._number)
        if self._is_over or not await self.tell(states.BeginAgent(self._number, rank, order.line.decode())):
            raise SpawnError(f"the host {self.granted.hosts[rank]} cannot be had: the keeper of the job has ended")
        return agent

    async def replace(self, rank: int) -> str:
        """Have another machine at a place, and return its name.

        Raises:
            SpawnError: It cannot be had, or the keeper is gone.
        """
        async with self._replacing:
            self._replaced, self._has_replaced = None, trio.Event()
            if not self._is_over and await self.tell(states.ReplaceHost(rank)):
                await self._has_replaced.wait()
            answer: states.HostReplaced | None = self._replaced
        if answer is None:
            raise SpawnError(f"the host {self.granted.hosts[rank]} cannot be replaced: the keeper of the job has ended")
        if answer.failure:
            raise SpawnError(f"the keeper of the job has no other host in the place of {answer.name}: {answer.failure}")
        return answer.name

    async def tell(self, record: states.BeginAgent | states.EndAgent | states.ReplaceHost) -> bool:
        """Tell the keeper, and return whether it is there."""
        try:
            await self._lines.send(record)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def leave(self, name: str) -> None:
        """Give the hosts back; returns when the keeper has them, so that the next program is not refused.

        Where an agent has not ended within `limits.KEPT_CLEAN_SECONDS`, or the keeper does not answer for as long, the
        keeper frees them alone, as after a program that has died.
        """
        if not self._agents:
            with trio.move_on_after(limits.KEPT_CLEAN_SECONDS):
                await self._lines.wait_closed()
                return
        _log.warning(
            "the keeper of %s has not confirmed within limits.KEPT_CLEAN_SECONDS (%g s) that its hosts are free; "
            "`trimesh job list` says when they are",
            name,
            limits.KEPT_CLEAN_SECONDS,
        )

    async def read(self) -> None:
        """Learn what the keeper says, until it has gone."""
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
    """Have the hosts of a kept job while the body runs.

    Raises:
        ConnectError: They cannot be had.
    """
    _, lines = await reached(name)
    grace = reread().grace
    grace = grace if math.isfinite(grace) else 0.0  # such a block has no end that could be waited for
    async with lines.stream:
        attach = states.Attach(os.getpid(), grace)
        granted: states.HostsGranted = await asked(lines, attach, name, seconds=limits.KEPT_CLEAN_SECONDS)
        attachment = HostAttachment(lines, granted)
        try:
            yield attachment
        finally:
            # Shielded as the end of agents is; of Ctrl-C, too, which Trio raises inside of a shield.
            _, interrupt = await run_to_end(partial(attachment.leave, name))
            if interrupt is not None:
                raise interrupt
