"""Tensors on the hosts of a job: the same operations, collectives and training, and the loss of a host."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

import trimesh
from trimesh import Actor, HostLost, MeshErrorGroup, endpoint, leaves

torch = pytest.importorskip("torch", reason="torch is an extra")
pytest.importorskip("cryptography")

from trimesh import jobs  # noqa: E402 - after the skips
from trimesh._native import tls  # noqa: E402

pytestmark = [
    pytest.mark.real,
    pytest.mark.torch,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
]

TORCH = ("torch",)
LARGE = 300_000
"""Elements of a tensor that is lent, and read, rather than sent: where nothing can read it, it comes in a message."""


class Look(Actor):
    """What the tests ask of a process."""

    @endpoint
    async def agent(self) -> int:
        """Return the pid of the agent of this host."""
        return parent_of(os.getppid())


def _same(t: Any, *_: Any) -> Any:
    return t + 0


@trimesh.remote(propagate=_same)
def summed(t: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over a group as users of torch.distributed do."""
    import torch.distributed as dist

    dist.all_reduce(t, group=group)
    return t


@trimesh.remote(propagate=_same)
def wait_for_others(t: torch.Tensor, begun: str, group: Any) -> torch.Tensor:
    """Say that it has begun, then wait for ranks that do not come; on the others, for ever."""
    import signal
    from pathlib import Path

    import torch.distributed as dist

    rank = dist.get_rank(group)
    dist.barrier(group=group)
    Path(begun, str(rank)).touch()
    if rank >= dist.get_world_size(group) // 2:
        signal.pause()
    dist.all_reduce(t, group=group)
    return t


async def test_operations_collectives_moves_and_training_are_those_of_one_host() -> None:
    """H1: also where no process of one host maps memory of another one, so that large tensors go in messages."""
    with trio.fail_after(2 * HANG_SECONDS):
        async with (
            jobs.LocalJob(2, apart=True) as hosts,
            hosts.spawn_procs({"gpus": 2}, preload=TORCH) as procs,
        ):
            with procs.activate():
                rank = procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")
                ones = torch.ones(4)
                large = torch.arange(float(LARGE))
            assert [one.item() for one in (await trimesh.fetch(rank.reduce("hosts"))).values()] == [2, 4, 2, 4]
            assert (await trimesh.fetch_shard(rank.reduce(("hosts", "gpus")), hosts=1, gpus=0)).item() == 6
            total = summed(ones, procs.process_group(("hosts", "gpus")))
            assert (await trimesh.fetch_shard(total, hosts=0, gpus=1)).tolist() == [4.0] * 4

            torch.testing.assert_close(await trimesh.fetch_shard(large, hosts=1, gpus=1), torch.arange(float(LARGE)))
            moved = (large + rank).slice_mesh(hosts=0).to_mesh(procs.slice(hosts=1))
            there = await trimesh.fetch_shard(moved, gpus=1)
            torch.testing.assert_close(there, torch.arange(float(LARGE)) + 1)
            put = trimesh.replicate(torch.arange(float(LARGE)), procs).local()
            torch.testing.assert_close(await trimesh.fetch_shard(put * 2, hosts=1, gpus=0), there * 2 - 2)
            await train(procs)


async def train(procs: Any) -> None:
    """Take three steps of data-parallel training, beside plain torch on the inputs of all ranks."""

    def inputs(step: int, rank: Any) -> Any:
        return torch.linspace(-1, 1, 8 * 16).reshape(8, 16) * (rank + 1) + step / 10

    torch.manual_seed(3)
    plain = torch.nn.Linear(16, 4)
    first = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        (sum(plain(inputs(step, rank)).square().mean() for rank in range(4)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    with procs.activate():
        model = torch.nn.Linear(16, 4)
        with torch.no_grad():
            for name, value in first.items():
                getattr(model, name).copy_(trimesh.replicate(value, procs).local())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        number = procs.rank_tensor("hosts") * 2 + procs.rank_tensor("gpus")
        for step in range(3):
            model(inputs(step, number)).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.reduce(("hosts", "gpus"), "avg")
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        for one in (await trimesh.fetch(getattr(model, name).detach())).values():
            torch.testing.assert_close(one, value)


async def test_loss_of_a_host_frees_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    """H4: a collective under way ends with the host, as one `HostLost`; the other host goes on."""
    with trio.fail_after(2 * HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            with pytest.raises(MeshErrorGroup) as caught:
                async with (
                    hosts.spawn_procs({"gpus": 1}, preload=TORCH) as procs,
                    procs.spawn("look", Look) as look,
                ):
                    agents = list(await look.agent.call())
                    with procs.activate():
                        never = wait_for_others(torch.ones(4), str(tmp_path), procs.process_group("hosts"))
                    while len(os.listdir(tmp_path)) < 2:  # noqa: ASYNC110 - other processes set no event
                        await trio.sleep(0.01)
                    os.kill(agents[1], signal.SIGKILL)
                    await trimesh.fetch(never)
            (lost,) = [one for one in leaves(caught.value) if isinstance(one, HostLost)]
            assert lost.reason == "agent exit"
            async with hosts.slice(hosts=0).spawn_procs({"gpus": 2}, preload=TORCH) as procs:
                with procs.activate():
                    ones = torch.ones(2)
                assert (await trimesh.fetch_shard(ones.reduce("gpus"), gpus=0)).tolist() == [2.0, 2.0]
