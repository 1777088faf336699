"""Service registry: message handlers that packages above the runtime (the tensor engine) add to a process.

Service messages are addressed to a process, not to an actor. A package registers a loader. The first message from the
owner of the process runs it, so that processes without that service never import the package. Earlier messages of other
processes, and those that arrive during the import, are queued in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from trimesh import limits
from trimesh._runtime.peers.peer import Parcel, Peer
from trimesh._runtime.peers.senders import may_open_service
from trimesh._runtime.values.codec import take_payload
from trimesh._transport.interface import Buffer
from trimesh._wire import messages
from trimesh._wire.memory import NotYet
from trimesh.errors import ProtocolError

if TYPE_CHECKING:
    from trimesh._runtime.channels.ports import CarriedPorts
    from trimesh._runtime.life.proc import Proc

TENSORS: Final = "tensors"
"""Name of the service of the tensor engine."""


class Handler(Protocol):
    """Handler of a service's messages in one process."""

    def received(self, peer: Peer, payload: Buffer, bodies: list[memoryview], carried: CarriedPorts | None) -> None:
        """Handle one message; must not wait or run user code. Raises `ProtocolError` for an invalid one.

        Args:
            peer: Sender.
            payload: Valid until this returns.
            bodies: Owned by the receiver.
            carried: See `Peer.take_carried`.
        """

    def refused(self, peer: Peer, why: str) -> None:
        """Handle a refusal: `peer` could not import this service; `why` is its import error."""

    def rebuild(self, *fields: Any) -> Any:
        """Rebuild an object of this service to which the arguments of a call refer.

        Raises:
            NotYet: The object has not arrived yet; decode the call again later.
            TypeError: The object cannot arrive.
        """


Load = Callable[[], Callable[["Proc"], Handler]]
"""Loader of a service: imports its package, possibly in a thread, and returns a factory of `Handler`s."""

known_services: Final[dict[str, Load]] = {}
"""Loaders of services by name; `trimesh._assembly` fills it in."""

_Early = tuple[Peer, bytes, list[memoryview], "CarriedPorts | None"]
"""A message queued until its service is imported: sender, payload, bodies, carried ports."""


class Services:
    """The services of one process.

    Attributes:
        known: Loader of each existing service, by name.
    """

    def __init__(self, proc: Proc, known: Mapping[str, Load]) -> None:
        self.proc = proc
        self.known = known
        self._handlers: dict[str, Handler] = {}
        self._early: dict[str, list[_Early]] = {}
        self._early_bytes = 0
        self._opening: dict[str, trio.Event] = {}
        self.proc.routes[messages.Service] = self._received

    def put(self, name: str, handler: Handler) -> None:
        """Register the handler of a service, and pass it the queued messages."""
        self._handlers[name] = handler
        for peer, payload, bodies, carried in self._take_early(name):
            link = peer.link
            if link is None:
                continue
            try:
                handler.received(peer, payload, bodies, carried)
            except ProtocolError as error:
                self.proc.misbehaved(link, error)

    def cast(
        self, peers: Sequence[Peer], name: str, payload: bytes, bodies: Sequence[Buffer] = ()
    ) -> trio.Event | None:
        """Send one message of a service to some linked processes.

        Args:
            peers: Receivers; those without a link are skipped.
            payload: Sent in the head of the message, or as its first body if it is too long for the head.
            bodies: Must not change until the returned event is set.

        Returns:
            See `Link.send`.
        """
        if len(payload) > limits.HEAD_PAYLOAD_BYTES_MAX:
            payload, bodies = b"", [payload, *bodies]
        head = messages.encode(messages.Service(name, payload))
        living = [peer for peer in peers if peer.link is not None]
        if len(living) == 1:
            link = living[0].link
            assert link is not None
            return link.send(head, bodies)
        return self.proc.cast(living, Parcel(head, bodies))

    def rebuild(self, name: str, fields: Sequence[Any]) -> Any:
        """Rebuild an object by the service's handler; raise `NotYet` while the service is being imported."""
        handler, opening = self._handlers.get(name), self._opening.get(name)
        if handler is not None:
            return handler.rebuild(*fields)
        if opening is not None:
            raise NotYet(opening.wait)
        raise TypeError(
            f"a reference to {name} can be sent only to a process that has loaded the service {name!r}, got one in a "
            "process without it: send the value instead"
        )

    # ---- messages --------------------------------------------------------------------------------------------

    def _received(self, peer: Peer, message: messages.Service, bodies: list[memoryview]) -> None:
        carried = None if peer.carried is None else peer.take_carried()
        name = message.service
        handler = self._handlers.get(name)
        if message.failure:
            if handler is not None:
                handler.refused(peer, message.failure)
            return
        payload, rest = take_payload(message.payload, bodies)
        if handler is not None:
            handler.received(peer, payload, rest, carried)
        elif name not in self.known:
            raise ProtocolError(f"a service must be one of {', '.join(self.known)}, got {name!r}")
        else:
            kept = self._early.setdefault(name, [])
            if not may_open_service(peer):  # a message of another process may overtake the owner's
                self._early_bytes += len(payload) + sum(body.nbytes for body in rest)
                if len(kept) >= limits.SERVICE_EARLY_MESSAGES or self._early_bytes > limits.MAILBOX_BYTES:
                    raise ProtocolError(
                        f"{name} must be opened by the owner of a process before another process sends more than "
                        f"{limits.SERVICE_EARLY_MESSAGES} messages or {limits.MAILBOX_BYTES} bytes"
                    )
            elif name not in self._opening:
                self._opening[name] = trio.Event()
                self.proc.serve(partial(self._open, name))
            kept.append((peer, bytes(payload), rest, carried))

    @trio.lowlevel.enable_ki_protection
    async def _open(self, name: str) -> None:
        try:
            await self._import(name)
        finally:
            self._opening.pop(name).set()

    async def _import(self, name: str) -> None:
        load = self.known[name]
        try:
            # torch takes a second; the loop of a real process must go on
            open_service = load() if self.proc.is_simulated else await trio.to_thread.run_sync(load)
            handler = open_service(self.proc)
        except ImportError as error:
            failure = f"{type(error).__name__}: {error}"[: limits.REASON_CHARS_MAX]
            head = messages.encode(messages.Service(name, b"", failure))
            for peer in {peer: None for peer, *_ in self._take_early(name)}:
                peer.send(Parcel(head))
            return
        self.put(name, handler)

    def _take_early(self, name: str) -> list[_Early]:
        self._early_bytes = 0
        return self._early.pop(name, [])
