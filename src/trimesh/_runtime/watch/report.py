"""What a process waits for, in words: for the log of a block that does not end (M4), and for `trimesh.dump`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TextIO

import trio

from trimesh._routing.collector import RankState
from trimesh._runtime.system.exits import process_state
from trimesh._runtime.watch.stack import TASKS_SECONDS, Report, read_report, request_report
from trimesh._runtime.watch.task_tree import describe_actors, describe_threads, is_in_loop
from trimesh.errors import place_name
from trimesh.ids import AGENT

if TYPE_CHECKING:
    from types import FrameType

    from trimesh._runtime.calls.outgoing import OutgoingCall
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.meshes.member import Member
    from trimesh._runtime.peers.abandoned import AbandonedCall

_POLL_SECONDS: Final = 0.005
"""How often a process that has been asked is looked at."""

_Cut = Callable[[Iterable[str]], list[str]]
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait (D)",
    "Z": "ended",
    "": "gone",
}


def write_report(proc: Proc | None, out: TextIO) -> None:
    """Write what a process waits for, and what its actors and child processes do; None for no process yet.

    Blocking: no checkpoint; takes up to `TASKS_SECONDS` when there are child processes.
    """
    if proc is None:
        out.write("trimesh: no mesh is open in this process\n")
        return
    asked = Asked([member for member in proc.members.values() if not member.gone.is_set()])
    while not asked.is_answered:
        time.sleep(_POLL_SECONDS)
    out.writelines(line + "\n" for line in _lines(proc, asked))


class Asked:
    """Child processes that were asked what they do.

    Attributes:
        reports: What they have said, by process.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.reports: dict[Member, Report] = {}
        self._asked_at = {member: request_report(member.pid) for member in members if member.stack_fd >= 0}
        self._ends_at = time.monotonic() + TASKS_SECONDS
        self._members = members

    @property
    def members(self) -> Sequence[Member]:
        """Those that were to be asked; simulated ones cannot."""
        return self._members

    @property
    def is_answered(self) -> bool:
        """Whether all have said what they do, or had their time to; looks now."""
        for member, asked_at in self._asked_at.items():
            found = self.reports.get(member)
            if found is None or found.tasks is None:
                self.reports[member] = read_report(member.pid, member.stack_fd, asked_at)
        is_said = all(report.tasks is not None for report in self.reports.values())
        return is_said or time.monotonic() >= self._ends_at


def _lines(proc: Proc, asked: Asked) -> Iterator[str]:
    yield f"trimesh: process {proc.pid} on {proc.host_name}"
    for block in proc.stopping_blocks:
        yield f"  block {block.name} is being left, {grace_left(block.deadline)}"
    yield from _describe_members(proc, asked)
    for call in proc.unended_calls():
        yield from _describe_outgoing(proc, call)
    for peer in proc.peers():
        for abandoned in peer.abandoned:
            yield f"  {describe_abandoned(abandoned)}"
    for holding, one in proc.channels.blocked():
        home = proc.members.get(holding.home.proc_id)
        where = "" if home is None else f" of {home.label}"
        yield f"  send to channel {holding.channel}{where}: waits, {trio.current_time() - one.began_at:.1f} s old"
    for line in describe_actors(proc):
        yield f"  {line}"


def describe_abandoned(call: AbandonedCall) -> str:
    """Describe a call that was given up, in one line."""
    now, where = trio.current_time(), call.where()
    member = "" if where.point is None else f" to {place_name(where.mesh, where.point)}"
    return (
        f"call {call.what}{member}: given up {now - call.cancelled_at:.1f} s ago, may still run, "
        f"{now - call.started_at:.1f} s old"
    )


def describe_self(proc: Proc, frame: FrameType | None) -> tuple[bool, str]:
    """Describe this process to its owner; see `stack.Describe`."""
    return is_in_loop(frame), "\n".join([*describe_actors(proc), *describe_threads()])


async def describe_waiting(proc: Proc, members: Sequence[Member]) -> Sequence[str]:
    """Return lines on those child processes of a block which is being left that it waits for."""
    waiting = [member for member in members if not member.gone.is_set() and _doing_of(proc, member)]
    asked = Asked(waiting)
    while not asked.is_answered:  # noqa: ASYNC110 - another process answers, by a file
        await trio.sleep(_POLL_SECONDS)
    others = len(members) - len(waiting)
    from trimesh._runtime.watch.brief_stacks import brief  # noqa: PLC0415 - most blocks end

    lines = _describe_members(proc, asked, brief)
    if waiting and others:
        lines.append(f"  and for nothing of {others} other {'process' if others == 1 else 'processes'}")
    return lines


def _describe_members(proc: Proc, asked: Asked, cut: _Cut = list) -> list[str]:
    """Return lines on those that were asked, each cut; those of which the same is to be said are told once."""
    from trimesh._runtime.watch.folding import fold  # noqa: PLC0415 - most blocks end

    return fold(
        (member.label, member.pid, cut(_describe_member(proc, member, asked.reports.get(member))))
        for member in asked.members
    )


def _describe_member(proc: Proc, member: Member, report: Report | None) -> Iterator[str]:
    """Yield lines on one child process: state, what it is asked to do, what it does."""
    state = _STATES.get(process_state(member.pid), "running")
    yield f"  {member.label} pid {member.pid}: {state}" + "".join(f", {one}" for one in _doing_of(proc, member))
    if report is None:
        return
    tasks = report.tasks
    for line in () if tasks is None else tasks.splitlines():
        yield f"    {line}"
    for line in () if report.is_in_loop else report.stack.splitlines():
        yield f"    {line}"


def _doing_of(proc: Proc, member: Member) -> list[str]:
    """Return what this process has asked a child process to do; whether a call runs there, that one knows."""
    doing = [
        f"{_doing(call)} for {trio.current_time() - call.started_at:.1f} s"
        for call in proc.unended_calls()
        if call.is_open_at(member.peer)
    ]
    doing += [f"not done with {call.what}, which was given up" for call in member.peer.abandoned]
    if member.is_expected:
        doing.append("asked to exit")
    return doing


_OF_AGENT = {
    "setup": "in the setup function",
    "spawn": "in the start of an actor",
    "drain": "in accepted messages of {mesh}",
    "stop": "in the clean-up of {mesh}",
}


def _doing(call: OutgoingCall) -> str:
    mesh, _, endpoint = call.what.rpartition(".")
    if call.targets[0].mesh == AGENT and endpoint in _OF_AGENT:
        return _OF_AGENT[endpoint].format(mesh=mesh)
    return f"called {call.what}"


def grace_left(deadline: float | None) -> str:
    """Say how long clean-up may still take."""
    if deadline is None:
        return "accepted messages still run"
    if deadline == math.inf:
        return "grace is infinite"
    return f"{max(0.0, deadline - trio.current_time()):.1f} s of grace left"


def _describe_outgoing(proc: Proc, call: OutgoingCall) -> Iterator[str]:
    age = trio.current_time() - call.started_at
    budget = "" if call.budget is None else f", budget {call.budget:.1f} s"
    states = call.collector.states()
    for index, state in enumerate(states):
        if state is not RankState.SETTLED:
            how = "queued here" if state is RankState.UNSENT else "sent"
            member = proc.members.get(call.targets[index].peer.proc_id)
            where = f"member {index}" if member is None else member.label
            yield f"  call {call.what} to {where}: {how}, {age:.1f} s old{budget}"
