"""One body, two back ends: the faults that both can have mean the same in simulated and in real processes (S1)."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import pytest
import trio
from tests.testing.actors import Worker

import trimesh
from trimesh import Actor, ProcDied, endpoint, this_host
from trimesh.testing import UnfiredFault, UnsupportedFault, simulate
from trimesh.testing.real.run import RealSeed, run_real
from trimesh.testing.simulated.seeded_run import SeededOptions

both = pytest.mark.mesh_backend("sim", "proc")


class Planned(Exception):
    """An exception of the test itself; it goes by value where it must."""


@both
@simulate(seeds=10)
async def test_endpoint_raises_and_is_late(mesh, faults, fault_log):
    w = await mesh.spawn("w", Worker)
    faults.at(w.step, {"gpus": 1}, nth=2).raises(Planned("planned"))
    faults.at(w.inline).delays(0.05)

    assert list((await w.step.call(1)).values()) == [1, 1]
    with pytest.RaisesGroup(Planned) as caught:
        await w.step.call(2)
    assert list((await w.inline.call()).values()) == [8, 8]
    assert list((await w.in_thread.call()).values()) == [7, 7]

    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert (fault_log[0].site, fault_log[0].where) == ("dispatch", "w[gpus=1]")


@pytest.mark.parametrize("what", ["request", "in_flight", "reply"])
@both
@simulate(seeds=5)
async def test_lost_frame_loses_the_link(faults, fault_log, what):
    with pytest.RaisesGroup(ProcDied) as caught:
        async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed()) as procs:
            w = await procs.spawn("w", Worker)
            faults.call(w.slow, {"gpus": 1}).lose(what)
            await w.slow.call(0.01)

    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert len(fault_log) == 1


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sigkill", {"signal": signal.SIGKILL}),
        ("sigsegv", {"signal": signal.SIGSEGV}),
        ("abort", {"signal": signal.SIGABRT}),
        ("exit(3)", {"signal": None, "exit_code": 3}),
        ("sigstop", {"reason": "stopped"}),
        ("oom", {"signal": signal.SIGKILL}),
    ],
)
@both
@simulate(seeds=3)
async def test_process_ends(faults, how, expected):
    with pytest.RaisesGroup(ProcDied) as caught:
        async with this_host().spawn_procs({"gpus": 2}, setup=faults.armed()) as procs:
            w = await procs.spawn("w", Worker)
            faults.kill(procs.slice(gpus=1), how=how)
            await w.slow.call(30)

    (error,) = trimesh.leaves(caught.value)
    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert {name: getattr(error, name) for name in expected} == expected


class Store(Actor):
    """Keeps values."""

    def __init__(self) -> None:
        self.values: list[int] = []

    @endpoint
    async def put(self, value: int) -> None:
        self.values.append(value)

    @endpoint
    async def all(self) -> list[int]:
        return self.values


class Front(Actor):
    """Passes values on, and counts them."""

    def __init__(self, store: Store) -> None:
        self.store, self.count = store, 0

    @endpoint
    async def put(self, value: int) -> int:
        self.count += 1
        await self.store.put.call_one(value)
        return self.count


@pytest.mark.parametrize(
    ("at", "stored"), [("start", [0]), ("end", [0, 1]), ("reply", [0, 1])], ids=["start", "end", "reply"]
)
@both
@simulate(seeds=3, supervision=trimesh.Restart(backoff=trimesh.Backoff(0.01)))
async def test_process_ends_at_a_call(mesh, faults, fault_log, at, stored):
    """S4: before its endpoint, before its answer, or with its answer."""
    store = await mesh.slice(gpus=0).spawn("store", Store)
    front = await mesh.slice(gpus=1).spawn("front", Front, store)
    await front.put.call_one(0)

    faults.kill({"gpus": 1}, at=at)
    if at == "reply":
        assert await front.put.call_one(1) == 2
    else:
        with pytest.raises(ProcDied):
            await front.put.call_one(1)

    assert await store.all.call_one() == stored
    with suppress(ProcDied):  # the death may come after the call
        assert await front.put.call_one(2) == 1
    assert [fired.where for fired in fault_log] == ["procs[gpus=1]"]


@simulate(seeds=1)
async def test_kill_at_a_call_is_checked(mesh, faults):
    with pytest.raises(ValueError, match="one of now, start, end, reply"):
        faults.kill(mesh, at="later")
    with pytest.raises(ValueError, match=r"needs how=.sigkill."):
        faults.kill(mesh, how="abort", at="end")


@pytest.mark.parametrize("fault", ["hold_gil(0.3)", "lag"])
@both
@simulate(seeds=3)
async def test_process_is_stuck_for_a_while(mesh, faults, fault):
    w = await mesh.spawn("w", Worker)
    start = trio.current_time()
    if fault == "lag":
        faults.loop({"gpus": 0}).lag(0.3)
    else:
        faults.kill({"gpus": 0}, how=fault)

    await w.step.call()

    assert trio.current_time() - start >= 0.25


@pytest.mark.usefixtures("long_lease")
@both
@simulate(seeds=3)
async def test_stopped_process_goes_on(mesh, faults):
    w = await mesh.spawn("w", Worker)
    resume = faults.kill({"gpus": 0}, how="sigstop")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(w.step.call)
        await trio.sleep(0.1)
        assert nursery.child_tasks
        resume()


@pytest.mark.mesh_backend("proc")
async def test_unarmed_process_is_given_no_fault(mesh, faults):
    async with this_host().spawn_procs({}, name="unarmed") as procs:
        w = await procs.spawn("w", Worker)
        for plan in (
            lambda: faults.at(w.step).raises(KeyError),
            lambda: faults.link("controller", procs).drop(),
            lambda: faults.link(procs, mesh, direction="a_to_b").delay(1),
            lambda: faults.clock(procs).jump(1),
            lambda: faults.resources(procs).fails("EMFILE"),
            lambda: faults.loop("controller").lag(1),
        ):
            with pytest.raises(UnsupportedFault):
                plan()
        for plan in (faults.host(0).lose, faults.host(0).cut):
            with pytest.raises(UnsupportedFault, match=r"simulate\(hosts=\)"):
                plan()
        with pytest.raises(UnsupportedFault, match=r"faults\.armed"):
            async with faults.partition("controller", procs):
                raise AssertionError("it must be refused")
    assert not faults.executor.plan.planned


@pytest.mark.real
def test_planned_fault_of_a_real_process_must_fire():
    async def body(mesh: Any, faults: Any) -> None:
        w = await mesh.spawn("w", Worker)
        faults.at(w.step, nth=3).raises(KeyError)
        await w.step.call()

    with pytest.raises(UnfiredFault, match="nth=3"):
        run_real(body, {"mesh": None, "faults": None}, SeededOptions({"gpus": 2}), [RealSeed()])
