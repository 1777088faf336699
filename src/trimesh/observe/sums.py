"""Sums over a run at one moment, for its page and its overview in a notebook; PURE."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trimesh._wire.observed import EndpointRow
from trimesh.observe.run_snapshot import ProcActivity, RunSnapshot


class RunSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a run at one moment: a point of the charts. Points from the history have resources only.

    Attributes:
        at: Unix time.
        messages, nbytes: Messages and bytes per second, over all links; None in the first snapshot, as all rates.
        ended: Calls that have ended a second; None if no process counts them (no flight record), as `errors`.
        errors: Calls that have raised, of the actors that live.
        calls, queued: Calls under way, and those of them in mailboxes.
        cpu: Cores in use by all processes.
        gpu: Use of the busiest GPU in percent.
        gpu_memory: Bytes on all GPUs.
        memory: Resident bytes of all processes.
        failed: Number of dead, stuck, silent and stopped processes.
        deaths: Processes that have died, also those that were restarted since.
        p50, p99: Median and 99th percentile of latency in seconds, in the busiest processes; None if no call has
            ended.
    """

    at: float
    messages: float | None = None
    nbytes: float | None = None
    ended: float | None = None
    errors: int | None = None
    calls: int | None = None
    queued: int | None = None
    cpu: float | None = None
    gpu: int = 0
    gpu_memory: int = 0
    memory: int = 0
    failed: int | None = None
    deaths: int | None = None
    p50: float | None = None
    p99: float | None = None


def sum_run(later: RunSnapshot, earlier: RunSnapshot | None, activities: Sequence[ProcActivity]) -> RunSums:
    """Return the sums over a run.

    Args:
        later: Snapshot of the run now.
        earlier: The previous snapshot, for rates.
        activities: What `activity_between` returns for both.
    """
    before = {} if earlier is None else {_counted(row): row.calls for row in earlier.endpoints}
    seconds = 0.0 if earlier is None else max(0.0, later.taken_at - earlier.taken_at)
    ended = sum(max(0, row.calls - before.get(_counted(row), row.calls)) for row in later.endpoints)
    nbytes = sum(one.nbytes for one in activities) / 2  # what one end has sent, the other has received
    return RunSums(
        at=later.taken_at,
        messages=sum(one.sent for one in activities) if seconds else None,
        nbytes=nbytes if seconds else None,
        ended=ended / seconds if seconds and later.endpoints else None,
        errors=sum(row.errors for row in later.endpoints) if later.endpoints else None,
        calls=len(later.calls) + later.cut.get("calls", 0),
        queued=sum(actor.queued for actor in later.actors),
        cpu=round(sum(one.cpu or 0.0 for one in activities), 3) if seconds else None,
        gpu=max((proc.gpu_percent for proc in later.procs), default=0),
        gpu_memory=sum(proc.gpu_memory_bytes for proc in later.procs),
        memory=sum(proc.memory_bytes for proc in later.procs),
        failed=sum(proc.state in ("dead", "stuck", "silent", "stopped") for proc in later.procs),
        deaths=sum(later.happened.get(mesh, {}).get("Died", 0) for mesh in {proc.mesh for proc in later.procs}),
    )


def _counted(row: EndpointRow) -> tuple[str, str, str]:
    return row.proc, row.name, row.endpoint
