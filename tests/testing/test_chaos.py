"""Faults by chance, what a test says about them, and the search for the few that a failure needs."""

from __future__ import annotations

import re
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.vault import Reader
from tests.rows import rows
from tests.testing.actors import Worker, is_exact, run_body

import trimesh
from trimesh import ProcDied, endpoint, this_host
from trimesh.testing import simulate
from trimesh.testing.plans.chaos import GENTLE, KINDS, ChaosPlan, LivenessError
from trimesh.testing.plans.determinism import stream
from trimesh.testing.plans.plan import FaultPlan
from trimesh.testing.running import ItemRun, NeverReached, RunSettings, SeedPlan, Simulated, run_simulated, smallest
from trimesh.testing.simulated.seeded_run import SeededOptions

SEEDS = 12


@simulate(seeds=SEEDS, sometimes=("a call was late", "nothing was late"))
async def test_calls_outlive_slow_links_and_loops(mesh, chaos):
    w = await mesh.spawn("w", Worker)
    plan = chaos.plan(delay=1, lag=1, slow=1, every=(0.5, 3))
    async with chaos.safety(plan, duration=60):
        for number in range(20):
            start = trio.current_time()
            assert list((await w.step.call(number)).values()) == [number] * 2
            chaos.sometimes("a call was late", trio.current_time() - start > 1)
            chaos.sometimes("nothing was late", trio.current_time() - start < 0.3)
            await trio.sleep(1)
    async with chaos.liveness(within=1):
        await w.step.call()


@simulate(seeds=SEEDS, sometimes=("a death", "no death"))
async def test_deaths_come_out_of_the_block(chaos):
    died = False
    try:
        async with this_host().spawn_procs({"gpus": 3}) as procs:
            w = await procs.spawn("w", Worker)
            plan = chaos.plan(kill=1, stop=1, partition=1, delay=2, every=(5, 30))
            async with chaos.safety(plan, duration=40, of=procs):
                while True:
                    await w.slow.call(0.5)
    except* ProcDied:
        died = True
    chaos.sometimes("a death", died)
    chaos.sometimes("no death", not died)


@simulate(seeds=5)
async def test_safety_cancels_an_endless_body_at_its_end(mesh, chaos):
    start = trio.current_time()

    async with chaos.safety(chaos.plan(delay=1, every=(1, 2)), duration=30):
        await trio.sleep_forever()

    assert trio.current_time() - start == pytest.approx(30)
    assert mesh.size() == 2


def test_liveness_fails_without_progress():
    async def body(mesh, chaos):
        async with chaos.liveness(within=10):
            await trio.sleep(11)

    assert isinstance(run_body(body).error, LivenessError)


def test_steps_of_a_seed_are_a_swarm():
    plan = ChaosPlan(tuple((kind, 1.0) for kind in list(KINDS)[:7]), (1.0, 2.0), 1)
    found = Counter()
    for seed in range(100):
        steps = plan.steps(stream(seed, "chaos"))
        drawn = [next(steps) for _ in range(50)]
        found[len({step.kind for step in drawn})] += 1
        assert all(1 <= step.after <= 2 for step in drawn)

    assert min(found) == 1
    assert len(found) > 2, "each seed has kinds of its own"


TEXTS = {
    "kill": r"kill procs\[gpus=\d\]: sigkill",
    "stop": r"kill procs\[gpus=\d\]: sigstop",
    "partition": r"partition controller - procs\[gpus=\d\]: both",
    "delay": r"link controller - procs\[gpus=\d\]: delay",
    "lag": r"loop procs\[gpus=\d\]: lag",
    "slow": r"processor procs\[gpus=\d\]: slow",
    "transfer": r"transfer procs\[gpus=\d\] nth=1: delays",
    "one_way": r"partition controller - procs\[gpus=\d\]: (a_to_b|b_to_a)",
    "between": r"partition procs\[gpus=\d\] - procs\[gpus=\d\]: both",
    "duplicate": r"link controller - procs\[gpus=\d\]: duplicate",
    "reorder": r"link controller - procs\[gpus=\d\]: reorder",
    "clock": r"clock procs\[gpus=\d\]: jump",
    "spawn": r"spawn nth=1: launch",
    "disk": r"disk procs\[gpus=\d\] write nth=1: fails\(ENOSPC\)",
    "drift": r"clock procs\[gpus=\d\]: drift\(-?0.5\)",
    "gil": r"kill procs\[gpus=\d\]: hold_gil",
    "torch": r"torch procs\[gpus=\d\] \* nth=\d+: raises\(memory\)",
    "names": r"names procs\[gpus=\d\] \* nth=1: fails\(EAI_AGAIN\)",
    "resources": r"resources procs\[gpus=\d\] nth=1: fails\((EMFILE|ENOSPC)\)",
}
RESTART = trimesh.Restart("one_for_one", intensity=1000, period=60)


