"""`pickle="off"`: no byte is unpickled, values are what annotations say, one family has one mode (V2)."""

from __future__ import annotations

import enum
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, NoReturn, TypeVar

import attrs
import pytest
from tests.conformance.meshes import Backend, params

import trimesh
from trimesh import Actor, MeshErrorGroup, ProtocolError, RemoteError, Reply, endpoint, this_host, this_proc
from trimesh._runtime.life.current import current_proc
from trimesh._wire.memory import DefinitionId
from trimesh._wire.pickled import payload

numpy = pytest.importorskip("numpy")

pytestmark = pytest.mark.daily("sim-typed")
typed = pytest.mark.parametrize("backend", params("sim-typed", "real-typed"), indirect=True)


T = TypeVar("T")


class Mood(enum.Enum):
    CALM = "calm"


@attrs.define
class Batch:
    number: int
    names: list[str]
    mood: Mood = Mood.CALM


class Shelf(Actor, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @endpoint
    async def swap(self, value: T) -> T:
        self.value, value = value, self.value
        return value

    @endpoint
    async def several(self, values: list[T]) -> AsyncIterator[T]:
        for value in values:
            yield value

    @endpoint
    async def ask(self, other: Shelf[Batch]) -> Batch:
        return await other.swap.call_one(Batch(0, ["asked"]))


class Batches(Shelf[Batch]):
    """Has its type argument in its definition."""


class Loop(trimesh.aio.Actor, Generic[T]):
    @endpoint
    async def same(self, value: T, batch: Batch) -> T:
        assert type(batch) is Batch
        return value

    @endpoint
    async def several(self, value: T) -> AsyncIterator[T]:
        yield value


class CodeError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)
        self.code = code


class Worker(Actor):
    def __init__(self, first: Batch) -> None:
        self.batch = first

    @endpoint(reply="later")
    def swap_later(self, reply: Reply[Batch], batch: Batch) -> None:
        with pytest.raises(TypeError, match="Batch"):
            reply.send("no batch")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        reply.send(self.batch)
        self.batch = batch

    @endpoint
    async def swap(self, batch: Batch) -> Batch:
        self.batch, batch = batch, self.batch
        return batch

    @endpoint
    async def grow(self, array: numpy.ndarray) -> numpy.ndarray:  # type: ignore[name-defined]
        array += 1
        return array

    @endpoint
    async def fail(self) -> None:
        raise CodeError(code=7)

    @endpoint
    async def lie(self) -> int:
        return "no number"  # type: ignore[return-value]

    @endpoint
    async def count(self, to: int) -> AsyncIterator[Batch]:
        for number in range(to):
            yield Batch(number, [])

    @endpoint
    async def ask(self, other: Worker) -> list[Batch]:
        return list((await other.swap.call(Batch(0, ["asked"]))).values())

    @endpoint
    async def loads_something(self) -> None:
        pickle.loads(b"")


UNPICKLERS: list[tuple[Any, str]] = [
    (pickle, "loads"),
    (pickle, "load"),
    (pickle, "Unpickler"),
    (payload, "_Unpickler"),
    (payload.Decoder, "_load"),
]


def poison() -> None:
    """Let every way of unpickling fail, in a worker and in the program that calls it."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was unpickled")

    for where, name in UNPICKLERS:
        setattr(where, name, refuse)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Poison this process, and return what poisons a worker; after the test this process is as it was."""
    for where, name in UNPICKLERS:
        monkeypatch.setattr(where, name, getattr(where, name))
    poison()
    return poison


