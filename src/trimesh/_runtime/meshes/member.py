r"""One child process, at its owner.

    starting --ready--> running --expect()--> stopping --.
        \------------------\--------------------------+--> gone

A process is gone when both its exit report and the end of its link have arrived: everything it sent before it died has
then been read. If one of the two is missing for `limits.EXIT_REPORT_SECONDS`, the other decides. On another host the
wait is longer (`limits.FAR_EXIT_REPORT_SECONDS`), so that the loss of the host arrives first.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._runtime.peers.deaths import ProcDeath, diagnosed, left, stopped
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.system.child import wait_for_news
from trimesh._runtime.system.exits import STOPPED, ExitReport, process_state
from trimesh._runtime.tasks.interrupt import run_to_end
from trimesh._runtime.values.endpoint_spec import MemberInfo
from trimesh._runtime.watch.stacks import StallReport
from trimesh._transport.interface import DownReason, LinkDown
from trimesh.errors import HostLost, LinkLost, Origin, ProcDied, place_name, set_origin
from trimesh.shape.extent import Point

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.host import HostChild


class Member:
    """A child process.

    Attributes:
        proc: The owner's process.
        peer: The child as a peer.
        rank: Its place in its mesh.
        mesh, point: Name of the mesh, and the place as coordinates, in the mesh at its present size.
        host_name, pid: Its machine and process id; this machine and 0 before it is started.
        label: Mesh, coordinates and incarnation for texts.
        on_death: Called once if it ends unasked, or badly when asked, before calls to it raise (rule X3).
        gone: Set when it has ended, for any reason.
        death: Its death, once known; kept for as long as it is a member.
        by: "grace" when it was killed for exceeding the grace, "kill" when the user requested that.
        is_expected: Whether its end was requested; an exit code of 0 does not count as a death then.
        is_killed: Whether its owner has killed it, which does not count as a death either.
        stack_fd: Descriptor, in the child, to which its stack is written; -1 without one. See `watch/stacks`.
        stall: Reports stalls of its Trio loop.
        departure: Outcome of calls to it after it has left its mesh; None before that.
        record: Path of its flight record, on a machine that shares records with this one; "" without one.
    """

    def __init__(
        self,
        proc: Proc,
        peer: Peer,
        rank: int,
        mesh: str,
        point: Point,
        incarnation: int,
        on_death: Callable[[Member, Exception], None],
    ) -> None:
        self.proc = proc
        self.peer = peer
        self.rank = rank
        self.mesh = mesh
        self.point = point
        self.label = place_name(mesh, point) + (f" (incarnation {incarnation})" if incarnation else "")
        self.incarnation = incarnation
        self.on_death = on_death
        self.child: HostChild | None = None
        self.host_name = proc.host_name
        self.pid = 0
        self.gone = trio.Event()
        self.death: ProcDeath | None = None
        self.by: str | None = None
        self.is_expected = False
        self.is_killed = False
        self.stack_fd: int = -1
        self.record = ""
        self.departure: ProcDeath | None = None
        self._report: ExitReport | None = None
        self._down: LinkDown | None = None
        self._is_waiting = False
        self._is_spawner_stopped = False
        self.stall = StallReport(self)

    @property
    def info(self) -> MemberInfo:
        """Description sent in references."""
        return MemberInfo(self.peer.proc_id, self.host_name, self.pid, self.incarnation)

    @property
    def origin(self) -> Origin:
        """Coordinates of its errors."""
        return Origin(self.point, self.mesh, None, None, self.host_name, self.pid or None, self.incarnation)

    @property
    def is_alive(self) -> bool:
        """True until its end is known."""
        return not self.gone.is_set() and self._report is None and self._down is None

    @property
    def is_shown(self) -> bool:
        """True once it has ended and all its output is known to have been shown."""
        return self._report is not None and self._report.is_shown

    def started(self, child: HostChild) -> None:
        """Own the started process; put its link into service."""
        self.child, self.host_name, self.pid = child, child.host_name, child.pid
        self.proc.adopt_link(self.peer.proc_id, child.link)

    @property
    def report_seconds(self) -> float:
        """See `HostChild.report_seconds`; before the start, the value for a process on this host."""
        return limits.EXIT_REPORT_SECONDS if self.child is None else self.child.report_seconds

    def expect_exit(self) -> None:
        """Note that its end was requested: the end does not count as a death."""
        self.is_expected = True

    def departs(self) -> None:
        """Note that it leaves its mesh: from now on calls to it raise `MembershipChanged`, however it ends."""
        self.departure = left(f"{self.label} has left its mesh, which was resized")

    def kill(self, by: str | None = None) -> None:
        """End it, and its process group, at once."""
        self.is_killed = True
        self.by = self.by or by
        if self.child is not None:
            self.child.signal(signal.SIGKILL)

    async def end_by_kill(self) -> None:
        """Kill it at the user's request, and wait until its death is known; it counts like any other death."""
        if self.child is None:
            return  # the previous process has ended, and this one has not started yet
        if self.is_alive:
            self.by = self.by or "kill"
            self.child.signal(signal.SIGKILL)
        await self.gone.wait()

    def exited(self, report: ExitReport) -> None:
        self._report = report
        self._look()

    def link_lost(self, down: LinkDown) -> None:
        """Handle the loss of the link. A live process without a link is killed."""
        self._down = down
        is_useless = down.reason in (DownReason.LEASE, DownReason.PROTOCOL)
        if is_useless and self._report is None and self.child is not None:
            self.child.signal(signal.SIGKILL)
        self._look()

    def _look(self) -> None:
        if self.gone.is_set():
            return
        if self._report is not None and self._down is not None:
            if self.is_expected and not self._report.is_known and self.child is not None and self.child.loss is None:
                self.proc.nursery.start_soon(self._finish_unreported)
            else:
                self._finish()
        elif not self._is_waiting:
            self._is_waiting = True
            self.proc.nursery.start_soon(self._wait_for_the_other)

    @trio.lowlevel.enable_ki_protection
    async def _wait_for_the_other(self) -> None:
        seconds = self.report_seconds
        if self._down is not None and self.is_expected and self.child is not None:
            # Wait as long as on one host; by then the reason for the missing report may be known.
            await wait_for_news(self.gone.wait, limits.EXIT_REPORT_SECONDS)
            await self._ask_for_spawner()
            seconds = 0.0 if self._is_spawner_stopped else seconds - limits.EXIT_REPORT_SECONDS
        await wait_for_news(self.gone.wait, seconds)
        if not self.gone.is_set():
            if self._report is None and self.child is not None:
                self.child.signal(signal.SIGKILL)
            self._finish()

    @trio.lowlevel.enable_ki_protection
    async def _finish_unreported(self) -> None:
        """Finish it as ended on request, unless its spawner failed to report."""
        await self._ask_for_spawner()
        if not self.gone.is_set():
            self._finish()

    async def _ask_for_spawner(self) -> None:
        if self.child is not None and not self.gone.is_set():
            with trio.CancelScope(shield=True), trio.move_on_after(limits.OBSERVE_STATE_SECONDS):
                self._is_spawner_stopped = await self.child.spawner_state() in STOPPED

    def _finish(self) -> None:
        self.gone.set()
        report = self._report
        is_clean = report is None or not report.is_known or report.exit_code == 0
        is_as_asked = self.is_expected and is_clean and not self._is_spawner_stopped
        if self.is_killed or self.by == "grace" or is_as_asked:
            self.death = stopped(f"{self.label} has been stopped")
        else:
            self.death = self._diagnose()
            error = self.death()
            set_origin(error, self.origin)
            self.on_death(self, error)
        self.death = self.departure or self.death
        self.proc.declare_gone(self.peer, self.death)

    def _diagnose(self) -> ProcDeath:
        loss = None if self.child is None else self.child.loss
        if loss is not None:
            return ProcDeath(loss.text, HostLost, self._report, loss=loss)
        down = self._down
        if down is not None and down.reason is DownReason.PROTOCOL:
            return ProcDeath(f"the link to {self.label} was lost: {down.detail}", LinkLost)
        if self._is_spawner_stopped:
            seconds = f"limits.EXIT_REPORT_SECONDS ({limits.EXIT_REPORT_SECONDS:g} s)"
            text = (
                f"its end was requested, and the outcome is unknown: its spawner is stopped, and silent for {seconds}"
            )
            return ProcDeath(text, reason="lost", by=self.by, record=self._record_left())
        is_stopped = down is not None and down.reason is DownReason.LEASE
        silent = "" if not is_stopped or self.child is None else self.child.lease
        return diagnosed(
            self.label, self._report, silent=silent, by=self.by, note=self._remains(), record=self._record_left()
        )

    def _remains(self) -> str:
        """Return a clause for texts if it survives even SIGKILL, "" otherwise: only the kernel can end it (Z08)."""
        if (self._report is not None and self._report.is_known) or (state := process_state(self.pid)) in ("", "Z", "X"):
            return ""
        return f"; pid {self.pid} does not end even by SIGKILL (state {state}) and is left behind"

    def _record_left(self) -> str:
        """Return the file of its flight record, "" if there is none: it died early, or is on another machine."""
        return self.record if self.record and Path(self.record).exists() else ""

    def killed_for_grace(self, grace: float) -> ProcDied:
        """Return the error for the block: clean-up exceeded `grace` seconds."""
        note = f" (its clean-up took longer than grace={grace:g} s){self._remains()}"
        error = diagnosed(self.label, self._report, by="grace", note=note, record=self._record_left())()
        assert isinstance(error, ProcDied)
        set_origin(error, self.origin)
        return error


