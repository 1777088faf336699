"""Transfers: what is moved, what is refused, and what becomes of them when something ends meanwhile (N4)."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.native.mover import ADD, ALL, CMA, READ, SHM, SWAP, WRITE, Mover, Other, lib, pattern
from tests.native.movers import TCP_ROAD, Pair, far_pair, host_pair, lasting_owner, odd_pair, pair

from trimesh import limits

pytestmark = pytest.mark.real

__all__ = ["far_pair", "host_pair", "lasting_owner", "odd_pair", "pair"]  # fixtures

SMALL = 5_000
LARGE = 3 * limits.INLINE_BYTES_MAX + 17
MORE_THAN_CACHES = (8 << 20) + 100
HUGE = 128 << 20
MANY = 256
"""That many huge transfers take five seconds at least, together: whatever happens meanwhile is in the middle of them,
also where this process has to wait for its turn."""


def wait_revoked(pair: Pair, grant: dict[str, Any]) -> None:
    """Revoke until nobody is at it."""
    while pair.owner.call("revoke", grant) == lib.TM_FULL:
        pass


def begin_many(pair: Pair, grant: dict[str, Any], local: bytearray) -> list[int]:
    """Begin many transfers; return their numbers."""
    begun = [pair.reader.begin(pair.attachment, READ, grant, local) for _ in range(MANY)]
    assert {status for status, _ in begun} == {lib.TM_UNDER_WAY}
    return [done.id for _, done in begun]


# ---- what is moved ---------------------------------------------------------------------------------------------------


def check_moves(pair: Pair, size: int) -> None:
    grant = pair.grant(size, seed=3)
    local = bytearray(size)

    read = pair.reader.move(pair.attachment, READ, grant, local)

    assert (read.status, read.carrier) == (lib.TM_OK, pair.road.carrier)
    assert local == pattern(size, 3)
    local[:] = pattern(size, 4)
    assert pair.reader.move(pair.attachment, WRITE, grant, local).status == lib.TM_OK
    assert pair.owner.call("peek", grant["address"], size) == pattern(size, 4).hex()


def test_read_and_write_move_the_bytes(pair: Pair):
    for size in (1, SMALL, limits.INLINE_BYTES_MAX, limits.INLINE_BYTES_MAX + 1, LARGE):
        check_moves(pair, size)


def test_a_carrier_that_is_not_the_best_moves_the_bytes(odd_pair: Pair):
    for size in (SMALL, LARGE):
        check_moves(odd_pair, size)


@pytest.mark.daily
def test_part_of_a_range_is_moved_and_nothing_else(pair: Pair):
    for size in (SMALL, LARGE):
        grant = pair.grant(2 * size)
        local = bytearray(size + 2)

        inside = memoryview(local)[1:-1]
        assert pair.reader.move(pair.attachment, READ, grant, inside, offset=size).status == lib.TM_OK

        assert local == b"\0" + pattern(2 * size)[size:] + b"\0"
        assert pair.reader.move(pair.attachment, WRITE, grant, bytearray(size), offset=7).status == lib.TM_OK
        expected = pattern(2 * size)
        expected = expected[:7] + bytes(size) + expected[7 + size :]
        assert pair.owner.call("peek", grant["address"], 2 * size) == expected.hex()


@pytest.mark.parametrize("shift", [0, 1, 15, 16])
def test_more_than_caches_hold_is_moved_however_it_lies(host_pair: Pair, shift: int):
    """Such copies go past the caches, by stores that ask for aligned memory."""
    grant = host_pair.grant(MORE_THAN_CACHES + 100)
    local = bytearray(MORE_THAN_CACHES + 34)
    size, offset = MORE_THAN_CACHES - shift, 5
    inside = memoryview(local)[shift : shift + size]

    assert host_pair.reader.move(host_pair.attachment, READ, grant, inside, offset=offset).status == lib.TM_OK

    assert inside == pattern(offset + size)[offset:]
    assert not any(local[:shift])
    assert not any(local[shift + size :])
    inside[:] = pattern(size, 6)
    assert host_pair.reader.move(host_pair.attachment, WRITE, grant, inside, offset=offset).status == lib.TM_OK
    local[:] = bytes(len(local))
    assert host_pair.reader.move(host_pair.attachment, READ, grant, inside, offset=offset).status == lib.TM_OK
    assert inside == pattern(size, 6)
    edges = bytearray(offset + 100 + shift)
    for at, into in ((0, memoryview(edges)[:offset]), (offset + size, memoryview(edges)[offset : offset + 90])):
        assert host_pair.reader.move(host_pair.attachment, READ, grant, into, offset=at).status == lib.TM_OK
        assert into == pattern(at + len(into))[at:]


def test_large_transfers_take_turns(pair: Pair):
    """A short one is not behind a long one that was begun before."""
    long, short = pair.grant(HUGE), pair.grant(LARGE, seed=1)
    local, other = bytearray(HUGE), bytearray(LARGE)
    _, first = pair.reader.begin(pair.attachment, READ, long, local)
    _, second = pair.reader.begin(pair.attachment, READ, short, other)

    assert pair.reader.wait(second.id).status == lib.TM_OK
    assert other == pattern(LARGE, 1)
    assert pair.reader.wait(first.id).status == lib.TM_OK
    assert local == pattern(HUGE)


def test_transfers_are_bounded(pair: Pair):
    grant = pair.grant(HUGE)
    local = bytearray(HUGE)
    numbers = []
    while len(numbers) < limits.TRANSFERS_MAX:
        status, done = pair.reader.begin(pair.attachment, READ, grant, local)
        assert status == lib.TM_UNDER_WAY
        numbers.append(done.id)

    assert pair.reader.begin(pair.attachment, READ, grant, local)[0] == lib.TM_FULL

    for number in numbers:
        assert pair.reader.give_up(number) == lib.TM_OK
    assert {pair.reader.wait(number).status for number in numbers} <= {lib.TM_ERR_CANCELLED, lib.TM_OK}
    assert pair.reader.move(pair.attachment, READ, grant, local).status == lib.TM_OK


# ---- what is refused -------------------------------------------------------------------------------------------------

TOP = (1 << 64) - 1


FORGED: list[dict[str, Any]] = [
    {"secret": "00" * 16},
    {"generation": 0},
    {"generation": 1 << 31},
    {"generation": (1 << 32) - 1},
    {"place": limits.GRANTS_MAX - 1},
    {"place": limits.GRANTS_MAX},
    {"place": (1 << 32) - 1},
]


@pytest.mark.daily
def test_forged_grant_is_denied(pair: Pair):
    for size in (SMALL, LARGE):
        grant, local = pair.grant(size), bytearray(size)
        for change in FORGED:
            forged = {**grant, **change}
            for kind in (READ, WRITE, ADD):
                done = pair.reader.move(pair.attachment, kind, forged, None if kind == ADD else local)
                assert done.status == lib.TM_ERR_DENIED, change
        assert local == bytes(size)


OUTSIDE = [
    (0, 8193),
    (1, 8192),
    (8191, 2),
    (8192, 1),
    (8193, 1),
    (TOP, 1),
    (TOP - 7, 8),
    (TOP, 8192),
    (1 << 63, 8),
    (0, LARGE),
]


@pytest.mark.daily
def test_range_outside_of_the_grant_is_denied(pair: Pair):
    grant = pair.grant(8192)
    for offset, size in OUTSIDE:
        local = bytearray(size)
        for kind in (READ, WRITE):
            assert pair.reader.move(pair.attachment, kind, grant, local, offset=offset).status == lib.TM_ERR_DENIED, (
                offset
            )
        assert local == bytes(size)
    for offset in (8192, 1 << 63, TOP - 7):
        assert pair.reader.move(pair.attachment, ADD, grant, None, offset=offset).status == lib.TM_ERR_DENIED, offset


@pytest.mark.daily
def test_what_there_is_no_right_for_is_denied(pair: Pair):
    local = bytearray(8)
    allowed = {1: {READ}, 2: {WRITE}, 3: {READ, WRITE, ADD, SWAP}}
    for rights, kinds in allowed.items():
        grant = pair.grant(64, rights=rights)
        for kind in (READ, WRITE, ADD, SWAP):
            done = pair.reader.move(pair.attachment, kind, grant, local if kind in (READ, WRITE) else None)
            assert done.status == (lib.TM_OK if kind in kinds else lib.TM_ERR_DENIED), (rights, kind)


@pytest.mark.daily
def test_revoked_grant_is_refused_and_its_place_leads_to_no_other(pair: Pair):
    """N4: never the bytes of what was granted later."""
    grant = pair.grant(SMALL)
    local = bytearray(SMALL)
    assert pair.owner.call("revoke", grant) == pair.owner.call("revoke", grant) == lib.TM_OK
    assert pair.reader.move(pair.attachment, READ, grant, local).status == lib.TM_ERR_REVOKED
    assert pair.owner.call("drop", grant) == lib.TM_OK
    assert pair.owner.call("drop", grant) == lib.TM_ERR_ARGUMENT
    later = pair.grant(SMALL, seed=9)
    assert (later["place"], later["generation"]) == (grant["place"], grant["generation"] + 1)

    for kind in (READ, WRITE):
        assert pair.reader.move(pair.attachment, kind, grant, local).status == lib.TM_ERR_REVOKED
    forged = {**later, "generation": grant["generation"]}
    # By tcp, who shows the wrong secret learns nothing of generations.
    expected = lib.TM_ERR_DENIED if pair.road is TCP_ROAD else lib.TM_ERR_REVOKED
    assert pair.reader.move(pair.attachment, READ, forged, local).status == expected
    assert local == bytes(SMALL)


def test_arguments_are_checked(pair: Pair):
    grant, local = pair.grant(64), bytearray(16)
    cases: list[dict[str, Any]] = [
        {"kind": 0},
        {"kind": 5},
        {"local": bytearray(0)},
        {"attachment": pair.attachment + 1},
        {"attachment": 0xFFFF},
        {"kind": ADD, "local": None, "offset": 4},
        {"kind": ADD},  # 16 bytes
    ]
    for case in cases:
        arguments: dict[str, Any] = {
            "attachment": pair.attachment,
            "kind": READ,
            "grant": grant,
            "local": local,
            **case,
        }
        assert pair.reader.begin(**arguments)[0] == lib.TM_ERR_ARGUMENT, case
    assert pair.reader.give_up(12345) == lib.TM_ERR_ARGUMENT
    assert pair.reader.detach(pair.attachment + 7) == lib.TM_ERR_ARGUMENT
    assert pair.owner.call("drop", grant) == lib.TM_ERR_STATE


def test_carriers_that_a_transfer_may_not_use_are_not_used(pair: Pair):
    grant = pair.grant(64)

    assert pair.reader.move(pair.attachment, READ, grant, bytearray(8), carriers=0).status == lib.TM_ERR_UNREACHABLE
    others = ALL & ~pair.road.carrier
    assert (
        pair.reader.move(pair.attachment, READ, grant, bytearray(8), carriers=others).status == lib.TM_ERR_UNREACHABLE
    )


# ---- atomic operations -----------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_atomic_operations_give_the_old_value(pair: Pair):
    grant = pair.grant(64)
    pair.owner.call("poke", grant["address"], (10).to_bytes(8, "little").hex())

    def atomic(kind: int, **options: int) -> int:
        done = pair.reader.move(pair.attachment, kind, grant, None, **options)
        assert (done.status, done.carrier) == (lib.TM_OK, pair.road.carrier)
        return done.value

    assert atomic(ADD, operand=5) == 10
    assert atomic(ADD, operand=TOP) == 15
    assert atomic(SWAP, expected=13, operand=99) == 14
    assert atomic(SWAP, expected=14, operand=TOP) == 14
    assert atomic(ADD, operand=3) == TOP  # wraps
    assert pair.owner.call("peek", grant["address"], 8) == (2).to_bytes(8, "little").hex()


def test_atomic_operations_of_unaligned_memory_are_refused(pair: Pair):
    grant = pair.grant(64)
    shifted = pair.owner.call(
        "grant_at",
        grant["address"] + 4,
        32,
        block=pair.owner.call("number_of", grant),
    )

    status, done = pair.reader.begin(pair.attachment, ADD, shifted, None)
    if pair.road is TCP_ROAD:  # only the owner knows
        status = pair.reader.wait(done.id).status
    assert status == lib.TM_ERR_ARGUMENT


def test_atomic_operations_of_many_processes_add_up(far_pair: Pair):
    """Whatever carries them: the owner's own are local."""
    pair = far_pair
    grant = pair.grant(64)
    pair.owner.call("poke", grant["address"], bytes(8).hex())
    third, third_attachment = pair.third()
    own_attachment = pair.owner.call("attach", pair.owner.call("home"))
    times = 2_000

    third.start("add", third_attachment, grant, 1, times)
    pair.other().start("add", own_attachment, grant, 1 << 20, times)
    assert pair.reader.add(pair.attachment, grant, 1 << 40, times) == 0
    assert third.answer() == pair.other().answer() == 0

    total = int.from_bytes(bytes.fromhex(pair.owner.call("peek", grant["address"], 8)), "little")
    assert total == times * (1 + (1 << 20) + (1 << 40))


