"""The table of OTP: which ends are healed under which `when`, cell by cell (R10, R11; P2)."""

from __future__ import annotations

import os
import signal
from typing import Any

import attrs
import pytest
from tests.conformance.meshes import Backend, SimBackend, kinds, member, only_real, tick
from tests.conformance.probe import Probe, Tidy
from tests.conformance.supervised import reading, remake, restart

import trimesh
from trimesh import (
    ActorFailed,
    Died,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    RemoteError,
    Restarted,
    Restarting,
    endpoint,
)


@attrs.frozen
class End:
    """How a process ends.

    Attributes:
        kind: The column of the table.
        code: It leaves with this exit code.
        signum: It is sent this signal.
    """

    kind: str
    code: int | None = None
    signum: int | None = None


ENDS = [
    End("normal", code=0),
    End("cancel", signum=signal.SIGTERM),
    End("cancel", signum=signal.SIGINT),
    End("error", code=3),
    End("error", signum=signal.SIGKILL),
]
"""One for each rank."""

HEALED = {
    "permanent": {"normal", "cancel", "error"},
    "transient": {"error"},
    "temporary": set[str](),
}
"""The columns in which `when` restarts: nine cells."""


class Leaving(Probe):
    @endpoint
    async def leave(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def interrupt(self) -> None:
        signal.raise_signal(signal.SIGINT)


async def end(backend: Backend, probes: Any, rank: int, how: End) -> None:
    """Let the process of a rank end."""
    if isinstance(backend, SimBackend):
        backend.world.children[member(probes, rank).proc_id].die(code=how.code, signum=how.signum)
    elif how.signum is not None:
        os.kill(member(probes, rank).pid, how.signum)
    else:
        await probes.slice(gpus=rank).leave.broadcast(how.code)


@pytest.mark.parametrize("when", HEALED)
async def test_end_of_a_process_is_healed_as_the_table_says(backend: Backend, when: str):
    """R10: five ends at once, each a unit of its own; R11: what is not healed fails nothing, and is gone."""
    ranks = range(len(ENDS))
    healed = [rank for rank in ranks if ENDS[rank].kind in HEALED[when]]
    policy = restart(when=when, intensity=len(ENDS))
    async with backend.procs({"gpus": len(ENDS)}, supervision=policy) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Leaving)
        for rank in ranks:
            await end(backend, probes, rank, ENDS[rank])
        await log.wait(Died, len(ENDS))

        found = {died.point.rank: died.error for died in log.of(Died)}
        assert all(type(found[rank]) is ProcDied for rank in ranks)
        assert [(found[rank].exit_code, found[rank].signal) for rank in ranks] == [
            (how.code, how.signum) for how in ENDS
        ]
        assert not any(found[rank].stderr_tail for rank in ranks)  # to be asked to end is no crash
        if healed:
            await log.wait(Restarted, len(healed))
        await tick(10)
        assert sorted(log.ranks(Restarting)) == sorted(log.ranks(Restarted)) == healed
        for rank in ranks:
            if rank in healed:
                assert await probes.slice(gpus=rank).rank.call_one() == rank
            else:
                with pytest.raises(ProcDied):
                    await probes.slice(gpus=rank).rank.call_one()


async def test_end_without_error_fails_the_block_by_default(backend: Backend):
    """P2: `FailFast` names every `ProcDied`; to end was not asked for."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Leaving)
            await end(backend, probes, 1, ENDS[0])
            await probes.hold.call()
    assert kinds(caught.value) == [ProcDied]


@only_real
async def test_interrupt_of_an_endpoint_that_computes_is_its_error(backend: Backend):
    """E06: it is a `RemoteError` at the caller, and the process lives on."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Leaving)
        with pytest.raises(RemoteError, match="KeyboardInterrupt"):
            await probe.interrupt.call_one()
        assert await probe.rank.call_one() == 0


# ---- actors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cancel", "error"])
@pytest.mark.parametrize("when", HEALED)
async def test_end_of_an_actor_is_healed_as_the_table_says(backend: Backend, when: str, kind: str):
    """R10, R11: an actor that has cancelled its nursery, or returned from it, and one whose background task fails."""
    async with backend.procs() as procs:
        actors = await procs.supervised(remake(when=when)).spawn("actors", Tidy)
        async with reading(actors) as log:
            one = actors.slice(gpus=1)
            if kind == "cancel":
                with pytest.raises((trimesh.RemoteCancelled, MeshStopped)):
                    await one.cancel_itself.call_one()
            else:
                await one.start_failing.call_one(KeyError("background"))
            died = await log.wait(Died)

            assert died.point == {"gpus": 1}
            assert (died.error is None) == (kind == "cancel")
            if kind in HEALED[when]:
                assert (await log.wait(Restarted)).incarnation == 1
                assert [*(await actors.rank.call()).values()] == [0, 1]
            else:
                with pytest.raises((MeshStopped, ActorFailed)):
                    await one.rank.call_one()
                assert [*(await actors.alive().rank.call()).values()] == [0]
                assert log.of(Restarting) == []
