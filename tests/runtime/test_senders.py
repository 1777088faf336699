"""Each kind of message, and each call of the agent, forged by every process that may not send it."""

from __future__ import annotations

import typing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import trio
from tests.rows import rows
from tests.runtime.frames import RecordingLink, RecordingTransport

from trimesh import limits
from trimesh._runtime.actors.agent import Agent
from trimesh._runtime.actors.cell import ActorSpec, Cell
from trimesh._runtime.life.family import Family
from trimesh._runtime.life.proc import Proc, crash
from trimesh._runtime.meshes.member import Member
from trimesh._runtime.peers.senders import AGENT_CALLERS, SENDERS, Sender, check_agent_caller, check_sender
from trimesh._runtime.services.registry import TENSORS
from trimesh._runtime.tasks.background import Tasks
from trimesh._runtime.values.endpoint_spec import ENDPOINTS
from trimesh._wire import messages
from trimesh._wire.memory import NotYet
from trimesh._wire.messages import Calls
from trimesh._wire.observed import NodeKind, NodeRef
from trimesh.errors import ProtocolError
from trimesh.ids import AGENT, MeshId, ProcId
from trimesh.shape.extent import Extent

FamilyOf = tuple[Proc, dict[ProcId, RecordingLink]]
ME, OWNER, ROOT, CHILD, SIBLING = map(ProcId, range(1, 6))
ALLOWED = {
    Sender.ANY: {ME, OWNER, ROOT, CHILD, SIBLING},
    Sender.OWNER: {ME, OWNER},
    Sender.MEMBER: {ME, CHILD},
    Sender.CONTROLLER: {ROOT},
}
REF = NodeRef(NodeKind.CALL, ME, ROOT, 5)
FORGED: dict[type[messages.Message], messages.Message] = {
    messages.ActorFailure: messages.ActorFailure(5, "", True, b""),
    messages.Finished: messages.Finished(5),
    messages.Look: messages.Look(1, (REF,)),
    messages.Break: messages.Break(1, REF, ()),
    messages.Disconnect: messages.Disconnect(99),
}


@asynccontextmanager
async def open_family() -> AsyncIterator[FamilyOf]:
    """Open a worker that has an owner, a child and a sibling, in a family with another controller."""
    async with trio.open_nursery() as nursery:
        yield make(nursery)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def family() -> AsyncIterator[FamilyOf]:
    async with open_family() as opened:
        yield opened


def make(nursery: trio.Nursery) -> tuple[Proc, dict[ProcId, RecordingLink]]:
    """Return that worker and its links."""
    proc = Proc(ME, RecordingTransport(), seed=1)
    host: Any = nullcontext()
    proc.family = Family(proc, lambda _: host, parent=OWNER, root=ROOT)
    links = {proc_id: RecordingLink() for proc_id in (OWNER, ROOT, CHILD, SIBLING)}
    for proc_id, link in links.items():
        proc.adopt_link(proc_id, link)
    proc.nursery = Tasks(partial(crash, proc), nursery)
    proc.members[CHILD] = Member(proc, proc.peer(CHILD), 0, "child", Extent().point(0), 0, lambda _: None)
    agent = Agent(proc)
    proc.cells[AGENT] = Cell(proc, ActorSpec(AGENT, "agent", Agent, lambda: agent, Extent().point(0)), proc.peer(OWNER))
    return proc, links


def test_every_kind_is_in_the_table():
    """Who adds a kind, or an endpoint of the agent, says who may send it."""
    assert set(SENDERS) == set(typing.get_args(messages.AnyMessage))
    assert set(AGENT_CALLERS) == set(getattr(Agent, ENDPOINTS))


def test_kinds_that_are_read_before_the_table_are_for_all():
    """These are on the way of each call, where nothing is looked up."""
    read_first = (messages.Call, messages.Cancel, messages.Credit, *typing.get_args(messages.Terminal))
    assert {SENDERS[kind] for kind in read_first} == {Sender.ANY}