# ---- what ends meanwhile ---------------------------------------------------------------------------------------------


def test_revoking_ends_what_is_under_way(pair: Pair):
    grant = pair.grant(HUGE)
    numbers = begin_many(pair, grant, bytearray(HUGE))

    wait_revoked(pair, grant)

    assert pair.owner.call("drop", grant) == lib.TM_OK
    assert {pair.reader.wait(number).status for number in numbers} == {lib.TM_ERR_REVOKED}


def test_revoked_memory_is_not_written_to_any_more(pair: Pair):
    """N4: once nobody is at it, the owner may use it for something else."""
    grant = pair.grant(HUGE)
    local = bytearray(HUGE)
    begun = [pair.reader.begin(pair.attachment, WRITE, grant, local)[1] for _ in range(MANY)]

    wait_revoked(pair, grant)
    pair.owner.call("poke", grant["address"], "ff" * (1 << 20))

    for done in begun:
        assert pair.reader.wait(done.id).status == lib.TM_ERR_REVOKED
    assert pair.owner.call("peek", grant["address"], 1 << 20) == "ff" * (1 << 20)


def test_transfer_that_is_given_up_ends_soon(pair: Pair):
    grant = pair.grant(HUGE)
    local = bytearray(HUGE)
    numbers = begin_many(pair, grant, local)

    for number in numbers:
        assert pair.reader.give_up(number) == lib.TM_OK

    assert {pair.reader.wait(number).status for number in numbers} == {lib.TM_ERR_CANCELLED}
    local[:] = bytes(HUGE)
    assert pair.owner.call("revoke", grant) == lib.TM_OK  # nobody is at it
    assert local == bytes(HUGE)
    assert pair.reader.give_up(numbers[0]) == lib.TM_ERR_ARGUMENT


