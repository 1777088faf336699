"""Rule O7: what workers write, cut, bounded, and shown with coordinates."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime import worker_entries
from tests.runtime.conftest import SERVE, Start, ask, hear, new_id, spec_of, tell
from tests.runtime.processes import wait_reaped

from trimesh import limits, this_host
from trimesh._runtime.spawner.launcher import ProcLauncher, open_spawner
from trimesh._runtime.system.output import STDERR, STDOUT, LineCutter, OutputPrinter, OutputQueue, Tail
from trimesh._runtime.system.records import OutputChunk

real = pytest.mark.real

# ---- lines -----------------------------------------------------------------------------------------------------------


plain = st.binary(max_size=40).map(lambda data: data.replace(b"\r", b""))


@given(st.lists(plain), st.integers(min_value=1, max_value=12))
def test_cutter_gives_the_same_lines_however_the_bytes_come(pieces: list[bytes], size: int) -> None:
    """No byte is lost or added; every line is within its bound; torn anywhere, the same result."""
    whole, torn = LineCutter(size), LineCutter(size)
    data = b"".join(pieces)

    expected = whole.feed(data) + whole.close()
    lines = [line for piece in pieces for line in torn.feed(piece)] + torn.close()

    assert all(len(line) <= size for line in lines)
    assert b"".join(lines) == data.replace(b"\n", b"") == b"".join(expected)
    assert [line for line in lines if len(line) < size] == [line for line in expected if len(line) < size]


def test_cutter_keeps_empty_lines_and_cuts_long_ones() -> None:
    """A line without end cannot grow without bound."""
    cutter = LineCutter(4)

    assert cutter.feed(b"ab\n\ncdefgh\nij") == [b"ab", b"", b"cdef", b"gh"]
    assert cutter.feed(b"klmnopq") == [b"ijkl", b"mnop"]
    assert cutter.close() == [b"q"]
    assert cutter.close() == []


@given(st.lists(st.text(alphabet="\r\nab", max_size=20)))
def test_cutter_shows_the_end_of_overwritten_lines_however_they_come(pieces: list[str]) -> None:
    """What a terminal shows at each newline; what stood there before is lost on it, too."""

    def shown(lines: list[bytes]) -> list[str]:
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode() for line in lines]

    torn = LineCutter()
    lines = [line for piece in pieces for line in torn.feed(piece.encode())] + torn.close()

    whole = LineCutter()
    assert shown(lines) == shown(whole.feed("".join(pieces).encode()) + whole.close())


def test_cutter_shows_a_progress_bar_now_and_then() -> None:
    """At once, then at most every OUTPUT_PROGRESS_SECONDS, and its last state when its newline comes."""
    bars = [LineCutter(), LineCutter()]
    later = limits.OUTPUT_PROGRESS_SECONDS

    def fed(percent: int, now: float) -> list[list[bytes]]:
        return [bars[0].feed(f"\r {percent}%".encode(), now), bars[1].feed(f" {percent}%\r".encode(), now)]

    assert fed(1, 10) == [[b"\r 1%"], []]
    assert fed(2, 10.1) == [[], [b"\r 2%\r"]]
    assert fed(3, 10 + later) == [[b"\r 3%"], []]
    assert fed(4, 10.1 + later) == [[], [b"\r 4%\r"]]
    assert [bar.feed(b"\rdone\n", 11 + later) for bar in bars] == [[b"\r 4%\rdone"], [b"\r 4%\r\rdone"]]
    assert [bar.feed(b"a line of Windows\r", 100) for bar in bars] == [[], []]


def test_a_progress_bar_does_not_grow() -> None:
    """What was overwritten is forgotten; the lines of the cutter are bounded, so it would come out in pieces."""
    bar = LineCutter(16)

    assert [bar.feed(b"\r12345678") for _ in range(9)] == [[]] * 9
    assert bar.feed(b"\n") == [b"\r12345678"]


@given(st.lists(st.binary(max_size=20)), st.integers(min_value=1, max_value=30))
def test_tail_is_a_suffix(pieces: list[bytes], size: int) -> None:
    """Bounded, whatever comes."""
    tail = Tail(size)
    for piece in pieces:
        tail.feed(piece)

    assert tail.read() == b"".join(pieces)[-size:]


def drain(queue: OutputQueue, bytes_max: int) -> list[OutputChunk | int]:
    """Take everything."""
    found = list[OutputChunk | int]()
    while (item := queue.take(bytes_max)) is not None:
        found += [item] if isinstance(item, int) else item
    return found


def test_queue_drops_and_counts_what_has_no_room() -> None:
    """The count comes before the next line of that stream, or when it closes."""
    queue = OutputQueue(bytes_max=6)
    queue.put("a", STDOUT, [b"12", b"34", b"56"])
    queue.put("a", STDOUT, [b"78"])
    queue.put("b", STDERR, [b"x"])
    assert drain(queue, 100) == [OutputChunk("a", STDOUT, 0, (b"12", b"34"))]

    queue.put("a", STDOUT, [b"90"])
    queue.close("a", STDOUT)
    queue.close("b", STDERR)

    assert drain(queue, 100) == [OutputChunk("a", STDOUT, 2, (b"90",)), OutputChunk("b", STDERR, 1, ())]
    assert not queue


@given(
    st.lists(st.one_of(st.integers(), st.lists(st.binary(max_size=9), min_size=1, max_size=5)), max_size=20),
    st.integers(min_value=1, max_value=20),
)
def test_queue_keeps_order_in_batches_of_bounded_size(puts: list[int | list[bytes]], bytes_max: int) -> None:
    """Lines and markers come out as they went in; a batch ends with the line that reaches the bound."""
    queue = OutputQueue()
    for put in puts:
        if isinstance(put, int):
            queue.mark(put)
        else:
            queue.put("m", STDOUT, put)

    found = list[int | bytes]()
    while (item := queue.take(bytes_max)) is not None:
        if isinstance(item, int):
            found.append(item)
            continue
        lines = [line for chunk in item for line in chunk.lines]
        assert sum(len(line) + 1 for line in lines[:-1]) < bytes_max
        found += lines

    assert found == [entry for put in puts for entry in ([put] if isinstance(put, int) else put)]


def test_queue_has_room_again_when_it_was_emptied() -> None:
    """The bound is on what waits."""
    queue = OutputQueue(bytes_max=10)
    for _ in range(5):
        queue.put("a", STDOUT, [b"123456789"])
        assert drain(queue, 1) == [OutputChunk("a", STDOUT, 0, (b"123456789",))]


# ---- where to --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["log.txt", "Forward", 3])
def test_what_is_no_output_is_refused_in_words(output: Any) -> None:
    """A str that is no mode may be a file, or a slip: it must be said which."""
    with pytest.raises(ValueError, match='output must be "forward", "inherit", "discard" or a path') as caught:
        this_host().spawn_procs({}, output=output)

    assert ("for a file of this name write pathlib.Path(" in str(caught.value)) == isinstance(output, str)


@real
@pytest.mark.executed("its interpreter is told to write each piece at once when it starts")
@pytest.mark.parametrize("python", [None, sys.executable], ids=["forked", "executed"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
async def test_a_path_is_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str, python: str | None
) -> None:
    """They append to it, by whole lines, also where Python is told to write each piece at once."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    options: Any = {} if python is None else {"python": python}
    async with this_host().spawn_procs(
        {"n": 2}, output=tmp_path / "log", setup=worker_entries.print_how_it_prints, **options
    ):
        pass

    assert (tmp_path / "log").read_text() == "printed by lines: True True\n" * 2


