"""Stores: each version whole or not there, each key on one shard, nothing left of who was cut or has died."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Isolate, LimitExceeded, endpoint, limits
from trimesh.service import open_store
from trimesh.testing import simulate

both = pytest.mark.mesh_backend("sim", "proc")
LARGE = limits.STORE_INLINE_BYTES


def large(number: int, nbytes: int = LARGE) -> Any:
    return np.full(nbytes // 8, number, dtype=np.int64)


class User(Actor):
    @endpoint
    async def put(self, store: Any, key: str, number: int) -> int:
        return await store.put(key, large(number))  # type: ignore[no-any-return]

    @endpoint
    async def get(self, store: Any, key: str) -> Any:
        return await store.get(key)

    @endpoint(concurrency=4)
    async def put_often(self, store: Any, key: str, count: int) -> None:
        for number in range(count):
            await store.put(key, {"a": large(number, 4 * LARGE), "b": large(number, 8 * LARGE)})

    @endpoint(concurrency=4)
    async def is_torn(self, store: Any, key: str, count: int) -> bool:
        for _ in range(count):
            found = await store.get(key)
            if len(np.unique(np.concatenate([found["a"], found["b"]]))) != 1:
                return True
        return False

    @endpoint
    async def wait(self, store: Any, key: str, version: int) -> int:
        return await store.wait_newer(key, version)  # type: ignore[no-any-return]


@pytest.mark.torch
@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_values_come_back_as_they_were_put(mesh):
    torch = pytest.importorskip("torch", reason="torch is an extra")
    torch.set_num_threads(1)
    values: dict[str, Any] = {
        "number": 7,
        "text": "a text",
        "record": {"a": [1, 2, (3, None)]},
        "small bytes": b"abc",
        "large bytes": bytes(range(256)) * 1024,
        "array": large(5),
        "small array": np.arange(6).reshape(2, 3),
        "tensor": torch.arange(LARGE, dtype=torch.float32).reshape(2, -1),
        "state": {"weight": torch.ones(300, 300, dtype=torch.bfloat16), "steps": np.arange(9), "name": b"gpt"},
    }
    async with open_store(mesh) as store:
        for key, value in values.items():
            assert await store.put(key, value) >= 1
        for key, value in values.items():
            found = await store.get(key)
            assert type(found) is type(value)
            if isinstance(value, dict) and "weight" in value:
                assert torch.equal(found["weight"], value["weight"])
                assert np.array_equal(found["steps"], value["steps"])
                assert found["name"] == b"gpt"
            elif isinstance(value, torch.Tensor | np.ndarray):
                assert found.shape == value.shape
                assert bool((found == value).all())
            else:
                assert found == value
        assert await store.keys() == sorted(values)
        assert await store.keys("small") == ["small array", "small bytes"]


@pytest.mark.daily("proc")
@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_each_process_has_the_same_store(mesh):
    users = await mesh.spawn("users", User)
    async with open_store(mesh.slice(gpus=slice(0, 2))) as store:
        versions = await users.put.call(store, "x", 3)
        assert sorted(versions.values()) == [1, 2, 3]
        for found in (await users.get.call(store, "x")).values():
            assert np.array_equal(found, large(3))
        assert (await store.statistics()).shards == 2


@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_a_store_in_this_process_alone(mesh):
    async with open_store() as store:
        users = await mesh.spawn("users", User)
        await store.put("x", large(1))
        assert np.array_equal(await users.slice(gpus=0).get.call_one(store, "x"), large(1))


@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_no_version_is_torn_while_it_is_put_again(mesh):
    async with open_store(mesh.slice(gpus=slice(0, 1))) as store:
        users = await mesh.spawn("users", User)
        await store.put("x", {"a": large(-1, 4 * LARGE), "b": large(-1, 8 * LARGE)})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(users.slice(gpus=0).put_often.call_one, store, "x", 20)
            nursery.start_soon(users.slice(gpus=1).put_often.call_one, store, "x", 20)
            assert not await users.slice(gpus=2).is_torn.call_one(store, "x", 20)
        numbers = await store.statistics()
        assert (numbers.keys, numbers.versions, numbers.puts) == (1, 1, 41)
        assert numbers.bytes < 13 * LARGE


@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_versions(mesh):
    async with open_store(mesh.slice(gpus=slice(0, 1)), retain=2) as store:
        versions = [await store.put("x", large(number)) for number in range(3)]
        assert versions == sorted(set(versions))
        assert await store.version("x") == versions[-1]
        assert (await store.get("x", version=versions[1]))[0] == 1
        with pytest.raises(KeyError, match=f"of version {versions[0]}"):
            await store.get("x", version=versions[0])
        assert await store.delete("x")
        assert not await store.delete("x")
        assert await store.version("x") == 0
        with pytest.raises(KeyError):
            await store.get("x")
        assert await store.put("x", 1) > versions[-1]


@simulate(seeds=5, per_host={"gpus": 1})
async def test_a_version_ends_with_its_time_to_live(mesh):
    async with open_store(mesh) as store:
        await store.put("short", large(1), ttl=5)
        await store.put("longer", 2, ttl=50)
        await store.put("for ever", 3)
        await store.put("short then for ever", 4, ttl=5)
        await store.put("short then for ever", 5)
        await trio.sleep(4)
        assert len(await store.keys()) == 4
        await trio.sleep(2)
        assert await store.keys() == ["for ever", "longer", "short then for ever"]
        assert await store.get("short then for ever") == 5
        await trio.sleep(50)
        numbers = await store.statistics()
        assert (numbers.keys, numbers.expired) == (2, 2)


@both
@simulate(seeds=5, per_host={"gpus": 1})
async def test_memory_goes_back_at_the_end_of_a_version_though_nobody_asks(mesh):
    """Or when the last reader leaves, if that is later."""
    async with open_store(mesh) as store:
        await store.put("later", 1, ttl=5 * HANG_SECONDS)
        for is_read_on in (False, True):
            for seconds in (0.2, 2.0, 20.0):  # it may be over before it is held
                version = await store.put("x", large(1), ttl=seconds)
                with suppress(KeyError):
                    async with store._shards.slice(shard=0).hold.stream("x", version) as replies:
                        _, (_, _, buffer) = await anext(replies)
                        await buffer.read_into(bytearray(buffer.nbytes))
                        if is_read_on:
                            await trio.sleep(seconds)
                            await buffer.read_into(bytearray(buffer.nbytes))
                    break
            with trio.fail_after(HANG_SECONDS), pytest.raises(trio.ClosedResourceError):
                while True:
                    await buffer.read_into(bytearray(buffer.nbytes))
                    await trio.sleep(0.05)


@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_into_memory_that_is_there(mesh):
    async with open_store(mesh.slice(gpus=slice(0, 1))) as store:
        await store.put("x", {"a": large(1), "b": large(2)})
        a = np.zeros_like(large(0))
        assert await store.get_into("x", {"a": a}) == await store.version("x")
        assert (a == 1).all()
        with pytest.raises(KeyError, match="no tensor 'c'"):
            await store.get_into("x", {"c": a})
        with pytest.raises(ValueError, match="as it was published"):
            await store.get_into("x", {"a": a[1:]})
        with pytest.raises(TypeError, match="a mapping of parts"):
            await store.get_into("x", a)
        await store.put("small", 3)
        with pytest.raises(ValueError, match="write `await store"):
            await store.get_into("small", a)


@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_who_waits_for_a_version(mesh):
    async with open_store(mesh.slice(gpus=slice(0, 1))) as store:
        users = await mesh.spawn("users", User)
        async with trio.open_nursery() as nursery:
            found: list[int] = []

            async def wait() -> None:
                found.append(await users.slice(gpus=0).wait.call_one(store, "x", 0))

            nursery.start_soon(wait)
            with trio.move_on_after(0.05):
                await store.wait_newer("x")
            assert not found
            version = await store.put("x", 1)
        assert found == [version]
        assert await store.wait_newer("x") == version


@both
@simulate(seeds=5, per_host={"gpus": 3})
async def test_what_has_no_room(mesh):
    async with open_store(mesh.slice(gpus=slice(0, 1)), capacity_bytes=3 * LARGE) as store:
        await store.put("x", large(1))
        await store.put("x", large(2))
        with pytest.raises(LimitExceeded, match="capacity_bytes="):
            await store.put("y", large(3, 2 * LARGE))
        with pytest.raises(LimitExceeded, match="capacity_bytes="):
            await store.put("y", b"1" * (3 * LARGE))
        assert (await store.get("x"))[0] == 2
        assert await store.keys() == ["x"]
        await store.delete("x")
        await store.put("y", large(3, 2 * LARGE))


@pytest.mark.parametrize("key", [3, None, b"x"])
@simulate(seeds=1, per_host={"gpus": 3})
async def test_keys_are_texts(mesh, key):
    async with open_store(mesh.slice(gpus=slice(0, 1))) as store:
        for ask in (store.get(key), store.put(key, 1), store.delete(key), store.version(key), store.wait_newer(key)):
            with pytest.raises(TypeError, match="must be a string"):
                await ask
        with pytest.raises(ValueError, match="ttl must be a number"):
            await store.put("x", 1, ttl=0)


def test_bounds_of_a_store() -> None:
    for wrong in ({"capacity_bytes": 0}, {"retain": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            open_store(**wrong)


class _CutAfter(trio.abc.Instrument):
    """Cancels a scope after so many steps of any task of this run: in a simulation, of all processes."""

    def __init__(self, steps: int, scope: trio.CancelScope) -> None:
        self.left = steps
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel(reason="a step of the test")


@pytest.mark.parametrize("is_put", [True, False])
@simulate(seeds=1, per_host={"gpus": 1})
async def test_a_cancel_at_every_step_leaves_the_old_version_or_the_new_one(mesh, is_put):
    async with open_store(mesh) as store:
        await store.put("x", large(0))
        before = await store.statistics()
        outcomes = set[bool]()
        number = 0
        for steps in range(1, 2_000):
            number += is_put
            has_ended = False
            with trio.CancelScope() as scope:
                cut = _CutAfter(steps, scope)
                trio.lowlevel.add_instrument(cut)
                try:
                    if is_put:
                        await store.put("x", large(number))
                    else:
                        assert (await store.get("x"))[0] == 0
                    has_ended = True
                finally:
                    trio.lowlevel.remove_instrument(cut)
            found = int((await store.get("x"))[0])
            assert found == number if has_ended else found in (0, number, *range(number))
            if is_put and not has_ended:
                assert found != number  # nothing of it is stored
                number = found
            outcomes.add(has_ended)
            if cut.left > 0:
                break
        assert outcomes == {True, False}
        after = await store.statistics()
        assert (after.keys, after.versions, after.bytes) == (before.keys, before.versions, before.bytes)


@both
@simulate(seeds=10, per_host={"gpus": 2}, supervision=Isolate())
async def test_a_writer_that_is_killed_leaves_nothing(mesh, faults):
    users = await mesh.spawn("users", User)
    async with open_store(mesh.slice(gpus=slice(0, 1))) as store:
        await store.put("x", {"a": large(-1), "b": large(-1)})
        async with trio.open_nursery() as nursery:

            async def lose() -> None:
                with pytest.raises(trimesh.ProcDied):
                    await users.slice(gpus=1).put_often.call_one(store, "x", 1_000_000)

            nursery.start_soon(lose)
            await store.wait_newer("x", 3)
            faults.kill(mesh.slice(gpus=1))
        with trio.fail_after(HANG_SECONDS):
            while (await store.statistics()).bytes > 13 * LARGE:  # noqa: ASYNC110
                await trio.sleep(0.01)
        found = await store.get("x")
        assert len(np.unique(np.concatenate([found["a"], found["b"]]))) == 1
        assert (await store.statistics()).versions == 1
