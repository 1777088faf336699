"""Permissions: which peers may send each kind of message and call each endpoint of the agent.

Any process of a family may have a link to any other, so the sender is known by the link, not by the message's content.
`Proc.received` checks the sender before a message has any effect. A forbidden one raises `ProtocolError`, which ends
the link.

    any         any peer; the handler matches the message to a request of this process to that peer, or of the peer
    owner       the process that started this one; the controller is its own owner
    member      a process that this one started; for this process's own actors, itself
    controller  the controller of the family
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from trimesh._wire import messages
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Peer


class Sender(Enum):
    """Class of processes that may send a message."""

    ANY = "any process of the family"
    OWNER = "the process that has started the receiver"
    MEMBER = "a process that the receiver has started"
    CONTROLLER = "the controller of the family"


_ANY, _OWNER, _MEMBER, _CONTROLLER = Sender.ANY, Sender.OWNER, Sender.MEMBER, Sender.CONTROLLER

SENDERS: Final[dict[type[messages.Message], Sender]] = {
    # calls: the agent's are below; other actors' need only a handle; replies must match a request to the peer
    messages.Call: _ANY,
    messages.Calls: _ANY,
    messages.TracedCall: _ANY,
    messages.Return: _ANY,
    messages.Error: _ANY,
    messages.CancelAck: _ANY,
    messages.Refused: _ANY,
    messages.Cancel: _ANY,
    messages.Credit: _ANY,
    messages.Define: _ANY,  # none with pickle="off"
    messages.Item: _ANY,
    messages.Taken: _ANY,
    # membership news; of a silent member, from any process that waited for it
    messages.ActorFailure: _MEMBER,
    messages.Finished: _MEMBER,
    messages.Silent: _ANY,
    # channels: checked by the numbers of messages sent and accepted
    messages.Carried: _ANY,
    messages.InTransit: _ANY,
    messages.Accepted: _ANY,
    messages.Dropped: _ANY,
    messages.Settle: _ANY,
    messages.Settled: _ANY,
    messages.PortItem: _ANY,
    messages.TracedItem: _ANY,
    messages.Room: _ANY,
    messages.Ended: _ANY,
    messages.Recall: _ANY,
    # deadlocks: the controller searches
    messages.Suspect: _ANY,
    messages.Look: _CONTROLLER,
    messages.Seen: _ANY,
    messages.Break: _CONTROLLER,
    messages.Broken: _ANY,
    messages.Circle: _CONTROLLER,
    # observers: the owner queries
    messages.Observe: _OWNER,
    messages.Observed: _MEMBER,
    messages.Interrupt: _OWNER,
    # debuggers: along the chain of owners; a pause of calls only extends the receiver's own requests
    messages.HoldNews: _MEMBER,
    messages.Steer: _OWNER,
    messages.Pause: _ANY,
    # publications: by their numbers
    messages.Subscribe: _ANY,
    messages.Published: _ANY,
    messages.Unpinned: _ANY,
    # transfers without a carrier: by the secret of a grant; answers for what the peer was asked
    messages.MovePiece: _ANY,
    messages.PieceMoved: _ANY,
    # higher packages check senders themselves; `may_open_service` decides whether they are imported at all
    messages.Service: _ANY,
    # programs that were connected
    messages.Disconnect: _CONTROLLER,
    # tests: with the token that the process was armed with
    messages.Arm: _CONTROLLER,
    messages.Fired: _MEMBER,
    messages.Heal: _CONTROLLER,
}
"""Every kind of message."""

AGENT_CALLERS: Final[dict[str, Sender]] = {
    "setup": _OWNER,
    "spawn": _OWNER,
    "spawn_kept": _OWNER,
    "replacement": _ANY,  # any holder of a handle on a mesh may query its owner
    "current_info": _ANY,  # as replacement
    "cancel_background": _OWNER,
    "drain": _OWNER,
    "stop": _OWNER,
    "exit": _OWNER,
    "lend": _ANY,  # the requested mesh is looked up among the shared ones
    "lend_hosts": _ANY,  # as lend
    "give_back": _ANY,  # checked by the number of the loan
    "get_shared": _ANY,  # as lend
}
"""Every endpoint of the agent."""


def check_sender(peer: Peer, kind: type[messages.Message]) -> None:
    """Check that a peer may send messages of a kind.

    Raises:
        ProtocolError: It may not.
    """
    sender = SENDERS[kind]
    if sender is not _ANY:
        _check(peer, sender, f"a {kind.__name__} message")


def check_agent_caller(peer: Peer, endpoint: str) -> None:
    """Check that a peer may call an endpoint of the agent; unknown endpoints pass, and are refused later.

    Raises:
        ProtocolError: It may not.
    """
    sender = AGENT_CALLERS.get(endpoint, _ANY)
    if sender is not _ANY:
        _check(peer, sender, f"a call of the agent's {endpoint}")


def may_open_service(peer: Peer) -> bool:
    """Return whether a peer's message may cause the import of a service's package: only the owner's may."""
    return peer.is_owner


def _check(peer: Peer, sender: Sender, what: str) -> None:
    if not _is(peer, sender):
        raise ProtocolError(f"{what} must come from {sender.value}, got one of process {peer.proc_id}")


def _is(peer: Peer, sender: Sender) -> bool:
    proc = peer.proc
    if sender is _OWNER:
        return peer.is_owner
    if peer.proc_id == proc.proc_id:
        return sender is _MEMBER or proc.family is None or proc.family.root is None
    if sender is _MEMBER:
        return peer.proc_id in proc.members
    return proc.family is not None and peer.proc_id == proc.family.root
