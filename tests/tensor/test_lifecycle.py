"""The tensors of a mesh when it is left, and when its processes die."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import trio
import trio.testing
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import (
    Actor,
    CollectiveFailed,
    FailFast,
    Isolate,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    ProcMesh,
    Restart,
    endpoint,
    this_host,
)
from trimesh._runtime.life.current import current_proc

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


def kill(procs: ProcMesh, rank: int) -> None:
    """Kill the process of a rank; its death becomes known when tasks run."""
    os.kill(procs.statistics().members[rank].pid, signal.SIGKILL)


def died(error: BaseException) -> list[BaseException]:
    return [leaf for leaf in trimesh.leaves(error) if isinstance(leaf, ProcDied)]


@pytest.mark.daily
async def test_death_under_fail_fast_surfaces_once() -> None:
    async with this_host().warm(preload=("torch",)) as host:
        for waits in (lambda t: t.item(), add_for_ever):
            with pytest.raises(MeshErrorGroup) as caught:
                async with host.spawn_procs({"gpus": 2}, supervision=FailFast()) as procs:
                    with procs.activate():
                        t = torch.ones(())
                    kill(procs, 1)
                    waits(t)
            [error] = list(trimesh.leaves(caught.value))
            assert isinstance(error, ProcDied)
            assert error.signal == signal.SIGKILL
            assert trimesh.coords(error) == [{"gpus": 1}]
        with pytest.raises(MeshErrorGroup) as caught:
            async with host.spawn_procs({"gpus": 2}) as procs:
                with procs.activate():
                    t = torch.ones(())
                kill(procs, 1)
                await trimesh.fetch(t)
        assert len(list(trimesh.leaves(caught.value))) == 1


class Bug(Actor):
    """Plants one in the thread in which its rank executes."""

    @endpoint
    def plant(self) -> None:
        from trimesh.tensor.rank.rank import Rank

        def execute(*_: object) -> None:
            raise LookupError("a bug")

        Rank.execute = execute


async def test_bug_in_the_thread_of_a_rank_ends_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    """It says why, and no fetch waits for it."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
            bugs = await procs.spawn("bugs", Bug)
            with procs.activate():
                t = torch.ones(())
            await trimesh.fetch(t)
            await bugs.slice(gpus=1).plant.call()
            await trimesh.fetch(t + 1)
    [error] = died(caught.value)
    assert trimesh.coords(error) == [{"gpus": 1}]
    assert "LookupError: a bug" in capfd.readouterr().err


def add_for_ever(t: Any) -> None:
    while True:
        t = t + 1


async def test_training_goes_on_from_the_last_state_on_a_restarted_mesh() -> None:
    policy = Restart("one_for_one", intensity=3, period=60)
    preload = ("torch", "torch.distributed.tensor")
    async with this_host().spawn_procs({"gpus": 2}, preload=preload, supervision=policy) as procs:
        weight, expected, deaths = torch.zeros(3), torch.zeros(3), 0
        step, where = 0, []
        while step < 6:
            with procs.activate():
                held = torch.tensor(weight.tolist())
                other = torch.ones(3)
            try:
                while step < 6:
                    held = held + step * other
                    if step == 3 and not deaths:
                        kill(procs, 1)
                    weight = await trimesh.fetch_shard(held, gpus=1)
                    step += 1
            except* ProcDied as group:
                deaths += 1
                where = trimesh.coords(group)
                await procs.settled()
                with pytest.raises(ProcDied):  # what was on that mesh is gone
                    other + 1
        del held, other
        gc.collect()  # errors and their frames hold some
        await survivor_has_no_values(procs)
        expected = torch.full((3,), float(sum(range(6))))
        assert torch.equal(weight, expected)
        assert (deaths, where) == (1, [{"gpus": 1}])
        await check_training_of_a_module_goes_on(procs)


