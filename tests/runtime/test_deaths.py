"""How a process has ended, and the errors that are made of that."""

from __future__ import annotations

from typing import Any

from tests.rows import rows

from trimesh import HostLost, LinkLost, MembershipChanged, MeshStopped, ProcDied, limits
from trimesh._runtime.peers.deaths import ProcDeath, diagnosed, left, stopped
from trimesh._runtime.system.exits import ExitReport
from trimesh._runtime.system.records import LostHost

KILLED = ExitReport(1, 77, None, 9, oom_killed=False, stderr_tail="", ended_at=0)
OOM = ExitReport(1, 77, None, 9, oom_killed=True, stderr_tail="", ended_at=0)
FAILED = ExitReport(1, 77, 3, None, oom_killed=False, stderr_tail="ValueError: no such file\n", ended_at=0)
UNKNOWN = ExitReport.unknown(1)
SILENT = f"stopped for longer than limits.LEASE_SECONDS ({limits.LEASE_SECONDS:g} s)"


@rows(
    ("report", "options", "text", "reason"),
    [
        (KILLED, {}, "procs was killed by SIGKILL (pid 77)", "killed"),
        (OOM, {}, "procs was killed by SIGKILL (out of memory) (pid 77)", "killed"),
        (FAILED, {}, "procs ended with exit code 3 (pid 77); last output: ValueError: no such file", "exited"),
        (KILLED, {"note": " (why)", "by": "grace"}, "procs was killed by SIGKILL (pid 77) (why)", "killed"),
        (None, {}, "procs was lost; no exit report arrived", "lost"),
        (UNKNOWN, {"note": "; it is there"}, "procs was lost; no exit report arrived; it is there", "lost"),
        (UNKNOWN, {"silent": "LEASE_SECONDS"}, f"procs {SILENT}; no exit report arrived", "stopped"),
        (KILLED, {"silent": "LEASE_SECONDS"}, f"procs {SILENT}, then ended (pid 77)", "stopped"),
    ],
)
def test_diagnosis_of_an_exit_report(
    report: ExitReport | None, options: dict[str, Any], text: str, reason: str
) -> None:
    error = diagnosed("procs", report, **options)(maybe_executed=False)

    assert isinstance(error, ProcDied)
    assert (str(error), error.reason, error.by) == (text, reason, options.get("by"))
    assert error.signal == (report.signal if report is not None else None)
    assert not error.maybe_executed


def test_death_by_the_loss_of_a_host_is_that_loss() -> None:
    lost = ExitReport.unknown(1, lost_host=LostHost("far", "agent exit", "its agent has ended", hosts=2, rank=1))

    error = diagnosed("procs", lost)()

    assert isinstance(error, HostLost)
    assert (error.host, error.reason, error.point) == ("far", "agent exit", {"hosts": 1})


def test_calls_to_the_same_process_get_errors_of_their_own() -> None:
    cause = OSError("no memory")
    death = ProcDeath("the runtime has failed", RuntimeError, cause=cause)

    first, second = death(), death()

    assert first is not second
    assert first.__cause__ is second.__cause__ is cause


def test_end_that_was_asked_for_is_no_death() -> None:
    gone = left("procs has left")(maybe_executed=False)

    assert isinstance(gone, MembershipChanged)
    assert not gone.maybe_executed
    assert type(stopped("procs has been stopped")()) is MeshStopped
    assert isinstance(ProcDeath("the link was lost", LinkLost)(), LinkLost)
