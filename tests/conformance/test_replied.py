"""`options(reply_to=port).broadcast`: every outcome comes to a port, once (rule A4)."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, fill, tick
from tests.conformance.probe import Probe

from trimesh import (
    Isolate,
    MeshErrorGroup,
    Outcome,
    Point,
    Port,
    ProcDied,
    Receiver,
    RemoteCancelled,
    endpoint,
    leaves,
    open_channel,
    origin,
)

Reply = tuple[Point, Outcome[Any]]


class Asker(Probe):
    """Sends for others."""

    @endpoint
    async def ask(self, target: Probe, error: Exception, port: Port[Any]) -> None:
        await target.fail.options(reply_to=port).broadcast(error, [0])


async def all_of(receiver: Receiver[Any]) -> dict[int, Outcome[Any]]:
    """Return the outcomes by rank, when no port is left."""
    found: list[Reply] = [reply async for reply in receiver]
    ranks = [point["gpus"] for point, _ in found]
    assert len(set(ranks)) == len(ranks)
    return {rank: outcome for rank, (_, outcome) in zip(ranks, found, strict=True)}


async def test_outcomes_come_to_the_port(backend: Backend):
    """A4: values and errors, with coordinates; the channel ends after the last one."""
    async with backend.procs() as procs, open_channel(capacity=4) as (port, receiver):
        probes = await procs.spawn("probes", Probe)
        await probes.fail.options(reply_to=port).broadcast(ValueError("no"), [0])
        await port.aclose()
        outcomes = await all_of(receiver)
        assert outcomes.keys() == {0, 1}
        assert outcomes[1].unwrap() == 1
        with pytest.raises(ValueError, match="no") as caught:
            outcomes[0].unwrap()
        where = origin(caught.value)
        assert where is not None
        assert (where.mesh, where.point) == ("probes", {"gpus": 0})


async def test_outcomes_fit_the_type_of_their_channel(backend: Backend):
    """A4: a channel may be opened for outcomes of the endpoint; what does not fit fails the block."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with open_channel(tuple[Point, Outcome[int]], capacity=4) as (port, receiver):
            await probes.fail.options(reply_to=port).broadcast(ValueError("no"), [0])
            await port.aclose()
            outcomes = await all_of(receiver)
        assert outcomes[1].unwrap() == 1
        assert isinstance(outcomes[0].error, ValueError)


async def test_outcomes_come_as_members_end(backend: Backend):
    """A4: one that is done is told while another one runs, and the sender does not wait for either."""
    async with backend.procs() as procs, open_channel(capacity=4) as (port, receiver):
        probes = await procs.spawn("probes", Probe)
        await probes.slice(gpus=1).open_gate.call()
        await probes.wait_for_gate.options(reply_to=port).broadcast()
        point, first = await receiver.receive()
        assert (point["gpus"], first.unwrap()) == (1, "gate")
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        await probes.slice(gpus=0).open_gate.call()
        point, last = await receiver.receive()
        assert (point["gpus"], last.unwrap()) == (0, "gate")


async def test_dead_member_has_an_outcome(backend: Backend):
    """A4, X1: its death, at once, beside the values of the others."""
    async with backend.procs(supervision=Isolate()) as procs, open_channel(capacity=4) as (port, receiver):
        probes = await procs.spawn("probes", Probe)
        await probes.wait_for_gate.options(reply_to=port).broadcast()
        await port.aclose()
        await probes.wait.call("gate")
        backend.kill(probes, 1)
        point, death = await receiver.receive()
        assert point["gpus"] == 1
        assert isinstance(death.error, ProcDied)
        await probes.slice(gpus=0).open_gate.call()
        assert (await all_of(receiver))[0].unwrap() == "gate"


