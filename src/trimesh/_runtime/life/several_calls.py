"""Several calls that have come as one message (docs/adr/0096) are taken out of it, and are calls like any other."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.values.endpoint_spec import GENERATOR
from trimesh._wire import messages
from trimesh._wire.messages import Calls
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


def serve_several_calls(proc: Proc) -> None:
    """Let a process take several calls in one message."""
    proc.routes[Calls] = partial(_take_several, proc)


def _take_several(proc: Proc, peer: Peer, message: Calls, bodies: list[memoryview]) -> None:
    """Take several calls; see `Proc.take_call`.

    Raises:
        ProtocolError: They break the rules.
    """
    if bodies or peer.carried is not None:
        raise ProtocolError("no bodies and no ports come with several calls in one message, some have come")
    link = peer.link
    if link is None:
        return
    mesh = message.mesh
    cell = proc.cells.get(mesh)
    spec = None if cell is None else cell.endpoints.get(message.endpoint)
    if cell is None or spec is None or not mesh or spec.kind is GENERATOR or proc.sites is not None:
        _take_apart(proc, peer, message)
        return
    peer.calls_received += len(message.calls)
    count, inbound, now = peer.count_of(mesh), peer.inbound, proc.now()
    deadline = math.inf if message.budget is None else now + message.budget
    view, caller = message.view, message.caller
    taken: list[IncomingCall] = []
    for number, payload in message.calls:
        call = IncomingCall(
            peer, link, number, mesh, spec, payload, (), len(payload), count, deadline, now, None, view, caller
        )
        if number:
            if number in inbound:
                cell.deliver_all(taken)
                raise ProtocolError(f"a call id must not be used twice, got {number} again")
            inbound[number] = call
            if peer.early_cancels and (reason := peer.early_cancels.pop(number, None)) is not None:
                call.cancel("caller", reason)
                call.cancelled()
                continue
        taken.append(call)
    cell.deliver_all(taken)


def _take_apart(proc: Proc, peer: Peer, message: Calls) -> None:
    """Take each as the message that it would be alone: to be refused, or looked at by a test."""
    for number, payload in message.calls:
        one = messages.Call(
            number, message.mesh, message.endpoint, message.budget, payload, 0, message.view, message.caller
        )
        link = peer.link
        if link is None:  # a test has ended it
            return
        if proc.sites is None or proc.sites.received(proc, peer, link, one):
            proc.take_call(peer, link, one, len(payload), [])
