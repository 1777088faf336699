"""Who is still at granted memory, and what becomes of memory that a reader does not leave (N4); views; blocks."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.native.mover import ADD, CMA, READ, SHM, WRITE, Done, Mover, ffi, home_struct, lib, pattern
from tests.native.movers import HOST_ROADS, Pair, far_pair, host_pair, run_pair
from tests.native.test_fork import in_child

from trimesh import limits

pytestmark = pytest.mark.real

__all__ = ["far_pair", "host_pair"]  # fixtures

SIZE = 3 * 4096
STOPS_MAX = 5_000
"""A process that does nothing but atomic operations is in the middle of one at every tenth moment or so."""


@pytest.fixture
def shared() -> Iterator[Pair]:
    """A pair whose owner grants memory in blocks."""
    yield from run_pair(HOST_ROADS[0])


def block_mappings() -> int:
    """Return how many blocks this process has mapped; not those that earlier tests have dropped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("trimesh-block")


# ---- who is still at it ----------------------------------------------------------------------------------------------


def test_reader_that_was_killed_at_a_grant_does_not_count(far_pair: Pair):
    """Its memory is free at once, and its place is used again."""
    pair = far_pair
    grant = pair.owner.call("grant", SIZE, block=True)
    third, attachment = pair.third(SHM)
    assert third.call("hold", attachment, grant) == lib.TM_OK
    assert pair.owner.call("revoke", grant) == lib.TM_FULL

    third.signal(signal.SIGKILL)
    os.waitid(os.P_PID, third.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped

    assert pair.owner.call("revoke", grant) == lib.TM_OK
    assert pair.owner.call("drop", grant) == lib.TM_OK
    assert pair.owner.call("give_back", pair.owner.call("number_of", grant)) == lib.TM_OK
    again = pair.owner.call("grant", SIZE, block=True)
    assert (again["place"], again["address"]) == (grant["place"], grant["address"])


def test_memory_that_a_stopped_reader_holds_is_not_used_again(shared: Pair):
    """N4: it goes with its last mapping; until then nothing else is written there."""
    grant = shared.grant(SIZE, seed=3)
    third, attachment = shared.third(SHM)
    assert third.call("hold", attachment, grant) == lib.TM_OK
    third.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, third.pid, os.WSTOPPED)

    assert shared.owner.call("revoke", grant) == lib.TM_FULL
    assert shared.owner.call("drop", grant) == lib.TM_FULL
    number = shared.owner.call("number_of", grant)
    assert shared.owner.call("give_back", number) == lib.TM_OK
    again = shared.grant(SIZE, seed=4)

    assert again["place"] != grant["place"]
    third.signal(signal.SIGCONT)
    assert third.call("held", SIZE) == pattern(SIZE, 3).hex()
    assert third.call("read", attachment, grant, SIZE)[0] == lib.TM_ERR_REVOKED
    assert shared.reader.move(shared.attachment, READ, again, bytearray(SIZE)).status == lib.TM_OK


def test_atomic_operations_give_up_on_a_stopped_holder_of_the_lock(host_pair: Pair):
    """It may go on, so nobody takes the lock off it: who waits gives up, after a bounded time. The dead lose it."""
    pair = host_pair
    grant = pair.grant(4096)
    third, attachment = pair.third(pair.road.carrier)
    assert third.call("add", attachment, grant, 1, 1) == 0
    third.start("add", attachment, grant, 1, 1_000_000_000)

    def add() -> Done:
        return pair.reader.move(pair.attachment, ADD, grant, None, operand=1)

    def value() -> bytearray:
        found = bytearray(8)
        assert pair.reader.move(pair.attachment, READ, grant, found).status == lib.TM_OK
        return found

    for _ in range(STOPS_MAX):  # until it is stopped in the middle of one
        before = value()
        while value() == before:  # a busy machine lets it run later
            pass
        third.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, third.pid, os.WSTOPPED)
        began = time.monotonic()
        found = add()
        if found.status != lib.TM_OK:
            break
        third.signal(signal.SIGCONT)
    assert found.status == lib.TM_ERR_SILENT
    assert time.monotonic() - began >= limits.MOVER_SILENCE_MS / 1000
    assert pair.reader.move(pair.attachment, READ, grant, bytearray(8)).status == lib.TM_OK  # takes no lock

    third.signal(signal.SIGCONT)
    one, other = add(), add()
    assert (one.status, other.status) == (lib.TM_OK, lib.TM_OK)
    assert one.value < other.value
    third.kill()
    assert add().status == lib.TM_OK


