"""Many restarts in a row leave the controller as it was: descriptors, threads, memory."""

from __future__ import annotations

import gc
import os
import signal

import attrs
import pytest
import trio
from tests.conformance.supervised import AT_ONCE
from tests.runtime.processes import spawners_here
from tests.stress.soak.gauges import held, resident_bytes

from trimesh import Actor, ProcDied, Restart, endpoint, this_host

pytestmark = pytest.mark.real

BYTES_PER_RESTART_MAX = (1 << 20) / 1000
"""What is remembered of a process that has ended takes half of it, until as many are remembered as ever will be."""

NOISE_BYTES = 400_000


class Server(Actor):
    def __init__(self, table: list[int]) -> None:
        self.table = table

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


def memory() -> tuple[int, int]:
    """Return the memory of this process and of the spawner."""
    gc.collect()
    [spawner] = spawners_here()
    return resident_bytes(os.getpid()), resident_bytes(spawner)


@pytest.mark.parametrize("restarts", [12, pytest.param(1000, marks=[pytest.mark.stress, pytest.mark.timeout(900)])])
async def test_restarts_leave_nothing_behind(restarts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Z01, R01: equal descriptors, shared memory and threads; memory grows by a list of the dead that has an end."""
    monkeypatch.setenv("TRIMESH_HISTORY", "0")  # a file and a thread, from the second second of a run on
    policy = Restart(intensity=restarts, period=0.01, backoff=AT_ONCE)
    async with this_host().spawn_procs({"gpus": 4}, supervision=policy) as procs:
        servers = await procs.spawn("servers", Server, list(range(1000)))
        for number in range(4):
            await kill_and_call(servers, number)
        await servers.pid.call()
        before, memory_before = held(os.getpid()), memory()
        for number in range(restarts):
            await kill_and_call(servers, number)
        await servers.pid.call()
        after = held(os.getpid())
        assert after.threads <= before.threads  # one of Trio's pool that has idled for 10 s is gone
        assert attrs.evolve(after, threads=before.threads) == before
        grown = [after - earlier for after, earlier in zip(memory(), memory_before, strict=True)]
        assert max(grown) <= restarts * BYTES_PER_RESTART_MAX + NOISE_BYTES


async def kill_and_call(servers: Server, number: int) -> None:
    """Kill one process, and call it until its replacement answers."""
    victim = servers.slice(gpus=number % 4)
    before = await victim.pid.call_one()
    os.kill(before, signal.SIGKILL)
    while True:
        try:
            assert await victim.pid.call_one() != before
        except ProcDied:
            await trio.lowlevel.checkpoint()
        else:
            return


async def test_prompts_are_answered_while_generators_die() -> None:
    """R09, C6: every prompt exactly once at its caller, by retries of its own."""
    policy = Restart(intensity=1000, period=1000, backoff=AT_ONCE)
    answers: dict[int, str] = {}
    async with this_host().spawn_procs({"gpus": 4}, supervision=policy) as procs:
        generators = await procs.spawn("generators", Generator)
        over = trio.Event()

        async def kill_now_and_then() -> None:
            number = 0
            while not over.is_set():
                await trio.sleep(0.05)  # the moment is what is varied
                await kill_and_call(generators, number)
                number += 1

        async def ask(prompts: range) -> None:
            for prompt in prompts:
                while prompt not in answers:
                    try:
                        answers[prompt] = await generators.generate.choose(prompt)
                    except ProcDied:
                        continue

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_now_and_then)
            async with trio.open_nursery() as callers:
                for first in range(8):
                    callers.start_soon(ask, range(first, 200, 8))
            over.set()
    assert answers == {prompt: f"answer {prompt}" for prompt in range(200)}


class Generator(Server):
    def __init__(self) -> None:
        super().__init__([])

    @endpoint(concurrency=8, idempotent=True)
    async def generate(self, prompt: int) -> str:
        await trio.sleep(0.01)
        return f"answer {prompt}"
