r"""One search for a deadlock: questions go out, answers come in, at the end there is a verdict or none.

    first look ----all answered----> second look ----all answered----> done
         \------nothing is stuck---------------------------------------->/

The first look follows the edges from where the suspicion arose, process by process, at different times. What seems
stuck is looked at again, and with it whether the callers still wait. What has not changed was so, everywhere at once,
at the moment between the two looks (`waits.steady`); what is stuck in that picture is a deadlock.

SE-1 No false alarm: at one moment after the search has begun the victim's cycle was closed, and no call in it was
     being cancelled, directly or by a cancel on its way from above.
SE-2 No miss: a deadlock that is reached from the starts and stands when the search begins is found, however much else
     changes meanwhile, for its own edges do not.
SE-3 What is not answered (a process that has ended, a call that is on its way or over) can end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from trimesh import limits
from trimesh._routing.waits import Deadlock, Graph, caller_of, find_verdict, is_held, steady, stuck_nodes
from trimesh._wire.waits import NodeKind, NodeRef, NodeReport
from trimesh.errors import ProtocolError


class Question(msgspec.Struct, frozen=True):
    """Ask a process for some of its nodes.

    Attributes:
        look: Comes back with the answer.
    """

    proc: int
    look: int
    refs: tuple[NodeRef, ...]


def answer(
    refs: Iterable[NodeRef], look_up: Callable[[NodeRef], NodeReport | None], nodes_max: int = limits.DEADLOCK_NODES_MAX
) -> list[NodeReport]:
    """Return what a process has to say of `refs`, and of all that is reached from them without leaving it."""
    found: list[NodeReport] = []
    asked = dict.fromkeys(refs)
    queue = deque(asked)
    while queue and len(found) < nodes_max:
        ref = queue.popleft()
        report = look_up(ref)
        if report is None:
            continue
        found.append(report)
        for edge in report.waits_for:
            if edge.proc == ref.proc and edge not in asked:
                asked[edge] = None
                queue.append(edge)
    return found


class Search:
    """A search.

    Attributes:
        number: Of the first look; the second has the next.
        questions: To be sent; whoever sends takes them out.
        verdict: Once done.
        stuck: What was found unable to end, once done; a deadlock among it is the verdict.
        callers: The calls whose callers wait for what is stuck, by process and number, once done.

    Args:
        number: Of the first look.
        starts: Where the suspicion arose.
        bounded: Whether waits that a deadline will end count, too.
        known: Nodes whose deadlock is no news, so not the verdict.
        nodes_max: How many nodes are looked at.
    """

    def __init__(
        self,
        number: int,
        starts: Sequence[NodeRef],
        *,
        bounded: bool = False,
        known: Collection[NodeRef] = (),
        nodes_max: int = limits.DEADLOCK_NODES_MAX,
    ) -> None:
        self.number = number
        self.starts = starts
        self.bounded = bounded
        self.known = known
        self.nodes_max = nodes_max
        self.stuck: Collection[NodeRef] = ()
        self.callers: Collection[NodeRef] = ()
        self.questions: list[Question] = []
        self.verdict: Deadlock | None = None
        self.is_done = False
        self._first: Graph | None = None
        self._suspects: set[NodeRef] = set()
        self._seen: dict[NodeRef, NodeReport] = {}
        self._asked: set[NodeRef] = set()
        self._open: defaultdict[int, int] = defaultdict[int, int](int)
        self._ask(self.starts)
        self._progress()

    @property
    def look(self) -> int:
        """Number of the look that is under way."""
        return self.number if self._first is None else self.number + 1

    @property
    def silent(self) -> Sequence[int]:
        """The processes that have not answered."""
        return [proc for proc, count in self._open.items() if count]

    def answered(self, proc: int, look: int, reports: Iterable[NodeReport]) -> None:
        """Take one answer; one to another look is dropped.

        Raises:
            ProtocolError: The process speaks of nodes that are not its own.
        """
        if look != self.look or not self._open[proc] or self.is_done:
            return
        self._open[proc] -= 1
        news: list[NodeReport] = []
        for report in reports:
            if report.ref.proc != proc:
                raise ProtocolError(f"a process must speak of its own nodes, got one of {report.ref.proc} from {proc}")
            if report.ref not in self._seen and len(self._seen) < self.nodes_max:
                self._seen[report.ref] = report
                news.append(report)
        self._asked.update(report.ref for report in news)  # those that were not asked for come with the others
        # The second look asks for what the first has found; only the callers of callers are news.
        follow = news if self._first is None else [report for report in news if report.ref.kind is NodeKind.CALLER]
        self._ask(edge for report in follow for edge in report.waits_for)
        self._progress()

    def gone(self, proc: int) -> None:
        """Do without a process that has ended, or does not answer: nothing in it waits (SE-3)."""
        if not self._open[proc] or self.is_done:
            return
        self._open[proc] = 0
        self._progress()

    def _ask(self, refs: Iterable[NodeRef]) -> None:
        by_proc: defaultdict[int, list[NodeRef]] = defaultdict(list)
        for ref in refs:
            if ref not in self._asked and len(self._asked) < self.nodes_max:
                self._asked.add(ref)
                by_proc[ref.proc].append(ref)
        for proc, asked in by_proc.items():
            for start in range(0, len(asked), limits.DEADLOCK_REFS_MAX):
                self._open[proc] += 1
                few = tuple(asked[start : start + limits.DEADLOCK_REFS_MAX])
                self.questions.append(Question(proc, self.look, few))

    def _progress(self) -> None:
        if any(self._open.values()):
            return
        if self._first is None:
            self._suspects = stuck_nodes(self._seen)
            if not self._suspects:
                self.is_done = True
                return
            self._first, self._seen, self._asked = self._seen, {}, set()
            callers = [caller for ref in self._suspects if (caller := caller_of(ref)) is not None]
            self._ask([*sorted(self._suspects), *sorted(callers)])
            return
        same = steady(self._first, self._seen, sorted(self._suspects))
        held = {ref: node for ref, node in same.items() if is_held(ref, self._seen)}
        self.stuck = stuck_nodes(held)
        if self.stuck:
            self.callers = [ref for ref in self._seen if ref.kind is NodeKind.CALLER]
            self.verdict = find_verdict(held, self.known)
        self.is_done = True
