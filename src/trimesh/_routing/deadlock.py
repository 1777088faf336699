r"""Deadlock search: sends queries to processes, collects replies, and reaches a verdict or none.

    first look ----all answered----> second look ----all answered----> done
         \------nothing is stuck---------------------------------------->/

The first look follows the wait edges from the suspected nodes, process by process, at different times. Nodes that seem
stuck are queried again, together with whether their callers still wait. Edges that are in both looks existed everywhere
at the moment between the two looks (`steady`). Nodes that are stuck in that consistent snapshot are a deadlock.

SE-1 No false alarm: at one moment after the search has begun the victim's cycle was closed, and no call in it was
     being cancelled, directly or by a cancel on its way from above.
SE-2 No miss: a deadlock that is reachable from the starts and exists when the search begins is found, whatever else
     changes meanwhile, because its own edges do not.
SE-3 A node without a reply (a process that has ended, a call in transit or over) counts as able to end.

The wait graph, and its nodes that can never end (rule C8):

    running call --all of--> the calls, and the full mailboxes, that its tasks wait for
    queued call  --any of--> the calls that hold the slots of its group
    full mailbox --any of--> the calls that hold the slots for which its messages wait
    wait for a restart --all of--> the calls that spawn the next members

WA-1 A node *can end* when it waits for nothing, or when enough of the nodes it waits for can end. Nodes outside the
     graph can end. All others are *stuck*: the least fixpoint, so every doubt counts against an alarm.
WA-2 A stuck node stays stuck: the nodes that it waits for would have to end first. Only a cancel, a death or an error
     from outside changes that.
WA-3 Every stuck node reaches a *knot*: a strongly connected component of stuck nodes that no edge leaves. A knot is a
     deadlock by itself, whatever else is stuck because of it.
WA-4 The victim is the queued call of a knot, or the call that waits for a restart, with the greatest (call id, caller,
     process); where there is none, the unsent message with the greatest. So all searches of one knot choose the same
     victim.
WA-5 A call is *held* when its caller waits for it, is not being cancelled, and is held itself. A running or queued
     call that is not held will be cancelled, so it can end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from trimesh import limits
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport
from trimesh.errors import ProtocolError


class Question(msgspec.Struct, frozen=True):
    """A query to a process for some of its nodes.

    Attributes:
        look: Number of the look; returned with the reply.
    """

    proc: int
    look: int
    refs: tuple[NodeRef, ...]


def answer(
    refs: Iterable[NodeRef], look_up: Callable[[NodeRef], NodeReport | None], nodes_max: int = limits.DEADLOCK_NODES_MAX
) -> list[NodeReport]:
    """Return a process's reports on `refs` and all nodes reachable from them within the process."""
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
    """One deadlock search.

    Attributes:
        number: Number of the first look; the second has the next.
        questions: Queries to send; the sender removes them.
        verdict: The verdict, once done.
        stuck: Stuck nodes, once done; a deadlock among them is the verdict.
        callers: Calls whose callers wait for stuck nodes, by process and number, once done.

    Args:
        number: Number of the first look.
        starts: Nodes under suspicion.
        bounded: Whether waits that a deadline will end count, too.
        known: Nodes of deadlocks already reported, which are not the verdict.
        nodes_max: Maximum number of nodes to query.
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
        """Number of the current look."""
        return self.number if self._first is None else self.number + 1

    @property
    def silent(self) -> Sequence[int]:
        """Processes that have not replied."""
        return [proc for proc, count in self._open.items() if count]

    def answered(self, proc: int, look: int, reports: Iterable[NodeReport]) -> None:
        """Process one reply; a reply to another look is dropped.

        Raises:
            ProtocolError: The process reports nodes that are not its own.
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
        self._asked.update(report.ref for report in news)  # nodes that were not queried come with the others
        # The second look queries the nodes of the first; only callers of callers are new.
        follow = news if self._first is None else [report for report in news if report.ref.kind is NodeKind.CALLER]
        self._ask(edge for report in follow for edge in report.waits_for)
        self._progress()

    def gone(self, proc: int) -> None:
        """Skip a process that has ended or does not reply: its nodes count as able to end (SE-3)."""
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


# ---- the graph of who waits for whom, and what in it can never end (rule C8) -----------------------------------------

Graph = Mapping[NodeRef, NodeReport]


class Deadlock(msgspec.Struct, frozen=True):
    """One deadlock.

    Attributes:
        victim: The call, or the unsent message, that has to fail.
        holders: Nodes that it waits for.
        cycle: From the node that blocks the victim to the victim itself, each waiting for the next.
        stuck: All stuck nodes.
    """

    victim: NodeRef
    holders: tuple[NodeRef, ...]
    cycle: Sequence[NodeReport]
    stuck: Collection[NodeRef]


