"""Bugs that are planted in the runtime are found: by an oracle, or because the run hangs; within a few seeds.

Each names the oracle that must see it. A runtime without a planted bug passes under the same seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
from tests.testing.actors import Relay, Worker, run_body

from trimesh._routing.collector import SendWindow
from trimesh._runtime.actors.mailbox import Mailbox, SlotGroup
from trimesh._runtime.actors.server import Server
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.peers import incoming
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.peers.peer import Outbox
from trimesh.testing import History, Inconsistent, Model, NotLinearizable, check_monotonic
from trimesh.testing.simulated.oracles import OracleError
from trimesh.testing.simulated.seeded_run import HangError

SEEDS = 20

Plant = Callable[[pytest.MonkeyPatch], None]


async def workload(mesh, faults):
    """Many callers, nested calls, cancels, budgets, errors, broadcasts."""
    w = await mesh.spawn("w", Worker)
    relays = await mesh.spawn("relays", Relay)
    faults.at(w.slow, {"gpus": 0}, nth=3).raises(KeyError("planned"))

    async def caller(number: int) -> None:
        for turn in range(4):
            with trio.move_on_after(0.2 + 0.1 * number):
                await w.slow.call_settled(0.1 * turn)
            await w.step.broadcast(number)
            await relays.pass_on.call_settled(w, turn)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(caller, number)
        for _ in range(150):  # more than a mailbox takes
            nursery.start_soon(w.count.call)
    await w.slow.broadcast(3)


def reply_twice(patch: pytest.MonkeyPatch) -> None:
    real = IncomingCall._end

    def end(self: IncomingCall, head: bytes, bodies: Any = (), **options: Any) -> Any:
        if self.spec.name == "count":
            self.link.send(head)
        return real(self, head, bodies, **options)

    patch.setattr(IncomingCall, "_end", end)


def lose_a_reply(patch: pytest.MonkeyPatch) -> None:
    real = IncomingCall._end

    def end(self: IncomingCall, head: bytes, bodies: Any = (), **options: Any) -> Any:
        if self.spec.name == "step" and self.call_id % 5 == 0 and not self.is_broadcast:
            self.ended = True
            self.peer.inbound.pop(self.call_id, None)
            return None
        return real(self, head, bodies, **options)

    patch.setattr(IncomingCall, "_end", end)


def last_in_first_out(patch: pytest.MonkeyPatch) -> None:
    real = SlotGroup.put

    def put(self: SlotGroup, call: IncomingCall) -> None:
        real(self, call)
        self.queue.rotate()

    patch.setattr(SlotGroup, "put", put)


def run_twice(patch: pytest.MonkeyPatch) -> None:
    real = Server.serve

    def serve(self: Server, call: IncomingCall) -> Any:
        run = call.spec.fn

        async def run_twice(*args: Any) -> Any:
            await run(*args)
            return await run(*args)

        if call.spec.name == "step":
            call.spec = msgspec.structs.replace(call.spec, fn=run_twice)
        return real(self, call)

    patch.setattr(Server, "serve", serve)


def forget_the_window(patch: pytest.MonkeyPatch) -> None:
    def try_sent(self: SendWindow, nbytes: int) -> bool:
        self.sent(nbytes)
        return True

    patch.setattr(SendWindow, "try_sent", try_sent)


def leak_a_load(patch: pytest.MonkeyPatch) -> None:
    real = OutgoingCall._settle

    def settle(self: OutgoingCall, index: int, outcome: Any) -> bool:
        box = self._boxes[index]
        load = box.load
        is_settled = real(self, index, outcome)
        box.load = load
        return is_settled

    patch.setattr(OutgoingCall, "_settle", settle)


def swallow_errors(patch: pytest.MonkeyPatch) -> None:
    def raised(self: IncomingCall, error: Any) -> Any:
        head = incoming.messages.encode(
            incoming.messages.Return(self.call_id, self.mesh, self.count.report(), b"\x80\x05N.")
        )
        return self._end(head)

    patch.setattr(IncomingCall, "raised", raised)


def overtake_in_the_outbox(patch: pytest.MonkeyPatch) -> None:
    def send_queued(self: Outbox) -> None:
        while self._queue and self.window.try_sent(0):
            pending = self._queue.pop()
            self.peer.calls_sent += 1
            pending.on_sent(pending.index, self.peer.calls_sent, self.peer.send(pending.parcel))

    patch.setattr(Outbox, "_send_queued", send_queued)


def forget_a_waiter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mailbox, "tell_change", lambda self: None)


PLANTED: list[tuple[Plant, str]] = [
    (reply_twice, "OR-1"),
    (lose_a_reply, "hang"),
    (last_in_first_out, "OR-2"),
    (run_twice, "OR-3"),
    (forget_the_window, "OR-6"),
    (leak_a_load, "OR-8"),
    (swallow_errors, "OR-4"),
    (overtake_in_the_outbox, "OR-2"),
    (forget_a_waiter, "hang"),
]


def found(seeds: int) -> str:
    """Return what the first seed that finds something says, or ""."""
    for seed in range(seeds):
        error = run_body(workload, seed).error
        if isinstance(error, HangError):
            return f"hang: {error}"
        if isinstance(error, OracleError):
            return str(error)
        if error is not None:
            raise error
    return ""


@pytest.mark.slow
def test_healthy_runtime_breaks_no_rule():
    assert found(SEEDS) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "rule"), PLANTED)
def test_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, plant: Plant, rule: str):
    plant(monkeypatch)

    assert rule in found(SEEDS)


def test_broken_rule_is_to_be_reported_and_a_wrong_program_is_not(monkeypatch: pytest.MonkeyPatch):
    """S1: an oracle judges trimesh, a history the program."""
    history = History()

    async def body(judge: Callable[[], None]) -> None:
        for name in ("a", "b"):
            with history.invoke(name, "read") as reading:
                reading.ok(2 if name == "a" else 1)
        with history.invoke("a", "read") as reading:
            reading.ok(1)
        judge()

    for judge, kind in (
        (lambda: history.check(Model.register(0)), NotLinearizable),
        (lambda: check_monotonic(history.operations, "read"), Inconsistent),
    ):
        error = run_body(body, judge=judge).error
        assert isinstance(error, kind)
        assert "report" not in str(error) + str(getattr(error, "__notes__", ""))

    swallow_errors(monkeypatch)
    assert "this is a bug of trimesh: please report it, with the seed" in found(20)
