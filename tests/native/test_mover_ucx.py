"""Transfers by an RDMA adapter: `make test-verbs` runs these on a machine that has one in software.

Elsewhere they are skipped, unless TRIMESH_UCX names a UCX, and UCX_TLS the transports that it is to use: `tcp,self`
then shows all but what only an adapter does: to refuse what was revoked.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.native.mover import ADD, ALL, HOST, READ, UCX, WRITE, Mover, Other, lib, pattern

MIB = 1 << 20
LARGE = 32 * MIB
"""Half a second where the adapter is emulated."""
ELSEWHERE = HOST + 1

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
by_adapter = pytest.mark.skipif("tcp" in os.environ.get("UCX_TLS", ""), reason="UCX_TLS names tcp: no adapter refuses")


@pytest.fixture(scope="module")
def ours() -> Iterator[Mover]:
    mover = Mover(100)
    try:
        usable, about = mover.adapters()
        if not usable:
            pytest.skip(about)
        yield mover
    finally:
        mover.close()


@pytest.fixture(scope="module")
def other(ours: Mover) -> Iterator[Other]:
    """Start one for all tests that leave it alive: that takes seconds where adapters are emulated."""
    other = Other(200, host=ELSEWHERE)
    read_all(ours, ours.attach(other.call("home")), granted(other, 8))  # starts threads, connects
    yield other
    other.close()


@pytest.fixture
def mortal(ours: Mover) -> Iterator[tuple[Other, Other]]:
    """Start a pair for a test that stops or kills one. Of a lost peer UCX keeps descriptors: the reader dies, too."""
    reader, owner = Other(101), Other(201, host=ELSEWHERE)
    yield reader, owner
    reader.close()
    owner.close()


def granted(other: Other, size: int, **options: Any) -> dict[str, Any]:
    return other.call("export", other.call("grant", size, **options))


def read_all(ours: Mover, attachment: int, grant: dict[str, Any], *, seed: int = 0) -> None:
    local = bytearray(grant["size"])
    done = ours.move(attachment, READ, grant, local)
    assert (done.status, done.carrier) == (lib.TM_OK, UCX)
    assert local == pattern(len(local), seed)


@pytest.mark.parametrize("size", [1, 8, 4096, 65_537, MIB, 9 * MIB + 5])
def test_reads_what_is_there(ours: Mover, other: Other, size: int) -> None:
    grant = granted(other, size)
    attachment = ours.attach(other.call("home"))

    for _ in range(2):
        read_all(ours, attachment, grant)


@pytest.mark.parametrize("size", [1, 4096, 9 * MIB + 5])
def test_writes_where_it_is_asked_to(ours: Mover, other: Other, size: int) -> None:
    grant = granted(other, size + 16)
    attachment = ours.attach(other.call("home"))

    done = ours.move(attachment, WRITE, grant, bytearray(pattern(size, 7)), offset=8)

    assert (done.status, done.carrier) == (lib.TM_OK, UCX)
    local = bytearray(size + 16)
    assert ours.move(attachment, READ, grant, local).status == lib.TM_OK
    before = pattern(size + 16)
    assert local == before[:8] + pattern(size, 7) + before[8 + size :]


def test_reads_into_memory_that_may_not_be_written_by_others(ours: Mover, other: Other) -> None:
    grant = granted(other, 4096, block=True, rights=1)
    attachment = ours.attach(other.call("home"))

    read_all(ours, attachment, grant)
    assert ours.move(attachment, WRITE, grant, bytearray(8)).status == lib.TM_ERR_DENIED


def test_refuses_what_was_not_granted(ours: Mover, other: Other) -> None:
    grant = granted(other, 4096)
    attachment = ours.attach(other.call("home"))

    def status(**changes: Any) -> int:
        return ours.move(attachment, READ, grant | changes, bytearray(8), offset=changes.pop("offset", 0)).status

    assert ours.move(attachment, READ, grant, bytearray(8), offset=4089).status == lib.TM_ERR_DENIED
    assert ours.move(attachment, READ, grant, bytearray(8), offset=(1 << 64) - 4).status == lib.TM_ERR_DENIED
    assert status(generation=grant["generation"] + 1) == lib.TM_ERR_REVOKED
    assert status(secret="00" * 16) == lib.TM_ERR_DENIED
    assert status(place=grant["place"] + 1) == lib.TM_ERR_DENIED
    read_all(ours, attachment, grant)


def test_refuses_bytes_of_a_handle_that_were_changed(ours: Mover, other: Other) -> None:
    grant = granted(other, 4096)
    attachment = ours.attach(other.call("home"))
    exported = bytes.fromhex(grant["exported"])

    for index in range(len(exported)):
        changed = exported[:index] + bytes([exported[index] ^ 0x40]) + exported[index + 1 :]
        forged = grant | {"exported": changed.hex()}
        assert ours.move(attachment, READ, forged, bytearray(8)).status == lib.TM_ERR_DENIED
    read_all(ours, attachment, grant)


def test_without_them_it_is_not_reached(ours: Mover, other: Other) -> None:
    grant = other.call("grant", 4096)
    attachment = ours.attach(other.call("home"))

    assert ours.move(attachment, READ, grant, bytearray(8), carriers=UCX).status == lib.TM_ERR_UNREACHABLE


def test_atomic_operations_are_for_others(ours: Mover, other: Other) -> None:
    grant = granted(other, 4096)
    attachment = ours.attach(other.call("home"))

    assert ours.move(attachment, ADD, grant, None, operand=1, carriers=UCX).status == lib.TM_ERR_UNREACHABLE


def test_a_grant_is_exported_again_alike(other: Other) -> None:
    grant = granted(other, 4096)

    assert other.call("export", grant) == grant


@by_adapter
def test_what_was_revoked_is_refused(ours: Mover, other: Other) -> None:
    grant, kept = granted(other, 4096), granted(other, 4096, seed=3)
    attachment = ours.attach(other.call("home"))
    read_all(ours, attachment, grant)

    assert other.call("revoke", grant) == lib.TM_OK
    assert ours.move(attachment, READ, grant, bytearray(8)).status == lib.TM_ERR_REVOKED
    assert other.call("drop", grant) == lib.TM_OK
    assert ours.move(attachment, READ, grant, bytearray(8)).status == lib.TM_ERR_REVOKED

    again = granted(other, 4096, seed=5)
    assert again["place"] == grant["place"]
    assert ours.move(attachment, READ, grant, bytearray(8)).status == lib.TM_ERR_REVOKED
    read_all(ours, attachment, again, seed=5)
    read_all(ours, attachment, kept, seed=3)


@by_adapter
def test_revoked_in_the_middle(ours: Mover, other: Other) -> None:
    grant, kept = granted(other, LARGE), granted(other, 4096, seed=3)
    attachment = ours.attach(other.call("home"))
    local = bytearray(LARGE)
    read_all(ours, attachment, kept, seed=3)

    status, begun = ours.begin(attachment, READ, grant, local)
    assert status == lib.TM_UNDER_WAY
    assert other.call("revoke", grant) == lib.TM_OK

    assert ours.wait(begun.id).status == lib.TM_ERR_REVOKED
    read_all(ours, attachment, kept, seed=3)


@by_adapter
def test_a_stopped_owner_is_read_all_the_same(mortal: tuple[Other, Other]) -> None:
    reader, owner = mortal
    grant = granted(owner, MIB)
    attachment = reader.call("attach", owner.call("home"))
    assert reader.call("fetch", attachment, grant) == [lib.TM_OK, True]

    owner.signal(signal.SIGSTOP)

    assert reader.call("fetch", attachment, grant) == [lib.TM_OK, True]


def test_a_killed_owner_of_another_host_is_silent(mortal: tuple[Other, Other]) -> None:
    reader, owner = mortal
    grant = granted(owner, 4096)
    attachment = reader.call("attach", owner.call("home"))
    assert reader.call("fetch", attachment, grant) == [lib.TM_OK, True]

    owner.kill()

    assert reader.call("fetch", attachment, grant)[0] == lib.TM_ERR_SILENT


def test_an_owner_that_is_killed_in_the_middle_is_silent(mortal: tuple[Other, Other]) -> None:
    reader, owner = mortal
    grant = granted(owner, LARGE)
    attachment = reader.call("attach", owner.call("home"))

    reader.start("fetch", attachment, grant)
    owner.kill()

    assert reader.answer()[0] in {lib.TM_ERR_SILENT, lib.TM_ERR_UNREACHABLE}


def test_a_transfer_that_is_given_up_ends(ours: Mover, other: Other) -> None:
    grant = granted(other, LARGE)
    attachment = ours.attach(other.call("home"))
    local = bytearray(LARGE)

    status, begun = ours.begin(attachment, READ, grant, local)
    assert status == lib.TM_UNDER_WAY
    assert ours.give_up(begun.id) == lib.TM_OK

    assert ours.wait(begun.id).status == lib.TM_ERR_CANCELLED
    read_all(ours, attachment, grant)


def test_many_at_a_time(ours: Mover, other: Other) -> None:
    grants = [granted(other, 65_536, seed=n) for n in range(8)]
    attachment = ours.attach(other.call("home"))
    locals_ = [bytearray(65_536) for _ in range(64)]

    begun = [ours.begin(attachment, READ, grants[n % 8], local)[1].id for n, local in enumerate(locals_)]

    assert {ours.wait(number).status for number in begun} == {lib.TM_OK}
    assert all(local == pattern(65_536, n % 8) for n, local in enumerate(locals_))


def test_a_attachment_that_is_closed_ends_its_transfers(ours: Mover, other: Other) -> None:
    grant = granted(other, LARGE)
    attachment = ours.attach(other.call("home"))
    local = bytearray(LARGE)

    begun = ours.begin(attachment, READ, grant, local)[1]
    assert ours.detach(attachment) == lib.TM_OK

    assert ours.wait(begun.id).status == lib.TM_ERR_CANCELLED


def test_a_mover_ends_beside_transfers(other: Other) -> None:
    grant = granted(other, LARGE)
    home = other.call("home")
    before = len(os.listdir("/proc/self/fd"))
    local = bytearray(LARGE)

    for _ in range(2):
        mover = Mover(300, ALL)
        assert mover.begin(mover.attach(home), READ, grant, local)[0] == lib.TM_UNDER_WAY
        mover.close()

    assert len(os.listdir("/proc/self/fd")) == before
