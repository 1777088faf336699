"""Random numbers and times that actors get follow from the seed, differ from process to process, and leave no trace."""

from __future__ import annotations

import datetime
import os
import random
import secrets
import time
import uuid
from datetime import datetime as imported_datetime
from time import monotonic
from typing import Any

import numpy as np
import pytest
import trio
from tests.testing.actors import run_body

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import simulate


class Drawer(Actor):
    """Draws from all that a program draws from."""

    @endpoint
    async def numbers(self) -> dict[str, Any]:
        await trio.sleep(0.1)
        return {
            "random": random.random(),
            "instance": random.Random().random(),
            "system": random.SystemRandom().random(),
            "secrets": secrets.token_hex(8),
            "urandom": os.urandom(8),
            "uuid1": uuid.uuid1(),
            "uuid4": uuid.uuid4(),
            "numpy": float(np.random.rand()),
            "default_rng": float(np.random.default_rng().random()),
        }

    @endpoint
    async def torch_number(self) -> float:
        import torch

        return float(torch.rand(1))

    @endpoint
    async def times(self) -> dict[str, Any]:
        return {
            "time": time.time(),
            "time_ns": time.time_ns(),
            "monotonic": monotonic(),
            "perf_counter": time.perf_counter(),
            "now": imported_datetime.now(),
            "utc": datetime.datetime.now(datetime.UTC),
            "today": datetime.date.today(),
            "gmtime": time.gmtime(),
        }

    @endpoint
    async def sleep_until(self, seconds: float) -> int:
        naps, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            assert naps < seconds, "the clock must go on while this sleeps"
            naps += 1
            time.sleep(1)  # noqa: ASYNC251 - as programs do
        return naps

    @endpoint
    async def sleep_like_a_sync_program(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - as programs do

    @endpoint(thread=True)
    def sleep_in_thread(self, seconds: float) -> float:
        before = time.monotonic()
        time.sleep(seconds)
        return time.monotonic() - before

    @endpoint
    async def sleep_in_trio_thread(self, seconds: float) -> None:
        await trio.to_thread.run_sync(time.sleep, seconds)


def drawn(seed: int, endpoint_: str = "numbers", **options: Any) -> list[Any]:
    found: list[Any] = []

    async def body() -> None:
        async with trimesh.this_host().spawn_procs({"gpus": 3}, **options) as procs:
            drawer = await procs.spawn("drawer", Drawer)
            for _ in range(2):
                found.extend((await getattr(drawer, endpoint_).call()).values())
            found.append({"random": random.random(), "urandom": os.urandom(8)})

    outcome = run_body(body, seed)
    assert outcome.error is None, outcome.error
    return found


def test_same_seed_draws_the_same():
    assert drawn(3) == drawn(3)


def test_each_process_draw_and_seed_is_another():
    everything = [each for seed in (3, 4) for each in drawn(seed)]
    for name in everything[0]:
        values = [each[name] for each in everything if name in each]
        assert len(set(values)) == len(values), name


@pytest.mark.torch
def test_torch_draws_the_same():
    assert drawn(3, "torch_number")[:-1] == drawn(3, "torch_number")[:-1]
    assert len(set(drawn(3, "torch_number")[:-1])) == 6


def test_generators_of_the_test_session_go_on_as_before():
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), float(np.random.rand())
    random.seed(5)
    np.random.seed(5)
    drawn(3)
    assert (random.random(), float(np.random.rand())) == expected


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=3)
async def test_seed_of_a_mesh_draws_what_real_processes_draw():
    """The numbers are those of real processes with the same `seed=` (docs/guide.md)."""
    async with trimesh.this_host().spawn_procs({"gpus": 2}, seed=7) as procs:
        drawer = await procs.spawn("drawer", Drawer)
        values = (await drawer.numbers.call()).values()

    expected = [trimesh._runtime.system.seeds.ProcSeeds.of(7, "procs", rank, 0) for rank in range(2)]
    assert [each["random"] for each in values] == [random.Random(seeds.python).random() for seeds in expected]
    assert [each["numpy"] for each in values] == [float(np.random.RandomState(s.numpy).rand()) for s in expected]


@simulate(seeds=5, per_host={"gpus": 2})
async def test_clocks_are_virtual(mesh):
    drawer = await mesh.spawn("drawer", Drawer)
    before = await drawer.slice(gpus=0).times.call_one()
    await trio.sleep(86_400)
    after = await drawer.slice(gpus=0).times.call_one()

    passed = {name: after[name] - before[name] for name in before if name not in ("gmtime", "time_ns")}
    assert all(86_400 <= passed[name] < 86_401 for name in ("time", "monotonic", "perf_counter"))
    day = datetime.timedelta(days=1)
    assert all(day <= passed[name] < day + datetime.timedelta(seconds=1) for name in ("now", "utc"))
    assert passed["today"] == day
    assert after["gmtime"][:3] == (2001, 9, 10)


@simulate(seeds=5, per_host={"gpus": 1})
async def test_time_sleep_keeps_a_process_from_taking_messages(mesh):
    drawer = await mesh.spawn("drawer", Drawer)
    start = trio.current_time()

    await drawer.sleep_like_a_sync_program.call_one(30)

    assert 30 <= trio.current_time() - start < 31


@simulate(seeds=3, per_host={"gpus": 1})
async def test_sleeps_of_a_sync_program_add_up_and_it_sees_them(mesh):
    drawer = await mesh.spawn("drawer", Drawer)
    start = trio.current_time()

    assert await drawer.sleep_until.call_one(10) == 10

    assert 10 <= trio.current_time() - start < 11


@pytest.mark.parametrize("name", ["sleep_in_thread", "sleep_in_trio_thread"])
@simulate(seeds=5, per_host={"gpus": 1})
async def test_time_sleep_in_a_thread_takes_its_time(mesh, name):
    drawer = await mesh.spawn("drawer", Drawer)
    start = trio.current_time()

    slept = await getattr(drawer, name).call_one(30)

    assert 30 <= trio.current_time() - start < 31
    assert slept in (None, 30)
