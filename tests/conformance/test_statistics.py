"""`statistics()`: what this process knows of meshes, links and mailboxes, without asking others (K02)."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, attempt, fill, member
from tests.conformance.probe import Probe

import trimesh
from trimesh import ProcDied, ProcMesh, this_proc
from trimesh._supervision.policy import Isolate


async def test_statistics_count_calls_that_run_and_that_wait(backend: Backend):
    """The counters follow a call from its sending to its end; a full mailbox makes others wait here."""
    with trio.CancelScope() as scope:
        async with backend.procs() as procs, trio.open_nursery() as nursery:
            await count_calls(procs, nursery)
            scope.cancel()  # a block that is left by a cancel does not wait for what it has sent
            await trio.lowlevel.checkpoint()


async def count_calls(procs: ProcMesh, nursery: trio.Nursery) -> None:
    probes = await procs.spawn("probes", Probe)
    first = probes.slice(gpus=0)
    idle = probes.statistics()
    assert (idle.name, idle.calls_unended, idle.calls_waiting) == ("probes", 0, 0)
    assert [one.point for one in idle.members] == [{"gpus": 0}, {"gpus": 1}]
    assert [(one.pid, one.incarnation, one.is_alive) for one in idle.members] == [
        (member(probes, rank).pid, 0, True) for rank in (0, 1)
    ]

    held = attempt(nursery, first.hold.call_one, "held")
    await first.wait.call_one("held")
    assert [one.calls_unended for one in probes.statistics().members] == [1, 0]
    fill(first.hold, "next")
    late = attempt(nursery, first.hold.call_one, "late")
    await trio.testing.wait_all_tasks_blocked()
    with trio.testing.assert_no_checkpoints():
        assert [one.calls_waiting for one in probes.statistics().members] == [1, 0]
    late.cancel()
    held.cancel()
    await held.over.wait()
    await late.over.wait()
    assert probes.statistics().calls_waiting == 0


@pytest.mark.daily("real")
async def test_statistics_of_a_link_grow_with_what_passes(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        [before] = procs.statistics().members
        assert before.link is not None
        await probe.note.call_one(b"x" * 10_000)
        [after] = probe.statistics().members
        assert after.link is not None
        assert after.link.bytes_sent - before.link.bytes_sent > 10_000
        assert after.link.bytes_received - before.link.bytes_received > 10_000
        assert after.link.messages_sent > before.link.messages_sent


async def test_statistics_of_an_actor_of_this_process_show_its_mailbox(backend: Backend):
    async with backend.procs({"gpus": 1}), this_proc().spawn("here", Probe) as here, trio.open_nursery() as nursery:
        [idle] = here.statistics().members
        assert idle.mailbox is not None
        assert (idle.mailbox.calls_queued, idle.mailbox.calls_running) == (0, 0)
        assert idle.link is None
        held = [attempt(nursery, here.hold.call_one, "held") for _ in range(3)]
        await here.wait.call_one("held")
        await trio.testing.wait_all_tasks_blocked()
        [busy] = here.statistics().members
        assert busy.mailbox is not None
        assert (busy.mailbox.calls_queued, busy.mailbox.calls_running) == (2, 1)
        for one in held:
            one.cancel()
        nursery.cancel_scope.cancel()


async def test_statistics_show_who_is_dead(backend: Backend):
    async with backend.procs(supervision=Isolate()) as procs:
        probes = await procs.spawn("probes", Probe)
        backend.kill(procs, 1)
        with pytest.raises(trimesh.MeshErrorGroup) as caught:
            while True:
                await probes.rank.call()
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {ProcDied}
        assert [one.is_alive for one in probes.statistics().members] == [True, False]
        assert [one.is_alive for one in procs.statistics().members] == [True, False]


async def test_statistics_are_frozen(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs:
        found = procs.statistics()
        with pytest.raises(AttributeError, match="immutable"):
            found.name = "other"  # type: ignore[misc]