# ---- the printer -----------------------------------------------------------------------------------------------------


def test_printer_prefixes_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Order within a stream; lost lines are told; a progress bar is shown as a terminal would."""
    OutputPrinter().write(
        [
            OutputChunk("w[gpus=0]", STDOUT, 0, (b"one", b"two\r")),
            OutputChunk("w[gpus=1]", STDERR, 0, (b"oops \xff",)),
            OutputChunk("w[gpus=0]", STDOUT, 3, (b"10%\r20%\r30%",)),
        ]
    )

    shown = capsys.readouterr()
    assert shown.out == (
        "w[gpus=0] | one\nw[gpus=0] | two\n"
        "w[gpus=0] | (3 lines lost: they came faster than they could be shown)\nw[gpus=0] | 30%\n"
    )
    assert shown.err == "w[gpus=1] | oops \ufffd\n"


class BrokenStream(io.StringIO):
    """A terminal that is gone."""

    def flush(self) -> None:
        """Fail as the kernel does."""
        raise OSError(5, "Input/output error")


class CellStream(io.StringIO):
    """A stream of marimo, between two cells."""

    def write(self, text: str) -> int:
        """Fail as marimo does."""
        raise AssertionError


def closed_stream() -> io.StringIO:
    """Return a stream that somebody has closed."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed_stream(), BrokenStream(), CellStream()])
def test_printer_survives_a_stream_that_is_gone(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to tell; the other stream is written all the same."""
    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", other)

    OutputPrinter().write([OutputChunk("w", STDOUT, 0, (b"x",)), OutputChunk("w", STDERR, 0, (b"y",))])

    assert other.getvalue() == "w | y\n"


def test_printer_escapes_what_the_stream_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII terminal."""
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))

    OutputPrinter().write([OutputChunk("w", STDOUT, 0, ("é".encode(),))])

    assert data.getvalue() == b"w | \\xe9\n"


# ---- real workers ----------------------------------------------------------------------------------------------------


