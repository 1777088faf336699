"""What a handle says when it travels, and what is refused of what a peer says."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.rows import rows

from trimesh import limits
from trimesh._runtime.services.bulk import Granted
from trimesh._transport.interface import Grant, ProcessAddress, Right
from trimesh.errors import Origin, ProtocolError
from trimesh.rdma.buffers.buffer import RDMABuffer, rebuild
from trimesh.rdma.memory.handle import Handle, handle_of
from trimesh.shape.extent import Extent

HOME = ProcessAddress(5, 6, 7, 8, 9, 10, b"\x7f\0\0\1")
GRANT = Grant(1, 2, bytes(range(16)), b"worker and keys")
ON_DEVICE = Grant(3, 4, bytes(range(1, 17)), b"worker and other keys")
ORIGIN = Origin(Extent(gpus=2).point(1), "trainers", "Trainer", None, "here", 8, 3)


def make(nbytes: int = 100, rights: Right = Right.READ | Right.WRITE) -> Handle:
    granted = Granted(HOME, GRANT, 4, ORIGIN, ON_DEVICE)
    return Handle(granted, address=4096, offset=16, nbytes=nbytes, rights=rights)


def test_handle_travels_as_it_is():
    found = handle_of(*make().fields())
    assert found.fields() == make().fields()
    assert found.granted.home == HOME
    assert found.granted.grant == GRANT
    assert found.granted.origin == ORIGIN
    assert found.granted.device == ON_DEVICE


@pytest.mark.parametrize(("why", "kept"), [("", ""), ("no adapter", "no adapter"), ("x" * 5000, "x" * 1024)])
def test_handle_says_why_adapters_do_not_reach_a_device(why: str, kept: str):
    """Nothing is said of memory of a host."""
    found = handle_of(*Handle(Granted(HOME, GRANT, 4, ORIGIN, None, why), 1, 0, 1, Right.READ).fields())
    assert (found.granted.device, found.granted.why_no_device) == (None, kept)
    with pytest.raises(ValueError, match="granted to adapters, got none"):
        found.granted.on_device  # noqa: B018 - a property


def test_secret_is_not_shown():
    """Logs hold what is printed."""
    handle = make()
    text = repr(handle) + repr(rebuild(*handle.fields()))
    assert repr(GRANT.secret)[2:-1] not in text
    assert "secret" not in text


REPLACED: list[tuple[tuple[int, ...], Any]] = [
    ((0,), None),
    ((0,), (1, 2)),
    ((0, 0), 0),
    ((0, 0), 1 << 63),
    ((0, 0), "5"),
    ((0, 3), 1 << 32),
    ((0, 3), -1),
    ((0, 6), b"\x7f\0\0"),
    ((0, 6), "127.0.0.1"),
    ((1, 0), -1),
    ((1, 1), 1 << 32),
    ((1, 2), b"short"),
    ((1, 2), "x" * 16),
    ((1, 3), 1.0),
    ((1, 4), None),
    ((1, 4), bytes(limits.EXPORT_BYTES_MAX + 1)),
    ((2, 0), 1 << 64),
    ((2, 1), (1 << 64) - 100),
    ((2, 2), 0),
    ((2, 2), True),
    ((2, 3), 0),
    ((2, 3), 2),
    ((2, 3), 7),
    ((2, 4), 5),
    ((2, 4), "cuda"),
    ((2, 4), "cuda:0 or another"),
    ((2, 4), "disk"),
    ((3, 0), {"gpus": 1}),
    ((3, 1), None),
    ((3, 3), 5),
    ((3, 5), "8"),
    ((3,), ()),
    ((4, 0), -1),
    ((4, 0), True),
    ((4, 1), 0),
    ((4, 1), 1 << 32),
    ((4, 2), b"short"),
    ((4, 3), b""),
    ((4, 3), bytes(limits.EXPORT_BYTES_MAX + 1)),
    ((4,), None),
    ((4,), (1, 2)),
    ((4,), (5,)),
    ((4,), ("x" * 2000,)),
]


@rows(("at", "value"), REPLACED)
def test_other_values_are_refused(at: tuple[int, ...], value: Any):
    fields = [list(part) for part in make().fields()]
    if len(at) == 1:
        fields[at[0]] = value
    else:
        fields[at[0]][at[1]] = value
    with pytest.raises(ProtocolError):
        rebuild(*fields)
    with pytest.raises(ProtocolError):
        rebuild()


@rows("seed", range(20))
def test_any_fields_make_a_handle_or_a_protocol_error(seed: int):
    """Whatever a peer sends."""
    draw = random.Random(seed)
    values = [None, 0, 1, -1, 1 << 64, 1.5, "x", b"", bytes(16), (), [1], {}, True, ORIGIN.point]
    for _ in range(500):
        fields = [list(part) for part in make().fields()]
        for _ in range(draw.randrange(1, 4)):
            part = draw.randrange(5)
            fields[part][draw.randrange(len(fields[part]))] = draw.choice(values)
        if draw.random() < 0.2:
            fields[draw.randrange(5)] = draw.choice(values)
        try:
            found = rebuild(*fields)
        except ProtocolError:
            continue
        assert isinstance(found, RDMABuffer)
        assert repr(found)


# ---- parts -----------------------------------------------------------------------------------------------------------


@rows(
    ("part", "start", "size"),
    [
        (slice(None), 0, 100),
        (slice(10, 20), 10, 10),
        (slice(-10, None), 90, 10),
        (slice(0, -90), 0, 10),
        (slice(99, 100), 99, 1),
        (slice(5, 6, 1), 5, 1),
    ],
)
def test_parts(part: slice, start: int, size: int):
    found = rebuild(*make().fields())[part].handle
    assert (found.offset, found.address, found.nbytes) == (16 + start, 4096 + start, size)


@rows(
    ("part", "kind"),
    [
        (5, TypeError),
        ((1, 2), TypeError),
        (slice("a", 5), TypeError),
        (slice(0.0, 5), TypeError),
        (slice(0, 10, 2), ValueError),
        (slice(0, 10, -1), ValueError),
        (slice(10, 10), ValueError),
        (slice(20, 10), ValueError),
        (slice(0, 101), IndexError),
        (slice(-101, 10), IndexError),
        (slice(100, None), ValueError),
    ],
)
def test_other_parts_are_refused(part: Any, kind: type[Exception]):
    """What Python would cut short is an error here: nobody wants fewer bytes than asked for."""
    with pytest.raises(kind):
        rebuild(*make().fields())[part]


def test_readonly_part_of_a_handle():
    found = rebuild(*make().fields()).readonly()[10:]
    assert not found.is_writable
    assert found.nbytes == 90
    assert found.readonly().nbytes == 90
    assert "read-only buffer of 90 bytes of trainers[gpus=1]" in repr(found)
