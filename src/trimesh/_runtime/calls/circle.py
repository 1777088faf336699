"""Calls that wait for themselves until a deadline ends them: said once, and noted on the error that comes of it.

A deadline is no reason to end a deadlock before it: the deadline does that. So the judge only tells of it: the log of
the controller, and whoever has made one of the calls. What their cancel leaves behind, a `TooSlowError` say, shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeReport, Place
from trimesh.errors import DeadlockError, ProtocolError, add_note, context_of, leaves, notes_on, place_name

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer

_HEADING = "a deadline has ended a deadlock: "


class Circles:
    """The calls of one process of which it has been told that they wait for themselves."""

    def __init__(self, proc: Proc) -> None:
        self._texts: dict[int, str] = {}
        proc.routes[messages.Circle] = self._take

    def _take(self, peer: Peer, message: messages.Circle, bodies: list[memoryview]) -> None:
        del peer
        if len(bodies) != 1:
            raise ProtocolError(f"a deadlock must come with its cycle, got {len(bodies)} bodies")
        text = str(error_of(observed.decode_reports(bodies[0])))
        for call in message.calls:
            while len(self._texts) >= limits.DEADLOCKS_KNOWN:
                del self._texts[next(iter(self._texts))]
            self._texts[call] = text

    def explain(self, cut: trio.Cancelled, call_id: int) -> None:
        """Note on the cancel of a call that it has waited for itself, if it is known to have."""
        text = self._texts.pop(call_id, None)
        if text is not None:
            add_note(cut, _HEADING + text)


def pass_on(error: BaseException) -> None:
    """Note on each `TooSlowError` in `error` what its cancel says of a deadlock."""
    for leaf in leaves(error):
        if isinstance(leaf, trio.TooSlowError) and (context := context_of(leaf)) is not None:
            known = notes_on(leaf)
            for note in dict.fromkeys(_notes(context)):
                if note not in known:
                    add_note(leaf, note)


def _notes(error: BaseException) -> Iterator[str]:
    for leaf in leaves(error):
        if isinstance(leaf, trio.Cancelled):
            yield from (note for note in notes_on(leaf) if note.startswith(_HEADING))


def error_of(reports: Sequence[NodeReport]) -> DeadlockError:
    """Return the error that draws a cycle: from what holds the victim, down to the victim.

    Raises:
        ProtocolError: The reports have no place.
    """
    if reports and reports[-1].place is None:  # a message without room, which the mailbox that has none stands for
        reports = [*reports[1:], reports[0]]
    cycle = [(report, report.place) for report in reports if report.place is not None]
    if not cycle:
        raise ProtocolError("a cycle must have a place, got none")
    victim = _describe(cycle[-1][1])
    lines = [f"{victim} waits for itself:"]
    lines += [f"  {_describe(place)} {_relation(report)}" for report, place in cycle[:-1]]
    lines.append(f"  {victim}, which must wait until the first of these ends")
    return DeadlockError("\n".join(lines), cycle=[(place.actor, place.endpoint, place.point()) for _, place in cycle])


def _relation(report: NodeReport) -> str:
    return "runs, and awaits" if report.needs_all else "must wait until this ends:"


def _describe(place: Place) -> str:
    where = place_name(place.mesh, place.point())
    return f"{where}.{place.endpoint}" if place.endpoint else f"room in the mailbox of {where}"