@rows("kind", list(SENDERS))
@rows("sender", [ME, OWNER, ROOT, CHILD, SIBLING])
async def test_sender_of_each_kind(kind: type[messages.Message], sender: ProcId):
    async with open_family() as (proc, _):
        if sender in ALLOWED[SENDERS[kind]]:
            check_sender(proc.peer(sender), kind)
        else:
            with pytest.raises(ProtocolError, match=f"must come from .* got one of process {sender}"):
                check_sender(proc.peer(sender), kind)


@rows("kind", list(FORGED))
async def test_forged_message_ends_the_link_of_who_sent_it(kind: type[messages.Message]):
    async with open_family() as (proc, links):
        proc.received(links[SIBLING], memoryview(messages.encode(FORGED[kind])), [])
        assert links[SIBLING].aborted
        assert links[SIBLING].sent == []
        assert not any(link.aborted for proc_id, link in links.items() if proc_id != SIBLING)


@rows("sender", [OWNER, ROOT, CHILD, SIBLING])
@rows("endpoint", list(AGENT_CALLERS))
async def test_agent_obeys_its_owner(endpoint: str, sender: ProcId):
    """A call of the agent by any other process ends its link before anything of the call is decoded."""
    async with open_family() as (proc, links):
        window = int(endpoint in ("lend", "lend_hosts"))  # a stream
        call = messages.Call(9, AGENT, endpoint, None, b"not even a payload", window)
        proc.received(links[sender], memoryview(messages.encode(call)), [])
        if not window:  # the same among several
            several = Calls(AGENT, endpoint, None, ((10, b"not even a payload"),))
            proc.received(links[sender], memoryview(messages.encode(several)), [])
        is_allowed = sender in ALLOWED[AGENT_CALLERS[endpoint]]
        assert links[sender].aborted is not is_allowed
        assert len(proc.peer(sender).inbound) == (2 - window if is_allowed else 0)


async def test_controller_obeys_itself():
    """In the controller, nobody but the process itself is the owner."""
    proc = Proc(ME, RecordingTransport(), seed=1)
    host: Any = nullcontext()
    proc.family = Family(proc, lambda _: host)
    check_agent_caller(proc.me, "spawn")
    check_sender(proc.me, messages.Look)
    for sender in (OWNER, CHILD):
        with pytest.raises(ProtocolError, match="the process that has started the receiver"):
            check_agent_caller(proc.peer(sender), "spawn")


async def test_service_is_imported_for_the_owner_alone(family: FamilyOf):
    """What others send waits, to a bound: a worker cannot make the controller import torch."""
    proc, links = family
    head = memoryview(messages.encode(messages.Service(TENSORS, b"x")))
    for _ in range(limits.SERVICE_EARLY_MESSAGES):
        proc.received(links[SIBLING], head, [])
    assert not links[SIBLING].aborted
    proc.received(links[SIBLING], head, [])
    assert links[SIBLING].aborted
    with pytest.raises(TypeError, match="only to a process that has loaded"):
        proc.services.rebuild(TENSORS, [])
    proc.received(links[OWNER], head, [])
    with pytest.raises(NotYet):
        proc.services.rebuild(TENSORS, [])


async def test_tables_do_not_grow_by_what_names_nothing(family: FamilyOf):
    """Credits for actors that nothing was sent to leave no trace, and cancels ahead of their calls are bounded."""
    proc, links = family
    peer = proc.peer(SIBLING)
    for mesh in range(100):
        proc.received(links[SIBLING], memoryview(messages.encode(messages.Credit(MeshId(mesh + 1), 0))), [])
    assert peer.outboxes() == []
    for call in range(limits.EARLY_CANCELS_MAX):
        peer.early_cancels[call] = ""
    proc.received(links[SIBLING], memoryview(messages.encode(messages.Cancel(99, 1, "x"))), [])
    assert links[SIBLING].aborted