def test_transfers_of_a_closed_attachment_are_cancelled(pair: Pair):
    grant = pair.grant(HUGE)
    numbers = begin_many(pair, grant, bytearray(HUGE))

    assert pair.reader.detach(pair.attachment) == lib.TM_OK

    assert pair.reader.begin(pair.attachment, READ, grant, bytearray(8))[0] == lib.TM_ERR_ARGUMENT
    assert pair.reader.detach(pair.attachment) == lib.TM_ERR_ARGUMENT
    assert {pair.reader.wait(number).status for number in numbers} == {lib.TM_ERR_CANCELLED}
    assert pair.owner.call("revoke", grant) == lib.TM_OK


def test_mover_is_destroyed_with_transfers_under_way(far_pair: Pair):
    grant = far_pair.grant(HUGE)
    begin_many(far_pair, grant, bytearray(HUGE))

    far_pair.reader.close()

    gc.collect()  # what earlier tests have dropped
    assert "memfd:trimesh" not in Path("/proc/self/maps").read_text()
    if far_pair.road is TCP_ROAD:  # the owner has to hear of it
        wait_revoked(far_pair, grant)
    assert far_pair.owner.call("revoke", grant) == lib.TM_OK


def test_owner_that_is_killed_ends_what_is_under_way(far_pair: Pair):
    pair = far_pair
    grant = pair.grant(HUGE)
    numbers = begin_many(pair, grant, bytearray(HUGE))

    pair.other().kill()

    assert {pair.reader.wait(number).status for number in numbers} == {lib.TM_ERR_GONE}
    local = bytearray(SMALL)
    for kind in (READ, WRITE, ADD):
        done = pair.reader.move(pair.attachment, kind, grant, None if kind == ADD else local)
        assert done.status == lib.TM_ERR_GONE
    assert local == bytes(SMALL)
    assert pair.reader.info(pair.attachment)[1] == 1


