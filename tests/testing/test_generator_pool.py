"""A pool of generators under steady fire: every prompt is answered once, while weights are published beside it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.testing.actors import is_exact

import trimesh
from trimesh import Actor, Backoff, Died, ProcDied, Restart, Restarted, Retry, endpoint
from trimesh.testing import simulate

PROMPTS = 1_000
"""At least, where time is virtual. Real processes are given some until enough has happened beside them."""

GENERATORS = 4
PROMPT_SECONDS = 0.3
"""With 32 prompts under way: ten seconds for a thousand, and more for those that a death interrupts."""

KILL_SECONDS = 1.0
KILLS = 5
VERSIONS = 10
"""So many deaths, each healed, and so many versions of weights make a run."""

WEIGHTS = 1 << 18
"""Numbers of 8 bytes: 2 MiB, which travel in a segment."""

POLICY = Restart("one_for_one", intensity=1_000, period=1_000, backoff=Backoff(0.01, cap=0.01))


@attrs.frozen
class Answer:
    """What a generator makes of a prompt, and who has made it from what."""

    text: str
    generator: tuple[int, int]
    version: int


class Generator(Actor):
    """Answers prompts from the weights that it has got last."""

    def __init__(self) -> None:
        self.version = 0
        self.weights: Any = np.zeros(WEIGHTS, dtype=np.int64)

    @endpoint(concurrency=8, idempotent=True)
    async def generate(self, prompt: int) -> Answer:
        """Answer a prompt; the weights that it has begun with must not change under it."""
        weights, version = self.weights, self.version
        await trio.sleep(PROMPT_SECONDS)
        assert (weights == version).all(), "weights have changed while they were in use"
        where = trimesh.current_rank(), trimesh.context().incarnation
        return Answer(f"answer {prompt}", where, version)

    @endpoint(group="weights")
    async def load(self, version: int, weights: Any) -> int:
        """Take weights: whole, and newer than those before."""
        assert (weights == version).all(), "torn weights"
        assert version > self.version, f"version {version} came after {self.version}"
        self.weights, self.version = weights, version
        return version


class Trainer(Actor):
    """Makes weights, and gives them to all generators."""

    def __init__(self, generators: Any) -> None:
        self.generators = generators
        self.version = 0

    @endpoint
    async def publish(self) -> list[bool]:
        """Make new weights; return who has got them."""
        self.version += 1
        weights = np.full(WEIGHTS, self.version, dtype=np.int64)
        outcomes = (await self.generators.load.call_settled(self.version, weights)).values()
        for outcome in outcomes:
            assert outcome.ok or isinstance(outcome.error, ProcDied), outcome.error
        return [outcome.ok for outcome in outcomes]


@attrs.define(eq=False)
class Beside:
    """What goes on beside the answers."""

    kills: int = 0
    answers: dict[int, list[Answer]] = attrs.field(factory=dict[int, list[Answer]])
    events: Counter[type] = attrs.field(factory=Counter[type])
    news: trio.Event = attrs.field(factory=trio.Event)

    def prompts(self) -> Iterator[int]:
        """Yield prompts until enough has happened."""
        for prompt in itertools.count():
            if (prompt >= PROMPTS or not is_exact()) and self.is_enough():
                return
            self.answers[prompt] = []
            yield prompt

    def is_enough(self) -> bool:
        """Tell whether generators have died and come back, and all have answered, by new weights, too."""
        given = [answer for found in self.answers.values() for answer in found]
        return (
            min(self.kills, self.events[Died], self.events[Restarted]) >= KILLS
            and {rank for rank, _ in {answer.generator for answer in given}} == set(range(GENERATORS))
            and any(incarnation >= 1 for _, incarnation in {answer.generator for answer in given})
            and max(answer.version for answer in given) >= VERSIONS
        )

    async def publish(self, trainer: Any) -> None:
        while True:
            await trainer.publish.call_one()
            await trio.sleep(0.2)

    async def kill(self, mesh: Any, faults: Any) -> None:
        """Kill one generator every second, in turn; a slow machine first gets the one before back."""
        while True:
            await trio.sleep(KILL_SECONDS)
            while self.events[Restarted] < self.kills:
                await self.news.wait()
            faults.kill(mesh.slice(gpus=self.kills % GENERATORS))
            self.kills += 1

    async def watch(self, mesh: Any, *, task_status: trio.TaskStatus[None]) -> None:
        async with mesh.events() as events:
            task_status.started()
            async for event in events:
                self.events[type(event)] += 1
                self.news.set()
                self.news = trio.Event()


@pytest.mark.slow
@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=3, per_host={"gpus": GENERATORS + 1}, supervision=POLICY)
async def test_each_prompt_is_answered_once_while_generators_die(mesh, faults):
    """R07, R08, R09, C6, C7: many prompts, a kill every second, new weights five times a second."""
    generators = await mesh.slice(gpus=slice(0, GENERATORS)).spawn("generators", Generator)
    trainer = await mesh.slice(gpus=GENERATORS).spawn("trainer", Trainer, generators)
    beside = Beside()

    async with trio.open_nursery() as nursery:
        await nursery.start(beside.watch, mesh)
        nursery.start_soon(beside.kill, mesh, faults)
        nursery.start_soon(beside.publish, trainer)
        patient = generators.generate.options(retry=Retry(50, on=(ProcDied,)))
        async with patient.map(beside.prompts(), window=8 * GENERATORS) as results:
            async for prompt, answer in results:
                beside.answers[prompt].append(answer)
        nursery.cancel_scope.cancel()

    assert beside.is_enough()
    assert {prompt: [answer.text for answer in found] for prompt, found in beside.answers.items()} == {
        prompt: [f"answer {prompt}"] for prompt in range(len(beside.answers))
    }
    with trio.fail_after(HANG_SECONDS):  # all of them live, and take the last weights, once the last death is over
        while not all(await trainer.publish.call_one()):
            pass
