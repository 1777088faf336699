"""What processes tell each other of deadlocks is believed only from whom it may come, and only so far (rule C8)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from tests.runtime.frames import RecordingLink, RecordingTransport

from trimesh._runtime.life.family import Family
from trimesh._runtime.life.proc import Proc
from trimesh._wire import messages, observed
from trimesh._wire.observed import NodeKind, NodeRef, NodeReport, Place
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
