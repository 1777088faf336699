"""Broker sockets and their records: what comes out is what went in, or a ProtocolError."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh import limits
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.launcher import capture_caller
from trimesh._runtime.spawner.socket import BrokerSocket, broker_pair, memfd_of
from trimesh._runtime.system import records
from trimesh._runtime.system.records import (
    AgentReady,
    Arriving,
    CastFeed,
    ConnectedDirect,
    Listening,
    Parted,
    Relayed,
    Tunnel,
)
from trimesh.errors import LimitExceeded, ProtocolError


@pytest.fixture
def pair() -> Iterator[tuple[BrokerSocket, BrokerSocket]]:
    """Two ends."""
    ends = [BrokerSocket(end) for end in broker_pair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


Pair = tuple[BrokerSocket, BrokerSocket]


def launch_of(size: int) -> wire.Launch:
    """Return a request that carries `size` bytes."""
    config = records.WorkerConfig(proc_id=1, parent_id=2, root_id=3, mesh="m", extra=bytes(size))
    return wire.Launch(request=7, config=config, context=capture_caller({}, are_several=False))


def open_count() -> int:
    """Return the number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))


# ---- records ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_decoder_raises_nothing_but_protocol_error(data: bytes) -> None:
    """Peer bytes."""
    with contextlib.suppress(ProtocolError):
        wire.decode(data)


SIDE = wire.Side(trimesh="0.1", protocol=1, python="3.11", pickle="on", pid=5, program="judge.py", proc_id=6)

RECORDS = [
    wire.StateOf(1, 2, "/run/record"),
    wire.StateKnown(1, "T", 0.5, 4096, b"actors"),
    wire.MachineOf(1),
    wire.MachineKnown(1, b"row"),
    wire.Hello(1, ("a", "b")),
    launch_of(10),
    wire.Entered(),
    wire.SetupRefused("text"),
    wire.Signal(1, 9),
    wire.Connect(1, 2),
    wire.Connect(1, 2, source=3),
    wire.ForeignConnect(1, 2, 3),
    wire.ForeignExitOf(1, 2),
    wire.ExitOf(1, 2),
    wire.Flush(1),
    wire.OutputTaken(),
    wire.CastChannel(),
    wire.Retire(),
    wire.Stop(),
    wire.Ready(),
    wire.Fatal("text"),
    wire.Launched(1, 2),
    wire.LaunchFailed(1, "text"),
    wire.Connected(1),
    wire.ConnectFailed(1, "text", is_gone=True),
    wire.Incoming(5),
    AgentReady("n1", 7),
    ConnectedDirect(7),
    Arriving(7, 8),
    Listening(8, ("10.0.0.7:4000", "[::1]:4000")),
    Tunnel(8),
    Relayed(8, "10.0.0.7:4000: no answer within 0.5 s"),
    Parted(8, is_lost=False),
    CastFeed(7),
    wire.ExitKnown(1, None),
    wire.Output((records.OutputChunk("m", 1, 0, (b"line",)),)),
    wire.Flushed(1),
    wire.Greeting(SIDE),
    wire.Join(SIDE),
    wire.Joined(
        wire.PublishedHandle(
            mesh=1,
            owner=2,
            name="judges",
            actor="Judge",
            is_healing=False,
            base=(("n", 2),),
            extent=(("n", 1),),
            table=(1,),
            excluded=(),
            members=(wire.PublishedMember(3, "host", 4, 0),) * 2,
            endpoints={"rate": False},
        )
    ),
    wire.Declined("text"),
    wire.Leaving("text", at_once=True),
]


@rows("record", RECORDS)
def test_record_survives_and_no_other_shape_does(record: wire.AnyRecord) -> None:
    """Round trip; cut anywhere, lengthened, with a field more or less: refused."""
    data = wire.encode(record)
    assert wire.decode(data) == record
    values = msgspec.msgpack.decode(data)
    required = len(record.__struct_fields__) - len(record.__struct_defaults__)
    wrong = [data[:size] for size in range(min(len(data), 60))]
    wrong += [data + b"\x00"]
    wrong += [msgspec.msgpack.encode(shape) for shape in ([*values, None], ["Unknown", *values[1:]], values[:required])]

    for shape in wrong:
        with pytest.raises(ProtocolError):
            wire.decode(shape)


def test_every_kind_of_record_is_tried() -> None:
    """A new record joins the list above."""
    kinds = {kind for union in (wire.AnyRequest, wire.AnyNotice) for kind in union.__args__}
    assert kinds - {type(record) for record in RECORDS} == {wire.Exited}


@pytest.mark.parametrize(
    ("labels", "sizes", "rank", "name"),
    [
        ((), (), 0, "m"),
        (("gpus",), (4,), 3, "m[gpus=3]"),
        (("hosts", "gpus"), (2, 4), 5, "m[hosts=1,gpus=1]"),
        (("gpus",), (0,), 0, "m[gpus=0]"),
    ],
)
def test_member_is_named_by_its_coordinates(
    labels: tuple[str, ...], sizes: tuple[int, ...], rank: int, name: str
) -> None:
    """The last label varies fastest."""
    config = records.WorkerConfig(proc_id=1, parent_id=1, root_id=1, mesh="m", labels=labels, sizes=sizes, rank=rank)
    assert records.member_name(config) == name


