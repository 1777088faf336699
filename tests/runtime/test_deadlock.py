"""What processes tell each other of deadlocks is believed only from whom it may come, and only so far (rule C8)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import trio
from tests.runtime.frames import RecordingLink, RecordingTransport

from trimesh import limits
from trimesh._runtime.calls.outgoing import error_of, pass_on
from trimesh._runtime.life.family import Family
from trimesh._runtime.life.proc import Proc
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport, Place
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

ROOT, ME, OTHER = ProcId(1), ProcId(2), ProcId(3)

REF = NodeRef(NodeKind.CALL, ME, OTHER, 5)
PLACE = Place("mesh", "Actor", "endpoint", ("gpus",), (2,), 1, None)
REPORT = NodeReport(REF, needs_all=True, waits_for=(REF,), place=PLACE)


def make(me: ProcId, peer: ProcId) -> tuple[Proc, RecordingLink]:
    """Make a process with a link to one other."""
    proc, link = Proc(me, RecordingTransport(), seed=1), RecordingLink()
    host: Any = nullcontext()
    proc.family = Family(proc, lambda _: host, parent=peer, root=None if me == ROOT else ROOT)
    proc.adopt_link(peer, link)
    return proc, link


def receive(proc: Proc, link: RecordingLink, message: messages.Message, *bodies: bytes) -> None:
    proc.received(link, memoryview(messages.encode(message)), [memoryview(bytearray(body)) for body in bodies])


async def test_question_of_the_controller_is_answered():
    """Also one for what is not here, which is told by its absence."""
    proc, link = make(ME, ROOT)
    receive(proc, link, messages.Look(7, (REF, NodeRef(NodeKind.CALL, OTHER, ME, 1))))
    assert not link.aborted
    assert link.sent == [messages.Seen(7)]
    assert observed.decode_reports(link.bodies[0][0]) == ()


@pytest.mark.parametrize("kind", list(NodeKind))
async def test_question_for_anything_is_answered(kind: NodeKind):
    """Every kind of name, with numbers that name nothing."""
    proc, link = make(ME, ROOT)
    receive(
        proc, link, messages.Look(7, tuple(NodeRef(kind, ME, a, b, c) for a in (0, 2) for b in (0, 3) for c in (0, 1)))
    )
    assert not link.aborted
    assert len(link.sent) == 1


@pytest.mark.parametrize(
    ("me", "message", "bodies"),
    [
        (ME, messages.Look(1, (REF,)), []),
        (ME, messages.Break(1, REF, ()), [observed.encode((REPORT,))]),
        (ME, messages.Suspect((REF,)), []),
        (ROOT, messages.Look(1, (REF,)), []),
    ],
)
async def test_only_the_controller_judges(me: ProcId, message: messages.Message, bodies: list[bytes]):
    proc, link = make(me, OTHER)
    receive(proc, link, message, *bodies)
    assert link.aborted


@pytest.mark.parametrize(
    ("me", "message", "bodies"),
    [
        (ROOT, messages.Seen(1), []),
        (ROOT, messages.Seen(1), [b"", b""]),
        (ROOT, messages.Seen(1), [b"\xc1"]),
        (ROOT, messages.Seen(1), [observed.encode([1, 2])]),
        (ME, messages.Break(1, REF, ()), []),
        (ME, messages.Break(1, REF, ()), [b"\x90"]),
        (ME, messages.Break(1, REF, ()), [observed.encode((NodeReport(REF, needs_all=True, waits_for=()),))]),
        (
            ME,
            messages.Break(1, REF, ()),
            [
                observed.encode(
                    (NodeReport(REF, needs_all=True, waits_for=(), place=Place("", "", "", ("x",), (2,), 2, None)),)
                )
            ],
        ),
    ],
)
async def test_nonsense_closes_the_link(me: ProcId, message: messages.Message, bodies: list[bytes]):
    proc, link = make(me, OTHER if me == ROOT else ROOT)
    receive(proc, link, message, *bodies)
    assert link.aborted


async def test_victim_that_is_not_there_is_left_alone():
    proc, link = make(ME, ROOT)
    receive(proc, link, messages.Break(9, REF, (REF,)), observed.encode((REPORT,)))
    assert not link.aborted
    assert link.sent == [messages.Broken(9)]


async def test_late_answers_are_dropped():
    proc, link = make(ROOT, OTHER)
    receive(proc, link, messages.Seen(1), observed.encode(()))
    receive(proc, link, messages.Broken(1))
    assert not link.aborted


PLACE_OF_X = Place("", "Actor", "step", ("x",), (2,), 1, None)


def report(name: str, *, needs_all: bool = True) -> NodeReport:
    """Return the report of an endpoint, or of something that is none."""
    place = msgspec.structs.replace(PLACE_OF_X, mesh=name) if name else None
    return NodeReport(REF, needs_all=needs_all, waits_for=(), place=place)


def test_error_shows_the_cycle_down_to_the_victim():
    """C8: a message without room is shown by the mailbox that is full."""
    error = error_of([report("a"), report("b", needs_all=False), report("c")])
    assert str(error).splitlines() == [
        "c[x=1].step waits for itself:",
        "  a[x=1].step runs, and awaits",
        "  b[x=1].step must wait until this ends:",
        "  c[x=1].step, which must wait until the first of these ends",
    ]
    assert error.cycle == (("Actor", "step", PLACE_OF_X.point()),) * 3
    rotated = error_of([report("a"), report("b"), report("c"), report("")])
    assert [line.split()[0].rstrip(",") for line in str(rotated).splitlines()] == [
        "a[x=1].step",
        "b[x=1].step",
        "c[x=1].step",
        "a[x=1].step",
    ]
    with pytest.raises(ProtocolError, match="must name the place"):
        error_of([report("")])


async def test_deadlock_that_a_deadline_has_ended_is_noted_on_its_error(monkeypatch: pytest.MonkeyPatch):
    """C8: once, for the last calls of which it is known."""
    monkeypatch.setattr(limits, "DEADLOCKS_KNOWN", 2)
    proc, link = make(ME, ROOT)
    receive(proc, link, messages.Circle((1, 2, 3)), observed.encode((report("a"), report("b"))))
    circles = proc.deadlocks.circles
    for call, count in ((1, 0), (2, 1), (2, 0), (3, 1)):
        try:
            with trio.fail_after(0):
                try:
                    await trio.sleep_forever()
                except trio.Cancelled as cut:
                    circles.explain(cut, call)
                    raise
        except trio.TooSlowError as late:
            for _ in range(2):
                pass_on(ExceptionGroup("", [late, ValueError()]))
            notes = [note for note in getattr(late, "__notes__", ()) if "b[x=1].step waits for itself" in note]
            assert len(notes) == count
