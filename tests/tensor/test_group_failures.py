"""A rank that cannot take part in a collective frees the others, and the next collective works (N3)."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, CollectiveFailed, Isolate, MeshErrorGroup, ProcDied, endpoint, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]

GPUS = 3

PRELOAD = ("torch", "torch.distributed.tensor")
"""For global tensors: four processes on two cores would import it for ten seconds."""


def _sockets() -> int:
    tables = [Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
    network = {f"socket:[{line.split()[9]}]" for table in tables for line in table}
    return sum(link.is_symlink() and str(link.readlink()) in network for link in Path("/proc/self/fd").iterdir())


class Gate(Actor):
    """Holds its rank back in an operation until it is told to let it go on."""

    def __init__(self) -> None:
        from trimesh.tensor.kernels.table import KERNELS
        from trimesh.tensor.rank.kernel import Kernel

        self._opened = opened = threading.Event()
        self._reached = reached = threading.Event()

        def gate(rank: Any, team: Any, value: Any, held: int) -> Any:
            if rank.number == held:
                reached.set()
                opened.wait()
                opened.clear()
            return value + 0

        KERNELS.by_name["test_gate"] = Kernel("test_gate", gate)

    @endpoint(concurrency=4)
    async def reached(self) -> None:
        """Return when the rank is at the gate."""
        await trio.to_thread.run_sync(self._reached.wait)
        self._reached.clear()

    @endpoint
    async def open(self) -> None:
        """Let the rank go on."""
        self._opened.set()

    @endpoint
    async def sockets(self) -> int:
        """Return how many sockets of the network its process has."""
        return _sockets()

    @endpoint
    async def die(self) -> None:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)


def _gated(tensor: Any, held: int) -> Any:
    from trimesh.tensor.controller.team import call_kernel

    [made] = call_kernel(tensor._held.team, "test_gate", tensor, held, outputs=[tensor._meta])
    return made


def _poisoned_on(procs: Any, failing: int) -> Any:
    """Return a tensor that one rank could not compute."""
    rank = procs.rank_tensor("gpus")
    with procs.activate():
        return torch.arange(4.0).index_select(0, ((rank == failing) * 9).reshape(1))


@pytest.mark.daily
async def test_poisoned_input_fails_the_others_and_nothing_else() -> None:
    """N3."""
    async with this_host().spawn_procs({"gpus": GPUS}, preload=("torch",)) as procs:
        rank = procs.rank_tensor("gpus")
        for failing in range(GPUS):
            bad = _poisoned_on(procs, failing)
            total = bad.reduce("gpus")
            later = (rank + 1).reduce("gpus")
            dependent = total + later
            with pytest.raises(MeshErrorGroup) as caught:
                await trimesh.fetch(dependent)
            first, *others = caught.value.exceptions
            assert isinstance(first, IndexError)
            assert trimesh.origin(first).point == {"gpus": failing}
            assert {trimesh.origin(one).point["gpus"] for one in others} == {0, 1, 2} - {failing}
            for other in others:
                assert isinstance(other, CollectiveFailed)
                assert f"rank {failing}" in str(other)
                assert isinstance(other.__cause__, IndexError)
                assert "test_group_failures.py" in "".join(other.__notes__)
            assert later.item() == 6  # issued before anybody knew of the failure
            assert (rank + 2).reduce("gpus", "max").item() == 4
            for _ in range(3):  # again and again, without anything good between
                bad.reduce("gpus", "stack")
            assert rank.reduce("gpus").item() == 3


async def test_failure_in_one_group_leaves_the_other_groups_alone() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            number = procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")
            bad = torch.arange(4).index_select(0, ((number == 3) * 9).reshape(1))
        along = bad.reduce("gpus")
        assert (await trimesh.fetch_shard(along, hosts=0, gpus=1)).item() == 0
        for gpus in range(2):
            with pytest.raises(MeshErrorGroup):
                await trimesh.fetch_shard(along, hosts=1, gpus=gpus)
        both = along.reduce("hosts")  # of which everybody lacks a part now
        for place in [{"hosts": h, "gpus": g} for h in range(2) for g in range(2)]:
            with pytest.raises(MeshErrorGroup) as caught:
                await trimesh.fetch_shard(both, place)
            cause: BaseException | None = caught.value.exceptions[0]
            while isinstance(cause, CollectiveFailed):
                cause = cause.__cause__
            assert isinstance(cause, IndexError)
        assert number.reduce(("hosts", "gpus")).item() == 6
        assert (await trimesh.fetch_shard(number.reduce("hosts"), hosts=0, gpus=1)).item() == 4


async def test_in_place_reduction_of_something_poisoned() -> None:
    async with this_host().spawn_procs({"gpus": GPUS}, preload=("torch",)) as procs:
        bad = _poisoned_on(procs, 1)
        with procs.activate():
            mine = bad * 1
        mine.reduce_("gpus")
        for gpus, kind in enumerate((CollectiveFailed, IndexError, CollectiveFailed)):
            with pytest.raises(MeshErrorGroup) as caught:
                await trimesh.fetch_shard(mine, gpus=gpus)
            assert isinstance(caught.value.exceptions[0], kind)


@pytest.mark.daily
async def test_process_answers_while_a_collective_waits() -> None:
    """N3: it runs beside the loop."""
    async with this_host().spawn_procs({"gpus": GPUS}, preload=("torch",)) as procs:
        gates = await procs.spawn("gates", Gate)
        total = _gated(procs.rank_tensor("gpus"), 0).reduce("gpus")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trimesh.fetch, total)
                await gates.slice(gpus=0).reached.call_one()
                await gates.slice(gpus=1).open.call_one()  # a rank that waits in the collective
                scope.cancel()
        assert scope.cancelled_caught
        await gates.slice(gpus=0).open.call_one()
        assert total.item() == 3


@pytest.mark.parametrize("dying", [0, 2])  # the first rank has the store
@pytest.mark.parametrize("is_connected", [False, True])
async def test_death_in_a_collective_frees_the_others(dying: int, *, is_connected: bool) -> None:
    async with this_host().spawn_procs({"gpus": GPUS}, preload=("torch",), supervision=Isolate()) as procs:
        gates = await procs.spawn("gates", Gate)
        rank = procs.rank_tensor("gpus")
        if is_connected:
            assert rank.reduce("gpus").item() == 3
            assert procs.flatten("all").rank_tensor("all").reduce("all").item() == 3  # idle when the process dies
            assert min((await gates.sockets.call()).values()) > 0
        total = _gated(rank, dying).reduce("gpus")
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trimesh.fetch, total)
                await gates.slice(gpus=dying).reached.call_one()
                await gates.slice(gpus=dying).die.broadcast()
        [death] = trimesh.leaves(caught.value)
        assert isinstance(death, ProcDied)
        assert trimesh.origin(death).point == {"gpus": dying}
        assert isinstance(death.__context__, CollectiveFailed)
        left = procs.exclude([{"gpus": dying}])  # their threads wait for nothing any more
        await trimesh.fetch(left.rank_tensor("gpus"))
        assert set((await gates.exclude([{"gpus": dying}]).sockets.call()).values()) == {0}
        assert left.rank_tensor("gpus").reduce("gpus").item() == 3 - dying


async def test_global_tensors_break_and_mend() -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=PRELOAD) as procs:
        rows = trimesh.distribute(torch.arange(16.0).reshape(4, 4), procs, ["hosts", "gpus"])
        number = procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")
        for failing in (0, 3):
            with procs.activate():
                mine = torch.arange(4.0).index_select(0, (number == failing).reshape(1) * 9).reshape(1, 1)
            bad = mine.to_global(["hosts", "gpus"])
            quiet = bad * 2  # nobody waits for anybody in it
            unharmed = (rows + 1).sum()
            broken = bad @ bad
            assert unharmed.item() == 136
            for tensor in (broken, quiet):
                with pytest.raises(MeshErrorGroup) as caught:
                    await trimesh.fetch(tensor)
                assert isinstance(caught.value.exceptions[0], IndexError)
            torch.testing.assert_close(
                await trimesh.fetch(rows @ rows.T),
                torch.arange(16.0).reshape(4, 4) @ torch.arange(16.0).reshape(4, 4).T,
            )
            assert number.reduce(["hosts", "gpus"]).item() == 6


async def test_gradients_are_reduced_together_but_fail_one_by_one() -> None:
    async with this_host().spawn_procs({"gpus": GPUS}, preload=PRELOAD) as procs:
        shares = torch.arange(18.0).reshape(GPUS, 6)
        weights = [trimesh.distribute(torch.zeros(6), procs, [None]).requires_grad_() for _ in range(4)]
        optimizer = torch.optim.SGD(weights, lr=1.0)  # one operation a parameter, on the host
        for failing in (-1, 0, 2):
            for weight in weights:
                weight.grad = trimesh.distribute(shares, procs, ["gpus", None]).sum(0)
            if failing >= 0:
                with procs.activate():
                    place = (procs.rank_tensor("gpus") == failing).reshape(1) * 9
                    share = torch.arange(6.0).reshape(1, 6).index_select(0, place)
                weights[1].grad = share.to_global(["gpus", None]).sum(0)
            optimizer.step()
            with pytest.raises(MeshErrorGroup) if failing >= 0 else nullcontext():
                await trimesh.fetch(weights[1])
            after = await trimesh.tensor.traffic(procs)
            if failing < 0:
                assert {one.name: one.count for one in after} == {"allreduce_coalesced": 1}
            for weight in (weights[0], weights[2], weights[3]):
                torch.testing.assert_close(await trimesh.fetch(weight.detach()), -shares.sum(0))
                weight.data.zero_()


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_hangs_and_nothing_else_fails(seed: int) -> None:
    """Reductions and global operations in any order, of which some fail on one rank."""
    drawn = random.Random(seed)
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=PRELOAD, output="discard") as procs:
        number = procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")
        whole = trimesh.distribute(torch.arange(16.0).reshape(4, 4), procs, ["hosts", "gpus"])
        with procs.activate():
            table = torch.arange(8.0)
        for _ in range(30):
            issued: list[tuple[Any, bool]] = []
            for _ in range(drawn.randint(1, 8)):
                failing = drawn.randint(0, 5)
                is_good = failing > 3
                one = table.index_select(0, torch.eq(number, failing).reshape(1) * 9)
                issued += drawn.choice([
                    [(one.reduce(drawn.choice(["hosts", "gpus", ("hosts", "gpus")])), is_good)],
                    [((table + number).reduce("gpus", drawn.choice(["max", "stack"])), True), (one, is_good)],
                    [(one.reshape(1, 1).to_global(["hosts", "gpus"]).sum(), is_good), (whole @ whole.T, True)],
                    [(one + 1, is_good), ((whole + 1).sum(), True)],
                ])  # fmt: skip
            drawn.shuffle(issued)
            for tensor, is_good in issued:
                with trio.fail_after(30):
                    if is_good:
                        await trimesh.fetch(tensor)
                    else:
                        with pytest.raises(MeshErrorGroup) as caught:
                            await trimesh.fetch(tensor)
                        assert isinstance(caught.value.exceptions[0], IndexError)
