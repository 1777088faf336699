"""What opens memory of a device: as it was written, or an error of ours, whatever a peer has laid there."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from tests.rows import rows

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.rdma.memory.device import Driver, DriverError
from trimesh.rdma.memory.handle import Ticket, is_device, read_ticket, write_ticket

SPACE = "cuda:4d0a63c2-7f7c-4b2a-9d6e-0123456789ab"
GOOD: dict[str, Any] = {
    "space": SPACE,
    "number": 77,
    "memory": bytes(range(64)),
    "offset": 4096,
    "nbytes": 1000,
    "ready": bytes(64),
}


def lay(**changed: Any) -> bytes:
    """Return what a peer lays: the fields of a ticket, some of them of another kind."""
    written = msgspec.msgpack.encode(list((GOOD | changed).values()))
    return (len(written).to_bytes(4, "little") + written).ljust(limits.CUDA_TICKET_BYTES, b"\0")


def test_ticket_is_read_as_it_was_written():
    ticket = Ticket(**GOOD)
    assert read_ticket(write_ticket(ticket), SPACE, 0, 1000) == ticket
    assert lay() == write_ticket(ticket)


def test_longest_ticket_has_room():
    space = "cuda:" + "a" * 64
    most = (1 << 62) - 1
    longest = Ticket(space, most, b"\xff" * 64, most, most, b"\xff" * 64)
    data = write_ticket(longest)
    assert len(data) == limits.CUDA_TICKET_BYTES
    assert read_ticket(data, space, 0, 1) == longest


@rows(
    "changed",
    [
        {"space": "cpu"},
        {"space": "cuda:other"},
        {"space": 5},
        {"number": "77"},
        {"memory": bytes(63)},
        {"memory": bytes(65)},
        {"memory": None},
        {"offset": -1},
        {"offset": 1.5},
        {"offset": (1 << 63) - 1},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": 1 << 63},
        {"ready": b""},
        {"more": 1},
    ],
)
def test_other_tickets_are_refused(changed: dict[str, Any]):
    with pytest.raises(ProtocolError, match="ticket"):
        read_ticket(lay(**changed), SPACE, 0, 1)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1001), (1000, 1), (999, 2), (1 << 63, 1), (0, 1 << 64)])
def test_range_beyond_the_memory_is_refused(offset: int, nbytes: int):
    """What a handle claims was checked by nobody before."""
    with pytest.raises(PermissionError, match="1000 bytes"):
        read_ticket(lay(), SPACE, offset, nbytes)


@rows("seed", range(10))
def test_any_bytes_make_a_ticket_or_a_protocol_error(seed: int):
    draw = random.Random(seed)
    for _ in range(300):
        data = bytearray(lay())
        for _ in range(draw.randrange(1, 20)):
            data[draw.randrange(240)] = draw.randrange(256)
        for mangled in (bytes(data), bytes(data[: draw.randrange(len(data))])):
            try:
                found = read_ticket(mangled, SPACE, 0, 1)
            except (ProtocolError, PermissionError):
                continue
            assert len(found.memory) == len(found.ready) == 64


@pytest.mark.parametrize("space", ["cuda:GPU-1", SPACE])
def test_names_of_devices(space: str):
    assert is_device(space)


@rows("space", ["cpu", "cuda", "cuda:", "cuda:a b", "cuda:a\n", "xpu:1", "", "cuda:" + "a" * 65])
def test_other_names_are_none(space: str):
    assert not is_device(space)


def test_driver_without_a_function_is_refused():
    """An old driver, or another library of that name."""
    with pytest.raises(DriverError, match="it has no cu"):
        Driver(object())
