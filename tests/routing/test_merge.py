"""The items of a stream between its producers and its consumer (S01, S03; rule T1)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimesh import limits
from trimesh._routing.collector import Merge, MergedItem, SendWindow
from trimesh.errors import ProtocolError


def put(merge: Merge, index: int, number: int, nbytes: int = 0) -> None:
    merge.put(MergedItem(index, number.to_bytes(4, "big"), [memoryview(bytes(nbytes))] if nbytes else ()))


def number_of(item: MergedItem) -> int:
    return int.from_bytes(item.payload, "big")


def test_items_come_out_in_the_order_in_which_they_came():
    merge = Merge(2, 4)
    for index, number in ((0, 1), (1, 1), (1, 2), (0, 2)):
        put(merge, index, number)
    assert len(merge) == 4
    assert [(item.index, number_of(item)) for item, _ in (merge.take() for _ in range(4))] == [
        (0, 1),
        (1, 1),
        (1, 2),
        (0, 2),
    ]


def test_rank_beyond_its_window_breaks_the_protocol():
    """MG-2: each rank has a window of its own; what was taken counts when it was reported."""
    merge = Merge(2, 8)
    for number in range(8):
        put(merge, 0, number)
    with pytest.raises(ProtocolError, match="8 items ahead"):
        put(merge, 0, 8)
    put(merge, 1, 0)
    assert merge.take()[1] is None
    with pytest.raises(ProtocolError):
        put(merge, 0, 8)
    assert merge.take()[1] == 2
    put(merge, 0, 8)
    put(merge, 0, 9)
    with pytest.raises(ProtocolError):
        put(merge, 0, 10)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_small_windows_are_reported_at_once(window: int):
    """MG-3."""
    merge = Merge(1, window)
    for number in range(5):
        put(merge, 0, number)
        assert merge.take()[1] == number + 1


def test_large_items_are_reported_at_once():
    """MG-3: by bytes."""
    merge = Merge(1, 64)
    put(merge, 0, 0, limits.STREAM_REPORT_BYTES + 1)
    assert merge.take()[1] == 1


def test_closed_merge_drops_what_waits_and_what_comes():
    merge = Merge(1, 2)
    put(merge, 0, 0)
    merge.close()
    assert len(merge) == 0
    put(merge, 0, 1)
    assert len(merge) == 0
    with pytest.raises(ProtocolError):
        put(merge, 0, 2)


@given(
    window=st.integers(1, 70),
    ranks=st.integers(1, 4),
    sizes=st.lists(st.sampled_from([0, 0, 10, 900_000, 3_000_000, 9_000_000]), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
)
def test_producers_and_consumer_never_wait_for_each_other(window: int, ranks: int, sizes: list[int], seed: int):
    """S01, S03, MG-1, MG-3: under any schedule all items come, in order, within bounds; reports may be late."""
    draw = random.Random(seed)
    merge = Merge(ranks, window)
    windows = [SendWindow(window, limits.STREAM_BYTES, limits.STREAM_REPORT_BYTES) for _ in range(ranks)]
    sent, taken = [0] * ranks, [0] * ranks
    reports: list[list[int]] = [[] for _ in range(ranks)]
    blob = memoryview(bytes(max(sizes)))

    def may_send(rank: int) -> bool:
        return (
            sent[rank] < len(sizes) and windows[rank].waiting < window and windows[rank].has_room(4 + sizes[sent[rank]])
        )

    def send(rank: int) -> None:
        item = MergedItem(rank, sent[rank].to_bytes(4, "big"), [blob[: sizes[sent[rank]]]])
        windows[rank].sent(item.nbytes)
        merge.put(item)
        sent[rank] += 1
        ahead = sizes[taken[rank] : sent[rank]]
        assert len(ahead) <= window
        assert sum(ahead) <= limits.STREAM_BYTES or len(ahead) == 1 or sum(ahead[:-1]) <= limits.STREAM_REPORT_BYTES

    def take() -> None:
        item, total = merge.take()
        assert number_of(item) == taken[item.index]
        taken[item.index] += 1
        if total is not None:
            reports[item.index].append(total)

    def report(rank: int) -> None:
        windows[rank].acknowledged(reports[rank].pop(0))

    while sum(taken) < ranks * len(sizes):
        steps = [lambda rank=rank: send(rank) for rank in range(ranks) if may_send(rank)]
        steps += [lambda rank=rank: report(rank) for rank in range(ranks) if reports[rank]]
        steps += [take] if len(merge) else []
        assert steps, "everybody waits"
        draw.choice(steps)()


def test_merge_knows_what_came_and_what_each_rank_was_told():
    merge = Merge(2, 4)
    for number in range(3):
        put(merge, 1, number)
    assert [merge.received(index) for index in range(2)] == [0, 3]
    assert [merge.reported(index) for index in range(2)] == [0, 0]
    merge.take()
    assert [merge.reported(index) for index in range(2)] == [0, 1]
    assert [merge.received(index) for index in range(2)] == [0, 3]


def test_item_weighs_as_much_as_its_payload_and_its_bodies():
    assert MergedItem(0, b"1234").nbytes == 4
    assert MergedItem(0, b"1234", [memoryview(bytes(5)), memoryview(bytes(7))]).nbytes == 16