@real
async def test_output_is_forwarded_with_coordinates(
    launcher: ProcLauncher, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both streams, line by line, the unfinished last line when the worker ends."""
    child = await start(mesh="trainers", labels=("hosts", "gpus"), sizes=(2, 3), rank=5)
    await ask(child, "print", "stdout", "one\ntwo\npart")
    await ask(child, "print", "stderr", "warning\n")
    await launcher.flush_output()
    shown = capsys.readouterr()
    assert shown.out == "trainers[hosts=1,gpus=2] | one\ntrainers[hosts=1,gpus=2] | two\n"
    assert shown.err == "trainers[hosts=1,gpus=2] | warning\n"

    await tell(child, "exit", 0)
    report = await child.wait_exited()

    assert report.is_shown
    assert capsys.readouterr().out == "trainers[hosts=1,gpus=2] | part\n"


@real
async def test_output_of_the_last_moment_is_shown_before_the_block_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Leaving kills the workers, and shows what they had written."""
    async with open_spawner(new_id(), entry=SERVE) as launcher:
        children = [await launcher.launch(spec_of(mesh=f"m{index}")) for index in range(3)]
        for child in children:
            await hear(child)
            await ask(child, "print", "stdout", "x\n" * 20_000)

    out = capsys.readouterr().out
    assert [out.count(f"m{index} | x\n") for index in range(3)] == [20_000] * 3


@real
async def test_output_is_discarded_but_for_the_tail(
    launcher: ProcLauncher, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """`output="discard"`: nothing is shown, last words are still told."""
    child = await start(output="discard")
    await ask(child, "print", "stdout", "nothing\n")
    await ask(child, "print", "stderr", "last words\n")
    await tell(child, "exit", 2)

    report = await child.wait_exited()
    await launcher.flush_output()

    assert report.stderr_tail == "last words\n"
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


@real
async def test_output_goes_to_a_file(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, relative to the caller's folder: both streams appended; the tail is this worker's part of it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "log"
    path.write_text("before\n")
    child = await start(output=Path("log"))
    await ask(child, "print", "stdout", "one\n")
    await ask(child, "print", "stderr", "two\n")
    await tell(child, "exit", 2)

    report = await child.wait_exited()

    assert path.read_text() == "before\none\ntwo\n"
    assert report.stderr_tail == "one\ntwo\n"


@real
async def test_output_is_inherited(capfd: pytest.CaptureFixture[str]) -> None:
    """`output="inherit"`: the controller's own descriptors, no prefix."""
    async with open_spawner(new_id(), entry=SERVE) as launcher:
        child = await launcher.launch(spec_of(output="inherit"))
        await hear(child)
        await ask(child, "print", "stdout", "as it is\n")
        await tell(child, "exit", 0)
        assert (await child.wait_exited()).stderr_tail == ""

    assert capfd.readouterr().out == "as it is\n"


@real
async def test_flood_costs_lines_and_never_blocks_the_worker(
    launcher: ProcLauncher, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """While this process shows nothing at all, the worker writes 22 MB and goes on; what was lost is counted."""
    child = await start()
    lines = 200_000
    worker_entries.say(child.link, ["flood", lines])
    worker_entries.hear(child.link)  # blocks Trio's loop, on purpose: the launcher reads nothing meanwhile

    await launcher.flush_output()

    shown = capsys.readouterr().out.splitlines()
    lost = sum(int(found[1]) for line in shown if (found := re.search(r"\((\d+) lines lost", line)))
    assert lost > 0
    assert lost + sum("| line " in line for line in shown) == lines


@real
async def test_flood_does_not_delay_an_exit_report(
    launcher: ProcLauncher, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reports go ahead of output that waits."""
    shown = list[str]()
    noisy = await start()
    other = await launcher.launch(spec_of(), on_exit=lambda _: shown.append(capsys.readouterr().out))
    worker_entries.say(noisy.link, ["flood", 50_000])
    worker_entries.hear(noisy.link)  # blocks Trio's loop, on purpose: the launcher reads nothing meanwhile
    os.kill(other.pid, signal.SIGKILL)
    wait_reaped(other.pid)

    report = await other.wait_exited()
    assert not report.is_shown  # of the other's: what is behind is the family's
    await launcher.flush_output()

    assert report.signal == signal.SIGKILL
    assert len(shown[0]) < 3 * limits.OUTPUT_BATCH_BYTES_MAX, "two batches were under way, and names are added"
    assert len(capsys.readouterr().out) > 3 * limits.OUTPUT_BATCH_BYTES_MAX


def test_line_bound_fits_a_batch() -> None:
    """One line, whatever its length, fits one packet beside others."""
    assert limits.OUTPUT_BATCH_BYTES_MAX + limits.OUTPUT_LINE_BYTES_MAX < limits.BROKER_PACKET_BYTES_MAX
