"""Items of channels with `pickle="off"`: they travel by the T of `open_channel(T)` (T2, V2; API 3)."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from tests.conformance.meshes import Backend, params

import trimesh
from trimesh import Actor, Port, endpoint, open_channel, this_proc

pytestmark = [
    pytest.mark.parametrize("backend", params("sim-typed", "real-typed"), indirect=True),
    pytest.mark.daily("sim-typed"),
]


@attrs.frozen
class Loss:
    rank: int
    values: list[float]


@attrs.frozen
class Offer:
    """A record with a port in it."""

    name: str
    port: Port[Loss]


class Trainer(Actor):
    """Sends what it is told to; the annotation of its port says nothing, the channel does."""

    def __init__(self) -> None:
        self.ports: list[Any] = []

    @endpoint
    async def train(self, port: Port[Loss], steps: int) -> None:
        async with port:
            for step in range(steps):
                await port.send(Loss(trimesh.current_rank(), [float(step)]))

    @endpoint
    async def send(self, port: Port[Any], value: Any) -> None:
        await port.send(value)

    @endpoint
    async def send_now(self, port: Port[Any], value: Any) -> None:
        port.send_nowait(value)

    @endpoint
    async def pass_on(self, port: Port[Loss], other: Trainer) -> None:
        """Give the port to somebody else, and the answer."""
        await other.train.call_one(port, 1)

    @endpoint
    async def take_offer(self, offer: Offer) -> None:
        async with offer.port:
            await offer.port.send(Loss(len(offer.name), []))

    @endpoint
    async def answer_to(self, ports: Port[Port[Loss]]) -> None:
        """Open a channel here, whose port goes through another one."""
        async with open_channel(Loss, capacity=1) as (port, receiver):
            await ports.send(port)
            await port.aclose()
            self.answers = [item async for item in receiver]

    @endpoint
    async def answered(self) -> list[Loss]:
        return self.answers


async def test_item_arrives_as_its_class(backend: Backend):
    async with backend.procs() as procs, open_channel(Loss, capacity=4) as (port, receiver):
        trainers = await procs.spawn("trainers", Trainer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainers.train.call, port, 3)
            await port.send(Loss(-1, []))
            first = await receiver.receive()
            await port.aclose()
            items = [first] + [item async for item in receiver]
        assert sorted(items, key=lambda item: (item.rank, item.values)) == [
            Loss(-1, []),
            *[Loss(rank, [float(step)]) for rank in range(2) for step in range(3)],
        ]


async def test_containers_and_unions_are_types_too(backend: Backend):
    union: Any = dict[str, list[Loss]] | None
    async with backend.procs({"gpus": 1}), open_channel(union, capacity=4) as (port, receiver):
        for value in ({"all": [Loss(1, [0.5])]}, None):
            await port.send(value)
            assert await receiver.receive() == value
        with pytest.raises(TypeError, match="an item of a channel does not fit its annotation"):
            await port.send({"all": [1]})


@pytest.mark.parametrize("capacity", [0, 1])
async def test_item_of_the_wrong_type_is_refused_at_its_sender(backend: Backend, capacity: int):
    """Here, and in another process, where the endpoint fails with it; the channel is none the worse."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(int, capacity=capacity) as (port, receiver):
        trainer = await procs.spawn("trainer", Trainer)
        wrong: Any = "three"
        text = "an item of a channel does not fit its annotation int: Expected `int`, got `str`"
        with pytest.raises(TypeError, match=text):
            await port.send(wrong)
        with pytest.raises(TypeError, match=text):
            port.send_nowait(wrong)
        for send in (trainer.send, trainer.send_now):
            with pytest.raises(TypeError, match=text) as caught:
                await send.call_one(port, wrong)
            assert trimesh.origin(caught.value).point == {"gpus": 0}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.send.call_one, port, 3)
            assert await receiver.receive() == 3


async def test_type_goes_where_the_port_goes(backend: Backend):
    """Through a process that only passes it on, and through another channel."""
    async with backend.procs() as procs, open_channel(Loss, capacity=4) as (port, receiver):
        trainers = await procs.spawn("trainers", Trainer)
        first, second = (trainers.slice(gpus=rank) for rank in range(2))
        await first.pass_on.call_one(port, second)
        assert await receiver.receive() == Loss(1, [0.0])

        async with open_channel(Port[Loss], capacity=1) as (ports, arriving), trio.open_nursery() as nursery:
            nursery.start_soon(first.answer_to.call_one, ports)
            inner = await arriving.receive()
            async with inner:
                wrong: Any = 1
                with pytest.raises(TypeError, match="expected exactly Loss, got int"):
                    await inner.send(wrong)
                await inner.send(Loss(7, [1.5]))
        assert await first.answered.call_one() == [Loss(7, [1.5])]


async def test_port_travels_in_a_record(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, open_channel(Loss, capacity=1) as (port, receiver):
        trainer = await procs.spawn("trainer", Trainer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.take_offer.call_one, Offer("four", port))
            assert await receiver.receive() == Loss(4, [])


async def test_port_that_has_come_home_knows_its_type(backend: Backend):
    """All that was here is closed; the one that comes back is told what the channel is for."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(Loss, capacity=1) as (port, receiver):
        keepers = await procs.spawn("keepers", Keeper)
        await keepers.keep.call_one(port)
        await port.aclose()
        back = await keepers.give_back.call_one()
        async with back:
            with pytest.raises(TypeError, match="expected exactly Loss"):
                await back.send(1)
            await back.send(Loss(0, []))
        assert [item async for item in receiver] == [Loss(0, [])]


class Keeper(Actor):
    def __init__(self) -> None:
        self.port: Any = None

    @endpoint
    async def keep(self, port: Port[Loss]) -> None:
        self.port = port

    @endpoint
    async def give_back(self) -> Port[Loss]:
        port, self.port = self.port, None
        return port  # type: ignore[no-any-return]


async def test_type_that_cannot_travel_is_refused_where_the_channel_is_opened(backend: Backend):
    class Local:
        pass

    async with backend.procs({"gpus": 1}):
        with pytest.raises(TypeError, match="define it at the top of a module"):
            async with open_channel(Local, capacity=1):
                pass


async def test_channel_without_a_type_takes_what_says_itself_what_it_is(backend: Backend):
    async with (
        backend.procs({"gpus": 1}),
        this_proc().spawn("trainer", Trainer) as trainer,
        open_channel(capacity=2) as (port, receiver),
    ):
        await trainer.send.call_one(port, (1, {"two": 3}))
        assert await receiver.receive() == (1, {"two": 3})
        with pytest.raises(TypeError, match="a Loss cannot be sent without an annotation"):
            await port.send(Loss(0, []))