# ---- last steps of ending processes ----------------------------------------------------------------------------


async def wait_gone(members: Sequence[Member], deadline: float) -> None:
    """Wait until the started members have ended, at most until `deadline` (Trio time)."""
    with trio.CancelScope(deadline=deadline):
        for member in members:
            if member.child is not None:
                await member.gone.wait()


async def discard(members: Sequence[Member]) -> None:
    """Kill some members and wait until they are gone, uninterrupted; a Ctrl-C is raised afterwards."""
    for member in members:
        member.kill()
    _, interrupt = await run_to_end(lambda: wait_gone(members, trio.current_time() + limits.KILL_SECONDS))
    if interrupt is not None:
        raise interrupt


async def kill_silent(members: Sequence[Member]) -> None:
    """Kill members that would not react to a request to stop, one after the other."""
    for member in members:
        if member.child is not None and member.is_alive:
            member.child.signal(signal.SIGKILL)
            await member.gone.wait()


async def kill_wanted(members: Sequence[Member]) -> None:
    """Kill some members at the user's request, and wait until their deaths are known."""
    await trio.lowlevel.checkpoint()
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.end_by_kill)


async def force(members: Sequence[Member]) -> None:
    """End members whose grace has run out, all at once: SIGTERM, then SIGKILL."""
    for member in members:
        member.expect_exit()
        member.by = "grace"
        if member.child is not None:
            member.child.signal(signal.SIGTERM)
    await wait_gone(members, trio.current_time() + limits.TERM_SECONDS)
    for member in members:
        if not member.gone.is_set():
            member.kill("grace")
    await wait_gone(members, trio.current_time() + limits.KILL_SECONDS)
