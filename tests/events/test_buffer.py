"""The buffer of one reader of events (T3, S09)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimesh.events import EventBuffer, Lagged, Started
from trimesh.shape.extent import Extent

POINT = Extent(gpus=1).point(0)


def record(number: int) -> Started:
    return Started(mesh="procs", point=POINT, incarnation=number)


def test_buffer_gives_records_in_order() -> None:
    buffer = EventBuffer(4)
    for number in range(3):
        buffer.put(record(number))

    assert [buffer.take() for _ in range(4)] == [record(0), record(1), record(2), None]


def test_lost_records_are_one_lagged() -> None:
    """S09."""
    buffer = EventBuffer(2)
    for number in range(5):
        buffer.put(record(number))

    assert len(buffer) == 3
    assert [buffer.take() for _ in range(4)] == [Lagged(3), record(3), record(4), None]


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=200))
def test_every_record_is_read_or_counted(records_max: int, steps: list[bool]) -> None:
    """S09: what the reader gets, and what `Lagged` counts in its place, is everything that was put, in order."""
    buffer, put, read = EventBuffer(records_max), 0, 0

    def take() -> bool:
        nonlocal read
        event = buffer.take()
        if isinstance(event, Lagged):
            read += event.count
        elif event is not None:
            assert event == record(read)
            read += 1
        return event is not None

    for is_put in steps:
        if is_put:
            buffer.put(record(put))
            put += 1
        else:
            take()
        assert len(buffer) <= records_max + 1
    while take():
        pass
    assert read == put