def test_owner_that_is_killed_and_not_reaped_is_gone(far_pair: Pair):
    grant = far_pair.grant(SMALL)
    other = far_pair.other()
    other.signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)

    assert far_pair.reader.move(far_pair.attachment, READ, grant, bytearray(8)).status == lib.TM_ERR_GONE
    attachment = far_pair.reader.attach(far_pair.reader.home())
    assert far_pair.reader.info(attachment)[1] == 0


@pytest.mark.parametrize("carrier", [CMA, SHM])
def test_owner_that_has_become_another_program_is_not_reached(carrier: int):
    """What lies at an address now was granted by nobody; what is mapped is there, but nobody's any more."""
    owner, reader = Other(97), Mover(98, carrier)
    grant = owner.call("grant", SMALL, block=carrier == SHM)
    attachment = reader.attach(owner.call("home"))
    done = reader.move(attachment, READ, grant, bytearray(8))
    assert (done.status, done.carrier) == (lib.TM_OK, carrier)

    assert owner.call("become_another") is True

    for kind in (READ, WRITE, ADD):
        done = reader.move(attachment, kind, grant, None if kind == ADD else bytearray(8))
        assert done.status == lib.TM_ERR_GONE
    reader.close()
    owner.close()


def test_owner_that_is_stopped_takes_no_part(host_pair: Pair):
    pair = host_pair
    grant = pair.grant(LARGE, seed=2)
    local = bytearray(LARGE)
    pair.other().signal(signal.SIGSTOP)
    os.waitid(os.P_PID, pair.other().pid, os.WSTOPPED)

    assert pair.reader.move(pair.attachment, READ, grant, local).status == lib.TM_OK
    assert local == pattern(LARGE, 2)
    assert pair.reader.move(pair.attachment, ADD, grant, None, operand=1).status == lib.TM_OK
    assert pair.reader.move(pair.attachment, WRITE, grant, bytearray(8)).status == lib.TM_OK
    another = Mover(99)
    attachment = another.attach(another.home())
    assert another.info(attachment)[1] == 0
    another.close()

    pair.other().signal(signal.SIGCONT)
    assert pair.owner.call("peek", grant["address"], 8) == bytes(8).hex()
