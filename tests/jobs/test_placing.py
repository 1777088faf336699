"""Placements on hosts of a job and on this host, with GPUs of a stand-in for NVML."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime import fake_nvml
from tests.runtime.processes import parent_of, wait_gone

import trimesh
import trimesh.aio
import trimesh.blocking as tb
from trimesh import (
    Actor,
    Backoff,
    HostLost,
    Isolate,
    MeshErrorGroup,
    Need,
    ProcDied,
    Restart,
    ShapeError,
    SpawnError,
    endpoint,
    leaves,
    this_host,
)

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

HEALING = Restart("one_for_one", backoff=Backoff(0.001, cap=0.01), intensity=20)

Seen = tuple[str | None, list[int], list[str]]


class Worker(Actor):
    """Says what it has."""

    @endpoint
    async def see(self) -> Seen:
        """Return the visible devices, the CPUs, and the GPUs of its share."""
        share = trimesh.context().share
        assert share is not None
        return os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0)), list(share.gpus)

    @endpoint
    async def ranks(self) -> tuple[str, ...]:
        """Return what torchrun would set."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return tuple(os.environ[name] for name in names)

    @endpoint(thread=True)
    def see_in_a_thread(self) -> list[str]:
        """Return the GPUs of its share."""
        share = trimesh.context(self).share
        return [] if share is None else list(share.gpus)

    @endpoint
    async def agent(self) -> int:
        """Return the process id of the agent of its host."""
        return parent_of(os.getppid())

    @endpoint
    async def place_more(self) -> list[str]:
        """Place a process in the share of this one; return its GPUs, and why a second one has no room."""
        async with this_host().place({"inner": Need(gpus=1)}) as placement:
            with pytest.raises(SpawnError) as caught:
                async with this_host().place({"more": Need(gpus=0.5)}):
                    pass
            async with (
                this_host().spawn_procs(on=placement["inner"]) as procs,
                procs.spawn("inner", Worker) as inner,
            ):
                return [*(await inner.see.call_one())[2], str(caught.value)]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each host four GPUs."""
    fake_nvml.install(monkeypatch, 4)


async def seen_by(procs: Any) -> list[Seen]:
    async with procs.spawn("workers", Worker) as workers:
        return list(await workers.see.call())


async def until(workers: Any) -> list[Seen]:
    """Return what all workers see once all of them answer."""
    while True:
        try:
            return list(await workers.see.call())
        except MeshErrorGroup as group:
            if not {type(one) for one in leaves(group)} <= {HostLost, ProcDied}:
                raise
            await trio.sleep(0.005)


@pytest.mark.daily
async def test_processes_get_the_gpus_that_are_reserved_for_them() -> None:
    """H28: all or nothing; each GPU once, shared ones by parts; what is short and by whom it is taken is said."""
    needs = {
        "trainers": Need(gpus=1, count=4, spread="hosts"),
        "generators": Need(gpus=0.5, count=8, beside="trainers"),
    }
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            first, second = ({gpu.uuid for gpu in one.gpus} for one in await hosts.resources())
            assert len(first) == len(second) == 4
            assert first.isdisjoint(second)
            async with hosts.place(needs) as placement:
                assert list(placement) == ["trainers", "generators"]
                async with (
                    hosts.spawn_procs({"hosts": 2, "gpus": 2}, on=placement["trainers"]) as trainers,
                    hosts.spawn_procs(on=placement["generators"], name="generators") as generators,
                ):
                    assert dict(generators.extent) == {"procs": 8}
                    trained, generated = await seen_by(trainers), await seen_by(generators)
                    alone, shared = [one for _, _, [one] in trained], [one for _, _, [one] in generated]
                    assert [one for one, _, _ in trained + generated] == alone + shared
                    assert len(set(alone)) == 4
                    assert set(alone[:2]) < first
                    assert set(alone[2:]) < second
                    assert set(shared) == (first | second) - set(alone)
                    assert all(shared.count(one) == 2 for one in shared)
                    assert set(shared[:4]) < first
                    taken = (await hosts.resources())[0].taken
                    assert [(one.name, one.mesh, one.gpus) for one in taken] == [
                        ("trainers", "procs", 2.0),
                        ("generators", "generators", 2.0),
                    ]
                    with pytest.raises(SpawnError) as caught:
                        await hosts.place({"more": Need(gpus=0.1)})
                    assert str(caught.value) == (
                        "2 hosts must have room for all processes of 'more', got 1 with 0.1 GPU each, of which 0 fit "
                        "by GPUs: lower its count, or add hosts. Free: 0 of 8 GPUs; taken by 'trainers' (4 GPUs), "
                        "'generators' (4 GPUs)"
                    )
            async with hosts.place({"all": Need(gpus=4, count=2)}) as placement:
                assert {one for share in placement["all"].shares for one in share.gpus} == first | second


@pytest.mark.daily
async def test_restarted_process_has_the_same_share() -> None:
    """H29: after a death, `replace`, and a resize; a replaced host gives the devices of the same number."""
    needs = {"workers": Need(gpus=1, cpus=1, count=3, spread="hosts")}
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(2) as hosts,
            hosts.place(needs) as placement,
            hosts.spawn_procs(on=placement["workers"], supervision=HEALING) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            before = list(await workers.see.call())
            assert len({gpu for _, _, [gpu] in before}) == 3
            assert [len(cpus) for _, cpus, _ in before] == [1, 1, 1]
            await procs.kill([{"procs": 1}])
            assert await until(workers) == before
            await procs.replace([{"procs": 0}])
            assert list(await workers.see.call()) == before
            smaller = await procs.resize(procs=1)
            assert len(smaller) == 1
            await procs.resize(procs=3)
            grown = await trimesh.current_view(workers)
            assert list(await grown.see.call()) == before
            with pytest.raises(ShapeError, match="3 reserved places"):
                await procs.resize(procs=4)

            lost = (await grown.agent.call())[2]
            os.kill(lost, signal.SIGKILL)
            await wait_gone([lost])
            after = await until(grown)
            new = parent_of_gpu(after[2])
            assert new != lost
            assert after[:2] == before[:2]
            assert after[2][2][0].split("-")[2:] == before[2][2][0].split("-")[2:]
            assert after[2][0] == after[2][2][0]
            assert after[2][1] == before[2][1]
            taken = [one.taken[0].uuids for one in await hosts.resources()]
            assert [set(one) for one in taken] == [{before[0][0], before[1][0]}, {after[2][0]}]


def parent_of_gpu(seen: Seen) -> int:
    """Return the agent whose process id the UUID begins with."""
    return int(seen[2][0].split("-")[1], 16)


async def test_host_without_the_reserved_devices_is_no_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """H29: the restart fails in words; another host may be given."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, hosts.place({"workers": Need(gpus=3)}) as placement:
            with pytest.RaisesGroup(trimesh.RestartLimit) as caught:
                async with (
                    hosts.spawn_procs(on=placement["workers"], supervision=Restart(intensity=1, along=None)) as procs,
                    procs.spawn("workers", Worker) as workers,
                ):
                    monkeypatch.setenv("FAKE_GPUS", "2")
                    [agent] = await workers.agent.call()
                    os.kill(agent, signal.SIGKILL)
                    await trio.sleep_forever()
            assert "2 GPUs instead of 3" in "".join(map(str, causes(caught.value)))


