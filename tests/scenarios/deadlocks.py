"""Who waits for whom, and the search for what can never end.

    nodes a=call@0 m=unsent@0 r=room@1     names; a call lives in that process and was made by process 9
    runs a waits=b,m                 call `a` runs and awaits all of these
    queued b waits=a inside=a        call `b` waits for one of the slots that these hold; `a` has made it
    unsent m waits=r                 a message waits for room;  room r waits=a   which is there when `a` ends
    ends a                           it is over;  gives-up b   its caller waits no more, which it does not know yet
    stuck                            what cannot end, and the verdict, for somebody who sees everything at once
    search a                         look from `a` on
    answers 0                        process 0 answers all that it is asked;  gone 1   process 1 has ended

Calls are numbered in the order in which they are named; the greatest of a cycle is the one to fail (WA-4).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.script import Command, Scene

from trimesh._routing.deadlock import Deadlock, Question, Search, answer, find_verdict, stuck_nodes
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport

CALLERS = 9
"""The process that has made all calls."""


class DeadlockScene(Scene):
    """The waits of some processes, and one search."""

    def __init__(self) -> None:
        self.names: dict[str, NodeRef] = {}
        self.reports: dict[NodeRef, NodeReport] = {}
        self.search_: Search | None = None
        self.open: list[Question] = []

    # ---- the graph ----

    def _ref(self, name: str) -> NodeRef:
        assert name in self.names, f"{name} needs a name first: nodes {name}=call@0"
        return self.names[name]

    def nodes(self, command: Command) -> None:
        """Begin anew, with these names."""
        self.names, self.reports = {}, {}
        for number, (name, what) in enumerate(command.options.items(), 1):
            kind, _, proc = what.partition("@")
            called = (CALLERS, number) if kind == "call" else (number, 0)
            self.names[name] = NodeRef(NodeKind[kind.upper()], int(proc), *called)

    def _wait(self, command: Command, *, needs_all: bool, can_break: bool) -> None:
        ref = self._ref(command.words[0])
        waits = tuple(self._ref(name) for name in command.options.get("waits", "").split(",") if name)
        self.reports[ref] = NodeReport(ref, needs_all, waits, can_break)
        if ref.kind is NodeKind.CALL:
            caller = NodeRef(NodeKind.CALLER, ref.a, ref.b, ref.proc)
            self.names.setdefault(f"caller-of-{command.words[0]}", caller)
            above = command.options.get("inside")
            self.reports[caller] = NodeReport(caller, True, () if above is None else (self._ref(above),))

    def runs(self, command: Command) -> None:
        self._wait(command, needs_all=True, can_break=False)

    def queued(self, command: Command) -> None:
        self._wait(command, needs_all=False, can_break=True)

    def unsent(self, command: Command) -> None:
        self._wait(command, needs_all=False, can_break=True)

    def room(self, command: Command) -> None:
        self._wait(command, needs_all=False, can_break=False)

    def ends(self, command: Command) -> None:
        for name in command.words:
            self.reports.pop(self._ref(name), None)

    def gives_up(self, command: Command) -> None:
        """Let the caller of a call wait no more; the call itself does not know yet."""
        self.reports.pop(self._ref(f"caller-of-{command.words[0]}"), None)

    # ---- verdicts ----

    def _shown(self, refs: object) -> str:
        by_ref = {ref: name for name, ref in self.names.items()}
        return " ".join(by_ref[ref] for ref in refs) or "nothing"  # type: ignore[attr-defined]

    def _verdict(self, verdict: Deadlock | None) -> str:
        if verdict is None:
            return "no deadlock"
        cycle = self._shown(report.ref for report in verdict.cycle).replace(" ", " > ")
        return f"victim {self._shown([verdict.victim])}, in {cycle}; stuck: {self._shown(sorted(verdict.stuck))}"

    def stuck(self, _: Command) -> Iterator[str]:
        waits = {ref: node for ref, node in self.reports.items() if ref.kind is not NodeKind.CALLER}
        yield f"stuck: {self._shown(sorted(stuck_nodes(waits)))}"
        yield self._verdict(find_verdict(waits))

    # ---- a search ----

    def search(self, command: Command) -> Iterator[str]:
        self.search_ = Search(1, [self._ref(name) for name in command.words])
        self.open = []
        yield from self._progress()

    def answers(self, command: Command) -> Iterator[str]:
        assert self.search_ is not None
        (proc,) = command.numbers
        asked = [question for question in self.open if question.proc == proc]
        assert asked, f"process {proc} has not been asked"
        self.open = [question for question in self.open if question.proc != proc]
        for question in asked:
            reports = answer(question.refs, self.reports.get)
            yield f"{proc}: {self._shown(report.ref for report in reports)}"
            self.search_.answered(proc, question.look, reports)
        yield from self._progress()

    def gone(self, command: Command) -> Iterator[str]:
        assert self.search_ is not None
        (proc,) = command.numbers
        self.open = [question for question in self.open if question.proc != proc]
        self.search_.gone(proc)
        yield from self._progress()

    def _progress(self) -> Iterator[str]:
        assert self.search_ is not None
        questions, self.search_.questions = self.search_.questions, []
        self.open += questions
        for question in questions:
            yield f"look {question.look}: asks {question.proc} for {self._shown(question.refs)}"
        if self.search_.is_done:
            yield self._verdict(self.search_.verdict)
