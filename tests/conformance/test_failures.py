"""Failures that have no caller: they come out of the block, once, the cause first (E07-E11, E14; rules X1, X3)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, kinds
from tests.conformance.probe import Probe, Tidy

import trimesh
from trimesh import Actor, ActorFailed, MeshErrorGroup, MeshStopped, ProcDied, RemoteError, endpoint

# ---- broadcast -------------------------------------------------------------------------------------------------------


async def test_broadcast_that_fails_fails_the_block(backend: Backend):
    """E10: the body is cancelled, the block raises the error with its coordinates."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 3}) as procs:
            probes = await procs.spawn("probes", Probe)
            await probes.fail.broadcast(KeyError("lost"), [1])
            await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, KeyError)
    where = trimesh.origin(leaf)
    assert where.point == {"gpus": 1}
    assert (where.mesh, where.actor, where.endpoint) == ("probes", "Probe", "fail")
    assert where.pid
    assert caught.value.mesh == "procs"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_exit_raised_in_a_broadcast_ends_nothing_here(backend: Backend, error: BaseException):
    """E06, E10: never `sys.exit`, neither there nor here."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            await probe.fail.broadcast(error)
            await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, RemoteError)
    assert type(error).__name__ in leaf.type_name
    assert trimesh.coords(caught.value)


async def test_failure_of_an_inner_mesh_is_its_own_block_s(backend: Backend):
    """E10: `async with spawn` owns its actors; the outer block goes on."""
    async with backend.procs() as procs:
        outer = await procs.spawn("outer", Probe)
        with pytest.raises(MeshErrorGroup) as caught:
            async with procs.spawn("inner", Probe) as inner:
                await inner.fail.broadcast(KeyError("lost"), [0])
                await trio.sleep_forever()
        assert kinds(caught.value) == [KeyError]
        assert caught.value.mesh == "inner"
        assert list((await outer.rank.call()).values()) == [0, 1]


async def test_k_broadcast_failures_are_k_leaves(backend: Backend):
    """E10, E02: each once."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 4}) as procs:
            probes = await procs.spawn("probes", Probe)
            await probes.fail_at_gate.broadcast(KeyError("lost"))
            await probes.wait.call("at the gate")
            with trio.CancelScope(shield=True):
                await probes.open_gate.call()
            await trio.sleep_forever()
    assert kinds(caught.value) == [KeyError] * 4
    assert sorted(point["gpus"] for point in trimesh.coords(caught.value)) == [0, 1, 2, 3]


# ---- actors that end -------------------------------------------------------------------------------------------------


async def test_background_task_that_fails_ends_the_actor(backend: Backend):
    """API 1: with that exception, as a failure of the block; the calls inside end by the cancel of the block (X3)."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            tidy = await procs.spawn("tidy", Tidy)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tidy.hold_many.call)
                await tidy.wait.call("hold")
                await tidy.slice(gpus=1).start_failing.call_one(OSError("background"))
                await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, OSError)
    where = trimesh.origin(leaf)
    assert where.point == {"gpus": 1}
    assert where.endpoint is None


async def test_callers_elsewhere_get_the_cause(backend: Backend):
    """E14, X3: a caller outside of the block gets `ActorFailed` with the failure as its cause, now and later."""
    async with backend.procs({"gpus": 1}) as others:
        relay = await others.spawn("relay", Probe)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup) as caught:
                async with backend.procs({"gpus": 1}) as procs, procs.spawn("tidy", Tidy, 0.05) as tidy:
                    held = attempt(nursery, relay.relay.call_one, tidy, "hold_many", "call_one")
                    await tidy.wait.call_one("hold")
                    await tidy.start_failing.call_one(OSError("background"))
                    await trio.sleep_forever()
            with pytest.raises(ActorFailed) as victim:
                await held.result()
        assert kinds(caught.value) == [OSError]
        assert "background" in str(victim.value)
        causes: list[type[BaseException]] = []
        error: BaseException | None = victim.value
        while error is not None:
            causes += kinds(error)
            error = error.__cause__
        assert OSError in causes


async def test_lifespan_that_fails_while_serving_is_the_block_s(backend: Backend):
    """E10, API 4: whatever it raises, plain or in a group."""
    for error in (ValueError("plain"), ExceptionGroup("several", [ValueError("one"), TypeError("other")])):
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs({"gpus": 1}) as procs:
                fuse = await procs.spawn("fuse", Fuse, error)
                await fuse.blow.broadcast()
                await trio.sleep_forever()
        found = kinds(caught.value)
        assert found == ([ValueError] if isinstance(error, ValueError) else [ValueError, TypeError])
        assert len(trimesh.coords(caught.value)) == len(found)


class Fuse(Actor):
    """Fails in its lifespan when told to."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.blown = trio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.watch)
                yield
                nursery.cancel_scope.cancel()
        except* LookupError:
            raise self.error from None

    async def watch(self) -> None:
        await self.blown.wait()
        raise LookupError

    @endpoint
    async def blow(self) -> None:
        self.blown.set()


async def test_actor_that_ends_by_itself_is_no_failure(backend: Backend):
    """R11, C06: its later callers are told that it has stopped; the block goes on."""
    async with backend.procs() as procs:
        tidy = await procs.spawn("tidy", Tidy)
        await tidy.cancel_itself.broadcast()
        for rank in range(2):
            with pytest.raises((MeshStopped, trimesh.RemoteCancelled)):
                await tidy.slice(gpus=rank).wait.call_one("never")
            with pytest.raises(MeshStopped):
                await tidy.slice(gpus=rank).rank.call_one()


# ---- clean-up --------------------------------------------------------------------------------------------------------