def causes(error: BaseException | None) -> list[BaseException]:
    """Return an error, its causes, and the members of all of them."""
    if error is None:
        return []
    inner = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    return [error, *causes(error.__cause__), *(one for part in inner for one in causes(part))]


async def test_what_a_process_may_not_have_is_not_shown_to_it() -> None:
    """H28: one without GPUs sees none; without a placement nothing changes; nested placements divide a share."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            placement = await hosts.place({"cpu": Need(cpus=1), "one": Need(gpus=1), "two": Need(gpus=2)})
            async with hosts.spawn_procs(on=placement["cpu"]) as procs:
                [(visible, _, own)] = await seen_by(procs)
                assert (visible, own) == ("", [])
            async with hosts.spawn_procs(on=placement["two"]) as procs:
                [(visible, _, own)] = await seen_by(procs)
                assert visible == ",".join(own)
                assert len(own) == 2
            async with (
                hosts.spawn_procs(on=placement["two"], setup=check_setup) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                assert await workers.see_in_a_thread.call_one() == own
            async with (
                hosts.spawn_procs(on=placement["one"]) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                inner, refusal = await workers.place_more.call_one()
                assert [inner] == (await workers.see.call_one())[2]
                assert "Free: 0 of 1 GPUs; taken by 'inner' (1 GPUs)" in refusal
            async with hosts.spawn_procs({"gpus": 1}) as procs, procs.spawn("workers", Plain) as plain:
                assert await plain.see.call_one() == (None, None)


def check_setup() -> None:
    """Check that a share is there before any actor."""
    share = trimesh.context().share
    assert share is not None
    assert share.name == "two"


class Plain(Actor):
    """Says what it has without a placement."""

    @endpoint
    async def see(self) -> tuple[str | None, None]:
        """Return the visible devices and the share."""
        assert trimesh.context().share is None
        return os.environ.get("CUDA_VISIBLE_DEVICES"), None


async def test_places_are_free_when_their_block_and_mesh_have_ended() -> None:
    """H28: also if the mesh outlives the block, or its start fails; places take one mesh at a time."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, trio.open_nursery() as nursery:
            is_over, has_ended = trio.Event(), trio.Event()

            async def hold(places: trimesh.Places, *, task_status: trio.TaskStatus[Any]) -> None:
                async with hosts.spawn_procs(on=places, name="first") as procs:
                    task_status.started(procs)
                    await is_over.wait()
                has_ended.set()

            async with hosts.place({"a": Need(gpus=4)}) as placement:
                procs = await nursery.start(hold, placement["a"])
                with pytest.raises(SpawnError, match="those of 'a' have 'first'"):
                    async with hosts.spawn_procs(on=placement["a"]):
                        pass
            with pytest.raises(SpawnError, match=r"taken by 'a' \(4 GPUs\)"):
                await hosts.place({"b": Need(gpus=1)})
            with pytest.raises(SpawnError, match="the block of the placement that reserved 'a' was left"):
                await hosts.spawn_procs(on=placement["a"])
            assert len(await seen_by(procs)) == 1
            is_over.set()
            await has_ended.wait()
            async with hosts.place({"b": Need(gpus=4)}) as placement:
                with pytest.raises(MeshErrorGroup, match="could not be started"):
                    async with hosts.spawn_procs(on=placement["b"], env={"CUDA_VISIBLE_DEVICES": "0"}):
                        pass
                with pytest.raises(MeshErrorGroup):
                    async with hosts.spawn_procs(on=placement["b"], python="/nowhere/python"):
                        pass
                awaited = await hosts.spawn_procs(on=placement["b"])
                assert len(await seen_by(awaited)) == 1
            assert (await hosts.resources())[0].taken == ()


