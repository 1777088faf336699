"""A peer on a bare socket that knows every rule of the wire, and so can break it."""

from __future__ import annotations

import struct

import attrs
import trio
from tests.conformance.transports import NativeBackend, Recorder, World, pattern
from tests.native import wire
from tests.patience import HANG_SECONDS

from trimesh._transport.interface import LinkDown, Transport
from trimesh._transport.native.transport import NativeLink, NativeTransport

EPOCH = 7


@attrs.frozen
class Frame:
    """One frame; every field may be a lie."""

    kind: int
    epoch: int
    payload: bytes = b""
    lane: int = wire.CONTROL
    more: int = 0
    sequence: int = 0
    head_size: int = 0
    n_bodies: int = 0
    version: int = wire.VERSION
    length: int | None = None

    def encode(self) -> bytes:
        """Return header, payload and padding, with a true check."""
        header = wire.header(
            self.kind,
            length=32 + len(self.payload) if self.length is None else self.length,
            lane=self.lane,
            flags=self.more,
            epoch=self.epoch,
            sequence=self.sequence,
            head_size=self.head_size,
            n_bodies=self.n_bodies,
            version=self.version,
        )
        return wire.padded(header + self.payload)


def hello(**lies: int) -> Frame:
    """The first frame of each side."""
    true = {"abi": wire.ABI, "slot": 0, "pid": 1, "ring_bytes": 1 << 18, "host": 0, "beat_ms": 500, "lease_ms": 3000}
    told = [lies.pop(name, value) for name, value in true.items()]
    return Frame(wire.HELLO, lies.pop("epoch", EPOCH), struct.pack("<IIIIQII", *told), **lies)


def message(head: bytes, bodies: tuple[bytes, ...] = (), *, sizes: tuple[int, ...] = (), **fields: int) -> Frame:
    """A message; `sizes` may lie about the bodies."""
    payload = head
    if bodies or sizes:
        announced = sizes or tuple(map(len, bodies))
        payload += bytes(-len(head) % 8) + struct.pack(f"<{len(announced)}Q", *announced) + b"".join(bodies)
        fields = {"n_bodies": len(announced), "lane": wire.DATA, **fields}
    return Frame(wire.MESSAGE, fields.pop("epoch", EPOCH), payload, head_size=len(head), **fields)


HELLO = hello()


@attrs.define(eq=False)
class Intruder:
    """A bare socket that a transport takes for a peer."""

    transport: Transport
    link: NativeLink
    sees: Recorder
    stream: trio.SocketStream

    async def send(self, *parts: Frame | bytes) -> None:
        """Send frames and bytes in one piece; a transport that has hung up hears nothing more."""
        with trio.fail_after(HANG_SECONDS):
            try:
                await self.stream.send_all(b"".join(p.encode() if isinstance(p, Frame) else p for p in parts))
            except trio.BrokenResourceError:
                return

    async def down(self) -> LinkDown:
        return await self.sees.wait_down(self.link)


def intrude(world: World, *, start: bool = True, **options: object) -> Intruder:
    """Make a transport, run it unless told otherwise, and give it the other end of a bare socket."""
    backend = world.backend
    assert isinstance(backend, NativeBackend)
    transport = world.transport()
    assert isinstance(transport, NativeTransport)
    near, far = backend.sockets()
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(far))
    backend.closers.append(stream.socket.close)
    link = transport.open_link(near, local=backend.local, lease=False, **options)
    return Intruder(transport, link, world.start(transport) if start else Recorder(), stream)


async def check_lives(world: World, intruder: Intruder) -> None:
    """The transport that was attacked says the end once, and serves its other peers."""
    other = world.transport()
    here, _ = world.connect(intruder.transport, other)
    other_sees = world.start(other)
    here.send(b"alive", [pattern(100_000)])
    (received,) = await other_sees.wait_messages(1)
    assert received.contents == [pattern(100_000)]
    assert len(intruder.sees.downs) == 1
    assert intruder.sees.late == []
    await intruder.stream.aclose()
