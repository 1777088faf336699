"""What a script has of Trio, and when: one thread while blocks are open; nothing after the last (K06, Z01)."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.conformance.probe import Probe
from tests.lifetime.program import Program

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, MeshErrorGroup
from trimesh.testing.zombie_guard import left_descriptors, left_threads, scan

pytestmark = [pytest.mark.real, pytest.mark.daily]

PROGRAMS = Path(__file__).parent / "programs"


def trio_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "trimesh.blocking"]


def test_nothing_is_left_when_the_last_block_has_been_left() -> None:
    """Z01, K06: blocks that are nested, or side by side, share a thread; it is gone with the last."""
    before = scan()
    for _ in range(2):
        with tb.spawn_procs({"gpus": 1}) as procs, tb.spawn_procs({"gpus": 1}):
            assert procs.spawn("probe", Probe).rank.call_one() == 0
            assert trio_threads() == ["trimesh.blocking"]
        assert list(left_descriptors(before)) == []
        assert list(left_threads(before)) == []


def test_mesh_stays_open_until_it_is_closed() -> None:
    """Z01, K06: over cells of a notebook; closing twice does nothing, and calls after it are refused."""
    procs = tb.spawn_procs({"gpus": 2}).open()
    probes = procs.spawn("probes", Probe)
    assert probes.rank.call().values() == (0, 1)
    procs.close()
    procs.close()
    with pytest.raises(MeshErrorGroup, match="failed on 2 of 2"):
        probes.rank.call()
    with pytest.raises(RuntimeError):
        procs.spawn("late", Probe)
    assert trio_threads() == []


def test_wrong_order_is_refused() -> None:
    """K06: what is open inside is closed first; a `with` block is not closed by a call."""
    procs = tb.spawn_procs({"gpus": 1}).open()
    inner = procs.spawning("inner", Probe)
    probe = inner.open()
    with pytest.raises(RuntimeError, match=r"close first what was opened inside: spawn\('inner', Probe\)"):
        procs.close()
    assert probe.rank.call_one() == 0
    with pytest.raises(RuntimeError, match="has no block of its own"):
        procs.slice(gpus=0).close()
    with pytest.raises(RuntimeError, match="has no block of its own"):
        tb.this_host().close()
    inner.close()
    procs.close()
    with tb.spawn_procs({"gpus": 1}) as held:
        with pytest.raises(RuntimeError, match=r"is for a mesh of open\(\), got .* of a `with` block"):
            held.close()
        kept = held.spawning("kept", Probe).open()  # left with the block, as it is inside
        assert kept.rank.call_one() == 0
    assert trio_threads() == []


class Leaving(Actor):
    """Writes its name when its block is left."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        with self.path.open("a") as file:
            file.write(f"{self.name}\n")


def test_blocks_that_are_open_inside_are_left_last_first(tmp_path: Path) -> None:
    """K06: those of the block that is left, and no others."""
    path = tmp_path / "left"
    with tb.spawn_procs({"gpus": 1}) as outer:
        outer.spawning("around", Leaving, "around", path).open()
        with tb.spawn_procs({"gpus": 1}) as procs:
            for name in ("first", "second", "third"):
                procs.spawning(name, Leaving, name, path).open()
        assert path.read_text().split() == ["third", "second", "first"]
    assert path.read_text().split()[3:] == ["around"]


def test_spawning_is_used_once_and_says_so_when_it_is_not() -> None:
    """M1, K06."""
    spawning = tb.spawn_procs({"gpus": 1})
    with pytest.raises(AttributeError, match=r"has not been started.*\.open\(\)"):
        spawning.spawn  # noqa: B018  # pyright: ignore[reportUnknownMemberType]
    with pytest.raises(RuntimeError, match=r"needs a mesh that is open, got spawn_procs\(.*\), not started: call open"):
        spawning.close()
    with spawning as procs, pytest.warns(RuntimeWarning, match=r"test_lifetime.py:\d+, was never started"):
        procs.spawning("own", Probe)
    with pytest.raises(RuntimeError, match="can be started once"):
        spawning.open()
    with pytest.warns(RuntimeWarning, match=r"test_lifetime.py:\d+, was never started: write `with`"):
        tb.spawn_procs({"gpus": 1})
    with pytest.raises(ValueError, match="grace"), tb.spawn_procs({"gpus": 1}, grace=-1):
        pass
    assert trio_threads() == []


def in_child(work: Callable[[], object]) -> int:
    """Do something in a process that was forked from this one; return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the test is told by the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_process_shares_nothing() -> None:
    """K06: calls there are refused in words, leaving does nothing, and the parent goes on."""
    with tb.spawn_procs({"gpus": 1}) as procs:
        probe = procs.spawn("probe", Probe)

        def call() -> None:
            with pytest.raises(RuntimeError, match="in a process that was forked"):
                probe.rank.call_one()

        assert in_child(call) == 0
        assert probe.rank.call_one() == 0


def test_works_inside_a_running_asyncio_loop() -> None:
    """K04, K06: as cells of a notebook are; `trimesh.aio` works beside it."""

    async def main() -> None:
        with tb.spawn_procs({"gpus": 1}, name="mine") as procs:
            probe = procs.spawn("probe", Probe)
            assert probe.rank.call_one() == 0
            async with trimesh.aio.spawn_procs({"gpus": 1}, name="theirs") as theirs:
                other = await theirs.spawn("other", Probe)
                assert await other.rank.call_one() == 0
                assert probe.rank.call_one() == 0
                assert await asyncio.to_thread(probe.note.call_one, "from a thread") == "from a thread"

    asyncio.run(main())


@pytest.mark.executed("it is about the exit of an interpreter")
def test_exit_closes_what_is_open(tmp_path: Path) -> None:
    """Z01, K06: in order, the last first, and a line says so; actors clean up."""
    with Program(tmp_path, "left_open", {}, programs=PROGRAMS) as program:
        assert program.wait() == 0
        assert program.stderr.count("was still open at the exit of the interpreter") == 2
        assert program.stderr.index("spawn('inner'") < program.stderr.index("spawn_procs({'gpus': 1})")
        assert program.stdout.splitlines()[-1].endswith("cleaned up")
        assert program.family() == set()


@pytest.mark.executed("it is about the exit of an interpreter")
def test_exit_is_bounded(tmp_path: Path) -> None:
    """Z01, Z02, K06: clean-up that does not end is ended by the death of the interpreter."""
    with Program(tmp_path, "left_open", {"exit_seconds": 0.1, "hangs": True}, programs=PROGRAMS) as program:
        assert program.wait() == 0
        assert "did not end in time" in program.stderr
        program.event("cleaning")
        program.check_gone()