async def test_mistakes_are_refused_in_words() -> None:
    """H28."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(3) as hosts:
            async with hosts.place({"a": Need(count=5, cpus=0, spread="hosts"), "b": Need()}) as placement:
                with pytest.raises(ShapeError, match="one index for each host of 'a'"):
                    hosts.spawn_procs({"hosts": 5}, on=placement["a"])
                with pytest.raises(ShapeError, match="at most its 5 processes"):
                    hosts.spawn_procs({"procs": 6}, on=placement["a"])
                with pytest.raises(TypeError, match=r'write on=placement\["name"\]'):
                    hosts.spawn_procs(on=placement)  # type: ignore[arg-type]
                with pytest.raises(ValueError, match="bind= must be left out"):
                    hosts.spawn_procs(on=placement["a"], bind="cores")
                with pytest.raises(ValueError, match="on other hosts"):
                    this_host().spawn_procs(on=placement["a"])
                with pytest.raises(KeyError, match="there are a, b"):
                    placement["c"]
                async with hosts.spawn_procs({"procs": 2}, on=placement["a"]) as procs:
                    assert len(procs) == 2
            with pytest.raises(SpawnError, match="no host has the labels zone=a that 'a' needs"):
                await hosts.place({"a": Need(labels={"zone": "a"})})
        with pytest.raises(RuntimeError, match="async with this_host"):
            await this_host().place({"a": Need()})
        with pytest.raises(TypeError, match="unless on= is given"):
            this_host().spawn_procs()


async def test_hosts_have_the_labels_of_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """H28: also those that are added later."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            monkeypatch.setenv("TRIMESH_LABELS", "disk=nvme")
            monkeypatch.setenv("FAKE_GPUS", "1")
            grown = await hosts.grow(1)
            assert [dict(one.labels) for one in await grown.resources()] == [{}, {"disk": "nvme"}]
            placement = await grown.place({"a": Need(labels={"disk": "nvme"}), "b": Need(gpus=1, count=5)})
            assert placement["a"].hosts == (grown.names[1],)
            assert placement["b"].hosts == (grown.names[0],) * 4 + (grown.names[1],)


