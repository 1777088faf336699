"""Random kills, failures and replacements under random policies: every call ends, and what may heal does.

A failing seed is run alone by its number in brackets.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from tests.conformance.meshes import SimBackend, only_sim
from tests.conformance.supervised import Log, reading
from tests.conformance.test_actor_restarts import Numbered

import trimesh
from trimesh import (
    ActorFailed,
    Backoff,
    Isolate,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    RemoteCancelled,
    Restart,
    Restarted,
    RestartLimit,
)
from trimesh.events import MemberEvent

SEEDS = 12
SHAPE = {"replica": 2, "gpus": 2}
EXPECTED = (ProcDied, MeshStopped, ActorFailed, RemoteCancelled)
"""What a call may raise when members come and go."""


def random_policy(chance: random.Random) -> Any:
    if chance.random() < 0.2:
        return Isolate()
    return Restart(
        chance.choice(["one_for_one", "one_for_all", "rest_for_one"]),
        along=chance.choice([None, "replica", "gpus"]),
        intensity=chance.choice([2, 1000, 1000]),
        period=chance.choice([1.0, 1000.0]),
        backoff=Backoff(chance.choice([0.0, 0.05, 1.0])),
        on=chance.choice([(ProcDied,), (ProcDied, ActorFailed)]),
    )


class Story:
    """One run: what is done to the mesh, and what its callers come to."""

    def __init__(self, backend: SimBackend, seed: int) -> None:
        self.backend = backend
        self.chance = random.Random(f"supervision {seed}")
        self.seed = seed
        self.ended: dict[str, int] = {}

    async def run(self) -> None:
        policy = random_policy(self.chance)
        try:
            async with (
                self.backend.procs({"gpus": 1}, name="others") as others,
                self.backend.procs(SHAPE, supervision=policy, grace=2.0) as procs,
            ):
                actors = await procs.spawn("actors", Numbered)
                away = await others.spawn("away", Numbered)
                async with reading(procs) as log, reading(actors) as actor_log:
                    await self.trouble(procs, actors, away)
                    await self.check_healed(actors, policy)
                check_log(log)
                check_log(actor_log)
        except MeshErrorGroup as group:
            # An actor's own failure, or too many of them, is all that may fail the block.
            kinds = {type(leaf) for leaf in trimesh.leaves(group)}
            if RestartLimit in kinds:
                kinds.discard(ProcDied)  # who dies after that is not healed any more
            if isinstance(policy, Isolate) or not kinds <= {RestartLimit, KeyError}:
                raise
            self.count("block failed")

    async def trouble(self, procs: Any, actors: Any, away: Any) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(self.call_for_long, actors, away, number)
            for _ in range(self.chance.randrange(1, 7)):
                await trio.sleep(self.chance.choice([0.0, 0.01, 0.3, 3.0]))
                await self.harm(procs, actors)

    async def harm(self, procs: Any, actors: Any) -> None:
        rank = self.chance.randrange(4)
        what = self.chance.random()
        if what < 0.6:
            if procs._owned.members.members[rank].child is not None:
                self.backend.kill(procs, rank)
        elif what < 0.75:
            with trio.move_on_after(self.chance.choice([0.01, 100.0])):
                try:
                    await procs.replace([actors._view.info.whole.point(rank)])
                except* EXPECTED:
                    self.count("replaced in vain")
        else:
            with trio.move_on_after(1.0):
                await self.attempt(actors.flatten("all").slice(all=rank).start_failing.call_one, KeyError("background"))

    async def call_for_long(self, actors: Any, away: Any, number: int) -> None:
        chance = random.Random(f"caller {self.seed} {number}")
        for _ in range(12):
            await trio.sleep(chance.choice([0.0, 0.01, 0.1, 0.5]))
            view = actors.flatten("all").slice(all=chance.randrange(4))
            verb, target = chance.choice([("call_one", view), ("choose", actors), ("call", actors)])
            name = chance.choice(["note", "note", "hold_many"])
            with trio.move_on_after(chance.choice([0.1, 2.0, 30.0])):
                if chance.random() < 0.5:
                    await self.attempt(getattr(getattr(target, name), verb), "note")
                else:
                    await self.attempt(away.relay.call_one, target, name, verb, "note")

    async def attempt(self, function: Any, *args: Any) -> None:
        try:
            await function(*args)
        except Exception as error:  # noqa: BLE001 - judged below
            for leaf in trimesh.leaves(error):
                assert isinstance(leaf, EXPECTED), leaf
                self.count(type(leaf).__name__)
        else:
            self.count("value")

    def count(self, what: str) -> None:
        self.ended[what] = self.ended.get(what, 0) + 1

    async def check_healed(self, actors: Any, policy: Any) -> None:
        """After the storm everybody answers again, except under `Isolate`."""
        await trio.sleep(60.0)
        alive = actors.alive()
        if isinstance(policy, Restart):
            assert len(alive) == 4
        assert len((await alive.rank.call()).values()) == len(alive)


def check_log(log: Log) -> None:
    """Incarnations grow by one with each restart."""
    last: dict[int, int] = {}
    for event in log.events:
        assert isinstance(event, MemberEvent)
        rank = event.point.rank
        if isinstance(event, Restarted):
            assert event.incarnation > last[rank], log.names()
        else:
            assert event.incarnation >= last.get(rank, 0), log.names()
        last[rank] = event.incarnation


@only_sim
@pytest.mark.seeds(SEEDS)
async def test_supervised_mesh_weathers_random_trouble(backend: SimBackend, seed: int):
    """R01-R09, R11."""
    await weather(backend, seed)


@only_sim
@pytest.mark.stress
@pytest.mark.seeds(1000)
async def test_supervised_mesh_weathers_much_trouble(backend: SimBackend, seed: int):
    """The same for 1,000 seeds."""
    await weather(backend, seed)


async def weather(backend: SimBackend, seed: int) -> None:
    story = Story(backend, seed)
    with trio.fail_after(10_000):
        await story.run()
    assert story.ended
