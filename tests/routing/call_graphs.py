"""A world of processes, actors and calls, made of random programs and random delays, with an oracle that sees it all.

The processes know no more than real ones do: their own tables, and messages that are under way for a while. They
search for deadlocks by `trimesh._routing.deadlock`, from the first process, one search at a time. The oracle looks at
every table and at what is under way, and judges each verdict at the moments that count.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import attrs

from trimesh._routing.deadlock import Deadlock, Question, Search, answer
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport

PATIENCE = 15
"""Ticks from the arrival of a call that has to wait to the first look."""

ANSWER = 400
"""Ticks after which a process that has not answered is left out; it answers in less, unless it has ended."""


@attrs.define(eq=False)
class Call:
    """A call as its caller knows it."""

    proc: int
    number: int
    targets: dict[int, int]  # actor by process
    parent: Run | None
    on_done: Callable[[bool], None]
    is_bounded: bool = False
    is_cancelling: bool = False
    has_failed: bool = False
    open: set[int] = attrs.field(factory=set[int])


@attrs.define(eq=False)
class Run:
    """A call as its process knows it: queued, then running, then over."""

    proc: int
    actor: int
    slots: Slots
    call: Call
    serial: int
    depth: int
    state: str = "queued"
    is_cancelled: bool = False
    tasks: int = 0
    calls: dict[Call, None] = attrs.field(factory=dict[Call, None])

    @property
    def ref(self) -> NodeRef:
        if self.call.number == 0:
            return NodeRef(NodeKind.MESSAGE, self.proc, self.serial)
        return NodeRef(NodeKind.CALL, self.proc, self.call.proc, self.call.number)


@attrs.define(eq=False)
class Slots:
    """The slots of one group of one actor."""

    size: int
    queue: list[Run] = attrs.field(factory=list[Run])
    running: list[Run] = attrs.field(factory=list[Run])
    is_watched: bool = False


@attrs.define(eq=False)
class Process:
    """The tables of one process."""

    slots: list[list[Slots]]
    runs: dict[tuple[int, int], Run] = attrs.field(factory=dict[tuple[int, int], Run])
    messages: dict[int, Run] = attrs.field(factory=dict[int, Run])
    calls: dict[int, Call] = attrs.field(factory=dict[int, Call])
    next_call: int = 1
    is_dead: bool = False
    known_dead: set[int] = attrs.field(factory=set[int])


class World:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.serial = itertools.count(1)
        self.lanes: dict[tuple[int, int, str], int] = {}
        self.slowness = self.random.choice([1, 5, 30])
        count = self.random.randint(1, 4)
        self.processes = [
            Process(
                [
                    [Slots(self.random.choice([1, 1, 1, 2, 3])) for _ in range(self.random.choice([1, 1, 2]))]
                    for _ in range(self.random.randint(1, 3))
                ]
            )
            for _ in range(count)
        ]
        self.budget = self.random.randint(4, 40)
        self.fan_out = self.random.choice([1, 1, 2, 4])
        self.cancels = self.random.choice([0.0, 0.0, 0.1, 0.4])
        self.bounds = self.random.choice([0.0, 0.0, 0.1])
        self.disturbed_at = -1
        self.suspects: dict[NodeRef, None] = {}
        self.search: Search | None = None
        self.numbers = itertools.count(1, 2)
        self.stuck_before: dict[NodeRef, NodeReport] = {}
        self.stuck_between: dict[NodeRef, NodeReport] = {}
        self.snapshot_at = 0
        self.is_breaking = False
        self.victims: list[NodeRef] = []
        self.exact = 0

    # ---- time and messages -----------------------------------------------------------------------------------

    def later(self, delay: int, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.counter), act))

    def send(self, source: int, target: int, lane: str, act: Callable[[], None]) -> None:
        """Deliver after a random delay, in order within a lane."""
        if self.processes[source].is_dead:
            return
        at = max(self.now + self.random.randint(1, 1 + self.slowness), self.lanes.get((source, target, lane), 0))
        self.lanes[source, target, lane] = at
        self.later(at - self.now, lambda: None if self.processes[target].is_dead else act())

    def run(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.later(self.random.randint(0, 60), self.start_root)
        if len(self.processes) > 1 and self.random.random() < 0.1:
            victim = self.random.randrange(1, len(self.processes))
            self.later(self.random.randint(10, 300), lambda: self.kill(victim))
        while self.events:
            self.now, _, act = heapq.heappop(self.events)
            act()
            assert self.now < 1_000_000, "it does not come to an end"

    # ---- programs --------------------------------------------------------------------------------------------

    def start_root(self) -> None:
        proc = self.random.randrange(len(self.processes))
        if not self.processes[proc].is_dead:
            self.start_task(proc, None, 0, lambda: None)

    def start_task(self, proc: int, parent: Run | None, depth: int, on_end: Callable[[], None]) -> None:
        """A task: some sleeps and calls, one after the other."""
        steps = self.random.randint(1, 3)

        def step(index: int) -> None:
            if self.processes[proc].is_dead:
                return
            if index == steps or (parent is not None and parent.is_cancelled):
                on_end()
            elif self.random.random() < 0.3 or self.budget <= 0 or depth > 5:
                self.later(self.random.randint(1, 40), lambda: step(index + 1))
            else:
                self.make_call(proc, parent, depth, lambda failed: after_call(index, failed))

        def after_call(index: int, failed: bool) -> None:
            if failed and parent is not None and self.random.random() < 0.5:
                self.cancel_run(parent)  # the endpoint raises
            step(index + 1)

        self.later(self.random.choice([0, 0, 5]), lambda: step(0))

    def make_call(self, proc: int, parent: Run | None, depth: int, on_done: Callable[[bool], None]) -> None:
        self.budget -= 1
        alive = list(range(len(self.processes)))
        chosen = self.random.sample(alive, self.random.randint(1, min(self.fan_out, len(alive))))
        targets = {target: self.random.randrange(len(self.processes[target].slots)) for target in chosen}
        mine = self.processes[proc]
        if self.random.random() < 0.1:
            call = Call(proc, 0, targets, None, on_done)
            self.later(1, lambda: on_done(False))
        else:
            call = Call(proc, mine.next_call, targets, parent, on_done, open=set(targets))
            mine.next_call += 1
            mine.calls[call.number] = call
            if parent is not None:
                parent.calls[call] = None
            if self.random.random() < self.bounds:
                call.is_bounded = True
                self.later(self.random.randint(5, 300), lambda: self.cancel_call(call))
            elif self.random.random() < self.cancels:
                self.later(self.random.randint(1, 200), lambda: self.cancel_call(call))
        for target in chosen:
            if target in mine.known_dead:
                self.later(1, lambda t=target: self.settle(call, t, failed=True))
                continue
            group = self.random.randrange(len(self.processes[target].slots[targets[target]]))
            self.send(proc, target, "data", lambda t=target, g=group: self.arrive(t, targets[t], g, call, depth))

    # ---- calls -----------------------------------------------------------------------------------------------

    def arrive(self, proc: int, actor: int, group: int, call: Call, depth: int) -> None:
        process = self.processes[proc]
        slots = process.slots[actor][group]
        run = Run(proc, actor, slots, call, next(self.serial), depth + 1)
        if call.number:
            process.runs[call.proc, call.number] = run
        if len(slots.running) < slots.size:
            self.start(run)
            return
        slots.queue.append(run)
        if not slots.is_watched:
            slots.is_watched = True
            self.later(PATIENCE, lambda: self.check(proc, slots))

    def start(self, run: Run) -> None:
        run.state = "running"
        run.slots.running.append(run)
        if not run.call.number:
            self.processes[run.proc].messages[run.serial] = run
        run.tasks = self.random.choice([1, 1, 1, 2, 3])

        def on_end() -> None:
            run.tasks -= 1
            self.maybe_end(run)

        for _ in range(run.tasks):
            self.start_task(run.proc, run, run.depth, on_end)

    def maybe_end(self, run: Run) -> None:
        if run.state != "running" or run.calls or (run.tasks and not run.is_cancelled):
            return
        run.slots.running.remove(run)
        self.end(run, failed=False)
        if run.slots.queue:
            self.start(run.slots.queue.pop(0))

    def end(self, run: Run, *, failed: bool) -> None:
        run.state = "over"
        process = self.processes[run.proc]
        process.messages.pop(run.serial, None)
        if run.call.number:
            del process.runs[run.call.proc, run.call.number]
            self.send(run.proc, run.call.proc, "data", lambda: self.settle(run.call, run.proc, failed=failed))

    def settle(self, call: Call, target: int, *, failed: bool) -> None:
        if target not in call.open:
            return
        call.open.discard(target)
        if failed and not call.is_cancelling:
            call.has_failed = True
            self.cancel_call(call)
        if not call.open:
            del self.processes[call.proc].calls[call.number]
            if call.parent is not None:
                del call.parent.calls[call]
            call.on_done(call.has_failed)
            if call.parent is not None:
                self.maybe_end(call.parent)

    def cancel_call(self, call: Call) -> None:
        """The caller gives up: its own task waits for the acknowledgements."""
        if call.is_cancelling or not call.open or self.processes[call.proc].is_dead:
            return
        self.disturbed_at = self.now
        call.is_cancelling = True
        for target in call.open:
            self.send(call.proc, target, "control", lambda t=target: self.cancel_arrives(call, t))

    def cancel_arrives(self, call: Call, target: int) -> None:
        run = self.processes[target].runs.get((call.proc, call.number))
        if run is not None:
            self.cancel_run(run)
        elif target in call.open and not self.processes[call.proc].is_dead:
            # It has overtaken its call; a real process keeps it until that comes.
            self.later(5, lambda: self.cancel_arrives(call, target))

    def cancel_run(self, run: Run) -> None:
        if run.state == "over" or run.is_cancelled:
            return
        self.disturbed_at = self.now
        run.is_cancelled = True
        if run.state == "queued":
            run.slots.queue.remove(run)
            self.end(run, failed=False)
            return
        for call in list(run.calls):
            self.cancel_call(call)
        self.maybe_end(run)

    def kill(self, victim: int) -> None:
        self.disturbed_at = self.now
        dead = self.processes[victim]
        dead.is_dead = True
        for proc in range(len(self.processes)):
            if proc != victim:
                self.later(50 + self.random.randint(0, 30), lambda p=proc: self.learn_of_death(p, victim))

    def learn_of_death(self, proc: int, victim: int) -> None:
        process = self.processes[proc]
        process.known_dead.add(victim)
        for call in list(process.calls.values()):
            self.settle(call, victim, failed=self.random.random() < 0.5)
        for run in [run for run in process.runs.values() if run.call.proc == victim]:
            self.cancel_run(run)
        if proc == 0 and self.search is not None and not self.is_breaking:
            self.search.gone(victim)
            self.drive()

    # ---- what each process says of itself ----------------------------------------------------------------------

    def look_up(self, proc: int, ref: NodeRef) -> NodeReport | None:
        process = self.processes[proc]
        if ref.kind is NodeKind.CALLER:
            call = process.calls.get(ref.a)
            if call is None or call.is_cancelling or call.is_bounded or ref.b not in call.open:
                return None
            parent = call.parent
            if parent is None or parent.call.number == 0:
                return NodeReport(ref, needs_all=True, waits_for=())
            return NodeReport(
                ref, needs_all=True, waits_for=(NodeRef(NodeKind.CALLER, parent.call.proc, parent.call.number, proc),)
            )
        run = process.messages.get(ref.a) if ref.kind is NodeKind.MESSAGE else process.runs.get((ref.a, ref.b))
        if run is None or run.is_cancelled:
            return None
        if run.state == "queued":
            if len(run.slots.running) < run.slots.size:
                return None
            return NodeReport(ref, needs_all=False, waits_for=tuple(r.ref for r in run.slots.running), can_break=True)
        edges = waits_of(run)
        return NodeReport(ref, needs_all=True, waits_for=edges) if edges else None

    def check(self, proc: int, slots: Slots) -> None:
        slots.is_watched = False
        if self.processes[proc].is_dead or not slots.queue or not all(waits_of(run) for run in slots.running):
            return
        if len(slots.running) == slots.size:
            suspect = slots.running[0].ref
            self.send(proc, 0, "control", lambda: self.suspect(suspect))

    # ---- the searches, in the first process ----------------------------------------------------------------------

    def suspect(self, ref: NodeRef) -> None:
        self.suspects[ref] = None
        self.begin_search()

    def begin_search(self) -> None:
        if self.search is None and not self.is_breaking and self.suspects:
            starts, self.suspects = list(self.suspects), {}
            self.stuck_before = self.oracle()
            self.search = Search(next(self.numbers), starts)
            self.drive()

    def drive(self) -> None:
        """Send what the search wants to know; act when it is done."""
        search = self.search
        assert search is not None
        if search.questions and search.look != search.number and not self.stuck_between:
            self.stuck_between = self.oracle()
            self.snapshot_at = self.now
        questions, search.questions = search.questions, []
        for question in questions:
            if self.processes[question.proc].is_dead:
                self.later(ANSWER, lambda q=question: self.give_up(search, q.proc))
            self.send(0, question.proc, "control", lambda q=question: self.ask(search, q))
        if search.is_done:
            self.search = None
            snapshot, self.stuck_between = self.stuck_between, {}
            if search.verdict is not None:
                self.judge(search.verdict, snapshot)
                self.carry_out(search.verdict)
            else:
                self.begin_search()

    def give_up(self, search: Search, proc: int) -> None:
        if self.search is search:
            search.gone(proc)
            self.drive()

    def ask(self, search: Search, question: Question) -> None:
        reports = answer(question.refs, lambda ref: self.look_up(question.proc, ref))
        self.send(question.proc, 0, "data", lambda: self.answered(search, question, reports))

    def answered(self, search: Search, question: Question, reports: list[NodeReport]) -> None:
        if self.search is search:
            search.answered(question.proc, question.look, reports)
            self.drive()

    def carry_out(self, verdict: Deadlock) -> None:
        self.is_breaking = True
        over = False

        def done() -> None:
            nonlocal over
            if not over:
                over = True
                self.is_breaking = False
                self.suspects |= dict.fromkeys(verdict.stuck)
                self.begin_search()

        def arrive() -> None:
            self.break_victim(verdict)
            self.send(verdict.victim.proc, 0, "data", done)

        self.send(0, verdict.victim.proc, "control", arrive)
        self.later(ANSWER, done)

    def break_victim(self, verdict: Deadlock) -> None:
        victim = verdict.victim
        report = self.look_up(victim.proc, victim)
        if report is None or not report.can_break or set(report.waits_for) != set(verdict.holders):
            assert self.disturbed_at >= self.snapshot_at, "a verdict was void, and nobody had cancelled anything"
            return
        if self.disturbed_at < self.snapshot_at:
            assert victim in self.oracle(), "the deadlock was over already: a second victim"
        run = self.processes[victim.proc].runs[victim.a, victim.b]
        run.slots.queue.remove(run)
        self.victims.append(victim)
        self.end(run, failed=True)

    # ---- the oracle --------------------------------------------------------------------------------------------

    def oracle(self) -> dict[NodeRef, NodeReport]:
        """Return what can never end, by a look at everything at once, in the plainest way."""
        nodes: dict[NodeRef, NodeReport] = {}
        for process in self.processes:
            for run in [*process.runs.values(), *process.messages.values()]:
                if not process.is_dead and not self.will_be_cancelled(run):
                    nodes[run.ref] = NodeReport(
                        run.ref,
                        needs_all=run.state == "running",
                        waits_for=waits_of(run) if run.state == "running" else tuple(r.ref for r in run.slots.running),
                        can_break=run.state == "queued" and len(run.slots.running) == run.slots.size,
                    )
        while True:
            free = [
                ref
                for ref, node in nodes.items()
                if not (any if node.needs_all else all)(edge in nodes for edge in node.waits_for)
                or not node.waits_for
                or (not node.needs_all and not node.can_break)
            ]
            if not free:
                return nodes
            for ref in free:
                del nodes[ref]

    def will_be_cancelled(self, run: Run | None) -> bool:
        while run is not None:
            call = run.call
            if run.is_cancelled or (call.number and (call.is_cancelling or call.is_bounded)):
                return True
            if call.number and (self.processes[call.proc].is_dead or run.proc not in call.open):
                return True
            run = call.parent
        return False

    def judge(self, verdict: Deadlock, stuck: dict[NodeRef, NodeReport]) -> None:
        """Fail on a false alarm, and on any victim but the greatest of its knot (SE-1, WA-3, WA-4)."""
        victim = verdict.victim
        assert victim in stuck, f"a false alarm for {victim}"
        knot = reachable(victim, stuck)
        assert victim in knot, "the victim does not wait for itself"
        if stuck == self.stuck_before and self.disturbed_at < self.snapshot_at:  # else it has changed meanwhile
            self.exact += 1
            assert all(victim in reachable(ref, stuck) for ref in knot), "the victim's part of the graph can be left"
            queued = [ref for ref in knot if stuck[ref].can_break]
            assert victim == max(queued, key=lambda ref: (ref.b, ref.a, ref.proc))
        cycle = [node.ref for node in verdict.cycle]
        assert cycle[-1] == victim
        for one, other in itertools.pairwise([victim, *cycle]):
            assert other in stuck[one].waits_for, "the cycle has a gap"


def waits_of(run: Run) -> tuple[NodeRef, ...]:
    return tuple(
        NodeRef(NodeKind.CALL, target, call.proc, call.number)
        for call in run.calls
        if not call.is_cancelling and not call.is_bounded
        for target in sorted(call.open)
    )


def reachable(start: NodeRef, nodes: dict[NodeRef, NodeReport]) -> set[NodeRef]:
    """Return what `start` reaches, without itself unless a way leads back."""
    found: set[NodeRef] = set()
    todo = [start]
    while todo:
        for edge in nodes[todo.pop()].waits_for:
            if edge in nodes and edge not in found:
                found.add(edge)
                todo.append(edge)
    return found