async def test_places_on_this_host_with_isolation() -> None:
    """H28: of a part of the hosts, too; settings of the program are those of its own host only."""
    with trio.fail_after(HANG_SECONDS), trimesh.configured(labels=("here",)):
        assert (await this_host().resources()).item().labels == {"here": ""}
        async with jobs.LocalJob(1) as hosts:
            assert [one.labels for one in await hosts.slice(hosts=0).resources()] == [{}]
        async with this_host().place({"a": Need(gpus=2, count=2)}) as placement:
            async with this_host().spawn_procs(on=placement["a"], supervision=Isolate()) as procs:
                both = await seen_by(procs)
                await procs.kill([{"procs": 0}])
                await procs.replace([{"procs": 0}])
                assert await seen_by(procs) == both
            with pytest.raises(SpawnError, match=r"^this host must have room .* taken by 'a' \(4 GPUs\)$"):
                async with this_host().place({"b": Need(gpus=1)}):
                    pass
        async with jobs.LocalJob(2) as hosts, hosts.slice(hosts=1).place({"a": Need(gpus=1)}) as placement:
            assert placement["a"].hosts == (hosts.names[1],)
            async with hosts.spawn_procs(on=placement["a"]) as procs:
                assert len(await seen_by(procs)) == 1


async def test_local_rank_is_the_index_of_the_device() -> None:
    """H28: of those that the process sees, which are its own; without GPUs it counts the processes of its host."""
    needs = {"trainers": Need(gpus=2, count=2), "others": Need(count=2)}
    with trio.fail_after(HANG_SECONDS):
        async with this_host().place(needs) as placement:
            for name, local in (("trainers", [("0", "1")] * 2), ("others", [("0", "2"), ("1", "2")])):
                async with this_host().spawn_procs(on=placement[name], rendezvous=True) as procs:
                    found = (await (await procs.spawn("workers", Worker)).ranks.call()).values()
                    assert [(one[1], one[3]) for one in found] == local
                    assert [(one[0], one[2]) for one in found] == [("0", "2"), ("1", "2")]
                    told = (await trimesh.spmd.env(procs)).values()
                    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in told] == local


@pytest.mark.parametrize("pickle", ["on", "off"])
def test_from_asyncio(pickle: Any) -> None:
    """H28, K04: with and without pickle."""

    async def main() -> None:
        async with jobs.LocalJob(1, pickle=pickle) as hosts:
            async with (
                hosts.place({"a": Need(gpus=1, count=2)}) as placement,
                hosts.spawn_procs(on=placement["a"]) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                assert len({gpu for _, _, [gpu] in await workers.see.call()}) == 2
            assert (await hosts.resources())[0].taken == ()
        async with (
            this_host().place({"a": Need(gpus=1, count=2)}) as placement,
            trimesh.aio.spawn_procs(on=placement["a"]) as procs,
        ):
            assert len(procs) == 2

    asyncio.run(main())


def test_from_plain_scripts() -> None:
    """H28, K06."""
    host = tb.this_host()
    assert len(host.resources()[0].gpus) == 4
    with (
        host.place({"a": Need(gpus=1, count=2)}) as placement,
        tb.spawn_procs(on=placement["a"]) as procs,
        procs.spawning("workers", Worker) as workers,
    ):
        assert len({gpu for _, _, [gpu] in workers.see.call()}) == 2
        assert host.resources()[0].taken[0].gpus == 2.0
    with tb.enter(jobs.LocalJob(1)) as entered:
        hosts = tb.face(entered)
        placement = hosts.place({"a": Need(gpus=4)}).adopt()
        with hosts.spawn_procs(on=placement["a"]) as procs, procs.spawning("workers", Worker) as workers:
            assert len(workers.see.call()[0][2]) == 4
