"""Process groups of elastic meshes: one for each set of members, and nobody waits in one that has ended."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Isolate, Restart, endpoint
from trimesh.service.groups import ElasticGroups, GroupEnded, open_groups
from trimesh.testing import simulate

both = pytest.mark.mesh_backend("sim", "proc")


class Member(Actor):
    """Meets the others in groups."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[dict[str, int]], int]] = []
        self.ended: list[str] = []

    @endpoint
    async def meet(self, groups: ElasticGroups, size: int) -> int:
        """Join, until there is a group of so many; return its epoch."""
        while True:
            async with groups.joined() as group:
                self.seen.append((group.epoch, group.places, group.rank))
                if group.size == size:
                    return group.epoch
                await group.wait_ended()
                with pytest.raises(GroupEnded) as caught:
                    group.check()
                assert caught.value.epoch == group.epoch
                self.ended.append(str(caught.value))

    @endpoint(group="looks")
    def looks(self) -> tuple[list[Any], list[str]]:
        return self.seen, self.ended

    @endpoint
    async def fail_in(self, groups: ElasticGroups) -> None:
        async with groups.joined():
            raise LookupError("of one member")

    @endpoint
    async def wait_in(self, groups: ElasticGroups) -> str:
        over = trio.Event()
        async with groups.joined() as group:
            group.on_end(over.set)
            await over.wait()
            try:
                group.check()
            except GroupEnded as error:
                return str(error)
        return ""


async def until(found: Any) -> None:
    with trio.fail_after(HANG_SECONDS):
        while not await found():  # noqa: ASYNC110 - of another process
            await trio.sleep(0.01)


@both
@simulate(seeds=10, per_host={"dp": 3}, supervision=Isolate())
async def test_each_set_of_members_has_a_group_of_its_own(mesh, faults):
    """Y11: a death and a growth end the group of their epoch, and its members meet those that are there then."""
    members = await mesh.spawn("members", Member)
    async with open_groups(mesh, backend=None) as groups, trio.open_nursery() as nursery:
        epochs: dict[int, int] = {}

        async def meet(one: Any, rank: int) -> None:
            try:
                epochs[rank] = await one.meet.call_one(groups, 4)
            except trimesh.ProcDied:
                epochs[rank] = -1

        for rank in range(3):
            nursery.start_soon(meet, members.slice(dp=rank), rank)

        async def have_met(count: int, *ranks: int) -> bool:
            return all([len((await members.slice(dp=rank).looks.call_one())[0]) == count for rank in ranks])

        await until(lambda: have_met(1, 0, 1, 2))
        faults.kill(mesh.slice(dp=1))

        await until(lambda: have_met(2, 0, 2))
        seen, ended = await members.slice(dp=2).looks.call_one()
        assert [len(places) for _, places, _ in seen] == [3, 2]
        assert [rank for _, _, rank in seen] == [2, 1]
        assert "[dp=1] has" in ended[0]
        assert f"epoch {seen[0][0]} of " in ended[0]
        await mesh.resize(dp=5)
        now = await trimesh.current_view(members)
        for rank in (3, 4):
            nursery.start_soon(meet, now.slice(dp=rank), rank)
    assert epochs[1] == -1
    assert len({epochs[rank] for rank in (0, 2, 3, 4)}) == 1


@pytest.mark.daily("proc")
@both
@simulate(seeds=10, per_host={"dp": 3}, supervision=Restart("one_for_one"))
async def test_a_member_that_fails_ends_its_group_for_all(mesh):
    """Y11."""
    members = await mesh.spawn("members", Member)
    async with open_groups(mesh, backend=None) as groups, trio.open_nursery() as nursery:
        found: list[str] = []

        async def wait(rank: int) -> None:
            found.append(await members.slice(dp=rank).wait_in.call_one(groups))

        nursery.start_soon(wait, 0)
        nursery.start_soon(wait, 1)
        with pytest.raises(LookupError):
            await members.slice(dp=2).fail_in.call_one(groups)
    assert len(found) == 2
    assert all("[dp=2] has died, or has left it" in one for one in found)


class Reducer(Actor):
    """Sums over the members, in a loop."""

    def __init__(self) -> None:
        self.sums: list[tuple[int, float]] = []
        self.errors: list[str] = []
        self.has_entered = trio.Event()

    @endpoint
    async def train(self, groups: ElasticGroups, size: int, does_hang: bool = False) -> tuple[int, float]:
        """Sum in each group, until it has so many members; return their epoch and sum."""
        import torch
        import torch.distributed as dist

        def step() -> float:
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.all_reduce(total, group=group.device_mesh("members").get_group())
            return float(total)

        while True:
            try:
                async with groups.joined() as group:
                    self.has_entered.set()
                    if does_hang:
                        await trio.sleep_forever()  # the others wait for it in a collective
                    total = await group.run(step)
                    self.sums.append((group.size, total))
                    if group.size == size:
                        return group.epoch, total
                    if group.rank > 0:
                        await group.wait_ended()
                        continue
                    await group.run(dist.barrier)
            except GroupEnded as error:
                self.errors.append(f"{error.epoch} {error}")

    @endpoint(group="looks")
    async def wait_entered(self) -> None:
        await self.has_entered.wait()

    @endpoint(group="looks")
    def looks(self) -> tuple[list[Any], list[str]]:
        return self.sums, self.errors


@pytest.mark.torch
@pytest.mark.mesh_backend("proc")
@simulate(per_host={"dp": 3}, supervision=Isolate())
async def test_nobody_hangs_in_a_collective_of_an_epoch_that_is_over(mesh, faults):
    """Y11: a lost member, then a growth, free those that wait in gloo; the members of the new view meet."""
    members = await mesh.spawn("members", Reducer)
    async with open_groups(mesh) as groups, trio.open_nursery() as nursery:
        found: list[Any] = []

        async def train(one: Any, *args: Any) -> None:
            try:
                found.append(await one.train.call_one(groups, 3, *args))
            except trimesh.ProcDied:
                pass

        async def has_sums(rank: int, count: int) -> bool:
            return len((await members.slice(dp=rank).looks.call_one())[0]) >= count

        nursery.start_soon(train, members.slice(dp=0))
        nursery.start_soon(train, members.slice(dp=1), True)
        nursery.start_soon(train, members.slice(dp=2))
        with trio.fail_after(HANG_SECONDS):
            await members.slice(dp=1).wait_entered.call_one()
        faults.kill(mesh.slice(dp=1))
        await until(lambda: has_sums(0, 1))
        await mesh.resize(dp=4)
        now = await trimesh.current_view(members)
        nursery.start_soon(train, now.slice(dp=3))
    assert len(found) == 3
    assert len({epoch for epoch, _ in found}) == 1
    assert {total for _, total in found} == {9.0}
    sums, errors = await members.slice(dp=0).looks.call_one()
    assert sums == [(2, 4.0), (3, 9.0)]
    assert errors[0].startswith("1 the process group of epoch 1 of ")
    assert "[dp=3] has joined" in errors[1]


@simulate(seeds=1, per_host={"gpus": 1})
async def test_groups_of_other_backends_are_made_by_their_users(mesh):
    """NCCL needs a device for each member."""
    with pytest.raises(ValueError, match=r"None for groups that you make yourself.*got 'nccl'"):
        open_groups(mesh, backend="nccl")
