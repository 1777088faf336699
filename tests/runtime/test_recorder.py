"""The flight record of this process, as it is written: rows, log, forks, ends."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from trimesh import limits
from trimesh._runtime.recording import CallRecorder, FlightRecorder
from trimesh._wire import flight, observed
from trimesh._wire.flight import CallName, FlightHead, LeftBlock, RaisedError


class Sender(msgspec.Struct):
    proc_id: int = 9


class Spec(msgspec.Struct):
    name: str = "step"


class Taken(msgspec.Struct):
    """A call, as far as it is recorded."""

    call_id: int
    received_at: float = 1.0
    peer: Sender = msgspec.field(default_factory=Sender)
    spec: Spec = msgspec.field(default_factory=Spec)
    cancelled_by: str | None = None
    error_text: str = ""
    error_line: str = ""
    nbytes: int = 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "5"


@pytest.fixture
def clock() -> list[float]:
    """Return what the clock of the recorder shows."""
    return [4.0]


@pytest.fixture
def recorder(path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> Generator[FlightRecorder, None, None]:
    monkeypatch.setattr(limits, "RECORD_ROWS", 8)
    monkeypatch.setattr(limits, "RECORD_HALF_BYTES", 1_024)
    monkeypatch.setattr(limits, "RECORD_NAMES_BYTES", 64)
    made = FlightRecorder(path, FlightHead(proc=observed.ProcRow(id="5")), lambda: clock[0])
    yield made
    made.end()


def calls_of(recorder: FlightRecorder) -> CallRecorder:
    return recorder.of_actor("m", {"n": 0})


def read(path: Path) -> flight.Flight:
    return flight.read_flight(path.read_bytes())


def test_calls_are_there_with_their_outcomes(recorder: FlightRecorder, path: Path) -> None:
    calls = calls_of(recorder)
    taken = [Taken(1), Taken(2, error_text="ValueError: no"), Taken(3, cancelled_by="caller"), Taken(4)]
    numbers = [calls.began(call) for call in taken]
    for number, call in zip(numbers[:3], taken, strict=False):
        calls.ended(number, call)

    found = read(path)
    assert [(call.call, call.caller, call.outcome) for call in found.calls] == [
        (1, 9, flight.RETURNED),
        (2, 9, flight.RAISED),
        (3, 9, flight.CANCELLED),
        (4, 9, flight.RUNNING),
    ]
    assert [(call.waited, call.lasted) for call in found.calls] == [(3.0, 3.0)] * 3 + [(3.0, 0.0)]
    assert found.calls[0].name == CallName("m", {"n": 0}, "step")
    assert [(one.number, one.text) for one in found.records if isinstance(one, RaisedError)] == [
        (numbers[1], "ValueError: no")
    ]


def test_newest_calls_are_kept_and_old_ones_change_nothing(recorder: FlightRecorder, path: Path) -> None:
    """A call that ends after its row has become that of another one."""
    calls = calls_of(recorder)
    first = calls.began(Taken(100))
    for number in range(1, 9):
        calls.began(Taken(number))
    calls.ended(first, Taken(100))

    found = read(path)
    assert [call.call for call in found.calls] == [2, 3, 4, 5, 6, 7, 8]
    assert {call.outcome for call in found.calls} == {flight.RUNNING}


def test_row_that_is_used_again_says_nothing_of_the_call_before(
    recorder: FlightRecorder, path: Path, clock: list[float]
) -> None:
    """Neither its end nor its outcome, while the next one runs and when that has returned."""
    calls = calls_of(recorder)
    for number in range(1, 9):
        calls.ended(calls.began(Taken(number)), Taken(number, error_text="no"))
    clock[0] = 5.0
    number = calls.began(Taken(9))
    assert read(path).calls[-1].outcome == flight.RUNNING
    calls.ended(number, Taken(9))
    assert [call.outcome for call in read(path).calls[-2:]] == [flight.RAISED, flight.RETURNED]


def test_names_that_do_not_fit_are_left_out(recorder: FlightRecorder, path: Path) -> None:
    calls = calls_of(recorder)
    for name in ("a" * 20, "b" * 20, "c" * 20):
        calls.began(Taken(1, spec=Spec(name)))
    assert [call.name and call.name.endpoint for call in read(path).calls] == ["a" * 20, "b" * 20, None]


def test_log_keeps_the_newest_half(recorder: FlightRecorder, path: Path) -> None:
    for at in range(1, 101):
        recorder.note(LeftBlock(at=float(at), error="x" * 50))
        kept = [one.at for one in read(path).records if isinstance(one, LeftBlock)]
        assert kept == [float(one) for one in range(int(kept[0]), at + 1)]
        assert len(kept) >= min(at, 8)
    recorder.note(LeftBlock(at=0.0, error="x" * 2_000))
    assert [one.at for one in read(path).records if isinstance(one, LeftBlock)] == kept


def test_texts_of_errors_are_few_in_a_second(
    recorder: FlightRecorder, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1_000.0] * 30 + [1_002.0] * 2)
    monkeypatch.setattr("trimesh._runtime.recording.time.time", lambda: next(times))
    monkeypatch.setattr(limits, "RECORD_ERRORS_PER_SECOND", 3)
    for number in range(31):
        recorder.raised(number, "no", "")
    assert [one.number for one in read(path).records if isinstance(one, RaisedError)] == [0, 1, 2, 30]


def test_forked_child_writes_nothing(recorder: FlightRecorder, path: Path) -> None:
    calls = calls_of(recorder)
    number = calls.began(Taken(1))
    child = os.fork()
    if not child:
        code = 1
        try:
            calls.ended(number, Taken(1))
            calls.began(Taken(2))
            recorder.note(LeftBlock(at=1.0))
            recorder.end()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    found = read(path)
    assert ([call.call for call in found.calls], found.ended_at, found.records) == ([1], 0.0, ())
    assert found.calls[0].outcome == flight.RUNNING
    calls.ended(number, Taken(1))
    assert read(path).calls[0].outcome == flight.RETURNED


def test_end_in_good_order_is_written_once(recorder: FlightRecorder, path: Path) -> None:
    recorder.end()
    found = read(path)
    assert found.ended_at > 0
    recorder.end()
    recorder.note(LeftBlock(at=1.0))
    calls_of(recorder).began(Taken(1))
    assert read(path) == found


def test_file_that_is_there_is_not_written_over(path: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        FlightRecorder(path, FlightHead(proc=observed.ProcRow(id="5")), lambda: 4.0)
    assert path.read_bytes() == b"mine"


def test_endpoints_are_counted_with_their_durations(recorder: FlightRecorder, clock: list[float]) -> None:
    """Each ended call once; one that still runs later."""
    calls = calls_of(recorder)
    numbers = [calls.began(Taken(number)) for number in range(3)]
    clock[0] += 0.003
    calls.ended(numbers[0], Taken(0))
    calls.ended(numbers[1], Taken(1, error_text="no"))
    recorder.fold()
    clock[0] += 0.3
    calls.ended(numbers[2], Taken(2, cancelled_by="caller"))
    recorder.fold()
    recorder.fold()
    [(name, tally, counts)] = recorder.endpoints()
    assert (name.mesh, name.endpoint, tally[1:]) == ("m", "step", [3, 300, 1, 1])
    found = dict(zip((*limits.LATENCY_BOUNDS, None), counts, strict=True))
    assert {bound: count for bound, count in found.items() if count} == {0.005: 2, 0.5: 1}
