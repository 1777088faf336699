"""Which messages may pass a large one."""

from __future__ import annotations

import attrs

from trimesh import limits
from trimesh._transport.messages.casts import ORDERED, Precedence
from trimesh._transport.messages.outgoing import ChunkedMessage


@attrs.define
class Done:
    def chunk_done(self) -> None: ...


def chunked(flow: int) -> ChunkedMessage:
    return ChunkedMessage(b"", [b"x"], flow, Done())


class Small:
    """Stands for a message that waits."""

    waiting_bytes = 1


def hold(precedence: Precedence, flow: int) -> Small:
    one = Small()
    precedence.hold(one, flow)  # type: ignore[arg-type]
    return one


def test_everything_goes_while_nothing_large_is_under_way():
    assert Precedence().may_pass(ORDERED)
    assert Precedence().may_pass(5)


def test_another_flow_passes_and_the_same_one_does_not():
    precedence = Precedence()
    assert precedence.add(chunked(5))

    assert precedence.may_pass(6)
    assert not precedence.may_pass(5)
    assert not precedence.may_pass(ORDERED)


def test_nothing_passes_what_keeps_order_with_all():
    precedence = Precedence()
    assert precedence.add(chunked(ORDERED))

    assert not precedence.may_pass(5)
    assert not precedence.add(chunked(6))


def test_nothing_passes_a_held_message_that_it_must_not():
    precedence = Precedence()
    precedence.add(chunked(5))
    hold(precedence, ORDERED)

    assert not precedence.may_pass(6)


def test_held_messages_go_in_their_order_when_the_large_one_is_out():
    precedence = Precedence()
    large, other = chunked(5), chunked(6)
    precedence.add(large)
    precedence.add(other)
    first, second = hold(precedence, 5), hold(precedence, 5)
    behind = chunked(5)
    assert not precedence.add(behind)
    last, of_other = hold(precedence, 5), hold(precedence, 6)
    sent: list[object] = []

    precedence.out(large, sent.append)

    assert sent == [first, second]
    assert list(precedence.under_way) == [other, behind]
    precedence.out(behind, sent.append)
    assert sent == [first, second, last]
    precedence.out(other, sent.append)
    assert sent == [first, second, last, of_other]
    assert not precedence.busy


def test_more_than_some_large_ones_wait():
    precedence = Precedence()
    large = [chunked(flow) for flow in range(1, limits.CHUNKED_MAX + 2)]

    assert [precedence.add(one) for one in large] == [True] * limits.CHUNKED_MAX + [False]

    precedence.out(large[0], lambda _: None)
    assert list(precedence.under_way) == large[1:]


def test_all_of_it_can_be_taken_back():
    precedence = Precedence()
    large = chunked(5)
    precedence.add(large)
    held = hold(precedence, ORDERED)
    assert precedence.waiting_bytes == 2

    assert precedence.take_all() == [(large, 5), (held, ORDERED)]

    assert precedence.may_pass(ORDERED)
    assert not precedence.waiting_bytes
