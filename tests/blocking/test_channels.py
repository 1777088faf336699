"""Channels of plain threads, without `await` (K06)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from tests.blocking.test_cancellation import helper, interrupt
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, configured, endpoint

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Sender(Actor):
    """Sends by the port that it is given."""

    @endpoint
    async def send(self, port: trimesh.Port[int], count: int) -> str:
        async with port:
            for number in range(count):
                await port.send(number)
        return type(port).__module__

    @endpoint
    async def send_in(self, things: dict[str, Any]) -> None:
        await things["port"].send("in a container")
        await things["port"].aclose()

    @endpoint(thread=True)
    def send_in_thread(self, port: Any, count: int) -> None:
        with tb.face(port) as face:
            for number in range(count):
                face.send(number)


@pytest.fixture(scope="module")
def procs() -> Iterator[tb.ProcMesh]:
    # Its history would begin in the midst of a test, which would seem to have left it behind.
    with configured(history=0), tb.spawn_procs({"gpus": 2}) as procs:
        yield procs


def test_items_come_from_actors(procs: tb.ProcMesh) -> None:
    """K06: the port that arrives is one of `trimesh`; the receiver ends when none is left."""
    senders = procs.spawn("senders", Sender)
    with tb.open_channel(int, capacity=4) as (port, receiver):
        assert port.capacity == 4
        with port:
            sent = senders.send.call.submit(port, 20)
            first = receiver.receive()  # the call has left, and the port with it
        assert sorted([first, *receiver]) == sorted([*range(20), *range(20)])
        assert set(sent.result(HANG_SECONDS).values()) == {"trimesh._runtime.channels.ports"}
        with pytest.raises(trio.EndOfChannel):
            receiver.receive()
        with pytest.raises(trio.ClosedResourceError):
            port.send(1)


def test_port_travels_in_containers_and_to_threads(procs: tb.ProcMesh) -> None:
    """K06."""
    sender = procs.slice(gpus=0).spawn("sender", Sender)
    with tb.open_channel(capacity=1) as (port, receiver):
        sender.send_in.call_one({"port": port})
        assert receiver.receive() == "in a container"
        done = sender.send_in_thread.call_one.submit(port, 5)
        assert receiver.receive() == 0
        port.close()
        assert list(receiver) == list(range(1, 5))
        done.result(HANG_SECONDS)


def test_what_does_not_wait_says_so(procs: tb.ProcMesh) -> None:
    """K02, K06."""
    with tb.open_channel(int, capacity=1) as (port, receiver):
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        port.send_nowait(1)
        with pytest.raises(trio.WouldBlock):
            port.send_nowait(2)
        assert receiver.receive_nowait() == 1
        other = port.clone()
        port.close()
        other.send(3)
        assert receiver.receive() == 3
        receiver.close()
        with pytest.raises(trio.BrokenResourceError):
            other.send(4)
    for ends in ({"capacity": -1}, {"capacity": 1.5}):
        with pytest.raises((ValueError, TypeError)):
            tb.open_channel(**ends)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(TypeError, match="stays in the process"), tb.open_channel(capacity=1) as (_, receiver):
        procs.slice(gpus=0).spawn("other", Sender).send.call_one(receiver, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_waits_end_by_limits_and_interrupts(procs: tb.ProcMesh) -> None:
    """C01, D01, K06: nothing is taken, nothing is sent, and the channel goes on."""
    with tb.open_channel(int, capacity=1) as (port, receiver):
        with pytest.raises(TimeoutError), tb.fail_after(0.05):
            receiver.receive()
        port.send(1)
        with pytest.raises(TimeoutError), tb.fail_after(0.05):
            port.send(2)
        assert receiver.receive() == 1
        begun = threading.Event()

        def strike() -> None:
            begun.wait()
            interrupt()

        with helper(strike), pytest.raises(KeyboardInterrupt):
            begun.set()
            receiver.receive()
        port.send(3)
        assert receiver.receive() == 3


def test_other_objects_have_no_form_without_await() -> None:
    """K06."""
    with pytest.raises(TypeError, match="a port or a buffer"):
        tb.face(object())  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
