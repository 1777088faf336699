"""A search for a deadlock by a function that waits without `await`: no task of this process runs meanwhile (rule N2).

Every call to an actor of this process that has not ended waits for the function then, and the function for what it is
told that others wait for. Questions and answers are those of the judge; whoever waits reads the links, and lets the
search go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trimesh._routing.deadlock import Search, answer
from trimesh._runtime.deadlock.waiting import LocalWaits
from trimesh._runtime.peers.parcel import Parcel
from trimesh._wire import messages
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.incoming import IncomingCall


class BlockedSearch:
    """One search.

    Args:
        numbers: As `LocalWaits` takes them.
        look: Number of the first look; the second has the next.
        starts: What the function waits for.
    """

    def __init__(self, proc: Proc, numbers: Iterator[int], look: int, starts: Sequence[NodeRef]) -> None:
        self._proc = proc
        self._numbers = numbers
        self._starts = tuple(starts)
        self._function = NodeRef(NodeKind.NEXT, proc.proc_id)  # those of tasks are numbered from 1
        self.search = Search(look, [self._function])

    def go_on(self) -> IncomingCall | None:
        """Ask what is to be asked; return the call to this process that the function waits for, once that is known."""
        search = self.search
        while search.questions:
            question = search.questions.pop(0)
            if question.proc == self._proc.proc_id:
                look = LocalWaits(self._proc, self._numbers)
                reports = answer(question.refs, partial(self._look_up, look))
                search.answered(question.proc, question.look, reports)
                continue
            peer = self._proc.find_peer(question.proc)
            if peer is None or peer.link is None:  # to connect takes tasks
                search.gone(question.proc)
            else:
                peer.send(Parcel(messages.encode(messages.Look(question.look, question.refs))))
        verdict = search.verdict
        if verdict is None or self._function not in verdict.stuck:
            return None
        look = LocalWaits(self._proc, self._numbers)
        ours = [ref for ref in verdict.stuck if ref.kind is NodeKind.CALL and ref.proc == self._proc.proc_id]
        return next((call for ref in sorted(ours) if (call := look.find_call(ref)) is not None), None)

    def _look_up(self, look: LocalWaits, ref: NodeRef) -> NodeReport | None:
        if ref == self._function:
            return NodeReport(ref, needs_all=True, waits_for=self._starts, can_break=True)
        if ref.kind is not NodeKind.CALL:
            return look.look_up(ref)
        call = look.find_call(ref)
        if call is None or call.ended:
            return None
        return NodeReport(ref, needs_all=True, waits_for=(self._function,))
