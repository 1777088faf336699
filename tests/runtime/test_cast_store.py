"""Bodies of casts at a host: sent by the controller's side, kept by the agent's, mapped by a process."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.rows import rows

from trimesh import limits
from trimesh._runtime.hosts.casts import ANSWER, NOWHERE, REQUEST, CastRequest, CastSender, HostCasts
from trimesh._transport.messages.casts import CastLeaf, begin_casts
from trimesh._transport.messages.incoming import WHERE, AssemblyError, HostMemoryError, map_bodies
from trimesh._transport.messages.outgoing import IMMUTABLE, Completion
from trimesh._transport.relay import receive_exactly
from trimesh.ids import ProcId

SIZE = 300_000


def maps() -> int:
    """Return how many memories of casts this process has mapped or open."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        mapped = sum("trimesh-cast" in line for line in file)
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return mapped + sum("trimesh-cast" in link for link in links)


class Process:
    """A process of the host, as the link of its leaf has it."""

    def __init__(self) -> None:
        self.where = b""
        self.answered = trio.Event()
        self.in_chunks = False

    def offer(self, leaf: CastLeaf, where: bytes) -> None:
        self.where = where
        self.answered.set()

    def send_chunks(self, leaf: CastLeaf) -> None:
        self.in_chunks = True
        leaf.leave()
        self.answered.set()


