"""Oracles: invariants of every simulated run. They receive its events and keep breaches in order.

    OR-1  A call gets at most one terminal frame from each rank, and one if its process lives to the end.
    OR-2  Calls of one process arrive at one actor in the order in which they were made, and start so in each group.
    OR-3  No call starts twice.
    OR-4  An injected error surfaces: in the terminal frame of its call, or as a failure for the owner.
    OR-5  No call starts, or continues uncancelled, after its budget has expired or its cancel has arrived; a
          caller that abandons a call leaves within `limits.CANCEL_ACK_SECONDS` or `abandon_after` (`Deadlines`).
    OR-6  A mailbox never holds more messages of one sender than `limits.MAILBOX_MESSAGES`, and the sender
          gets credit for each message that leaves it.
    OR-7  The incarnation at one place only grows, and nothing is accepted from one that is known to be gone.
    OR-8  When nothing is under way, nothing is left: no call, no message, no load; when the run is over, no actor,
          process, task or channel either.
    OR-9  Processes on a host of a job have ended when the controller gives the host up, if the host cannot hear it.

Oracles see frames and starts; the tables of the runtime are inspected twice: after the body of the test, and after the
run (OR-6, OR-8).

Hang detection: steps of a simulated run are bounded, in total and at one moment of the virtual clock.

a wait for nothing           the clock jumps to `HANG_SECONDS`
the same beside heartbeats   the clock advances slowly; the steps run out
a task that never waits      the clock stands still; after many steps it advances to the next deadline, as in real time
                             it would, until there is none or the steps run out

Trace: the events of one simulated run, in order; the same for the same seed, on every machine and in every process.

    1.250000  dispatch  w[gpus=2]  step()
    ^         ^         ^          ^
    virtual   site      where      what

An entry consists of names, coordinates and counted numbers. Ids, addresses, hash order and the wall clock
never enter, so two runs with one seed have the same text, and the same `hash`, whatever PYTHONHASHSEED is.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio
import trio.testing

from trimesh import limits
from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.life.current import proc_in
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.watch.report import describe_actors
from trimesh._wire import messages
from trimesh.ids import AGENT, ProcId
from trimesh.testing.plans.fault import Place
from trimesh.testing.simulated.host import World

Terminal = messages.Return | messages.Error | messages.CancelAck | messages.Refused
CallKey = tuple[ProcId, ProcId, int]
"""(caller, callee, number of the call)."""


class OracleError(AssertionError):
    """An invariant was broken: a bug of trimesh, or of a replacement for a part of it."""

    def __str__(self) -> str:
        return f"{super().__str__()}\nthis is a bug of trimesh: please report it, with the seed"


@attrs.define(eq=False)
class Oracles:
    """Invariant checkers of one run.

    Attributes:
        breaches: Broken invariants, in order.
        exited: Processes that have ended.
    """

    breaches: list[str] = attrs.field(factory=list[str])
    exited: set[ProcId] = attrs.field(factory=set[ProcId])
    _arrived: dict[CallKey, str] = attrs.field(factory=dict[CallKey, str])
    _ended: dict[CallKey, str] = attrs.field(factory=dict[CallKey, str])
    _started: set[CallKey] = attrs.field(factory=set[CallKey])
    _cancelled: set[CallKey] = attrs.field(factory=set[CallKey])
    _last_arrival: dict[Any, int] = attrs.field(factory=dict[Any, int])
    _last_start: dict[Any, int] = attrs.field(factory=dict[Any, int])
    _received: dict[Any, int] = attrs.field(factory=dict[Any, int])
    _injected: dict[CallKey, str] = attrs.field(factory=dict[CallKey, str])
    _incarnations: dict[Place, int] = attrs.field(factory=dict[Place, int])

    def breach(self, rule: str, text: str) -> None:
        """Record a broken rule."""
        self.breaches.append(f"{rule}: {text}")

    # ---- events ----------------------------------------------------------------------------------------------

    def received(self, proc: Proc, peer: Peer, message: Any) -> None:
        if peer.death is not None:
            self.breach("OR-7", f"a {type(message).__name__} was taken from a process that is known to be gone")
        if isinstance(message, messages.Call):
            self._call(proc, peer, message)
        elif isinstance(message, messages.Cancel):
            self._cancelled.add((peer.proc_id, proc.proc_id, message.call))
        elif isinstance(message, Terminal):
            key = (proc.proc_id, peer.proc_id, message.call)
            kind = type(message).__name__
            if key in self._ended:
                self.breach("OR-1", f"call {message.call} got {kind} after {self._ended[key]}")
            self._ended[key] = kind

    def _call(self, proc: Proc, peer: Peer, message: messages.Call) -> None:
        key = (peer.proc_id, proc.proc_id, message.call)
        where = (peer.proc_id, proc.proc_id, message.mesh)
        if message.call:
            if message.call <= self._last_arrival.get(where, 0):
                self.breach("OR-2", f"call {message.call} ({message.endpoint}) came after {self._last_arrival[where]}")
            self._last_arrival[where] = message.call
            self._arrived[key] = message.endpoint
        if message.mesh == AGENT:
            return
        if message.mesh not in proc.cells:  # it will be refused: there is no mailbox
            self._received.pop(where, None)
            return
        self._received[where] = self._received.get(where, 0) + 1
        count = peer.find_count(message.mesh)
        waiting = self._received[where] - (0 if count is None else count.dequeued)
        if waiting > limits.MAILBOX_MESSAGES:
            self.breach("OR-6", f"{waiting} messages of one sender wait for {message.endpoint}")

    def started(self, cell: Cell, call: IncomingCall) -> None:
        """Check and record the start of an endpoint."""
        what = f"{cell.spec.name}.{call.spec.name}"
        if call.is_expired:
            self.breach("OR-5", f"{what} started after its budget had expired")
        if call.is_broadcast:
            return
        key = (call.peer.proc_id, cell.proc.proc_id, call.call_id)
        if key in self._started:
            self.breach("OR-3", f"call {call.call_id} of {what} started twice")
        self._started.add(key)
        if key in self._cancelled:
            self.breach("OR-5", f"call {call.call_id} of {what} started after its cancel had arrived")
        slots = (call.peer.proc_id, cell.proc.proc_id, call.mesh, call.spec.slots)
        if call.call_id < self._last_start.get(slots, 0):
            self.breach("OR-2", f"call {call.call_id} of {what} started after {self._last_start[slots]}")
        self._last_start[slots] = call.call_id

    def injected(self, cell: Cell, call: IncomingCall) -> None:
        """Record an error that will be raised instead of running `call`."""
        if not call.is_broadcast:
            self._injected[call.peer.proc_id, cell.proc.proc_id, call.call_id] = f"{cell.spec.name}.{call.spec.name}"

    def launched(self, place: Place, incarnation: int) -> None:
        """Check and record the start of a process."""
        if incarnation <= self._incarnations.get(place, -1):
            self.breach("OR-7", f"incarnation {incarnation} at {place} after {self._incarnations[place]}")
        self._incarnations[place] = incarnation

    # ---- the end ---------------------------------------------------------------------------------------------

    def judge_calls(self, lived: Iterable[ProcId], severed: Collection[frozenset[ProcId]] = ()) -> None:
        """Check all calls at the end: those between processes that `lived` must be complete.

        Args:
            lived: Processes that were not ended from outside.
            severed: Pairs of processes that lost their link.
        """
        alive = set(lived)
        for (caller, callee, number), endpoint in self._arrived.items():
            if frozenset((caller, callee)) in severed:
                continue
            if {caller, callee} <= alive and (caller, callee, number) not in self._ended:
                self.breach("OR-1", f"call {number} of {endpoint} got no terminal frame")
        for key, what in self._injected.items():
            kind = self._ended.get(key)
            if frozenset(key[:2]) in severed:
                continue
            if set(key[:2]) <= alive and kind not in ("Error", "CancelAck"):
                self.breach("OR-4", f"the error injected into {what} came out as {kind}")

    def judge_loads(self, proc: Proc) -> None:
        """Check that a process that waits for no call counts no load, except abandoned calls; valid at any moment."""
        if proc.unended_calls():
            return
        for peer in proc.peers():
            abandoned = Counter(call.box for call in peer.abandoned)
            for _, box in peer.outboxes():
                if box.load != abandoned[box]:
                    self.breach("OR-8", f"a load of {box.load} is left, with {abandoned[box]} abandoned calls")

    def judge_sent(self, sender: Proc, receiver: Proc) -> None:
        """Check the messages from a process to the actors of another, when none of them is on the wire.

        Each sent message waits in a mailbox there, or was taken out and counted: a message lost in between makes the
        window smaller for ever.
        """
        there = receiver.peer(sender.proc_id)
        for mesh, box in sender.peer(receiver.proc_id).outboxes():
            cell, count = receiver.cells.get(mesh), there.find_count(mesh)
            if cell is None:
                continue  # a missing mailbox, too, is reported with the counts
            waiting = sum(call.peer is there for call in cell.waiting())
            taken = 0 if count is None else count.dequeued
            if box.window.sent_total != taken + waiting:
                text = f"of {box.window.sent_total} messages to {cell.spec.name} {taken} were taken and {waiting} wait"
                self.breach("OR-6", text)

    def judge_credits(self, sender: Proc, receiver: Proc) -> None:
        """Check the credits that a process received for its messages to another, when no reply is on the wire either.

        A report travels with a reply, so one still under way is not lost.
        """
        there = receiver.peer(sender.proc_id)
        for mesh, box in sender.peer(receiver.proc_id).outboxes():
            if mesh not in receiver.cells:
                self.breach(
                    "OR-8", f"a sender of {box.window.sent_total} messages to an actor that has ended keeps count"
                )
                continue
            count = there.find_count(mesh)
            reported = 0 if count is None else count.reported
            if box.window.acknowledged_total != reported:
                text = f"the receiver reported {reported} messages, and the sender has credit for"
                self.breach("OR-6", f"{text} {box.window.acknowledged_total}")

    def judge_tables(self, proc: Proc, *, is_over: bool) -> None:
        """Check the tables of a process when nothing is under way any more."""
        left: dict[str, list[Any]] = {"calls": [call.what for call in proc.unended_calls()]}
        for peer in proc.peers():
            left["messages of peers"] = [call.spec.name for call in peer.inbound.values()]
            left["early cancels"] = list(peer.early_cancels.values())
            left["queued messages"] = [mesh for mesh, box in peer.outboxes() if box.is_waiting]
            abandoned = Counter(call.box for call in peer.abandoned)
            left["loads"] = [box.load for _, box in peer.outboxes() if box.load != abandoned[box]]
            left["counts of ended actors"] = [mesh for mesh in peer.counts() if mesh not in proc.cells]
            for what in [what for what, things in left.items() if things]:
                self.breach("OR-8", f"{what} are left: {left[what]}")
        if is_over:
            cells = [cell.spec.name for mesh, cell in proc.cells.items() if mesh != AGENT]
            channels = proc.channels.open_channels
            if cells or proc.owners or proc.members or channels:
                text = f"left are {cells} {list(proc.owners)} {list(proc.members)}, and {channels} channels"
                self.breach("OR-8", text)

    def check(self) -> None:
        """Raise if an invariant was broken.

        Raises:
            OracleError: An invariant was broken.
        """
        if self.breaches:
            raise OracleError("\n".join(dict.fromkeys(self.breaches)))


# ---- progress: bounds on the steps of a simulated run, in total and at one moment of the virtual clock ---------------

STEPS_MAX: Final = 500_000
"""Steps of tasks after which a simulated run counts as hanging: some ten seconds of real time, many times those of a
long test. It ends runs whose clock goes on for ever because of heartbeats."""

HANG_SECONDS: Final = 100_000.0
"""Virtual time after which a run counts as hanging: a day. A run that polls exceeds its steps before."""

SPIN_STEPS_MAX: Final = 100_000
"""Maximum steps at one moment of the virtual clock, which cannot advance while a task never waits."""

SPIN_AGAIN_STEPS: Final = 1_000
"""Maximum steps at one moment after the clock was advanced for that reason, until all tasks wait."""

_SAMPLE: Final = 64
"""Interval of steps at which the task of a step is recorded."""

_BUSIEST: Final = 3
"""Tasks with most steps that a report names."""


class Progress(trio.abc.Instrument):
    """Counts the steps of one run; an instrument of its Trio run.

    Attributes:
        steps_max: Maximum steps of the run.
        stuck: Reason why it counts as hanging, or "".
        is_stuck: Set when it counts as hanging.
    """

    def __init__(self, steps_max: int = STEPS_MAX) -> None:
        self.steps_max = steps_max
        self.stuck = ""
        self.is_stuck = trio.Event()
        self._steps = 0
        self._moment = -1.0
        self._moment_began = 0
        self._spin_steps = SPIN_STEPS_MAX
        self._jumped = False
        self._makers: Counter[tuple[int, str]] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a step; check the bounds every so many steps."""
        self._steps += 1
        if self._steps % _SAMPLE:
            return
        proc = proc_in(task.context)
        self._makers[0 if proc is None else proc.proc_id, task.name] += 1
        now = trio.current_time()
        if now != self._moment:
            self._moment, self._moment_began = now, self._steps
            self._spin_steps = SPIN_AGAIN_STEPS if self._jumped else SPIN_STEPS_MAX
            self._jumped = False
            if self._steps > self.steps_max:
                self._stick(f"after {self._steps:,} steps of its tasks, in {now:g} virtual seconds")
        elif self._steps - self._moment_began > self._spin_steps and not self._jumped:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Advance the clock to the next deadline, as in real time, where it advances beside a task that never waits."""
        seconds = trio.lowlevel.current_statistics().seconds_to_next_deadline
        if now + seconds < HANG_SECONDS:
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, trio.testing.MockClock)
            clock.jump(max(seconds, 0.0))
            self._jumped = True
        else:
            steps = self._steps - self._moment_began
            self._stick(
                f"after {steps:,} steps at one moment of the virtual clock ({now:g} s), with no deadline to come"
            )

    def _stick(self, why: str) -> None:
        if not self.stuck:
            self.stuck = why
            self.is_stuck.set()

    def busiest(self, world: World) -> Iterator[str]:
        """Yield lines on the tasks that made most of the steps."""
        for (number, name), count in self._makers.most_common(_BUSIEST):
            label = next((child.label for proc_id, child in world.children.items() if proc_id == number), "controller")
            yield f"  {count * _SAMPLE:,} steps: {name} of {label}"


def what_it_waits_for(world: World) -> Iterator[str]:
    """Yield lines on every live process: its unended calls, and the states of its actors."""
    for label, proc in world.living():
        lines = [*_calls(proc), *describe_actors(proc)]
        if lines:
            yield f"{label}:"
            yield from (f"  {line}" for line in lines)


def _calls(proc: Proc) -> Iterator[str]:
    for call in proc.unended_calls():
        yield f"waits for {call.what}, called {proc.now() - call.started_at:.1f} s ago"


# ---- trace: events of one simulated run, in order; equal for equal seeds, on every machine and in every process ------

_MAGIC = "# trimesh trace 1"


@attrs.frozen
class Entry:
    """One event.

    Attributes:
        time: Virtual seconds since the run began.
        site: Site of the runtime: "spawn", "receive", "dispatch", "exit", "fault", "note".
        where: Coordinates, as `mesh[gpus=2]`.
        what: Description of the event.
    """

    time: float
    site: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.time:.9f}  {self.site:8}  {self.where}  {self.what}"


@attrs.define(eq=False)
class Trace:
    """The ordered record of one run.

    Attributes:
        seed: Seed of the run.
        entries: Its events.
    """

    seed: int
    entries: list[Entry] = attrs.field(factory=list[Entry])

    def add(self, time: float, site: str, where: str, what: str) -> None:
        """Add an event."""
        self.entries.append(Entry(time, site, where, " ".join(what.split())))

    @property
    def text(self) -> str:
        """The file form: a line with the seed, then one line an entry."""
        lines = [f"{_MAGIC} seed={self.seed:#x}", *map(str, self.entries)]
        return "\n".join(lines) + "\n"

    @property
    def hash(self) -> str:
        """Hash of the text: 16 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        """Write the file form."""
        path.write_text(self.text)

    def at(self, site: str) -> Sequence[Entry]:
        """Return the events at one site."""
        return [entry for entry in self.entries if entry.site == site]
