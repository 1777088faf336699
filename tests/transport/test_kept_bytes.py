"""Memory of large `bytes` is used again when nothing refers to it, never before, and not kept for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing
from tests.conformance.transports import NativeBackend, Recorder, pattern, wait_sent

from trimesh import limits
from trimesh._transport.messages import incoming
from trimesh._transport.messages.incoming import KeptBytes, copy_plainly
from trimesh._transport.native.transport import NativeTransport

SIZE = 1 << 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large is what is small here."""
    monkeypatch.setattr(limits, "KEPT_BYTES_MIN", SIZE)
    monkeypatch.setattr(limits, "KEPT_BYTES_MAX", 4 * SIZE)


class Receiver:
    """Takes `bytes` one after the other."""

    def __init__(self) -> None:
        self.told = 0
        self.copied = 0
        self.kept = KeptBytes(self._tell, self._copy)

    def _tell(self) -> None:
        self.told += 1

    def _copy(self, into: memoryview, data: memoryview) -> None:
        self.copied += 1
        into[:] = data

    def take(self, letter: bytes, size: int = SIZE) -> bytes:
        whole, memory, copy = self.kept.new(size)
        copy(memory, memoryview(letter * size))
        return whole


def test_third_of_a_size_is_written_where_the_second_was():
    receiver = Receiver()
    hashes = [hash(receiver.take(b"a")), hash(receiver.take(b"b"))]  # the first is not kept
    assert (receiver.told, receiver.copied) == (1, 0)

    third = receiver.take(b"c")

    assert receiver.copied == 1
    assert third == b"c" * SIZE
    assert hash(third) == hash(b"c" * SIZE) not in hashes
    assert receiver.take(b"d") == b"d" * SIZE
    assert (receiver.copied, third) == (1, b"c" * SIZE)


@pytest.mark.parametrize("refer", [lambda whole: whole, memoryview, lambda whole: [iter(whole)]])
def test_what_is_referred_to_is_not_written_to(refer: Callable[[bytes], object]):
    receiver = Receiver()
    receiver.take(b"a")

    held = refer(receiver.take(b"b"))
    receiver.take(b"c")

    assert receiver.copied == 0
    del held
    receiver.take(b"d")
    assert receiver.copied == 1


def test_other_sizes_take_other_memory():
    receiver = Receiver()
    for size in (SIZE, SIZE + 1, SIZE, SIZE + 1):
        receiver.take(b"a", size)

    assert receiver.take(b"b", SIZE + 1) == b"b" * (SIZE + 1)
    assert receiver.copied == 1
    for size in (SIZE - 1, 4 * SIZE + 1):  # too small, too large
        for _ in range(3):
            receiver.take(b"a", size)
    assert receiver.copied == 1


def test_what_is_kept_is_bounded():
    receiver = Receiver()
    held = [receiver.take(b"a") for _ in range(10)]
    ours = {id(whole) for whole in held[-4:]}  # as many as fit
    del held

    again = [receiver.take(b"b") for _ in range(5)]

    assert receiver.copied == 4
    assert {id(whole) for whole in again[:4]} == ours


def test_what_was_not_used_between_two_looks_is_let_go_of():
    receiver = Receiver()
    receiver.take(b"a")
    receiver.take(b"b")

    receiver.kept.expire()
    receiver.take(b"c")
    receiver.kept.expire()
    assert not receiver.kept.is_empty
    receiver.kept.expire()

    assert receiver.kept.is_empty
    assert receiver.copied == 1


def test_nothing_is_kept_where_it_cannot_be_told_who_refers_to_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(incoming, "can_be_reused", lambda: False)
    receiver = Receiver()
    for _ in range(3):
        receiver.take(b"a")

    assert receiver.kept.is_empty
    assert KeptBytes().new(SIZE)[2] is copy_plainly


@pytest.mark.parametrize("has_poller", [True, False])
async def test_transport_keeps_memory_and_lets_go_of_it(
    monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock, *, has_poller: bool
):
    size = limits.CHUNKED_BYTES_MIN
    monkeypatch.setattr(limits, "KEPT_BYTES_MIN", size)
    monkeypatch.setattr(limits, "KEPT_BYTES_MAX", size)
    if not has_poller:
        monkeypatch.setattr("trimesh._transport.native.transport.poller_of_run", lambda: None)
    backend = NativeBackend(local=True)
    there = backend.transport()
    assert isinstance(there, NativeTransport)
    seen = Recorder()
    where: list[int] = []
    async with trio.open_nursery() as nursery:
        here = backend.transport()
        link, _ = backend.connect(here, there)
        nursery.start_soon(here.run, Recorder())
        nursery.start_soon(there.run, seen)

        for seed in range(4):
            sent = pattern(size, seed=seed)
            await wait_sent([link.send(b"head", [sent])])
            [body] = (await seen.wait_messages(1)).pop().bodies
            assert body == sent
            where.append(id(body.obj))
            del body
        assert where[1] == where[2] == where[3]

        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            assert not there.kept.is_empty
            mock_clock.jump(limits.KEPT_BYTES_SECONDS)
            await trio.testing.wait_all_tasks_blocked()
        assert there.kept.is_empty
        nursery.cancel_scope.cancel()
    backend.close()
