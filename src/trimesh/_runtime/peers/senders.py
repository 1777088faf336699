"""Who may send what: one table for the kinds of messages, one for the endpoints of the agent, checked in one place.

Any process of a family may have a link to any other, so what stands in a message says nothing of who has sent it. The
link does. `Proc.received` looks here before a message has any effect; a sender that may not is a `ProtocolError`, which
ends its link.

    any         what it says is looked up among what this process has asked that peer, or was asked by it
    owner       the process that has started this one; the controller is its own
    member      a process that this one has started; for its own actors, this one
    controller  of the family
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from trimesh._wire import messages
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Peer


class Sender(Enum):
    """Who may send."""

    ANY = "any process of the family"
    OWNER = "the process that has started the receiver"
    MEMBER = "a process that the receiver has started"
    CONTROLLER = "the controller of the family"


_ANY, _OWNER, _MEMBER, _CONTROLLER = Sender.ANY, Sender.OWNER, Sender.MEMBER, Sender.CONTROLLER

SENDERS: Final[dict[type[messages.Message], Sender]] = {
    # calls: of the agent see below; of other actors whoever has a handle; answers are for what the peer was asked
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
    # news of members; of a silent one whoever has waited for it
    messages.ActorFailure: _MEMBER,
    messages.Finished: _MEMBER,
    messages.Silent: _ANY,
    # channels: by the numbers of what was sent and accepted
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
    # who looks on: the owner asks
    messages.Observe: _OWNER,
    messages.Observed: _MEMBER,
    messages.Interrupt: _OWNER,
    # debuggers: up and down the owners; that calls wait for one only lengthens what the receiver has asked for
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
    # packages above: each looks itself who may command it; that it is imported at all: `may_open_service`
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
    "replacement": _ANY,  # whoever has a handle on a mesh asks its owner
    "current_info": _ANY,  # as replacement
    "cancel_background": _OWNER,
    "drain": _OWNER,
    "stop": _OWNER,
    "exit": _OWNER,
    "lend": _ANY,  # what is asked for is looked up among the meshes that are shared
    "give_back": _ANY,  # by the number of what was lent
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
    """Check that a peer may call an endpoint of the agent; one that it has not may be called by any, to be refused.

    Raises:
        ProtocolError: It may not.
    """
    sender = AGENT_CALLERS.get(endpoint, _ANY)
    if sender is not _ANY:
        _check(peer, sender, f"a call of the agent's {endpoint}")


def may_open_service(peer: Peer) -> bool:
    """Return whether a peer's message is enough to have the package of a service imported: that of the owner is."""
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
