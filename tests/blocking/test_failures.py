"""Deaths and errors as threads see them (K06)."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.conformance.probe import Probe

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, Isolate, MeshErrorGroup, MeshStopped, ProcDied, Restart, endpoint
from trimesh.blocking.work import Body

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Mortal(Actor):
    @endpoint
    async def die(self, ranks: list[int]) -> int:
        if trimesh.current_rank() in ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        return trimesh.current_rank()

    @endpoint
    async def rank(self) -> int:
        return trimesh.current_rank()


def leaves(error: BaseException) -> list[Any]:
    return [type(leaf) for leaf in trimesh.leaves(error)]


def test_death_is_raised_by_the_block() -> None:
    """E09, K06: the call ends by `Cancelled`, which is no `Exception`; the block raises the death, once."""
    ended: list[BaseException] = []
    with pytest.raises(MeshErrorGroup) as caught, tb.spawn_procs({"gpus": 2}) as procs:
        mortals = procs.spawn("mortals", Mortal)
        try:
            mortals.die.call([1])
        except BaseException as error:
            ended.append(error)
            raise
    assert leaves(caught.value) == [ProcDied]
    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert [type(error) for error in ended] == [tb.Cancelled]


def test_death_in_isolation_is_raised_by_the_call() -> None:
    """E14, K06: the mesh goes on without the member."""
    with tb.spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
        mortals = procs.spawn("mortals", Mortal)
        with pytest.raises(MeshErrorGroup) as caught:
            mortals.die.call([1])
        assert leaves(caught.value) == [ProcDied]
        healthy = mortals.exclude(trimesh.coords(caught.value))
        assert healthy.rank.call().values() == mortals.alive().rank.call().values() == (0,)


def test_restarted_member_is_called_again() -> None:
    """K06: `settled` and `kill` of a mesh."""
    with tb.spawn_procs({"gpus": 1}, supervision=Restart()) as procs:
        mortals = procs.spawn("mortals", Mortal)
        procs.kill([{"gpus": 0}])
        procs.settled()
        assert mortals.rank.call_one() == 0


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not-yet-told"])
def test_failure_of_an_open_mesh_is_raised_by_the_call_under_way(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E09, K06: later calls are refused, and closing says nothing more.

    The tasks of the calls and that of the block are cancelled in any order: the thread may hear of its call first.
    """
    if not is_told:
        monkeypatch.setattr(Body, "_tell_cancel", lambda body: not body.is_kept)
    procs = tb.spawn_procs({"gpus": 2}).open()
    mortals = procs.spawn("mortals", Mortal)
    with pytest.raises(MeshErrorGroup) as caught:
        mortals.die.call([0])
    assert leaves(caught.value) == [ProcDied]
    with pytest.raises(MeshErrorGroup) as refused:
        mortals.rank.call()
    assert set(leaves(refused.value)) <= {MeshStopped, ProcDied}
    procs.close()


@pytest.mark.parametrize("next_is", ["call", "close"])
def test_failure_of_an_open_mesh_between_calls_is_raised_by_what_comes_next(next_is: str) -> None:
    """E09, K06: to ask who is alive may be what comes next."""
    procs = tb.spawn_procs({"gpus": 1}).open()
    mortals = procs.spawn("mortals", Mortal)
    pid = mortals.statistics().members[0].pid
    with tb.this_proc().spawning("own", Probe):  # the Trio run goes on, whatever becomes of the mesh
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(MeshErrorGroup) as caught:
            while mortals.alive():
                pass
            mortals.rank.call() if next_is == "call" else procs.close()
        assert leaves(caught.value) == [ProcDied]
        procs.close()


def test_error_of_the_body_and_of_an_actor_are_both_raised() -> None:
    """E07, E09, K06."""
    with pytest.RaisesGroup(pytest.RaisesExc(LookupError, match="body")), tb.spawn_procs({"gpus": 1}) as procs:
        procs.spawn("probe", Probe)
        raise LookupError("body")
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True), tb.spawn_procs({"gpus": 1}) as procs:
        probe = procs.spawn("probe", Probe)
        probe.fail.broadcast(ValueError("nobody to tell"))
        probe.wait.call_one("never")


def test_error_keeps_its_type_in_except_star() -> None:
    """E01, E04, K06."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        probes = procs.spawn("probes", Probe)
        found: list[Any] = []
        try:
            probes.fail.call(LookupError("no"), ranks=[1])
        except* LookupError as group:
            found = trimesh.coords(group)
        assert found == [{"gpus": 1}]
