"""Values that travel: private copies, and classes by value (rules V1, V2, M7)."""

from __future__ import annotations

import array
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend
from tests.conformance.probe import Probe

import trimesh
from trimesh import Actor, MeshErrorGroup, PayloadError, endpoint, this_proc

numpy = pytest.importorskip("numpy")


class Keeper(Actor):
    """Keeps what it gets, and changes it."""

    @endpoint
    async def change(self, data: Any) -> Any:
        data[0] = 99
        self.data = data
        return data

    @endpoint
    async def look(self) -> Any:
        return self.data[0]

    @endpoint
    async def keep(self, data: Any) -> None:
        self.__dict__.setdefault("all", []).append(data)

    @endpoint
    async def kept(self) -> list[tuple[int, int]]:
        return [(int(data[0]), int(data[-1])) for data in self.__dict__.get("all", [])]

    @endpoint
    async def change_bytes(self, data: Any) -> str:
        try:
            memoryview(data)[0] = 1
        except TypeError:
            return "read-only"
        return "changed"

    @endpoint
    async def same(self, pair: tuple[Any, Any]) -> bool:
        first, second = pair
        first[0] = 7
        return second[0] == 7


@pytest.mark.daily("real")
async def test_arrays_arrive_writable_and_private(backend: Backend):
    """V1: a write in place is seen by no other reader and not by the sender."""
    async with backend.procs() as procs, this_proc().spawn("here", Keeper) as here:
        keepers = await procs.spawn("keepers", Keeper)
        for size in (10, 100_000):
            data = numpy.arange(size)
            back = await keepers.change.call(data)
            assert data[0] == 0
            for changed in back.values():
                assert changed[0] == 99
                changed[0] = 5
            assert list((await keepers.look.call()).values()) == [99, 99]
            await here.change.call_one(data)
            assert data[0] == 0
            await keepers.slice(gpus=0).change.call_one(numpy.full(size, 3))
            assert await keepers.slice(gpus=1).look.call_one() == 99


@pytest.mark.daily("real")
async def test_arguments_may_be_written_when_the_verb_returns(backend: Backend):
    """C9: a broadcast has sent them, a call has ended with them; small ones in the head, large ones in segments."""
    async with backend.procs() as procs:
        keepers = await procs.spawn("keepers", Keeper)
        for size in (10, 300_000):
            data = numpy.full(size, 1)
            await keepers.keep.broadcast(data)
            data[:] = 2
            await keepers.keep.call(data)
            data[:] = 3

        for kept in (await keepers.kept.call()).values():
            assert kept == [(1, 1), (2, 2)] * 2


@pytest.mark.daily("sim-typed")
async def test_plain_values_are_copied(backend: Backend):
    """V1, M7: lists, bytearrays; by pickle also arrays of the standard library."""
    async with backend.procs() as procs, this_proc().spawn("here", Keeper) as here:
        keepers = await procs.spawn("keepers", Keeper)
        sent: list[Any] = [[0, 1], bytearray(100_000)]
        if backend.pickle == "on":
            sent.append(array.array("q", [0, 1]))
        for data in sent:
            for changed in (await keepers.change.call(data)).values():
                assert changed[0] == 99
                assert type(changed) is type(data)
            await here.change.call_one(data)
            assert data[0] == 0
        assert await here.change_bytes.call_one(b"0123") == "read-only"
        assert await keepers.slice(gpus=0).change_bytes.call_one(b"0" * 100_000) == "read-only"


async def test_shared_storage_of_one_message_stays_shared(backend: Backend):
    """V1: `t` and `t[:5]` of one message."""
    async with backend.procs({"gpus": 1}) as procs:
        keeper = await procs.spawn("keeper", Keeper)
        for size in (10, 100_000):
            data = numpy.zeros(size)
            assert await keeper.same.call_one((data, data[:5]))
            assert not await keeper.same.call_one((data, data.copy()))
        shared = [0]
        # Without pickle a value is a tree: what is in it twice arrives twice.
        assert await keeper.same.call_one((shared, shared)) == (backend.pickle == "on")


