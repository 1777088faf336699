"""Random changes of size among kills, replacements, spawns and calls: each call ends once, and all agree who is there.

A failing seed is run alone by its number in brackets.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from tests.conformance.meshes import SimBackend, only_sim
from tests.conformance.test_actor_restarts import Numbered

import trimesh
from trimesh import (
    ActorFailed,
    Backoff,
    Isolate,
    MembershipView,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    RemoteCancelled,
    Restart,
    RestartLimit,
)

SEEDS = 12
EXPECTED = (ProcDied, MeshStopped, ActorFailed, RemoteCancelled)
"""What a call may raise when members come and go; `MembershipChanged` is a `MeshStopped`."""


def random_policy(chance: random.Random) -> Any:
    if chance.random() < 0.25:
        return Isolate()
    return Restart(
        chance.choice(["one_for_one", "one_for_all", "rest_for_one"]),
        along=chance.choice([None, "replica", "gpus"]),
        intensity=1000,
        period=1000.0,
        backoff=Backoff(chance.choice([0.0, 0.05, 1.0])),
        on=chance.choice([(ProcDied,), (ProcDied, ActorFailed)]),
    )


class Story:
    """One run: what is done to the mesh, and what its callers and readers come to."""

    def __init__(self, backend: SimBackend, seed: int) -> None:
        self.backend = backend
        self.chance = random.Random(f"elastic {seed}")
        self.seed = seed
        self.policy = random_policy(self.chance)
        self.made = self.over = 0
        self.ended: dict[str, int] = {}
        self.known: set[int] = set()
        self.last: dict[int, int] = {}
        self.epoch = -1

    async def run(self) -> None:
        shape = {"replica": self.chance.randrange(1, 4), "gpus": self.chance.randrange(1, 3)}
        async with (
            self.backend.procs({"gpus": 1}, name="others") as others,
            self.backend.procs(shape, supervision=self.policy, grace=2.0) as procs,
            procs.membership() as views,
        ):
            actors: Any = await procs.spawn("actors", Numbered)
            leads: Any = await procs.slice(gpus=0).spawn("leads", Numbered)
            away = await others.spawn("away", Numbered)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.read, views)
                async with trio.open_nursery() as storm:
                    for number in range(6):
                        storm.start_soon(self.call_for_long, actors, away, number)
                    storm.start_soon(self.change, procs, 1)
                    storm.start_soon(self.change, procs, 2)
                    storm.start_soon(self.harm, procs, actors)
                await trio.sleep(100.0)
                await self.check(procs, [actors, leads])
                nursery.cancel_scope.cancel()
        assert self.over == self.made

    async def read(self, views: Any) -> None:
        """Add up what the views say."""
        async for view in views:
            assert isinstance(view, MembershipView)
            assert view.epoch > self.epoch
            self.epoch = view.epoch
            for one in view.left:
                self.known.discard(one.point.rank)
                assert one.incarnation >= self.last.get(one.point.rank, 0)
                self.last[one.point.rank] = one.incarnation + 1
            for point in view.joined:
                assert point.rank not in self.known
                self.known.add(point.rank)
            assert sorted(self.known) == [point.rank for point in view.members]

    async def change(self, procs: Any, number: int) -> None:
        chance = random.Random(f"change {self.seed} {number}")
        for _ in range(chance.randrange(1, 6)):
            await trio.sleep(chance.choice([0.0, 0.01, 0.3, 3.0]))
            with trio.move_on_after(chance.choice([0.005, 0.05, 100.0, 100.0])):
                try:
                    if chance.random() < 0.8:
                        now = await procs.resize(replica=chance.randrange(1, 6))
                        self.count(f"size {now.size('replica')}")
                    else:
                        async with (await trimesh.current_view(procs)).spawn("brief", Numbered) as brief:
                            await brief.rank.call_settled()
                except* EXPECTED:
                    self.count("change in vain")

    async def harm(self, procs: Any, actors: Any) -> None:
        for _ in range(self.chance.randrange(0, 5)):
            await trio.sleep(self.chance.choice([0.0, 0.01, 0.3, 3.0]))
            members = procs._owned.members.members
            rank = self.chance.randrange(len(members))
            what = self.chance.random()
            if what < 0.7:
                if members[rank].child is not None:
                    self.backend.kill(procs, rank)
            elif what < 0.85:
                now = await trimesh.current_view(procs)
                with trio.move_on_after(self.chance.choice([0.01, 100.0])):
                    try:
                        await procs.replace([self.chance.choice(list(now.points()))])
                    except* (*EXPECTED, trimesh.ShapeError):
                        self.count("replaced in vain")
            else:
                view = (await trimesh.current_view(actors)).flatten("all")
                with trio.move_on_after(1.0):
                    one = view.slice(all=self.chance.randrange(len(view)))
                    await self.attempt(one.start_failing.call_one, KeyError("background"))

    async def call_for_long(self, actors: Any, away: Any, number: int) -> None:
        chance = random.Random(f"caller {self.seed} {number}")
        views = [actors]
        for _ in range(12):
            await trio.sleep(chance.choice([0.0, 0.01, 0.1, 0.5]))
            views.append(await trimesh.current_view(actors))
            some = chance.choice(views)  # old ones, too
            one = some.flatten("all").slice(all=chance.randrange(len(some)))
            verb, target = chance.choice([("call_one", one), ("choose", some), ("call", some)])
            name = chance.choice(["note", "note", "hold_many"])
            with trio.move_on_after(chance.choice([0.1, 2.0, 30.0])):
                if chance.random() < 0.5:
                    await self.attempt(getattr(getattr(target, name), verb), "note")
                else:
                    await self.attempt(away.relay.call_one, target, name, verb, "note")

    async def attempt(self, function: Any, *args: Any) -> None:
        self.made += 1
        try:
            await function(*args)
        except Exception as error:  # noqa: BLE001 - judged below
            for leaf in trimesh.leaves(error):
                assert isinstance(leaf, EXPECTED), leaf
            self.count(type(error).__name__)
        except trio.Cancelled:
            self.count("cancelled")
            raise
        else:
            self.count("value")
        finally:
            self.over += 1

    def count(self, what: str) -> None:
        self.ended[what] = self.ended.get(what, 0) + 1

    async def check(self, procs: Any, meshes: list[Any]) -> None:
        """After the storm everyone who is in the mesh answers, and the reader knows who that is."""
        now = await trimesh.current_view(procs)
        living = list(now.alive()._region().ranks())
        assert sorted(self.known) == living
        if isinstance(self.policy, Restart):
            assert len(living) == len(now)
        children = self.backend.world.children.values()
        members = procs._owned.members.members
        owned = {member.pid for member in members if member.child is not None}
        assert sorted(child.pid for child in children if child.report is None and child.pid in owned) == sorted(
            members[rank].pid for rank in living
        ), "a process that is not in the mesh is left"
        for mesh in meshes:
            view = await trimesh.current_view(mesh)
            assert view.size("replica") == now.size("replica")
            alive = view.alive()
            answers = await alive.rank.call()
            assert list(answers.values()) == list(alive._region().ranks())
            if isinstance(self.policy, Restart):  # else an actor that has failed is gone, and its process is not
                assert len(alive) == len(view)


@only_sim
@pytest.mark.seeds(SEEDS)
async def test_elastic_mesh_weathers_random_changes(backend: SimBackend, seed: int):
    """P6, P7, R01-R09."""
    await weather(backend, seed)


@only_sim
@pytest.mark.stress
@pytest.mark.seeds(1000)
async def test_elastic_mesh_weathers_many_changes(backend: SimBackend, seed: int):
    """The same for 1,000 seeds."""
    await weather(backend, seed)


async def weather(backend: SimBackend, seed: int) -> None:
    story = Story(backend, seed)
    with trio.fail_after(10_000):
        try:
            await story.run()
        except MeshErrorGroup as group:
            # An actor that fails in the background fails the block when its policy does not name that.
            kinds = {type(leaf) for leaf in trimesh.leaves(group)}
            if isinstance(story.policy, Isolate) or not kinds <= {RestartLimit, KeyError}:
                raise
    assert story.ended
