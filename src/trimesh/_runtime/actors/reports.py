"""Reports about members to the owner of their mesh: failed, ended by itself, or silent.

Also the report, to all processes, that a connected program has disconnected.
"""

from __future__ import annotations

import contextvars
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.calls.invocation import Err, Result
from trimesh._runtime.calls.membership import ask_for_replacements
from trimesh._runtime.peers.deaths import stopped
from trimesh._runtime.peers.peer import Parcel, Peer
from trimesh._runtime.values.codec import describe, take_payload
from trimesh._transport.interface import Buffer
from trimesh._wire import messages
from trimesh._wire.pickled.payload import Encoded
from trimesh.errors import (
    HostLost,
    LinkLost,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    Unresponsive,
    leaves,
    origin,
    text_of,
)
from trimesh.ids import MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


def serve_reports(proc: Proc) -> None:
    """Register the handlers of these reports; also query replacements of other owners' ended members."""
    proc.routes[messages.ActorFailure] = partial(_failure, proc)
    proc.routes[messages.Finished] = partial(_ended, proc)
    proc.routes[messages.Silent] = partial(_silent, proc)
    proc.routes[messages.Disconnect] = partial(_disconnect, proc)
    proc.on_gone.append(partial(ask_for_replacements, proc))


def report_failure(owner: Peer, mesh: MeshId, endpoint: str, error: Encoded, *, ended: bool) -> None:
    """Report a failure without a caller to the owner of an actor."""
    head = messages.encode(messages.ActorFailure(mesh, endpoint, ended, b""))
    bodies: list[Buffer] = [error.payload, *error.buffers]
    owner.send(Parcel(head, bodies, error.definitions, attachments=error.attachments))


def report_ended(owner: Peer, mesh: MeshId) -> None:
    """Report to the owner of an actor that it ended by itself, without an error."""
    owner.send(Parcel(messages.encode(messages.Finished(mesh))))


def _failure(proc: Proc, peer: Peer, message: messages.ActorFailure, bodies: list[memoryview]) -> None:
    owner = proc.owners.get(MeshId(message.mesh))
    carried = peer.take_carried()
    if owner is not None:
        payload, _ = take_payload(message.payload, bodies)
        owner.actor_failed(peer, proc.values.decode_error(payload), ended=message.ended)
    del carried


def _ended(proc: Proc, peer: Peer, message: messages.Finished, _: list[memoryview]) -> None:
    owner = proc.owners.get(MeshId(message.mesh))
    if owner is not None:
        owner.actor_ended(peer)


def _silent(proc: Proc, peer: Peer, message: messages.Silent, __: list[memoryview]) -> None:
    owner = proc.owners.get(MeshId(message.mesh))
    if owner is not None:
        owner.member_silent(ProcId(message.proc), message.what, is_logged=peer is proc.me)


def _disconnect(proc: Proc, _: Peer, message: messages.Disconnect, __: list[memoryview]) -> None:
    stranger = proc.find_peer(message.proc)
    if stranger is not None:
        proc.declare_gone(stranger, stopped("its program has disconnected"))


# ---- supervision log -------------------------------------------------------------------------------------------------

# Log of deaths, failures and restarts that a policy does not raise: one line each, rate-limited.

_log = logging.getLogger("trimesh")


class SupervisionLog:
    """Rate-limited log to `trimesh` at WARNING: at most `limits.SUPERVISION_LOG_LINES` lines a second.

    It logs with no context variable set: a notebook shows text under the cell that a variable names (`OutputPrinter`).
    """

    def __init__(self) -> None:
        self._since = -math.inf
        self._lines = 0

    def say(self, mesh: str, error: BaseException, what_next: str) -> None:
        """Log the mesh, the failure, its coordinates, and the policy's reaction."""
        first = next(leaves(error))
        where = origin(first)
        place = "" if where is None else f" ({describe(where)})"
        text = " ".join(f"{type(first).__name__}: {text_of(first)}".splitlines())[: limits.REASON_CHARS_MAX]
        self.write(f"{mesh}: {text}{place}; {what_next}")

    def write(self, text: str) -> None:
        """Write a record, or drop it if there were too many."""
        now = trio.current_time()
        if now >= self._since + 1.0:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines == limits.SUPERVISION_LOG_LINES:
            text = "further failures of this second are not logged: events() has all of them"
        if self._lines <= limits.SUPERVISION_LOG_LINES:
            contextvars.Context().run(_log.warning, "%s", text)


def log_kept_back(proc: Proc, mesh: str, error: BaseException, what_next: str) -> None:
    """Log a failure of a member of `mesh` that is not raised."""
    _log_of(proc).say(mesh, error, what_next)


def log_line(proc: Proc, text: str) -> None:
    """Log another event that is not raised, under the same rate limit."""
    _log_of(proc).write(text)


def _log_of(proc: Proc) -> SupervisionLog:
    found = proc.above.get(SupervisionLog)
    if not isinstance(found, SupervisionLog):
        found = proc.above[SupervisionLog] = SupervisionLog()
    return found


# ---- agent results ---------------------------------------------------------------------------------------------------

# Errors in the replies of a mesh's agents to its owner, without those already reported elsewhere.


def is_silent(result: Result) -> bool:
    """Return whether a rank did not reply in time."""
    return isinstance(result, Err) and isinstance(result.error, Unresponsive) and not result.is_raised


def news_of(results: Sequence[Result]) -> list[Exception]:
    """Return errors not reported elsewhere: a block reports its lost processes, and silent ones are killed."""
    known = (ProcDied, HostLost, LinkLost, MeshStopped, Unresponsive)
    return [
        result.error
        for result in results
        if isinstance(result, Err) and (result.is_raised or not isinstance(result.error, known))
    ]


def errors_of(results: Sequence[Result]) -> list[Exception]:
    return [result.error for result in results if isinstance(result, Err)]


def raise_errors(results: Sequence[Result], message: str, mesh: str, endpoint: str | None = None) -> None:
    """Raise the errors among `results` as one group, if there are any."""
    errors = errors_of(results)
    if errors:
        raise MeshErrorGroup(message, errors, mesh=mesh, endpoint=endpoint)