@pytest.mark.by_value
async def test_classes_of_locals_go_by_value(backend: Backend):
    """V2: and come back as the same class; so do functions."""

    class Point3:
        def __init__(self, x: int) -> None:
            self.x = x

    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        for back in (await probes.note.call(Point3(3))).values():
            assert type(back) is Point3
            assert back.x == 3
        function = await probes.slice(gpus=0).note.call_one(lambda x: x + 1)
        assert function(2) == 3


@pytest.mark.by_value
async def test_actor_of_a_local_class(backend: Backend):
    """V2: the class is defined once over there; its errors match here."""

    class LocalError(LookupError):
        pass

    class Local(Actor):
        @endpoint
        async def fail(self) -> None:
            raise LocalError("local")

    async with backend.procs() as procs:
        local = await procs.spawn("local", Local)
        with pytest.raises(MeshErrorGroup) as caught:
            await local.fail.call()
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {LocalError}


class Bomb:
    """Can be sent, and cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.by_value
async def test_argument_that_cannot_be_rebuilt_is_an_error_of_the_call(backend: Backend):
    """E05: `PayloadError` with the cause; the endpoint did not run. Without a caller it is the block's."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with pytest.raises(PayloadError, match="note") as caught:
            await probe.note.call_one(Bomb())
        assert isinstance(caught.value.__cause__, ValueError | trimesh.RemoteTraceback)
        assert await probe.seen.call_one() == []
    with pytest.raises(MeshErrorGroup) as block:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            await probe.note.broadcast(Bomb())
            await trio.sleep_forever()
    assert [type(leaf) for leaf in trimesh.leaves(block.value)] == [PayloadError]
    assert trimesh.coords(block.value) == [{"gpus": 0}]


@pytest.mark.by_value
async def test_result_that_cannot_be_rebuilt_is_an_error_of_the_call(backend: Backend):
    """E05: with the coordinates of the rank that returned it; the others' results are kept."""
    async with backend.procs() as procs:
        bombers = await procs.spawn("bombers", Bomber)
        with pytest.raises(PayloadError):
            await bombers.slice(gpus=1).give.call_one()
        with pytest.raises(MeshErrorGroup) as caught:
            await bombers.give.call()
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [PayloadError]
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert list(caught.value.partial.values()) == [0]
        assert [outcome.ok for outcome in (await bombers.give.call_settled()).values()] == [True, False]


class Bomber(Actor):
    """Rank 1 returns what cannot be rebuilt."""

    @endpoint
    async def give(self) -> Any:
        return Bomb() if trimesh.current_rank() else 0


@pytest.mark.parametrize("size", [10, 100_000, 10_000_000])
async def test_buffers_may_be_changed_after_a_broadcast(backend: Backend, size: int):
    """API 3: `broadcast` returns when the arguments have left; each message has what they held then."""
    async with backend.procs() as procs:
        keepers = await procs.spawn("keepers", Keeper)
        data = numpy.zeros(size, dtype=numpy.uint8)
        for number in range(1, 6):
            data[:] = number
            await keepers.keep.broadcast(data)
        data[:] = 255
        for kept in (await keepers.kept.call()).values():
            assert kept == [(number, number) for number in range(1, 6)]


@pytest.mark.parametrize("verb", ["broadcast", "call"])
async def test_large_and_small_messages_keep_their_order(backend: Backend, verb: str):
    """S01: whatever way their bodies take."""
    sizes = [10, 3_000_000, 100, 70_000, 1_000_000, 10, 200_000]
    async with backend.procs({"gpus": 1}) as procs:
        keepers = await procs.spawn("keepers", Keeper)
        async with trio.open_nursery() as nursery:
            for number in range(28):
                data = numpy.full(sizes[number % len(sizes)], number, dtype=numpy.uint8)
                if verb == "broadcast":
                    await keepers.keep.broadcast(data)
                else:
                    nursery.start_soon(keepers.keep.call, data)
                    await trio.testing.wait_all_tasks_blocked()
        (kept,) = (await keepers.kept.call()).values()
        assert kept == [(number, number) for number in range(28)]
