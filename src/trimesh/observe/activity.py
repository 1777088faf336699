"""What each process of a run did between two snapshots of it; PURE."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from trimesh._wire.observed import CallRow, ProcRow
from trimesh.observe.merging import RunSnapshot


class ProcActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One process, and what it did for a while.

    Attributes:
        proc: The process, as the later snapshot has it.
        received, sent: Messages a second, over all its links. What went before the first snapshot is not in them.
        nbytes: Bytes a second, both ways.
        queued, running: Calls that wait in mailboxes of its actors, and that run there.
        oldest: Age of the oldest call to it that is under way, in seconds; 0.0 without one.
    """

    proc: ProcRow
    received: float = 0.0
    sent: float = 0.0
    nbytes: float = 0.0
    queued: int = 0
    running: int = 0
    oldest: float = 0.0


def activity_between(later: RunSnapshot, earlier: RunSnapshot | None = None) -> list[ProcActivity]:
    """Return what each process did between two snapshots, in the order of the later one.

    Args:
        later: The newer one.
        earlier: The older one; without it nothing is known of rates.
    """
    now, before = _counted(later), Counter[tuple[str, str]]() if earlier is None else _counted(earlier)
    seconds = 0.0 if earlier is None else later.taken_at - earlier.taken_at
    queued, running, oldest = Counter[str](), Counter[str](), defaultdict[str, float](float)
    for actor in later.actors:
        queued[actor.proc] += actor.queued
        running[actor.proc] += actor.running
    for call in later.calls:
        oldest[call.proc] = max(oldest[call.proc], call.age)

    def rate(proc: str, what: str) -> float:
        """A link that has gone took its counts with it."""
        return max(0, now[proc, what] - before[proc, what]) / seconds if seconds > 0 else 0.0

    return [
        ProcActivity(
            proc=proc,
            received=rate(proc.id, "received"),
            sent=rate(proc.id, "sent"),
            nbytes=rate(proc.id, "bytes"),
            queued=queued[proc.id],
            running=running[proc.id],
            oldest=oldest[proc.id],
        )
        for proc in later.procs
    ]


def calls_of(seen: RunSnapshot, proc: str) -> list[CallRow]:
    """Return the calls to a process that are under way, oldest first."""
    return [call for call in seen.calls if call.proc == proc]


def _counted(seen: RunSnapshot) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for link in seen.links:
        found[link.proc, "received"] += link.messages_received
        found[link.proc, "sent"] += link.messages_sent
        found[link.proc, "bytes"] += link.bytes_received + link.bytes_sent
    return found