def test_block_with_a_grant_is_not_given_back(shared: Pair):
    grant = shared.grant(SIZE)
    number = shared.owner.call("number_of", grant)

    assert shared.owner.call("give_back", number) == lib.TM_ERR_STATE
    shared.owner.call("revoke", grant)
    assert shared.owner.call("give_back", number) == lib.TM_ERR_STATE
    shared.owner.call("drop", grant)
    assert shared.owner.call("give_back", number) == lib.TM_OK
    assert shared.owner.call("give_back", number) == lib.TM_ERR_ARGUMENT


def test_reader_unmaps_blocks_that_are_no_more(shared: Pair):
    reader, attachment = shared.reader, shared.attachment
    before = block_mappings()
    grants = [shared.grant(SIZE, seed=i) for i in range(3)]
    third, third_attachment = shared.third(SHM)
    for grant in grants:
        assert reader.move(attachment, READ, grant, bytearray(SIZE)).status == lib.TM_OK
        third.call("hold", third_attachment, grant)
    assert block_mappings() == before + 3

    for grant in grants[:2]:
        shared.owner.call("revoke", grant)
        assert shared.owner.call("drop", grant) == lib.TM_FULL
        shared.owner.call("give_back", shared.owner.call("number_of", grant))
    assert reader.move(attachment, READ, grants[2], bytearray(SIZE)).status == lib.TM_OK

    assert block_mappings() == before + 1
    reader.detach(attachment)
    assert block_mappings() == before


def test_reader_keeps_a_bounded_number_of_blocks_mapped(shared: Pair):
    before = block_mappings()
    for i in range(80):
        grant = shared.grant(64, seed=i)
        local = bytearray(64)
        assert shared.reader.move(shared.attachment, READ, grant, local).status == lib.TM_OK
        assert local == pattern(64, i)
    assert block_mappings() <= before + 64


# ---- views -----------------------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_view_shows_the_memory_itself(shared: Pair):
    pair = shared
    grant = pair.grant(SIZE, seed=5)
    status, seen, handle = pair.reader.view(pair.attachment, grant, offset=4090, size=20)
    assert status == lib.TM_OK
    assert bytes(seen) == pattern(SIZE, 5)[4090:4110]

    pair.owner.call("poke", grant["address"] + 4090, b"owner".hex())
    assert bytes(seen)[:5] == b"owner"
    status, ours, writable = pair.reader.view(pair.attachment, grant, offset=4090, size=20, writable=True)
    assert status == lib.TM_OK
    ours[:6] = b"reader"
    assert bytes(seen)[:6] == b"reader"
    assert pair.owner.call("peek", grant["address"] + 4090, 6) == b"reader".hex()

    assert pair.owner.call("revoke", grant) == lib.TM_FULL
    for one in (handle, writable):
        assert pair.reader.close_view(one) == lib.TM_OK
        assert pair.reader.close_view(one) == lib.TM_ERR_ARGUMENT
    assert pair.owner.call("revoke", grant) == lib.TM_OK
    assert block_mappings() == 0


def test_view_that_is_not_writable_cannot_be_written_to(shared: Pair):
    grant = shared.grant(SIZE)
    _, seen, handle = shared.reader.view(shared.attachment, grant)

    def write() -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        seen[:1] = b"x"

    assert in_child(write) == -signal.SIGSEGV
    shared.reader.close_view(handle)


def test_view_outlives_its_attachment(shared: Pair):
    grant = shared.grant(SIZE, seed=6)
    _, seen, handle = shared.reader.view(shared.attachment, grant, size=SIZE)

    assert shared.reader.detach(shared.attachment) == lib.TM_OK

    assert bytes(seen) == pattern(SIZE, 6)
    assert shared.owner.call("revoke", grant) == lib.TM_FULL
    assert shared.reader.close_view(handle) == lib.TM_OK
    assert shared.owner.call("revoke", grant) == lib.TM_OK
    assert block_mappings() == 0