async def test_error_of_clean_up_is_raised(backend: Backend):
    """E07: by a block that was otherwise well, for every rank that had one."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 3}) as procs:
            await procs.spawn("tidy", Tidy, cleanup_error=ValueError("clean-up"), ranks=[0, 2])
    assert kinds(caught.value) == [ValueError] * 2
    assert trimesh.coords(caught.value) == [{"gpus": 0}, {"gpus": 2}]


async def test_error_of_clean_up_does_not_replace_the_first(backend: Backend):
    """E07: it comes after what the body has raised."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            await procs.spawn("first", Tidy, cleanup_error=ValueError("clean-up of the first"))
            await procs.spawn("second", Tidy, cleanup_error=ValueError("clean-up of the second"))
            raise LookupError("body")
    texts = [str(leaf) for leaf in trimesh.leaves(caught.value)]
    assert texts == ["body", "clean-up of the second", "clean-up of the first"]


@pytest.mark.parametrize("error", [MeshStopped("mine"), ProcDied("mine"), trimesh.Unresponsive("mine")])
async def test_error_of_ours_raised_by_clean_up_is_not_lost(backend: Backend, error: Exception):
    """E07: it is an error like any other when user code raises it."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            await procs.spawn("tidy", Tidy, cleanup_error=error)
    assert kinds(caught.value) == [type(error)]
    assert trimesh.coords(caught.value) == [{"gpus": 0}]


async def test_error_of_clean_up_joins_the_failure_of_the_actor(backend: Backend):
    """E07: an actor that has failed and cannot clean up tells both, chained as Python chains them."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            tidy = await procs.spawn("tidy", Tidy, cleanup_error=ValueError("clean-up"))
            await tidy.start_failing.broadcast(OSError("background"))
            await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, ValueError)
    chain: list[BaseException] = []
    link: BaseException | None = leaf
    while link is not None:
        chain.append(link)
        link = link.__context__
    assert any(isinstance(inner, OSError) for error in chain for inner in trimesh.leaves(error))


async def test_error_of_clean_up_of_a_mesh_that_did_not_start_is_told(backend: Backend):
    """E07, E11: beside the reason why it did not."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            keeper = await procs.spawn("keeper", Probe)
            with pytest.raises(MeshErrorGroup) as spawning:
                await procs.spawn("torn", Torn, keeper.slice(gpus=0))
            assert set(kinds(spawning.value)) == {LookupError, ValueError}
            raise KeyError("body")
    assert kinds(caught.value) == [KeyError]


class Torn(Actor):
    """Rank 0 starts and cannot clean up; rank 1, which waits for rank 0, cannot start."""

    def __init__(self, keeper: Probe) -> None:
        self.keeper = keeper

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.current_rank() == 1:
            await self.keeper.wait.call_one("up")
            raise LookupError("set-up")
        self.keeper.note.broadcast_nowait("up")  # no checkpoint: no cancel comes before the actor is up
        yield
        raise ValueError("clean-up")


# ---- the body --------------------------------------------------------------------------------------------------------


async def test_body_and_actor_fail_at_once(backend: Backend):
    """E09: both are in the group."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            await probe.fail_at_gate.broadcast(OSError("actor"))
            await probe.wait.call_one("at the gate")
            with trio.CancelScope(shield=True):
                await probe.open_gate.call_one()
            raise LookupError("body")
    assert set(kinds(caught.value)) == {LookupError, OSError}


async def test_body_that_fails_after_an_actor_is_second(backend: Backend):
    """E09, E14: the group is in the order of the failures."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            try:
                await probe.fail.broadcast(OSError("actor"))  # its own checkpoint may be where the failure shows
                await trio.sleep_forever()
            finally:
                raise LookupError("body")
    assert kinds(caught.value) == [OSError, LookupError]
    assert [trimesh.origin(leaf) is None for leaf in trimesh.leaves(caught.value)] == [False, True]


async def test_error_of_the_body_is_wrapped(backend: Backend):
    """X1: like a nursery, the block raises a group even for one error, and the error is the very same."""
    error = LookupError("body")
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}):
            raise error
    assert caught.value.exceptions == (error,)
    assert trimesh.coords(caught.value) == []


async def test_group_of_the_body_is_not_wrapped_again(backend: Backend):
    """X1: a block that has nothing to add raises it as it is."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            await probe.fail.call(KeyError("call"))
    group = caught.value
    assert (group.mesh, group.endpoint) == ("probe", "fail")
    assert [type(error) for error in group.exceptions] == [KeyError]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
async def test_exit_of_the_body_keeps_the_failures_beside_it(backend: Backend, error: BaseException):
    """X1: a `BaseExceptionGroup` with the `MeshErrorGroup` inside."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            await procs.spawn("tidy", Tidy, cleanup_error=ValueError("clean-up"))
            raise error
    assert not isinstance(caught.value, ExceptionGroup)
    assert set(kinds(caught.value)) == {type(error), ValueError}
    groups = [inner for inner in caught.value.exceptions if isinstance(inner, MeshErrorGroup)]
    assert len(groups) == 1
    assert error in caught.value.exceptions


async def test_cancel_from_outside_is_not_an_error(backend: Backend):
    """X1, K03: a block that was cancelled raises what it has to, or lets the cancel through."""
    with trio.CancelScope() as scope:
        async with backend.procs({"gpus": 1}) as procs:
            await procs.spawn("tidy", Tidy)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    with trio.CancelScope() as scope, pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            await procs.spawn("tidy", Tidy, cleanup_error=ValueError("clean-up"))
            scope.cancel()
            await trio.sleep_forever()
    assert kinds(caught.value) == [ValueError]