@asynccontextmanager
async def agent() -> AsyncGenerator[trio.SocketStream, None]:
    """Run the agent's side; gives the controller's end of the channel."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(HostCasts(None).serve, theirs)
        with trio.fail_after(HANG_SECONDS):
            async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
                yield stream


async def keep(stream: trio.SocketStream, number: int, data: bytes) -> bytes:
    """Have the agent keep bytes; return where they are."""
    await stream.send_all(REQUEST.pack(CastRequest.KEEP, number, len(data), 0) + data)
    answer = await receive_exactly(stream.socket, ANSWER.size)
    assert answer is not None
    said, agent, where = ANSWER.unpack(answer)
    assert (said, agent) == (number, 0)
    return bytes(where)


async def test_cast_is_carried_once_mapped_by_each_process_and_let_go():
    """H6."""
    async with trio.open_nursery() as nursery:
        sender = CastSender(lambda sock: nursery.start_soon(HostCasts(None).serve, sock))
        nursery.start_soon(sender.run)
        array, text = bytearray(os.urandom(SIZE)), os.urandom(100)
        body = sender.caster.begin([array, text], 2)
        assert body is not None
        completion = Completion(2)
        leaves = [CastLeaf(b"head", [array, text], 1, completion, body) for _ in range(2)]
        processes = [Process(), Process()]
        with trio.fail_after(HANG_SECONDS):
            for leaf, process in zip(leaves, processes, strict=True):
                leaf.begin(process)
            for process in processes:
                await process.answered.wait()
            assert processes[0].where == processes[1].where
            first, second = (map_bodies(process.where, (SIZE, 100 | IMMUTABLE)) for process in processes)
            first[0][:4] = b"mine"
            assert second == [array, text]
            assert bytes(first[0][:4]) == b"mine", "what is mapped is private"
            assert type(second[1].obj) is bytes
            for leaf in leaves:
                leaf.finish()
            await completion.event.wait()
            del first
            assert second[0] == array, "a view keeps the memory that was let go"
            del second
            while maps():
                await trio.lowlevel.checkpoint()
        assert sender.caster.kept == 0
        nursery.cancel_scope.cancel()


async def test_channel_that_ends_sends_casts_in_chunks():
    async with trio.open_nursery() as nursery:
        sender = CastSender(socket.socket.close)
        nursery.start_soon(sender.run)
        body = sender.caster.begin([bytes(SIZE)], 2)
        assert body is not None
        process = Process()
        CastLeaf(b"head", [bytes(SIZE)], 1, Completion(1), body).begin(process)

        with trio.fail_after(HANG_SECONDS):
            await process.answered.wait()

        assert process.in_chunks
        assert sender.caster.begin([bytes(SIZE)], 2) is None
        nursery.cancel_scope.cancel()


async def test_host_without_memory_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    async with agent() as stream:
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            assert await keep(stream, 1, bytes(SIZE)) == NOWHERE
        assert await keep(stream, 2, bytes(SIZE)) != NOWHERE


def refuse(*_: object) -> int:
    raise OSError("there is none")


class Agents:
    """Three hosts in a chain, with what carries casts to each.

    Attributes:
        senders: By agent.
        apart: Agents that no other one reaches.
        cut: An agent to which feeds break in the middle.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._hosts = {agent: HostCasts(_Feeds(self, ProcId(agent))) for agent in (1, 2, 3)}
        self.senders = {agent: CastSender(partial(self._open, agent), agent, self) for agent in (1, 2, 3)}
        self.apart = set[int]()
        self.cut = 0
        for sender in self.senders.values():
            nursery.start_soon(sender.run)

    def _open(self, agent: int, sock: socket.socket) -> None:
        self._nursery.start_soon(self._hosts[agent].serve, sock)

    def feed(self, own: ProcId, peer: int, number: int, sock: socket.socket) -> None:
        if peer == self.cut:
            self.cut = 0
            self._nursery.start_soon(self._break, own, peer, number, sock)
        else:
            self._hosts[peer].take_feed(own, number, sock)

    async def _break(self, own: ProcId, peer: int, number: int, sock: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        sock.setblocking(False)
        with ours, trio.socket.from_stdlib_socket(sock) as feed:
            self._hosts[peer].take_feed(own, number, theirs)
            ours.send(await feed.recv(SIZE // 2))

    async def cast(self, *bodies: bytes) -> list[list[memoryview]]:
        """Cast to two processes of each host; return what one of each has mapped."""
        with trio.fail_after(HANG_SECONDS):
            begun = begin_casts(bodies, {sender.caster: 2 for sender in self.senders.values()})
            told = Completion(6)
            leaves = {body: [CastLeaf(b"", bodies, 1, told, body) for _ in range(2)] for body in begun.values()}
            found = list[list[memoryview]]()
            for of_host in leaves.values():
                for leaf in of_host:
                    process = Process()
                    leaf.begin(process)
                    await process.answered.wait()
                    assert not process.in_chunks
                found.append(map_bodies(process.where, [len(one) for one in bodies]))
            for leaf in chain.from_iterable(leaves.values()):
                leaf.finish()
            while any(sender.caster.kept for sender in self.senders.values()):
                await trio.lowlevel.checkpoint()
            return found


class _Feeds:
    def __init__(self, agents: Agents, own: ProcId) -> None:
        self._agents = agents
        self._own = own

    async def meet(self, peer: ProcId) -> bool:
        await trio.lowlevel.checkpoint()
        return peer not in self._agents.apart

    def open_feed(self, peer: ProcId, number: int, fd: int) -> bool:
        self._agents.feed(self._own, peer, number, socket.socket(fileno=fd))
        return True


@pytest.mark.parametrize("why", ["each is fed", "one is out of reach", "a feed breaks"])
async def test_hosts_feed_each_other(monkeypatch: pytest.MonkeyPatch, why: str):
    """H6, HB-4, HK-4: all of them have it, and nothing is left."""
    monkeypatch.setattr(limits, "HOST_CAST_HOP_BYTES", 1)
    data = os.urandom(2 * SIZE)
    async with trio.open_nursery() as nursery:
        agents = Agents(nursery)
        match why:
            case "one is out of reach":
                agents.apart = {2}
            case "a feed breaks":
                agents.cut = 3
        for _ in range(2):
            assert await agents.cast(data[:SIZE], data[SIZE:]) == [[data[:SIZE], data[SIZE:]]] * 3
        assert agents.senders[1].caster.unfed == ({2} if why == "one is out of reach" else set())
        assert agents.senders[2].caster.unfed == ({3} if why == "a feed breaks" else set())
        nursery.cancel_scope.cancel()
    gc.collect()
    assert maps() == 0


REQUESTS = {
    "an unknown kind": [bytes([5]) + REQUEST.pack(CastRequest.KEEP, 1, 64, 0)[1:]],
    "no zeros": [b"\1\1" + REQUEST.pack(CastRequest.KEEP, 1, 64, 0)[2:]],
    "nothing to keep": [REQUEST.pack(CastRequest.KEEP, 1, 0, 0)],
    "too much": [REQUEST.pack(CastRequest.KEEP, 1, limits.HOST_CAST_BYTES + 1, 0)],
    "bytes to let go": [REQUEST.pack(CastRequest.LET_GO, 1, 5, 0)],
    "fed by nobody": [REQUEST.pack(CastRequest.FED, 1, 64, 0)],
    "bytes to feed": [REQUEST.pack(CastRequest.FEED, 1, 64, 7)],
    "too many to feed": [REQUEST.pack(CastRequest.FEED, 1, 0, 7)] * (limits.HOST_CASTS_MAX + 1),
    "what is not kept": [REQUEST.pack(CastRequest.LET_GO, 1, 0, 0)],
    "a number twice": [REQUEST.pack(CastRequest.KEEP, 1, 64, 0), bytes(64), REQUEST.pack(CastRequest.KEEP, 1, 64, 0)],
    "too much together": [
        REQUEST.pack(CastRequest.KEEP, 1, 64, 0),
        bytes(64),
        REQUEST.pack(CastRequest.KEEP, 2, limits.HOST_CAST_BYTES, 0),
    ],
}


@rows("name", REQUESTS)
async def test_request_that_breaks_the_rules_ends_the_channel_and_keeps_nothing(name: str):
    """HK-1."""
    async with agent() as stream:
        for data in REQUESTS[name]:
            await stream.send_all(data)
        while await stream.receive_some():
            pass
    assert maps() == 0


async def test_only_memory_that_was_made_for_it_is_mapped():
    async with agent() as stream:
        pid, fd, size, drawn = WHERE.unpack(await keep(stream, 1, bytes(SIZE + 32)))
        table = (SIZE + 32,)
        assert len(map_bodies(WHERE.pack(pid, fd, size, drawn), table)) == 1
        other = os.memfd_create("other")
        for wrong in ((pid, fd, size, drawn ^ 1), (pid, fd + 999, size, drawn), (pid, other, size, drawn)):
            with pytest.raises(HostMemoryError):
                map_bodies(WHERE.pack(*wrong), table)
        os.close(other)
        there = WHERE.pack(pid, fd, size, drawn)
        for said, words in ((b"short", table), (there, (64,)), (WHERE.pack(pid, fd, 0, 1), ())):
            with pytest.raises(AssemblyError):
                map_bodies(said, words)


async def test_memory_that_can_change_is_not_mapped():
    size = 128
    fd = os.memfd_create("trimesh-cast-0000000000000007", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(size))
    with pytest.raises(HostMemoryError):
        map_bodies(WHERE.pack(os.getpid(), fd, size, 7), (size,))
    os.close(fd)
