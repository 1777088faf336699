r"""Who holds the port of one channel: what decides when its receiver has seen the last sender.

The home of a channel keeps `Holders`, every process that has a port of it a `Share`:

    lender ----Lent----> home        a message that carries the port is about to leave
    lender --(message)-> holder      and does
    holder --Accepted--> home        the loan is over, the holder has one unit more
    holder ---Dropped--> home        its last port object is gone: all units that it took so far

HO-1 Messages of one process to another arrive in the order in which they were sent; nothing else is ordered. So
     `Accepted` may overtake `Lent`; the loan is then remembered as one that has been taken early.
HO-2 A process lends only what it holds, so what it dropped comes after what it lent: from the first unit on there is
     always a unit or a loan for each port that somebody has, or may yet get, and the channel does not end early.
HO-3 A process that is gone holds nothing, gets nothing, and lends nothing that has not been told. What it has lent to a
     living process may still be read there: that process is asked (`Settle`), and answers when nothing can come any
     more. So each loan ends, and the channel does.
HO-4 Once over, over: who takes a port after that is told that it leads nowhere.
"""

from __future__ import annotations

from collections.abc import Collection

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

_Loan = tuple[ProcId, int, ProcId]
"""Lender, its number for the loan, holder: a cast of one message to many is one loan for each."""


class Share:
    """What one process holds of one channel.

    Attributes:
        references: Port objects, and undecoded messages that carry one.
        units: Loans taken since the first reference.
    """

    __slots__ = ("references", "units")

    def __init__(self) -> None:
        self.references = 0
        self.units = 0

    def take(self) -> None:
        """Count a loan; the message that carried it is a reference."""
        self.references += 1
        self.units += 1

    def refer(self) -> None:
        """Count one port object more."""
        assert self.units, "a port is made of a unit"
        self.references += 1

    def release(self) -> int:
        """Count one reference less; return the units to give back, 0 while others are left."""
        assert self.references, "each reference is released once"
        self.references -= 1
        if self.references:
            return 0
        units, self.units = self.units, 0
        return units


class Holders:
    """All holders of one channel, as its home knows them.

    Attributes:
        is_over: Whether there are none any more, and never will be.
    """

    __slots__ = ("_early", "_loans", "_units", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self._units: dict[ProcId, int] = {}
        self._loans: set[_Loan] = set()
        self._early: set[_Loan] = set()

    def holding(self) -> Collection[ProcId]:
        """Return the processes that hold a unit."""
        return self._units.keys()

    def holds(self, holder: ProcId) -> bool:
        """Return whether a process holds a unit."""
        return holder in self._units

    def begin(self, holder: ProcId) -> None:
        """Give the first unit to the process that opens the channel."""
        assert not self._units
        self._units[holder] = 1

    def lent(self, lender: ProcId, loan: int, holder: ProcId, *, is_gone: bool) -> None:
        """Take the news of a loan.

        Args:
            lender: Who sends the message.
            loan: Its number.
            holder: Where to.
            is_gone: Whether the holder has ended, so that it gets nothing.

        Raises:
            ProtocolError: The loan is known, or the lender holds nothing that it could lend.
        """
        if self.is_over:
            return
        key = (lender, loan, holder)
        if key in self._early:
            self._early.discard(key)
            return
        if key in self._loans:
            raise ProtocolError(f"a loan must have a new number, got {loan} of process {lender} again")
        if lender not in self._units:
            raise ProtocolError(f"only a holder may lend a port, got a loan of process {lender}, which holds none")
        if not is_gone:
            self._loans.add(key)

    def taken(self, lender: ProcId, loan: int, holder: ProcId, *, is_gone: bool) -> bool:
        """Take the news of a message that has come; return False when the channel is over.

        Args:
            lender: Who has sent it.
            loan: Its number.
            holder: Where it came.
            is_gone: Whether the lender has ended, so that it tells nothing any more.

        Raises:
            ProtocolError: The loan was taken before.
        """
        if self.is_over:
            return False
        key = (lender, loan, holder)
        if key in self._loans:
            self._loans.discard(key)
        elif not is_gone:
            if key in self._early:
                raise ProtocolError(f"a loan must be taken once, got loan {loan} of process {lender} again")
            if len(self._early) >= limits.EARLY_LOANS:
                raise ProtocolError(
                    f"limits.EARLY_LOANS ({limits.EARLY_LOANS}) loans may be taken before they are told, got another"
                )
            self._early.add(key)
        self._units[holder] = self._units.get(holder, 0) + 1
        return True

    def dropped(self, holder: ProcId, units: int) -> None:
        """Take units back.

        Raises:
            ProtocolError: The holder has not that many.
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
        """Forget a process that has ended; return those to be asked what they still got from it."""
        self._units.pop(process, None)
        self._early = {key for key in self._early if process not in (key[0], key[2])}
        self._loans = {key for key in self._loans if key[2] != process}
        self._look()
        return sorted({holder for lender, _, holder in self._loans if lender == process})

    def settled(self, lender: ProcId, holder: ProcId) -> None:
        """Forget what a process that is gone had lent to `holder`: nothing of it will come any more."""
        self._loans = {key for key in self._loans if (key[0], key[2]) != (lender, holder)}
        self._look()

    def _look(self) -> None:
        if not self._units and not self._loans:
            self.is_over = True
            self._early.clear()