def compute(steps: int) -> None:
    import torch

    for _ in range(steps):
        torch.ones(3)


class Noter(Reader):
    @endpoint
    async def note(self, path: str) -> None:
        with open(path, "a") as file:  # noqa: ASYNC230 - its disk may be full
            file.write("noted")
        socket.gethostbyname("localhost")
        with suppress(ImportError):
            compute(10)

    @endpoint
    async def ask(self, other: Any, path: str) -> None:
        await other.note.call_one(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_is_caused(kind: str, tmp_path: Path):
    """Of members that are not spared; processes are started anew, and linked to others, where one is killed."""
    needs_new = ("spawn", "resources")

    async def body(chaos, fault_log):
        async with (
            this_host().spawn_procs({"gpus": 3}, supervision=RESTART) as procs,
            trimesh.rdma.RDMABuffer(bytearray(10)) as memory,
        ):
            readers = await procs.spawn("readers", Noter)
            plan = chaos.plan(
                **{"kill": float(kind in needs_new), kind: 1.0}, every=(0.5, 2), spare=[procs.slice(gpus=1)]
            )
            async with chaos.safety(plan, duration=6, of=procs):
                while True:
                    await readers.read.call_settled(memory)
                    await readers.note.call_settled(str(tmp_path / "notes"))
                    await readers.slice(gpus=0).ask.call_settled(readers.slice(gpus=2), str(tmp_path / "notes"))
                    await trio.sleep(0.2)
        said = [str(fired.fault) for fired in fault_log]
        assert not any(text.startswith(("kill", "loop", "clock")) and "gpus=1" in text for text in said)
        chaos.sometimes("caused", any(re.match(TEXTS[kind], text) for text in said))

    run_simulated(item(body, 12 if kind in needs_new else 4, ("caused",)))


@simulate(seeds=SEEDS, per_host={"gpus": 3})
async def test_partitions_within_their_bounds_end_no_lease(mesh, chaos):
    w = await mesh.spawn("w", Worker)
    plan = chaos.plan(partition=1, one_way=1, every=(0.5, 2), bounds=dict.fromkeys(("partition", "one_way"), (0.1, 3)))
    async with chaos.safety(plan, duration=60):
        while True:
            await w.step.call()  # raises if a member is given up
            await trio.sleep(0.2)


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=SEEDS, per_host={"gpus": 3}, supervision=RESTART, sometimes=("cut off",))
async def test_nemesis_finds_its_victim_itself(mesh, chaos, faults):
    """The same on each back end."""
    w = await mesh.spawn("w", Worker)
    ranks = set[int]()

    async def cut_off_the_busiest(seconds: float) -> None:
        counts = await w.count.call()
        ((_, busiest),) = [max((count, point["gpus"]) for point, count in counts.items())]
        async with faults.partition("controller", mesh.slice(gpus=busiest)):
            await trio.sleep(seconds)
        ranks.add(busiest)

    nemeses = {cut_off_the_busiest: 1.0}
    plan = chaos.plan(nemeses=nemeses, every=(0.1, 0.2), bounds={"cut_off_the_busiest": (0.01, 0.2)})
    async with chaos.safety(plan, duration=2):
        for number in range(20):
            await w.slice(gpus=number % 3).step.call()
            await trio.sleep(0.1)
    chaos.sometimes("cut off", ranks)
    async with chaos.liveness(within=10):
        await w.step.call()