@pytest.mark.daily
def test_views_are_refused_as_transfers_are(shared: Pair):
    grant = shared.grant(SIZE, rights=1)
    foreign = shared.owner.call("grant", SIZE)
    reader, attachment = shared.reader, shared.attachment

    def status_of(grant: dict[str, Any], **options: Any) -> int:
        status, memory, _ = reader.view(attachment, grant, **options)
        assert memory is None or status == lib.TM_OK
        return int(status)

    assert status_of(foreign) == lib.TM_ERR_UNREACHABLE
    assert status_of(grant, writable=True) == lib.TM_ERR_DENIED
    assert status_of(grant, offset=SIZE) == lib.TM_ERR_DENIED
    assert status_of(grant, offset=1, size=SIZE) == lib.TM_ERR_DENIED
    assert status_of({**grant, "secret": "11" * 16}) == lib.TM_ERR_DENIED
    assert status_of(grant, size=0) == lib.TM_ERR_ARGUMENT
    shared.owner.call("revoke", grant)
    assert status_of(grant) == lib.TM_ERR_REVOKED
    shared.other().kill()
    assert status_of(foreign) == lib.TM_ERR_GONE


def test_view_of_own_block():
    mover = Mover(5)
    grant, foreign = mover.grant(SIZE, block=True, seed=7), mover.grant(SIZE)
    attachment = mover.attach(mover.home())

    status, seen, handle = mover.view(attachment, grant, offset=8, size=SIZE - 8)

    assert status == lib.TM_OK
    assert bytes(seen) == pattern(SIZE, 7)[8:]
    assert mover.view(attachment, foreign)[0] == lib.TM_ERR_UNREACHABLE
    assert mover.revoke(grant) == lib.TM_FULL
    mover.close_view(handle)
    assert mover.revoke(grant) == lib.TM_OK
    mover.close()


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_tables_are_bounded():
    mover = Mover(5)
    name = ffi.new("tm_grant *")
    address = mover.grant(64)["address"]
    at = ffi.cast("uint8_t *", address)
    for _ in range(limits.GRANTS_MAX - 1):
        assert lib.tm_grant_add(mover.handle, at, 64, 3, 0, 0, name) == lib.TM_OK
    assert lib.tm_grant_add(mover.handle, at, 64, 3, 0, 0, name) == lib.TM_ERR_LIMIT
    home = mover.home()
    attachments = [mover.attach(home) for _ in range(limits.ATTACHMENTS_MAX)]
    out = ffi.new("uint32_t *")
    assert lib.tm_attachment_open(mover.handle, home_struct(home), out) == lib.TM_ERR_LIMIT
    mover.detach(attachments[3])
    assert mover.attach(home) not in attachments
    mover.close()


@pytest.mark.parametrize(
    ("size", "rights", "block"),
    [(0, 3, 0), (8, 0, 0), (8, 4, 0), (8, 3, 1), (8, 3, 4_000_000_000), ((1 << 64) - 1, 3, 0)],
)
def test_grants_that_cannot_be_are_refused(size: int, rights: int, block: int):
    mover = Mover(5)
    number, address, room = mover.take_block(100)
    at = ffi.cast("uint8_t *", address)
    name = ffi.new("tm_grant *")
    if block == 1:
        assert number == 1
        size = room + 1
    assert lib.tm_grant_add(mover.handle, at, size, rights, block, 0, name) == lib.TM_ERR_ARGUMENT
    assert lib.tm_grant_add(mover.handle, ffi.NULL, 8, 3, 0, 0, name) == lib.TM_ERR_ARGUMENT
    mover.give_back(number)
    mover.close()


def test_memory_that_is_not_there_is_an_error_of_the_transfer(far_pair: Pair):
    third, attachment = far_pair.third(CMA)
    hole = far_pair.owner.call("grant_at", 4096, 64)

    for kind in (READ, WRITE, ADD):
        local = None if kind == ADD else bytearray(64)
        done = far_pair.reader.move(far_pair.attachment, kind, hole, local)
        expected = lib.TM_ERR_UNREACHABLE if far_pair.road.carrier == SHM else lib.TM_ERR_ERRNO - 14
        assert done.status == expected
    assert third.call("read", attachment, hole, 64)[0] == lib.TM_ERR_ERRNO - 14
