"""Calls to an actor that is still being spawned: they wait for it, in the order in which they came.

The members of a mesh are made side by side. One that serves already may call a sibling whose own spawn is still on its
way to this process. That is no call to a mesh that has stopped: of those whose actor has ended here this process knows.

    EY-1 a call waits until its actor is made, at most `limits.SPAWN_SECONDS`; then it is refused.
    EY-2 calls of one caller to one actor keep their order: those that come later find the actor, after these.
    EY-3 what waits is bounded; what comes beyond that, or to an actor that has ended here, is refused at once.
    EY-4 what ends before its actor is made counts as taken out of the mailbox, as the sender counts those to come.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.peers.incoming import refuse, refuse_unaddressed, take_one
from trimesh._transport.interface import Link
from trimesh._wire import messages
from trimesh.ids import MeshId

if TYPE_CHECKING:
    from trimesh._runtime.channels.registry import CarriedPorts
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


class _EarlyCall(msgspec.Struct, frozen=True, eq=False):
    """One of them, as it has come, and with the context in which it was read; `came_at` is in Trio time."""

    peer: Peer
    link: Link
    message: messages.Call
    size: int
    bodies: list[memoryview]
    carried: CarriedPorts | None
    came_at: float
    context: contextvars.Context

    @property
    def nbytes(self) -> int:
        return self.size + sum(body.nbytes for body in self.bodies)


class EarlyCalls:
    """Those of one process."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._waiting: dict[MeshId, list[_EarlyCall]] = {}
        self._ended: dict[MeshId, None] = {}
        self._count = self._nbytes = 0
        self._is_watched = False

    @property
    def waiting(self) -> Sequence[messages.Call]:
        return [call.message for calls in self._waiting.values() for call in calls]

    def hold(
        self,
        peer: Peer,
        link: Link,
        message: messages.Call,
        size: int,
        bodies: list[memoryview],
        carried: CarriedPorts | None,
        cancel: str | None,
    ) -> None:
        """Keep a call to an actor that is not here until it is, or refuse it (EY-3); `cancel` has overtaken it."""
        call = _EarlyCall(peer, link, message, size, bodies, carried, self._proc.now(), contextvars.copy_context())
        is_full = self._count >= limits.EARLY_CALLS_MAX or self._nbytes + call.nbytes > limits.MAILBOX_BYTES
        if not message.mesh or message.mesh in self._ended or is_full or not self._watch():
            refuse_unaddressed(peer, message.call, message.mesh)
            return
        if cancel is not None:
            _acknowledge(call, cancel)
            return
        self._waiting.setdefault(message.mesh, []).append(call)
        self._count += 1
        self._nbytes += call.nbytes

    def made(self, mesh: MeshId) -> None:
        """Deliver the calls that have waited for an actor, which is there now."""
        self._ended.pop(mesh, None)
        for call in self._take(mesh):
            message = call.message
            if message.budget is not None:
                left = max(0.0, message.budget - (self._proc.now() - call.came_at))
                message = msgspec.structs.replace(message, budget=left)
            call.peer.calls_received -= 1  # it is counted again
            call.peer.carried = call.carried
            call.context.run(self._proc.take_call, call.peer, call.link, message, call.size, call.bodies)

    def ended(self, mesh: MeshId) -> None:
        """Learn that an actor has ended for good, or will not come: what waits for it is refused."""
        self._ended[mesh] = None
        if len(self._ended) > limits.ENDED_ACTORS:
            del self._ended[next(iter(self._ended))]
        for call in self._take(mesh):
            refuse_unaddressed(call.peer, call.message.call, mesh)

    def cancel(self, peer: Peer, number: int, reason: str) -> bool:
        """End a call that waits, for its caller; return False when there is none of that number."""
        for calls in self._waiting.values():
            for call in calls:
                if call.peer is peer and call.message.call == number:
                    self._drop(call)
                    _acknowledge(call, reason)
                    return True
        return False

    def forget(self, peer: Peer) -> None:
        """Drop the calls of a process that has ended."""
        for call in [call for calls in self._waiting.values() for call in calls if call.peer is peer]:
            self._drop(call)

    def _take(self, mesh: MeshId) -> Sequence[_EarlyCall]:
        calls = self._waiting.pop(mesh, ())
        self._count -= len(calls)
        self._nbytes -= sum(call.nbytes for call in calls)
        return calls

    def _drop(self, call: _EarlyCall) -> None:
        mesh = call.message.mesh
        self._waiting[mesh].remove(call)
        if not self._waiting[mesh]:
            del self._waiting[mesh]
        self._count -= 1
        self._nbytes -= call.nbytes

    def _watch(self) -> bool:
        """See to it that nothing waits for ever; return False when this process serves no links any more."""
        if not self._is_watched:
            self._is_watched = self._proc.serve(self._expire)
        return self._is_watched

    async def _expire(self) -> None:
        try:
            while self._waiting:
                first = min(calls[0].came_at for calls in self._waiting.values())
                await trio.sleep_until(first + limits.SPAWN_SECONDS)
                late = self._proc.now() - limits.SPAWN_SECONDS
                for call in [call for calls in self._waiting.values() for call in calls if call.came_at <= late]:
                    self._drop(call)
                    self._refuse_late(call)
        finally:
            self._is_watched = False

    def _refuse_late(self, call: _EarlyCall) -> None:
        peer, mesh = call.peer, call.message.mesh
        text = f"the mesh has no member in this process, and none came within {limits.SPAWN_SECONDS:g} s"
        refuse(call.link, call.message.call, mesh, peer.count_of(mesh), call.nbytes, "stopped", text)
        if not any(other.peer is peer for other in self._waiting.get(mesh, ())):
            peer.end_count(mesh)


def _acknowledge(call: _EarlyCall, reason: str) -> None:
    """Tell the caller that its cancel has ended a call that no actor has seen."""
    peer, message = call.peer, call.message
    count = peer.count_of(message.mesh)
    take_one(call.link, message.mesh, count, call.nbytes)
    if message.call:
        ack = messages.CancelAck(message.call, message.mesh, count.report(), started=False, by="caller", reason=reason)
        call.link.send(messages.encode(ack))