async def test_replies_come_in_another_process(backend: Backend):
    """A4: the port may be from anywhere, and the sender an actor."""
    async with backend.procs() as procs, open_channel(capacity=4) as (port, receiver):
        probes = await procs.spawn("probes", Probe)
        asker = (await procs.spawn("askers", Asker)).slice(gpus=1)
        await asker.ask.call_one(probes, ValueError("no"), port)
        await port.aclose()
        outcomes = await all_of(receiver)
        assert outcomes[1].unwrap() == 1
        assert isinstance(outcomes[0].error, ValueError)


async def test_block_waits_for_the_replies(backend: Backend):
    """A4: as for a call that was started."""
    async with open_channel(capacity=4) as (port, receiver):
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            await probes.wait_for_gate.options(reply_to=port).broadcast()
            await probes.open_gate.call()
        await port.aclose()
        assert [outcome.unwrap() for _, outcome in sorted((await all_of(receiver)).items())] == ["gate", "gate"]


async def test_replies_of_a_block_that_fails(backend: Backend):
    """A4: what is cancelled with the block has an outcome, too, where the channel has room."""
    async with open_channel(capacity=4) as (port, receiver):
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs() as procs:
                probes = await procs.spawn("probes", Probe)
                await probes.hold.options(reply_to=port).broadcast()
                await probes.wait.call("hold")
                raise LookupError("of the block")
        assert [str(leaf) for leaf in leaves(caught.value)] == ["of the block"]
        await port.aclose()
        outcomes = await all_of(receiver)
        assert outcomes.keys() == {0, 1}
        assert all(isinstance(outcome.error, RemoteCancelled) for outcome in outcomes.values())


async def test_error_that_no_receiver_gets_fails_the_block(backend: Backend):
    """A4, E03: it is never lost; a value may be."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            async with open_channel(capacity=4) as (port, _):
                await probes.wait_for_gate.options(reply_to=port).broadcast()
                await probes.slice(gpus=0).fail.options(reply_to=port).broadcast(ValueError("of one"))
            await probes.open_gate.call()
            await trio.sleep_forever()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["of one"]


async def test_sender_waits_until_the_message_has_left(backend: Backend):
    """A4, S07: a full mailbox makes it wait; cancelled there, it takes the message back, which has an outcome."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(capacity=4) as (port, receiver):
        probe = await procs.spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            gated = attempt(nursery, probe.wait_for_gate.call_one)
            await probe.wait.call_one("gate")
            queued = fill(probe.note, "queued")
            cut = attempt(nursery, probe.note.options(reply_to=port).broadcast, "cut")
            waiting = attempt(nursery, probe.note.options(reply_to=port).broadcast, "waited")
            await tick(10)
            assert not waiting.over.is_set()
            cut.cancel()
            _, outcome = await receiver.receive()
            assert isinstance(outcome.error, RemoteCancelled)
            assert cut.cancelled
            gated.cancel()
            await waiting.result()
        await port.aclose()
        assert (await all_of(receiver))[0].unwrap() == "waited"
        assert await probe.seen.call_one() == ["gate", *["queued"] * queued, "waited"]


async def test_port_that_cannot_be_used_is_refused(backend: Backend):
    """A4: before anything is sent; other verbs have replies of their own."""
    async with backend.procs({"gpus": 1}) as procs, open_channel(capacity=4) as (port, _):
        probe = await procs.spawn("probe", Probe)
        with pytest.raises(TypeError, match=r"reply_to must be a trimesh\.Port, got 3"):
            probe.note.options(reply_to=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"reply_to of probe\.note means nothing for call; it is for: broadcast"):
            await probe.note.options(reply_to=port).call("no")
        with pytest.raises(TypeError, match="nothing for call_reduced"):
            await probe.note.options(reply_to=port).call_reduced(operator.add)("no")
        with pytest.raises(TypeError, match="note"):
            await probe.note.options(reply_to=port).broadcast()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        await port.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await probe.note.options(reply_to=port).broadcast("no")
        assert await probe.seen.call_one() == []
