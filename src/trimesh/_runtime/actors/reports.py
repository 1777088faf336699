"""What the owner of a mesh is told of its members: one has failed, has ended by itself, or is silent."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from trimesh._runtime.calls.membership import ask_for_followers
from trimesh._runtime.peers.peer import Parcel, Peer
from trimesh._runtime.values.payload import take_payload
from trimesh._transport.interface.base import Buffer
from trimesh._wire import messages
from trimesh.ids import MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.life.proc import Proc


class FailureHandler(Protocol):
    """The owner of an actor mesh, as its process sees it."""

    def actor_failed(self, peer: Peer, endpoint: str, error: Exception, *, ended: bool) -> None:
        """Learn of a failure without a caller in the member that lives in `peer`; it may have `ended` by it."""

    def actor_ended(self, peer: Peer) -> None:
        """Learn that the member that lives in `peer` has ended by itself, without an error."""

    def member_silent(self, proc_id: ProcId, what: str, *, is_logged: bool) -> None:
        """Learn that the member that lives in a process did not acknowledge the cancel of a call to `what`."""


def serve_reports(proc: Proc) -> None:
    """Let a process take these reports, and ask who follows the members of others that have ended."""
    proc.routes[messages.Failure] = partial(_failure, proc)
    proc.routes[messages.Finished] = partial(_ended, proc)
    proc.routes[messages.Silent] = partial(_silent, proc)
    proc.on_gone.append(partial(ask_for_followers, proc))


def report_failure(cell: Cell, endpoint: str, error: Exception, *, ended: bool) -> None:
    """Tell the owner of an actor of a failure that has no caller."""
    encoded = cell.proc.values.encode_error(error, cell.origin(endpoint or None))
    head = messages.encode(messages.Failure(cell.spec.mesh, endpoint, ended, b""))
    bodies: list[Buffer] = [encoded.payload, *encoded.buffers]
    cell.owner.send(Parcel(head, bodies, encoded.definitions, attachments=encoded.attachments))


def report_ended(cell: Cell) -> None:
    """Tell the owner of an actor that it has ended by itself, without an error."""
    cell.owner.send(Parcel(messages.encode(messages.Finished(cell.spec.mesh))))


def _failure(proc: Proc, peer: Peer, message: messages.Failure, bodies: list[memoryview]) -> None:
    owner = proc.owners.get(MeshId(message.mesh))
    carried = peer.take_carried()
    if owner is not None:
        payload, _ = take_payload(message.payload, bodies)
        owner.actor_failed(peer, message.endpoint, proc.values.decode_error(payload), ended=message.ended)
    del carried


def _ended(proc: Proc, peer: Peer, message: messages.Finished, _: list[memoryview]) -> None:
    owner = proc.owners.get(MeshId(message.mesh))
    if owner is not None:
        owner.actor_ended(peer)


def _silent(proc: Proc, peer: Peer, message: messages.Silent, __: list[memoryview]) -> None:
    owner = proc.owners.get(MeshId(message.mesh))
    if owner is not None:
        owner.member_silent(ProcId(message.proc), message.what, is_logged=peer is proc.me)
