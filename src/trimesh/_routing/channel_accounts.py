"""Accounts of a channel's ports, which decide when the channel is at its end, and credits of its items.

The home of a channel keeps `Holders`; every process that has a port of it keeps a `Share`:

    sender --InTransit--> home       a message that carries the port is about to leave
    sender --(message)-> holder      and does
    holder --Accepted--> home        the transit is over, the holder has one unit more
    holder ---Dropped--> home        its last port object is gone: all units that it took so far

HO-1 Messages from one process to another arrive in the order of sending; nothing else is ordered. So `Accepted` may
     overtake `InTransit`; the transit is then recorded as taken early.
HO-2 A process sends only ports that it holds, so its drops arrive after its sends. From the first unit on there is
     always a unit or a transit for each port that a process has, or may yet get, and the channel does not end early.
HO-3 A dead process holds nothing, gets nothing, and sends nothing that was not announced. A living process may still
     read ports that it sent: that process gets a `Settle`, and replies when nothing more can arrive. So each transit
     ends, and so does the channel.
HO-4 The end is final: a process that takes a port afterwards is notified that the port has no receiver.

IN-1 The sender's window is never wider than this one, so a sender that keeps its credits is never refused.
IN-2 A sender without credit gets a report of every item that is taken, so it never waits while there is room.
"""

from __future__ import annotations

from collections.abc import Collection

from trimesh import limits
from trimesh._routing.collector import ReceiveCount, SendWindow
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

_Transit = tuple[ProcId, int, ProcId]
"""Sender, its number for the transit, holder: a cast of one message to many is one transit for each."""


class Share:
    """References and units that one process holds of one channel.

    Attributes:
        references: Port objects, and undecoded messages that carry one.
        units: Transits taken since the first reference.
    """

    __slots__ = ("references", "units")

    def __init__(self) -> None:
        self.references = 0
        self.units = 0

    def take(self) -> None:
        """Count a transit; the message that carried it is a reference."""
        self.references += 1
        self.units += 1

    def refer(self) -> None:
        """Count another port object."""
        assert self.units, "a port is made of a unit"
        self.references += 1

    def release(self) -> int:
        """Release a reference; return the units to give back, 0 while references remain."""
        assert self.references, "each reference is released once"
        self.references -= 1
        if self.references:
            return 0
        units, self.units = self.units, 0
        return units


class Holders:
    """All holders of one channel, as its home knows them.

    Attributes:
        is_over: Whether no holder is left; final.
    """

    __slots__ = ("_early", "_transits", "_units", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self._units: dict[ProcId, int] = {}
        self._transits: set[_Transit] = set()
        self._early: set[_Transit] = set()

    def holding(self) -> Collection[ProcId]:
        return self._units.keys()

    def holds(self, holder: ProcId) -> bool:
        return holder in self._units

    def begin(self, holder: ProcId) -> None:
        """Give the first unit to the process that opens the channel."""
        assert not self._units
        self._units[holder] = 1

    def sent(self, sender: ProcId, transit: int, holder: ProcId, *, is_gone: bool) -> None:
        """Record an announced transit.

        Args:
            transit: Its number.
            holder: Target of the transit.
            is_gone: Whether the holder has ended, so that it gets nothing.

        Raises:
            ProtocolError: The transit is known, or the sender holds no port.
        """
        if self.is_over:
            return
        key = (sender, transit, holder)
        if key in self._early:
            self._early.discard(key)
            return
        if key in self._transits:
            raise ProtocolError(f"a transit must have a new number, got {transit} of process {sender} again")
        if sender not in self._units:
            raise ProtocolError(f"only a holder may send a port, got a transit of process {sender}, which holds none")
        if not is_gone:
            self._transits.add(key)

    def taken(self, sender: ProcId, transit: int, holder: ProcId, *, is_gone: bool) -> bool:
        """Record the arrival of a transit; return False if the channel is over.

        Args:
            sender: Its sender.
            transit: Its number.
            is_gone: Whether the sender has ended, so that it announces nothing more.

        Raises:
            ProtocolError: The transit was taken before.
        """
        if self.is_over:
            return False
        key = (sender, transit, holder)
        if key in self._transits:
            self._transits.discard(key)
        elif not is_gone:
            if key in self._early:
                raise ProtocolError(f"a transit must be taken once, got transit {transit} of process {sender} again")
            if len(self._early) >= limits.EARLY_TRANSITS:
                raise ProtocolError(
                    f"limits.EARLY_TRANSITS ({limits.EARLY_TRANSITS}) transits may be taken before they are told, "
                    "got another"
                )
            self._early.add(key)
        self._units[holder] = self._units.get(holder, 0) + 1
        return True

    def dropped(self, holder: ProcId, units: int) -> None:
        """Take units back.

        Raises:
            ProtocolError: The holder has fewer units.
        """
        if self.is_over:
            return
        has = self._units.get(holder, 0)
        if not 1 <= units <= has:
            raise ProtocolError(f"a holder must give back what it holds, got {units} units of {has}")
        if units < has:
            self._units[holder] = has - units
        else:
            del self._units[holder]
        self._look()

    def gone(self, process: ProcId) -> Collection[ProcId]:
        """Remove a dead process; return the processes to query for ports that they still got from it."""
        self._units.pop(process, None)
        self._early = {key for key in self._early if process not in (key[0], key[2])}
        self._transits = {key for key in self._transits if key[2] != process}
        self._look()
        return sorted({holder for sender, _, holder in self._transits if sender == process})

    def settled(self, sender: ProcId, holder: ProcId) -> None:
        """Drop the transits of a dead process to `holder`: none of them can arrive any more."""
        self._transits = {key for key in self._transits if (key[0], key[2]) != (sender, holder)}
        self._look()

    def _look(self) -> None:
        if not self._units and not self._transits:
            self.is_over = True
            self._early.clear()


# ---- intake ----------------------------------------------------------------------------------------------------------

# The items of one sending process that wait for one receiver, as credits: the receiver's side of a port.


def port_window(capacity: int) -> SendWindow:
    """Return the window of one sending process; with capacity 0 one item may wait to be handed over."""
    return SendWindow(max(capacity, 1), limits.MAILBOX_BYTES, limits.MAILBOX_REPORT_BYTES)


class Intake:
    """Counts items that one process sent and items that were taken."""

    __slots__ = ("_count", "_window")

    def __init__(self, capacity: int) -> None:
        self._window: SendWindow = port_window(capacity)
        self._count = ReceiveCount(max(self._window.messages_max // 2, 1), limits.MAILBOX_REPORT_BYTES)

    def arrived(self, nbytes: int) -> None:
        """Count an item that has arrived.

        Raises:
            ProtocolError: There was no room for it.
        """
        if not self._window.has_room(nbytes):
            raise ProtocolError(
                f"a port must keep its credits: {self._window.messages_max} items may wait, {self._window.waiting} do, "
                f"got another of {nbytes} bytes"
            )
        self._window.sent(nbytes)

    def take(self, nbytes: int) -> None:
        """Count an item that was taken out."""
        self._count.take(nbytes)

    @property
    def is_due(self) -> bool:
        """True when a report to the sender is due."""
        is_full = self._window.waiting >= self._window.messages_max
        return self._count.is_due or (is_full and self._count.has_news)

    def report(self) -> int:
        """Return the total to report to the sender."""
        total = self._count.report()
        self._window.acknowledged(total)
        return total
