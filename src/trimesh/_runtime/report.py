"""What a process waits for, in words: for the log of a block that does not end (M4), and for `trimesh.dump`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

import trio

from trimesh._routing.collector import Rank
from trimesh._runtime.context import find_proc
from trimesh._runtime.exits import process_state
from trimesh._runtime.foreign import in_trio_now
from trimesh._runtime.stack import STACK_SECONDS, read_stack, request_stack
from trimesh.ids import AGENT

if TYPE_CHECKING:
    from trimesh._runtime.incoming import IncomingCall
    from trimesh._runtime.member import Member
    from trimesh._runtime.outgoing import OutgoingCall
    from trimesh._runtime.proc import Proc

_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait (D)",
    "Z": "ended",
    "": "gone",
}


def dump(file: TextIO | None = None) -> None:
    """Write what this process waits for: blocks that are left, child processes, every unended call and `Port.send`.

    Args:
        file: Where to; standard error if None.

    Blocking: not a checkpoint; takes `STACK_SECONDS` (50 ms) when there are child processes, whose main threads' stacks
    are shown.
    """
    in_trio_now(_dump)(file if file is not None else sys.stderr)


def _dump(out: TextIO) -> None:
    proc = find_proc()
    if proc is None:
        out.write("trimesh: no mesh is open in this process\n")
        return
    members = [member for member in proc.members.values() if not member.gone.is_set()]
    for member in members:
        request_stack(member.pid)
    if members:
        time.sleep(STACK_SECONDS)
    out.writelines(line + "\n" for line in _lines(proc, members))


def _lines(proc: Proc, members: Sequence[Member]) -> Iterator[str]:
    yield f"trimesh: process {proc.pid} on {proc.host_name}"
    for block in proc.stopping_blocks:
        yield f"  block {block.name} is being left, {grace_left(block.deadline)}"
    for member in members:
        yield from describe_member(proc, member)
    for call in proc.unended_calls():
        yield from _describe_outgoing(proc, call)
    for holding, one in proc.channels.blocked():
        home = proc.members.get(holding.home.proc_id)
        where = "" if home is None else f" of {home.label}"
        yield f"  send to channel {holding.channel}{where}: waits, {trio.current_time() - one.began_at:.1f} s old"
    for cell in proc.cells.values():
        for incoming in (*cell.mailbox.running(), *cell.mailbox.queued()):
            yield _describe_incoming(cell.spec.name, incoming)


def describe_member(proc: Proc, member: Member) -> Iterator[str]:
    """Yield lines on one child process: state, what it is asked to do, the stack of its main thread."""
    state = _STATES.get(process_state(member.pid), "running")
    doing = [
        f"{_doing(call)} for {trio.current_time() - call.started_at:.1f} s"
        for call in proc.unended_calls()
        if member.peer in call.peers()
    ]
    if member.is_expected:
        doing.append("asked to exit")
    yield f"  {member.label} pid {member.pid}: {state}" + "".join(f", {one}" for one in doing)
    for line in read_stack(member.pid, member.stack_fd).splitlines():
        yield f"    {line}"


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
    return f"in {call.what}"


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
        if state is not Rank.SETTLED:
            how = "queued here" if state is Rank.UNSENT else "sent"
            member = proc.members.get(call.targets[index].peer.proc_id)
            where = f"member {index}" if member is None else member.label
            yield f"  call {call.what} to {where}: {how}, {age:.1f} s old{budget}"


def _describe_incoming(name: str, call: IncomingCall) -> str:
    age = trio.current_time() - call.received_at
    deadline = call.deadline
    budget = "" if deadline == math.inf else f", {deadline - trio.current_time():.1f} s of budget left"
    return f"  endpoint {name}.{call.spec.name}: {'running' if call.running else 'queued'}, {age:.1f} s old{budget}"
