"""Errors whose classes refuse attributes, or whose text needs what does not travel (E05; rule X2)."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend

import trimesh
from trimesh import Actor, MeshErrorGroup, Retry, context, endpoint, this_host


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute once it is made."""

    code: int


class Guarded(Exception):
    """Refuses attributes, and raises where unknown ones are read."""

    def __init__(self, code: int) -> None:
        super().__init__(code)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"no {name}")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


REFUSING: dict[str, type[Exception]] = {"frozen": Frozen, "guarded": Guarded}


class Refusing(Actor):
    """Raises such errors wherever an actor can."""

    def __init__(self, kind: str, where: str = "") -> None:
        self.kind = kind
        self.where = where
        if where == "init":
            self.fail()

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        yield
        if self.where == "clean-up":
            self.fail()

    def fail(self) -> None:
        raise REFUSING[self.kind](404)

    @endpoint
    async def raises(self) -> None:
        self.fail()

    @endpoint
    def inline(self) -> None:
        self.fail()

    @endpoint(thread=True)
    def threaded(self) -> None:
        self.fail()

    @endpoint
    async def items(self) -> AsyncIterator[int]:
        yield 1
        self.fail()

    @endpoint(idempotent=True)
    async def retried(self, item: int = 0) -> None:
        self.fail()

    @endpoint
    async def ok(self) -> int:
        return 1


@pytest.mark.parametrize("kind", REFUSING)
async def test_error_that_refuses_attributes_arrives(backend: Backend, kind: str):
    """E05, X2: as itself, with its origin and notes, from every kind of endpoint; the actor lives on."""
    async with backend.procs({"gpus": 1}) as procs:
        actor = await procs.spawn("actor", Refusing, kind)
        for way in (actor.raises, actor.inline):
            with pytest.raises(REFUSING[kind]) as caught:
                await way.call_one()
            origin = trimesh.origin(caught.value)
            assert origin is not None
            assert origin.point == {"gpus": 0}
            assert any("actor Refusing" in note for note in vars(caught.value)["__notes__"])
        with pytest.raises(MeshErrorGroup) as group:
            async with actor.items.stream() as items:
                async for _ in items:
                    pass
        assert group.group_contains(REFUSING[kind])
        retry = Retry(2, on=(Exception,))
        with pytest.raises(MeshErrorGroup) as group:
            await actor.retried.options(retry=retry).call()
        assert group.group_contains(REFUSING[kind])
        with pytest.raises(MeshErrorGroup) as group:
            async with actor.retried.options(retry=retry).map([1]) as results:
                async for _ in results:
                    pass
        assert group.group_contains(REFUSING[kind])
        assert await actor.ok.call_one() == 1


@pytest.mark.real
@pytest.mark.parametrize("kind", REFUSING)
def test_error_of_a_thread_that_refuses_attributes_arrives(kind: str):
    """E05: Trio, too, writes to errors that leave its threads."""

    async def main() -> None:
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            actor = await procs.spawn("actor", Refusing, kind)
            with pytest.raises(REFUSING[kind]):
                await actor.threaded.call_one()
            assert await actor.ok.call_one() == 1

    trio.run(main)


@pytest.mark.parametrize("kind", REFUSING)
@pytest.mark.parametrize("where", ["init", "clean-up"])
async def test_error_that_refuses_attributes_ends_an_actor(backend: Backend, kind: str, where: str):
    """E11, E07: set-up and clean-up fail by it, and by nothing else."""
    with pytest.raises(MeshErrorGroup) as group:
        async with backend.procs({"gpus": 1}) as procs:
            await procs.spawn("actor", Refusing, kind, where)
    assert [type(leaf) for leaf in trimesh.leaves(group.value)] == [REFUSING[kind]]
    assert trimesh.coords(group.value) == [{"gpus": 0}]


@pytest.mark.parametrize("kind", REFUSING)
async def test_error_that_refuses_attributes_passes_blocks(backend: Backend, kind: str):
    """X1: blocks pass it on as it is, or in their group."""
    async with backend.procs({"gpus": 1}) as procs:
        actor = await procs.spawn("actor", Refusing, kind)
        with pytest.raises(REFUSING[kind]):
            async with trimesh.open_channel(int, capacity=1):
                raise REFUSING[kind](404)
        with pytest.raises(REFUSING[kind]), trimesh.configured(grace=3):
            raise REFUSING[kind](404)
        with pytest.raises(REFUSING[kind]):
            async with actor.items.stream():
                raise REFUSING[kind](404)


class Info:
    """Does not travel."""

    def __init__(self) -> None:
        self.url = "http://x"
        self.lock = threading.Lock()


class ResponseError(Exception):
    """Makes its text from a part that does not travel."""

    def __init__(self, info: Info, status: int) -> None:
        super().__init__(info, status)
        self.info = info
        self.status = status

    def __str__(self) -> str:
        return f"{self.status}, url={self.info.url}"


class Outer(Actor):
    """Calls an actor of the first half of its mesh, in another process."""

    @endpoint
    async def get(self) -> None:
        raise ResponseError(Info(), 404)

    @endpoint
    async def relay(self) -> None:
        await context(self).actors.slice(gpus=0).get.call_one()


async def test_text_of_an_error_travels_beside_its_parts(backend: Backend):
    """X2: `str()` gives the text of the other process, also over a second hop, and where a part did not travel."""
    async with backend.procs({"gpus": 2}) as procs:
        outer = await procs.spawn("outer", Outer)
        for call in (outer.slice(gpus=0).get.call_one, outer.slice(gpus=1).relay.call_one):
            with pytest.raises(ResponseError) as caught:
                await call()
            assert str(caught.value) == "404, url=http://x"
            assert caught.value.status == 404
            assert type(caught.value).__name__ == "ResponseError"
