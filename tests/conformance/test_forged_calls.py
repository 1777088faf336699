"""A process that has been taken over: what it forges in the name of others reaches no agent (E12)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, member, params
from tests.patience import HANG_SECONDS

from trimesh import Actor, LinkLost, MeshErrorGroup, endpoint, leaves
from trimesh._runtime.actors.agent import Agent
from trimesh._runtime.actors.cell import keep
from trimesh._runtime.life.current import current_proc
from trimesh._runtime.peers.peer import Parcel
from trimesh._runtime.values.codec import place_payload
from trimesh._runtime.values.endpoint_spec import ENDPOINTS, MemberInfo, MeshInfo
from trimesh._wire import messages
from trimesh.ids import AGENT, MeshId, ProcId
from trimesh.shape.extent import Extent
from trimesh.shape.region import Region

forgeable = pytest.mark.parametrize("backend", params("sim", "sim-typed", "real-typed"), indirect=True)

MADE: list[int] = []


class Marker:
    """What a forged spawn makes, if it is obeyed."""

    def __init__(self, number: int) -> None:
        MADE.append(number)


class Forger(Actor):
    """Sends what its own process would never send."""

    @endpoint
    async def who(self) -> int:
        return int(current_proc().proc_id)

    @endpoint
    async def made(self) -> int:
        return len(MADE)

    @endpoint
    async def forge(self, name: str, victim: int) -> None:
        """Call the agent of another process; it obeys its owner only."""
        proc, target = current_proc(), ProcId(victim)
        peer = proc.peer(target)
        assert proc.family is not None
        await proc.family.connect([peer])
        whole = Region(Extent(), mesh="x")
        made: tuple[Any, ...] = (Marker, (1,), {})
        if name == "spawn_kept":
            made = (keep(proc.values, "forged", *made).value,)
        info = MeshInfo(MeshId(4242), "forged", "Marker", whole, (MemberInfo(target, "here", 1),), target)
        arguments: tuple[Any, ...] = (info, *made)
        arguments = {"exit": (), "stop": (MeshId(4242), 1.0), "spawn_kept": (*arguments, False)}.get(name, arguments)
        spec = getattr(Agent, ENDPOINTS)[name]
        payload, bodies = place_payload(proc.values.encode_call(arguments, {}, name, spec=spec))
        peer.send(Parcel(messages.encode(messages.Call(10**9, AGENT, name, None, payload)), list(bodies)))


@forgeable
@pytest.mark.parametrize("name", ["spawn", "spawn_kept", "stop", "exit"])
async def test_agent_of_the_controller_is_not_for_workers(backend: Backend, name: str):
    """The member that has forged a call is lost, and nothing of the call has happened."""
    MADE.clear()
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"n": 2}) as procs:
            forgers = await procs.spawn("forgers", Forger)
            await forgers.slice(n=0).forge.broadcast(name, int(current_proc_id()))
            with trio.fail_after(HANG_SECONDS):
                await trio.sleep_forever()
    found = list(leaves(caught.value))
    assert [type(leaf) for leaf in found] == [LinkLost]
    assert "must come from the process that has started the receiver" in str(found[0])
    assert MADE == []


@forgeable
@pytest.mark.parametrize("name", ["spawn", "spawn_kept", "stop", "exit"])
async def test_agent_of_a_worker_is_not_for_its_siblings(backend: Backend, name: str):
    """The sibling drops its link to the forger, and serves its owner as before."""
    MADE.clear()
    async with backend.procs({"n": 2}) as procs:
        forgers = await procs.spawn("forgers", Forger)
        victim = member(forgers, 1).proc_id
        await forgers.slice(n=0).forge.call_one(name, int(victim))
        assert await forgers.slice(n=1).made.call_one() == 0
        assert await forgers.slice(n=1).who.call_one() == victim


def current_proc_id() -> ProcId:
    """Return the controller's own."""
    return current_proc().proc_id
