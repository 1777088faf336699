"""Calls sent one right after the other leave as one message, and are calls like any other (docs/design/calls.md)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from tests.rows import rows
from tests.runtime.frames import RecordingLink, RecordingTransport
from tests.runtime.test_outgoing import REQUEST

from trimesh import Actor, endpoint, limits
from trimesh._routing.collector import LocalFailure, Returned
from trimesh._runtime.actors.cell import ActorSpec, Cell
from trimesh._runtime.calls.call_set import CallSet, SendCall
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.peers.deaths import ProcDeath
from trimesh._runtime.peers.peer import Parcel, Target
from trimesh._runtime.values.endpoint_spec import endpoints_of
from trimesh._wire import messages
from trimesh._wire.messages import Calls
from trimesh.errors import ProcDied, ProtocolError
from trimesh.ids import MeshId, ProcId
from trimesh.shape.extent import Extent

MESH = MeshId(5)


class Noting(Actor):
    """Keeps what it was called with."""

    noted: list[int]

    @endpoint
    async def note(self, number: int) -> int:
        self.noted.append(number)
        return number

    @endpoint
    async def numbers(self) -> AsyncIterator[int]:
        yield 1


class Caller:
    """A process with a link to another one, whose actor it calls by a set."""

    def __init__(self) -> None:
        self.proc = Proc(ProcId(1), RecordingTransport(), seed=1)
        self.link = RecordingLink()
        self.peer = self.proc.adopt_link(ProcId(2), self.link)
        self.calls = CallSet(lambda _: None, lambda: False)
        self.request = msgspec.structs.replace(REQUEST, spec=dict(endpoints_of(Noting))["note"])
        self.send = self.sender()

    def sender(self, deadline: float = math.inf) -> SendCall:
        return self.calls.sender(self.proc, Target(self.peer, MESH), self.request, deadline)

    def send_all(self, *items: Any) -> None:
        for item in items:
            self.send(item, ((item,), {}))

    def sent(self) -> list[list[int] | int]:
        """Return the numbers of the calls of each message so far, or the one of a call by itself."""
        return [
            [number for number, _ in message.calls] if type(message) is Calls else message.call
            for message in self.link.sent
        ]

    def say(self, message: messages.Message) -> None:
        self.proc.received(self.link, memoryview(messages.encode(message)), [])


@pytest.fixture
async def caller() -> Caller:
    return Caller()


async def test_calls_leave_as_one_message_and_end_one_by_one(caller: Caller):
    """C7, S01: each has its own number, place, outcome and credit."""
    caller.send_all(7, 8, 9)
    assert caller.sent() == []
    assert [call.key for call in caller.calls.running] == [7, 8, 9]
    caller.calls.leave()
    caller.calls.leave()
    assert caller.sent() == [[1, 2, 3]]
    box = caller.peer.outbox(MESH)
    assert (caller.peer.calls_sent, box.load, box.window.waiting) == (3, 3, 3)
    caller.say(messages.Return(2, MESH, 1, b"x"))
    assert (box.load, box.window.waiting) == (2, 2)
    caller.say(messages.Refused(1, MESH, 2, "stopped", ""))
    assert [call.key for call in caller.calls.ended] == [8, 7]
    assert caller.calls.ended[0].collector.outcomes == [Returned(b"x")]
    assert all(call.collector.is_complete for call in caller.calls.ended)
    assert (box.load, box.window.waiting) == (1, 1)
    caller.proc.declare_gone(caller.peer, ProcDeath("gone"))
    [outcome] = caller.calls.ended[2].collector.outcomes
    assert isinstance(outcome, LocalFailure)
    assert isinstance(outcome.error, ProcDied)
    assert outcome.error.maybe_executed
    assert not caller.calls.running
    assert not caller.proc.calls


async def test_reply_of_another_process_ends_no_call(caller: Caller):
    """E12."""
    caller.send_all(7)
    caller.calls.leave()
    link = RecordingLink()
    stranger = caller.proc.adopt_link(ProcId(3), link)
    caller.proc.received(link, memoryview(messages.encode(messages.Return(1, MESH, 1, b""))), [])
    assert stranger.link is None
    assert [call.key for call in caller.calls.running] == [7]
    caller.say(messages.Return(1, MESH, 1, b""))
    assert [call.key for call in caller.calls.ended] == [7]
    assert caller.peer.outbox(MESH).load == 0


async def test_whatever_else_is_sent_to_the_actor_comes_after_them(caller: Caller):
    """S01."""
    parcel = Parcel(messages.encode(messages.Call(99, MESH, "endpoint", None, b"")), nbytes=10)
    caller.send_all(7, 8)
    assert caller.peer.outbox(MESH).try_send(parcel) is not None
    caller.send_all(9)
    assert caller.peer.outbox(MESH).has_room(10)
    assert caller.sent() == [[1, 2], 99, [3]]
    caller.send_all(b"x" * limits.BYTES_ALONE_MIN, 10)  # which travels beside its message, so in one of its own
    caller.calls.leave()
    assert caller.sent() == [[1, 2], 99, [3], 4, [5]]


async def test_calls_that_cannot_share_a_message_leave_alone(caller: Caller):
    """C7: those of an endpoint that is not known here; they are members of the set all the same."""
    caller.request = REQUEST
    caller.send = caller.sender()
    caller.send_all(7, 8)
    assert caller.sent() == [1, 2]
    assert [call.key for call in caller.calls.running] == [7, 8]
    caller.calls.cancel("enough")
    caller.send_all(9)
    assert [message.call for message in caller.link.sent if isinstance(message, messages.Call)] == [1, 2]


async def test_size_of_what_waits_has_the_bodies(caller: Caller):
    """S07: large values travel beside the message, and count for the mailbox."""
    size = limits.MAILBOX_BYTES // 4
    caller.send_all(*[bytes(size)] * 5)
    assert 3 <= len(caller.sent()) < 5
    caller.say(messages.Credit(MESH, 3))
    assert len(caller.sent()) == 5


async def test_message_is_bounded(caller: Caller):
    caller.send_all(*range(limits.CALLS_PER_MESSAGE + 1))
    caller.calls.leave()
    assert [len(message.calls) for message in caller.link.sent] == [limits.CALLS_PER_MESSAGE, 1]
    text = "x" * (limits.CALLS_PER_MESSAGE_BYTES // 2)
    caller.send_all(text, text)
    caller.calls.leave()
    assert [len(message.calls) for message in caller.link.sent[2:]] == [1, 1]
    overhead = len(caller.link.sent[2].calls[0][1]) - len(text)
    text = "x" * (limits.CALLS_PER_MESSAGE_BYTES // 2 - overhead)
    for more in ("", "x"):
        caller.send_all(text, text + more)
    caller.calls.leave()
    assert [len(message.calls) for message in caller.link.sent[4:]] == [2, 1, 1]


async def test_calls_without_credit_wait_in_order(caller: Caller):
    """S07."""
    count = limits.MAILBOX_MESSAGES
    caller.send_all(*range(count + 2))
    assert sum(len(message.calls) for message in caller.link.sent) == count
    caller.say(messages.Credit(MESH, 3))
    caller.send_all(0)
    caller.calls.leave()
    assert caller.sent()[-3:] == [count + 1, count + 2, [count + 3]]


@pytest.mark.parametrize("name", ["wait", "join"])
async def test_stalled_actor_is_not_waited_for_long(caller: Caller, name: str, autojump_clock: trio.testing.MockClock):
    """C2: when that becomes known while cancelled calls are waited for."""
    caller.send_all(7, 8)
    caller.calls.leave()
    start = trio.current_time()
    caller.calls.cancel("enough")
    assert (caller.calls.is_cancelled, caller.calls.is_bounded) == (True, False)
    assert caller.calls.silent_at == start + limits.CANCEL_ACK_SECONDS
    async with trio.open_nursery() as nursery:
        nursery.start_soon(getattr(caller.calls, name))
        await trio.sleep(3)
        assert (caller.calls in caller.proc.deadlocks._any) == (name == "wait")
        caller.peer.stalled(5.0)
    assert trio.current_time() - start == 3
    assert caller.calls.silent_at == start + limits.STALLED_ACK_SECONDS
    await caller.calls.join()
    assert trio.current_time() - start == 3
    assert len(list(caller.peer.abandoned)) == 2


async def test_cancel_says_where_the_call_is(caller: Caller):
    """C02: what was sent to the process meanwhile, to other actors too, comes before the message."""
    caller.send_all(7, 8)
    parcel = Parcel(messages.encode(messages.Call(99, MeshId(6), "endpoint", None, b"")), nbytes=10)
    assert caller.peer.outbox(MeshId(6)).try_send(parcel) is not None
    caller.calls.leave()
    caller.calls.cancel("enough")
    assert [message.position for message in caller.link.sent[2:]] == [2, 3]


async def test_budget_is_what_is_left(caller: Caller):
    """C03: of all calls that leave together."""
    caller.proc.is_simulated = True  # a clock that both sides have
    caller.send = caller.sender(trio.current_time() + 1000)
    caller.send_all(7)
    caller.calls.leave()
    assert 999 < caller.link.sent[0].budget <= 1000


class Callee:
    """A process with one actor, and the link to its caller."""

    def __init__(self) -> None:
        self.noted = Noting.noted = []
        self.proc = Proc(ProcId(1), RecordingTransport(), seed=1)
        self.link = RecordingLink()
        self.peer = self.proc.adopt_link(ProcId(77), self.link)
        self.cell = Cell(self.proc, ActorSpec(MESH, "mesh", Noting, Noting, Extent(n=1).point(0)), self.peer)
        self.proc.cells[MESH] = self.cell

    def take(self, *numbers: int, mesh: MeshId = MESH, name: str = "note", bodies: int = 0) -> None:
        """Take one message with calls of these numbers, which are their arguments, too."""
        keywords: dict[str, Any] = {}
        encode = self.proc.values.encode
        calls = tuple((number, encode(((number,), keywords), what="test").payload) for number in numbers)
        head = messages.encode(Calls(mesh, name, None, calls))
        self.proc.received(self.link, memoryview(head), [memoryview(bytearray(1))] * bodies)

    def ends(self) -> list[tuple[type[Any], int]]:
        return [(type(message), message.call) for message in self.link.terminals()]


@pytest.fixture
async def callee() -> AsyncIterator[Callee]:
    made = Callee()
    async with trio.open_nursery() as nursery:
        await nursery.start(made.cell.run)
        yield made
        await made.cell.stop(1.0)


async def test_calls_run_in_order_and_are_answered_one_by_one(callee: Callee):
    """S01; a cancel that has overtaken its call finds it (C02)."""
    callee.proc.received(callee.link, memoryview(messages.encode(messages.Cancel(2, 2, "early"))), [])
    callee.take(1, 2, 3)
    callee.take(4)
    await trio.testing.wait_all_tasks_blocked()
    assert callee.noted == [1, 3, 4]
    ends = {number: kind for kind, number in callee.ends()}
    assert ends == {1: messages.Return, 2: messages.CancelAck, 3: messages.Return, 4: messages.Return}
    assert callee.link.terminals()[-1].dequeued == callee.peer.calls_received == 4
    assert callee.peer.inbound == {}


async def test_calls_of_what_is_not_there_are_refused_one_by_one(callee: Callee):
    """X3."""
    callee.take(1, 2, name="nothing")
    callee.take(3, mesh=MeshId(6))
    callee.take(4, name="numbers")
    assert callee.ends() == [(messages.Refused, number) for number in (1, 2, 3, 4)]
    assert callee.noted == []


async def test_calls_wait_for_an_actor_that_starts_and_not_for_one_that_has_ended(callee: Callee):
    """M3."""
    callee.cell.mailbox.is_open = False
    callee.take(1, 2)
    callee.cell.mailbox.open()
    await trio.testing.wait_all_tasks_blocked()
    assert callee.noted == [1, 2]
    await callee.cell.stop(1.0)
    callee.take(3, 4)
    assert callee.ends()[2:] == [(messages.Refused, 3), (messages.Refused, 4)]


@pytest.mark.parametrize("broken", ["number", "body"])
async def test_calls_that_break_the_rules_end_the_link(callee: Callee, broken: str):
    """E12."""
    if broken == "number":
        callee.take(1, 2, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert callee.noted == [1, 2]
    else:
        callee.take(1, bodies=1)
    assert callee.link.aborted


@rows(
    "calls", [(), ((1, b""),) * (limits.CALLS_PER_MESSAGE + 1), ((1,),), ((1, "text"),), ((1, b"", 2),), (1, b""), None]
)
def test_malformed_calls_are_no_message(calls: Any):
    """E12."""
    with pytest.raises(ProtocolError):
        messages.decode(msgspec.msgpack.encode([14, MESH, "note", None, calls]))
