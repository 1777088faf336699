"""Base class of all kinds of faults, and the faults under way in a process.

A kind of fault is one class, in the file of its noun (`link_faults.py`, `process_faults.py`, ...). A new kind needs
that class, the method by which a test plans it (beside the class), one test, and one row in docs/testing.md. Chaos
draws it if `KINDS` in `chaos.py` has a row for it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimesh._runtime.actors.cell import Cell
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.host import LaunchRequest
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer
    from trimesh._runtime.values.endpoint_spec import EndpointSpec
    from trimesh._wire.messages import Message
    from trimesh.testing.plans.armed import Armed
    from trimesh.testing.plans.disk_faults import Operation, Touch
    from trimesh.testing.plans.faults import Faults
    from trimesh.testing.plans.name_faults import Lookup
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation

Place = tuple[Hashable, int] | None
"""A member: the key of its process mesh and its rank, for all its incarnations; None for the controller."""

REAL: Final = "real processes"
"""Key of all places over real processes: the rank is the id of a process, so a fault is for one incarnation."""

Direction = Literal["both", "a_to_b", "b_to_a"]
Moment = Literal["now", "start", "end", "reply"]
MOMENTS: Final[tuple[Moment, ...]] = get_args(Moment)

Heal = Callable[[], None]


class UnsupportedFault(NotImplementedError):
    """The back end of this test cannot have this fault."""


@attrs.frozen
class Where:
    """Members that a fault is for.

    Attributes:
        text: Their name in reports, as `w[gpus=2]`.
        places: Their processes.
    """

    text: str
    places: tuple[Place, ...]


class Fault(ABC):
    """One kind of fault. An instance is a value, frozen and picklable: its attributes are its parameters.

    `simulated` or `real` is called once, in the task of the test, when the fault is planned; a run that leaves the
    fault out (`--mesh-leave-out`) calls neither. A kind acts at once, or it calls `run.begin(planned)`: from then on
    the methods named like sites are called whenever execution passes the site. `run.arm(planned, places)` reaches real
    processes, and calls `armed` in each of them. The defaults refuse the back end, or do nothing.

    - *It awaits nothing*: all methods are plain functions, called by tasks of the runtime. Work that takes time is
      returned (`dispatch`, `moving`), or is a task of the run (`Simulation.start_soon`). Only `armed` may block, and
      then it blocks its whole process.
    - *It restores what it has changed*: `simulated`, `real` and `armed` return a function for that. `faults.heal()`
      calls it, at the latest at the end of the test, possibly twice, and also after the end of the processes. Return
      `healed` for a fault that is over at once, or ends by itself.
    - *It reports each time that it happens*: `run.fire(planned.index, site, where)`, or `active.fire(site, where)`. A
      planned fault that `is_certain` and does not happen fails the test.
    - *It draws random numbers from* `run.draw(purpose, planned)` alone, so that a seed gives the same run again.
    """

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str:
        """Return a short text, for reports, traces and the summary of a shrunk failure."""

    @property
    def is_certain(self) -> bool:
        """True if it must happen in every run that plans it."""
        return True

    @property
    def is_drawn(self) -> bool:
        """True if a seed decides its strength."""
        return False

    @property
    def fails_call(self) -> bool:
        """True if a call changed by `dispatch` fails because of it: the oracle expects the error."""
        return False

    @property
    def loses_link(self) -> bool:
        """True if a call changed by `dispatch` loses its link: the oracles expect no answer."""
        return False

    # ---- back ends -------------------------------------------------------------------------------------------

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        """Cause or begin it in a simulation.

        Raises:
            UnsupportedFault: A simulation cannot have it.
        """
        del run, planned
        raise UnsupportedFault(f'a simulation cannot have this fault: run on the back end "proc" or "net", got {self}')

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        """Cause or begin it in real processes, their links or hosts.

        Raises:
            UnsupportedFault: They cannot have it, or were not armed.
        """
        del run, planned
        raise UnsupportedFault(f'real processes cannot have this fault: run on the back end "sim", got {self}')

    def armed(self, process: Armed, index: int) -> Heal:
        """Cause it in this real process; by default, begin it at the sites of the process."""
        return process.faults.begin(index, self)

    # ---- sites, see `Sites` ----------------------------------------------------------------------------------

    def received(self, active: ActiveFault, place: Place, proc: Proc, peer: Peer, message: Message) -> bool:
        """Return False to lose a message that arrived at a process, and its link with it."""
        del active, place, proc, peer, message
        return True

    def computing(self, active: ActiveFault, place: Place) -> float:
        """Return the seconds for which a process computes before an endpoint that starts there now."""
        del active, place
        return 0.0

    def dispatch(
        self, active: ActiveFault, place: Place, cell: Cell, call: IncomingCall, spec: EndpointSpec
    ) -> EndpointSpec:
        """Return the endpoint to run for a call that starts now, instead of `spec`."""
        del active, place, cell, call
        return spec

    def answered(self, active: ActiveFault, place: Place) -> None:
        """Observe that an actor of a process has answered a call."""
        del active, place

    def launching(self, active: ActiveFault, number: int, request: LaunchRequest) -> LaunchRequest:
        """Return the request to launch; `number` counts the starts of the process since the fault began.

        Raises:
            SpawnError: The fault prevents the launch.
        """
        del active, number
        return request

    def linking(self, active: ActiveFault, place: Place) -> None:
        """Allow a process to make its end of a link; called in simulations only.

        Raises:
            OSError: The fault refuses it.
        """
        del active, place

    def moving(self, active: ActiveFault, place: Place) -> tuple[float, BaseException | None] | None:
        """Return delay in seconds and error of the next transfer of a process; usually None."""
        del active, place
        return None

    def touching(self, active: ActiveFault, place: Place, operation: Operation) -> Touch | None:
        """Return what the fault does to an operation on a file of an actor; usually None."""
        del active, place, operation
        return None

    def operating(self, active: ActiveFault, place: Place) -> AbstractContextManager[Any] | None:
        """Return a context in which a rank of a mesh of tensors runs operators; usually None."""
        del active, place
        return None

    def resolving(self, active: ActiveFault, place: Place, name: str) -> Lookup | None:
        """Return what the fault does to the lookup of the name of a host; usually None."""
        del active, place, name
        return None


@attrs.frozen
class MemberFault(Fault):
    """A fault of members. By default it acts at the sites of their processes until it is healed.

    Attributes:
        where: The members.
    """

    where: Where

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        return run.begin(planned)

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        return run.arm(planned, self.where.places)


@attrs.frozen(eq=False)
class OfMembers:
    """Members; their fault is chosen next."""

    _faults: Faults
    _where: Where


# ---- faults that are under way ---------------------------------------------------------------------------------------


@attrs.define(eq=False)
class ActiveFault:
    """A fault that has begun at the sites of a process, or of all processes of a simulation.

    Attributes:
        index: Its number in the plan.
        fault: The planned fault.
        faults: All faults that have begun there.
        starts_before: Number of process starts before it began.
        counts: Events that it could have hit so far, by member.
        broken: Processes that stay faulty until they end.
    """

    index: int
    fault: Fault
    faults: ActiveFaults
    starts_before: int
    counts: dict[Hashable, int] = attrs.field(factory=dict[Hashable, int])
    broken: set[Place] = attrs.field(factory=set[Place])

    def hits(self, member: Hashable, nth: int, times: int = 1) -> bool:
        """Count one more event of a member; return whether it is one of the `times` from the `nth` on."""
        with self.faults.counting:
            count = self.counts[member] = self.counts.get(member, 0) + 1
        return nth <= count < nth + times

    def fire(self, site: str, where: str) -> None:
        """Report that it happens now."""
        self.faults.on_fired(self.index, site, where)

    def fire_at(self, site: str, place: Place) -> None:
        """Report that it happens now to a process."""
        self.fire(site, self.faults.name_of(place))


@attrs.define(eq=False)
class ActiveFaults:
    """All faults that have begun in one process, or in a simulation; its sites call them in the order of planning.

    Attributes:
        on_fired: Called with number, site and place of a fault when it happens.
        name_of: Returns the name of a process in `fault_log`.
        kill: Kills the process of a place, which is the running one; nothing that it sends afterwards arrives.
        active: Faults that have begun and are not healed.
        spend: Blocks code of a process for some seconds, or a part of them; returns for how many.
        counting: Held while events are counted, also by threads.
        is_reported: Waits until the test knows that a fault happened, which a broken link could lose.
    """

    on_fired: Callable[[int, str, str], None]
    name_of: Callable[[Place], str]
    kill: Callable[[Place], None] = lambda _: None
    active: list[ActiveFault] = attrs.field(factory=list[ActiveFault])
    spend: Callable[[Place, float], float] = attrs.field(default=lambda _, seconds: _block(seconds))
    counting: threading.Lock = attrs.field(factory=threading.Lock)
    is_reported: Callable[[int], Awaitable[None]] = attrs.field(default=lambda _: _at_once())
    _starts: int = 0

    def begin(self, index: int, fault: Fault) -> Heal:
        """Consult a fault at the sites from now on; return a function that ends that."""
        one = ActiveFault(index, fault, self, self._starts)
        self.active.append(one)
        return lambda: self.active.remove(one) if one in self.active else None

    def received(self, place: Place, proc: Proc, peer: Peer, message: Message) -> bool:
        return all(one.fault.received(one, place, proc, peer, message) for one in self.active)

    def computing(self, place: Place) -> float:
        seconds = 0.0  # not by sum(), which rounds otherwise since Python 3.12: traces would differ
        for one in self.active:
            seconds += one.fault.computing(one, place)
        return seconds

    def dispatch(self, place: Place, cell: Cell, call: IncomingCall, spec: EndpointSpec) -> EndpointSpec:
        for one in self.active:
            spec = one.fault.dispatch(one, place, cell, call, spec)
        return spec

    def answered(self, place: Place) -> None:
        for one in [*self.active]:
            one.fault.answered(one, place)

    def launching(self, request: LaunchRequest) -> LaunchRequest:
        self._starts += 1
        for one in self.active:
            request = one.fault.launching(one, self._starts - one.starts_before, request)
        return request

    def linking(self, place: Place) -> None:
        for one in self.active:
            one.fault.linking(one, place)

    def touching(self, place: Place, operation: Operation) -> Touch | None:
        """Return what the first fault that hits an operation on a file does to it."""
        for one in self.active:
            touch = one.fault.touching(one, place, operation)
            if touch is not None:
                return touch
        return None

    def operating(self, place: Place) -> AbstractContextManager[Any] | None:
        """Return a context in which a rank of a mesh of tensors runs operators; None without a fault."""
        found = [inside for one in self.active if (inside := one.fault.operating(one, place)) is not None]
        if not found:
            return None
        stack = ExitStack()
        for inside in found:
            stack.enter_context(inside)
        return stack

    def ended(self, place: Place) -> None:
        """Forget that a simulated process was broken: another one may have its place."""
        for one in self.active:
            one.broken.discard(place)

    def resolving(self, place: Place, name: str) -> list[Lookup]:
        """Return what faults do to the lookup of a name; all of it happens."""
        found = (one.fault.resolving(one, place, name) for one in self.active)
        return [lookup for lookup in found if lookup is not None]

    def moving(self, place: Place) -> Callable[[], Awaitable[None]] | None:
        hits = [hit for one in self.active if (hit := one.fault.moving(one, place)) is not None]
        if not hits:
            return None
        error = next((error for _, error in hits if error is not None), None)
        return partial(raise_after, sum(seconds for seconds, _ in hits), error)


BLOCK_SECONDS: Final = 0.01
"""Longest time for which a hanging operator does not see that it is healed."""


def _block(seconds: float) -> float:
    part = min(seconds, BLOCK_SECONDS)
    time.sleep(part)
    return part


async def _at_once() -> None:
    """Return without a checkpoint: a simulation knows already."""


class MessageCount:
    """Number of messages that the process of the test has received, on which faults of chaos wait."""

    __slots__ = ("_awaited", "_count", "_has_come")

    def __init__(self) -> None:
        self._count = self._awaited = 0
        self._has_come = trio.Event()

    def add(self) -> None:
        self._count += 1
        if self._count == self._awaited:
            self._has_come.set()

    async def wait(self, number: int) -> None:
        """Wait until `number` more have come; one task at a time."""
        self._awaited, self._has_come = self._count + number, trio.Event()
        await self._has_come.wait()


async def raise_after(seconds: float, error: BaseException | None) -> None:
    """Sleep, then raise a planned error, if there is one."""
    await trio.sleep(seconds)
    if error is not None:
        raise copy(error)  # raised twice, one exception would keep the traceback of the first time


def healed() -> None:
    """Do nothing: the heal function of faults that end at once or by themselves."""


def once(heal: Heal) -> Heal:
    """Return a function that calls a heal function the first time only."""
    is_healed = False

    def heal_once() -> None:
        nonlocal is_healed
        if not is_healed:
            is_healed = True
            heal()

    return heal_once


def all_healed(*heals: Heal) -> Heal:
    """Return a function that calls several heal functions."""

    def heal() -> None:
        for one in heals:
            one()

    return heal


# ---- checks of parameters --------------------------------------------------------------------------------------------


def checked_one_of(what: str, value: Any, known: Sequence[str]) -> Any:
    """Return a value that is one of those known.

    Raises:
        ValueError: It is not.
    """
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {value!r}")
    return value


def checked_direction(direction: Direction) -> Direction:
    """Return a direction.

    Raises:
        ValueError: There is no such direction.
    """
    checked: Direction = checked_one_of("a direction", direction, get_args(Direction))
    return checked


def checked_error(error: BaseException | type[BaseException]) -> BaseException:
    """Return an exception to raise; a type is called without arguments."""
    return error() if isinstance(error, type) else error


def checked_count(name: str, value: int) -> int:
    """Return a number that counts from 1.

    Raises:
        ValueError: It is smaller, or no whole number.
    """
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    return value


def checked_amount(name: str, value: float, *, most: float = float("inf")) -> float:
    """Return an amount that is positive and at most `most`.

    Raises:
        ValueError: It is not.
    """
    if not 0 < value <= most:
        raise ValueError(f"{name} must be above 0 and at most {most:g}, got {value!r}")
    return float(value)