@typed
async def test_nothing_is_unpickled_by_anybody(backend: Backend, poisoned: Callable[[], None]):
    """V2: calls, results, errors, streams, handles and set-up go their way where unpickling fails."""
    async with backend.procs(setup=poisoned) as procs:
        workers = await procs.spawn("workers", Worker, Batch(1, ["first"]))
        with pytest.raises(MeshErrorGroup) as caught:  # it is poisoned over there, too
            await workers.loads_something.call()
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {AssertionError}
        assert (await workers.swap.call(Batch(2, ["b"]))).values() == (Batch(1, ["first"]),) * 2
        array = numpy.arange(100_000)
        assert all(found[-1] == 100_000 for found in (await workers.grow.call(array)).values())
        assert array[-1] == 99_999
        with pytest.raises(CodeError) as failed:
            await workers.slice(gpus=0).fail.call_one()
        assert failed.value.code == 7
        async with workers.slice(gpus=0).count.stream(3) as results:
            assert [item async for _, item in results] == [Batch(n, []) for n in range(3)]
        asked = await workers.slice(gpus=0).ask.call_one(workers.slice(gpus=slice(1, 2)))
        assert asked == [Batch(2, ["b"])]


@typed
async def test_argument_that_does_not_fit_is_refused_here(backend: Backend):
    async with backend.procs() as procs:
        workers = await procs.spawn("workers", Worker, Batch(1, []))
        wrong: Any = {"number": 2}
        with pytest.raises(TypeError, match=r"argument 'batch' of workers.swap\(\)"):
            await workers.swap.call(wrong)
        with pytest.raises(TypeError, match=r"argument 'first' of Worker\(\)"):
            await procs.spawn("others", Worker, wrong)
        assert (await workers.swap.call(Batch(2, []))).values() == (Batch(1, []),) * 2


