"""`events()`: what a reader sees, in which order, and what it loses (T3, S09, M5)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend
from tests.conformance.probe import Probe
from tests.conformance.supervised import kill_and_see, kill_and_wait, reading, restart

import trimesh
from trimesh import Died, Isolate, Lagged, Started, endpoint, this_proc


async def test_events_begin_with_a_snapshot(backend: Backend):
    """T3: a `Started` for each member that lives, those of the next incarnation included."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        await kill_and_see(backend, procs, log, 1)
        async with reading(procs) as late:
            await late.wait(Started, 2)
        assert late.names() == ["Started 0.0", "Started 2.0"]
        await procs.replace([{"gpus": 1}])
        async with procs.events() as stream:
            event = await anext(stream)
            assert isinstance(event, Started)
            assert (event.mesh, event.point, event.incarnation) == ("procs", {"gpus": 0}, 0)
            assert event.pid == procs._owned.info.members[0].pid
            await anext(stream)
            third = await anext(stream)
            assert isinstance(third, Started)
            assert third.incarnation in (0, 1)


async def test_every_reader_gets_every_event(backend: Backend):
    async with backend.procs(supervision=restart()) as procs, reading(procs) as one, reading(procs) as other:
        await kill_and_wait(backend, procs, one, 1)
        await other.wait(trimesh.Restarted)
        expected = ["Started 0.0", "Started 1.0", "Died 1.0", "Restarting 1.0", "Restarted 1.1"]
        assert one.names() == other.names() == expected
        assert one.of(Died)[0].error is one.of(trimesh.Restarting)[0].cause


async def test_actor_mesh_has_events_of_its_own(backend: Backend):
    """M5: points are those of the mesh as spawned."""
    async with backend.procs(supervision=restart()) as procs:
        probes = await procs.slice(gpus=slice(1, 2)).spawn("probes", Probe)
        async with reading(procs) as log, reading(probes) as actors:
            await kill_and_wait(backend, procs, log, 1)
            event = await actors.wait(trimesh.Restarted)
            assert (event.mesh, event.point, event.incarnation) == ("probes", {"gpus": 0}, 1)
            assert actors.names() == ["Started 0.0", "Died 0.0", "Restarting 0.0", "Restarted 0.1"]


async def test_view_shows_its_members_only(backend: Backend):
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        async with reading(procs.slice(gpus=slice(1, 3))) as some:
            await kill_and_see(backend, procs, log, 0)
            await kill_and_see(backend, procs, log, 2)
            await some.wait(Died)
        assert some.names() == ["Started 1.0", "Started 2.0", "Died 2.0"]


async def test_slow_reader_gets_one_lagged(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """S09: in place of what is lost; the newest records are kept."""
    monkeypatch.setattr("trimesh.limits.EVENTS", 4)
    async with backend.procs({"gpus": 1}, supervision=Isolate()) as procs:
        probe = await procs.spawn("probe", Probe)
        async with probe.events() as slow, reading(probe) as quick:
            for number in range(10):
                await probe.fail.broadcast(KeyError(number))
                await quick.wait(trimesh.Failed, number + 1)
            first = await anext(slow)
            rest = [await anext(slow) for _ in range(4)]
        assert first == Lagged(7), "the snapshot, and the first six"
        assert [event.error.args for event in rest if isinstance(event, trimesh.Failed)] == [(6,), (7,), (8,), (9,)]
        assert quick.lost == 0


async def test_events_end_when_the_mesh_has_stopped(backend: Backend):
    """T3: a reader outside the block comes to the end, after the last record."""
    async with trio.open_nursery() as nursery:
        seen: list[object] = []
        over = trio.Event()

        async def read(mesh: Probe, task_status: trio.TaskStatus[None]) -> None:
            async with mesh.events() as stream:
                task_status.started()
                seen.extend([event async for event in stream])
            over.set()

        async with backend.procs() as procs, procs.spawn("probes", Probe) as probes:
            await nursery.start(read, probes)
        await over.wait()
        assert [type(event) for event in seen] == [Started, Started]


async def test_events_of_a_stopped_mesh_are_over(backend: Backend):
    async with backend.procs() as procs, reading(procs) as log:
        async with procs.spawn("probes", Probe) as probes:
            pass
        async with probes.events() as stream:
            assert [event async for event in stream if not isinstance(event, Started)] == []
        assert log.of(Died) == []


async def test_events_are_read_where_the_mesh_is_owned(backend: Backend):
    """T3: on a reference, and on the mesh of this very process, a clear error."""
    async with backend.procs() as procs:
        reader = await procs.spawn("reader", Reader)
        with pytest.raises(RuntimeError, match="process that owns the mesh"):
            await reader.slice(gpus=0).read.call_one(reader)
        with pytest.raises(RuntimeError, match="process that owns the mesh"):
            await reader.slice(gpus=0).read.call_one(procs)
        with pytest.raises(RuntimeError, match="this_proc"):
            this_proc().events()


class Reader(Probe):
    @endpoint
    async def read(self, mesh: Any) -> None:
        async with mesh.events() as stream:
            await anext(stream)


async def test_reading_checkpoints(backend: Backend):
    """K01: also when there is something to read."""
    async with backend.procs() as procs:
        with trio.testing.assert_checkpoints():
            async with procs.events() as stream:
                pass
        async with procs.events() as stream:
            with trio.testing.assert_checkpoints():
                await anext(stream)


async def test_cancelled_read_loses_nothing(backend: Backend):
    async with backend.procs() as procs, procs.events() as stream:
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        assert [type(await anext(stream)) for _ in range(2)] == [Started, Started]
