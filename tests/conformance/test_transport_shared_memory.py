"""What the ring transport makes of a peer that lies about the memory it shares, or writes there what it likes."""

from __future__ import annotations

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conformance.transports import NativeBackend, Recorder, World, pattern

from trimesh._transport.interface import DownReason, Lane
from trimesh._transport.native.transport import NativeLink, NativeTransport


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 64, 128, 192]) | st.integers(4096, 4096 + 400), st.binary(min_size=1, max_size=16)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_bytes_in_a_ring_end_nothing_but_its_link(noise: list[tuple[int, bytes]]):
    """A peer writes where it likes in the memory it shares: counters, headers, tables, bodies."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = World(backend, nursery)
            a, b = world.transport(), world.transport()
            here, there = world.connect(a, b)
            assert isinstance(a, NativeTransport)
            assert isinstance(here, NativeLink)
            a_sees = Recorder()
            async with trio.open_nursery() as up:  # both run until the rings stand
                up.start_soon(a.run, a_sees)
                up.start_soon(b.run, Recorder())
                there.send(b"up", lane=Lane.CONTROL)
                await a_sees.wait_messages(1)
                up.cancel_scope.cancel()
            there.send(b"one")
            there.send(b"two", [b"body", pattern(100)])
            there.send(b"three")
            info = a.info_of(here.handle)
            ring = a.library.ffi.buffer(info.view, info.view_bytes)
            for at, new in noise:
                ring[at : at + len(new)] = new
            b.flush()

            intruder_sees = world.start(a)
            other = world.transport()
            alive, _ = world.connect(a, other)
            other_sees = world.start(other)
            alive.send(b"alive")
            await other_sees.wait_messages(1)
            b.close()
            down = await intruder_sees.wait_down(here)
            assert down.reason in (DownReason.PROTOCOL, DownReason.EOF, DownReason.CLOSED)
            assert len(intruder_sees.messages) <= 4
            nursery.cancel_scope.cancel()

    backend = NativeBackend(local=True)
    try:
        trio.run(main)
    finally:
        backend.close()
