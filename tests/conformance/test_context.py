"""What `context()` says of the message that runs, of its sender, and of the meshes around (rules M5, M8)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend
from tests.conformance.supervised import reading, restart

from trimesh import Actor, ActorMesh, Died, ProcMesh, Restarted, context, endpoint, this_proc


class Speaker(Actor):
    """Says where it is, and asks others."""

    def __init__(self, others: Any = None) -> None:
        self.others = others
        self.ranks = list[int]()
        assert context().actors.name  # known while it is made

    @endpoint(concurrency=4)
    async def place(self) -> tuple[int, dict[str, int], list[int], dict[str, int]]:
        seen = context().message_rank
        return seen.rank, dict(seen), list(seen.extent.sizes), dict(context().point)

    @endpoint
    async def rank_for(self, item: str) -> tuple[str, int]:
        return item, context().message_rank.rank

    @endpoint
    async def note_rank(self) -> None:
        self.ranks.append(context().message_rank.rank)

    @endpoint
    async def noted(self) -> list[int]:
        return self.ranks

    @endpoint(concurrency=4)
    async def caller(self) -> tuple[Any, ...] | None:
        await trio.lowlevel.checkpoint()
        found = context().caller
        return None if found is None else (found.mesh, found.actor, found.endpoint, found.point, found.incarnation)

    @endpoint
    async def ask(self) -> Any:
        return (await self.others.caller.call()).item() if len(self.others) == 1 else None

    @endpoint
    async def ask_from_a_task(self) -> Any:
        found: list[Any] = []

        async def ask() -> None:
            found.append(await self.others.caller.choose())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
        return found[0]

    @endpoint
    async def relay(self) -> list[int]:
        """Call the other members of the own mesh."""
        here = context(self)
        others = here.actors.exclude([here.point])
        return [point["gpus"] for _, _, _, point in (await others.place.call()).values()]

    @endpoint
    async def factorial(self, number: int) -> int:
        """Recursion: each step on the member after this one."""
        if number == 0:
            return 1
        here = context(self)
        after = here.actors.slice(gpus=(here.point["gpus"] + 1) % here.point.size("gpus"))
        return number * await after.factorial.call_one(number - 1)

    @endpoint
    async def meshes(self) -> tuple[str, str, list[int], bool]:
        here = context()
        assert here.actors is context().actors
        return here.actors.name, here.procs.name, [*here.procs.extent.sizes], isinstance(here.actors, ActorMesh)

    @endpoint
    async def own_mesh(self) -> Speaker:
        return context(self).actors

    @endpoint
    async def own_procs(self) -> ProcMesh:
        return context().procs


async def test_message_rank_is_the_point_in_the_view_that_was_called(backend: Backend):
    """M5: slices, reshaped views, sparse ones; the mesh as spawned; `choose`."""
    async with backend.procs({"hosts": 2, "gpus": 3}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        for view in (
            speakers,
            speakers.slice(hosts=1),
            speakers.slice(gpus=slice(1, 3)),
            speakers.slice(hosts=1, gpus=2),
            speakers.slice(gpus=slice(0, 3, 2)).flatten("ranks"),
            speakers.rename(gpus="tp").split(tp=("a", "b"), a=3),
            speakers.exclude([{"hosts": 0, "gpus": 1}]),
            speakers.slice(hosts=1).exclude([{"gpus": 0}]),
        ):
            for point, (rank, seen, sizes, base) in (await view.place.call()).items():
                assert (rank, seen, sizes) == (point.rank, dict(point), [*point.extent.sizes])
                assert base["hosts"] * 3 + base["gpus"] == point.base_rank
        rank, seen, _, base = await speakers.slice(hosts=1).place.choose()
        assert (rank, seen) == (0, {"gpus": 0})
        assert base == {"hosts": 1, "gpus": 0}


async def test_streams_maps_and_broadcasts_say_it_too(backend: Backend):
    """M5."""
    async with backend.procs({"gpus": 4}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        view = speakers.slice(gpus=slice(2, 4))
        async with view.place.stream() as results:
            assert sorted([seen[0] async for _, seen in results]) == [0, 1]
        async with view.rank_for.map("ab") as results:
            assert {value async for _, value in results} == {("a", 0), ("b", 1)}
        await view.note_rank.broadcast()
        assert [*(await view.noted.call()).values()] == [[0], [1]]


async def test_caller_is_the_actor_that_has_sent_the_message(backend: Backend):
    """M8: its point as spawned, from tasks of the endpoint, too; a plain program is none."""
    async with backend.procs({"gpus": 2}) as procs:
        one = await procs.slice(gpus=0).spawn("one", Speaker)
        many = await procs.spawn("many", Speaker, one)
        assert await one.caller.call_one() is None
        asked = await many.ask.call()
        assert [*asked.values()] == [("many", "Speaker", "ask", {"gpus": rank}, 0) for rank in range(2)]
        asked_from_tasks = await many.ask_from_a_task.call()
        assert [found[2:4] for found in asked_from_tasks.values()] == [
            ("ask_from_a_task", {"gpus": rank}) for rank in range(2)
        ]


async def test_actors_call_other_members_of_their_own_mesh(backend: Backend):
    """M8: siblings, and recursion over the mesh."""
    async with backend.procs({"gpus": 4}) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        assert await speakers.slice(gpus=1).relay.call_one() == [0, 2, 3]
        assert await speakers.slice(gpus=0).factorial.call_one(3) == 6
        for own in (await speakers.meshes.call()).values():
            assert own == ("speakers", "procs", [4], True)
        handle = await speakers.slice(gpus=2).own_mesh.call_one()
        assert len(await handle.place.call()) == 4
        procs_there = await speakers.slice(gpus=2).own_procs.call_one()
        assert (procs_there.name, dict(procs_there.extent)) == ("procs", {"gpus": 4})


async def test_own_mesh_is_that_of_the_next_incarnation_after_a_restart(backend: Backend):
    """M8, R08: a member that was restarted is called at its new process, by those that were not, too."""
    async with backend.procs({"gpus": 3}, supervision=restart()) as procs:
        speakers = await procs.spawn("speakers", Speaker)
        async with reading(procs) as log:
            backend.kill(procs, 1)
            await log.wait(Died)
            await log.wait(Restarted)
        assert await speakers.slice(gpus=1).relay.call_one() == [0, 2]
        assert await speakers.slice(gpus=0).relay.call_one() == [1, 2]


async def test_actor_of_this_process_is_on_this_process(backend: Backend):
    """M8, M7."""
    async with backend.procs({"gpus": 1}), this_proc().spawn("here", Speaker) as here:
        name, procs_name, sizes, _ = await here.meshes.call_one()
        assert (name, procs_name, sizes) == ("here", "this_proc", [])


async def test_context_of_another_actor_is_refused(backend: Backend):
    """M8: `context(actor)` is for the one that runs."""

    async with backend.procs({"gpus": 1}):
        with pytest.raises(RuntimeError, match="must be called inside an endpoint"):
            context()
        async with this_proc().spawn("asking", Asking) as asking:
            await asking.refuse.call_one()


class Asking(Actor):
    """Asks for what it is not."""

    @endpoint
    def refuse(self) -> None:
        with pytest.raises(ValueError, match=r"write context\(self\)"):
            context(Asking())
