"""What `trimesh.dump` and the log of a stopping block say of calls (rule M4)."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.conformance.meeting import come, make_meetings, meet
from tests.conformance.meshes import RealBackend, SimBackend, attempt, member, only_real, only_sim
from tests.conformance.probe import Probe
from tests.conformance.test_stalls import listening

import trimesh
from trimesh import endpoint, limits
from trimesh._runtime.watch.report import describe_actors


def dumped() -> str:
    out = io.StringIO()
    trimesh.dump(out)
    return out.getvalue()


class Busy(Probe):
    """Does what a report must be able to show."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.tend)
            yield
            nursery.cancel_scope.cancel()

    async def tend(self) -> None:
        await trio.sleep_forever()

    @endpoint(thread=True, concurrency=2)
    def in_thread(self, started: str, released: str) -> None:
        come(started)
        come(released)

    @endpoint(group="others", concurrency=2)
    async def with_tasks(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.part)
            self.notes.add("parts")

    async def part(self) -> None:
        await self.gate.wait()

    @endpoint(group="streams", concurrency=2)
    async def items(self) -> AsyncIterator[int]:
        yield 1
        self.notes.add("asked")
        await self.gate.wait()


@only_sim
async def test_calls_that_run_and_calls_behind_them_are_told_apart(backend: SimBackend):
    """M4: with what each awaits, in all the tasks that it has started, and the actor's own ones."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        busy = await procs.spawn("busy", Busy)
        attempt(nursery, busy.wait_for_gate.call_one)
        await busy.wait.call_one("gate")
        attempt(nursery, busy.rank.call_one)
        attempt(nursery, busy.with_tasks.call_one)
        await busy.wait.call_one("parts")
        await trio.sleep(2.0)
        async with busy.items.stream() as results:
            await anext(results)
            await busy.wait.call_one("asked")
            lines = [*describe_actors(backend.world.proc(member(busy, 0).proc_id))]
        await busy.open_gate.call_one()

    text = "\n".join(lines)
    name, files = re.escape("busy[gpus=0]"), r"\n(  File .*\n)*"
    for pattern in (
        rf"^{name}\.wait_for_gate runs, 2\.\d s old.*{files}  File .*probe.py.* in wait_for_gate$",
        rf"^{name}\.rank is queued behind wait_for_gate, 2\.\d s old",
        rf"^{name}\.with_tasks runs.*{files}  its task part:\n(    File .*\n)*    File .* in part$",
        rf"^{name}\.items runs.*{files}  File .* in items$",
        rf"^{name} in a task of its own, tend:{files}  File .* in tend$",
    ):
        assert re.search(pattern, text, re.MULTILINE), (pattern, text)
    assert "_runtime" not in text


@only_real
async def test_dump_shows_threads_and_what_was_given_up(backend: RealBackend, tmp_path: Path):
    """M4: of a call that its caller has left alone, and of the innocent one behind it."""
    started, released = make_meetings(tmp_path, "started", "released")
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        busy = await procs.spawn("busy", Busy)
        one = busy.slice(gpus=1)
        hanging = attempt(nursery, one.in_thread.options(abandon_after=0).call_one, started, released)
        await meet(started)
        hanging.cancel()
        await hanging.over.wait()
        assert await one.rank.call_one() == 1
        text = dumped()
        assert re.search(r"procs\[gpus=1\] pid \d+: .*has not ended the abandoned call busy\.in_thread", text)
        assert re.search(r"    busy\[gpus=1\]\.in_thread runs, \d+\.\d s old, cancelled \d+\.\d s ago", text)
        assert re.search(r"    a thread:\n(      File .*\n)*      File .* in in_thread", text)
        assert re.search(
            r"  call busy\.in_thread to busy\[gpus=1\]: cancelled \d+\.\d s ago and abandoned, may still run", text
        )
        await meet(released)


@only_real
async def test_log_of_a_stopping_block_names_who_it_waits_for_and_for_what(backend: RealBackend):
    """M4: not those who are done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "STOPPING_LOG_SECONDS", 2.0)  # other tests have more
        text = await _said_while_one_waits(backend)
    assert "has been stopping for 2 s, accepted messages still run; it waits for:" in text
    assert "0/3" not in text
    assert "2/3" not in text
    assert "probes[gpus=1].wait_for_gate runs" in text
    assert "nothing is awaited from 2 other processes" in text


async def _said_while_one_waits(backend: RealBackend) -> str:
    async with listening() as said, trio.open_nursery() as nursery:
        cut = trio.CancelScope()

        async def release() -> None:
            await said.wait(1)
            cut.cancel()

        nursery.start_soon(release)
        with cut:
            async with backend.procs({"gpus": 3}, name="held") as procs:
                probes = await procs.spawn("probes", Probe)
                one = probes.slice(gpus=1)
                await one.wait_for_gate.broadcast()
                await one.wait.call_one("gate")
    return said.texts[0][1]
