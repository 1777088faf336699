"""Links that end before the peer has said hello: what they were given in vain goes by another link, or is lost."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import attrs
import pytest
import trio
from tests.conformance.transports import NativeBackend, Recorder, World

from trimesh import limits
from trimesh._native import lib
from trimesh._transport.interface import Lane, Link, LinkDown
from trimesh._transport.native.link import NativeLink
from trimesh._transport.native.transport import NativeTransport


@attrs.define(eq=False)
class Bequeathing(Recorder):
    """Hands over what a link leaves, and keeps what that came to."""

    heir: Link | None = None
    answers: list[bool] = attrs.field(factory=list)

    def link_down(self, link: Link, down: LinkDown) -> None:
        self.answers.append(link.hand_over(self.heir))
        super().link_down(link, down)


@attrs.frozen
class Side:
    """A transport with a link that is up, and what the peer on its other side sees."""

    backend: NativeBackend
    transport: NativeTransport
    born: NativeLink
    handler: Bequeathing
    peer_sees: Recorder

    def unborn(self) -> tuple[NativeLink, int]:
        """Return a link whose peer says nothing, and the peer's socket."""
        near, far = self.backend.sockets()
        return self.backend.open(self.transport, near), far.detach()


@pytest.fixture(params=[True])
async def side(request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    backend = NativeBackend(local=request.param)
    try:
        async with trio.open_nursery() as nursery:
            world = World(backend, nursery)
            here, there = world.transport(), world.transport()
            born, _ = world.connect(here, there)
            assert isinstance(here, NativeTransport)
            assert isinstance(born, NativeLink)
            handler = Bequeathing(heir=born)
            nursery.start_soon(here.run, handler)
            yield Side(backend, here, born, handler, world.start(there))
            nursery.cancel_scope.cancel()
    finally:
        backend.close()


async def test_what_a_ring_was_given_in_vain_goes_by_another_one(side: Side):
    """In order, on its lane, with its bodies; who has lent them is told when they have left."""
    link, peer = side.unborn()
    large = bytes(3 * limits.FRAME_PAYLOAD_BYTES_MAX)
    link.send(b"first")
    lent = link.send(b"second", [b"body", large])
    side.transport.define_group([link]).cast(b"third")
    link.send(b"control", lane=Lane.CONTROL)
    assert lent is not None

    os.close(peer)
    await side.handler.wait_down(link)

    assert side.handler.answers == [True]
    await side.peer_sees.wait_messages(4)
    assert side.peer_sees.heads() == [b"control", b"first", b"second", b"third"]
    assert side.peer_sees.messages[2].contents == [b"body", large]
    await lent.wait()


async def test_what_is_sent_when_the_end_is_not_known_yet_goes_by_another_one(
    side: Side, monkeypatch: pytest.MonkeyPatch
):
    """The library has seen it, and its record of that has not been looked at."""
    link, peer = side.unborn()
    monkeypatch.setattr(link, "_send_head", lambda *_: lib.ERR_DOWN)

    link.send(b"late")
    os.close(peer)
    await side.handler.wait_down(link)

    await side.peer_sees.wait_messages(1)
    assert side.peer_sees.heads() == [b"late"]


@pytest.mark.parametrize("side", [True, False], ids=["ring", "stream"], indirect=True)
async def test_link_without_an_heir_loses_what_it_was_given(side: Side):
    """Who has lent memory gets it back."""
    side.handler.heir = None
    await side.born.up.wait()
    for heads, is_harmless in (([], True), ([b"lost"], False)):
        side.handler.answers.clear()
        link, peer = side.unborn()
        lent = [link.send(head, [b"body"]) for head in heads]
        os.close(peer)
        await side.handler.wait_down(link)
        assert side.handler.answers == [is_harmless]
        for event in lent:
            if event is not None:  # a stream has taken its bytes at once
                await event.wait()


@pytest.mark.parametrize("side", [True, False], ids=["ring", "stream"], indirect=True)
async def test_link_that_was_up_hands_nothing_over(side: Side):
    """It is unknown here what the peer has read."""
    near, far = side.backend.sockets()
    link = side.backend.open(side.transport, near)
    other = side.backend.transport()
    theirs = side.backend.open(other, far)
    await link.up.wait()
    theirs.abort()
    await side.handler.wait_down(link)
    assert side.handler.answers == [False]
