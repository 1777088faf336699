"""`tools/gpudirect.py`, as far as no device and no adapter is needed: both sides in one process.

UCX is a stand-in, and memory of the host passes for memory of a device (tests/native/recording_ucp.c).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from tests.native.recording import Recording
from tools import gpudirect
from tools.gpudirect import HostMemory, Memory, Reached, ask, reached_of, serve

from trimesh._transport.interface import Grant, MemoryKind, ProcessAddress
from trimesh.errors import ProtocolError

pytestmark = pytest.mark.real

SIZE = 100_000


def make(nbytes: int) -> tuple[Memory | None, str]:
    return HostMemory(bytearray(nbytes), MemoryKind.CUDA), "no device"


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("home", "epoch"), 1 << 64),
        (("home", "pid"), -1),
        (("home", "address"), "AAA="),
        (("device", "place"), 1 << 32),
        (("device", "secret"), "AAA="),
        (("device", "exported"), ""),
        (("host",), 5),
        ((), None),
    ],
)
def test_what_the_other_side_says_is_looked_at(at: tuple[str, ...], value: Any) -> None:
    grant = Grant(1, 2, bytes(16), b"keys")
    said = msgspec.to_builtins(Reached(ProcessAddress(5, 6, 7, 8, 9), grant, grant))
    assert reached_of(said).device == grant
    place = said
    for name in at[:-1]:
        place = place[name]
    if at:
        place[at[-1]] = value
    with pytest.raises(ProtocolError):
        reached_of(said if at else value)


def no_device(_nbytes: int) -> tuple[Memory | None, str]:
    return None, "no torch"


class Torn(HostMemory):
    """Memory that an adapter writes to, and that shows something else."""

    def get(self) -> bytes:
        return super().get()[:-1] + b"?"


def make_torn(nbytes: int) -> tuple[Memory | None, str]:
    return Torn(bytearray(nbytes), MemoryKind.CUDA), "a torn device"


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    recording = Recording(tmp_path)
    recording.install(monkeypatch)
    monkeypatch.setattr(gpudirect, "ADAPTERS", str(tmp_path))  # which has something in it
    (tmp_path / "rec0").touch()
    yield recording
    recording.uninstall(monkeypatch)


class Run:
    """Both sides, and what they have told."""

    def __init__(self) -> None:
        self.served, self.asked = list[str](), list[str]()
        self.has_served: bool | None = None
        self.peer = ""
        self.is_there = trio.Event()

    def tell(self, line: object) -> None:
        self.served.append(str(line))
        if "tools/gpudirect.py" in str(line):
            self.peer = str(line).split()[-1]
            self.is_there.set()

    async def both(self, here: Any = make, there: Any = make) -> bool:
        """Run both; return what came of the one that asks."""

        async def serving() -> None:
            self.has_served = await serve("127.0.0.1", self.tell, there, SIZE)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving)
            await self.is_there.wait()
            assert not await ask(f"{self.peer}?", self.ask_in_vain, here, SIZE)
            return await ask(self.peer, lambda line: self.asked.append(str(line)), here, SIZE)

    def ask_in_vain(self, line: object) -> None:
        """Take the lines of one who has another token."""
        if "peer" in str(line):
            assert str(line).startswith("  NO  peer: 127.0.0.1:")


async def test_both_sides_move_and_compare(recording: Recording) -> None:
    run = Run()
    assert await run.both()
    assert run.has_served
    assert not [line for line in run.served + run.asked if line.startswith("  NO")]
    there, here = run.asked.index("there:"), run.asked.index("here:")
    looks = ["adapters", "libucp", "verbs in UCX", "CUDA in UCX", "CUDA device"]
    for start in (here, there):
        names = [line[6:].split(":")[0] for line in run.asked[start + 1 : start + 8]]
        assert names == [*looks, "host memory registered", "device memory registered"]
    moves = [f"{kind} {a}" for kind in ("read", "write") for a in ("device", "host")]
    for start in map(run.asked.index, ("from here:", "from there:")):
        made = run.asked[start + 1 : start + 9]
        assert all("values compared" in line for line in made)
        assert all(any(line[6:].startswith(move) for line in made) for move in moves)
    assert "revoked memory is refused" in run.asked[-2]
    kinds = {(call["kind"], call["theirs"]) for call in recording.calls("get") if call["length"] == SIZE}
    assert kinds == {(kind, theirs) for kind in (-1, 1) for theirs in (0, 1)}
    assert "a connection ended before the check did" in "".join(run.served)  # that with another token


async def test_values_that_differ_are_no_success(recording: Recording) -> None:
    run = Run()
    assert not await run.both(there=make_torn)
    assert not run.has_served
    assert any("write device here to device there: values differ" in line for line in run.asked)


async def test_what_lacks_is_said_and_the_rest_is_tried(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECORDING_UCP_CUDA", "0")
    run = Run()
    assert not await run.both(here=no_device)
    told = "\n".join(run.asked)
    assert "NO  CUDA in UCX: UCX 1.13.0-recording" in told
    assert "NO  CUDA device: no torch" in told
    assert "NO  device memory registered: UCX 1.13.0-recording" in told  # there
    assert "ok  read host there to host here" in told
    assert "not as they must be" in run.asked[-1]


def test_machine_without_anything_says_so(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status says it, too. torch is not imported for this."""
    monkeypatch.setattr(gpudirect, "ADAPTERS", "/nowhere")
    monkeypatch.setenv("TRIMESH_UCX", "/nowhere")
    monkeypatch.setattr(gpudirect, "ask", partial(ask, make=no_device, nbytes=SIZE))
    monkeypatch.setattr(sys, "argv", ["gpudirect.py", "127.0.0.1:1/token"])
    assert gpudirect.main() == 1
    told = capsys.readouterr().out
    lines = [line[6:].split(":")[0] for line in told.splitlines() if line.startswith("  NO")]
    assert lines == ["adapters", "libucp", "CUDA device", "host memory registered", "peer"]
    assert "/nowhere/libucp.so.0: cannot open" in told
    assert "Install the UCX of HPC-X or DOCA" in told


@pytest.mark.parametrize(
    ("arguments", "word"),
    [([], "PEER"), (["--serve", "::1", "here:1/t"], "PEER"), (["here"], "ADDRESS:PORT/TOKEN")],
)
def test_wrong_command_lines_say_what_to_write(
    arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpudirect.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        gpudirect.main()
    assert caught.value.code == 2
    assert word in capsys.readouterr().err
