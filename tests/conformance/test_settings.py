"""Settings cross to the processes that are spawned."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio.testing
from tests.conformance.meshes import Backend, RealBackend, only_real

import trimesh
from trimesh import Actor, ConfigError, Isolate, MeshErrorGroup, config, configured, endpoint, this_host, this_proc


class Reader(Actor):
    """Tells of its settings."""

    @endpoint
    async def settings(self) -> list[float]:
        chosen = config.current()
        return [chosen.grace, float(chosen.stream_window)]

    @endpoint
    async def below(self) -> list[float]:
        async with this_host().spawn_procs({"inner": 1}, name="inner") as procs:
            return await (await procs.spawn("readers", Reader)).settings.call_one()

    @endpoint
    async def count(self) -> AsyncIterator[int]:
        for number in range(1_000):
            self.sent = number
            yield number

    @endpoint(concurrency=2)
    async def sent_so_far(self) -> int:
        return self.sent


@pytest.mark.daily("real")
async def test_process_has_the_settings_of_who_spawns_it(backend: Backend):
    """G1: below it, too, and its follower; those of the block in which it was spawned."""
    with configured(grace=9, stream_window=3):
        mesh = backend.procs(supervision=Isolate())
    async with mesh as procs:
        readers = await procs.spawn("readers", Reader)
        assert list((await readers.settings.call()).values()) == [[9.0, 3.0]] * 2
        assert await readers.slice(gpus=0).below.call_one() == [9.0, 3.0]
        await procs.replace([{"gpus": 1}])
        assert await readers.slice(gpus=1).settings.call_one() == [9.0, 3.0]
    async with backend.procs({"gpus": 1}) as procs:
        readers = await procs.spawn("readers", Reader)
        assert (await readers.settings.call_one())[0] == config.current().grace


async def test_variables_of_a_mesh_count_in_its_processes(backend: Backend):
    """G1: `env=` stands over the settings of who spawns; each point has its own."""
    with configured(grace=9):
        mesh = backend.procs(env=lambda point: {"TRIMESH_STREAM_WINDOW": str(point["gpus"] + 1)})
    async with mesh as procs:
        readers = await procs.spawn("readers", Reader)
        assert list((await readers.settings.call()).values()) == [[9.0, 1.0], [9.0, 2.0]]


async def test_wrong_variable_of_a_mesh_is_refused(backend: Backend):
    """G2: nothing has been started."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(env={"TRIMESH_GRACE": "soon"}):
            raise AssertionError
    assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {ConfigError}
    assert "TRIMESH_GRACE must be a number of seconds" in str(caught.value.exceptions[0])


async def test_window_of_a_stream_is_a_setting(backend: Backend):
    """G1: and an option of the call comes before it."""
    async with this_proc().spawn("reader", Reader) as reader:
        with configured(stream_window=2):
            assert await ahead(reader, None) <= 3
            assert await ahead(reader, 20) > 3


async def ahead(reader: Reader, window: int | None) -> int:
    """Return how far a generator comes whose consumer takes nothing."""
    async with reader.count.options(window=window).stream():
        await trio.testing.wait_all_tasks_blocked(0.05)
        return await reader.sent_so_far.call_one()


@only_real
async def test_environment_is_read_when_processes_are_spawned(backend: RealBackend, monkeypatch: pytest.MonkeyPatch):
    """G1, G2."""
    monkeypatch.setenv("TRIMESH_GRACE", "8")
    async with backend.procs({"gpus": 1}) as procs:
        readers = await procs.spawn("readers", Reader)
        assert (await readers.settings.call_one())[0] == 8.0
    monkeypatch.setenv("TRIMESH_GRACE", "late")
    with pytest.raises(ConfigError, match="TRIMESH_GRACE must be a number of seconds"):
        backend.procs()
    monkeypatch.delenv("TRIMESH_GRACE")
    config.reread()
