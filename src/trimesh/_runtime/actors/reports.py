"""What the owner of a mesh is told of its members: one has failed, has ended by itself, or is silent.

And what all are told of a program that is connected no more.
"""

from __future__ import annotations

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
    """Let a process take these reports, and ask who follows the members of others that have ended."""
    proc.routes[messages.ActorFailure] = partial(_failure, proc)
    proc.routes[messages.Finished] = partial(_ended, proc)
    proc.routes[messages.Silent] = partial(_silent, proc)
    proc.routes[messages.Disconnect] = partial(_disconnect, proc)
    proc.on_gone.append(partial(ask_for_replacements, proc))


def report_failure(owner: Peer, mesh: MeshId, endpoint: str, error: Encoded, *, ended: bool) -> None:
    """Tell the owner of an actor of a failure that has no caller."""
    head = messages.encode(messages.ActorFailure(mesh, endpoint, ended, b""))
    bodies: list[Buffer] = [error.payload, *error.buffers]
    owner.send(Parcel(head, bodies, error.definitions, attachments=error.attachments))


def report_ended(owner: Peer, mesh: MeshId) -> None:
    """Tell the owner of an actor that it has ended by itself, without an error."""
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
        proc.declare_gone(stranger, stopped("its program is connected no more"))


# ---- supervision log -------------------------------------------------------------------------------------------------

# The log of what a policy keeps from being raised: deaths, failures and restarts, a line each, so many a second.

_log = logging.getLogger("trimesh")


class SupervisionLog:
    """Writes to the logger `trimesh` at WARNING, at most `limits.SUPERVISION_LOG_LINES` lines a second."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._lines = 0

    def say(self, mesh: str, error: BaseException, what_next: str) -> None:
        """Write a line: the mesh, where the failure was, which it is, and what the policy does about it."""
        first = next(leaves(error))
        where = origin(first)
        place = "" if where is None else f" ({describe(where)})"
        text = " ".join(f"{type(first).__name__}: {text_of(first)}".splitlines())[: limits.REASON_CHARS_MAX]
        self.write(f"{mesh}: {text}{place}; {what_next}")

    def write(self, text: str) -> None:
        """Write a record, or leave it out when there were too many."""
        now = trio.current_time()
        if now >= self._since + 1.0:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines == limits.SUPERVISION_LOG_LINES:
            _log.warning("more of such news in this second are left out: events() has them all")
        elif self._lines < limits.SUPERVISION_LOG_LINES:
            _log.warning("%s", text)


def log_kept_back(proc: Proc, mesh: str, error: BaseException, what_next: str) -> None:
    """Log a failure of a member of `mesh` that is not raised."""
    _log_of(proc).say(mesh, error, what_next)


def log_line(proc: Proc, text: str) -> None:
    """Log other news that nothing raises, under the same bound."""
    _log_of(proc).write(text)


def _log_of(proc: Proc) -> SupervisionLog:
    found = proc.above.get(SupervisionLog)
    if not isinstance(found, SupervisionLog):
        found = proc.above[SupervisionLog] = SupervisionLog()
    return found


# ---- agent results ---------------------------------------------------------------------------------------------------

# What the agents of a mesh have answered to its owner: which of it is an error, and which of that is news.


def is_silent(result: Result) -> bool:
    """Return whether a rank has not answered in time."""
    return isinstance(result, Err) and isinstance(result.error, Unresponsive) and not result.is_raised


def news_of(results: Sequence[Result]) -> list[Exception]:
    """Return the errors that are told nowhere else: a lost process is its block's, a silent one is killed."""
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