async def cut_off_the_first(seconds: float) -> None:
    raise NotImplementedError(seconds)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kill": 0}, "at least one kind"),
        ({"partitions": 1}, "torch, resources, got 'partitions' (is it partition?)"),
        ({"stop": 1, "bounds": {"stops": (1, 2)}}, "kinds of this plan, stop, got 'stops' (is it stop?)"),
        ({"kill": 1, "every": (2, 1)}, "every"),
        ({"stop": 1, "max_down": 0}, "max_down"),
        ({"stop": 1, "bounds": {"partition": (0, 1)}}, "kinds of this plan, stop, got 'partition'"),
        ({"stop": 1, "bounds": {"stop": (2, 1)}}, "a shortest and a longest duration"),
        ({"nemeses": {cut_off_the_first: -1}}, "cut_off_the_first"),
    ],
)
def test_wrong_plan_is_refused(options, text):
    async def body(chaos):
        chaos.plan(**options)

    error = run_body(body).error

    assert isinstance(error, ValueError | TypeError)
    assert text in str(error)


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=4, per_host={"gpus": 3})
async def test_plan_without_weights_only_delays(mesh, chaos):
    """S3."""
    w = await mesh.spawn("w", Worker)
    plan = chaos.plan() if is_exact() else chaos.plan(every=(0.1, 0.3), bounds=dict.fromkeys(("lag", "gil"), (0, 0.1)))
    assert {kind for kind, _ in plan.weights} == set(GENTLE)
    async with chaos.safety(plan, duration=60 if is_exact() else 2):
        while True:
            await w.step.call()
            await trio.sleep(0.2)


# ---- what a test item says -------------------------------------------------------------------------------------------


def item(body, seeds: int, sometimes: tuple[str, ...] = (), only: int | None = None, **settings) -> ItemRun:
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    simulated = Simulated(seeds, sometimes, SeededOptions({"gpus": 2}))
    return ItemRun("tests/x.py::test_y", body, dict.fromkeys(names), simulated, RunSettings(SeedPlan(only), **settings))


def test_state_that_no_seed_reaches_fails_the_item():
    async def body(chaos):
        chaos.sometimes("reached by all")
        chaos.sometimes("reached by none", condition=False)

    with pytest.raises(NeverReached, match=r"any of 3 seeds: declared; reached by none"):
        run_simulated(item(body, 3, ("declared", "reached by all")))


def test_chaos_that_no_seed_sees_fails_the_item():
    async def body(mesh, chaos):
        async with chaos.safety(chaos.plan(kill=1)):
            pass

    with pytest.raises(NeverReached, match=r"any of 3 seeds: a fault in chaos\.safety"):
        run_simulated(item(body, 3))


def test_state_is_not_asked_for_when_one_seed_is_replayed():
    async def body(chaos):
        chaos.sometimes("never", condition=False)

    run_simulated(item(body, 3, only=1))


def test_failure_says_which_faults_it_needs_and_how_to_replay_them():
    async def body(mesh, faults):
        w = await mesh.spawn("w", Worker)
        faults.at(w.step, nth=1).delays(0.5)
        faults.at(w.step, nth=2).raises(KeyError("the one that matters"))
        faults.at(w.step, nth=1).delays(0.1)
        for number in range(3):
            await w.step.call(number)

    run = item(body, 3)
    with pytest.raises(trimesh.MeshErrorGroup):
        run_simulated(run)

    ((title, text),) = run.sections
    assert title == "mesh seed 0x0"
    assert "it needs 1 of 3 faults:\n  f1: at w[2].step nth=2: raises(KeyError)" in text
    assert "--mesh-seed=0x0 --mesh-leave-out=f0,f2" in text
    with pytest.raises(trimesh.MeshErrorGroup):
        run_simulated(item(body, 3, only=0, left_out=frozenset({"f0", "f2"})))
    run_simulated(item(body, 3, only=0, left_out=frozenset({"f1"})))


# ---- shrinking -------------------------------------------------------------------------------------------------------


@rows("seed", range(50))
def test_smallest_finds_what_is_needed(seed: int):
    draw = stream(seed, "shrinking")
    faults = [f"f{number}" for number in range(draw.randint(1, 30))]
    needed = set(draw.sample(faults, draw.randint(0, min(4, len(faults)))))
    runs = 0

    def fails(kept) -> bool:
        nonlocal runs
        runs += 1
        return needed <= set(kept)

    assert set(smallest(faults, fails, 1_000)) == needed
    assert runs <= 150


def test_smallest_keeps_its_bound():
    runs: list[int] = []

    def fails(kept) -> bool:
        runs.append(len(kept))
        return len(kept) > 10

    kept = smallest([f"f{number}" for number in range(100)], fails, 5)

    assert len(runs) == 5
    assert fails(kept)


def test_keys_of_faults_do_not_depend_on_chaos():
    plan = FaultPlan()

    keys = [plan.add(None, key).key for key in (None, "c0.0", None, "c0.1", None)]  # type: ignore[arg-type]

    assert keys == ["f0", "c0.0", "f1", "c0.1", "f2"]
