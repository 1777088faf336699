"""Failures that read: groups as deep as failures need, equal ones once, frames of the user alone (X1, X5, X6, X7)."""

from __future__ import annotations

import traceback
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from tests.conformance.meshes import Backend, attempt
from tests.conformance.probe import Probe, Tidy

import trimesh
from trimesh import MeshErrorGroup
from trimesh.service import open_pool, open_replay, open_slots, open_store

SOURCES = str(Path(trimesh.__file__).parent)
TESTS = str(Path(__file__).parents[1])


def depth(error: BaseException) -> int:
    """Levels of groups."""
    return 1 + max(map(depth, error.exceptions)) if isinstance(error, BaseExceptionGroup) else 0


@pytest.mark.daily("real")
async def test_blocks_in_blocks_make_one_group(backend: Backend):
    """X1: the innermost block wraps a bare error, all others raise that group."""
    error = LookupError("body")
    with pytest.raises(MeshErrorGroup) as caught:
        async with AsyncExitStack() as stack:
            procs = await stack.enter_async_context(backend.procs({"gpus": 2}))
            for name in ("outer", "middle", "inner"):
                await stack.enter_async_context(procs.spawn(name, Probe))
            raise error
    assert (caught.value.mesh, caught.value.exceptions) == ("inner", (error,))


async def test_group_of_a_task_of_the_body_goes_through_all_blocks(backend: Backend):
    """X1: no block has something to add to it."""
    seen: list[BaseException] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs, procs.spawn("probe", Probe):
            try:
                async with trio.open_nursery():
                    raise LookupError("of a task")
            except ExceptionGroup as group:
                seen.append(group)
                raise
    assert seen == [caught.value]


async def test_failures_of_blocks_in_blocks_stand_side_by_side(backend: Backend):
    """X1, E09: the error of the body, and that of each block."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with (
            backend.procs({"gpus": 1}) as procs,
            procs.spawn("outer", Tidy, cleanup_error=OSError("outer")),
            procs.spawn("inner", Tidy, cleanup_error=KeyError("inner")),
        ):
            raise LookupError("body")
    assert [type(error) for error in caught.value.exceptions] == [LookupError, KeyError, OSError]


async def test_services_add_nothing_to_the_error_of_their_body(backend: Backend):
    """X1: their tasks are of no interest where nothing is wrong with them."""
    error = LookupError("body")
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probes = await procs.spawn("probes", Probe)
            with pytest.raises(LookupError) as inside:
                async with (
                    open_pool(probes),
                    open_slots(batch=1, staleness=1) as slots,
                    open_replay(capacity=1, slots=slots),
                    open_store(procs),
                ):
                    raise error
            assert inside.value is error
            raise error
    assert caught.value.exceptions == (error,)


@pytest.mark.daily("real")
async def test_equal_failures_are_one_and_none_is_lost(backend: Backend):
    """X5: with the origin and the remote traceback of each."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            failing = attempt(nursery, probes.fail_at_gate.call, KeyError("rank"))
            await probes.wait.call("at the gate")
            await probes.open_gate.call()
            with pytest.raises(MeshErrorGroup) as caught:
                await failing.result()
    group = caught.value
    assert len(group.exceptions) == 1
    assert "the same at probes[gpus=1..2]" in group.exceptions[0].__notes__
    assert str(group) == "probes.fail_at_gate failed on 3 of 3: KeyError: 'rank' (probes[gpus=0] and 2 more)"
    assert trimesh.coords(group) == [{"gpus": 0}, {"gpus": 1}, {"gpus": 2}]
    assert all(isinstance(leaf.__cause__, trimesh.RemoteTraceback) for leaf in trimesh.leaves(group))


@pytest.mark.daily("real")
async def test_tracebacks_have_lines_of_the_user_alone(backend: Backend):
    """X6: here and in the other process; the error of a call, and that of a call of the callee."""
    async with backend.procs({"gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        first, second = probes.slice(gpus=0), probes.slice(gpus=1)
        for call in (first.fail.call, lambda error: first.relay.call_one(second, "fail", "call_one", error)):
            with pytest.raises((KeyError, MeshErrorGroup)) as caught:
                await call(KeyError("rank"))
            printed = "".join(traceback.format_exception(caught.value))
            assert SOURCES not in printed
            assert "in fail" in printed
            assert printed.count(f"{TESTS}/conformance/probe.py") in (1, 2)  # fail, and relay


async def test_all_frames_are_there_when_they_are_asked_for(backend: Backend):
    """X6."""
    with trimesh.configured(traceback="full"):
        async with backend.procs({"gpus": 1}) as procs:
            probes = await procs.spawn("probes", Probe)
            with pytest.raises(KeyError) as caught:
                await probes.fail.call_one(KeyError("rank"))
    assert SOURCES in "".join(traceback.format_tb(caught.value.__traceback__))


@pytest.mark.daily("real")
async def test_members_are_named_in_one_way(backend: Backend):
    """X7: in the note of an error, and in the text of a death."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            with pytest.raises(KeyError) as failed:
                await probes.slice(gpus=1).fail.call_one(KeyError("rank"))
            assert any(note.startswith("at probes[gpus=1], actor Probe") for note in failed.value.__notes__)
            backend.kill(procs, 1)
            await trio.sleep_forever()
    assert "procs[gpus=1]" in str(caught.value)
