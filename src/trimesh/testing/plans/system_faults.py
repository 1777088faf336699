"""System faults: process starts, memory and descriptor limits, buffer transfers."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import TYPE_CHECKING, Final, Literal, get_args

import attrs
import msgspec

from trimesh._runtime.peers.host import LaunchRequest
from trimesh._runtime.system.records import WorkerConfig
from trimesh.errors import SpawnError, place_name
from trimesh.testing.plans.endpoint_faults import effect_text
from trimesh.testing.plans.fault import (
    ActiveFault,
    Fault,
    Heal,
    MemberFault,
    OfMembers,
    Place,
    all_healed,
    checked_amount,
    checked_count,
    checked_error,
    checked_one_of,
    healed,
)

if TYPE_CHECKING:
    from trimesh.testing.plans.faults import Faults
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.real.run import RealExecutor
    from trimesh.testing.simulated.simulation import Simulation

Stage = Literal["launch", "handshake"]
Refusal = Literal["ENOSPC", "EMFILE"]

# ---- starts ----------------------------------------------------------------------------------------------------------

STILLBORN: Final = f"{__name__}:end_unheard"
"""Entry point of a process that ends before its first message."""


def end_unheard(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """End as a worker whose set-up failed does: with a line on stderr, and no message to its owner."""
    del config
    for one in (link, broker):
        one.close()
    for pidfd in lifelines:
        os.close(pidfd)
    sys.stderr.write("a planned fault: it ended before its first message\n")
    return 1


@attrs.frozen
class SpawnFault(Fault):
    """The nth process that is started from now on fails; over real processes, of those that the test itself starts.

    Attributes:
        stage: "launch" (there is no process) or "handshake" (it ends before its first message).
    """

    nth: int
    stage: Stage

    def __str__(self) -> str:
        return f"spawn nth={self.nth}: {self.stage}"

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        run.begin(planned)
        return healed

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        run.begin(planned)
        return healed

    def launching(self, active: ActiveFault, number: int, request: LaunchRequest) -> LaunchRequest:
        if number != self.nth or request.entry == STILLBORN:
            return request
        where = place_name(request.mesh, request.whole.point(request.rank))
        active.fire("spawn", where)
        if self.stage == "launch":
            raise SpawnError(f"{where} could not be started: a planned fault ({self})")
        return msgspec.structs.replace(request, entry=STILLBORN)


@attrs.frozen(eq=False)
class OfSpawn:
    """The start of a process."""

    _faults: Faults
    _nth: int

    def fails(self, stage: Stage) -> None:
        """Make it fail: "launch" (there is no process) or "handshake" (it ends before its first message)."""
        self._faults.plan(SpawnFault(self._nth, checked_one_of("the stage", stage, get_args(Stage))))


# ---- memory and descriptors ------------------------------------------------------------------------------------------


@attrs.frozen
class ResourceFault(MemberFault):
    """The system refuses resources for links of some processes, `times` times from the `nth` on, counted for each.

    Attributes:
        error: "ENOSPC": no shared memory, for a ring or a segment. "EMFILE": no descriptor, for one of these or one
            that a peer passes. In a simulation only the making of a link can fail so.
    """

    error: Refusal
    nth: int = 1
    times: int = 1

    def __str__(self) -> str:
        return f"resources {self.where.text} nth={self.nth}: fails({self.error})"

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        ids = [run.id_of(place) for place in run.checked_armed(self.where.places)]
        rows = [run.table.refuse(self.error, one, self.nth, self.times) for one in ids]
        return run.in_table(rows, planned, "resources", self.where.text)

    def linking(self, active: ActiveFault, place: Place) -> None:
        if place in self.where.places and active.hits(place, self.nth, self.times):
            active.fire("resources", self.where.text)
            code = getattr(errno, self.error)
            raise OSError(code, os.strerror(code))


class OfResources(OfMembers):
    """Shared memory and descriptors, which the system may refuse."""

    def fails(self, error: Refusal, *, nth: int = 1, times: int = 1) -> None:
        """Make the system refuse them: for a link, a descriptor that a peer passes, a segment of a large body.

        Args:
            error: "ENOSPC": no shared memory. "EMFILE": no descriptor.
            nth: Number of the first system call that could fail so, counted for each member from now on.
            times: Number of such calls from there on.
        """
        checked_one_of("the error", error, get_args(Refusal))
        nth, times = checked_count("nth", nth), checked_count("times", times)
        self._faults.plan(ResourceFault(self._where, error, nth, times))


# ---- transfers of buffers --------------------------------------------------------------------------------------------


@attrs.frozen
class TransferFault(MemberFault):
    """From the `nth` transfer on, counted for each process since this was planned, `times` transfers misbehave.

    A transfer is a read, a write or an atomic operation of a buffer, also inside a publication.

    Attributes:
        error: Exception raised instead of the transfer, or None.
        seconds: Delay of the transfer.
    """

    nth: int = 1
    times: int = 1
    error: BaseException | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"transfer {self.where.text} nth={self.nth}: {effect_text(self.seconds, self.error)}"

    def real(self, run: RealExecutor, planned: Planned) -> Heal:
        others = tuple(place for place in self.where.places if place is not None)
        heal = run.arm(planned, others)
        return heal if len(others) == len(self.where.places) else all_healed(heal, run.begin(planned))

    def moving(self, active: ActiveFault, place: Place) -> tuple[float, BaseException | None] | None:
        if place not in self.where.places or not active.hits(place, self.nth, self.times):
            return None
        active.fire_at("transfer", place)
        return self.seconds, self.error


@attrs.frozen(eq=False)
class OfTransfers(OfMembers):
    """Transfers of buffers; their fault is chosen next."""

    _nth: int
    _times: int

    def raises(self, error: BaseException | type[BaseException]) -> None:
        """Make them raise `error` instead of transferring."""
        self._faults.plan(TransferFault(self._where, self._nth, self._times, error=checked_error(error)))

    def delays(self, seconds: float) -> None:
        """Delay them; a waiting task can be cancelled meanwhile."""
        seconds = checked_amount("seconds", seconds)
        self._faults.plan(TransferFault(self._where, self._nth, self._times, seconds=seconds))
