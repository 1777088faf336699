"""Whatever comes at whatever moment while meshes start, are used and stop: nothing is left (M1, C07, E11)."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, RealBackend, SimBackend, only_real
from tests.conformance.probe import Probe, Tidy
from tests.conformance.sweep import Body, NthStep, cancel, interrupt, kill_one, sweep

from trimesh import Actor, MeshStopped, ProcDied, SpawnError, endpoint, this_host, this_proc


class Nest(Actor):
    """An actor that owns processes."""

    @endpoint
    async def run(self) -> list[int]:
        async with this_host().spawn_procs({"inner": 2}, name="inner") as procs:
            probes = await procs.spawn("probes", Probe)
            return list((await probes.rank.call()).values())


async def enter_procs(backend: Backend) -> None:
    async with backend.procs():
        pass


async def setup() -> None:
    await trio.lowlevel.checkpoint()


async def enter_with_setup(backend: Backend) -> None:
    async with backend.procs(setup=setup):
        pass


async def adopt_actors(backend: Backend) -> None:
    async with backend.procs() as procs:
        await procs.spawn("first", Tidy)
        await procs.spawn("second", Tidy)


async def enter_actors(backend: Backend) -> None:
    async with backend.procs() as procs, procs.spawn("tidy", Tidy):
        pass


async def call_and_broadcast(backend: Backend) -> None:
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        await probes.note.broadcast(1)
        await probes.rank.call()
        await probes.rank.choose()
        await probes.note.broadcast(2)


async def call_in_turn(backend: Backend) -> None:
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        await probes.slice(gpus=0).relay.call_one(probes.slice(gpus=1), "rank", "call_one")


async def spawn_on_warm_host(backend: Backend) -> None:
    del backend
    async with this_host().warm() as host:
        procs = await host.spawn_procs({"gpus": 2})
        await procs.spawn("tidy", Tidy)
        async with host.spawn_procs({"gpus": 1}, name="others"):
            pass


async def spawn_here(backend: Backend) -> None:
    del backend
    async with this_proc().spawn("tidy", Tidy) as tidy:
        await tidy.rank.call_one()


async def nest(backend: Backend) -> None:
    async with backend.procs({"outer": 1}) as procs:
        nests = await procs.spawn("nests", Nest)
        assert list((await nests.run.call()).values()) == [[0, 1]]


BODIES = [
    enter_procs,
    enter_with_setup,
    adopt_actors,
    enter_actors,
    call_and_broadcast,
    call_in_turn,
    spawn_on_warm_host,
    spawn_here,
    nest,
]

every_step = pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.stress)])


@every_step
@pytest.mark.parametrize("body", BODIES)
def test_cancel_at_any_step_leaves_nothing(body: Body, stride: int):
    """M1, C07: a cancel at the nth step, for every n (every 11th in a short run); the block ends by it, or was over."""
    assert sweep(body, cancel, stride=stride) > 10


@every_step
@pytest.mark.parametrize("body", BODIES)
def test_interrupt_at_any_step_leaves_nothing(body: Body, stride: int):
    """M1: Ctrl-C at the nth step comes out as `KeyboardInterrupt`, and nothing is left."""
    assert sweep(body, interrupt, KeyboardInterrupt, stride=stride) > 10


@every_step
@pytest.mark.parametrize("body", BODIES)
def test_death_at_any_step_is_told_and_leaves_nothing(body: Body, stride: int):
    """E11, X3: a process that dies at the nth step, for all n, is an error that says so, or was over."""
    expected = (ProcDied, SpawnError, MeshStopped)
    assert sweep(body, kill_one, *expected, stride=stride) > 10


@only_real
@pytest.mark.parametrize("nth", [1, 5, 12, 20, 30, 45, 60, 80, 110, 150])
async def test_cancel_of_real_processes_at_some_step_leaves_nothing(backend: RealBackend, nth: int):
    """M1, C07: the same over real processes, where every run differs; the guard looks for what is left."""
    step = NthStep(nth)
    trio.lowlevel.add_instrument(step)
    with trio.CancelScope() as scope:
        step.arm(scope.cancel)
        await call_and_broadcast(backend)
    step.disarm()


def test_interrupt_of_a_call_cancels_it_over_there(seed: int):
    """M1, C01: the endpoint has unwound when `KeyboardInterrupt` comes out of the call."""
    backend = SimBackend(seed)
    logs: list[list[object]] = []

    async def interrupt_when_held(probes: Probe) -> None:
        await probes.wait.call("hold")
        interrupt()

    async def main() -> None:
        async with backend.open():
            async with backend.procs() as procs:
                probes = await procs.spawn("probes", Probe)
                with pytest.raises(BaseExceptionGroup) as caught:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(interrupt_when_held, probes)
                        await probes.hold.call()
                assert caught.value.subgroup(KeyboardInterrupt) is not None
                logs.extend((await probes.seen.call()).values())
            await backend.check_clean()

    backend.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
    assert [log[-1] for log in logs] == ["hold cancelled"] * 2
