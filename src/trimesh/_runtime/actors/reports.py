"""What the owner of a mesh is told of its members: one has failed, has ended by itself, or is silent.

And what all are told of a program that is connected no more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trimesh._runtime.calls.membership import ask_for_replacements
from trimesh._runtime.peers.deaths import stopped
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.values.payload import take_payload
from trimesh._transport.interface import Buffer
from trimesh._wire import messages
from trimesh._wire.pickled.payload import Encoded
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


def _disconnect(proc: Proc, _: Peer, message: messages.Disconnect, __: list[memoryview]) -> None:
    stranger = proc.find_peer(message.proc)
    if stranger is not None:
        proc.declare_gone(stranger, stopped("its program is connected no more"))
