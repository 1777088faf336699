"""What a policy keeps from being raised is logged, once and in bounds; what is raised is not."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, kinds, only_sim
from tests.conformance.probe import Probe
from tests.conformance.supervised import kill_and_see, kill_and_wait, reading, remake, restart

import trimesh
from trimesh import Died, Failed, GaveUp, Isolate, MeshErrorGroup, ProcDied, Restarted, Unacknowledged, endpoint, limits
from trimesh._runtime.actors.reports import SupervisionLog


class Messy(Probe):
    """Fails to clean up, the first time, on one rank."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        if trimesh.current_rank() == 0 and trimesh.context().incarnation == 0:
            raise KeyError("messy")


class Asking(Probe):
    """Calls another that does not hear its cancel."""

    @endpoint
    async def give_up(self, other: Any) -> None:
        with trio.move_on_after(1):
            await other.unwind.call_one(None, 60.0)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def test_isolated_failures_and_deaths_are_logged(backend: Backend, caplog: pytest.LogCaptureFixture):
    """P1, P3: a line each, with the place and what comes next."""
    async with backend.procs(supervision=Isolate()) as procs:
        probes = await procs.spawn("probes", Probe)
        async with reading(probes) as failures, reading(procs) as log:
            await probes.slice(gpus=1).fail.broadcast(ValueError("nobody waits"))
            await failures.wait(Failed)
            await kill_and_see(backend, procs, log, 0)
    failure, death = logged(caplog)
    assert failure.startswith("probes: ValueError: nobody waits (at probes[gpus=1]")
    assert failure.endswith("; the actor goes on")
    assert "procs[gpus=0]" in death
    assert death.endswith("; the mesh goes on without it")


async def test_restarts_are_logged(backend: Backend, caplog: pytest.LogCaptureFixture):
    """R01, P1: with the death that each is for."""
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        await procs.spawn("probes", Probe)
        await kill_and_wait(backend, procs, log, 1)
    (line,) = logged(caplog)
    assert "ProcDied" in line
    assert line.endswith("; restarting rank 1 after 0 s")


cell: ContextVar[str] = ContextVar("cell", default="none")


async def test_log_has_no_context_variables(monkeypatch: pytest.MonkeyPatch):
    """P1, K06: a notebook would show it under the cell that opened the mesh, not under the running one."""
    seen = list[str]()
    monkeypatch.setattr(logging.getLogger("trimesh"), "filters", [lambda _: not seen.append(cell.get())])
    cell.set("the one that opens")
    SupervisionLog().write("news")
    assert seen == ["none"]


@only_sim
async def test_actor_that_is_not_made_again_is_logged(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """P1: its own policy has given up, and that of the processes lets it go."""
    async with backend.procs(supervision=Isolate()) as procs:
        probes = await procs.supervised(remake(intensity=0)).spawn("probes", Probe)
        async with reading(probes) as log:
            await probes.slice(gpus=1).fail.broadcast(ValueError("nobody waits"))
            await log.wait(GaveUp)
    (line,) = logged(caplog)
    assert line.startswith("procs: RestartLimit")
    assert line.endswith("; the mesh goes on without the actor")


@only_sim
async def test_error_of_a_clean_up_before_a_restart_is_logged(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """P1: it is an event, and a line beside that of the restart."""
    async with backend.procs() as procs:
        messy = await procs.supervised(remake(strategy="one_for_all")).spawn("messy", Messy)
        async with reading(messy) as log:
            await messy.slice(gpus=1).fail.broadcast(ValueError("nobody waits"))
            await log.wait(Restarted, 2)
    lines = [line for line in logged(caplog) if "clean-up" in line]
    assert len(lines) == 1
    assert lines[0].startswith("messy: KeyError: 'messy' (at messy[gpus=0]")


@only_sim
async def test_member_that_falls_silent_to_another_is_logged(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """C2: by its owner, once; who called it is another process."""
    async with backend.procs(supervision=Isolate(), grace=100) as procs:
        probes = await procs.spawn("probes", Asking)
        async with reading(probes) as log:
            await probes.slice(gpus=0).give_up.call_one(probes.slice(gpus=1))
            await log.wait(Unacknowledged)
    lines = [line for line in logged(caplog) if line.startswith("procs: Unresponsive")]
    assert len(lines) == 1
    assert lines[0].endswith("; its process goes on")


async def test_failure_that_is_raised_is_not_logged(backend: Backend, caplog: pytest.LogCaptureFixture):
    """X3: one failure surfaces once."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            await procs.spawn("probes", Probe)
            backend.kill(procs, 1)
            await trio.sleep_forever()
    assert kinds(caught.value) == [ProcDied]
    assert logged(caplog) == []


@only_sim
async def test_log_of_a_dying_mesh_is_bounded(backend: SimBackend, caplog: pytest.LogCaptureFixture):
    """P1: all members of a large mesh die in the same moment."""
    size = 2 * limits.SUPERVISION_LOG_LINES
    async with backend.procs({"gpus": size}, supervision=Isolate()) as procs, reading(procs) as log:
        for rank in range(size):
            backend.kill(procs, rank)
        await log.wait(Died, size)
    assert len(logged(caplog)) == limits.SUPERVISION_LOG_LINES
    assert "not logged" in logged(caplog)[-1]
