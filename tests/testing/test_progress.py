"""A run that gets nowhere ends, also beside heartbeats and beside tasks that never wait, and says what it waits for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.testing.actors import Worker

from trimesh import Actor, endpoint
from trimesh.testing.real import run as real_run
from trimesh.testing.simulated.oracles import STEPS_MAX
from trimesh.testing.simulated.seeded_run import HangError, SeededOptions, run_once


class Stuck(Actor):
    """Ends no call."""

    @endpoint
    async def never(self) -> None:
        await trio.sleep_forever()

    @endpoint
    async def spin(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()


class Heart(Actor):
    """Calls another actor for as long as it lives."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.beat)
            yield
            nursery.cancel_scope.cancel()

    async def beat(self) -> None:
        while True:
            await self.worker.count.call_one()
            await trio.sleep(0.1)


def text_of(body: Any, steps_max: int) -> str:
    outcome = run_once(body, {"mesh": None}, SeededOptions({"gpus": 2}, steps_max=steps_max), 0)
    assert isinstance(outcome.error, HangError), outcome.error
    return str(outcome.error)


def test_hang_beside_heartbeats_is_found():
    async def body(mesh: Any) -> None:
        worker = await mesh.slice(gpus=0).spawn("worker", Worker)
        stuck = await mesh.slice(gpus=0).spawn("stuck", Stuck)
        await mesh.slice(gpus=1).spawn("heart", Heart, worker)
        await stuck.never.call_one()

    text = text_of(body, 10_000)

    assert "steps of its tasks" in text
    assert "waits for stuck.never" in text
    assert "procs[gpus=0]:" in text


def test_task_that_never_waits_is_found():
    async def body(mesh: Any) -> None:
        stuck = await mesh.spawn("stuck", Stuck)
        await stuck.spin.call()

    text = text_of(body, STEPS_MAX)

    assert "steps at one moment of the virtual clock" in text
    assert "of procs[gpus=" in text


class Poller(Actor):
    """Looks again and again whether it has been told something, and never waits."""

    def __init__(self) -> None:
        self.is_told = False

    @endpoint(concurrency=2)
    async def poll(self) -> bool:
        while not self.is_told:
            await trio.lowlevel.checkpoint()
        return True

    @endpoint
    async def tell(self) -> None:
        self.is_told = True


def run_simulated(body: Any) -> None:
    outcome = run_once(body, {"mesh": None}, SeededOptions({"gpus": 1}), 0)
    if outcome.error is not None:
        raise outcome.error


def run_real(body: Any) -> None:
    real_run.run_real(body, {"mesh": None}, SeededOptions({"gpus": 1}), [real_run.RealSeed()])


ONE_RUN = pytest.mark.parametrize(
    "run_one", [run_simulated, pytest.param(run_real, marks=pytest.mark.real)], ids=["sim", "proc"]
)
"""A spin costs seconds of real time: one seed shows it."""


@ONE_RUN
def test_deadline_ends_a_task_that_never_waits(run_one):
    async def body(mesh: Any) -> None:
        stuck = await mesh.spawn("stuck", Stuck)
        with pytest.raises(trio.TooSlowError), trio.fail_after(1):
            await stuck.spin.call_one()

    run_one(body)


@ONE_RUN
def test_poll_that_never_waits_sees_what_comes(run_one):
    async def body(mesh: Any) -> None:
        poller = await mesh.spawn("poller", Poller)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller.poll.call_one)
            await trio.sleep(0.1)
            await poller.tell.call_one()

    run_one(body)


@pytest.mark.real
def test_hang_over_real_processes_is_found(monkeypatch):
    monkeypatch.setattr(real_run, "REAL_SECONDS", 1.0)

    async def body(mesh: Any) -> None:
        stuck = await mesh.spawn("stuck", Stuck)
        await stuck.never.call()

    with pytest.raises(HangError, match="has not ended after 1 seconds; the controller:\ntrimesh: process"):
        run_real(body)


def test_wait_for_nothing_is_found_by_the_clock():
    async def body(mesh: Any) -> None:
        stuck = await mesh.spawn("stuck", Stuck)
        await stuck.never.call()

    assert "virtual seconds" in text_of(body, STEPS_MAX)