def stuck_nodes(nodes: Graph, unknown: Collection[NodeRef] = ()) -> set[NodeRef]:
    """Return the nodes that cannot end (WA-1).

    Args:
        unknown: Nodes outside of the graph that count as stuck.
    """
    waiters: defaultdict[NodeRef, list[NodeRef]] = defaultdict(list)
    missing: dict[NodeRef, int] = {}
    ending: list[NodeRef] = []
    for ref, node in nodes.items():
        open_edges = {edge for edge in node.waits_for if edge in nodes or edge in unknown}
        for edge in open_edges:
            waiters[edge].append(ref)
        missing[ref] = len(open_edges)
        if not open_edges or (not node.needs_all and len(open_edges) < len(set(node.waits_for))):
            ending.append(ref)
    ended = set(ending)
    while ending:
        for waiter in waiters[ending.pop()]:
            missing[waiter] -= 1
            if waiter not in ended and (missing[waiter] == 0 or not nodes[waiter].needs_all):
                ended.add(waiter)
                ending.append(waiter)
    return nodes.keys() - ended


def steady(first: Graph, second: Graph, suspects: Iterable[NodeRef]) -> dict[NodeRef, NodeReport]:
    """Return nodes and edges that are the same in two looks, and so existed all the time in between.

    Every node goes through its states once, and an edge that is gone does not return. So edges of a running call that
    are in both looks existed in between, and so did the holders of slots that are the same in both.
    """
    found: dict[NodeRef, NodeReport] = {}
    for ref in suspects:
        one, two = first.get(ref), second.get(ref)
        if one is None or two is None or one.needs_all != two.needs_all or one.can_break != two.can_break:
            continue
        edges = tuple(edge for edge in two.waits_for if edge in one.waits_for)
        if edges and (one.needs_all or len(set(one.waits_for)) == len(set(two.waits_for)) == len(set(edges))):
            found[ref] = NodeReport(ref, two.needs_all, edges, two.can_break, two.place)
    return found


def caller_of(ref: NodeRef) -> NodeRef | None:
    """Return the node of a call's caller, or None."""
    return NodeRef(NodeKind.CALLER, ref.a, ref.b, ref.proc) if ref.kind is NodeKind.CALL else None


def is_held(ref: NodeRef, nodes: Graph) -> bool:
    """Return whether the callers of `ref` still wait for it (WA-5)."""
    caller = caller_of(ref)
    seen: set[NodeRef] = set()
    while caller is not None and caller not in seen:
        seen.add(caller)
        report = nodes.get(caller)
        if report is None:
            return False
        caller = report.waits_for[0] if report.waits_for else None
    return True


def find_verdict(nodes: Graph, known: Collection[NodeRef] = ()) -> Deadlock | None:
    """Return the victim of one deadlock of `nodes`, or None when there is none (WA-3, WA-4).

    Args:
        known: Nodes whose deadlock is skipped.
    """
    stuck = stuck_nodes(nodes)
    best: tuple[tuple[int, ...], NodeRef, set[NodeRef]] | None = None
    for knot in _knots({ref: [edge for edge in nodes[ref].waits_for if edge in stuck] for ref in stuck}):
        if not knot.isdisjoint(known):
            continue
        for ref in knot:
            if nodes[ref].can_break:
                key = _precedence(ref)
                if best is None or key > best[0]:
                    best = key, ref, knot
    if best is None:
        return None
    _, victim, knot = best
    cycle = [nodes[ref] for ref in _cycle(victim, nodes, knot)]
    return Deadlock(victim, nodes[victim].waits_for, cycle, stuck)


def _precedence(ref: NodeRef) -> tuple[int, ...]:
    if ref.kind is NodeKind.CALL:
        return 1, ref.b, ref.a, ref.proc
    return 0, ref.a, ref.proc, ref.b


def _knots(edges: Mapping[NodeRef, Sequence[NodeRef]]) -> Iterator[set[NodeRef]]:
    """Yield the strongly connected components that no edge leaves (Tarjan's algorithm, iterative)."""
    index: dict[NodeRef, int] = {}
    low: dict[NodeRef, int] = {}
    open_nodes: list[NodeRef] = []
    part: dict[NodeRef, int] = {}
    for root in edges:
        if root in index:
            continue
        work: list[tuple[NodeRef, Iterator[NodeRef]]] = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        open_nodes.append(root)
        while work:
            node, rest = work[-1]
            after = next(rest, None)
            if after is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    knot = _close(node, open_nodes, part, index[node])
                    if all(part.get(edge) == index[node] for member in knot for edge in edges[member]):
                        yield knot
            elif after not in index:
                index[after] = low[after] = len(index)
                open_nodes.append(after)
                work.append((after, iter(edges[after])))
            elif after not in part:
                low[node] = min(low[node], index[after])


def _close(node: NodeRef, open_nodes: list[NodeRef], part: dict[NodeRef, int], number: int) -> set[NodeRef]:
    members: set[NodeRef] = set()
    while node not in members:
        member = open_nodes.pop()
        part[member] = number
        members.add(member)
    return members


def _cycle(victim: NodeRef, nodes: Graph, knot: Collection[NodeRef]) -> list[NodeRef]:
    """Return a shortest path from a node that blocks the victim to the victim."""
    came_from: dict[NodeRef, NodeRef] = {}
    queue = deque([victim])
    while queue:
        node = queue.popleft()
        for edge in nodes[node].waits_for:
            if edge == victim:
                path = [victim]
                while node != victim:
                    path.append(node)
                    node = came_from[node]
                return [*reversed(path[1:]), victim]
            if edge in knot and edge not in came_from:
                came_from[edge] = node
                queue.append(edge)
    raise AssertionError("a knot has a way from each of its nodes to itself")