@typed
async def test_result_that_does_not_fit_is_an_error_of_the_endpoint(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs:
        worker = await procs.spawn("worker", Worker, Batch(1, []))
        with pytest.raises(TypeError, match=r"the result of lie\(\) does not fit its annotation int"):
            await worker.lie.call_one()


@typed
async def test_class_without_a_name_over_there_is_refused(backend: Backend):
    """V2: nothing goes by value; the text says what to do."""

    class Local(Actor):
        @endpoint
        async def fail(self) -> None:
            raise NotImplementedError

    async with backend.procs() as procs:
        with pytest.raises(TypeError, match="define it at the top of a module"):
            await procs.spawn("local", Local)
        with pytest.raises(TypeError, match=r"argument 'function' .* define it at the top of a module"):
            async with backend.procs(setup=lambda: None):
                pass


@typed
async def test_definition_of_a_peer_is_a_protocol_error(backend: Backend):
    async with backend.procs():
        with pytest.raises(ProtocolError, match="no definitions"):
            current_proc().values.define(DefinitionId("a.1"), b"")


async def test_family_has_one_mode(backend: Backend):
    """A block inside takes over the mode, may say the same, and is refused another."""
    other: Any = {"on": "off", "off": "on"}[backend.pickle]
    async with backend.procs() as procs, this_host().spawn_procs({"gpus": 1}) as inner:
        assert current_proc().values.is_pickled == (backend.pickle == "on")
        with pytest.raises(ValueError, match="must use the same pickle="):
            async with this_host().spawn_procs({"gpus": 1}, pickle=other):
                pass
        assert (len(procs), len(inner)) == (2, 1)


async def test_mode_must_be_on_or_off():
    wrong: Any = False
    with pytest.raises(ValueError, match='pickle must be "on" or "off"'):
        this_host().spawn_procs({"gpus": 1}, pickle=wrong)


class Telling(Actor):
    @endpoint
    async def tell(self, port: Any, numbers: list[int]) -> None:
        async with port:
            for number in numbers:
                await port.send((number, {"square": number**2}))


@typed
async def test_port_travels(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs:
        teller = await procs.spawn("teller", Telling)
        async with trimesh.open_channel(tuple, capacity=4) as (port, receiver):
            await teller.tell.broadcast(port, [1, 2])
            await port.aclose()
            assert [item async for item in receiver] == [(1, {"square": 1}), (2, {"square": 4})]


@typed
async def test_exception_of_a_class_that_is_not_here_is_a_remote_error(backend: Backend):
    async with backend.procs({"gpus": 1}), this_proc().spawn("here", Raising) as here:
        with pytest.raises(RemoteError, match="Hidden"):
            await here.hide.call_one()


class Raising(Actor):
    @endpoint
    async def hide(self) -> None:
        class Hidden(Exception):
            pass

        raise Hidden("nobody knows")


@typed
async def test_each_member_gets_its_own_without_pickle(backend: Backend):
    """V2: each value by the annotation of the parameter that it stands for; one that does not fit is refused here."""
    async with backend.procs() as procs:
        workers = await procs.spawn("workers", Worker, Batch(0, []))
        own = trimesh.per_rank([Batch(1, ["one"]), Batch(2, ["two"])])
        assert list((await workers.swap.call(own)).values()) == [Batch(0, [])] * 2
        assert list((await workers.swap.call(own)).values()) == [Batch(1, ["one"]), Batch(2, ["two"])]
        with pytest.raises(TypeError, match="batch"):
            await workers.swap.call(trimesh.per_rank([Batch(1, []), 2]))


@typed
async def test_answers_that_come_later_fit_the_reply(backend: Backend):
    """A3, V2: what `Reply[T]` says counts as what `-> T` does."""
    async with backend.procs({"gpus": 1}) as procs:
        worker = await procs.spawn("worker", Worker, Batch(1, ["first"]))
        assert await worker.swap_later.call_one(Batch(2, ["second"])) == Batch(1, ["first"])
        assert await worker.swap.call_one(Batch(3, [])) == Batch(2, ["second"])


@typed
async def test_type_arguments_of_an_actor_class_bind_its_annotations(backend: Backend) -> None:
    """V2: `Shelf[Batch]` takes and returns batches; `Shelf[int]` refuses them, before anything is sent."""
    async with backend.procs({"gpus": 2}) as procs:
        shelf = await procs.spawn("shelf", Shelf[Batch], Batch(1, ["a"]))
        batches = await procs.spawn("batches", Batches, Batch(2, []))
        for mesh in (shelf.slice(gpus=0), batches.slice(gpus=1)):
            first = await mesh.swap.call_one(Batch(3, ["b"]))
            assert type(first) is Batch
            assert await mesh.swap.call_one(first) == Batch(3, ["b"])
            async with mesh.several.stream([Batch(4, []), Batch(5, [])]) as items:
                assert [item async for _, item in items] == [Batch(4, []), Batch(5, [])]
        assert await batches.slice(gpus=0).ask.call_one(shelf.slice(gpus=1)) == Batch(1, ["a"])
        numbers = await procs.spawn("numbers", Shelf[int], 3)
        assert list((await numbers.swap.call(4)).values()) == [3, 3]
        with pytest.raises(TypeError, match=r"argument 'value' of numbers\.swap\(\) does not fit its annotation int"):
            await numbers.swap.call("text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"argument 'value' of Shelf\(\) does not fit its annotation int"):
            await procs.spawn("others", Shelf[int], "text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        here: Any = attrs.make_class("Here", {"number": attrs.field(type=int)})
        with pytest.raises(TypeError, match=r"type of the arguments of Shelf\[\.\.\.\] must be importable by name"):
            await procs.spawn("local", Shelf[here], here(1))


@pytest.mark.parametrize("backend", params("real-typed"), indirect=True)
async def test_annotations_of_asyncio_actors_count(backend: Backend) -> None:
    """V2: those of the endpoint, not of what runs it on the loop."""
    async with backend.procs({"gpus": 1}) as procs:
        loops = await procs.spawn("loops", Loop[Batch])
        assert await loops.same.call_one(Batch(1, []), Batch(2, [])) == Batch(1, [])
        async with loops.several.stream(Batch(3, [])) as items:
            assert [item async for _, item in items] == [Batch(3, [])]
