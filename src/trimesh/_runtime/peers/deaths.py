"""How other processes have ended, for as long as a process may ask.

DT-1 of the last `limits.DEATHS` the whole diagnosis is remembered, of the last `limits.GONE_PEERS` that they are gone.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from trimesh import limits
from trimesh.errors import ConnectionLost, LinkLost, MembershipChanged, MeshStopped, ProcDied
from trimesh.ids import ProcId


class DeathOf(Protocol):
    """Makes the error of one call to a process that is gone."""

    def __call__(self, *, maybe_executed: bool) -> Exception:
        """Return the error; `maybe_executed` says whether the call may have run."""
        ...


class Deaths:
    """The deaths that one process has heard of."""

    def __init__(self) -> None:
        self._of: dict[ProcId, DeathOf] = {}
        self._diagnosed: deque[ProcId] = deque()

    def __len__(self) -> int:
        return len(self._of)

    def add(self, proc_id: ProcId, death: DeathOf) -> None:
        """Remember a death, forget the oldest."""
        self._of[proc_id] = death
        self._diagnosed.append(proc_id)
        if len(self._diagnosed) > limits.DEATHS:
            self._of[self._diagnosed.popleft()] = ended_long_ago
        if len(self._of) > limits.GONE_PEERS:
            del self._of[next(iter(self._of))]

    def of(self, proc_id: ProcId) -> DeathOf | None:
        """Return what makes the errors of calls to a process that is gone; None if it is not, or too long ago."""
        return self._of.get(proc_id)


def ended_long_ago(*, maybe_executed: bool) -> Exception:
    """Return the error of a call to a process whose diagnosis has been forgotten."""
    text = f"the process died before the last {limits.DEATHS} that did; how is not remembered"
    return ProcDied(text, maybe_executed=maybe_executed, reason="lost")


def died(message: str, **details: object) -> DeathOf:
    """Return what makes `ProcDied` errors with `details`."""

    def make(*, maybe_executed: bool) -> Exception:
        return ProcDied(message, maybe_executed=maybe_executed, **details)  # type: ignore[arg-type]

    return make


def stopped(message: str) -> DeathOf:
    """Return what makes the `MeshStopped` errors of a process that has ended as it should."""

    def make(*, maybe_executed: bool) -> Exception:
        return MeshStopped(message)

    return make


def left(message: str) -> DeathOf:
    """Return what makes the `MembershipChanged` errors of a process that was taken out of its mesh."""

    def make(*, maybe_executed: bool) -> Exception:
        return MembershipChanged(message, maybe_executed=maybe_executed)

    return make


def link_lost(message: str) -> DeathOf:
    """Return what makes the `LinkLost` errors of a process that broke the protocol."""

    def make(*, maybe_executed: bool) -> Exception:
        return LinkLost(message)

    return make


def connection_lost(message: str) -> DeathOf:
    """Return what makes the `ConnectionLost` errors of a process of another program that is gone."""

    def make(*, maybe_executed: bool) -> Exception:
        return ConnectionLost(message)

    return make