async def check_training_of_a_module_goes_on(procs: ProcMesh) -> None:
    """The losses are those of a training in this process that nobody interrupts."""
    inputs, goals = torch.randn(8, 4), torch.randn(8, 2)
    twin = network()
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05)
    expected = [step_of(twin, twin_optimizer, inputs, goals).item() for _ in range(6)]
    losses: list[float] = []
    deaths: list[Any] = []
    saved: list[Any] = []
    while len(losses) < 6:
        model = trimesh.module_to_mesh(network(), procs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            trimesh.optimizer_to_mesh(optimizer)
        x, y = (trimesh.distribute(local, procs, ["gpus", None]) for local in (inputs, goals))
        try:
            while len(losses) < 6:
                if len(losses) == 3 and not deaths:
                    kill(procs, 1)
                loss = step_of(model, optimizer, x, y)
                loss, *saved = await trimesh.fetch([loss, model.state_dict(), optimizer.state_dict()])
                losses.append(loss.item())
        except* (ProcDied, CollectiveFailed) as group:  # the other rank may have waited for the dead one
            deaths += [coords for error in died(group) for coords in trimesh.coords(error)]
            await procs.settled()
    assert deaths == [{"gpus": 1}]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 1e-2, "it has learned something"


def network() -> Any:
    """Make a network, the same one each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


def step_of(model: Any, optimizer: Any, inputs: Any, goals: Any) -> Any:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), goals)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Gauge(Actor):
    """Looks at the rank that lives in its process."""

    @endpoint
    async def count(self) -> int:
        """Return how many values it has."""
        from trimesh.tensor.session.service import TensorService

        await trio.lowlevel.checkpoint()
        service = current_proc().above[TensorService]
        assert isinstance(service, TensorService)
        [hosted] = service._hosted.values()
        return len(hosted.rank.values)


async def survivor_has_no_values(procs: ProcMesh) -> None:
    """Wait until the rank that lives has let go of everything, too: the last batch may be under way."""
    gauges = await procs.slice(gpus=0).spawn("gauges", Gauge)
    with trio.fail_after(HANG_SECONDS):
        while await gauges.count.call_one():
            pass


async def test_isolated_death_leaves_other_teams_alone() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",), supervision=Isolate()) as procs:
        first = procs.slice(gpus=slice(0, 1))
        with procs.activate():
            both = torch.ones(2)
        with first.activate():
            one = torch.ones(2)
        kill(procs, 1)
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.fetch(both)
        assert len(died(caught.value)) == 1
        with pytest.raises(ProcDied):
            both + 1
        with pytest.raises(ProcDied):
            procs.activate()
        assert (await trimesh.fetch_shard(one + 1, gpus=0)).tolist() == [2, 2]
        with procs.alive().activate():
            assert torch.ones(()).item() == 1


async def test_block_waits_for_what_was_issued() -> None:
    async with this_host().warm(preload=("torch",)) as host:
        begun, fetched = trio.Event(), []

        async def fetch(tensor: Any) -> None:
            begun.set()
            fetched.append(await trimesh.fetch(tensor))

        async with trio.open_nursery() as outside:
            async with host.spawn_procs({"gpus": 1}) as procs:
                with procs.activate():
                    marker = torch.ones(600, 600)
                for _ in range(60):
                    marker = marker @ marker / 600
                executed = await progress(procs)
                outside.start_soon(fetch, marker)
                await begun.wait()
            assert executed() == 0, "everything that was issued has been executed when the block has been left"
            await trio.testing.wait_all_tasks_blocked()
            assert [len(ranks) for ranks in fetched] == [1]
        with pytest.raises(MeshStopped):
            marker + 1
        with pytest.raises(MeshStopped):
            procs.activate()

        @trimesh.remote(propagate=lambda t: t)
        def never_ends(t: Any) -> Any:
            signal.pause()
            return t

        with trio.CancelScope() as scope:
            async with host.spawn_procs({"gpus": 1}, grace=3) as procs:
                with procs.activate():
                    never_ends(torch.ones(1))
                scope.cancel()  # and does not wait for what was issued
        assert scope.cancelled_caught


@pytest.mark.daily
async def test_nothing_of_an_engine_outlives_its_block() -> None:
    async with this_host().warm(preload=("torch",)) as host:
        async with host.spawn_procs({"gpus": 1}) as procs:
            with procs.activate():
                t = torch.ones(2)
            engine = t._held.team.engine
            controlled = engine.on_closed.__self__
            assert controlled in instruments()
            assert (await trimesh.fetch_shard(t, gpus=0)).tolist() == [1, 1]
        assert controlled not in instruments()
        assert engine.proc.above.get(type(controlled)) is None


def instruments() -> list[Any]:
    """Return what Trio tells of its loop."""
    from trio._core._run import GLOBAL_RUN_CONTEXT

    return list(GLOBAL_RUN_CONTEXT.runner.instruments["_all"])


async def progress(procs: ProcMesh) -> Any:
    """Return what counts the commands that some rank has not executed."""
    from trimesh.tensor.session.opening import engine_of

    assert procs._owned is not None
    engine = engine_of(procs._owned)
    teams = list(engine._by_number.values())
    await trio.lowlevel.checkpoint()
    return lambda: sum(team.issued - team.executed for team in teams)