# ---- sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1_000, limits.BROKER_PACKET_BYTES_MAX, 1 << 20, 20 << 20])
def test_record_of_any_size_arrives_with_its_descriptors(pair: Pair, size: int) -> None:
    """Small ones in a packet, large ones in a memfd; the descriptors come in order and close on exec."""
    before = open_count()
    receiver, sender = os.pipe()

    pair[0].send(launch_of(size), (receiver, sender))
    received = pair[1].receive()

    assert received is not None
    assert received.record == launch_of(size)
    assert not received.truncated
    os.write(received.fds[1], b"x")
    assert os.read(received.fds[0], 1) == b"x"
    assert not any(map(os.get_inheritable, received.fds))
    for fd in received.fds:
        os.close(fd)
    assert open_count() == before


def test_records_wait_in_order_for_room(pair: Pair) -> None:
    """Sending never blocks; nothing is lost or overtaken, and queued descriptors stay open until they leave."""
    before = open_count()
    for number in range(1, 2_000):
        pair[0].send(wire.Connect(number, number), (os.dup(0),))
    assert pair[0].queued > 0

    numbers = list[int]()
    while len(numbers) < 1_999:
        received = pair[1].receive()
        if received is None:
            pair[0].flush()
            continue
        assert isinstance(received.record, wire.Connect)
        assert len(received.fds) == 1
        os.close(received.fds[0])
        numbers.append(received.record.request)

    assert numbers == list(range(1, 2_000))
    assert pair[1].receive() is None
    assert open_count() == before


def test_closing_gives_back_what_never_left(pair: Pair) -> None:
    """Descriptors in the queue."""
    before = open_count()
    for number in range(1, 2_000):
        pair[0].send(wire.Connect(number, number), (os.dup(0),))

    pair[0].close()
    ended = False
    while not ended:
        try:
            received = pair[1].receive()
        except EOFError:
            ended = True
        else:
            assert received is not None
            os.close(received.fds[0])

    assert open_count() == before - 1


def test_last_words_are_read_although_ours_were_not(pair: Pair) -> None:
    """Closing an end with unread packets resets the other: what was said is not lost by that."""
    pair[0].send(wire.Stop())
    pair[1].send(wire.Fatal("last words"))
    pair[1].close()

    received = pair[0].receive()

    assert received is not None
    assert received.record == wire.Fatal("last words")
    with pytest.raises(EOFError):
        pair[0].receive()
    with pytest.raises(OSError, match="Broken pipe"):
        pair[0].send(wire.Stop())


def test_record_above_the_bound_is_refused_at_the_sender(pair: Pair) -> None:
    """Nothing is sent, nothing leaks."""
    before = open_count()

    with pytest.raises(LimitExceeded, match="BROKER_RECORD_BYTES_MAX"):
        pair[0].send(launch_of(limits.BROKER_RECORD_BYTES_MAX), (os.dup(0),))

    assert pair[1].receive() is None
    assert open_count() == before


def rights(*fds: int) -> list[tuple[int, int, bytes]]:
    """Return ancillary data."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, "little") for fd in fds))] if fds else []


@pytest.mark.parametrize(
    "case", ["no memfd", "too short", "too long", "a pipe", "nested", "a claim beyond the bound", "rubbish inside"]
)
def test_detached_record_that_lies_is_a_protocol_error(pair: Pair, case: str) -> None:
    """A peer cannot make the reader fault, wait, allocate without bound, or recurse; its descriptors are closed."""
    inner = wire.encode(wire.Stop())
    before = open_count()
    receiver, sender = os.pipe()
    memfd = memfd_of(
        wire.encode(wire.Detached(5)) if case == "nested" else b"\xc1" * 6 if case == "rubbish inside" else inner
    )
    size = {"too short": len(inner) + 1, "a claim beyond the bound": 1 << 40, "too long": 3}.get(
        case, os.fstat(memfd).st_size
    )
    fds = [] if case == "no memfd" else [receiver, sender] if case == "a pipe" else [memfd]
    pair[0].socket.sendmsg([wire.encode(wire.Detached(size))], rights(*fds))

    with pytest.raises((ProtocolError, OSError)) as caught:
        pair[1].receive()

    assert isinstance(caught.value, ProtocolError) or case == "no memfd"
    for fd in (receiver, sender, memfd):
        os.close(fd)
    assert open_count() == before


def test_packet_above_the_bound_is_a_protocol_error(pair: Pair) -> None:
    """It is cut by the kernel, and told as such."""
    pair[0].socket.send(bytes(limits.BROKER_PACKET_BYTES_MAX + 1))

    with pytest.raises(ProtocolError, match="at most"):
        pair[1].receive()


def test_rubbish_with_descriptors_leaks_none(pair: Pair) -> None:
    """They are closed before the error is raised."""
    before = open_count()
    pair[0].socket.sendmsg([b"rubbish"], rights(0, 1, 2))

    with pytest.raises(ProtocolError):
        pair[1].receive()

    assert open_count() == before
