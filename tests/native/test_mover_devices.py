"""Memory of devices by the carrier ucx, as far as no device is needed: what is asked of UCX, and what of no one else.

UCX is a stand-in that writes down what it was asked (`recording_ucp.c`), and memory of the host passes for memory of a
device. Whether real adapters do what is asked of them is not shown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.native.mover import (
    ALL,
    CMA,
    CUDA_MEMORY,
    HOST,
    LOCAL,
    READ,
    SHM,
    TCP,
    UCX,
    WRITE,
    Grant,
    Mover,
    ffi,
    lib,
    pattern,
)
from tests.native.movers import LOOPBACK
from tests.native.recording import Recording

pytestmark = pytest.mark.real

SIZE = 100_000
ELSEWHERE = HOST + 1
KINDS_TOLD = 1 << 4
"""Of the mask of `ucp_mem_map`: the kind of memory."""
KIND_OF_OURS = 1 << 6
"""Of the mask of a request: likewise."""


class Pair:
    """An owner and a reader in this process, which count as two hosts."""

    def __init__(self, recording: Recording, host: int = ELSEWHERE) -> None:
        self.recording = recording
        self.owner, self.reader = Mover(100, host=host, address=LOOPBACK), Mover(200)
        self.attachment = self.reader.attach(self.owner.home())

    def close(self) -> None:
        self.reader.close()
        self.owner.close()

    def granted(self, size: int = SIZE, **options: Any) -> dict[str, Any]:
        """Return a grant of memory of a device, exported."""
        return self.owner.export(self.owner.grant(size, memory=CUDA_MEMORY, **options))

    def mapped(self) -> list[dict[str, int]]:
        """Return the registrations of memory that was told to be of a device."""
        return [call for call in self.recording.calls("mem_map") if call["kind"] == CUDA_MEMORY]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path)


@pytest.fixture
def pair(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    recording.install(monkeypatch)
    pair = Pair(recording)
    yield pair
    pair.close()


def test_is_registered_as_what_it_is(pair: Pair) -> None:
    """Range, rights and kind, once for all exports; nothing before the first one."""
    grant = pair.owner.grant(SIZE, rights=1, memory=CUDA_MEMORY)
    assert not pair.mapped()

    exported = pair.owner.export(grant)

    assert exported["exported"]
    assert pair.owner.export(grant) == exported
    (call,) = pair.mapped()
    assert (call["length"], call["prot"], call["status"]) == (SIZE, 0x101, 0)
    assert call["mask"] & KINDS_TOLD
    assert pair.owner.why_no_device() == ""


def test_memory_of_the_host_is_told_as_ever(pair: Pair) -> None:
    grant = pair.owner.export(pair.owner.grant(SIZE))

    local = bytearray(SIZE)
    assert pair.reader.move(pair.attachment, READ, grant, local, carriers=UCX).status == lib.TM_OK

    assert local == pattern(SIZE)
    calls = pair.recording.calls("mem_map")
    assert calls
    assert not any(call["mask"] & KINDS_TOLD for call in calls)
    assert not any(call["mask"] & KIND_OF_OURS for call in pair.recording.calls("get"))


@pytest.mark.parametrize("ours", [0, CUDA_MEMORY])
def test_is_read_and_written(pair: Pair, ours: int) -> None:
    """By host memory and by device memory of the one who asks, which is told as what it is."""
    grant = pair.granted()

    local = bytearray(SIZE)
    done = pair.reader.move(pair.attachment, READ, grant, local, memory=ours)
    assert (done.status, done.carrier, local) == (lib.TM_OK, UCX, pattern(SIZE))
    done = pair.reader.move(pair.attachment, WRITE, grant, bytearray(pattern(SIZE, 7)), memory=ours)
    assert (done.status, done.carrier) == (lib.TM_OK, UCX)

    assert bytes(pair.owner.memory[grant["address"]][:SIZE]) == pattern(SIZE, 7)
    for name in ("get", "put"):
        (piece,) = (call for call in pair.recording.calls(name) if call["length"] == SIZE)
        assert (piece["theirs"], piece["memh"]) == (CUDA_MEMORY, 1)
        assert bool(piece["mask"] & KIND_OF_OURS) == (ours == CUDA_MEMORY)
        assert piece["kind"] == (CUDA_MEMORY if ours else -1)
    # Two of the reader's, which end with their transfers.
    assert len(pair.mapped()) == (3 if ours else 1)
    ended = [call for call in pair.recording.calls("mem_unmap") if call["kind"] == CUDA_MEMORY]
    assert len(ended) == (2 if ours else 0)


def test_rows_are_read_into_memory_of_the_host(pair: Pair) -> None:
    """What is looked at before and after the bytes is never memory of a device."""
    pair.reader.move(pair.attachment, READ, pair.granted(), bytearray(SIZE), memory=CUDA_MEMORY)

    looks = [call for call in pair.recording.calls("get") if call["length"] != SIZE]
    assert len(looks) == 2
    assert {(call["mask"] & KIND_OF_OURS, call["theirs"]) for call in looks} == {(0, 0)}


@pytest.mark.parametrize(("carrier", "host"), [(LOCAL, HOST), (SHM, HOST), (CMA, HOST), (TCP, ELSEWHERE)])
def test_no_other_carrier_touches_it(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, carrier: int, host: int
) -> None:
    """The address of the grant has nothing behind it: a processor that looked there would end this process."""
    recording.install(monkeypatch)
    pair = Pair(recording, host)
    reader = pair.owner if carrier == LOCAL else pair.reader
    try:
        grant = pair.owner.export(pair.owner.grant_at(1 << 46, SIZE, memory=CUDA_MEMORY))
        attachment = reader.attach(pair.owner.home())
        is_there = bool(reader.info(attachment)[0] & carrier)
        assert is_there or carrier in (SHM, CMA)  # which a sandbox may refuse
        expected = lib.TM_ERR_DEVICE if is_there else lib.TM_ERR_UNREACHABLE
        for kind in (READ, WRITE):
            assert reader.move(attachment, kind, grant, bytearray(SIZE), carriers=carrier).status == expected
        if host == HOST and is_there:
            assert reader.view(attachment, grant)[0] == lib.TM_ERR_DEVICE
    finally:
        pair.close()


@pytest.mark.parametrize("carrier", [LOCAL, SHM, CMA, TCP])
def test_no_other_carrier_moves_bytes_into_it(pair: Pair, carrier: int) -> None:
    grant = pair.owner.grant(SIZE)
    local = bytearray(SIZE)

    done = pair.reader.move(pair.attachment, READ, grant, local, carriers=carrier, memory=CUDA_MEMORY)

    assert done.status == lib.TM_ERR_DEVICE
    assert not any(local)


def test_processes_of_one_host_use_the_adapter(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    recording.install(monkeypatch)
    pair = Pair(recording, HOST)
    try:
        local = bytearray(SIZE)
        done = pair.reader.move(pair.attachment, READ, pair.granted(), local, carriers=ALL)
        assert (done.status, done.carrier, local) == (lib.TM_OK, UCX, pattern(SIZE))
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RECORDING_UCP_CUDA": "0"}, ["1.13.0-recording", "knows no memory of CUDA", "HPC-X", "TRIMESH_UCX"]),
        ({"RECORDING_UCP_MAP": "-3"}, ["status -3, input or output error", "dma-buf", "nvidia_peermem"]),
        ({"RECORDING_UCP_DOMAIN": "cuda"}, ["not with an adapter", "nvidia_peermem"]),
    ],
)
def test_where_it_is_not_registered_there_are_words(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: list[str]
) -> None:
    """Nothing is exported, nothing stays registered; who asks for more is told that it is memory of a device."""
    recording.install(monkeypatch, **changes)
    pair = Pair(recording)
    try:
        grant = pair.granted()
        assert not grant["exported"]
        assert all(word in pair.owner.why_no_device() for word in words), pair.owner.why_no_device()
        assert pair.reader.move(pair.attachment, READ, grant, bytearray(8), carriers=UCX | TCP).status < 0

        ours = pair.owner.export(pair.owner.grant(SIZE))
        done = pair.reader.move(pair.attachment, READ, ours, bytearray(SIZE), memory=CUDA_MEMORY)
        assert done.status == lib.TM_ERR_DEVICE
        assert pair.reader.why_no_device() == pair.owner.why_no_device()
        kept = [call for call in pair.mapped() if call["status"] == 0]
        assert len(kept) == len([call for call in recording.calls("mem_unmap") if call["kind"] == CUDA_MEMORY])
        assert pair.reader.move(pair.attachment, READ, ours, bytearray(SIZE)).status == lib.TM_OK
    finally:
        pair.close()


def test_revoked_it_is_registered_no_more(pair: Pair) -> None:
    grant = pair.granted()
    assert pair.reader.move(pair.attachment, READ, grant, bytearray(SIZE)).status == lib.TM_OK

    assert pair.owner.revoke(grant) == lib.TM_OK

    assert pair.recording.calls("mem_unmap")[-1] == {"kind": CUDA_MEMORY, "length": SIZE}
    assert pair.reader.move(pair.attachment, READ, grant, bytearray(SIZE)).status == lib.TM_ERR_REVOKED
    assert pair.owner.drop(grant) == lib.TM_OK


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_revoked_in_the_middle(pair: Pair, kind: int) -> None:
    """A transfer that is under way ends as revoked, and writes nothing afterwards."""
    grant = pair.granted()
    pair.recording.held.touch()
    status, begun = pair.reader.begin(pair.attachment, kind, grant, bytearray(SIZE), memory=CUDA_MEMORY)
    assert status == lib.TM_UNDER_WAY
    name = "get" if kind == READ else "put"
    while not any(call["length"] == SIZE for call in pair.recording.calls(name)):
        pass

    assert pair.owner.revoke(grant) == lib.TM_OK
    pair.recording.held.unlink()

    assert pair.reader.wait(begun.id).status == lib.TM_ERR_REVOKED
    assert bytes(pair.owner.memory[grant["address"]][:SIZE]) == pattern(SIZE)


def test_wrong_kinds_are_refused(pair: Pair) -> None:
    """A kind that there is none of, and memory of a device that lies in a block."""
    number, address, _ = pair.owner.take_block(SIZE)
    name = ffi.new("tm_grant *")
    for block, memory in ((0, 2), (number, CUDA_MEMORY)):
        at = ffi.cast("uint8_t *", address)
        assert lib.tm_grant_add(pair.owner.handle, at, SIZE, 3, block, memory, name) == lib.TM_ERR_ARGUMENT
    pair.owner.give_back(number)
    request = ffi.new("tm_transfer *", {"attachment": pair.attachment, "kind": READ, "size": 8, "memory": 2})
    request.grant, request.local = Grant(**pair.owner.grant(8)).name()[0], at
    assert lib.tm_transfer_begin(pair.reader.handle, request, ffi.new("tm_done *")) == lib.TM_ERR_ARGUMENT
