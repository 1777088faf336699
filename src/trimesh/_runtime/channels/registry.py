"""Registry of one process's channels, and of its ports of remote channels; routes their messages.

`_routing/channel_accounts.py` counts which processes hold a port. All messages of a holder to a home take the DATA lane
of one link, so that the release of a port arrives after the ports and items sent before it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import trio

from trimesh import limits
from trimesh._runtime.channels import ports
from trimesh._runtime.channels.ports import CarriedPorts, Holding, Port, Sending
from trimesh._runtime.channels.receiver import Home
from trimesh._runtime.peers.peer import Peer
from trimesh._transport.interface import Lane, Link
from trimesh._wire import messages
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._wire.memory import Sink

_REBUILD = ("trimesh._runtime.channels.registry", "rebuild_port")
"""Placeholder of a port in a payload; the decoder of each process resolves it."""


def rebuild_port(*_: object) -> Port[Any]:
    """Refuse: a port cannot be rebuilt outside of a process."""
    raise TypeError("a port can be rebuilt only by the process that a message with it was sent to")


class Channels:
    """The channels and ports of one process."""

    def __init__(self, proc: Proc) -> None:
        ports.register_kinds()
        self.proc = proc
        self._homes: dict[int, Home] = {}
        self._holdings: dict[tuple[ProcId, int], Holding] = {}
        self._by_number: dict[int, Holding] = {}
        self._numbers: Iterator[int] = itertools.count(1)
        self._mail: dict[Peer, list[bytes]] = {}
        self._settling: dict[Peer, list[tuple[Peer, int]]] = {}
        self._released: deque[Holding] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        self._leaving: set[trio.Event] = set()
        self._connecting: set[Peer] = set()
        routes: dict[type[messages.Message], Callable[[Peer, Any, list[memoryview]], None]] = {
            messages.Carried: self._carried,
            messages.InTransit: self._in_transit,
            messages.Accepted: self._taken,
            messages.Dropped: self._dropped,
            messages.Settle: self._settle,
            messages.Settled: self._settled,
            messages.PortItem: self._item,
            messages.Room: self._room,
            messages.Ended: self._ended,
            messages.Recall: self._recall,
        }
        proc.routes.update(routes)
        proc.on_gone.append(self._gone)
        proc.on_link.append(self._linked)

    # ---- this process ----------------------------------------------------------------------------------------

    def open(self, capacity: int, item_type: Any = None) -> tuple[Port[Any], Home]:
        """Open a channel; its receiver is here. `TypeError` for items of a type that cannot travel."""
        found = self.proc.values.item_type(item_type)
        me = self.proc.me
        number = next(self._numbers)
        home = self._homes[number] = Home(self, number, capacity, found)
        holding = self._hold(me, number, capacity)
        holding.item_type = found
        home.begin(me, holding.number)
        holding.share.take()
        port: Port[Any] = Port(holding)
        holding.share.release()  # reference of the first unit; the port holds its own
        return port, home

    @property
    def open_channels(self) -> int:
        """Number of channels whose receiver is here and open."""
        return len(self._homes)

    def closed(self, home: Home) -> None:
        """Remove a closed channel and end the senders of this process at once."""
        del self._homes[home.number]
        holding = self._holdings.get((self.proc.proc_id, home.number))
        if holding is not None:
            holding.end()

    def _hold(self, home: Peer, channel: int, capacity: int) -> Holding:
        key = (home.proc_id, channel)
        holding = self._holdings.get(key)
        if holding is None:
            self._token = trio.lowlevel.current_trio_token()
            holding = self._holdings[key] = Holding(self, home, channel, next(self._numbers), capacity)
            self._by_number[holding.number] = holding
        return holding

    def release(self, holding: Holding) -> None:
        """Release one reference; with the last one, give up this process's hold on the channel."""
        units = holding.share.release()
        if units:
            del self._holdings[holding.key]
            del self._by_number[holding.number]
            self.tell(holding.home, messages.Dropped(holding.channel, units))

    def note_release(self, holding: Holding) -> None:
        """Schedule the release of one reference; from any thread, at any moment."""
        self._released.append(holding)
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._release_noted, idempotent=True)

    def _release_noted(self) -> None:
        while self._released:
            self.release(self._released.popleft())

    def sent(self, left: trio.Event) -> None:
        """Record a message that was sent and has not left yet."""
        self._leaving = {event for event in self._leaving if not event.is_set()}
        self._leaving.add(left)

    async def flush(self) -> None:
        """Wait until sent messages have left this process, for at most `limits.FLUSH_SECONDS`."""
        with trio.move_on_after(limits.FLUSH_SECONDS):
            for home in list(self._mail):
                await self.connect(home)
            for event in self._leaving:
                await event.wait()

    # ---- values ----------------------------------------------------------------------------------------------

    def reducers(self) -> dict[type, Callable[[Any, Sink], Any]]:
        """Return the reducers that encode ports in a payload."""
        return {Port: self._reduce}

    def bindings(self) -> dict[tuple[str, str], Any]:
        """Return the bindings that rebuild ports."""
        return {_REBUILD: self._rebuild}

    def _reduce(self, port: Port[Any], sink: Sink) -> Any:
        holding = port.holding
        if holding is None:
            raise TypeError("a port must be open to be sent, got a closed one")
        if holding.channels is not self:
            raise TypeError("a port must be sent by the process that it is in, got one of another")
        sink.attach(port)
        return rebuild_port, (holding.home.proc_id, holding.channel)

    def _rebuild(self, home: object, channel: object) -> Port[Any]:
        # A port that was closed between encoding and sending was not sent, and arrives closed.
        return Port(self._holdings.get((home, channel)))  # type: ignore[arg-type]

    # ---- messages that carry ports ---------------------------------------------------------------------------

    def send(self, peer: Peer, link: Link, attachments: Sequence[object]) -> None:
        """Announce that the next message to `peer` carries the ports among `attachments`."""
        transits: list[messages.Transit] = []
        for holding in dict.fromkeys(self._held(thing) for thing in attachments):
            if holding is None:
                continue
            transit = messages.Transit(holding.home.proc_id, holding.channel, next(self._numbers), holding.capacity)
            self.tell(holding.home, messages.InTransit(transit.channel, transit.transit, peer.proc_id))
            transits.append(transit)
        for first in range(0, len(transits), limits.TRANSITS_PER_FRAME):
            link.send(messages.encode(messages.Carried(tuple(transits[first : first + limits.TRANSITS_PER_FRAME]))))

    def _held(self, thing: object) -> Holding | None:
        """Return this process's holding of a channel that a message refers to, or None."""
        if isinstance(thing, Port):
            return thing.holding
        return self._holdings.get(thing.key) if isinstance(thing, Holding) else None

    def _carried(self, peer: Peer, message: messages.Carried, bodies: list[memoryview]) -> None:
        del bodies
        carried = peer.carried
        if not isinstance(carried, CarriedPorts):
            carried = peer.carried = CarriedPorts(self)
        for transit in message.transits:
            holding = self._hold(self.proc.peer(ProcId(transit.home)), transit.channel, transit.capacity)
            holding.share.take()
            carried.holdings.append(holding)
            self.tell(holding.home, messages.Accepted(transit.channel, peer.proc_id, transit.transit, holding.number))

    # ---- other processes -------------------------------------------------------------------------------------

    def tell(self, peer: Peer, message: messages.Message) -> None:
        """Send a message on the DATA lane, now or when there is a link."""
        head = messages.encode(message)
        if peer.link is not None:
            left = peer.link.send(head)
            if left is not None:
                self.sent(left)
        elif peer.death is None:
            self._mail.setdefault(peer, []).append(head)

    def tell_ended(self, peer: Peer, channel: int) -> None:
        """Notify a holder that its port has no receiver."""
        if peer.link is not None:
            peer.link.send(messages.encode(messages.Ended(channel)), lane=Lane.CONTROL)

    async def connect(self, peer: Peer) -> None:
        """Open a link to a home, unless it is gone."""
        if self.proc.family is not None:
            await self.proc.family.connect([peer])

    def start_connecting(self, peer: Peer) -> None:
        """Open a link to a process that will receive ports, or that has to reply."""
        if peer.link is None and peer.death is None and peer not in self._connecting:
            self._connecting.add(peer)
            self.proc.nursery.start_soon(self._connect, peer)

    @trio.lowlevel.enable_ki_protection
    async def _connect(self, peer: Peer) -> None:
        try:
            await self.connect(peer)
        finally:
            self._connecting.discard(peer)

    def _linked(self, peer: Peer) -> None:
        for head in self._mail.pop(peer, ()):
            assert peer.link is not None
            peer.link.send(head)
        for holding in self._holdings.values():
            if holding.home is peer:
                holding.send_waiting()

    def _gone(self, peer: Peer) -> None:
        peer.carried = None
        self._mail.pop(peer, None)
        for holding in [holding for holding in self._holdings.values() if holding.home is peer]:
            holding.end()
        for home, channel in self._settling.pop(peer, ()):
            self.tell(home, messages.Settled(channel, peer.proc_id))
        for found in list(self._homes.values()):
            found.gone(peer)

    # ---- messages to a home ----------------------------------------------------------------------------------

    def _in_transit(self, peer: Peer, message: messages.InTransit, bodies: list[memoryview]) -> None:
        del bodies
        home = self._homes.get(message.channel)
        if home is not None:
            holder = self.proc.peer(ProcId(message.holder))
            home.holders.sent(peer.proc_id, message.transit, holder.proc_id, is_gone=holder.death is not None)
            self.start_connecting(holder)  # its reply arrives by that link, and so does its end

    def _taken(self, peer: Peer, message: messages.Accepted, bodies: list[memoryview]) -> None:
        del bodies
        home = self._homes.get(message.channel)
        is_gone = self.proc.peer(ProcId(message.sender)).death is not None
        if home is None or not home.taken(peer, message, is_gone=is_gone):
            self.tell_ended(peer, message.channel)

    def _dropped(self, peer: Peer, message: messages.Dropped, bodies: list[memoryview]) -> None:
        del bodies
        home = self._homes.get(message.channel)
        if home is not None:
            home.dropped(peer, message.units)

    def _settled(self, peer: Peer, message: messages.Settled, bodies: list[memoryview]) -> None:
        del bodies
        home = self._homes.get(message.channel)
        if home is not None:
            home.holders.settled(ProcId(message.sender), peer.proc_id)
            home.look()

    def _item(self, peer: Peer, message: messages.PortItem, bodies: list[memoryview]) -> None:
        carried = peer.take_carried()
        home = self._homes.get(message.channel)
        if home is not None:
            home.arrived(peer, message, bodies, carried)

    def _recall(self, peer: Peer, message: messages.Recall, bodies: list[memoryview]) -> None:
        del bodies
        home = self._homes.get(message.channel)
        if home is not None:
            home.recall(peer)

    # ---- messages to a holder --------------------------------------------------------------------------------

    def _room(self, peer: Peer, message: messages.Room, bodies: list[memoryview]) -> None:
        del bodies
        holding = self._by_number.get(message.holding)
        if holding is not None:
            if holding.home is not peer:
                raise ProtocolError(f"credit of a channel must come from its home, got it from process {peer.proc_id}")
            holding.room(message)

    def _ended(self, peer: Peer, message: messages.Ended, bodies: list[memoryview]) -> None:
        del bodies
        holding = self._holdings.get((peer.proc_id, message.channel))
        if holding is not None:
            holding.end()

    def _settle(self, peer: Peer, message: messages.Settle, bodies: list[memoryview]) -> None:
        del bodies
        sender = self.proc.peer(ProcId(message.sender))
        if sender.death is not None:
            self.tell(peer, messages.Settled(message.channel, message.sender))
            return
        self._settling.setdefault(sender, []).append((peer, message.channel))
        if sender.link is None and self.proc.family is not None:
            self.proc.nursery.start_soon(self.proc.family.find_out, sender)

    # ---- state, for observers --------------------------------------------------------------------------------

    def blocked(self) -> Iterator[tuple[Holding, Sending]]:
        """Yield the senders of this process that wait, by channel."""
        for holding in self._holdings.values():
            for one in holding.blocked():
                yield holding, one

    def left(self) -> Iterable[str]:
        """Describe the channels and holdings that have not ended."""
        yield from (f"channel {number}" for number in self._homes)
        yield from (f"port of channel {channel} of process {home}" for home, channel in self._holdings)
