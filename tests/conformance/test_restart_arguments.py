"""What an actor is made from the second time (API 6): the arguments of the first spawn, ports among them."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend
from tests.conformance.probe import Probe
from tests.conformance.supervised import Ledger, kill_and_wait, reading, restart

import trimesh
from trimesh import (
    MeshErrorGroup,
    ProcDied,
    RestartLimit,
    endpoint,
)

numpy = pytest.importorskip("numpy", reason="arrays need numpy")


@pytest.mark.by_value
async def test_arguments_are_those_of_the_first_spawn(backend: Backend):
    """API 6: what the caller changes later does not reach the next incarnation; classes by value still work."""

    class Local:
        value = 3

    settings = {"size": 1, "kind": Local}
    async with backend.procs(supervision=restart()) as procs, reading(procs) as log:
        ledgers = await procs.spawn("ledgers", Ledger, settings)
        settings["size"] = 2
        await kill_and_wait(backend, procs, log, 0)
        ((found,), _) = await ledgers.slice(gpus=0).origin_of.call_one()
        assert found["size"] == 1
        assert found["kind"] is Local


async def test_large_arguments_are_kept(backend: Backend):
    weights = numpy.ones(100_000)
    async with backend.procs({"gpus": 1}, supervision=restart()) as procs, reading(procs) as log:
        ledger = await procs.spawn("ledger", Ledger, weights)
        weights[:] = 5.0
        await kill_and_wait(backend, procs, log, 0)
        ((found,), _) = await ledger.origin_of.call_one()
        assert found.sum() == 100_000


class Telling(Probe):
    """Says by a port which incarnation it is."""

    def __init__(self, port: Any) -> None:
        super().__init__()
        self.port = port

    @endpoint
    async def tell(self) -> None:
        await self.port.send(trimesh.context().incarnation)


async def test_port_among_the_arguments_reaches_the_next_incarnation(backend: Backend):
    """API 6: as long as the owner has not closed it."""
    async with (
        trimesh.open_channel(int, capacity=8) as (port, receiver),
        backend.procs({"gpus": 1}, supervision=restart()) as procs,
        reading(procs) as log,
    ):
        telling = await procs.spawn("telling", Telling, port)
        await telling.tell.call_one()
        await kill_and_wait(backend, procs, log, 0)
        await telling.tell.call_one()
        assert [await receiver.receive(), await receiver.receive()] == [0, 1]


async def test_closed_port_among_the_arguments_keeps_the_actor_down(backend: Backend):
    """R05: the error says what is wrong."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with (
            trimesh.open_channel(int, capacity=8) as (port, _),
            backend.procs({"gpus": 1}, supervision=restart(intensity=1)) as procs,
        ):
            await procs.spawn("telling", Telling, port)
            await port.aclose()
            backend.kill(procs, 0)
            await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, RestartLimit)
    assert [type(cause) for cause in leaf.causes] == [ProcDied, TypeError]
    assert "a port must be open" in str(leaf.causes[1])
