"""The listings of the public API's description, as they stand there, over simulated and real processes.

What a listing leaves open (a model, a prompt, a batch) is filled in around it; the lines between the marks are its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.conformance.meshes import Backend, RealBackend, only_real
from tests.patience import HANG_SECONDS

from trimesh import Actor, ProcDied, Retry, current_rank, endpoint, this_host

# fmt: off
# ruff: noqa: E501 - the listings' own line lengths


# ---- 1 Meshes own lifetimes ------------------------------------------------------------------------------------------


class Counter(Actor):
    def __init__(self, start: int) -> None:       # plain state; runs in the remote process
        self.value = start

    @endpoint
    async def add(self, by: int = 1) -> int:
        self.value += by
        return self.value


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 4}) as procs:       # four real processes, owned by this block
        counters = await procs.spawn("counters", Counter, 10)       # adopted by the procs block
        totals = await counters.add.call(1)                         # ValueMesh[int] over Extent(gpus=4)
        assert totals.item(gpus=2) == 11


async def test_listing_of_counters(backend: Backend):
    """API 1."""
    del backend
    await main()


@pytest.mark.real
def test_listing_of_counters_as_a_script(tmp_path: Path):
    """API 1: no special runner, no `if __name__` guard; the classes are those of `__main__`."""
    script = tmp_path / "listing.py"
    script.write_text(
        textwrap.dedent('''\
            import trio, trimesh
            from trimesh import Actor, endpoint, this_host

            class Counter(Actor):
                def __init__(self, start: int) -> None:       # plain state; runs in the remote process
                    self.value = start

                @endpoint
                async def add(self, by: int = 1) -> int:
                    self.value += by
                    return self.value

            async def main() -> None:
                async with this_host().spawn_procs({"gpus": 4}) as procs:       # four real processes, owned by this block
                    counters = await procs.spawn("counters", Counter, 10)       # adopted by the procs block
                    totals = await counters.add.call(1)                         # ValueMesh[int] over Extent(gpus=4)
                    assert totals.item(gpus=2) == 11

            trio.run(main)                                                      # no special runner is needed
            ''')
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


closed: list[str] = []


@asynccontextmanager
async def open_model(path: str) -> AsyncGenerator[str, None]:
    try:
        yield f"model of {path}"
    finally:
        closed.append(path)


class Engine(Actor):
    def __init__(self, path: str) -> None:
        self.path = path
        self.decoded = 0

    @asynccontextmanager
    async def lifespan(self):                     # optional; set-up, background tasks, clean-up: one structured block
        async with trio.open_nursery() as nursery, open_model(self.path) as self.model:
            nursery.start_soon(self.decode_loop)
            yield                                  # the actor serves while we are here
            nursery.cancel_scope.cancel()

    async def decode_loop(self) -> None:
        while True:
            self.decoded += 1
            await trio.sleep(0.01)

    @endpoint
    async def look(self) -> tuple[str, int, list[str]]:
        return self.model, self.decoded, closed


async def test_listing_of_an_engine(backend: Backend):
    """API 1: set-up, a background task and clean-up in one block."""
    closed.clear()
    async with backend.procs({"gpus": 1}) as procs:
        async with procs.spawn("engine", Engine, "weights") as engine:
            model, decoded, before = await engine.look.call_one()
            assert model == "model of weights"
            assert decoded >= 1
            assert before == []
        async with procs.spawn("engine", Engine, "others") as engine:
            assert (await engine.look.call_one())[2] == ["weights"]


# ---- 5 Time and cancellation are Trio's ------------------------------------------------------------------------------


class Generator(Actor):
    def __init__(self) -> None:
        self.begun = self.unwound = 0

    @endpoint
    async def generate(self, prompt: str) -> str:
        if prompt == "quick":
            return prompt.upper()
        self.begun += 1
        try:
            await trio.sleep_forever()
        finally:
            self.unwound += 1

    @endpoint(concurrency=2)
    async def count(self) -> tuple[int, int]:
        return self.begun, self.unwound


async def test_listing_of_time(backend: Backend):
    """API 5: cancelled here, and the endpoint over there has been cancelled and has unwound."""
    async with backend.procs({"gpus": 2}) as procs:
        generators = await procs.spawn("generators", Generator)
        for prompt, seconds in (("quick", HANG_SECONDS), ("slow", 2.0 if backend.is_sim else 0.5)):
            text = ""
            with trio.move_on_after(seconds) as scope:
                text = await generators.generate.choose(prompt)
            # cancelled here => the endpoint over there has been cancelled and has unwound, or its process was reported as an Unresponsive event
            assert text == ("QUICK" if prompt == "quick" else "")
            assert scope.cancelled_caught == (prompt == "slow")
        counts = (await generators.count.call()).values()
        assert all(begun == unwound for begun, unwound in counts)
        if backend.is_sim:  # on a busy machine the time may be over before it begins
            assert sum(begun for begun, _ in counts) == 1


@only_real
async def test_preload_and_warm(backend: RealBackend):
    """API 1: modules are imported before processes are forked; one warm host serves many meshes."""
    del backend
    async with this_host().warm(preload=("colorsys",)) as host:
        for _ in range(2):
            async with host.spawn_procs({"gpus": 2}) as procs:
                modules = await procs.spawn("modules", Modules)
                assert list((await modules.has.call("colorsys")).values()) == [True, True]


class Modules(Actor):
    @endpoint
    def has(self, name: str) -> bool:
        return name in sys.modules


# ---- 3 Verbs ---------------------------------------------------------------------------------------------------------


class Player(Actor):
    @endpoint
    async def rollouts(self, n: int) -> AsyncIterator[tuple[int, int]]:
        for number in range(n):
            yield current_rank(), number

    @endpoint(idempotent=True)
    async def score(self, item: int) -> int:
        return item * item


async def test_listing_of_streams(backend: Backend):
    """API 3: the rows of `map` and `stream`, and the options of a call."""
    async with backend.procs({"gpus": 2}) as procs:
        players = await procs.spawn("players", Player)
        ep, items, found = players.score, [1, 2, 3], {}
        async with ep.map(items, window=32) as results:
            async for index, value in results:
                found[index] = value  # noqa: PERF403 - a listing
        assert found == {0: 1, 1: 4, 2: 9}
        async with ep.stream(3) as results:
            async for point, value in results:
                assert (point["gpus"] in (0, 1), value) == (True, 9)
        ep, args, seen = players.rollouts, (2,), []
        async with ep.options(merge="collect", window=4).stream(*args) as results:
            async for point, value in results:
                seen.append((point["gpus"], value))
        assert sorted(seen) == [(rank, (rank, number)) for rank in range(2) for number in range(2)]
        assert list((await players.score.options(retry=Retry(2, on=(ProcDied,))).call(5)).values()) == [25, 25]
